"""The figures of a job that is killed follow from what its programs noted."""

from __future__ import annotations

from benchmarks.goodput.__main__ import WAYS, read_notes, render


def test_a_turn_is_summed_up_from_the_notes() -> None:
    notes = [
        "0.0 begun 0.0", "0.5 read 0.1", "1.0 step 0 0.1", "2.0 step 1 0.1", "3.0 step 2 0.1", "3.5 death",
        "4.0 begun 4.0", "4.5 read 0.2", "5.0 step 2 0.1", "6.0 step 3 0.1", "7.0 step 4 0.1",
    ]  # fmt: skip
    found = read_notes("\n".join(notes), [3.5], 8.0)
    assert found.total == 7.0
    assert (found.useful, found.again, found.step) == (4.0, 1.0, 1.0)
    assert found.back == [1.5]
    assert found.read == [0.2]
    assert "57% | 1.50 s (1.50 s) | 0.20 s | 14% | 21% away, 7% stalls" in render({next(iter(WAYS)): [found]})
