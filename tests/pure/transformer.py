"""A GPT-like transformer written down by hand, op by op, in one precision throughout. No torch.

A block keeps, in items of i bytes (s tokens, h hidden, a heads), with eager attention and dropout:

    both norms' inputs 2·sh, their results 2·sh, query, key, value 3·sh, mixed values sh, MLP 4sh + 4sh       16 sh · i
    softmax and what dropout makes of it                                                                    2 a s² · i
    masks of one byte                                                                               2 sh + a s²

so that with i = 2 it is Korthikanti's s h (34 + 5 a s / h) (2205.05198, equation 1). Statistics of the norms are left out,
as there. The norm at the entry reads the block before; a block keeps its own result for the one after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from writer import ITEM, Storage, Writer, shape_of

from meshwright.core.graph import Affine, Block, Graph, Kind, Parameter, Phase, Precision, Segment, Shape

DTYPE = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Sizes:
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    seq: int = 32
    vocab: int = 2048
    attention: Literal["fused", "eager"] = "fused"
    dropout: bool = False
    outputs_first: bool = True
    """Linear's [outputs, inputs]; else Conv1D's [inputs, outputs]."""
    tied: bool = False
    precision: Precision = "fp16"

    @property
    def stream(self) -> Shape:
        return shape_of("n", self.seq, self.hidden)

    @property
    def stream_bytes(self) -> int:
        return self.seq * self.hidden * ITEM[self.precision]


class BlockWriter(Writer):
    """One transformer block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__("Block", sizes.precision)
        self.sizes = sizes
        self.parameters: dict[str, tuple[int, ...]] = {}

    def linear(self, name: str, x: Storage, inputs: int, outputs: int) -> Storage:
        self.parameters[f"{name}.weight"] = (outputs, inputs) if self.sizes.outputs_first else (inputs, outputs)
        self.parameters[f"{name}.bias"] = (outputs,)
        tokens = ("n", self.sizes.seq)
        return self.op(
            "forward", "addmm", "matmul",
            [(f"{name}.bias", shape_of(outputs)), x, (f"{name}.weight", shape_of(inputs, outputs))],
            shape_of(tokens, outputs),
            input_shapes=[shape_of(outputs), shape_of(tokens, inputs), shape_of(inputs, outputs)],
            flops=Affine(0.0, 2.0 * self.sizes.seq * inputs * outputs),
        )  # fmt: skip

    def linear_backward(self, name: str, gradient: Storage, x: Storage) -> Storage:
        weight = self.parameters[f"{name}.weight"]
        outputs, inputs = weight if self.sizes.outputs_first else weight[::-1]
        tokens, flops = ("n", self.sizes.seq), Affine(0.0, 2.0 * self.sizes.seq * inputs * outputs)
        over = [shape_of(tokens, outputs), shape_of(outputs, inputs)]
        found = self.op(
            "backward", "mm", "matmul", [gradient, (f"{name}.weight", over[1])], shape_of(tokens, inputs),
            input_shapes=over, flops=flops,
        )  # fmt: skip
        self.op(
            "backward", "mm", "matmul", [gradient, x], shape_of(*weight), gradient=True,
            input_shapes=[shape_of(outputs, tokens), shape_of(tokens, inputs)], flops=flops,
        )  # fmt: skip
        self.op("backward", "sum", "reduction", [gradient], shape_of(1, outputs), gradient=True)
        return found

    def norm(self, name: str, x: Storage) -> Storage:
        width = shape_of(self.sizes.hidden)
        self.parameters[f"{name}.weight"] = self.parameters[f"{name}.bias"] = (self.sizes.hidden,)
        reads = [x, (f"{name}.weight", width), (f"{name}.bias", width)]
        return self.op("forward", "native_layer_norm", "normalisation", reads, self.sizes.stream)

    def norm_backward(self, name: str, gradient: Storage, x: Storage) -> Storage:
        reads = [gradient, x, (f"{name}.weight", shape_of(self.sizes.hidden))]
        return self.op("backward", "native_layer_norm_backward", "normalisation", reads, self.sizes.stream)

    def dropped(self, x: Storage, **fields: str) -> Storage:
        if not self.sizes.dropout:
            return x
        return self.op("forward", "native_dropout", "elementwise", [x], x.shape, mask=True, **fields)

    def dropped_backward(self, gradient: Storage, result: Storage, **fields: str) -> Storage:
        if not self.sizes.dropout:
            return gradient
        reads = [gradient, self.mask_of(result)]
        return self.op("backward", "native_dropout_backward", "elementwise", reads, gradient.shape, **fields)

    def add(self, phase: Phase, one: Storage, other: Storage) -> Storage:
        return self.op(phase, "add", "elementwise", [one, other], self.sizes.stream)

    # ------------------------------------------------------------ attention

    @property
    def per_head(self) -> Shape:
        return shape_of("n", self.sizes.heads, self.sizes.seq, self.sizes.hidden // self.sizes.heads)

    @property
    def scores(self) -> Shape:
        return shape_of(("n", self.sizes.heads), self.sizes.seq, self.sizes.seq)

    @property
    def product_flops(self) -> Affine:
        return Affine(0.0, 2.0 * self.sizes.seq**2 * self.sizes.hidden)

    def fused(self, parts: list[Storage]) -> Storage:
        return self.op(
            "forward", "_scaled_dot_product_flash_attention", "attention", list(parts), self.per_head,
            input_shapes=[self.per_head] * 3, flops=Affine(0.0, 2 * self.product_flops.per_sample),
            region="attention", causal=True,
        )  # fmt: skip

    def fused_backward(self, gradient: Storage, parts: list[Storage], mixed: Storage) -> list[Storage]:
        found = self.op(
            "backward", "_scaled_dot_product_flash_attention_backward", "attention", [gradient, *parts, mixed],
            self.per_head, input_shapes=[self.per_head] * 5, copies=3,
            flops=Affine(0.0, 5 * self.product_flops.per_sample), region="attention", causal=True,
        )  # fmt: skip
        return [found] * 3

    def eager(self, parts: list[Storage]) -> tuple[Storage, Storage, Storage]:
        """Softmax, what dropout makes of it, and the mixed values."""
        query, key, value = parts
        scores = self._product("forward", query, key, self.scores)
        softmax = self.op("forward", "_softmax", "normalisation", [scores], self.scores, region="attention")
        kept = self.dropped(softmax, region="attention")
        return softmax, kept, self._product("forward", kept, value, self._wide)

    def eager_backward(self, gradient: Storage, parts: list[Storage], softmax: Storage, kept: Storage) -> list[Storage]:
        query, key, value = parts
        to_kept = self._product("backward", gradient, value, self.scores)
        to_value = self._product("backward", kept, gradient, self._wide)
        to_softmax = self.dropped_backward(to_kept, kept, region="attention")
        to_scores = self.op(
            "backward",
            "_softmax_backward_data",
            "normalisation",
            [to_softmax, softmax],
            self.scores,
            region="attention",
        )
        to_query = self._product("backward", to_scores, key, self._wide)
        to_key = self._product("backward", to_scores, query, self._wide)
        return [to_query, to_key, to_value]

    @property
    def _wide(self) -> Shape:
        return shape_of(("n", self.sizes.heads), self.sizes.seq, self.sizes.hidden // self.sizes.heads)

    def _product(self, phase: Phase, one: Storage, other: Storage, result: Shape) -> Storage:
        return self.op(phase, "bmm", "matmul", [one, other], result, flops=self.product_flops, region="attention")

    # ------------------------------------------------------------ the block

    def written(self) -> Kind:
        hidden = self.sizes.hidden
        x = self.outside("@input", self.sizes.stream, freed=True)
        entry = self.norm("attention_norm", x)
        parts = [self.linear(f"attention.{name}", entry, hidden, hidden) for name in ("query", "key", "value")]
        softmax = kept = None
        if self.sizes.attention == "fused":
            mixed = self.fused(parts)
        else:
            softmax, kept, mixed = self.eager(parts)
        projected = self.dropped(self.linear("attention.output", mixed, hidden, hidden))
        middle = self.add("forward", x, projected)
        second = self.norm("mlp_norm", middle)
        wide = self.linear("mlp.expand", second, hidden, 4 * hidden)
        bent = self.op("forward", "gelu", "transcendental", [wide], shape_of("n", self.sizes.seq, 4 * hidden))
        contracted = self.dropped(self.linear("mlp.contract", bent, 4 * hidden, hidden))
        result = self.add("forward", middle, contracted)
        self.hand_on(result, saved=True)
        num_forward = len(self.ops)

        gradient = self.outside("@input", self.sizes.stream, freed=True)
        to_bent = self.linear_backward("mlp.contract", self.dropped_backward(gradient, contracted), bent)
        to_wide = self.op("backward", "gelu_backward", "transcendental", [to_bent, wide], bent.shape)
        to_second = self.linear_backward("mlp.expand", to_wide, second)
        to_middle = self.add("backward", gradient, self.norm_backward("mlp_norm", to_second, middle))
        to_mixed = self.linear_backward("attention.output", self.dropped_backward(to_middle, projected), mixed)
        if softmax is None or kept is None:
            to_parts = self.fused_backward(to_mixed, parts, mixed)
        else:
            to_parts = self.eager_backward(to_mixed, parts, softmax, kept)
        back = [
            self.linear_backward(f"attention.{name}", to_part, entry)
            for name, to_part in zip(("query", "key", "value"), to_parts, strict=True)
        ]
        to_entry = self.add("backward", self.add("backward", back[0], back[1]), back[2])
        to_x = self.add("backward", to_middle, self.norm_backward("attention_norm", to_entry, x))
        self.hand_on(to_x, saved=False)
        output = Affine(0.0, float(self.sizes.stream_bytes))
        return self.kind(("forward", num_forward), ("backward", len(self.ops) - num_forward), outputs=(output,))


# ---------------------------------------------------------------- what is around the blocks


def _embedding(name: str, rows: int, sizes: Sizes, tokens: Shape, gradient: str) -> Kind:
    """A table; its gradient is the stream's, or (positions) what block '' summed over the samples."""
    writer = Writer(name, sizes.precision)
    width = (*tokens, *shape_of(sizes.hidden))
    ids = writer.outside("@batch", tokens, freed=False)
    found = writer.op(
        "forward", "embedding", "copy", [("weight", shape_of(rows, sizes.hidden)), ids], width
    )  # its result is summed in block '' and given back there
    writer.hand_on(found, saved=False)
    arriving = writer.outside(gradient, width, freed=True)
    writer.op(
        "backward", "embedding_dense_backward", "copy", [arriving, ids], shape_of(rows, sizes.hidden), gradient=True
    )
    return writer.kind(("forward", 1), ("backward", 1), outputs=(found.size,))


def _norm(sizes: Sizes) -> Kind:
    writer = Writer("LayerNorm", sizes.precision)
    width = shape_of(sizes.hidden)
    x = writer.outside("@input", sizes.stream, freed=True)
    found = writer.op(
        "forward", "native_layer_norm", "normalisation", [x, ("weight", width), ("bias", width)], sizes.stream
    )
    writer.hand_on(found, saved=True)
    arriving = writer.outside("@head#2", sizes.stream, freed=True)
    back = writer.op(
        "backward", "native_layer_norm_backward", "normalisation", [arriving, x, ("weight", width)], sizes.stream
    )
    writer.hand_on(back, saved=False)
    return writer.kind(("forward", 1), ("backward", 1), outputs=(found.size,))


def _head(sizes: Sizes) -> Kind:
    writer = Writer("Linear", sizes.precision)
    tokens, hidden, vocab = ("n", sizes.seq), sizes.hidden, sizes.vocab
    flops = Affine(0.0, 2.0 * sizes.seq * hidden * vocab)
    x = writer.outside("@norm#0", shape_of(tokens, hidden), freed=True)
    logits = writer.op(
        "forward", "mm", "matmul", [x, ("weight", shape_of(hidden, vocab))], shape_of(tokens, vocab), flops=flops
    )
    writer.hand_on(logits, saved=False)
    gradient = writer.outside("@#4", shape_of(tokens, vocab), freed=True)
    writer.op(
        "backward", "mm", "matmul", [gradient, x], shape_of(vocab, hidden), flops=flops, gradient=True,
        input_shapes=[shape_of(vocab, tokens), shape_of(tokens, hidden)],
    )  # fmt: skip
    back = writer.op(
        "backward",
        "mm",
        "matmul",
        [gradient, ("weight", shape_of(vocab, hidden))],
        shape_of(tokens, hidden),
        flops=flops,
    )
    writer.hand_on(back, saved=False)
    return writer.kind(("forward", 1), ("backward", 2), outputs=(logits.size,))


def _outside(sizes: Sizes) -> Kind:
    """Block '': tokens and positions added up (op 0), the loss (1, 2), its backward (3, 4), positions' gradient (5)."""
    writer = Writer("GPT", sizes.precision)
    rows = shape_of(("n", sizes.seq), sizes.vocab)
    token = writer.outside("@token_embedding#0", sizes.stream, freed=True)
    position = writer.outside("@position_embedding#0", shape_of(sizes.seq, sizes.hidden), freed=True)
    stream = writer.op("forward", "add", "elementwise", [token, position], sizes.stream)
    writer.hand_on(stream, saved=True)
    logits = writer.outside("@head#0", rows, freed=True)
    logs = writer.op("forward", "_log_softmax", "normalisation", [logits], rows, precision="fp32")
    ids = writer.outside("@batch", shape_of(("n", sizes.seq)), freed=False)
    writer.op("forward", "nll_loss_forward", "copy", [logs, ids], (), precision="fp32")
    one = writer.op("backward", "nll_loss_backward", "copy", [logs, ids], rows, precision="fp32")
    back = writer.op("backward", "_log_softmax_backward_data", "normalisation", [one, logs], rows)
    writer.hand_on(back, saved=False)
    arriving = writer.outside("@input", sizes.stream, freed=False)  # the table of tokens reads it once more
    summed = writer.op("backward", "sum", "reduction", [arriving], shape_of(sizes.seq, sizes.hidden))
    writer.hand_on(summed, saved=False)
    return writer.kind(("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1))


def transformer_graph(sizes: Sizes | None = None, **changes: object) -> Graph:
    """Tables of tokens and positions, like blocks, a norm, a head without bias, and the loss in block ''."""
    sizes = sizes or Sizes(**changes)  # type: ignore[arg-type]
    block = BlockWriter(sizes)
    kind = block.written()
    names = [f"blocks.{number}" for number in range(sizes.layers)]
    ids = shape_of("n", sizes.seq)
    kinds = (
        _outside(sizes),
        _embedding("Embedding", sizes.vocab, sizes, ids, "@input"),
        _embedding("Embedding#2", sizes.seq, sizes, shape_of(sizes.seq), "@#5"),
        kind,
        _norm(sizes),
        _head(sizes),
    )
    return Graph(
        model="transformer",
        precision=sizes.precision,
        parameters=tuple(_parameters(sizes, names, block.parameters)),
        kinds=kinds,
        blocks=(
            Block(name="", kind="GPT", repeated=False),
            Block(name="token_embedding", kind="Embedding", repeated=False),
            Block(name="position_embedding", kind="Embedding#2", repeated=False),
            *(Block(name=name, kind="Block", repeated=True) for name in names),
            Block(name="norm", kind="LayerNorm", repeated=False),
            Block(name="head", kind="Linear", repeated=False),
        ),
        timeline=(
            *(Segment(name, 0) for name in ("token_embedding", "position_embedding", "", *names, "norm", "head")),
            Segment("", 1),
            Segment("", 2),
            *(Segment(name, 1) for name in ("head", "norm", *reversed(names))),
            Segment("", 3),
            Segment("position_embedding", 1),
            Segment("token_embedding", 1),
        ),
        buffer_bytes=0,
        batch_bytes=Affine(0.0, 16.0 * sizes.seq),
        tokens_per_sample=sizes.seq,
    )


def _parameters(sizes: Sizes, names: list[str], of_block: dict[str, tuple[int, ...]]) -> list[Parameter]:
    tied = "token_embedding.weight" if sizes.tied else None
    shapes = {
        "token_embedding": {"weight": (sizes.vocab, sizes.hidden)},
        "position_embedding": {"weight": (sizes.seq, sizes.hidden)},
        **dict.fromkeys(names, of_block),
        "norm": {"weight": (sizes.hidden,), "bias": (sizes.hidden,)},
        "head": {"weight": (sizes.vocab, sizes.hidden)},
    }
    return [
        Parameter(
            name=f"{block}.{name}",
            shape=shape,
            dtype=DTYPE[sizes.precision],  # type: ignore[arg-type]
            block=block,
            tied_to=tied if block == "head" else None,
        )
        for block, own in shapes.items()
        for name, shape in own.items()
    ]
