"""Steps that draw from the random generators of the process, while these are not saved: a warning."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.events import Event, Warned

DRAWN: dict[str, tuple[Callable[[], object], str]] = {
    "noise": (lambda: torch.randn_like(torch.ones(2)), "torch"),
    "dropout": (lambda: torch.nn.functional.dropout(torch.ones(2), 0.3), "torch"),
    "python": (random.random, "python"),
    "numpy": (np.random.rand, "numpy"),
}


def warnings_of(directory: Path, draw: Callable[[int], object], **objects: Any) -> list[str]:
    events: list[Event] = []
    with hf.resumable(directory, state={"sum": 0}, save_every=hf.Steps(3), sinks=[events.append], **objects) as run:
        for step in run.steps(6):
            draw(step)
    return [event.text for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize("name", DRAWN)
def test_a_draw_in_each_step_is_warned_of_once(tmp_path: Path, name: str) -> None:
    draw, generators = DRAWN[name]
    [text] = warnings_of(tmp_path / "unsaved", lambda _: draw())
    assert text.startswith(f"each step draws from random generators that are not saved ({generators})")
    assert "rng=holdfast.RNG()" in text
    assert warnings_of(tmp_path / "saved", lambda _: draw(), rng=hf.RNG()) == []
    assert warnings_of(tmp_path / "own", lambda _: draw(), random_states={"python": 0}) == []


def test_draws_at_the_begin_and_in_a_single_step_are_not_warned_of(tmp_path: Path) -> None:
    generator = torch.Generator()
    assert warnings_of(tmp_path / "own", lambda _: torch.rand(2, generator=generator)) == []
    assert warnings_of(tmp_path / "first", lambda step: step == 0 and torch.rand(2)) == []
    assert warnings_of(tmp_path / "single", lambda step: step == 2 and torch.rand(2)) == []
