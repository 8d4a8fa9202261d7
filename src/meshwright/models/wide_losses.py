"""Losses in fp32 for a module whose parameters are in 16 bits, also those that its own forward computes.

Autocast keeps torch's losses in fp32; a module that is gathered in 16 bits would compute them in 16. Where a model calls its loss
must not decide in what precision it is computed: inside this mode each of torch's losses sees fp32, as under autocast.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.models.head_loss import PostponedLogits

NAMES = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss",
    "margin_ranking_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "poisson_nll_loss",
    "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
)  # fmt: skip
LOSSES = frozenset(getattr(F, name) for name in NAMES)


class WideLosses(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in LOSSES:
            args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow and not isinstance(value, PostponedLogits) else value
