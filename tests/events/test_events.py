from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import FormatError, UsageError
from holdfast.events import (
    AnyEvent,
    Clocked,
    Committed,
    Copied,
    Diverged,
    Event,
    Failed,
    Fanout,
    GenerationOpened,
    GroupEnded,
    Held,
    JsonLinesSink,
    Leaving,
    LoggingSink,
    NodesTimed,
    NotFinite,
    NoticeHeard,
    PartsWritten,
    PassedOver,
    PrometheusSink,
    Resized,
    Restored,
    Retained,
    Skipped,
    Staged,
    Sums,
    Totals,
    Warned,
    WitnessAgreed,
    WitnessDiffers,
    Written,
    decode_event,
    encode_event,
    read_events,
)
from patience import PATIENCE_SECONDS

ONE_OF_EACH: list[Event] = [
    GenerationOpened(generation=3, base_step=400),
    Staged(step=500, generation=3, blocked_seconds=0.25, size_bytes=1_500_000_000),
    Held(step=500, blocked_seconds=0.125),
    Written(step=500, generation=3, background_seconds=2.0, size_bytes=1_500_000_000),
    Committed(
        step=500,
        generation=3,
        blocked_seconds=0.25,
        background_seconds=2.5,
        size_bytes=1_500_000_000,
        training_saved_seconds=90.0,
    ),
    Restored(step=400, generation=2, blocked_seconds=1.5, size_bytes=1_500_000_000),
    PassedOver(
        step=450,
        generation=2,
        file="step-000000450.g0002/data-00000-of-00001.safetensors",
        error="digest differs",
        offset_bytes=4096,
        tensor="model/head.weight",
    ),
    Retained(kept={400: "restored from", 500: "the newest"}, removed=(300,), background_seconds=0.01),
    Failed(stage="write", error="no space left", step=600, generation=3, save_lost=True, rank=1, path="runs/gpt"),
    Skipped(step=700, reason="the save of step 600 is still at work"),
    Warned(text="the clock went back", step=701),
    Resized(step=400, generation=2, stored_workers=4, workers=3, reseeded=("rng",), left=("stream",)),
    Diverged(step=500, generation=3, tensor="model/head.weight", ranks=((0, 2, 3), (1,))),
    GroupEnded(group="epoch", epoch=3, seconds=12.5),
    NodesTimed(action="checkpoint_save", epoch=3, node_seconds={"a": 0.5, "b": 2.0}, slowest="b"),
    WitnessAgreed(first_step=401, last_step=404, what="data and loss"),
    WitnessDiffers(step=405, what="loss", loader="loader", before=0.5, now=0.25),
    PartsWritten(
        step=500,
        generation=3,
        ranks=(3, 0),
        blocked_seconds=(0.2, 0.1),
        background_seconds=(2.5, 0.5),
        size_bytes=(10, 20),
    ),
    Copied(step=500, generation=3, tier="s3://bucket/run", background_seconds=9.5, size_bytes=1_500_000_000),
    NotFinite(step=500, generation=3, leaves=12, names=("model/head.weight", "model/head.bias")),
    NoticeHeard(source="signal", text="SIGTERM was sent to process 7", demand="leave", left_seconds=30.0),
    Leaving(step=650, exit_code=42, reason="no time is left"),
    Clocked(
        at_unix_seconds=1.8e9,
        begun_at_unix_seconds=1.8e9 - 100,
        setup_seconds=3.0,
        restore_seconds=1.0,
        train_seconds=90.0,
        data_seconds=4.0,
        save_seconds=2.0,
        leave_seconds=0.0,
        first_step=400,
        step=650,
    ),
]


def test_one_of_each_is_all_of_them() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(get_args(AnyEvent))


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
class TestEachKind:
    def test_comes_back_from_json(self, event: Event) -> None:
        line = encode_event(event)
        assert b"\n" not in line
        assert decode_event(line) == event
        record = json.loads(line)
        words = re.findall("[A-Z][a-z]*", type(event).__name__)
        assert record["kind"] == "_".join(words).lower()
        assert record["at_unix_seconds"] > 1.7e9

    def test_is_one_line_for_people(self, event: Event) -> None:
        line = str(event)
        assert line
        assert "\n" not in line
        assert type(event).__name__ not in line

    def test_cannot_be_changed(self, event: Event) -> None:
        with pytest.raises(AttributeError):
            event.at_unix_seconds = 0.0  # type: ignore[misc]


