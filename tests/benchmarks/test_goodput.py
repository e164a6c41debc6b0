"""The figures of a job that is killed follow from what its programs noted."""

from __future__ import annotations

from typing import Any

from benchmarks.goodput.__main__ import WAYS, compare, read_notes, render, render_shares

from holdfast.catalog.ledger import sum_up
from holdfast.events import Clocked


def test_a_turn_is_summed_up_from_the_notes() -> None:
    notes = [
        "0.0 begun 9", "0.5 read 0.1", "1.0 step 0", "2.0 step 1", "3.0 step 2",
        "4.0 begun 9", "4.5 read 0.2", "5.0 step 2", "6.0 step 3", "7.0 step 4",
    ]  # fmt: skip
    found = read_notes("\n".join(notes), [3.5], 8.5)
    assert found.total == 5.0
    assert (found.useful, found.again) == (2.0, 1.0)
    assert found.back == [1.5]
    assert found.read == [0.2]
    assert "| 1.50 s (1.50 s) | 0.20 s | 40% | 30% | 20% | 10% |" in render({next(iter(WAYS)): [found]})


def test_a_turn_is_compared_with_what_the_run_has_recorded() -> None:
    notes = [
        "0.0 begun 9", "1.0 step 0", "2.0 step 1", "3.0 step 2", "4.0 step 3",
        "5.0 begun 9", "6.0 step 2", "7.0 step 3", "8.0 step 4",
    ]  # fmt: skip
    kept: dict[str, Any] = {
        "setup_seconds": 0.5,
        "restore_seconds": 0.0,
        "data_seconds": 0.0,
        "save_seconds": 0.0,
        "leave_seconds": 0.0,
    }
    first = Clocked(at_unix_seconds=2.0, begun_at_unix_seconds=0.0, train_seconds=1.5, first_step=0, step=2, **kept)
    second = Clocked(
        at_unix_seconds=8.0,
        begun_at_unix_seconds=5.0,
        train_seconds=2.5,
        first_step=2,
        step=5,
        repeated_steps=2,
        **kept,
    )
    shares = compare("\n".join(notes), [4.5], 0.0, 8.0, sum_up([first, second]))
    # Steps 2 and 3 were done twice. Half a second of what came after the death was not the step that followed.
    assert {name: noted for name, (noted, _) in shares.items()} == {
        "away": 0.5 / 8, "done again": 2 / 8, "training and saves": 5.5 / 8, "in all": 1.0,
    }  # fmt: skip
    assert sum(recorded for name, (_, recorded) in shares.items() if name != "in all") == shares["in all"][1] == 1.0
    way = next(iter(WAYS))
    turn = read_notes("\n".join(notes), [4.5], 8.0)._replace(shares=shares)
    assert "| in all | 100.00% | 100.00% | 0.00 points |" in render_shares({way: [turn]})
