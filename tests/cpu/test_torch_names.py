"""Private torch names live in one file, and all of them exist in the torch that is installed."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import ROOT
from pool import RankPool, this_rank

from meshwright.capturing.capture import capture_source
from meshwright.core.request import PlanRequest
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime import _torch, _torch_distributed
from meshwright.runtime.apply import apply

SOURCES = sorted((ROOT / "src" / "meshwright").rglob("*.py"))
HOME = ROOT / "src" / "meshwright" / "runtime" / "_torch.py"
HOMES = {HOME: _torch, HOME.with_name("_torch_distributed.py"): _torch_distributed}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """`import a.b` and `from a.b import c` → a.b, a.b.c, wherever in the file they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`torch.a._b` as text, '' for anything that is not a plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := dotted(node.value)):
        return f"{inner}.{node.attr}"
    return ""


def is_private_torch(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def private_names(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return sorted(name for name in {*imported_names(tree), *used} if is_private_torch(name))


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 50
    assert HOMES.keys() <= set(SOURCES)


@pytest.mark.parametrize("path", [p for p in SOURCES if p not in HOMES], ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_private_torch_names_have_one_home(path: Path) -> None:
    assert private_names(path) == []


@pytest.mark.parametrize(("home", "name"), [(home, name) for home in HOMES.values() for name in home.__all__])
def test_a_private_name_exists(home: ModuleType, name: str) -> None:
    assert getattr(home, name) is not None


def test_the_flight_recorder_can_be_read() -> None:
    assert _torch_distributed.pending_collectives() == []
    assert hasattr(_torch_distributed._distributed_c10d, "_dump_fr_trace_json")


@pytest.mark.parametrize("home", HOMES, ids=lambda path: path.name)
def test_all_private_imports_are_listed(home: Path) -> None:
    """Every torch name of the home is in `__all__`, and every private import of it names a module that is there."""
    tree = ast.parse(home.read_text(encoding="utf-8"))
    imports = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
    ]
    assert sorted(alias.name for node in imports for alias in node.names) == sorted(HOMES[home].__all__)
    for node in imports:
        assert node.module is not None
        assert importlib.import_module(node.module) is not None
        assert is_private_torch(node.module) or any(alias.name.startswith("_") for alias in node.names), (
            f"{node.module} is public: import it where it is used"
        )


@pytest.mark.parametrize("path", sorted((ROOT / "src/meshwright/capturing").glob("*.py")), ids=lambda p: p.name)
def test_capture_does_not_know_torch_distributed(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert [name for name in {*imported_names(tree), *used} if name.startswith("torch.distributed")] == []


def test_the_home_of_private_names_does_not_know_torch_distributed() -> None:
    """Capture imports it, and capture must not depend on torch.distributed."""
    names = imported_names(ast.parse(HOME.read_text(encoding="utf-8")))
    assert [name for name in names if name.startswith("torch.distributed")] == []


def test_the_check_itself() -> None:
    assert is_private_torch("torch._subclasses.fake_tensor.FakeTensorMode")
    assert is_private_torch("torch.utils._pytree")
    assert not is_private_torch("torch.__version__")
    assert not is_private_torch("torch.nn.Module")
    assert not is_private_torch("meshwright._api")


def looks_of_an_update_on_rank(num_layers: int) -> int:
    """How often torch goes through all tensors of the first update."""
    from torch.distributed.tensor._op_schema import OpSchema

    num_looks, every_spec = 0, OpSchema.args_spec.fget  # type: ignore[attr-defined]

    def look(schema: OpSchema) -> Any:
        nonlocal num_looks
        num_looks += "adam" in schema.op.name()
        return every_spec(schema)

    model = resolve(f"mlp:inputs=8,hidden=8,layers={num_layers},classes=4")
    plan = plain_plan(PlanRequest(dp=2, zero=2, global_batch=4), capture_source(model), 2, "")
    fused = partial(torch.optim.AdamW, fused=True)
    program = apply(model.build(), plan, optimizer=fused, objective=model.objective, device=this_rank().device)
    assert model.example is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpSchema, "args_spec", property(look))
        program.step(model.example(4))
    return num_looks


def test_the_first_update_of_a_deep_model_goes_through_its_tensors_a_few_times(
    pool: Callable[[int], RankPool],
) -> None:
    """Not once for each of them: with 1,000 blocks under ZeRO that took most of an hour."""
    few, many = (pool(2).run(looks_of_an_update_on_rank, num_layers)[0] for num_layers in (4, 40))
    assert few == many
