"""Distinguishes a worker's own errors from those caused by a peer's failure. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from holdfast.errors import AbsentError, ClusterError, HoldfastError, PeerError, SaveFailedError

_KINDS: Final = {("torch.distributed", "DistError")}
"""The error types of frameworks' collectives, by module and name, so that no framework is imported."""

_WORDS: Final = re.compile(
    r"gloo|nccl|rccl|xccl|hccl|\bmpi_|process ?group|connection (closed|reset) by peer", re.IGNORECASE
)
"""Words in the other errors, which are plain `RuntimeError`s."""

_MOST_CAUSES: Final = 100


class EarlyExit(SystemExit):
    """The exit of a worker that was asked to stop while its run was being created; the others see it by this name."""

    def __init__(self, code: object, text: str) -> None:
        super().__init__(code)
        self._text = text

    def __str__(self) -> str:
        return self._text


def describe_early_exit(error: BaseException | None) -> str:
    """**Pure.** Describes which other worker left before its run was created, and why; empty if the error does not say.

    No worker has trained by then, so all may exit.
    """
    is_early = isinstance(error, PeerError) and error.kind == EarlyExit.__name__
    return f"rank {error.rank} is leaving: {error.text}" if is_early and isinstance(error, PeerError) else ""


def find_missing(error: BaseException) -> PeerError | None:
    """**Pure.** Returns the error that a worker is missing, if this one results from it, as a failed save may."""
    found = (each for each in _causes(error) if isinstance(each, PeerError))
    return next((each for each in found if each.kind == AbsentError.__name__), None)


def is_of_collective(error: BaseException) -> bool:
    """**Pure.** Returns True if it was raised by a collective, or because of one: it names no worker."""
    return any(map(_is_raised_by_collective, _causes(error)))


def is_from_collective(error: PeerError) -> bool:
    """**Pure.** Returns True if a collective raised it on another worker: it names no worker."""
    is_such = error.kind == RuntimeError.__name__ or error.kind.startswith("Dist")
    return is_such and _WORDS.search(error.text) is not None


def may_follow(error: BaseException, kind: str) -> bool:
    """**Pure.** Returns True if it may result from another worker's error of that kind."""
    if isinstance(error, HoldfastError | ConnectionError):
        # What is the same everywhere, as when a save fails, comes on each worker by itself.
        return type(error).__name__ != kind
    return is_of_collective(error)


def is_cause(error: ClusterError) -> bool:
    """**Pure.** Returns True if it says why that worker failed: more than a missing worker or a failed save."""
    if not isinstance(error, PeerError) or error.kind == AbsentError.__name__:
        return False
    return not is_of_save(error) and not is_from_collective(error)


def is_of_save(error: ClusterError) -> bool:
    """**Pure.** Returns True if it is a failed save, which every worker learns of by itself."""
    return isinstance(error, PeerError) and error.kind == SaveFailedError.__name__


def find_loss(error: BaseException) -> str:
    """**Pure.** Returns the message, if it only says that a worker is missing or a save has failed; else empty.

    If there was no time to find out which worker is missing, it is what a collective raised.
    """
    if isinstance(error, ClusterError):
        return "" if is_cause(error) else error.message
    return str(error) if is_of_collective(error) else ""


def name_dead(error: ClusterError | None) -> str:
    """**Pure.** Returns the message, if it says that a worker is dead; else empty."""
    # Another worker may have reported it before this one could see it.
    is_dead = isinstance(error, PeerError) and error.kind == AbsentError.__name__ and error.text.startswith("has ")
    return error.message if is_dead and error is not None else ""


def _is_raised_by_collective(error: BaseException) -> bool:
    if any((kind.__module__, kind.__name__) in _KINDS for kind in type(error).__mro__):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, HoldfastError):
        return False
    try:
        return _WORDS.search(str(error)) is not None
    except Exception:  # noqa: BLE001  An error of the user's may be of a kind that cannot even say what it is.
        return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and those from which it results."""
    found: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if found is None:
            return
        yield found
        # What an error of holdfast came of is its context once its traceback is shortened.
        is_hidden = found.__suppress_context__ and not isinstance(found, HoldfastError)
        found = found.__cause__ or (None if is_hidden else found.__context__)
