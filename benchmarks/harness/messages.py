"""The messages between the process that compares and those that are compared: a line of JSON each."""

from __future__ import annotations

from typing import Any

import msgspec


class Order(msgspec.Struct, frozen=True):
    """One thing to do.

    Attributes:
        verb: The name of a method of the contender's duties; `make` makes the duties themselves.
        arguments: What the method is called with.
    """

    verb: str
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an order in one process. The first reply comes without an order, when the process has started.

    Attributes:
        rank: The process's number among those of its contender.
        pid: The process.
        figures: The measured seconds and bytes, by name.
        note: What the contender makes durable by itself.
        error: Why it failed; empty if it did not.
        missing: The packages that the contender needs and that are not installed; empty if all are.
    """

    rank: int
    pid: int
    figures: dict[str, float] = {}
    note: str = ""
    error: str = ""
    missing: str = ""


class MissingError(Exception):
    """A package that a contender needs is not installed."""
