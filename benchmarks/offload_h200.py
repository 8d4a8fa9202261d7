"""Models larger than the GPU, and models in it, on one H200: step time, memory of device and host, predicted beside measured.

    python benchmarks/offload_h200.py [--only ROW,ROW] [--out rows.jsonl] [--table]

Every row runs in a process of its own and is written to the file as soon as it is done: a run that is cut goes on with the rows
that are missing, and `--table` prints what is there without running anything. TFLOP/s count 6 x parameters outside the embeddings
(head counted) + 6 x layers x hidden x sequence a token, recompute not counted. Layer streaming is run by `streaming_h200.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from large_pages import huge_page_bytes

SEQ, VOCAB = 2048, 50304
WARMUP, ROUNDS, STEPS = 3, 3, 4
"""Steps of a round follow each other as in training, where nobody reads the loss of every step before the next begins."""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5504,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": VOCAB,
    "max_position_embeddings": SEQ, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    what: str
    layers: int
    hidden: int
    heads: int
    microbatch: int
    recompute: bool = True
    share: float | None = 1.0
    """Of the optimizer state on the host; None: everything in memory, as plain plans do it."""
    delayed: bool = False
    max_norm: float | None = None
    peer: str = ""
    """`torch`: the model compiled by plain torch, without Meshwright's runtime; `llama`: the Hugging Face model; `accelerate`: the
    same under Accelerate with compile."""
    streaming: str = ""
    """`in memory` or `streamed`: a row of `streaming_h200.py`."""
    seq: int = SEQ

    @property
    def model(self) -> str:
        return f"gpt:layers={self.layers},hidden={self.hidden},heads={self.heads},seq={self.seq},vocab={VOCAB}"

    @property
    def is_llama(self) -> bool:
        return self.peer in ("llama", "accelerate")

    @property
    def parameters(self) -> int:
        """Outside the embeddings, the head counted."""
        width = 5504 * 3 + 4 * self.hidden if self.is_llama else 12 * self.hidden
        return self.layers * width * self.hidden + VOCAB * self.hidden

    @property
    def flops(self) -> float:
        """Of a step."""
        return (6 * self.parameters + 6 * self.layers * self.hidden * self.seq) * self.microbatch * self.seq


FIVE = {"layers": 24, "hidden": 4096, "heads": 32, "microbatch": 8}
ONE = {"layers": 24, "hidden": 2048, "heads": 16, "recompute": False}
THIN = {"hidden": 1024, "heads": 16, "microbatch": 64, "seq": 512}
ROWS = {
    "5.25e9 exact": Row("within 24 GiB, exact", **FIVE, share=0.9),
    "5.25e9 clipped": Row("the same, gradients clipped", **FIVE, share=0.9, max_norm=1.0),
    "5.25e9 delayed": Row("the same, updates a step late", **FIVE, share=0.9, delayed=True),
    "5.25e9 all away": Row("all of the optimizer state on the host", **FIVE),
    "5.25e9 partial": Row("within 60 GiB", **FIVE, share=0.3),
    "5.25e9 in memory": Row("in memory", **FIVE, share=None),
    "10e9": Row("10e9 parameters", layers=30, hidden=5120, heads=40, microbatch=16, share=0.7),
    "1.3e9": Row("1.3e9 in memory", **ONE, microbatch=16, share=0.0),
    "1.3e9 plain": Row("1.3e9 in memory, autocast", **ONE, microbatch=16, share=None),
    "1.3e9 torch": Row("1.3e9 in memory, plain torch compiled", **ONE, microbatch=16, share=None, peer="torch"),
    "llama": Row("Hugging Face Llama in memory", **ONE, microbatch=8, share=0.0, peer="llama"),
    "accelerate": Row("the same under Accelerate, compiled", **ONE, microbatch=8, share=None, peer="accelerate"),
    "24 layers": Row("24 layers of hidden 1024 in memory", layers=24, **THIN, streaming="in memory"),
    "24 streamed": Row("24 layers, streamed", layers=24, **THIN, streaming="streamed"),
    "96 streamed": Row("96 layers, streamed", layers=96, **THIN, streaming="streamed"),
    "384 streamed": Row("384 layers, streamed", layers=384, **THIN, streaming="streamed"),
}  # fmt: skip


def measure(row: Row) -> dict[str, Any]:
    _join()
    return _streaming(row) if row.streaming else _stepping(row)


def _streaming(row: Row) -> dict[str, Any]:
    import torch
    from streaming_h200 import arguments, run

    found = run(row.layers, row.streaming, arguments([]), torch.device("cuda", 0))
    seconds = found["ms_per_step"] / 1e3
    return {
        "what": row.what,
        "step_seconds": seconds,
        "tflops": row.flops / seconds / 1e12,
        "peak_bytes": found["peak_device_bytes"],
        "reserved_bytes": found["reserved_device_bytes"],
        "host_bytes": found.get("holdings", {}).get("host", 0),
        "losses": found["losses"],
        "seconds": [one / 1e3 for one in found["ms_of_steps"]],
        "torch": found["torch"],
        "others_share": found["others_share"],
        "huge_page_bytes": found["huge_page_bytes"],
        "predicted_seconds": found["predicted_ms"] / 1e3,
        "predicted_bytes": found["predicted_device_bytes"],
        "predicted_host_bytes": found["predicted_host_bytes"],
    }


def _stepping(row: Row) -> dict[str, Any]:
    import torch

    from meshwright.measure.others import Others

    if row.peer in PEERS:
        step = PEERS[row.peer](row)
        host_bytes, predicted = 0, {}
    else:
        step, program, predicted = _ours(row)
        host_bytes = program.host.state.host_bytes if program.host is not None else 0
    losses = [float(step())]
    torch.cuda.reset_peak_memory_stats()
    losses += [float(step()) for _ in range(WARMUP - 1)]
    seconds, found = [], []
    others = Others()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        found += [step() for _ in range(STEPS)]
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / STEPS)
    losses += map(float, found)
    typical = statistics.median(seconds)
    return {
        "what": row.what,
        "step_seconds": typical,
        "tflops": row.flops / typical / 1e12,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "host_bytes": host_bytes,
        "losses": [round(loss, 4) for loss in losses],
        "seconds": [round(one, 4) for one in seconds],
        "torch": torch.__version__,
        "others_share": round(others.share(), 4),
        "huge_page_bytes": huge_page_bytes(),
        **predicted,
    }


def _ours(row: Row) -> tuple[Any, Any, dict[str, Any]]:
    import torch

    from meshwright.capturing.capture import capture_source
    from meshwright.core.cluster import Cluster
    from meshwright.core.recipe import Recipe
    from meshwright.core.request import PlanRequest
    from meshwright.cost.estimate import estimate
    from meshwright.models.source import resolve
    from meshwright.rules.plain_plan import plain_plan
    from meshwright.runtime.apply import apply
    from meshwright.runtime.deferred import deferred

    source = resolve(f"hf:{_llama_file()}" if row.is_llama else row.model)
    away = row.share is not None
    graph = capture_source(source, "bf16", "parameters" if away else "autocast")
    request = PlanRequest(
        precision="bf16", compile=True, global_batch=row.microbatch, recompute="full" if row.recompute else "none",
        offload="optimizer" if away else None, offload_share=row.share, offload_delayed=row.delayed if away else None,
    )  # fmt: skip
    plan = plain_plan(request, graph, 1, "h200-single")
    if row.delayed:
        import msgspec

        plan = msgspec.structs.replace(plan, offload=msgspec.structs.replace(plan.offload, warmup_steps=0))
    found = estimate(graph, plan, Cluster.named("h200-single", hosts=1), Recipe(clips=row.max_norm is not None))
    torch.manual_seed(0)
    with torch.device("cuda"), deferred():
        module = source.build()
    program = apply(
        module, plan, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        objective=source.objective, max_norm=row.max_norm, device=torch.device("cuda", 0),
    )  # fmt: skip
    assert source.example is not None
    batch = source.example(row.microbatch)
    predicted = {
        "predicted_seconds": found.step_seconds,
        "predicted_bytes": found.peak_bytes,
        "predicted_host_bytes": found.host_bytes,
    }
    return lambda: _Loss(program.step(batch)), program, predicted


class _Loss:
    """Of a step, read when somebody asks."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def __float__(self) -> float:
        return float(self.output.loss)


