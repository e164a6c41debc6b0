"""`ask`: asks the job of a run to save, to stop, or how it is, from any process that can write to the run."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from msgspec.structs import asdict

from holdfast.catalog import StoredRun, find_owner
from holdfast.catalog.openers import has_ended, is_locked, is_of_this_machine
from holdfast.catalog.requests import COMMANDS, REQUESTS_DIRECTORY, Command, Reply, RequestBox, RunRequest, name_asker
from holdfast.errors import (
    HoldfastError,
    NotRunningError,
    OtherGenerationError,
    SaveFailedError,
    UnansweredError,
    UsageError,
)
from holdfast.numbers import check_seconds, check_whole, span_text
from holdfast.storage import Storage, open_storage
from holdfast.tracebacks import short_traceback

_LOOK_SECONDS: Final = 0.05
_REMOTE_LOOK_SECONDS: Final = 1.0

_HEARD_HERE_SECONDS: Final = 3.0
_HEARD_SECONDS: Final = 20.0
_HEARD_ELSEWHERE_SECONDS: Final = 70.0
"""How long a living job may take to hear a request: on this machine, in a bucket, and through a network file system,
whose clients see new files late."""

_LATE_SECONDS: Final = 60.0
_LATE_FACTOR: Final = 20.0


@short_traceback
def ask(
    run: str | os.PathLike[str] | Storage,
    command: Command,
    *,
    timeout_seconds: float = 600.0,
    generation: int | None = None,
) -> Reply:
    """**Blocks.** Asks the job of a run to save now, to save and stop, or how it is; returns when that is done.

    The job may run on any machine that shares the run's storage, and have any number of workers: all of them save at
    the end of the same step. After "stop" it exits with code 130, as after Ctrl-C, so `holdfast run` does not start it
    again. A request that no job hears is withdrawn: it never stops a later start.

    Args:
        run: The run's directory, a URL, or an open storage; this process must be allowed to write there.
        command: "save", "stop" or "status".
        timeout_seconds: How long to wait until it is done, once a job has heard it; infinity for no limit.
        generation: The start of the run that is meant, by the number of its generation; None for the newest.

    Returns:
        The reply of the job: the step that is committed, how many are complete, and what the job does.

    Raises:
        NotRunningError: If no job answers.
        UnansweredError: If a job is alive, but does not do it in time: it hangs, or its step takes longer.
        OtherGenerationError: If the run was started again since, or `generation` is not the newest one.
        SaveFailedError: If the save has failed.
        UsageError: If an argument is wrong.
        StorageError: If the storage fails, or this process may not write there.
    """
    if command not in COMMANDS:
        raise UsageError(f'command must be "save", "stop" or "status", got {command!r}')
    limit_seconds = check_seconds("timeout_seconds", timeout_seconds, most=float("inf"))
    if generation is not None:
        check_whole("generation", generation)
    storage = open_storage(run)
    if not storage.traits.is_shared:
        raise UsageError(f"{storage.url} cannot be seen by other processes, so no job can be asked through it")
    if storage.location is not None and not storage.location.is_dir():
        raise NotRunningError(f"{storage.url} is not a directory, so no job saves there", hint="Check the path.")
    newest = max(StoredRun(storage).list_generations(), default=0)
    if generation is not None and generation != newest:
        raise OtherGenerationError(
            f"{storage.url}: the newest start of the run is generation {newest}, not {generation}",
            hint="Nothing was asked. `holdfast list` shows the newest generation.",
        )
    return _Asking(storage, command, newest).wait(limit_seconds)


class _Asking:
    """One request, until it is answered."""

    def __init__(self, storage: Storage, command: Command, generation: int) -> None:
        self._storage, self._command, self._generation = storage, command, generation
        self._box = RequestBox(storage)
        self._name = self._box.ask(RunRequest(command, generation, name_asker()))
        self._look_seconds = _REMOTE_LOOK_SECONDS if storage.location is None else _LOOK_SECONDS

    def wait(self, limit_seconds: float) -> Reply:
        """**Blocks.** Returns the reply, or raises what there is instead of one; removes its files."""
        try:
            heard = self._wait_heard()
            reply = heard if heard.outcome != "heard" else self._wait_done(heard, limit_seconds)
        finally:
            with suppress(HoldfastError):
                self._box.remove(self._name)
            if self._generation == 0 and (place := self._storage.location) is not None:
                with suppress(OSError):
                    (place / REQUESTS_DIRECTORY).rmdir()  # It may be no run.
        if reply.outcome == "declined":
            hint = "Ask again, if you mean the job that runs now."
            raise OtherGenerationError(f"{self._storage.url}: {reply.problem}", hint=hint)
        if reply.outcome == "failed":
            raise SaveFailedError(f"{self._storage.url}: {reply.problem}", step=reply.step)
        return reply

    def _wait_heard(self) -> Reply:
        end_at = time.monotonic() + self._find_heard_seconds()
        while time.monotonic() < end_at:
            if (reply := self._read()) is not None:
                return reply
            time.sleep(self._look_seconds)
        # A job that hears it from here on sees that it is gone, and does nothing; one that heard it before is seen.
        self._box.withdraw(self._name)
        if (reply := self._read()) is not None:
            return reply
        if owner := find_owner(self._storage) or ("a process" if is_locked(self._storage) else ""):
            raise UnansweredError(
                f"{self._storage.url}: {owner} has this run open, and does not answer",
                hint="It hangs in foreign code, is stopped, or has an older holdfast. The directory `hangs` in the run "
                "may have its stacks.",
            )
        raise NotRunningError(
            f"{self._storage.url}: no job answers{self._describe_last()}; the request was withdrawn",
            hint="A job answers from the time when its run is entered until it is left.",
        )

    def _find_heard_seconds(self) -> float:
        if self._storage.location is None:
            return _HEARD_SECONDS
        opening = StoredRun(self._storage).try_opening(self._generation) if self._generation else None
        is_here = opening is None or is_of_this_machine(opening) or is_locked(self._storage)
        return _HEARD_HERE_SECONDS if is_here else _HEARD_ELSEWHERE_SECONDS

    def _wait_done(self, heard: Reply, limit_seconds: float) -> Reply:
        end_at = time.monotonic() + limit_seconds
        while (reply := self._box.read_reply(self._name, "reply")) is None:
            if time.monotonic() >= end_at:
                raise UnansweredError(self._describe_silence(heard, limit_seconds), hint=self._hint_of_silence())
            if has_ended(asdict(heard)):
                # It may have replied since the look above.
                if (reply := self._box.read_reply(self._name, "reply")) is not None:
                    return reply
                raise NotRunningError(
                    f"{self._storage.url}: the job heard the request and has ended without a reply"
                    f"{self._describe_last()}"
                )
            time.sleep(self._look_seconds)
        return reply

    def _describe_silence(self, heard: Reply, limit_seconds: float) -> str:
        text = f"{self._storage.url}: the job heard the request, and has not done it within {limit_seconds:g} s"
        with suppress(HoldfastError):
            now = _Asking(self._storage, "status", self._generation).wait(limit_seconds)
            return f"{text}: {describe(now)}"
        return f"{text}: {describe(heard)} then, and it does not say how it is now"

    def _hint_of_silence(self) -> str:
        return (
            "It saves at the end of the step, if that comes, whether or not anyone waits for it. Wait longer with "
            "--timeout (timeout_seconds= in Python). If it hangs, the directory `hangs` in the run may have its stacks."
        )

    def _describe_last(self) -> str:
        with suppress(HoldfastError):
            newest = StoredRun(self._storage).look().newest
            return "" if newest is None else f", and its newest checkpoint is step {newest.step}"
        return ""

    def _read(self) -> Reply | None:
        return self._box.read_reply(self._name, "reply") or self._box.read_reply(self._name, "heard")


def describe(reply: Reply) -> str:
    """**Pure.** Describes how a job is, in words."""
    since = "" if reply.since_seconds is None else f" for {span_text(reply.since_seconds)}"
    text = f"after step {reply.step}, {reply.doing}{since}"
    if is_late(reply):
        usual = "" if reply.step_seconds is None else f"; a step took at most {reply.step_seconds:.2g} s before"
        text += f"{usual}: it may hang"
    return text


def is_late(reply: Reply) -> bool:
    """**Pure.** Returns True if a step takes so much longer than those before that the job may hang."""
    usual = reply.step_seconds
    is_training = reply.doing not in ("paused", "leaving", "ended", "restoring", "not begun", "starting")
    late_seconds = max(_LATE_SECONDS, _LATE_FACTOR * (usual or 0.0))
    return is_training and usual is not None and reply.since_seconds is not None and reply.since_seconds > late_seconds
