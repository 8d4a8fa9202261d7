"""A decoder-only transformer whose MLPs are experts: each token is worked on by the one or two that its router chose.

    p = softmax(router · x)                                     probability of each expert, in fp32 at least
    top=1  Switch: y = p_i · expert_i(x)                         i: the most probable
    top=2  GShard: y = Σ p_i / (p_i + p_j) · expert_i(x)         both chosen ones; the second is always used

Capacity: an expert takes C = ⌈capacity · k · N / E⌉ of the N tokens of a microbatch; all first choices come before all second
choices, and among them tokens in their order. What comes too late is dropped: that choice adds nothing to the token, and the
residual carries it on. `capacity=0`: nothing is dropped.                                          -> MoE.keep

Balance: E · Σ_e f_e · p̄_e, with f_e the share of tokens whose first choice is e and p̄_e the mean probability of e; 1 where
the spread is even. Blocks hand its sum on beside the activation, so that it travels wherever the activation does; times
`balance` it is part of the loss.                                                                  -> MoE.unevenness

Capacity and balance depend on which tokens are routed together: `depends_on_batch` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.bert import MLP
from meshwright.models.gpt import Attention, Decoder, GPTOptions, initialise_plainly
from meshwright.models.objective import Batch, Objective, default_count, default_loss, widened


@dataclass(frozen=True)
class MoEOptions(GPTOptions):
    experts: int = 8
    top: int = 2
    """Experts a token goes to: 1 as in Switch, 2 as in GShard."""
    capacity: float = 1.25
    """Tokens an expert takes, in multiples of an even share; 0: all that come."""
    every: int = 1
    """Every how many blocks one has experts, the last of them; the others have a plain MLP."""
    balance: float = 0.01
    """Weight of the load-balancing loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top not in (1, 2):
            raise ValueError(f"top={self.top}: a token goes to 1 expert (Switch) or 2 (GShard)")
        if self.top > self.experts:
            raise ValueError(f"top={self.top} is more than experts={self.experts}")
        if self.every > self.layers:
            raise ValueError(f"every={self.every} is more than layers={self.layers}: no block would have experts")
        if self.capacity < 0 or self.balance < 0:
            raise ValueError(f"capacity={self.capacity} and balance={self.balance} must not be negative")