def _accelerate(row: Row) -> Any:
    import torch
    from accelerate import Accelerator
    from transformers import AutoConfig, AutoModelForCausalLM

    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="inductor")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(_llama_file()), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(0, VOCAB, (row.microbatch, SEQ), device="cuda")

    def step() -> Any:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _torch(row: Row) -> Any:
    import torch
    from torch.nn import functional

    from meshwright.models.source import resolve

    source = resolve(row.model)
    assert source.example is not None
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = source.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    batch = [value.cuda() for value in dict(source.example(row.microbatch)).values()]  # tokens and labels

    @torch.compile
    def loss_of(tokens: Any, labels: Any) -> Any:
        return functional.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


PEERS = {"accelerate": _accelerate, "torch": _torch}


def _llama_file() -> str:
    path = Path(tempfile.gettempdir()) / "llama-1.4e9.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def _join() -> None:
    import torch.distributed as dist

    store = Path(tempfile.mkdtemp(), "store")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def run(names: list[str], out: Path, limit: float) -> None:
    for name in names:
        if name in read(out):
            continue
        try:
            command = [sys.executable, __file__, "--one", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.stderr[-600:]}
        except subprocess.TimeoutExpired:
            found = {"failed": f"not done in {limit:.0f} s"}
        with out.open("a") as file:
            file.write(json.dumps({"row": name, **found}) + "\n")
        print(name, json.dumps(found)[:300], flush=True)
        gc.collect()


