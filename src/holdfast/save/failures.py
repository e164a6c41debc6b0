"""Failures of saves: each is raised once, in the thread of the user, although it happens in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from holdfast.errors import ChangedError, DeadlineError, FencedError, HoldfastError, PeerError, SaveFailedError
from holdfast.process.exit import register_drain, unregister_drain
from holdfast.save.handle import SaveHandle


class PendingFailures:
    """**Thread-safe.** The failures of one manager's saves that were not raised yet.

    While a save is in progress, or a failure has not been raised, the exit of the program waits for it. Only this small
    object is kept alive for that, not the manager.
    """

    def __init__(self, failures_allowed: int) -> None:
        """Tolerates up to `failures_allowed` failures in a row.

        A save during which state changed does not count: usually there is one such save, and two at the most.
        """
        self._failures_allowed = failures_allowed
        # Acquired again by a signal handler that waits, say, in the middle of what it guards: these four.
        self._lock = threading.RLock()
        self._unraised: list[HoldfastError] = []
        self._failures_in_a_row = 0
        self._changes_in_a_row = 0
        self._in_flight: SaveHandle | None = None
        # Whether closing has not waited for that until its end, and has said so; or a person has ended that wait.
        self._is_given_up = self._is_interrupted = False

    def note_begun(self, handle: SaveHandle) -> None:
        """Called when a save has begun; from now on the exit of the program waits for it."""
        with self._lock:
            self._in_flight, self._is_given_up, self._is_interrupted = handle, False, False
        register_drain(self)

    def forgive(self) -> None:
        """Called when a save was committed: tolerated failures no longer count."""
        with self._lock:
            if self._failures_in_a_row <= self._failures_allowed:
                self._unraised = [error for error in self._unraised if not isinstance(error, SaveFailedError)]
            self._failures_in_a_row = self._changes_in_a_row = 0

    def note_ended(self, handle: SaveHandle) -> None:
        """Called when the save is over, also if the next one has begun."""
        with self._lock:
            if self._in_flight is handle:
                self._in_flight = None
            self._release_if_done()
        handle.request.ended.open()

    def add(self, error: HoldfastError) -> None:
        """Adds a failure that must be raised."""
        with self._lock:
            self._unraised.append(error)
            if isinstance(error, SaveFailedError):
                cause = error.__cause__
                kind = cause.kind if isinstance(cause, PeerError) else type(cause).__name__
                if kind == ChangedError.__name__:
                    # What has changed is copied at once from now on: no reason to end a job for, but by its last save.
                    self._changes_in_a_row += 1
                else:
                    self._failures_in_a_row += 1

    def take(self, *, last: bool) -> list[HoldfastError]:
        """Returns the failures to raise now, oldest first; they count as raised. The `last` call tolerates none."""
        with self._lock:
            fenced = any(isinstance(error.__cause__, FencedError) for error in self._unraised)
            counted, any_lost = self._failures_in_a_row, self._failures_in_a_row + self._changes_in_a_row > 0
            tolerated = not last and not fenced and any_lost and counted <= self._failures_allowed
            taken = [error for error in self._unraised if not (tolerated and isinstance(error, SaveFailedError))]
            self._unraised = [error for error in self._unraised if error not in taken]
            self._release_if_done()
        return taken

    def put_back(self, errors: list[HoldfastError]) -> None:
        """Undoes `take`, for a caller that could not raise what it took."""
        with self._lock:
            self._unraised = errors + self._unraised
        if errors:
            register_drain(self)

    def mark_raised(self, error: HoldfastError) -> None:
        """Called when a wait on a handle has raised this failure."""
        with self._lock:
            self._unraised = [other for other in self._unraised if other is not error]
            self._release_if_done()

    def close_behind(self, error: BaseException | None, close: Callable[[], None]) -> None:
        """**Blocks.** Calls `close` at the end of a block, which an error may have ended.

        An error that ended the block takes precedence; a failure to close is added to it as a note, or else is raised.
        """
        try:
            close()
        except HoldfastError as failure:
            if error is None:
                raise
            if isinstance(error, SaveFailedError) and isinstance(failure, SaveFailedError):
                error.add_note(f"holdfast: step {failure.step} was not saved either")  # The log says why.
            else:
                error.add_note(f"holdfast: while closing: {type(failure).__name__}: {failure}")
            if isinstance(error, SystemExit):
                # That one is not printed, and its code may be 0: the exit of the program must show the failure.
                self.put_back([failure])

    def wait_closed(self, handle: SaveHandle, timeout_seconds: float | None) -> None:
        """**Blocks.** Waits for a save as its manager is closed. If that fails, the program's end waits no more."""
        try:
            handle.wait_ended(timeout_seconds, at_exit=True)
        except DeadlineError:
            self._is_given_up = True
            raise
        except KeyboardInterrupt:
            self._is_given_up = self._is_interrupted = True
            raise

    def drain(self) -> list[HoldfastError]:
        """**Blocks.** Called when the program ends: waits for the save in progress and returns failures not raised yet.

        Raises:
            KeyboardInterrupt: If a person does not want to wait; it tells what is lost.
        """
        with self._lock:
            handle = self._in_flight
        if handle is not None:
            handle.request.drop_if_left()
            try:
                handle.wait_ended(0.0 if self._is_given_up else None, at_exit=True)
            except DeadlineError:
                if self._is_interrupted:
                    raise KeyboardInterrupt(f"step {handle.step} is not saved") from None
                text = f"step {handle.step} is not saved: the program ended before its save did"
                return [*self.take(last=True), DeadlineError(text, hint="Find out why the storage is slow.")]
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"step {handle.step} is not saved") from None
            except SystemExit as leaving:
                # A signal handler of the program's own. An exit that comes out of here would change no exit code.
                text = f"step {handle.step} is not saved: a handler interrupted the wait for it (SystemExit: {leaving})"
                return [*self.take(last=True), DeadlineError(text, hint="Let the handler wait for the save first.")]
        return self.take(last=True)

    def abandon(self) -> None:
        """Stops waiting for the save in progress, and drops all failures."""
        with self._lock:
            self._in_flight = None
            self._unraised = []
            self._release_if_done()

    def _release_if_done(self) -> None:
        if self._in_flight is None and not self._unraised:
            unregister_drain(self)


def raise_newest(failures: list[HoldfastError], next_save: SaveHandle | None = None) -> NoReturn:
    """Raises the newest failure, with the others as notes."""
    newest = failures[-1]
    for failure in failures[:-1]:
        newest.add_note(f"before that: {failure}")
    if isinstance(newest, SaveFailedError):
        newest.next_save = next_save
    raise newest
