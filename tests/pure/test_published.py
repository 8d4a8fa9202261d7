"""Published runs: a table is read strictly, and each row becomes a model, a plan and a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.core.published import Run, read_runs
from meshwright.report.published import model_of, read, system_of

HEADER = "id,source_table,model,layers,hidden,heads,vocab,seq,cluster,num_gpus,tp,pp,dp,vpp,micro_batch,global_batch"
HEADER += ",recompute,sequence_parallel,zero,precision,compiled,schedule,step_seconds,peak_gb,fits,kind,source,notes"
ROW = "a,tr11,B,72,14336,64,250880,2048,a100-80g-jeanzay,384,8,12,4,1,2,2048,full,0,1,fp16,0,1F1B (DeepSpeed),134.02,37.0,1,,,"


def run_of(**changes: object) -> Run:
    plain = {
        "id": "a", "source_table": "new", "layers": 24, "hidden": 2048, "heads": 16, "vocab": 50304, "seq": 2048,
        "cluster": "c", "num_gpus": 8, "dp": 8, "micro_batch": 1, "global_batch": 8,
    }  # fmt: skip
    return Run(**{**plain, **changes})  # type: ignore[arg-type]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "runs.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_row_is_read(tmp_path: Path) -> None:
    (run,) = read_runs(write(tmp_path, HEADER, ROW))
    assert (run.layers, run.tp, run.pp, run.dp, run.step_seconds, run.peak_gb, run.fits) == (
        72,
        8,
        12,
        4,
        134.02,
        37.0,
        True,
    )
    assert run.recompute == "full"


def test_what_a_source_leaves_open_is_none(tmp_path: Path) -> None:
    (run,) = read_runs(write(tmp_path, HEADER, ROW.replace("134.02,37.0,1", ",,")))
    assert (run.step_seconds, run.peak_gb, run.fits) == (None, None, None)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([HEADER.replace("layers", "layer"), ROW], "no column 'layers' (did you mean 'layer'?)"),
        ([HEADER], "no rows"),
        ([HEADER, ROW.replace("14336", "wide")], "line 2: hidden is 'wide': write a number"),
        ([HEADER, ROW.replace("14336", "-3")], "line 2: hidden"),
        ([HEADER, ROW.replace("full", "some")], "line 2: recompute"),
        ([HEADER, ROW.replace(",0,1F1B", ",maybe,1F1B")], "line 2: compiled is 'maybe': write 0 or 1"),
    ],
)
def test_a_wrong_table_is_refused_with_the_place(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(InputError) as error:
        read_runs(write(tmp_path, *lines))
    assert said in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv: cannot be read"):
        read_runs(tmp_path / "none.csv")


def test_a_sweep_is_what_differs_in_the_plan_only() -> None:
    one = run_of(tp=8, dp=1)
    assert one.sweep == run_of(tp=1, dp=8, recompute="full", zero=3, micro_batch=2).sweep
    assert one.sweep != run_of(seq=1024).sweep
    assert one.sweep != run_of(global_batch=16).sweep


@pytest.mark.parametrize(
    ("changes", "system"),
    [
        ({"source_table": "tr11"}, "deepspeed"),
        ({"source_table": "torchtitan-llama3"}, "torchtitan"),
        ({"schedule": "1F1B (DeepSpeed)"}, "deepspeed"),
        ({"tp": 8, "dp": 1}, "megatron"),
        ({"zero": 3}, "fsdp"),
    ],
)
def test_an_unknown_table_is_read_by_what_its_rows_show(changes: dict[str, object], system: str) -> None:
    assert system_of(run_of(**changes)) == system


def test_the_row_becomes_a_request() -> None:
    reading = read(run_of(tp=2, pp=2, dp=2, vpp=2, zero=1, recompute="selective", sequence_parallel=True))
    wish = reading.request
    assert (wish.tp, wish.pp, wish.dp, wish.virtual, wish.zero) == (2, 2, 2, 2, 1)
    assert (wish.schedule, wish.recompute, wish.sequence_parallel) == ("interleaved", "selective", True)
    assert reading.model.endswith("attention=eager")


def test_zero_without_data_parallel_ranks_is_none() -> None:
    assert read(run_of(tp=8, dp=1, zero=1)).request.zero == 0


def test_bf16_in_deepspeed_keeps_more_gradients() -> None:
    half, brain = (read(run_of(source_table="tr11", precision=word)).recipe for word in ("fp16", "bf16"))
    assert (half.gradient_item_bytes or 0) < (brain.gradient_item_bytes or 0)


def test_a_llama_is_one() -> None:
    name = model_of(run_of(model="Llama-3.1 8B", hidden=4096, heads=32, layers=32), "sdpa")
    assert name.startswith("llama:")
    assert "kv_heads=8,intermediate=14336" in name