def read(out: Path) -> dict[str, dict[str, Any]]:
    lines = out.read_text().splitlines() if out.exists() else []
    rows = (json.loads(line) for line in lines)
    return {row["row"]: row for row in rows if "failed" not in row}


def table(out: Path) -> str:
    head = "| what | step | predicted | TFLOP/s | device | predicted | host | predicted | a parameter |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    gib = 2**30
    for name, row in read(out).items():
        kept = ROWS[name]
        parameters = kept.parameters + (VOCAB + kept.seq) * kept.hidden
        seconds, device, host = (row.get(f"predicted_{what}") for what in ("seconds", "bytes", "host_bytes"))
        lines.append(
            f"| {row['what']} | {1e3 * row['step_seconds']:,.0f} ms | {f'{1e3 * seconds:,.0f} ms' if seconds else '–'} | "
            f"{row['tflops']:.0f} | {row['peak_bytes'] / gib:.1f} GiB | {f'{device / gib:.1f} GiB' if device else '–'} | "
            f"{row['host_bytes'] / gib:.1f} GiB | {f'{host / gib:.1f} GiB' if host else '–'} | "
            f"{row['host_bytes'] / parameters:.1f} B |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows, by name: " + ", ".join(ROWS))
    parser.add_argument("--out", type=Path, default=Path("runs", "offload_h200.jsonl"))
    parser.add_argument("--limit", type=float, default=240.0, help="seconds a row may take")
    parser.add_argument("--table", action="store_true", help="print what was measured; run nothing")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        from meshwright.runtime.rank import leave

        print(json.dumps(measure(ROWS[asked.one])), flush=True)
        leave(0)  # threads of gloo and of updates need not end in order
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    unknown = {name for name in asked.only.split(",") if name} - set(ROWS)
    if unknown:
        raise SystemExit(f"no row is called {', '.join(sorted(unknown))}: one of {', '.join(ROWS)}")
    if not asked.table:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("this benchmark needs a CUDA device; --table prints what was measured before")
        run([name for name in ROWS if not asked.only or name in asked.only.split(",")], asked.out, asked.limit)
    print(table(asked.out))


if __name__ == "__main__":
    main()
