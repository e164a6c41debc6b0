"""Short tracebacks: an error of holdfast shows the user's frames, and not those of holdfast."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType, FunctionType, TracebackType
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

from holdfast.errors import HoldfastError, PeerError

_Target = TypeVar("_Target", bound=Callable[..., Any])

TRACEBACK_VARIABLE: Final = "HOLDFAST_TRACEBACK"
"""The environment variable that makes tracebacks show all frames."""

_PACKAGE: Final = __name__.partition(".")[0]

_LIBRARIES: Final = frozenset(
    {_PACKAGE, "torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate", "keras"}
)
"""Packages between the user's code and an error, whose frames are not shown when that ends the program."""

_ENTRIES: Final = ("__init__", "__enter__", "__exit__", "__setitem__")


def short_traceback(target: _Target) -> _Target:
    """Makes errors of holdfast that leave a public call show only the user's frames.

    Errors of other kinds, and calls inside of holdfast, are not affected. It adds less than a microsecond to a call.

    Args:
        target: A function, or a class, whose public methods are all wrapped.
    """
    if isinstance(target, type):
        for name, method in list(vars(target).items()):
            if isinstance(method, FunctionType) and (name in _ENTRIES or not name.startswith("_")):
                setattr(target, name, short_traceback(method))
        return target

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # What pytest and IPython look for.
        try:
            return target(*args, **kwargs)
        except (HoldfastError, KeyboardInterrupt) as error:
            print_short()
            # An interrupt of Python's own has no text; holdfast's says what is saved.
            if _is_own(sys._getframe(1)) or (isinstance(error, KeyboardInterrupt) and not error.args):
                raise
            if not os.environ.get(TRACEBACK_VARIABLE):
                _shorten(error)
            raise error  # HOLDFAST_TRACEBACK=1 in the environment shows the frames that are left out here.

    # `resumable` looks up its own options there.
    cast("Any", call).__kwdefaults__ = getattr(target, "__kwdefaults__", None)
    return cast("_Target", call)


_WITHIN_A_STEP: Final = (
    "holdfast",
    "torch.optim",
    "torch.utils.data",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "keras",
)
"""Packages whose code, where the program leaves from within it, may have changed only part of the state by then."""


