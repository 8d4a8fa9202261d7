"""A run that gets no more memory says what filled it, what was predicted, and what would need less."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from cases import hand_cluster
from command import Cli
from torch import Tensor, nn

from meshwright.core.errors import OutOfMemoryError
from meshwright.runtime.launch import describe_failure
from meshwright.runtime.out_of_memory import is_out_of_memory, where_it_happened
from meshwright.runtime.program import Program

GREEDY = Path(__file__).parents[1] / "assets" / "greedy.py"
SETTINGS = f"""
name = "greedy"
model = "{GREEDY}:make"
device = "cpu"
nproc = 2
steps = 6
[plan]
global_batch = 8
[data]
source = "example"
validation_every = 0
"""


def test_which_errors_are_meant() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**52)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


class Hungry(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(2**52)[0]


def test_the_module_that_ran_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Hungry()))
    with pytest.raises(RuntimeError) as refused:
        module(torch.ones(1, 2))
    program = cast(Program, SimpleNamespace(module=module))
    assert where_it_happened(program, refused.value) == "1.1"
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**52)
    assert where_it_happened(program, refused.value) == ""


class Failure:
    """What the launcher knows of a rank that ended."""

    def __init__(self, file: Path, exitcode: int = 1) -> None:
        self.error_file, self.exitcode, self.pid, self.timestamp = str(file), exitcode, 7, 1.0


def test_a_full_device_is_told_apart_from_a_host_that_kills(tmp_path: Path) -> None:
    report = tmp_path / "error.json"
    report.write_text('{"message": {"extraInfo": {"message": "full", "seconds": 2.0, "out_of_memory": true}}}')
    lost = tmp_path / "lost.json"
    lost.write_text('{"message": {"extraInfo": {"message": "lost its peer", "seconds": 1.0}}}')
    error = describe_failure({0: Failure(lost), 1: Failure(report)}, 2)
    assert isinstance(error, OutOfMemoryError)
    assert str(error) == "rank 1 of 2: full"
    killed = describe_failure({0: Failure(lost, -9)}, 2)
    assert not isinstance(killed, OutOfMemoryError)
    assert "most often the host ran out of memory" in str(killed)


@pytest.mark.slow
def test_a_run_that_runs_out(cli: Cli, tmp_path: Path) -> None:
    cluster = hand_cluster(2).save(tmp_path / "cluster.json")  # it need not be measured
    (tmp_path / "greedy.toml").write_text(f'cluster = "{cluster}"\n{SETTINGS}')
    ended = cli("train", "greedy.toml")
    assert ended.code == 1
    said = ended.err
    assert "is out of memory: " in said
    assert "parameters: 66.02 KiB" in said
    assert "  optimizer state: 132.07 KiB" in said
    assert "optimizer state of blocks.0.weight: 32.00 KiB" in said
    assert "predicted: " in said
    assert " per device: parameters 66.0" in said
    assert "at the peak of the last sampled step: activations" in said
    assert "what needs at least 10% less, the cheapest first:" in said
    assert "ZeRO 1" in said
    assert "Traceback" not in said
