"""How a job hears that it is to be taken away, and how it leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds, check_whole
from holdfast.preemption.sources.detect import choose_sources, look_around
from holdfast.preemption.sources.protocol import NoticeSource
from holdfast.preemption.sources.signals import Signals
from holdfast.preemption.sources.user import Watcher, check_function
from holdfast.tracebacks import short_traceback

EXIT_RESTART: Final = 42
"""What was trained is in a committed checkpoint; the same command, started again, goes on from there."""

_MAX_EXIT_CODE: Final = 125
"""Shells use those above for purposes of their own."""


class TerminationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to hear a notice of preemption, and how to leave.

    Attributes:
        termination_watcher_fn: Called again and again in a thread of its own; when it begins to return something true,
            the job is to leave. Comes beside the other sources.
        exit_fn: Called without arguments when a checkpoint of the state is committed, in place of an exit with
            `exit_code`. If it returns, training goes on, and a later notice works again.
        grace_period: How many seconds to train on after a notice: the state is saved at once, and again before the
            time is over. 0 to leave at once. None to leave at once too, unless the source itself says when the machine
            is taken away.
        save_fn: Called in place of the manager's `save`, without arguments, or with those of
            `save_checkpoint_if_preempted`; not in a block of `checkpointable`, which the manager saves. A handle
            that it returns is waited for. If it raises, or calls `sys.exit`,
            nothing counts as saved.
        sources: Where to listen: "auto" for signals and what fits the place where the job runs, or a list of sources
            of `holdfast.preemption`.
        exit_code: What to exit with when all is saved; what started the job should start it again then.
    """

    termination_watcher_fn: Callable[[], object] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
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
            check_seconds("grace_period", self.grace_period, least=0)
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

    def make_sources(self) -> list[NoticeSource]:
        """The sources to listen to."""
        sources = choose_sources(look_around()) if self.sources == "auto" else list(self.sources)
        watcher = self.termination_watcher_fn
        return sources if watcher is None else [*sources, Watcher(watcher)]


def make_termination(preemption: object, objects: Mapping[str, object] | None = None) -> TerminationConfig:
    """What the argument of that name stands for.

    Args:
        preemption: The argument.
        objects: What stands beside it, and is to be kept.

    Raises:
        UsageError: If it stands for nothing, or was meant to be this argument and has the name of an object.
    """
    for name, value in (objects or {}).items():
        if isinstance(value, TerminationConfig) or (isinstance(value, NoticeSource) and not isinstance(value, type)):
            raise UsageError(
                f"{name}={value!r} says how to stop the job, and is not an object to save",
                hint="Pass it as preemption=TerminationConfig(...); sources of notices go into its sources=[...].",
            )
    if isinstance(preemption, TerminationConfig):
        return preemption
    if preemption == "auto":
        return TerminationConfig()
    if preemption == "off":
        # Python handles signals in the main thread only; elsewhere Ctrl-C is not this thread's.
        is_main = threading.current_thread() is threading.main_thread()
        return TerminationConfig(sources=[Signals(signal.SIGINT)] if is_main else [])
    raise UsageError(f"preemption={preemption!r}", hint='Use "auto", "off" or a TerminationConfig.')
