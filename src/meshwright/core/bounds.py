"""The most that a file, a flag or a model's name may ask for.

A few bytes can ask for more than any machine has: a range of 2,000,000,000 blocks, a million stages. Each limit is far above what
anybody trains, and low enough that a value within it is read, checked and costed within seconds. A value above it is refused
where it is read, with the name of the field and the limit.

    plan, settings, cluster, configuration     LARGEST_FILE_BYTES    one screen, or a few
    what a run wrote about itself              LARGEST_RECORD_BYTES  one entry for every step and tensor
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST_RANKS = 1 << 20
"""Ranks of a plan, and along one axis of its mesh; hosts of a cluster, and devices of all of them together."""
MOST_BLOCKS = 1 << 14
"""Blocks that a plan names, ranges written out."""
MOST_SAMPLES = 1 << 30
"""In a global batch, a microbatch; and microbatches in a step."""
MOST_ACTIONS = 1 << 20
"""Of one step's schedule: stages × microbatches, where there is more than one stage."""
MOST_LAYERS = 1 << 10
"""Of a model by name or config: each takes time to build and to follow."""
MOST_MODULES = 1 << 17
"""Of a model that is built to be looked at."""
MOST_WIDTH = 1 << 20
"""Any other size of a model by name: its width, its heads, its sequence."""
MOST_CONFIG_NUMBER = 1 << 24
"""Any whole number of a Hugging Face config that is no base of a formula: vocabularies and positions are the largest."""
MOST_SAMPLE_NUMBERS = 1 << 24
"""Numbers in one sample of a model's example batch: these are drawn, and take memory."""
MOST_COUNT = 1 << 53
"""Steps, tokens, bytes, and all else that is counted: the last whole number before floats skip some."""
LARGEST_NUMBER = 1e30
"""Of a rate, a size or a time. It leaves out infinity, and products of a few such numbers stay finite."""
SMALLEST_NUMBER = 1e-30
"""Of a rate, a size or a time that is divided by."""
LONGEST_LATENCY_SECONDS = 3600.0
"""Limit of the latency of a launch or a hop, and of the constant overhead of a step: above it, floats do not tell plans apart."""
MOST_NESTED = 64
"""Levels of lists and objects inside each other."""
MOST_LETTERS = 1 << 16
"""In one text of a value."""
LARGEST_FILE_BYTES = 4 << 20
LARGEST_RECORD_BYTES = 1 << 30
LONGEST_LINE_BYTES = 1 << 20
"""Of what a run wrote line by line, such as its metrics."""

Degree = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Samples = Annotated[int, Meta(ge=1, le=MOST_SAMPLES)]
Count = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
CountOrZero = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
WholeNumber = Annotated[int, Meta(ge=-MOST_COUNT, le=MOST_COUNT)]
Positive = Annotated[float, Meta(ge=SMALLEST_NUMBER, le=LARGEST_NUMBER)]
NotNegative = Annotated[float, Meta(ge=0, le=LARGEST_NUMBER)]
Latency = Annotated[float, Meta(ge=0, le=LONGEST_LATENCY_SECONDS)]
Number = Annotated[float, Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Share = Annotated[float, Meta(ge=0, le=1)]
