"""The text that the demo trains on, which is on every machine: the source of Python's standard library."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY: Final = 256
"""Tokens are bytes."""

_TEXT_BYTES: Final = 640_000


def read_text() -> bytes:
    """**Blocks.** The beginning of all modules that lie at the top of the standard library, in order of name."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _TEXT_BYTES:
            break
    return bytes(text[:_TEXT_BYTES])


class Excerpts(Dataset[tuple[int, Tensor]]):
    """Excerpts of a text, each with its number. Where in its part of the text one begins is drawn again each time."""

    def __init__(self, text: bytes, count: int, tokens: int) -> None:
        """Divides the text into `count` parts; an excerpt is one token longer than `tokens`, for the prediction."""
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._count = count
        self._tokens = tokens
        self._part = (len(text) - tokens - 1) // count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        begin = index * self._part + random.randrange(self._part)
        return index, self._text[begin : begin + self._tokens + 1].long()
