"""Head and cross-entropy in pieces: the loss and gradients of the whole, and logits that are never whole."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from cases import source_of
from torch import Tensor, nn

from meshwright.models import head_loss
from meshwright.models.head_loss import PostponedLogits, find_head, postpone_logits
from meshwright.models.objective import DEFAULT, IGNORED_LABEL, Batch, call

Gradients = dict[str, Tensor]


def loss_and_gradients(module: nn.Module, batch: Batch) -> tuple[Tensor, Gradients]:
    loss = DEFAULT.loss(call(module, batch), batch)
    (loss * 3).backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return loss.detach(), found


def example(model: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Batch]:
    source = source_of(model)
    torch.manual_seed(0)
    module = source.build().to(dtype).eval()
    assert source.example is not None
    batch = source.example(3)
    assert isinstance(batch, dict)
    labels = batch["labels"].clone()
    labels[0, :5] = IGNORED_LABEL
    return module, {**batch, "labels": labels}


@pytest.mark.parametrize("model", ["gpt", "tied", "llama", "gpt2", "hf_bert"])
@pytest.mark.parametrize("piece_bytes", [4 * 61 * 7, 2**30])
def test_pieces_give_the_loss_and_gradients_of_the_whole(model: str, piece_bytes: int) -> None:
    module, batch = example(model)
    expected, wanted = loss_and_gradients(module, batch)
    assert postpone_logits(module)
    with mock.patch.object(head_loss, "PIECE_BYTES", piece_bytes):
        found, gradients = loss_and_gradients(module, batch)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-14, msg=name)


def test_under_autocast_pieces_compute_in_16_bits_and_return_gradients_in_32() -> None:
    module, batch = example("gpt", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, wanted = loss_and_gradients(module, batch)
    postpone_logits(module)
    with torch.autocast("cpu", torch.bfloat16):
        found, gradients = loss_and_gradients(module, batch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    assert gradients["head.weight"].dtype == torch.float32
    torch.testing.assert_close(gradients["head.weight"], wanted["head.weight"], rtol=0.05, atol=1e-3)


def test_no_tensor_is_as_large_as_all_logits() -> None:
    module, batch = example("gpt")
    postpone_logits(module)
    sizes: list[int] = []
    linear = torch.nn.functional.linear

    def watched(*arguments: Tensor) -> Tensor:
        made = linear(*arguments)
        sizes.append(made.shape[0] if made.shape[-1] == 61 else 0)
        return made

    with mock.patch.object(head_loss, "PIECE_BYTES", 4 * 61 * 10), mock.patch.object(head_loss.F, "linear", watched):
        loss_and_gradients(module, batch)
    assert sum(sizes) == 3 * 16
    assert max(sizes) <= 10


def test_anything_else_makes_the_logits_whole() -> None:
    module, batch = example("gpt")
    expected = call(module, batch)
    postpone_logits(module)
    found = call(module, batch)
    assert isinstance(found, PostponedLogits)
    assert found.shape == expected.shape
    assert found.dim() == 3
    capped = 30 * torch.tanh(found / 30)
    assert not isinstance(capped, PostponedLogits)
    torch.testing.assert_close(capped, 30 * torch.tanh(expected / 30))
    torch.testing.assert_close(torch.cat([found, found]), torch.cat([expected, expected]))
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_without_gradients_only_the_loss_is_made() -> None:
    module, batch = example("gpt")
    with torch.no_grad():
        expected = DEFAULT.loss(call(module, batch), batch)
        postpone_logits(module)
        found = DEFAULT.loss(call(module, batch), batch)
    torch.testing.assert_close(found, expected)


def test_labels_that_do_not_count_give_zero() -> None:
    module, batch = example("gpt")
    assert isinstance(batch, dict)
    postpone_logits(module)
    loss, gradients = loss_and_gradients(module, {**batch, "labels": torch.full_like(batch["labels"], IGNORED_LABEL)})
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_a_loss_in_pieces_goes_backward_once() -> None:
    module, batch = example("gpt")
    postpone_logits(module)
    loss = DEFAULT.loss(call(module, batch), batch)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes backward once"):
        loss.backward()


def test_a_model_without_a_head_is_left_as_it_is() -> None:
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert find_head(convolution) is None
    assert not postpone_logits(convolution)
