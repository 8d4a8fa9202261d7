"""Every private name of torch.distributed that Meshwright uses, each with its reason; all others are in `_torch.py`.

`tests/cpu/test_torch_names.py` fails clearly when a torch version moves one of them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

# What torch's flight recorder has kept: the only place that knows collectives which torch's own C++ calls (buckets of gradients).
from torch._C import _distributed_c10d

# Groups of a mesh take no time limit when they are made; these two find all groups of the process and set it afterwards.
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

# What hosts tell each other when they meet is pickled by torch: a backend of ours writes it in another form, and needs its classes.
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

# What torch remembers of operations on DTensors holds their meshes, and takes equal ones for the same: forgotten with the groups.
# And how it finds out how a list of tensors lies (`look_once_at_lists`).
from torch.distributed.tensor import _redistribute, _sharding_prop, debug
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "_NodeDesc", "_RendezvousState", "_StridedShard", "_distributed_c10d", "_redistribute", "_set_pg_timeout", "_sharding_prop",
    "_world", "debug",
]  # fmt: skip
STRIDED = "_propagate_use_strided_shard_flag"
NODES = ("participants", "last_heartbeats")
LISTS = ("wait_list", "redundancy_list")


def known_collectives() -> list[dict[str, Any]]:
    """Collectives that were called of late. Empty where the recorder has no buffer (TORCH_FR_BUFFER_SIZE)."""
    dumps = (getattr(_distributed_c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    return [entry for dump in dumps if dump for entry in json.loads(dump() or "{}").get("entries", ())]


def pending_collectives() -> list[dict[str, Any]]:
    """Those that are not done."""
    return [entry for entry in known_collectives() if not entry["retired"] and entry["state"] != "completed"]


def set_group_timeouts(timeout: timedelta, done: set[str]) -> None:
    """Every process group that is not among the done ones waits this long."""
    for group, name in list(_world.pg_names.items()):
        if name not in done:
            done.add(name)
            _set_pg_timeout(timeout, group)


def forget_meshes() -> None:
    """No DTensor of a later mesh is given one of these whose groups are gone."""
    caches = (  # not all of them are in every torch
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(_redistribute._gen_transform_infos, "cache_clear", None),
    )
    for clear in caches:
        if clear is not None:
            clear()


def look_once_at_lists() -> None:
    """The first update of n sharded tensors in one call took n * n steps in torch 2.13: for each of them it goes through all, for a
    flag that only strided shards have. Where a tensor's ways to lie have none, there is nothing to find."""
    through_all = getattr(_sharding_prop, STRIDED, None)
    if through_all is None or hasattr(through_all, "__wrapped__"):  # an older torch; or done
        return

    @wraps(through_all)
    def where_strided(ways: Any, called: Any) -> None:
        if any(_is_strided(spec) for way in ways.strategies for spec in (way.output_specs, way.input_specs)):
            through_all(ways, called)

    setattr(_sharding_prop, STRIDED, where_strided)


def _is_strided(spec: Any) -> bool:
    if spec is None or isinstance(spec, tuple | list):
        return any(map(_is_strided, spec or ()))
    return any(isinstance(placement, _StridedShard) for placement in spec.placements)


def rendezvous_with(name: str, make_store: Callable[[str, int], Any]) -> Any:
    """torch's rendezvous, with a store of ours where it would make one: its own listens on every interface of the host."""
    from meshwright.runtime.unanswered import PatientRendezvous

    class Rendezvous(PatientRendezvous):
        def get_backend(self) -> str:
            return name

        def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
            return make_store(master_addr, master_port)

    return Rendezvous


def meeting_of(pickled: bytes) -> dict[str, Any]:
    """What torch's rendezvous of this process has just pickled, as plain values; hosts as (address, process, number)."""
    state = vars(pickle.loads(pickled))
    nodes = {name: [(_host(node), value) for node, value in state[name].items()] for name in NODES}
    return {**state, **nodes, **{name: [_host(node) for node in state[name]] for name in LISTS}}


def pickled_meeting(plain: dict[str, Any]) -> bytes:
    """The other way, for torch's rendezvous of this process to unpickle: plain values were made into these objects here."""
    state = _RendezvousState()
    nodes = {name: {_NodeDesc(*node): value for node, value in plain[name]} for name in NODES}
    vars(state).update({**plain, **nodes, **{name: {_NodeDesc(*node) for node in plain[name]} for name in LISTS}})
    return pickle.dumps(state)


def _host(node: Any) -> tuple[str, int, int]:
    return (node.addr, node.pid, node.local_id)
