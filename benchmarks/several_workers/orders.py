"""What the process that compares and the workers of a job say to each other: a line of JSON each."""

from __future__ import annotations

import msgspec

from benchmarks.several_workers import Setup


class WorkersOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that all workers of a job are to do.

    Attributes:
        verb: The name of a method of `benchmarks.several_workers.worker.WorkerDuties`.
        way: Which of the ways of saving is to do it.
        directory: Where to write, for `open`.
        setup: What the workers hold, for `open`.
        version: Which values the state is to have, or must have.
        step: The first of the saves, or the one to restore.
        count: How many saves.
        pause_seconds: How long nothing happens before each save.
        interval_steps: How many steps of training lie between two saves.
        scale: How large the model is that is trained, 1 for the real size.
    """

    verb: str
    way: str = ""
    directory: str = ""
    setup: Setup | None = None
    version: int = 0
    step: int = 0
    count: int = 0
    pause_seconds: float = 0.0
    interval_steps: int = 0
    scale: float = 1.0


class WorkerReply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it in one worker.

    Attributes:
        rank: Its number.
        pid: Its process.
        figures: What was measured, by name; a value for each save.
        note: What a way makes durable by itself.
        error: Why it failed; empty if it did not.
        missing: What is not installed that it needs; empty if all is.
    """

    rank: int
    pid: int
    figures: dict[str, list[float]] = {}
    note: str = ""
    error: str = ""
    missing: str = ""
