"""Where the hosts of a job meet: a store that listens on one address.

torch's own store listens on every interface of its host, whatever address it is told to have. Here a socket is bound first, and
torch is handed the socket. Whoever can bind the address of the endpoint is its host; all others are guests:

    endpoint HOST:PORT     its address is one of this machine's, and the port is free        -> this agent holds the store
                           else                                                               -> it connects to it
    address of a host      what this machine is called where it talks to the endpoint        -> address_towards

`register` makes the rendezvous known to torch's launcher as `--rdzv-backend bound`.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from meshwright.core.errors import InputError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "bound"
LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What tells torch's backends which interface to listen on."""
ANY_PORT = 9
"""Nothing is sent to it: a datagram socket that is connected knows which of its addresses it would send from."""
STORE_SECONDS = 60
PATIENCE = ("join", "last_call", "close", "heartbeat")
KEEP_ALIVE_SECONDS, KEEP_ALIVE_ATTEMPTS = 5, 3
"""As in torch's own rendezvous."""


def register() -> None:
    """Known from now on to torch's launcher in this process."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, create)  # the same creator again is no error


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """What torch's launcher calls: a c10d rendezvous of which every listening socket is bound to one address."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    from meshwright.runtime._torch_distributed import rendezvous_with
    from meshwright.runtime.messages.meeting import SealedBackend
    from meshwright.runtime.unanswered import PatientBackend

    host, port = parse_endpoint(parameters.endpoint)
    address = address_of(host)
    check_reachable(host, address, parameters.max_nodes)
    store = meet(address, port)
    own = parameters.local_addr
    handler: RendezvousHandler = rendezvous_with(BACKEND, listening_store).from_backend(
        parameters.run_id,
        store,
        PatientBackend(SealedBackend(C10dRendezvousBackend(store, parameters.run_id))),
        parameters.min_nodes,
        parameters.max_nodes,
        address_of(own) if own else address_towards(address),
        RendezvousTimeout(**{name: _seconds(parameters, name) for name in PATIENCE}),
        parameters.get_as_int("keep_alive_interval") or KEEP_ALIVE_SECONDS,
        parameters.get_as_int("keep_alive_max_attempt") or KEEP_ALIVE_ATTEMPTS,
    )
    return handler


def _seconds(parameters: RendezvousParameters, name: str) -> timedelta | None:
    """As given to torch's own rendezvous: `--rdzv-conf join_timeout=900`; without it, torch's."""
    given = parameters.get_as_int(f"{name}_timeout")
    return None if given is None else timedelta(seconds=given)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """`host:port`, with the host's IPv6 address in brackets; port 0 is any that is free."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"rendezvous endpoint '{endpoint}': give HOST:PORT")
    return host.strip("[]"), int(port)


def meet(address: str, port: int) -> dist.TCPStore:
    """Hold the store where the address is ours and the port is free, else connect to whoever holds it."""
    import torch.distributed as dist

    try:
        return listening_store(address, port)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
    except dist.DistNetworkError:
        raise InputError(
            f"nobody answers at {address}:{port}, where the hosts are to meet, for {STORE_SECONDS} s: check that the first host "
            "has started, and can be reached from here"
        ) from None


def listening_store(address: str, port: int) -> dist.TCPStore:
    """A store that listens on this address alone. An OSError where the address is not ours, or the port taken."""
    import torch.distributed as dist

    numeric = address_of(address)
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    bound = socket.create_server((numeric, port), family=family)
    return dist.TCPStore(
        numeric,
        bound.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
        master_listen_fd=bound.detach(),
    )


def address_of(host: str) -> str:
    """The numeric address of a name, IPv4 where it has one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"host '{host}' is not known here ({error.strerror}): give its address, or add its name"
        ) from None
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def address_towards(address: str) -> str:
    """Which of this machine's addresses it sends from when it talks to that one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, ANY_PORT))
        except OSError as error:
            raise InputError(f"{address} cannot be reached from here ({error.strerror}): check the network") from None
        return str(probe.getsockname()[0])


def check_reachable(host: str, address: str, num_agents: int) -> None:
    """A host that knows itself by a loopback address would wait for the others on it, in vain."""
    is_meant = host == "localhost" or host == address
    if num_agents > 1 and not is_meant and ipaddress.ip_address(address).is_loopback:
        raise InputError(
            f"host '{host}' takes itself for {address}, where other hosts cannot reach it: give the address they use "
            "(meshwright launch --rendezvous ADDRESS), or correct its /etc/hosts"
        )


def loopback_interface() -> str:
    """Its name: `lo` on Linux, `lo0` elsewhere."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def local_only() -> dict[str, str]:
    """What ranks of one host need in their environment so that nobody else can connect to them; a choice already made stays."""
    return {name: loopback_interface() for name in INTERFACES if name not in os.environ}
