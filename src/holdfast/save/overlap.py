"""Copies that go on while training computes: the optimizer's step, which changes what is copied, waits for them."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.errors import DeadlineError
from holdfast.gate import Gate
from holdfast.state.adapters import Adapter
from holdfast.state.leaves import WITNESS, Captured, Transfer


@dataclass(slots=True)
class _Copying:
    """One copy under way: the gate opens when `transfers` are all that is left of it."""

    step: int
    gate: Gate = field(default_factory=Gate)
    transfers: list[Transfer] = field(default_factory=list)


class StepHold:
    """Holds up the steps of optimizers while what they change is being copied.

    `try_hold`, `begin` and the steps themselves belong to the training thread, `release` to the thread that copies.
    """

    def __init__(self, timeout_seconds: float, report: Callable[[int, float], None]) -> None:
        """Holds nothing yet.

        Args:
            timeout_seconds: How long a step may be held up.
            report: Told of the step that is being saved, and of the seconds for which the optimizer's step was held up.
        """
        self._timeout_seconds = timeout_seconds
        self._report = report
        self._process = os.getpid()
        self._copying: _Copying | None = None
        # By object: what takes the hook away, or None for one that takes none.
        self._hooks: weakref.WeakKeyDictionary[object, Callable[[], None] | None] = weakref.WeakKeyDictionary()

    def try_hold(self, obj: object, adapter: Adapter) -> bool:
        """Whether each step of an object waits for the copies from now on."""
        if obj not in self._hooks:
            # The hook must not keep this alive, nor what hangs on it.
            wait = weakref.WeakMethod(self.wait)
            self._hooks[obj] = adapter.before_step(obj, lambda: _call(wait))
        return self._hooks[obj] is not None

    def begin(self, step: int) -> None:
        """From now on steps wait, until `release`."""
        self._copying = _Copying(step)

    def release(self, transfers: list[Transfer]) -> None:
        """Lets steps go on, behind what devices are still copying; harmless twice."""
        copying = self._copying
        if copying is not None and not copying.gate.is_open:
            copying.transfers = transfers
            copying.gate.open()

    def wait(self) -> None:
        """**Blocks.** Called before each step.

        Raises:
            DeadlineError: If the copy does not end in time.
        """
        copying = self._copying
        if copying is None or os.getpid() != self._process:
            return
        begun_at = time.monotonic()
        if not copying.gate.wait(self._timeout_seconds):
            raise DeadlineError(
                f"the copy of step {copying.step} did not end in {self._timeout_seconds:g} s; no step may begin before",
                hint="Find out what holds the machine up; overlap_copy=False copies before save() returns.",
            )
        for transfer in copying.transfers:
            transfer.hold()
        self._copying = None
        self._report(copying.step, time.monotonic() - begun_at)

    def end(self) -> None:
        """Takes all hooks away."""
        for remove in self._hooks.values():
            if remove is not None:
                remove()
        self._hooks.clear()


def keep_steady(captured: Captured, unsteady: Collection[str]) -> Captured:
    """Holds no more than what is known to change by a step alone.

    Args:
        captured: What was captured.
        unsteady: The names of leaves that have changed otherwise.
    """
    steady = (
        place
        for place in captured.held
        if captured.names[place].partition(WITNESS)[0] not in unsteady
        and captured.backends[place].version(captured.arrays[place]) is not None
    )
    witnesses = None if captured.witnesses is None else keep_steady(captured.witnesses, unsteady)
    return replace(captured, held=frozenset(steady), witnesses=witnesses)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:
        alive()
