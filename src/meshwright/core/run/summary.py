"""A RunSummary: what a run came to, beside what was promised."""

from __future__ import annotations

from meshwright.core.codec import Value


class RunSummary(Value, kw_only=True):
    """The end of a training run: its loss and figures, predicted and measured, and where its files are."""

    loss: float
    """Of the last step."""
    step_seconds: float | None
    """Measured; None where the run recorded no step."""
    tokens_per_second: float | None
    predicted_step_seconds: float
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    dropped_tokens: int
    """Choices of experts that had no room."""
    dropped_share: float
    validation_loss: float | None
    num_steps: int
    stopped: str | None
    """Why it ended before its last step."""
    interrupted: bool = False
    """By Ctrl-C or a signal, with a checkpoint."""
    restarts: int
    checkpoint: str
    run_folder: str
