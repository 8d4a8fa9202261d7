"""Nothing listens where others can reach it unless somebody says so; files of runs are data, and no code of theirs runs.

What torch binds by itself: its store every interface (hence `runtime/rendezvous.py`), gloo and NCCL the interface of the host's
name or the one in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (hence loopback for local runs).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from command import Cli, Started, wait_for
from injection import children
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from meshwright.core.errors import InputError
from meshwright.jobs.live_page import served_page
from meshwright.runtime import rendezvous
from meshwright.runtime.rendezvous import address_of, address_towards, check_reachable, listening_store, parse_endpoint
from meshwright.training.folder import RunFolder

LISTENING = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening(pid: int) -> list[Address]:
    """Addresses a process listens on, from the kernel's own tables."""
    inodes = {target[8:-1] for target in descriptors(pid) if target.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                found.append(parsed(fields[1].partition(":")[0]))
    return found


def descriptors(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield os.readlink(entry)
        except OSError:
            continue  # closed by now


def parsed(text: str) -> Address:
    """Words of four bytes, each the wrong way round."""
    raw = b"".join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def test_the_table_is_read_right() -> None:
    assert str(parsed("0100007F")) == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)):
        assert {"127.0.0.1", "0.0.0.0"} <= {str(address) for address in listening(os.getpid())}


def test_a_running_job_listens_on_loopback_only(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path
) -> None:
    """The launcher's store, and gloo in every rank."""
    run = start("train", settings(steps=100_000, data={"validation_every": 0}))
    metrics = RunFolder(tmp_path / "run").metrics
    wait_for(lambda: metrics.exists() and bool(metrics.read_text()), run)
    processes = [run.process.pid, *children(run.process.pid)]
    found = {pid: listening(pid) for pid in processes}
    assert found[run.process.pid], "no store was found: the test looks in the wrong place"
    assert all(found[pid] for pid in run.ranks().values()), "gloo listens: the test looks in the wrong place"
    assert [str(address) for addresses in found.values() for address in addresses if not address.is_loopback] == []


def test_the_page_is_served_on_loopback_only(tmp_path: Path) -> None:
    before = listening(os.getpid())
    with served_page(RunFolder(tmp_path), 0, 1.0):
        new = listening(os.getpid())
        for address in before:
            new.remove(address)
    assert [str(address) for address in new] == ["127.0.0.1"]


def test_why_the_rendezvous_is_ours() -> None:
    """torch's own store listens everywhere, whatever it is told; ours where it is told. Should the first change, ours can go."""
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert any(address.is_unspecified for address in listening(os.getpid()))
    del own
    before = listening(os.getpid())
    store = listening_store("127.0.0.1", 0)
    new = listening(os.getpid())
    for address in before:
        if address in new:
            new.remove(address)
    assert [str(address) for address in new] == ["127.0.0.1"]
    guest = rendezvous.meet("127.0.0.1", store.port)  # the port is taken: it connects
    guest.set("word", "hello")
    assert store.get("word") == b"hello"


def test_the_method_of_torch_that_is_replaced_is_still_there() -> None:
    assert callable(getattr(DynamicRendezvousHandler, "_create_tcp_store_server", None))


def test_a_host_that_takes_itself_for_loopback_is_refused_where_others_must_reach_it() -> None:
    check_reachable("gpu-01", "127.0.1.1", 1)
    check_reachable("gpu-01", "10.0.0.1", 2)
    check_reachable("localhost", "127.0.0.1", 2)
    with pytest.raises(
        InputError, match=r"host 'gpu-01' takes itself for 127.0.1.1, where other hosts cannot reach it"
    ):
        check_reachable("gpu-01", "127.0.1.1", 2)


def test_addresses_are_read() -> None:
    assert parse_endpoint("gpu-01:29500") == ("gpu-01", 29500)
    assert parse_endpoint("[::1]:0") == ("::1", 0)
    with pytest.raises(InputError, match="give HOST:PORT"):
        parse_endpoint("gpu-01")
    assert (address_of("localhost"), address_towards("127.0.0.1")) == ("127.0.0.1", "127.0.0.1")
    with pytest.raises(InputError, match=r"host 'no-such-host\.invalid' is not known here"):
        address_of("no-such-host.invalid")


def test_a_model_file_runs_only_when_it_is_named(
    cli: Cli, here: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    """Looking at a run that trained `file.py:function`, or writing a job file for it, does not import the file."""
    marker = tmp_path / "imported"
    (tmp_path / "own.py").write_text(
        f"import torch\nopen({str(marker)!r}, 'a').close()\n"
        "def make():\n    return torch.nn.Linear(4, 1), (torch.zeros(8, 4), torch.zeros(8, 1))\n"
    )
    file = settings(model=f"{tmp_path}/own.py:make", steps=2, data={"validation_every": 0})
    assert cli("train", file).code == 0
    marker.unlink()
    run = tmp_path / "run"
    for arguments in (
        ("report", run), ("report", run, "-o", tmp_path / "page.html"), ("watch", run, "--once"),
        ("launch", file, "--slurm", "--dry-run"), ("plan", "--diff", run / "plan.json", run / "plan.json"),
    ):  # fmt: skip
        ended = here(*arguments)
        assert ended.code == 0, (arguments, ended.err)
        assert not marker.exists(), arguments
    assert cli("train", file, "--out", tmp_path / "other").code == 0
    assert marker.exists()


def test_a_settings_file_cannot_hold_code(here: Cli, tmp_path: Path) -> None:
    """TOML has no such form, and a field that is not known is refused."""
    file = tmp_path / "settings.toml"
    file.write_text('model = "gpt:"\n[plan]\n__import__ = "os"\n')
    ended = here("train", file)
    assert ended.code == 2
    assert "unknown field '__import__'" in ended.err
