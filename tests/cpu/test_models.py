"""The reference models compute what they say they do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.models.gpt import GPT, GPTOptions
from meshwright.models.llama import Llama, LlamaOptions

TOKENS = torch.arange(2 * 16).view(2, 16) % 61


def test_eager_attention_is_fused_attention_in_single_steps() -> None:
    options = {"layers": 2, "hidden": 32, "heads": 4, "seq": 16, "vocab": 61}
    fused, eager = (GPT(GPTOptions(**options, attention=word)).double() for word in ("sdpa", "eager"))  # type: ignore[arg-type]
    eager.load_state_dict(fused.state_dict())
    torch.testing.assert_close(eager(TOKENS), fused(TOKENS))


RENAMED = {
    "token_embedding": "model.embed_tokens", "blocks": "model.layers", "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj",
    "mlp.expand": "mlp.up_proj", "mlp.contract": "mlp.down_proj", "head": "lm_head",
}  # fmt: skip


def renamed(name: str) -> str:
    """Ours → Hugging Face's."""
    if name == "norm.weight":
        return "model.norm.weight"
    for ours, theirs in RENAMED.items():
        name = name.replace(f"{ours}.", f"{theirs}.")
    return name


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama_is_the_one_of_hugging_face(kv_heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    options = LlamaOptions(layers=2, hidden=32, heads=4, kv_heads=kv_heads, intermediate=48, seq=16, vocab=61)
    ours = Llama(options).double()
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, intermediate_size=48,
        vocab_size=61, rms_norm_eps=1e-5, max_position_embeddings=16,
    )  # fmt: skip
    theirs: nn.Module = transformers.LlamaForCausalLM(config).double()
    theirs.load_state_dict({renamed(name): tensor for name, tensor in ours.state_dict().items()})
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-6)


def test_a_tied_head_has_no_weight_of_its_own() -> None:
    tied = Llama(LlamaOptions(layers=1, hidden=32, heads=4, kv_heads=2, intermediate=48, seq=16, vocab=61, tied=True))
    assert tied.head.weight is tied.token_embedding.weight
