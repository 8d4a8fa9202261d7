"""What single kernels cost on one GPU, in plain torch: the figures a cost model is calibrated with.

    python benchmarks/kernels_h200.py OUT.json
    python benchmarks/kernels_h200.py OUT.json --parts launch,update
    python benchmarks/kernels_h200.py OUT.json --tiny --device cpu        # the logic alone, in seconds

OUT.json holds `environment`, `part_seconds` and one list of rows per part; every row names what ran, its shape and its
`seconds`. It is written after each part, and a row or part that fails leaves its error instead of its figure.

Seconds of a kernel are those of the device alone: the device spins while the host queues the calls, events stand around
them, and the median of the repeats counts. Seconds of a launch are those of the host, with nothing to wait for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

Row = dict[str, Any]

REPEATS = 5
SECONDS_PER_FIGURE = 0.02
"""Device time spent on one figure, warm-up left out."""
MOST_CALLS = 40
"""Calls between two events; their kernels must fit in the launch queue."""
COPIES = 3
"""Buffers a figure goes round, so that small ones do not all sit in the cache."""
CYCLES_PER_SECOND = 2e9
"""Of the spinning kernel; too high only means that the device spins longer than it must."""
MOST_SPIN_SECONDS = 0.02
MEGABYTE = 1 << 20

TOKENS = 16384
VOCABULARY = 50304
WIDTH = 2048


@dataclass(frozen=True)
class Machine:
    device: torch.device
    tiny: bool

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def tokens(self, count: int) -> Tensor:
        return torch.randint(VOCABULARY, (count,), device=self.device)

    def free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


# --- Timing ----------------------------------------------------------------------------------------------------------


def kernel_seconds(machine: Machine, work: Callable[[], Any]) -> float:
    """Device seconds of one call: the median over `REPEATS` rows of calls."""
    for _ in range(2):
        work()
    alone, issue = _row(machine, work, calls=2, spin_seconds=0.0)
    calls = max(1, min(MOST_CALLS, int(SECONDS_PER_FIGURE / REPEATS / max(alone, 1e-9))))
    spin = min(MOST_SPIN_SECONDS, 1.5 * issue * calls)
    return statistics.median(_row(machine, work, calls, spin)[0] for _ in range(REPEATS))


def _row(machine: Machine, work: Callable[[], Any], calls: int, spin_seconds: float) -> tuple[float, float]:
    """(device seconds, host seconds) per call of a row of calls."""
    machine.wait()
    if machine.device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            work()
        seconds = (time.perf_counter() - start) / calls
        return seconds, seconds
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(spin_seconds * CYCLES_PER_SECOND))
    first.record()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    issue = (time.perf_counter() - start) / calls
    last.record()
    machine.wait()
    return first.elapsed_time(last) / 1e3 / calls, issue


def host_seconds(machine: Machine, work: Callable[[], Any], calls: int) -> Row:
    """Host seconds per call to issue the work, and until it is also done; medians."""
    work()
    rows = []
    for _ in range(REPEATS):
        machine.wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        issued = time.perf_counter()
        machine.wait()
        rows.append(((issued - start) / calls, (time.perf_counter() - start) / calls))
    return {
        "issue_seconds": statistics.median(row[0] for row in rows),
        "seconds": statistics.median(row[1] for row in rows),
    }


def timed(machine: Machine, row: Row, work: Callable[[], Any], **amounts: float) -> Row:
    """The row with its seconds and each amount (flops, bytes) per second; with the error where the work fails."""
    try:
        seconds = kernel_seconds(machine, work)
    except Exception as error:
        machine.free()
        return {**row, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    rates = {f"{name}_per_second": amount / seconds for name, amount in amounts.items()}
    return {**row, "seconds": seconds, **amounts, **rates}


def rounds(buffers: list[Any]) -> Callable[[], Any]:
    """Each call gives the next buffer."""
    return itertools.cycle(buffers).__next__


# --- a. Matrix products ----------------------------------------------------------------------------------------------

ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ALIGNED = (
    *((1024, 1024), (4096, 1024), (1024, 4096), (2048, 2048), (8192, 2048), (2048, 8192)),
    *((2560, 2560), (10240, 2560), (2560, 10240), (4096, 4096), (16384, 4096), (4096, 16384)),
    *((50304, 1024), (50304, 2048), (50304, 4096), (5120, 5120), (8192, 8192)),
)
"""(n, k) of a[m, k] @ b[k, n]."""
ODD = (3456, 1000, 1001, 4092, 4100)
HEAD_WIDTHS = (64, 80, 96, 104, 108, 112, 128, 192, 216, 256)


class Pool:
    """One large random buffer that operands are cut from: allocating and filling each would take longer than timing."""

    def __init__(self, machine: Machine, num_elements: int, dtype: torch.dtype) -> None:
        self.memory = machine.randn(num_elements, dtype=dtype)

    def cut(self, rows: int, columns: int, copy: int) -> Tensor:
        need = rows * columns
        start = copy * need if (copy + 1) * need <= self.memory.numel() else 0
        return self.memory[start : start + need].view(rows, columns)


def layouts(pool: Pool, m: int, n: int, k: int) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
    """The products of a Linear with k inputs and n outputs on m rows: each [rows, inner] @ [inner, columns]."""
    copies = range(COPIES)
    yield "forward", [(pool.cut(m, k, i), pool.cut(n, k, i).t()) for i in copies]
    yield "dgrad", [(pool.cut(m, n, i), pool.cut(n, k, i)) for i in copies]
    yield "wgrad", [(pool.cut(m, n, i).t(), pool.cut(m, k, i)) for i in copies]


def products(machine: Machine, pool: Pool, m: int, n: int, k: int) -> Iterator[Row]:
    for layout, pairs in layouts(pool, m, n, k):
        following = rounds(pairs)
        row = {"op": "matmul", "layout": layout, "dtype": str(pool.memory.dtype), "m": m, "n": n, "k": k}
        yield timed(machine, row, lambda following=following: torch.mm(*following()), flops=2.0 * m * n * k)


def matmul(machine: Machine) -> Iterator[Row]:
    if machine.tiny:
        yield from products(machine, Pool(machine, 1 << 16, torch.bfloat16), 64, 32, 48)
        return
    pool = Pool(machine, 1 << 31, torch.bfloat16)
    for (n, k), m in itertools.product(ALIGNED, ROWS):
        yield from products(machine, pool, m, n, k)
    for size, m in itertools.product(ODD, (4096, 16384)):
        for n, k in ((size, size), (size, 4096), (4096, size)):
            yield from products(machine, pool, m, n, k)
    yield from products(machine, pool, 4095, 4096, 4096)
    yield from products(machine, pool, 4095, 4095, 4095)


def matmul_fp32(machine: Machine) -> Iterator[Row]:
    """With TF32 off, as torch has it by default, and on."""
    sizes = ((64, 32, 48),) if machine.tiny else ((4096, 4096, 4096), (8192, 8192, 2048))
    pool = Pool(machine, max(m * max(n, k) for m, n, k in sizes) * COPIES, torch.float32)
    for tf32, (m, n, k) in itertools.product((False, True), sizes):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        yield from ({**row, "tf32": tf32} for row in products(machine, pool, m, n, k))
    torch.backends.cuda.matmul.allow_tf32 = False


def bmm(machine: Machine) -> Iterator[Row]:
    """Attention without a fused kernel: scores = q kᵀ, mixed = scores v."""
    seq = 32 if machine.tiny else 2048
    for batch, width in itertools.product((2,) if machine.tiny else (32, 64, 128, 256), HEAD_WIDTHS):
        q = machine.randn(batch, seq, width)
        scores = machine.randn(batch, seq, seq)
        row = {"op": "bmm", "batch": batch, "seq": seq, "width": width}
        flops = 2.0 * batch * seq * seq * width
        yield timed(machine, {**row, "what": "scores"}, lambda q=q: q @ q.transpose(1, 2), flops=flops)
        yield timed(machine, {**row, "what": "mixed"}, lambda s=scores, q=q: s @ q, flops=flops)


# --- b. Attention ----------------------------------------------------------------------------------------------------

BACKENDS = {"default": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def attention(machine: Machine) -> Iterator[Row]:
    """Causal; q, k, v lie as a projection leaves them: [b, s, h, d] seen as [b, h, s, d]."""
    seqs, tokens = ((16, 32), 64) if machine.tiny else ((1024, 2048, 4096, 8192, 16384), TOKENS)
    for seq, width, heads, name in itertools.product(seqs, (64, 80, 128), (16, 32), BACKENDS):
        batch = tokens // seq
        q, k, v = (machine.randn(batch, seq, heads, width).transpose(1, 2).requires_grad_() for _ in range(3))
        gradient = machine.randn(batch, seq, heads, width).transpose(1, 2)
        row = {"op": "sdpa", "batch": batch, "heads": heads, "seq": seq, "width": width, "backend": name}
        yield from _attention_rows(machine, row, (q, k, v), gradient)


def _attention_rows(machine: Machine, row: Row, inputs: tuple[Tensor, ...], gradient: Tensor) -> Iterator[Row]:
    """Forward, and forward with backward. Flops count the causal half: two products forward, five backward."""
    choice = BACKENDS[row["backend"]]
    product = row["batch"] * row["heads"] * row["seq"] ** 2 * row["width"]

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), inputs, gradient)

    with sdpa_kernel(choice) if choice else nullcontext():
        try:
            chosen = type(forward().grad_fn).__name__
        except Exception as error:
            yield {**row, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
            return
        yield timed(machine, {**row, "phase": "forward", "chosen": chosen}, forward, flops=2.0 * product)
        yield timed(machine, {**row, "phase": "both", "chosen": chosen}, both, flops=7.0 * product)


# --- c. Byte-bound ops -----------------------------------------------------------------------------------------------


def bytes_bound(machine: Machine) -> Iterator[Row]:
    """`bytes` are those each op must read and write; `size` is the bytes of its input."""
    for size in (MEGABYTE // 4,) if machine.tiny else (1, 16, 64, 256, 1024):
        size_bytes = size if machine.tiny else size * MEGABYTE
        for name, work, moved in itertools.chain(
            _pointwise(machine, size_bytes),
            _norms(machine, size_bytes),
            _losses(machine, size_bytes),
            _embeddings(machine, size_bytes),
        ):
            yield timed(machine, {"op": name, "size": size_bytes}, work, bytes=float(moved))
        machine.free()


Work = tuple[str, Callable[[], Any], float]


def _pointwise(machine: Machine, size: int) -> Iterator[Work]:
    count = size // 2
    next_x = rounds([machine.randn(count) for _ in range(COPIES)])
    y = machine.randn(count)
    wide = machine.randn(count, dtype=torch.float32)
    rows = next_x().view(-1, min(WIDTH, count))
    yield "add", lambda: next_x() + y, 3 * size
    yield "add into fp32", lambda: wide + next_x(), 5 * size
    yield "add_ fp32", lambda: wide.add_(1e-3), 4 * size
    yield "copy", lambda: next_x().clone(), 2 * size
    yield "zero", lambda: y.zero_(), size
    yield "cast fp32 to bf16", lambda: wide.bfloat16(), 3 * size
    yield "cast bf16 to fp32", lambda: next_x().float(), 3 * size
    yield "column sum", lambda: rows.sum(0), size
    yield "gelu forward", lambda: F.gelu(next_x()), 2 * size
    yield "gelu backward", _backward(F.gelu, y.clone().requires_grad_()), 3 * size


def _norms(machine: Machine, size: int) -> Iterator[Work]:
    """In bf16, and in fp32 as autocast runs it; `size` counts the input in its own type."""
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        x = machine.randn(size // dtype.itemsize // WIDTH, WIDTH, dtype=dtype).requires_grad_()
        layer = nn.LayerNorm(WIDTH, device=machine.device, dtype=dtype)
        yield f"layer_norm forward {name}", lambda layer=layer, x=x: layer(x), 2 * size
        yield f"layer_norm backward {name}", _backward(layer, x, *layer.parameters()), 3 * size


def _losses(machine: Machine, size: int) -> Iterator[Work]:
    tokens = max(1, size // (4 * VOCABULARY))
    logits = machine.randn(tokens, VOCABULARY, dtype=torch.float32).requires_grad_()
    labels = machine.tokens(tokens)
    real = logits.numel() * 4
    yield "softmax", lambda: logits.detach().softmax(-1), 2 * real
    yield "cross_entropy forward", lambda: F.cross_entropy(logits, labels), 3 * real
    yield "cross_entropy both", lambda: torch.autograd.grad(F.cross_entropy(logits, labels), logits), 8 * real


def _embeddings(machine: Machine, size: int) -> Iterator[Work]:
    """fp32 table; backward also fills a gradient of the table's size."""
    table = machine.randn(VOCABULARY, WIDTH, dtype=torch.float32).requires_grad_()
    ids = machine.tokens(max(1, size // (4 * WIDTH)))
    yield "embedding forward", lambda: F.embedding(ids, table), 2 * size
    yield "embedding backward", _backward(lambda t: F.embedding(ids, t), table), 2 * size + table.numel() * 4


def _backward(forward: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Callable[[], Any]:
    output = forward(x)
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, (x, *others), gradient, retain_graph=True)


# --- d. Launches -----------------------------------------------------------------------------------------------------

HIDDEN, HEADS, SEQ, LAYERS = 64, 4, 16, 24


class Block(nn.Module):
    """A transformer block so small that only its launches take time."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.project = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.expand = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.contract = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (self.project[i](normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for i in range(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project[3](mixed.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norms[1](x))))


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def launch(machine: Machine) -> Iterator[Row]:
    calls = 20 if machine.tiny else 2000
    yield from _single_ops(machine, calls)
    yield from _chain(machine, 20 if machine.tiny else 500)
    for autocast in (False, True):
        yield from _blocks(machine, autocast, compiled=False)
    for autocast in (False,) if machine.tiny else (False, True):
        yield from _blocks(machine, autocast, compiled=True)


def _single_ops(machine: Machine, calls: int) -> Iterator[Row]:
    """Forward from eager Python, without and with a graph to record."""
    x = machine.randn(4, HIDDEN)
    one, weight = machine.randn(1), machine.randn(HIDDEN, HIDDEN)
    q = machine.randn(1, HEADS, SEQ, 32)
    works: dict[str, Callable[[], Any]] = {
        "add_": lambda: one.add_(1),
        "add": lambda: x + x,
        "linear": lambda: F.linear(x, weight),
        "layer_norm": lambda: F.layer_norm(x, (HIDDEN,)),
        "gelu": lambda: F.gelu(x),
        "view": lambda: x.view(-1),
        "sdpa": lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    }
    for name, work in works.items():
        yield {"op": name, "graph": False, **host_seconds(machine, work, calls)}
    weight.requires_grad_()
    x.requires_grad_()
    q.requires_grad_()
    for name in ("add", "linear", "layer_norm", "gelu", "view", "sdpa"):
        yield {"op": name, "graph": True, **host_seconds(machine, works[name], calls)}


def _chain(machine: Machine, length: int) -> Iterator[Row]:
    """Backward of a chain of `length` equal nodes, per node."""
    x = machine.randn(HIDDEN, HIDDEN).requires_grad_()
    w = machine.randn(HIDDEN, HIDDEN)
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "mul": lambda y: y * 0.5,
        "gelu": F.gelu,
        "matmul": lambda y: y @ w,
        "layer_norm": lambda y: F.layer_norm(y, (HIDDEN,)),
    }
    for name, step in steps.items():
        y = x
        for _ in range(length):
            y = step(y)
        gradient = torch.ones_like(y)
        work = lambda y=y, gradient=gradient: torch.autograd.grad(y, x, gradient, retain_graph=True)  # noqa: E731
        row = host_seconds(machine, work, 3)
        yield {"op": f"{name} backward", **{key: value / length for key, value in row.items()}}


def _blocks(machine: Machine, autocast: bool, compiled: bool) -> Iterator[Row]:
    """Forward and backward of a stack of tiny blocks: host seconds of the whole stack, and its ops."""
    blocks = nn.Sequential(*(Block() for _ in range(LAYERS))).to(machine.device)
    x = torch.randn(2, SEQ, HIDDEN, device=machine.device)
    context = torch.autocast(machine.device.type, torch.bfloat16, enabled=autocast)

    def forward() -> Tensor:
        with context:
            return blocks(x).sum()

    row: Row = {"op": "blocks", "autocast": autocast, "compiled": compiled, "layers": LAYERS}
    if compiled:
        start = time.perf_counter()
        for block in blocks:
            block.compile()
        forward().backward()
        machine.wait()
        row["compile_seconds"] = time.perf_counter() - start
    else:
        row |= _op_counts(forward)
    blocks.zero_grad()
    yield {**row, **_split(machine, forward, blocks, calls=2 if machine.tiny else 20)}


def _op_counts(forward: Callable[[], Tensor]) -> Row:
    with CountOps() as ops:
        loss = forward()
        forward_ops = dict(ops.counts)
        loss.backward()
    backward_ops = {name: count - forward_ops.get(name, 0) for name, count in ops.counts.items()}
    return {"forward_ops": forward_ops, "backward_ops": {name: n for name, n in backward_ops.items() if n}}


def _split(machine: Machine, forward: Callable[[], Tensor], module: nn.Module, calls: int) -> Row:
    """Host seconds of forward and of backward, each begun with an idle device; and of both, one after another."""
    seconds: dict[str, list[float]] = {"forward": [], "backward": [], "both": []}
    for _ in range(calls):
        machine.wait()
        start = time.perf_counter()
        loss = forward()
        seconds["forward"].append(time.perf_counter() - start)
        machine.wait()
        start = time.perf_counter()
        loss.backward()
        seconds["backward"].append(time.perf_counter() - start)
        module.zero_grad()
    for _ in range(calls):
        machine.wait()
        start = time.perf_counter()
        forward().backward()
        machine.wait()
        seconds["both"].append(time.perf_counter() - start)
        module.zero_grad()
    return {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}


# --- e. Update -------------------------------------------------------------------------------------------------------


def update(machine: Machine) -> Iterator[Row]:
    """AdamW over 1.3e9 fp32 elements in 300 tensors, a third of them vectors; and clipping by the global norm."""
    matrices, rows, width = (4, 32, 32) if machine.tiny else (200, 3174, WIDTH)
    shapes = [(rows, width)] * matrices + [(width,)] * (matrices // 2)
    parameters = [nn.Parameter(machine.randn(*shape, dtype=torch.float32)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    count = float(sum(parameter.numel() for parameter in parameters))
    row = {"tensors": len(parameters), "elements": count}
    yield timed(machine, {"op": "clip", **row}, lambda: nn.utils.clip_grad_norm_(parameters, 1.0), bytes=count * 12)
    for kind in ("fused", "foreach"):
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **{kind: True})
        yield timed(machine, {"op": f"AdamW {kind}", **row}, optimizer.step, bytes=count * 28)
        del optimizer
        machine.free()


# --- f. Host link ----------------------------------------------------------------------------------------------------


def host_link(machine: Machine) -> Iterator[Row]:
    """Pinned memory, each direction alone and both at once (bytes of one direction)."""
    pinned = machine.device.type == "cuda"
    for size in (1,) if machine.tiny else (1, 16, 256, 1024):
        host = [torch.empty(size * MEGABYTE, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        device = [torch.empty(size * MEGABYTE, dtype=torch.uint8, device=machine.device) for _ in range(2)]
        to_device = lambda: device[0].copy_(host[0], non_blocking=True)  # noqa: B023, E731
        to_host = lambda: host[1].copy_(device[1], non_blocking=True)  # noqa: B023, E731
        amount = float(size * MEGABYTE)
        yield timed(machine, {"op": "host to device", "size": amount}, to_device, bytes=amount)
        yield timed(machine, {"op": "device to host", "size": amount}, to_host, bytes=amount)
        if pinned:
            yield timed(machine, {"op": "both", "size": amount}, _at_once(to_device, to_host), bytes=amount)


def _at_once(one: Callable[[], Any], other: Callable[[], Any]) -> Callable[[], None]:
    """Both on streams of their own, begun together and waited for by the current stream."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def run() -> None:
        current = torch.cuda.current_stream()
        for stream, work in zip(streams, (one, other), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            current.wait_stream(stream)

    return run


# --- All parts -------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "host_link": host_link,
    "bytes_bound": bytes_bound,
    "attention": attention,
    "matmul": matmul,
    "matmul_fp32": matmul_fp32,
    "bmm": bmm,
    "update": update,
    "launch": launch,
}


def environment(machine: Machine) -> Row:
    if machine.device.type != "cuda":
        return {"torch": torch.__version__, "device": str(machine.device)}
    properties = torch.cuda.get_device_properties(machine.device)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }


def run(machine: Machine, parts: list[str], path: Path) -> None:
    result: dict[str, Any] = {"environment": environment(machine), "part_seconds": {}}
    for name in parts:
        print(f"{name} ...", flush=True)
        start = time.perf_counter()
        rows: list[Row] = []
        try:
            rows.extend(PARTS[name](machine))
        except Exception:
            rows.append({"error": traceback.format_exc()})
        machine.free()
        result[name] = rows
        result["part_seconds"][name] = time.perf_counter() - start
        path.write_text(json.dumps(result, indent=1))
        failed = sum("error" in row for row in rows)
        print(f"{name}: {len(rows)} rows, {failed} failed, {result['part_seconds'][name]:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help="names with commas between them")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    options = parser.parse_args()
    run(Machine(torch.device(options.device), options.tiny), options.parts.split(","), options.out)


if __name__ == "__main__":
    main()