def test_the_lines_for_people() -> None:
    lines = [str(event) for event in ONE_OF_EACH]
    assert lines[0] == "generation 3 opened, from step 400"
    assert lines[1] == "step 500 staged: 1.5 GB, training blocked for 250 ms"
    assert lines[2] == "step 500: the optimizer waited 125 ms for the copy"
    assert lines[3] == "step 500 written: 1.5 GB, 2 s in the background"
    assert lines[6] == (
        "step 450 skipped because it is damaged: step-000000450.g0002/data-00000-of-00001.safetensors at byte 4096 "
        "(model/head.weight): digest differs"
    )
    missing = PassedOver(step=5, generation=1, file="step-5/data", error="step-5/data is missing; restore another")
    assert str(missing) == "step 5 skipped because it is damaged: step-5/data is missing; restore another"
    other = PassedOver(step=5, generation=1, file="step-5/data", error="step-5/data-10 is missing")
    assert str(other) == "step 5 skipped because it is damaged: step-5/data: step-5/data-10 is missing"
    assert lines[8] == "rank 1: write of step 600 in runs/gpt failed: no space left"
    assert lines[-3] == "SIGTERM was sent to process 7, 30 s left; the step in progress is finished and saved first"
    assert lines[-2] == "leaving with exit code 42, step 650 is saved (no time is left)"
    failed = Leaving(step=600, exit_code=74, reason="no time is left", error="no space")
    none = Leaving(step=None, exit_code=42, reason="it was asked to", saved="nothing is saved yet")
    assert str(none) == "leaving with exit code 42, nothing is saved yet (it was asked to)"
    assert str(failed) == "leaving with exit code 74; the state could not be saved: no space"


@given(st.floats(0, 1e7), st.integers(0, 10**15))
def test_any_length_and_size_has_a_line(seconds: float, size_bytes: int) -> None:
    assert str(Staged(1, 1, seconds, size_bytes))
    assert str(Written(1, 1, seconds, size_bytes))


@given(st.binary(max_size=200))
def test_a_damaged_line_is_a_clean_error(line: bytes) -> None:
    with pytest.raises(FormatError):
        decode_event(line)


def test_fields_of_a_later_version_are_left_out() -> None:
    line = b'{"kind":"skipped","at_unix_seconds":1.0,"step":5,"reason":"busy","mood":"calm"}'
    assert decode_event(line) == Skipped(step=5, reason="busy", at_unix_seconds=1.0)


def test_text_that_is_not_unicode_is_written_legibly() -> None:
    event = Failed(stage="write", error="no such file: run\udcff/data")
    assert decode_event(encode_event(event)) == msgspec.structs.replace(event, error="no such file: run?/data")


