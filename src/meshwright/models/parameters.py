"""A module's parameters as values: names, shapes and which of them share memory."""

from __future__ import annotations

from torch import nn

from meshwright.core.graph import Parameter


def list_parameters(module: nn.Module) -> tuple[Parameter, ...]:
    """Every name a parameter goes by, in module order; the second name of a tied tensor points to its first."""
    first_name: dict[int, str] = {}
    found = []
    for name, tensor in module.named_parameters(remove_duplicate=False):
        tied_to = first_name.get(id(tensor))
        first_name.setdefault(id(tensor), name)
        found.append(
            Parameter(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),  # type: ignore[arg-type]
                trainable=tensor.requires_grad,
                tied_to=tied_to,
            )
        )
    return tuple(found)
