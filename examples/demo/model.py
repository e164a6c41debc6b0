"""A small GPT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Block(nn.Module):
    """Attention to what came before, then a layer of neurons; each adds to what it was given."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes `(batch, tokens, width)`, in and out."""
        x = x + F.dropout(self.mix(self.attend(self.norm_1(x))), self.dropout, self.training)
        neurons = F.gelu(self.widen(self.norm_2(x)))
        return x + F.dropout(self.narrow(neurons), self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        """Each token takes from those before it what its query finds in their keys."""
        batch, tokens, width = x.shape
        split = self.query_key_value(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return found.transpose(1, 2).reshape(batch, tokens, width)


class GPT(nn.Module):
    """Predicts the next token at each place; the head's weight is the embedding's, one parameter with two names."""

    def __init__(self, vocabulary: int, tokens: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What adds to the stream does so once a layer, twice in each: the sum keeps its size.
                is_last = name.endswith(("mix.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if is_last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """From `(batch, tokens)` to `(batch, tokens, vocabulary)`: how likely each token is to come next, as logits."""
        x = F.dropout(self.embedding(tokens) + self.position[: tokens.shape[1]], self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(self.norm(x)))
