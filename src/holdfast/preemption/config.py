"""`TerminationConfig`: how a job notices a preemption, and how it exits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, cast

import msgspec

from holdfast.errors import UsageError
from holdfast.numbers import check_whole, read_time
from holdfast.preemption.sources.detect import choose_sources, look_around
from holdfast.preemption.sources.local import Watcher, check_function
from holdfast.preemption.sources.protocol import NoticeSource
from holdfast.preemption.sources.signals import Signals
from holdfast.tracebacks import short_traceback

EXIT_RESTART: Final = 42
"""Everything trained is in a committed checkpoint; the same command, started again, resumes from there."""

_MAX_EXIT_CODE: Final = 125
"""Shells use higher codes for their own purposes."""


class TerminationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configures how a job notices a preemption, and how it exits.

    Attributes:
        termination_watcher_fn: Called repeatedly in its own thread; once it returns something true, the job is asked to
            stop. Used in addition to the other sources.
        exit_fn: Called without arguments once a checkpoint of the state is committed, instead of exiting with
            `exit_code`. If it returns, training continues, and a later notice works again.
        grace_period: How long to train on after a notice: seconds, or text such as "30s". The state is saved at once,
            and again before the time is over. 0 to exit at once. None to exit at once too, unless the source knows the
            time of the end.
        save_fn: Called instead of the manager's `save`, without arguments, or with those of
            `save_checkpoint_if_preempted`; not in a block of `checkpointable`, which the manager saves. If it returns a
            handle, that save is waited for. If it raises, or calls `sys.exit`, nothing counts as saved.
        sources: The sources of notices: "auto" for signals and those that fit the machine, or a list of
            `holdfast.preemption`'s.
        exit_code: The exit code when everything is saved; the launcher should then start the job again.
    """

    termination_watcher_fn: Callable[[], object] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | str | None = None
    save_fn: Callable[..., Any] | None = None
    sources: Literal["auto"] | Iterable[NoticeSource] = "auto"
    exit_code: int = EXIT_RESTART

    @short_traceback
    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            value = getattr(self, name)
            if value is not None:
                check_function(name, value)
        if self.grace_period is not None:
            seconds = read_time("grace_period", self.grace_period, least=0)
            msgspec.structs.force_setattr(self, "grace_period", seconds)
        hint = f"0 means that the job is done, and shells use codes above {_MAX_EXIT_CODE}."
        check_whole("exit_code", self.exit_code, 1, _MAX_EXIT_CODE, hint=hint)
        if self.sources != "auto":
            hint = 'Use "auto", or a list of sources from holdfast.preemption, such as [Signals()].'
            if not isinstance(self.sources, Iterable):
                raise UsageError(f"sources must be a list, got {self.sources!r}", hint=hint)
            sources = tuple(self.sources)
            for source in sources:
                # A class has all the methods of its objects.
                if isinstance(source, type) or not isinstance(source, NoticeSource):
                    raise UsageError(
                        f"sources must contain sources of notices, got {source!r} in {self.sources!r}", hint=hint
                    )
            msgspec.structs.force_setattr(self, "sources", sources)

    @property
    def grace_seconds(self) -> float | None:
        """The grace period in seconds, or None."""
        return cast("float | None", self.grace_period)

    def make_sources(self) -> list[NoticeSource]:
        """Returns the sources to listen to."""
        sources = choose_sources(look_around()) if self.sources == "auto" else list(self.sources)
        watcher = self.termination_watcher_fn
        return sources if watcher is None else [*sources, Watcher(watcher)]


def make_termination(
    preemption: object, objects: Mapping[str, object] | None = None, *, grace: object = None
) -> TerminationConfig:
    """Returns the configuration for the arguments of these names.

    Args:
        preemption: The argument.
        objects: The objects to save that were passed along with it.
        grace: The argument.

    Raises:
        UsageError: If it is not valid, or one of the objects was meant to be this argument.
    """
    for name, value in (objects or {}).items():
        if isinstance(value, TerminationConfig) or (isinstance(value, NoticeSource) and not isinstance(value, type)):
            raise UsageError(
                f"{name}={value!r} says how to stop the job, and is not an object to save",
                hint="Pass it as preemption=TerminationConfig(...); sources of notices go into its sources=[...].",
            )
    seconds = None if grace is None else read_time("grace", grace, least=0)
    if seconds is not None and preemption != "auto":
        raise UsageError(
            f'grace={grace!r} needs preemption="auto", got {preemption!r}',
            hint="In a TerminationConfig, write grace_period=... instead.",
        )
    if isinstance(preemption, TerminationConfig):
        return preemption
    if preemption == "auto":
        return TerminationConfig(grace_period=seconds)
    if preemption == "off":
        # Python handles signals in the main thread only; elsewhere Ctrl-C is not this thread's.
        is_main = threading.current_thread() is threading.main_thread()
        return TerminationConfig(sources=[Signals(signal.SIGINT)] if is_main else [])
    raise UsageError(
        f'preemption must be "auto", "off" or a TerminationConfig, got {preemption!r}',
        hint='"auto" handles signals and the notices of the machine it runs on, "off" Ctrl-C only.',
    )
