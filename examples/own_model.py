"""A model of one's own: name it as `examples/own_model.py:make`.

The function returns a module, (module, batch) or (module, batch, loss). The batch lets Meshwright follow the model; its
first dim counts samples.
"""

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """Embeds tokens, mixes them by layers of a transformer encoder, and averages."""

    def __init__(self, vocabulary: int = 1000, width: int = 64, layers: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Classifier(), (torch.randint(1000, (8, 32)), torch.randint(5, (8,)))