class TestJournal:
    def test_events_come_back_in_order(self, tmp_path: Path) -> None:
        path = tmp_path / "run" / "events.jsonl"
        sink = JsonLinesSink(path)
        for event in ONE_OF_EACH:
            sink(event)
        assert list(read_events(path)) == ONE_OF_EACH
        assert path.read_bytes().count(b"\n") == len(ONE_OF_EACH)

    def test_no_file_no_events(self, tmp_path: Path) -> None:
        JsonLinesSink(tmp_path / "none" / "events.jsonl")
        assert not (tmp_path / "none").exists()
        assert list(read_events(tmp_path / "none" / "events.jsonl")) == []

    @pytest.mark.parametrize("lost_bytes", range(1, 60, 7))
    def test_a_torn_last_line_costs_that_event_alone(self, tmp_path: Path, lost_bytes: int) -> None:
        path = tmp_path / "events.jsonl"
        sink = JsonLinesSink(path)
        sink(ONE_OF_EACH[0])
        sink(ONE_OF_EACH[1])
        path.write_bytes(path.read_bytes()[:-lost_bytes])
        before = list(read_events(path))
        JsonLinesSink(path)(ONE_OF_EACH[2])
        # Without its end of line alone, the last event is whole.
        assert before == ONE_OF_EACH[: 2 if lost_bytes == 1 else 1]
        assert list(read_events(path)) == [*before, ONE_OF_EACH[2]]

    def test_damage_in_the_middle_and_unknown_kinds_are_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        sink = JsonLinesSink(path)
        sink(ONE_OF_EACH[0])
        with path.open("ab") as file:
            file.write(b'{"kind":"tuned","at_unix_seconds":1.0}\n\xff\xfe\x00\n[[[[\n\n' + b"x" * 3_000_000 + b"\n")
        sink(ONE_OF_EACH[1])
        assert list(read_events(path)) == ONE_OF_EACH[:2]

    def test_the_size_is_bounded_and_the_newest_stay(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        sink = JsonLinesSink(path, limit_bytes=2000)
        events = [Warned(text=f"number {number}", at_unix_seconds=1.0) for number in range(200)]
        for event in events:
            sink(event)
            assert path.stat().st_size < 2000
        assert sorted(tmp_path.iterdir()) == [tmp_path / "events.1.jsonl", path]
        read = list(read_events(path))
        assert 20 < len(read) < 200
        assert read == events[-len(read) :]

    def test_an_event_that_is_too_long_leaves_word(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        JsonLinesSink(path, limit_bytes=1024)(Failed(stage="write", error="x" * 5000, at_unix_seconds=7.0))
        (event,) = read_events(path)
        assert isinstance(event, Warned)
        assert "Failed" in event.text
        assert event.at_unix_seconds == 7.0

    def test_a_limit_below_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError):
            JsonLinesSink(tmp_path / "events.jsonl", limit_bytes=10)

    def test_many_threads_and_two_sinks(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        sinks = [JsonLinesSink(path), JsonLinesSink(path)]

        def append(number: int) -> None:
            for step in range(50):
                sinks[number % 2](Skipped(step=1000 * number + step, reason="busy"))

        in_threads(append, 4)
        steps = sorted(event.step for event in read_events(path) if isinstance(event, Skipped))
        assert steps == sorted(1000 * number + step for number in range(4) for step in range(50))


def in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


class TestLogging:
    def test_one_line_an_event_at_a_fitting_level(self, caplog: pytest.LogCaptureFixture) -> None:
        sink = LoggingSink()
        with caplog.at_level(logging.DEBUG, logger="holdfast"):
            for event in ONE_OF_EACH:
                sink(event)
        assert [record.getMessage() for record in caplog.records] == [str(event) for event in ONE_OF_EACH]
        levels = {type(event): record.levelname for event, record in zip(ONE_OF_EACH, caplog.records, strict=True)}
        assert levels[Failed] == "ERROR"
        assert levels[PassedOver] == levels[Warned] == levels[Skipped] == "WARNING"
        assert levels[Committed] == levels[Restored] == "INFO"
        assert levels[Staged] == levels[Written] == "DEBUG"


class TestFanout:
    def test_a_sink_that_raises_breaks_nothing_and_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        seen: list[Event] = []

        def broken(event: Event) -> None:
            raise OSError("the disk of the sink is full")

        fanout = Fanout([broken, seen.append, broken])
        with caplog.at_level(logging.DEBUG, logger="holdfast"):
            for event in ONE_OF_EACH:
                fanout(event)
        assert seen == ONE_OF_EACH
        assert len(caplog.records) == 2
        assert "the disk of the sink is full" in caplog.text

    def test_a_keyboard_interrupt_is_not_held_up(self) -> None:
        def interrupted(event: Event) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Fanout([interrupted])(ONE_OF_EACH[0])


class TestTotals:
    def test_adds_up(self) -> None:
        totals = Totals()
        for event in ONE_OF_EACH * 2:
            totals(event)
        assert totals.sums == Sums(
            blocked_seconds=0.75,
            background_seconds=5.0,
            training_saved_seconds=180.0,
            written_bytes=3_000_000_000,
            saves_committed=2,
            saves_failed=2,
            saves_skipped=2,
            restores=2,
            steps_passed_over=2,
            steps_kept=2,
        )

    def test_a_failure_that_loses_no_save_is_not_counted(self) -> None:
        totals = Totals()
        totals(Failed(stage="retain", error="cannot remove"))
        assert totals.sums == Sums()

    def test_many_threads(self) -> None:
        totals = Totals()

        def add(number: int) -> None:
            for step in range(500):
                totals(Skipped(step=step, reason="busy"))

        in_threads(add, 4)
        assert totals.sums.saves_skipped == 2000


def test_figures_for_prometheus_are_whole_after_each_event(tmp_path: Path) -> None:
    path = tmp_path / "holdfast.prom"
    sink = PrometheusSink(path, labels={"run": 'a "b"\n'})
    texts = []
    for event in ONE_OF_EACH:
        sink(event)
        texts.append(path.read_text() if path.exists() else "")
    line = re.compile(
        r'(# TYPE holdfast_\w+ (counter|gauge)|holdfast_\w+\{run="a \\"b\\"\\n"(,phase="\w+")?\} [-\d.e+]+)'
    )
    assert all(line.fullmatch(one) for text in texts for one in text.splitlines())
    assert 'holdfast_saves_total{run="a \\"b\\"\\n"} 1' in texts[-1]
    assert 'holdfast_committed_step{run="a \\"b\\"\\n"} 500' in texts[-1]
    assert 'holdfast_start_seconds_total{run="a \\"b\\"\\n",phase="train"} 90.0' in texts[-1]
    assert [one.name for one in tmp_path.iterdir()] == ["holdfast.prom"]
