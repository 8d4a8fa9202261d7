"""The reference models compute what they say they do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.capturing.blocks import find_blocks
from meshwright.core.errors import ModelError
from meshwright.measure.exact import exact
from meshwright.models.bert import BERT, BERTOptions, split_heads
from meshwright.models.coatnet import Attention, grid_offsets
from meshwright.models.examples import TextShape, masked, random_text
from meshwright.models.faked.build import build_on_meta
from meshwright.models.gpt import GPT, GPTOptions
from meshwright.models.llama import Llama, LlamaOptions
from meshwright.models.objective import IGNORED_LABEL, call
from meshwright.models.reference import REFERENCE
from meshwright.models.source import resolve
from meshwright.models.t5 import NUM_BUCKETS, T5, T5Options, bucket
from meshwright.models.vit import ViT, ViTOptions

TOKENS = torch.arange(2 * 16).view(2, 16) % 61


def test_eager_attention_is_fused_attention_in_single_steps() -> None:
    options = {"layers": 2, "hidden": 32, "heads": 4, "seq": 16, "vocab": 61}
    fused, eager = (GPT(GPTOptions(**options, attention=word)).double() for word in ("sdpa", "eager"))  # type: ignore[arg-type]
    eager.load_state_dict(fused.state_dict())
    torch.testing.assert_close(eager(TOKENS), fused(TOKENS))


LLAMA_NAMES = {
    "token_embedding": "model.embed_tokens", "blocks": "model.layers", "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj",
    "mlp.expand": "mlp.up_proj", "mlp.contract": "mlp.down_proj", "^norm": "model.norm", "head": "lm_head",
}  # fmt: skip


def copy_weights(ours: dict[str, Tensor], theirs: nn.Module, names: dict[str, str]) -> None:
    """Ours into Hugging Face's. `^` marks a name that counts only where it comes first."""
    weights = {renamed(name, names): tensor for name, tensor in ours.items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    theirs_by_name = dict(theirs.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in theirs_by_name.items() if name in weights}
    assert not unexpected
    assert not [name for name in missing if name in theirs_by_name and id(theirs_by_name[name]) not in loaded]


def renamed(name: str, names: dict[str, str]) -> str:
    for ours, theirs in names.items():
        if not ours.startswith("^"):
            name = f".{name}".replace(f".{ours}.", f".{theirs}.")[1:]
        elif f"{name}.".startswith(f"{ours[1:]}."):
            name = theirs + name.removeprefix(ours[1:])
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
    copy_weights(ours.state_dict(), theirs, LLAMA_NAMES)
    with exact():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits)


def test_a_tied_head_has_no_weight_of_its_own() -> None:
    tied = Llama(LlamaOptions(layers=1, hidden=32, heads=4, kv_heads=2, intermediate=48, seq=16, vocab=61, tied=True))
    assert tied.head.weight is tied.token_embedding.weight


BERT_NAMES = {
    "embedding.token": "bert.embeddings.word_embeddings", "embedding.position": "bert.embeddings.position_embeddings",
    "embedding.kind": "bert.embeddings.token_type_embeddings", "embedding.norm": "bert.embeddings.LayerNorm",
    "blocks": "bert.encoder.layer", "attention.query": "attention.self.query", "attention.key": "attention.self.key",
    "attention.value": "attention.self.value", "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm", "mlp.expand": "intermediate.dense", "mlp.contract": "output.dense",
    "mlp_norm": "output.LayerNorm", "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm", "head.output": "cls.predictions.decoder",
}  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
def test_bert_is_the_one_of_hugging_face(padded: bool) -> None:
    transformers = pytest.importorskip("transformers")
    ours = BERT(BERTOptions(layers=2, hidden=32, heads=4, seq=16, vocab=61)).double()
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=128, vocab_size=61,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs: nn.Module = transformers.BertForMaskedLM(config).double()
    copy_weights(ours.state_dict(), theirs, BERT_NAMES)
    lengths = torch.tensor([[16], [9]]) if padded else torch.tensor([[16], [16]])
    batch = {"attention_mask": (torch.arange(16) < lengths).long(), "token_type_ids": (TOKENS > 20).long()}
    torch.testing.assert_close(ours(TOKENS, **batch), theirs(TOKENS, **batch).logits)
    changed = TOKENS.index_fill(1, torch.tensor([12]), 5)  # behind the end of the second sample
    same = torch.isclose(ours(changed, **batch)[1, :9], ours(TOKENS, **batch)[1, :9]).all()
    assert bool(same) is padded, "padding is seen, or what is not padding is not"


