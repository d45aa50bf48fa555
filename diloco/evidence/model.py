"""The experiments' model: a residual MLP that reads the last symbols, about 0.1 M parameters, a step in about 1 ms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

LOOKBACK = 4
EMBED = 16
WIDTH = 128
BLOCKS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + y


class TinyModel(nn.Module):
    """Next-symbol prediction from the last LOOKBACK symbols; the same seed gives the same weights."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocabulary, EMBED)
            self.read = nn.Linear(LOOKBACK * EMBED, WIDTH)
            self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.norm = nn.LayerNorm(WIDTH)
            self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for what follows each run of LOOKBACK symbols of `tokens`."""
        x = self.embed(tokens).unfold(1, LOOKBACK, 1).flatten(2)
        x = self.read(x)
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per symbol, over the symbols that have LOOKBACK others before them."""
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, LOOKBACK:].flatten())
