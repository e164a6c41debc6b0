"""What the process that compares and those that are compared say to each other: a line of JSON each."""

from __future__ import annotations

import msgspec


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a worker.

    Attributes:
        contender: A peer's name, or `limits`.
        workload: The name of a workload or a framework, `training` or `small`.
        scale: How large the workload is, 1 for the real size.
        directory: Where to write.
        memory: The descriptor of the memory that holds the tensors, and behind them as much for bare copies; -1: none.
        keep: How many saves the contender is to keep by itself; None for all.
    """

    contender: str
    workload: str
    scale: float
    directory: str
    memory: int
    keep: int | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do.

    Attributes:
        verb: The name of a method of `benchmarks.worker.Duties`.
        step: Which save it is about.
        pairs: How many pairs of saves, for `train`.
        saves: How many saves count, for `lose`.
        is_stream: Whether the samples of a fit come as a stream.
        interval_steps: How many steps lie between them.
    """

    verb: str
    step: int = 0
    pairs: int = 0
    saves: int = 0
    is_stream: bool = False
    interval_steps: int = 0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        figures: What was measured, by name.
        note: What the contender makes durable by itself; said once, at the start.
        error: Why it failed; empty if it did not.
        missing: What is not installed that the contender needs; empty if all is.
    """

    figures: dict[str, float] = {}
    note: str = ""
    error: str = ""
    missing: str = ""