VIT_NAMES = {
    "embedding.patch": "vit.embeddings.patch_embeddings.projection", "blocks": "vit.layers", "^norm": "vit.layernorm",
    "attention.query": "attention.q_proj", "attention.key": "attention.k_proj", "attention.value": "attention.v_proj",
    "attention.output": "attention.o_proj", "attention_norm": "layernorm_before", "mlp_norm": "layernorm_after",
    "mlp.expand": "mlp.fc1", "mlp.contract": "mlp.fc2", "head": "classifier",
    "^embedding.class_token": "vit.embeddings.cls_token", "^embedding.position": "vit.embeddings.position_embeddings",
}  # fmt: skip


def test_vit_is_the_one_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    ours = ViT(ViTOptions(layers=2, hidden=32, heads=4, image=16, patch=4, classes=12)).double()
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=128, image_size=16, patch_size=4,
        num_labels=12, layer_norm_eps=1e-6,
    )  # fmt: skip
    theirs: nn.Module = transformers.ViTForImageClassification(config).double()
    copy_weights(ours.state_dict(), theirs, VIT_NAMES)
    pixels = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(pixels), theirs(pixels).logits)


T5_NAMES = {
    "token_embedding": "shared", "blocks": "block", "norm": "final_layer_norm", "head": "lm_head",
}  # fmt: skip
T5_BLOCK = {
    "bias.table": "layer.0.SelfAttention.relative_attention_bias",
    "attention": "layer.0.SelfAttention", "attention_norm": "layer.0.layer_norm",
    "memory_attention": "layer.1.EncDecAttention", "memory_norm": "layer.1.layer_norm",
    "query": "q", "key": "k", "value": "v", "output": "o", "contract": "wo",
}  # fmt: skip


def t5_names(gated: bool) -> dict[str, str]:
    mlp = {"gate": "wi_0", "expand": "wi_1"} if gated else {"expand": "wi"}
    return T5_NAMES | T5_BLOCK | mlp


def last_layer(names: dict[str, Tensor]) -> dict[str, Tensor]:
    """The MLP is the second layer of an encoder's block, the third of a decoder's."""
    found = {}
    for name, tensor in names.items():
        number = 2 if name.startswith("decoder.") else 1
        name = name.replace(".mlp_norm.", f".layer.{number}.layer_norm.")
        found[name.replace(".mlp.", f".layer.{number}.DenseReluDense.")] = tensor
    return found


@pytest.mark.parametrize("gated", [False, True])
def test_t5_is_the_one_of_hugging_face(gated: bool) -> None:
    """Version 1.0 and 1.1; long enough for distances that share a bucket."""
    transformers = pytest.importorskip("transformers")
    options = T5Options(
        layers=2, hidden=32, heads=4, head_width=6, intermediate=48, seq=60, vocab=61, gated=gated, tied=not gated
    )
    config = transformers.T5Config(
        num_layers=2, d_model=32, num_heads=4, d_kv=6, d_ff=48, vocab_size=61, dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=not gated,
    )  # fmt: skip
    ours, theirs = T5(options).double(), transformers.T5ForConditionalGeneration(config).double()
    if gated:  # for the config this only says that the head's input is not scaled
        theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    copy_weights(last_layer(ours.state_dict()), theirs, t5_names(gated))
    source, target = torch.arange(2 * 60).view(2, 60) % 61, torch.arange(2 * 50).view(2, 50) % 59
    with exact():
        torch.testing.assert_close(ours(source, target), theirs(input_ids=source, decoder_input_ids=target).logits)


def test_near_distances_have_buckets_of_their_own() -> None:
    offsets = torch.arange(-200, 201)
    both, past = bucket(offsets, causal=False), bucket(offsets, causal=True)
    assert both[offsets == 0].item() == 0
    assert len(set(both[offsets.abs() < 8].tolist())) == 15
    assert set(both.tolist()) == set(range(NUM_BUCKETS)) - {NUM_BUCKETS // 2}
    assert set(past.tolist()) == set(range(NUM_BUCKETS))
    assert set(past[offsets > 0].tolist()) == {0}


def test_the_bias_of_a_grid_depends_on_the_offset_alone() -> None:
    offsets = grid_offsets(3, torch.device("cpu"))
    place = {(row, column): 3 * row + column for row in range(3) for column in range(3)}
    assert len(offsets.unique()) == 25
    assert offsets[place[0, 0], place[1, 2]] == offsets[place[1, 0], place[2, 2]]
    assert offsets[place[0, 0], place[1, 2]] != offsets[place[0, 0], place[2, 1]]


def test_attention_on_a_grid_is_fused_attention_with_a_bias() -> None:
    attention = Attention(inputs=16, outputs=32, grid=3, head_width=8).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    query, key, value = (split_heads(project(x), 8) for project in (attention.query, attention.key, attention.value))
    bias = attention.bias.weight[grid_offsets(3, x.device)].permute(2, 0, 1)
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias[None].expand(2, -1, -1, -1))
    torch.testing.assert_close(attention(x), attention.output(mixed.transpose(1, 2).flatten(2)))