class Experts(nn.Module):
    """E two-layer MLPs in stacked weights. Index E stands for a choice that was dropped."""

    def __init__(self, options: MoEOptions) -> None:
        super().__init__()
        self.num_experts = options.experts
        wide = options.mlp * options.hidden
        self.expand = nn.Parameter(torch.empty(options.experts, wide, options.hidden))
        self.contract = nn.Parameter(torch.empty(options.experts, options.hidden, wide))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[N, hidden], chosen experts [N, k], their weights [N, k] → [N, hidden]"""
        chosen = top_k_index.flatten()
        counts = (chosen[:, None] == torch.arange(self.num_experts, device=chosen.device)).sum(0)
        order = chosen.argsort(stable=True)  # by expert; what was dropped comes last
        tokens = order // top_k_index.shape[1]
        run = self.run_grouped if self.has_grouped_product(hidden_states) else self.run_each
        weighted = run(hidden_states, tokens, counts) * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add(0, tokens, weighted.to(hidden_states.dtype))

    def run_each(self, hidden_states: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """One expert after another on its rows; zeros for what was dropped."""
        sizes = counts.tolist()
        rows = hidden_states[tokens[: sum(sizes)]]
        parts = zip(rows.split(sizes), self.expand.unbind(), self.contract.unbind(), strict=True)
        made = [F.linear(F.gelu(F.linear(part, expand)), contract) for part, expand, contract in parts]
        dropped = made[0].new_zeros(len(tokens) - len(rows), rows.shape[1])
        return torch.cat([*made, dropped])

    def run_grouped(self, hidden_states: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """All experts in two products, without asking the device how many rows each has. Rows past the last expert's are
        left unwritten by them, in backward too."""
        ends = counts.cumsum(0, dtype=torch.int32)
        dropped = (torch.arange(len(tokens), device=tokens.device) >= ends[-1])[:, None]
        rows = hidden_states.to(torch.bfloat16)[tokens].masked_fill(dropped, 0)
        wide = F.grouped_mm(rows, self.expand.to(rows.dtype).transpose(1, 2), offs=ends)
        made = F.grouped_mm(F.gelu(wide), self.contract.to(rows.dtype).transpose(1, 2), offs=ends)
        return made.masked_fill(dropped, 0)

    def has_grouped_product(self, hidden_states: Tensor) -> bool:
        """On a GPU, in bfloat16, where torch has the product; it takes rows of whole 16 bytes."""
        kind = hidden_states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_states.dtype
        fits = kind == "cuda" and dtype == torch.bfloat16 and hidden_states.shape[1] % 8 == 0
        return fits and hasattr(F, "grouped_mm")


class MoE(nn.Module):
    """A router and its experts."""

    def __init__(self, options: MoEOptions) -> None:
        super().__init__()
        self.top, self.capacity = options.top, options.capacity
        self.balanced = options.balance > 0
        self.depends_on_batch = options.capacity > 0 or self.balanced
        self.router = nn.Linear(options.hidden, options.experts, bias=False)
        self.experts = Experts(options)
        self.dropped_tokens: Tensor | None = None
        """Choices that the last forward dropped."""
        self.routed_tokens = 0
        """Choices that the last forward made: one or two a token."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, seq, hidden] → the same, and how unevenly the tokens are spread."""
        tokens = x.flatten(0, -2)
        probabilities = widened(self.router(tokens)).softmax(dim=-1)
        weights, index = probabilities.topk(self.top)
        uneven = self.unevenness(probabilities, index) if self.balanced else probabilities.new_zeros(())
        if self.top > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        self.routed_tokens = index.numel()
        if self.capacity:
            index, weights = self.keep(index, weights)
        return self.experts(tokens, index, weights.to(x.dtype)).view_as(x), uneven

    def unevenness(self, probabilities: Tensor, index: Tensor) -> Tensor:
        num_experts = probabilities.shape[-1]
        share = F.one_hot(index[:, 0], num_experts).to(probabilities.dtype).mean(0)
        return num_experts * (share * probabilities.mean(0)).sum()

    def keep(self, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Choices that find their expert full get index E and weight 0."""
        num_experts = self.router.out_features
        room = math.ceil(self.capacity * index.numel() / num_experts)
        in_order = index.t().flatten()
        before = F.one_hot(in_order, num_experts).cumsum(0).gather(1, in_order[:, None]) - 1
        dropped = (before >= room).view(self.top, -1).t()
        self.dropped_tokens = dropped.sum()
        return index.masked_fill(dropped, num_experts), weights.masked_fill(dropped, 0)


class Block(nn.Module):
    def __init__(self, options: MoEOptions, has_experts: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(options.hidden)
        self.attention = Attention(options)
        self.mlp_norm = nn.LayerNorm(options.hidden)
        self.mlp = MoE(options) if has_experts else MLP(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, uneven: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        made = self.mlp(self.mlp_norm(x))
        if isinstance(self.mlp, MoE):
            made, own = made
            uneven = uneven + own
        return x + self.dropout(made), uneven


class MoEGPT(Decoder):
    """Returns logits and the weighted load-balancing loss."""

    options: MoEOptions

    def make_block(self, number: int) -> nn.Module:
        return Block(self.options, has_experts=(number + 1) % self.options.every == 0)

    def initialise(self, module: nn.Module) -> None:
        """GPT-2's: normal with deviation 0.02, smaller on the way back into the residual stream, biases zero."""
        smaller = 0.02 / (2 * self.options.layers) ** 0.5
        initialise_plainly(module)
        if isinstance(module, Attention):
            nn.init.normal_(module.output.weight, std=smaller)
        if isinstance(module, MLP):
            nn.init.normal_(module.contract.weight, std=smaller)
        if isinstance(module, Experts):
            nn.init.normal_(module.expand, std=0.02)
            nn.init.normal_(module.contract, std=smaller)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        uneven = widened(x).new_zeros(())
        for block in self.blocks:
            x, uneven = block(x, uneven)
        return self.head(self.norm(x)), self.options.balance * uneven


def loss_with_balance(output: Any, batch: Batch) -> Tensor:
    logits, balance = output
    return default_loss(logits, batch) + balance


BALANCED = Objective(loss=loss_with_balance, count=default_count)
