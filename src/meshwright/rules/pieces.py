"""In how large pieces a language model's loss is made where logits of all tokens never exist: one figure for cost and runtime."""

from __future__ import annotations

PIECE_BYTES = 256 * 2**20
"""Room for one piece of logits in fp32: large enough that each product fills a device, small beside what a model keeps."""