LARGE = "layers=24,hidden=1024,heads=16"


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("vit", 86_567_656),  # ViT-B/16, ImageNet head
        (f"vit:{LARGE}", 304_326_632),  # ViT-L/16
        ("bert", 109_514_298),  # base, uncased, with the head that fills in
        (f"bert:{LARGE}", 335_174_458),
        ("t5", 222_903_552),
        (f"t5:{LARGE},intermediate=4096", 737_668_096),
        (f"t5:{LARGE},intermediate=2816,gated=true,tied=false", 783_150_080),  # version 1.1
    ],
)
def test_parameters_are_as_many_as_published(name: str, published: int) -> None:
    """To the last one: the figures of the checkpoints that people load."""
    assert num_parameters(name) == published


@pytest.mark.parametrize(
    ("options", "millions"),
    [
        ("blocks=2-2-3-5-2", 25),
        ("blocks=2-2-6-14-2", 42),
        ("blocks=2-2-6-14-2,channels=128-128-256-512-1024", 75),
        ("blocks=2-2-6-14-2,channels=192-192-384-768-1536", 168),
    ],
)
def test_coatnets_are_about_as_large_as_published(options: str, millions: int) -> None:
    """CoAtNet-0 to -3; the paper rounds, and does not say where every bias is."""
    assert num_parameters(f"coatnet:{options}") == pytest.approx(millions * 1e6, rel=0.03)


def num_parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in build_on_meta(resolve(name).build).parameters())


@pytest.mark.parametrize("name", REFERENCE)
def test_every_model_can_be_shrunk(name: str) -> None:
    """Small, with several blocks, and with heads that 2 and 4 ranks can share."""
    small = resolve(name).small()
    module = small.build()
    assert sum(parameter.numel() for parameter in module.parameters()) < 2e6
    assert sum(find_blocks(module).values()) >= 2
    assert small.example is not None
    batch = small.example(3)
    loss = small.objective.loss(call(module, batch), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in module.parameters())
    options = REFERENCE[name].shrink(REFERENCE[name].options())
    assert getattr(options, "heads", 4) % 4 == 0
    assert dataclasses.replace(options) == REFERENCE[name].shrink(options), "shrinking again changes nothing"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vit:hidden=30,heads=4", "hidden=30 does not divide into heads=4"),
        ("vit:image=30,patch=4", "image=30 does not divide into patches of patch=4"),
        ("bert:hidden=30,heads=4", "hidden=30 does not divide into heads=4"),
        ("coatnet:blocks=2-2", "blocks='2-2' is not five whole numbers above 0, like 2-2-3-5-2"),
        ("coatnet:channels=8-8-8-0-8", "channels='8-8-8-0-8' is not five whole numbers above 0"),
        ("coatnet:head_width=5", "384 does not divide by head_width=5"),
        ("coatnet:image=100", "image=100 is halved 5 times: use a multiple of 32"),
        ("mlp:hidden=0", "option hidden=0 must be at least 1"),
    ],
)
def test_wrong_options_are_refused(name: str, words: str) -> None:
    with pytest.raises(ModelError, match="model '") as error:
        resolve(name)
    assert words in str(error.value)


def test_what_is_masked_depends_on_the_sample_alone() -> None:
    tokens = torch.arange(3 * 20).view(3, 20)
    all_of_them, last = masked(tokens, [4, 5, 6], mask_token=99), masked(tokens[2:], [6], mask_token=99)
    assert torch.equal(all_of_them["labels"][2:], last["labels"])
    hidden = all_of_them["labels"] != IGNORED_LABEL
    assert hidden.sum(dim=1).tolist() == [3, 3, 3]
    assert torch.equal(all_of_them["input_ids"] == 99, hidden)
    assert torch.equal(all_of_them["labels"][hidden], tokens[hidden])


def test_a_text_may_have_a_class() -> None:
    batch: Any = random_text(TextShape(seq=8, vocab=61, task="classify", classes=3))(50)
    assert batch["input_ids"].shape == (50, 8)
    assert set(batch["labels"].tolist()) == {0, 1, 2}
