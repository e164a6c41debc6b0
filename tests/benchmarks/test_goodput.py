"""The figures of a job that is killed follow from what its programs noted."""

from __future__ import annotations

from benchmarks.goodput.__main__ import WAYS, read_notes, render


def test_a_turn_is_summed_up_from_the_notes() -> None:
    notes = [
        "0.0 begun 9", "0.5 read 0.1", "1.0 step 0", "2.0 step 1", "3.0 step 2",
        "4.0 begun 9", "4.5 read 0.2", "5.0 step 2", "6.0 step 3", "7.0 step 4",
    ]  # fmt: skip
    found = read_notes("\n".join(notes), [3.5], 8.5, 0.9)
    assert found.total == 5.0
    assert (found.useful, found.again) == (1.8, 0.9)
    assert found.back == [1.5]
    assert found.read == [0.2]
    assert "| 1.50 s (1.50 s) | 0.20 s | 36% | 30% | 18% | 16% |" in render({next(iter(WAYS)): [found]})