def find_inside(error: BaseException, trace: TracebackType | None, restart_code: int) -> str:
    """Returns why an exit does not end a loop as `return` does; empty if it does.

    A function that the loop calls may exit as the loop itself may. A signal's handler may come anywhere, and a hook or
    a dataset is called from within an update, or before there is a batch: the state may be that of half a step. And a
    code other than 0, or the one with which a job is started again, says that the program has failed.
    """
    if isinstance(error, SystemExit) and error.code not in (None, 0, restart_code):
        return f"with {error.code!r}, as after an error"
    handlers = {_find_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code in handlers or module == "holdfast.preemption.sources.signals":
            return "in a signal handler"
        if any(module == name or module.startswith(f"{name}.") for name in _WITHIN_A_STEP):
            return f"inside of {module}"
    return ""


def _find_code(handler: Any) -> object:
    """Returns the code of a signal's handler, if it is written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)  # A bound method has that of its function.
    return code or getattr(getattr(type(handler), "__call__", None), "__code__", None)  # noqa: B004  Its code is wanted.


_CAUSED_BY: Final = "Caused by "


def _shorten(error: BaseException) -> None:
    """Removes holdfast's frames from an error and its cause, and hides what the cause was raised from.

    The cause itself stays. A note names the error that raised the cause, which becomes its `__context__`. If the user's
    code took part in that, it stays visible.
    """
    error.__traceback__ = _leave_out_own(error.__traceback__)
    cause = error.__cause__
    if cause is None:
        return
    cause.__traceback__ = _leave_out_own(cause.__traceback__)
    behind: list[BaseException] = []
    one = _find_shown_cause(cause)
    while one is not None and one not in behind:
        one.__traceback__ = _leave_out_own(one.__traceback__)
        behind.append(one)
        one = _find_shown_cause(one)
    if behind and not any(one.__traceback__ for one in behind):
        root = behind[-1]
        cause.add_note(f"{_CAUSED_BY}{type(root).__name__}: {root}")
        cause.__context__ = behind[0]
        cause.__cause__ = None


def _find_shown_cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


_print_before: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = None


def print_short() -> None:
    """Makes the interpreter show only what adds a fact when an error of holdfast ends the program.

    These are left out: frames of holdfast and of frameworks, which add theirs after an error has left holdfast; and
    causes whose text is a part of the error's own. A program that catches the error finds them all.
    """
    global _print_before
    if _print_before is None:
        _print_before, sys.excepthook = sys.excepthook, _print_error


_printed_elsewhere: Final[WeakKeyDictionary[BaseException, str]] = WeakKeyDictionary()


def print_elsewhere(error: Exception, worker: str) -> None:
    """Makes an error of holdfast that ends the program one line: a worker on this machine prints the same in full."""
    _printed_elsewhere[error] = worker


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, HoldfastError) and not os.environ.get(TRACEBACK_VARIABLE):
        if worker := _printed_elsewhere.get(error):
            first = error.message.partition("\n")[0].rstrip(":")
            sys.stderr.write(f"{kind.__module__}.{kind.__qualname__}: {first} ({worker} prints all of it)\n")
            return
        with suppress(Exception):  # Else it is shown as it is.
            _leave_out_repeated(error)
            trace = error.__traceback__ = _leave_out_own(trace, _LIBRARIES) or trace
            if isinstance(error, PeerError) and _is_printed_there(error):
                error.__notes__, error.__cause__, error.__suppress_context__ = [], None, True
                trace = error.__traceback__ = None
    assert _print_before is not None  # It is set with this.
    _print_before(kind, error, trace)


def is_near(error: PeerError) -> bool:
    """Returns True if the worker that has failed is on this machine, and raises that itself."""
    import socket

    return f" on {socket.gethostname()}: " in error.message


def _is_printed_there(error: PeerError) -> bool:
    """Returns True if the other worker, on the same machine, has printed its traceback: here it is one line then."""
    return is_near(error) and bool(error.traceback) and error.kind not in ("SystemExit", "KeyboardInterrupt")


def _leave_out_repeated(error: BaseException) -> None:
    """Removes the causes at the end of the chain that add nothing, and of the others the frames of libraries."""
    chain = [error]
    while (cause := _find_shown_cause(chain[-1])) is not None and cause not in chain:
        cause.__traceback__ = _leave_out_own(cause.__traceback__, _LIBRARIES)
        chain.append(cause)
    while len(chain) > 1 and _repeats(chain[-1], chain[-2]):
        chain.pop()
        chain[-1].__cause__ = None


def _repeats(cause: BaseException, error: BaseException) -> bool:
    text = getattr(cause, "message", None) or getattr(cause, "strerror", None) or str(cause)
    has_notes = any(not note.startswith(_CAUSED_BY) for note in getattr(cause, "__notes__", ()))
    # What is not named as the cause only happened before: a collective that was cut off, say.
    return not cause.__traceback__ and not has_notes and (text in str(error) or error.__cause__ is None)


def _leave_out_own(
    trace: TracebackType | None, packages: Collection[str] = frozenset({_PACKAGE})
) -> TracebackType | None:
    """Returns a traceback without the frames of some packages and of the standard library that they called."""
    kept: list[TracebackType] = []
    is_within = False
    while trace is not None:
        frame = trace.tb_frame
        is_within = _find_package(frame) in packages or (is_within and _find_package(frame) in sys.stdlib_module_names)
        if not is_within:
            kept.append(trace)
        trace = trace.tb_next
    shown: TracebackType | None = None
    for one in reversed(kept):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown


def _is_own(frame: FrameType) -> bool:
    return _find_package(frame) == _PACKAGE


def _find_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
