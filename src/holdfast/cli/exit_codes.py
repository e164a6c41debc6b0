"""The exit codes of the verbs, in one table."""

from __future__ import annotations

import enum
from typing import Any

from holdfast.errors import (
    DamageError,
    HoldfastError,
    NoCheckpointError,
    NotRunningError,
    NoWholeCheckpointError,
    OtherGenerationError,
    UnansweredError,
    UsageError,
)


class ExitCode(enum.IntEnum):
    """Result of a verb. The meaning of a number never changes."""

    OK = 0
    """The verb succeeded, and everything that it checked is whole."""
    DAMAGED = 1
    """Damage was found: bytes or records are not what was written, or not what this version can read."""
    USAGE = 2
    """The command line is wrong, or asks for something that the verb never does."""
    NOTHING_THERE = 3
    """There is no such directory, run, step or checkpoint."""
    FAILED = 4
    """The directory could not be read or changed, or another error of `holdfast.errors` occurred."""
    UNFIT = 5
    """A directory that was examined is not fit for checkpoints."""
    DIFFERENT = 6
    """`diff --exit-code` found differences."""
    NOT_RUNNING = 7
    """No job has the run open."""
    UNANSWERED = 8
    """A job is alive, and does not do what it was asked to: it hangs, or its step takes long."""
    OTHER_GENERATION = 9
    """The request was meant for another start of the run."""
    BUG = 70
    """An unexpected exception: a bug in holdfast."""
    INTERRUPTED = 130
    """Ctrl-C, as a shell reports it."""
    BROKEN_PIPE = 141
    """The reader of the output stopped reading, as a shell reports it."""


def exit_code_of(error: HoldfastError) -> ExitCode:
    """**Pure.** The exit code of a verb that was ended by an error."""
    match error:
        case UsageError():
            return ExitCode.USAGE
        case DamageError():
            return ExitCode.DAMAGED
        case NoWholeCheckpointError(damages=damages) if damages:
            return ExitCode.DAMAGED
        case NoCheckpointError():
            return ExitCode.NOTHING_THERE
        case NotRunningError():
            return ExitCode.NOT_RUNNING
        case UnansweredError():
            return ExitCode.UNANSWERED
        case OtherGenerationError():
            return ExitCode.OTHER_GENERATION
    return ExitCode.FAILED


def error_fields(error: BaseException, exit_code: int, message: str, hint: str = "") -> dict[str, Any]:
    """**Pure.** An error that ended a verb, in a JSON document."""
    return {"kind": type(error).__name__, "exit_code": int(exit_code), "message": message, "hint": hint}


def holdfast_error_fields(error: HoldfastError) -> dict[str, Any]:
    """**Pure.** An error of `holdfast.errors` that ended a verb, in a JSON document."""
    return error_fields(error, exit_code_of(error), error.message, error.hint)
