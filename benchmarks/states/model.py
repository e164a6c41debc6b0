"""A small model of the GPT-2 kind, with the parameters that `model_shapes` lists."""

from __future__ import annotations

import torch
from benchmarks.states.workloads import ModelSize
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention, then two linear layers, each after a norm and around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self._heads = max(1, width // 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and gives batch x length x width."""
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        widened: torch.Tensor = functional.gelu(self.widen(self.norm2(x)))
        widened = x + self.narrow(widened)
        return widened


class Model(nn.Module):
    """Predicts the next token; the head is the embedding, turned around."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes batch x length, gives the mean loss of each token's successor."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x)[:, :-1], self.tokens.weight)
        loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        return loss


class Adapted(nn.Module):
    """A frozen model and low-rank adapters for two parts of each layer. It is saved and restored, never run."""

    def __init__(self, model: Model, size: ModelSize, rank: int) -> None:
        super().__init__()
        # The frozen part keeps its own names.
        for name, part in model.named_children():
            self.add_module(name, part)
        self.adapters = nn.ModuleList(
            nn.ModuleDict({"attend": Adapter(size.width, 3, rank), "widen": Adapter(size.width, 4, rank)})
            for _ in range(size.layers)
        )


class Adapter(nn.Module):
    """Two thin matrices, whose product is added to a wide one."""

    def __init__(self, width: int, factor: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width))
        self.up = nn.Parameter(torch.empty(factor * width, rank))
