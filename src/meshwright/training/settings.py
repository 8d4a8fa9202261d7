"""Everything a training run is told: the contents of FILE.toml. Every field has a default, except the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from meshwright.core.bounds import (
    LARGEST_NUMBER,
    Count,
    CountOrZero,
    Degree,
    NotNegative,
    Number,
    Positive,
    Share,
    WholeNumber,
)
from meshwright.core.codec import Value
from meshwright.core.request import PlanRequest


class DataSettings(Value, kw_only=True):
    """What a run is trained on: `[data]`."""

    source: str = "auto"
    """`stdlib` (Python's own source files, as bytes), `text:PATH`, `images` (synthetic), `images:PATH` (one folder of pictures a
    class), or `path/to/file.py:function`. `auto`: stdlib for models that take text, images for models that take images."""
    shuffle: bool = True
    validation_every: CountOrZero = 100
    """Steps between validations; 0 for none."""
    validation_batches: Count = 4


class OptimizerSettings(Value, kw_only=True):
    """How parameters are updated: `[optimizer]`."""

    kind: str = "AdamW"
    """Any class of torch.optim but LBFGS and SparseAdam."""
    weight_decay: Number = 0.1
    decay_vectors: bool = False
    """Whether biases and norm weights decay too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the class as they are, such as betas = [0.9, 0.95]."""
    clip_norm: Positive | Literal["none"] = 1.0
    """Largest global gradient norm, or "none"."""


class LearningRateSettings(Value, kw_only=True):
    """The learning rate over the steps of a run: `[learning_rate]`."""

    peak: Positive = 3e-4
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: CountOrZero = 20
    final_share: Share = 0.1
    """Of the peak, at the last step."""


class CheckpointSettings(Value, kw_only=True):
    """When and where a run is saved: `[checkpoint]`."""

    every: CountOrZero = 0
    """Steps between checkpoints; 0 for one at the end only."""
    keep: Count = 2
    """How many; older ones are removed when a newer one is whole."""
    asynchronous: bool = True
    """Steps go on while a copy of the state in host memory is written; else they wait for the disk."""
    elsewhere: str | None = None
    """A folder, best on another disk, for a checkpoint that the run folder does not take. `--resume` looks there too."""
    wait_seconds: NotNegative = 86400.0
    """How long a run that has ended waits for a disk that does not take its last checkpoint; 0: not at all."""


class FaultSettings(Value, kw_only=True):
    """What a run does when something goes wrong: `[faults]` of its settings, and what a `mw.Guard` goes by.

    restarts                how often a run goes on from its last checkpoint after a rank was lost
    ranks                   same, or fewer: without the rank that was lost, under a new plan where the old one needs it
    on_nan                  a loss that is no number: stop, skip (the update), or rollback (to the last checkpoint, and on behind)
    on_spike, spike         the same, or ignore, for a loss more than `spike` times the median of the last 50
    check_replicas_every    steps between two comparisons of parameters that dp ranks hold alike; 0 for none
    """

    restarts: CountOrZero = 0
    """How often in all a run goes on from its last checkpoint after a rank was killed, hung, failed or lost its link."""
    ranks: Literal["same", "fewer"] = "same"
    """After a rank was killed, hung or lost: as many ranks again, or without it, under a new plan where the old needs it."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """A loss that is not finite: end the run; leave the update out; or go back to the last checkpoint and on behind the data that
    led to it."""
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    """The same for a loss far above those before it."""
    spike: Annotated[float, Meta(gt=1, le=LARGEST_NUMBER)] = 3.0
    """A loss is a spike when it is more than so many times the median of the last 50."""
    check_replicas_every: CountOrZero = 100
    """Steps between two comparisons of parameters that data-parallel ranks hold alike; 0 for none."""


class CompareSettings(Value, kw_only=True):
    """What `meshwright compare` runs; training does not look at it."""

    plans: tuple[str, ...] = ("ddp", "zero3")
    """Short names: one, ddp, zero1, zero2, zero3, tp2, pp2, cp2, ep2, recompute, compile, search; joined by +."""
    nproc: tuple[Degree, ...] = (1, 2)
    repeat: Count = 1


class Settings(Value, kw_only=True):
    """A run: its model, its plan or how one is found, its data, optimizer and checkpoints. A `.toml` file, see examples/."""

    format: Literal[1] = 1
    name: str = "run"
    model: str
    weights: str | None = None
    """A folder of safetensors to start from, such as one that transformers saved; without it, from random numbers."""
    planner: Literal["plain", "search"] = "plain"
    """What decides the parts of the plan that nobody fixed: plain defaults, or the search."""
    plan: PlanRequest = PlanRequest()
    plan_file: str | None = None
    """A whole plan; then `plan` and `planner` are not used."""
    cluster: str = "local"
    hosts: Degree = 1
    memory_bytes: Count | None = None
    """Budget per device; without it, all of the device's memory."""
    nproc: Degree | None = None
    """Local ranks; without it, one per GPU or core."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    steps: Count = 200
    max_seconds: Positive | None = None
    """Stop, with a checkpoint, at the first step after this long."""
    timeout: NotNegative = 600.0
    """Seconds one rank may wait for another; then the run ends and says which rank hangs, and where. 0: no limit."""
    host_link: Positive | None = None
    """Bytes a second each way between device and host where the device is a CPU: a stand-in for the link of a GPU, to try
    offload without one. Without it, as fast as memory copies."""
    check: bool = True
    """Compare a small copy of the model with one process before it first runs under a plan that divides it. Models that
    Meshwright brings are not compared."""
    find_nan: bool = False
    """Check every block in every step, so that a loss that is not finite is traced to the block that made it. Slow."""
    seed: WholeNumber = 0
    random: Literal["rank", "sample"] = "rank"
    """What random numbers of a forward (dropout) depend on: the rank that draws them; or seed, step, sample and place in it, so
    that every plan draws the same ones, which is a little slower."""
    out: str | None = None
    """Run folder; without it, runs/NAME."""
    tensorboard: bool = True
    wandb: Literal["off", "on", "offline"] = "off"
    """Weights & Biases: "on" as its own settings say (`wandb login`, WANDB_MODE, WANDB_PROJECT), "offline" into the run folder, to
    be sent by `wandb sync`. Off unless asked for, since it sends what a run does to a server."""
    data: DataSettings = DataSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    learning_rate: LearningRateSettings = LearningRateSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    faults: FaultSettings = FaultSettings()
    compare: CompareSettings | None = None

    @property
    def folder(self) -> str:
        return self.out or f"runs/{self.name}"
