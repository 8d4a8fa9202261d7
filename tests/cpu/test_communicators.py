"""Every communicator is made in one file, and each link of a pipeline has its own, whatever the mesh."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import ROOT, graph_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.core.axes import RANK_AXES
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime import communicators
from meshwright.runtime.communicators import axes_mesh, data_mesh, link_groups, links_of

DEEP = "gpt:layers=8,hidden=16,heads=2,seq=8,vocab=30"
HOME = ROOT / "src" / "meshwright" / "runtime" / "communicators.py"
MAKERS = ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh", "DeviceMesh")
MESHES = {
    "pp is the world": (2, {"pp": 2}),
    "pp is the world, four": (4, {"pp": 4}),
    "in a loop": (4, {"pp": 4, "schedule": "interleaved", "virtual": 2}),
    "in a loop of two": (2, {"pp": 2, "schedule": "interleaved", "virtual": 4}),
    "in a V": (4, {"pp": 4, "schedule": "zbv"}),
    "with dp": (8, {"pp": 2}),
    "with cp": (8, {"pp": 4, "cp": 2}),
    "with tp": (8, {"pp": 2, "tp": 4}),
    "with all": (16, {"pp": 2, "tp": 2, "cp": 2}),
}


@contextmanager
def fake_rank(number: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def groups_of(plan: Plan, number: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """The two ranks of every link of one rank, global, source first; none of its groups is another's."""
    with fake_rank(number, plan.world):
        mesh = axes_mesh(plan, "cpu")
        links = link_groups(plan, data_mesh(plan, mesh))
        others = [dist.group.WORLD, *(mesh.get_group(axis) for axis in RANK_AXES)]
        assert len({id(group) for group in links.values()}) == len(links)
        assert not {id(group) for group in links.values()} & {id(group) for group in others}
        coordinates = dist.get_process_group_ranks(mesh.get_group("pp"))
        for (source, target), group in links.items():
            assert sorted(dist.get_process_group_ranks(group)) == sorted((coordinates[source], coordinates[target]))
        return {link: (coordinates[link[0]], coordinates[link[1]]) for link in links}


@pytest.mark.parametrize("name", MESHES)
def test_each_link_has_a_group_of_its_own(name: str) -> None:
    world, asked = MESHES[name]
    request = PlanRequest(microbatch=1, global_batch=world * 2, **asked)  # type: ignore[arg-type]
    plan = plain_plan(request, graph_of(DEEP), world, "tests")
    found = [groups_of(plan, number) for number in range(world)]
    for number, links in enumerate(found):
        assert links, "every rank has a neighbour"
        for link, pair in links.items():
            assert number in pair
            assert all(found[end][link] == pair for end in pair), "both ends mean the same"
    assert {link for links in found for link in links} == set(links_of(plan))


@pytest.mark.parametrize("bound", [False, True])
def test_with_nccl_only_the_ends_of_a_link_make_its_group_unless_groups_are_split_off(
    bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default group that is bound to a device is split, which all ranks must do alike; NCCL itself needs several GPUs."""
    plan = plain_plan(PlanRequest(microbatch=1, global_batch=16, pp=4), graph_of(DEEP), 8, "tests")
    made: list[list[list[int]]] = []
    for number in range(plan.world):
        with fake_rank(number, plan.world), monkeypatch.context() as patched:
            mesh = data_mesh(plan, axes_mesh(plan, "cpu"))
            own: list[list[int]] = []
            make = dist.new_group
            patched.setattr(dist, "get_backend", lambda group: "nccl")
            patched.setattr(
                dist, "new_group", lambda ranks, own=own, make=make, **rest: own.append(ranks) or make(ranks)
            )
            patched.setattr(communicators, "_is_bound_to_device", lambda: bound)
            link_groups(plan, mesh)
            made.append(own)
    if bound:
        assert all(own == made[0] for own in made)
    assert {number in pair for number, own in enumerate(made) for pair in own} == ({True, False} if bound else {True})


def makers(path: Path) -> set[str]:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    return names & set(MAKERS)


def test_communicators_of_a_run_have_one_home() -> None:
    assert makers(HOME)
    others = [path for path in (ROOT / "src" / "meshwright" / "runtime").rglob("*.py") if path != HOME]
    assert {path.name: makers(path) for path in others if makers(path)} == {}


def test_the_default_group_is_what_a_mesh_gives_for_the_world() -> None:
    """Why links do not take the mesh's: should torch change it, this says so."""
    with fake_rank(0, 2):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "rest"))
        assert mesh.get_group("pp") is dist.group.WORLD
        assert torch.equal(mesh.mesh.flatten(), torch.arange(2))
