"""Samples no longer than a model's table of positions: a longer one reads past its end, which a GPU answers with a crash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from meshwright.core.errors import InputError
from meshwright.models.objective import Batch
from meshwright.training.stream import Stream

SHORT_NAMES = ("wpe", "pos_emb", "pos_embed", "pos_embedding", "pos_embeddings")


class PositionTable(NamedTuple):
    name: str
    length: int
    """Tokens that a sample may have."""


def find_positions(module: nn.Module) -> PositionTable | None:
    """The longest learned table of positions; None where there is none."""
    found = [
        PositionTable(name, part.num_embeddings - _unused(part))
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) and _is_of_positions(name.rpartition(".")[2].lower())
    ]
    return max(found, key=lambda table: table.length, default=None)


def _is_of_positions(name: str) -> bool:
    return name in SHORT_NAMES or ("position" in name and "relative" not in name)


def _unused(table: nn.Embedding) -> int:
    """Rows before the first token's: BART and OPT name their number, RoBERTa begins behind the row of padding."""
    offset = getattr(table, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1


class PositionedStream:
    """A stream whose samples all fit into the table."""

    def __init__(self, stream: Stream, table: PositionTable) -> None:
        self.stream, self.table = stream, table

    @property
    def cursor(self) -> int:
        return self.stream.cursor

    @cursor.setter
    def cursor(self, value: int) -> None:
        self.stream.cursor = value

    def seek(self, cursor: int) -> None:
        self.stream.seek(cursor)

    def next(self) -> Batch:
        batch = self.stream.next()
        longest = max((tensor.shape[1] for tensor in _tokens(batch)), default=0)
        if longest > self.table.length:
            raise InputError(
                f"a sample has {longest} tokens, but '{self.table.name}' of the model has positions for {self.table.length}: cut "
                f"the samples to {self.table.length} (truncation=True, max_length={self.table.length} in a tokenizer), or make the "
                "table longer"
            )
        return batch


def _tokens(batch: Batch) -> list[Tensor]:
    """What may be token ids: whole numbers by sample and place."""
    entries = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
    return [one for one in entries if isinstance(one, Tensor) and one.dim() == 2 and not one.is_floating_point()]


def within_positions(stream: Stream, table: PositionTable | None) -> Stream:
    return stream if table is None else PositionedStream(stream, table)
