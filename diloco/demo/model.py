"""The demo's model: a byte-level causal transformer in plain torch, 4 blocks of width 128, about 0.87 M parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 128
BATCH = 8
LEARNING_RATE = 1e-3


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return x


class ByteModel(nn.Module):
    """Next-byte prediction; the same seed gives the same weights."""

    def __init__(self, seed: int = 0, width: int = 128, blocks: int = 4, heads: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, width)
            self.position_embed = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
            self.norm = nn.LayerNorm(width)
            self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position_embed[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: torch.Tensor, batch: int = BATCH) -> float:
    """Mean loss over all windows of `data.held_out_windows`."""
    total = 0.0
    for part in torch.split(windows, batch):
        total += float(loss_of(model, part[:, :-1], part[:, 1:])) * len(part)
    return total / len(windows)
