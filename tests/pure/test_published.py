"""Published runs: a table is read strictly, row by row, and each row becomes a model, a plan and a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.cluster import Facts, catalogue
from meshwright.core.errors import InputError
from meshwright.interop.published import Run, Unreadable, read_runs
from meshwright.report.published import model_of, precision_of, read, system_of

A100, V100 = (catalogue()[name] for name in ("a100-80g-selene", "v100-16g-p3"))

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
    assert isinstance(run, Run)
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
    ],
)
def test_a_table_without_rows_or_a_needed_column_is_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(InputError) as error:
        read_runs(write(tmp_path, *lines))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "said", "measured"),
    [
        ("14336", "wide", "line 3: hidden is 'wide': write a number", (134.02, 37.0, True)),
        ("14336", "-3", "line 3: hidden", (134.02, 37.0, True)),
        ("14336", "1.5", "line 3: hidden", (134.02, 37.0, True)),
        (",2,2048,full", ",,2048,full", "line 3: micro_batch: this field is missing", (134.02, 37.0, True)),
        ("full", "some", "line 3: recompute", (134.02, 37.0, True)),
        (",0,1F1B", ",maybe,1F1B", "line 3: compiled is 'maybe': write 0 or 1", (134.02, 37.0, True)),
        ("134.02,37.0,1", ",37.0,OOM", "line 3: fits is 'OOM': write 0 or 1", (None, 37.0, None)),
        ("134.02,37.0,1", "0,37.0,1", "line 3: step_seconds is '0': write a number above 0", (None, 37.0, True)),
        ("134.02,37.0,1", "134.02,nan,0", "line 3: peak_gb is 'nan': write a number above 0", (134.02, None, False)),
    ],
)
def test_a_row_that_cannot_be_read_keeps_what_was_measured(
    tmp_path: Path, old: str, new: str, said: str, measured: tuple[object, ...]
) -> None:
    assert ROW.count(old) == 1
    fine, row = read_runs(write(tmp_path, HEADER, ROW, ROW.replace(old, new)))
    assert isinstance(fine, Run)
    assert isinstance(row, Unreadable)
    assert said in row.problem
    assert (row.id, row.source_table) == ("a", "tr11")
    assert (row.step_seconds, row.peak_gb, row.fits) == measured


@pytest.mark.parametrize("word", ["Full", "FULL", "full"])
def test_the_case_of_recompute_does_not_matter(tmp_path: Path, word: str) -> None:
    (run,) = read_runs(write(tmp_path, HEADER, ROW.replace("full", word)))
    assert isinstance(run, Run)
    assert run.recompute == "full"


@pytest.mark.parametrize(("cells", "degrees"), [("8,12,,", (8, 12, 4)), ("8,,,", (8, 1, 48)), (",,,", (1, 1, 384))])
def test_a_blank_dp_is_what_the_other_axes_leave(tmp_path: Path, cells: str, degrees: tuple[int, ...]) -> None:
    (run,) = read_runs(write(tmp_path, HEADER, ROW.replace("8,12,4,", cells)))
    assert isinstance(run, Run)
    assert (run.tp, run.pp, run.dp) == degrees


def test_columns_of_degrees_may_be_absent(tmp_path: Path) -> None:
    lines = (HEADER.replace("tp,pp,dp,", ""), ROW.replace("8,12,4,", ""))
    (run,) = read_runs(write(tmp_path, *lines))
    assert isinstance(run, Run)
    assert (run.tp, run.pp, run.dp) == (1, 1, 384)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv: no such file"):
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
        ({"source_table": "TorchTitan-2025", "tp": 8, "dp": 1}, "torchtitan"),
        ({"source": "NVIDIA NeMo performance summary", "zero": 3}, "megatron"),
        ({"notes": "Megatron-DeepSpeed", "zero": 3}, "deepspeed"),
        ({"source": "Mosaic's llm-foundry", "tp": 2, "dp": 4}, "fsdp"),
        ({"notes": "FSDP", "zero": 1}, "fsdp"),
        ({"compiled": True, "zero": 3}, "torchtitan"),
        ({"compiled": True, "zero": 1}, "megatron"),
        ({"tp": 8, "dp": 1}, "megatron"),
        ({"zero": 3}, "fsdp"),
    ],
)
def test_an_unknown_table_is_read_by_what_its_rows_show(changes: dict[str, object], system: str) -> None:
    assert system_of(run_of(**changes)) == system


def test_the_row_becomes_a_request() -> None:
    reading = read(run_of(tp=2, pp=2, dp=2, vpp=2, zero=1, recompute="selective", sequence_parallel=True), A100)
    wish = reading.request
    assert (wish.tp, wish.pp, wish.dp, wish.virtual, wish.zero) == (2, 2, 2, 2, 1)
    assert (wish.schedule, wish.recompute, wish.sequence_parallel) == ("interleaved", "selective", True)
    assert reading.model.endswith("attention=eager")


def test_zero_without_data_parallel_ranks_is_none() -> None:
    assert read(run_of(tp=8, dp=1, zero=1), A100).request.zero == 0


def test_bf16_in_deepspeed_keeps_more_gradients() -> None:
    half, brain = (read(run_of(source_table="tr11", precision=word), A100).recipe.system for word in ("fp16", "bf16"))
    assert (half.gradient_item_bytes or 0) < (brain.gradient_item_bytes or 0)


@pytest.mark.parametrize(
    ("word", "facts", "precision"),
    [
        ("bf16", A100, "bf16"), ("fp16", A100, "bf16"), ("", A100, "bf16"), ("amp_bf16", A100, "bf16"),
        ("fp32", A100, "fp32"), ("TF32", A100, "fp32"), ("float32", V100, "fp32"), ("bf16, fp32 sums", A100, "bf16"),
        ("fp16", V100, "fp16"), ("bf16", V100, "fp16"), ("", V100, "fp16"),
    ],
)  # fmt: skip
def test_16_bits_are_bf16_where_the_device_has_it(word: str, facts: Facts, precision: str) -> None:
    run = run_of(precision=word)
    assert precision_of(run, facts) == precision
    reading = read(run, facts)
    assert reading.precision == reading.request.precision == precision


@pytest.mark.parametrize("table", ["tr11", "sc21-table1", "mosaicml-fsdp", "torchtitan-llama3"])
def test_fp32_needs_no_master(table: str) -> None:
    system = read(run_of(source_table=table, precision="fp32"), A100).recipe.system
    assert system.master_item_bytes == 0
    assert system.parameter_item_bytes is system.gradient_item_bytes is system.reduce_item_bytes is None


@pytest.mark.parametrize(
    ("model", "hidden", "heads", "vocab", "sizes"),
    [
        ("Llama-3.1 8B", 4096, 32, 128256, "kv_heads=8,intermediate=14336"),
        ("Llama-3 70B", 8192, 64, 128256, "kv_heads=8,intermediate=28672"),
        ("Llama-3.1 405B", 16384, 128, 128256, "kv_heads=8,intermediate=53248"),
        ("Llama-3.2 1B", 2048, 32, 128256, "kv_heads=8,intermediate=8192"),
        ("Llama-3.2 3B", 3072, 24, 128256, "kv_heads=8,intermediate=8192"),
        ("Llama-2 70B", 8192, 64, 32000, "kv_heads=8,intermediate=28672"),
        ("Llama-2 7B", 4096, 32, 32000, "kv_heads=32,intermediate=11008"),
        ("Llama-2 13B", 5120, 40, 32000, "kv_heads=40,intermediate=13824"),
        ("LLaMA 33B", 6656, 52, 32000, "kv_heads=52,intermediate=17920"),
        ("Mistral 7B", 4096, 32, 32000, "kv_heads=8,intermediate=14336"),
    ],
)
def test_a_llama_has_its_published_sizes(model: str, hidden: int, heads: int, vocab: int, sizes: str) -> None:
    name = model_of(run_of(model=model, hidden=hidden, heads=heads, vocab=vocab), "sdpa")
    assert name.startswith("llama:")
    assert f",{sizes}," in name
