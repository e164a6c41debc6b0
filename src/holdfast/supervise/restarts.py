"""Decides whether a program that has ended is started again."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

PREEMPTED: Final = 42
SAVE_FAILED: Final = 74
INTERRUPTED: Final = 130
_USAGE: Final = 2
_UNREAD: Final = (120, 128 + signal.SIGPIPE, -signal.SIGPIPE)
"""Python ends with the first one if it cannot write its output at the end."""

_SAME_FAILURES: Final = 3
_QUICK_SECONDS: Final = 60.0
_STARTS_WITHOUT_PROGRESS: Final = 10
_LONGEST_PAUSE_SECONDS: Final = 60.0


class LastError(NamedTuple):
    """The error that ended a program, as the program tells it.

    Attributes:
        place: The error's type, with the file and the line where it was raised: equal failures have equal places.
        text: The type and the message.
        is_hopeless: True if another start can't succeed, as with an error of syntax.
        is_rollback: True if training has gone back to an earlier step, from which another start goes on.
    """

    place: str = ""
    text: str = ""
    is_hopeless: bool = False
    is_rollback: bool = False


class End(NamedTuple):
    """The end of one start of the program.

    Attributes:
        code: The exit code, or minus the number of the signal that killed it.
        step: How many steps were complete; None if the program counts none.
        saved: The newest step that was committed, as far as known; -1 for none.
        run: The run that it trained; steps of another one do not count.
        seconds: How long it ran.
        failure: Its error.
        hung: What the watchdog found, if that was the reason to kill it.
        has_reader: False if nothing reads what it prints any more.
    """

    code: int
    step: int | None
    seconds: float
    saved: int = -1
    run: str = ""
    failure: LastError = LastError()
    hung: str = ""
    has_reader: bool = True

    @property
    def is_cut_off(self) -> bool:
        """True if it ended because it could not print, as after `| head`: then no other start could, either."""
        is_raised = self.failure.place.startswith(f"{BrokenPipeError.__name__} ")
        return not self.has_reader and (is_raised or self.code in _UNREAD)

    @property
    def reason(self) -> str:
        """The end in a few words, as in "killed by SIGKILL"."""
        if self.hung:
            return f"hung ({self.hung})"
        if self.code < 0:
            number = -self.code
            known = number in set(signal.Signals)
            return f"killed by {signal.Signals(number).name if known else f'signal {number}'}"
        # The place in the source comes before the text of a SyntaxError, and hints after that of others.
        text = next((line for line in self.failure.text.splitlines() if line and not line[0].isspace()), "")
        if self.failure.is_rollback:
            return "went back"
        return f"failed with {text}" if text else f"ended with code {self.code}"

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it."""
        return self.code if self.code >= 0 else 128 - self.code


class Options(NamedTuple):
    """The choices of the user.

    Attributes:
        max_restarts: How often the program is started again at most; None for as often as it makes progress.
        on_code: For exit codes, whether the program is started again.
    """

    max_restarts: int | None = None
    on_code: Mapping[int, bool] = {}


class RestartVerdict(NamedTuple):
    """The decision.

    Attributes:
        restarts: True to start the program again.
        pause_seconds: How long to wait before that.
        why: The reason not to, for a line; empty if the exit code says enough.
    """

    restarts: bool
    pause_seconds: float = 0.0
    why: str = ""


def decide(ends: Sequence[End], options: Options, *, is_asked: bool) -> RestartVerdict:
    """**Pure.** Returns what happens after the last of these ends, the oldest of which comes first.

    Args:
        ends: The ends of all starts.
        options: What the user asked for.
        is_asked: True if a person or the system has asked for an end, by a signal.
    """
    last = ends[-1]
    wanted = options.on_code.get(last.code)
    if is_asked or (wanted is None and last.code in (0, PREEMPTED, SAVE_FAILED, INTERRUPTED)) or wanted is False:
        return RestartVerdict(False)
    if wanted is None and last.is_cut_off:
        return RestartVerdict(False)
    if wanted is None and (last.failure.is_hopeless or (last.code == _USAGE and not last.step)):
        return RestartVerdict(False, why=f"it {last.reason}, and would again")
    if options.max_restarts is not None and len(ends) > options.max_restarts:
        return RestartVerdict(False, why=f"it {last.reason}, and --max-restarts {options.max_restarts} are used up")
    if last.failure.is_rollback:
        return RestartVerdict(True)  # No failure: training itself refuses to go back to one step again and again.
    if why := _find_loop(ends):
        return RestartVerdict(False, why=why)
    return RestartVerdict(True, _find_pause(ends))


def _find_loop(ends: Sequence[End]) -> str:
    """Returns why further starts would be in vain; empty if they may succeed."""
    last, recent = ends[-1], ends[-_SAME_FAILURES:]
    if len(recent) == _SAME_FAILURES:
        if last.step is None:
            if all(end.step is None and end.seconds < _QUICK_SECONDS for end in recent):
                return f"three times in a row it ended within {_QUICK_SECONDS:.0f} seconds; at last it {last.reason}"
        elif len({(end.run, end.step, end.code, end.failure.place, end.hung) for end in recent}) == 1:
            place = f"at step {last.step}" if last.step else "before its first step"
            return f"three times in a row it {last.reason} {place}"
    stuck = _count_without_progress(ends)
    if last.step is not None and stuck >= _STARTS_WITHOUT_PROGRESS:
        return f"{stuck} starts in a row came no further than step {max(end.step or 0 for end in ends)}"
    return ""


def _count_without_progress(ends: Sequence[End]) -> int:
    """Returns how many of the last starts came no further than those before them."""
    furthest, saved, count, run = -1, -1, 0, ends[0].run
    for end in ends:
        if end.run and end.run != run:
            furthest, saved, run = -1, -1, end.run
        if end.failure.is_rollback:
            furthest, saved, count = -1, -1, 0  # The next start has to come that far again.
            continue
        step = -1 if end.step is None else end.step
        count = 0 if step > furthest or end.saved > saved else count + 1
        furthest, saved = max(furthest, step), max(saved, end.saved)
    return count


def _find_pause(ends: Sequence[End]) -> float:
    """Returns how long to wait: not at all after progress, then 1, 2, 4 ... seconds."""
    stuck = _count_without_progress(ends)
    if ends[-1].step is None:
        stuck = 0
        for end in reversed(ends):
            if end.step is not None or end.seconds >= _QUICK_SECONDS:
                break
            stuck += 1
        stuck = max(stuck - 1, 0)
    return min(2.0 ** (stuck - 1), _LONGEST_PAUSE_SECONDS) if stuck else 0.0
