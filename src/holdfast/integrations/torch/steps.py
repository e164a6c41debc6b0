"""Steps of torch optimizers: what is called before and after each, and the gradients that wait for one."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef


class StepCalls:
    """**Thread-safe.** The functions that are called before, or after, each step of any torch optimizer.

    torch's own list of hooks must not change while another thread's optimizer iterates over it: so one hook stays
    there, from the first time that it is needed, and it iterates over a copy of these functions.
    """

    def __init__(self, register: Callable[[Callable[..., None]], object]) -> None:
        # Guards the hook. The calls have no lock: one is removed by the end of an optimizer too, which the collector
        # of garbage may bring about anywhere, with the lock held as well.
        self._lock = threading.RLock()
        self._calls: dict[object, Callable[[object], None]] = {}
        self._hook: Callable[..., None] | None = None
        self._is_left_alone = False
        self._register = register

    def add(self, call: Callable[[object], None]) -> Callable[[], None]:
        """Adds a function, until the returned function is called, which may be repeated."""
        key = object()
        self._calls[key] = call
        with self._lock:
            # What Dynamo has compiled does not wait, unless it leaves the hook alone. To ask for that takes a second
            # where nothing is compiled.
            if self._hook is None or ("torch._dynamo" in sys.modules and not self._is_left_alone):
                self._is_left_alone = "torch._dynamo" in sys.modules
                self._hook = torch.compiler.disable(self._pass_on) if self._is_left_alone else self._pass_on_early
                self._register(self._hook)

        def remove() -> None:
            self._calls.pop(key, None)

        return remove

    def _pass_on_early(self, optimizer: object, *_: object) -> None:
        """The hook until Dynamo is imported. It stays in torch's list, and does nothing once another one does this."""
        if not self._is_left_alone:
            self._pass_on(optimizer)

    def _pass_on(self, optimizer: object, *_: object) -> None:
        for call in self._calls.copy().values():
            call(optimizer)


CAPTURED: Final = weakref.WeakSet[object]()
"""The optimizers of which a step was seen to be captured in a CUDA graph."""


BEFORE_STEPS: Final = StepCalls(register_optimizer_step_pre_hook)


AFTER_STEPS: Final = StepCalls(register_optimizer_step_post_hook)


class WaitingGradients:
    """Two gradients of an optimizer, as they were after the newest step of any optimizer.

    Later gradients wait for a step. The steps of other optimizers count too: the loss of a generator reaches the
    discriminator, whose gradients are then set to zero and not used.

    Only the thread that creates this reads the gradients. torch ends the process, or damages its memory, if one thread
    reads `parameter.grad` while another one sets it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._thread = threading.get_ident()
        self._seen: list[tuple[TensorWeakRef, int]] = []
        self.note()
        # The call must not keep this alive: it ends with the save's interest in it.
        alive = weakref.ref(self)

        def note(_: object) -> None:
            if (gradients := alive()) is not None:
                gradients.note()

        weakref.finalize(self, AFTER_STEPS.add(note)).atexit = False

    def note(self) -> None:
        """Called after each step of any thread."""
        if threading.get_ident() == self._thread:
            self._seen = [(TensorWeakRef(one), one._version) for one in self._sample()]

    def find_loss(self) -> str:
        """Returns a warning about a save that is made now, if gradients wait for a step.

        Gradients that were set to zero do not wait, nor those that overflowed, for which a gradient scaler skips the
        step.
        """
        if threading.get_ident() != self._thread:
            return ""
        seen = [(ref(), version) for ref, version in self._seen]
        new = [one for one in self._sample() if not any(one is old and one._version == count for old, count in seen)]
        # Of a sharded one only the local part: other workers are not asked.
        parts = [getattr(one, "_local_tensor", one) for one in new]
        local = [one for one in parts if type(one) is torch.Tensor and one.layout is torch.strided]
        if not any(bool(one.any()) for one in local) or not all(bool(one.isfinite().all()) for one in local):
            return ""
        return (
            "saved between backward() and optimizer.step(); gradients are not saved, so a restart loses these. Call "
            "run.finish_step() only after optimizer.step() (with run.steps: take all batches of a step in one turn); "
            "count batches with enumerate(loader, start=loader.batches_done)"
        )

    def _sample(self) -> list[torch.Tensor]:
        """Returns the gradients of the first parameter that has one, and of the last."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        first = next((one.grad for group in groups for one in group if one.grad is not None), None)
        last = next((one.grad for group in reversed(groups) for one in reversed(group) if one.grad is not None), None)
        return [one for one in (first, last) if one is not None]


def follow_one(obj: Any, call: Callable[[object], None]) -> Callable[[], None] | None:
    """Adds a hook to one optimizer, or to the one in a wrapper that has no hooks; copies of it do not have it."""
    if "torch._dynamo" in sys.modules:
        call = torch.compiler.disable(call)  # Else what compiles a step would look into it, and warn.
    for optimizer in (obj, getattr(obj, "optimizer", None)):
        with suppress(AttributeError):  # A wrapper may inherit the method, and lack what torch's own class sets.
            handle = cast(Any, optimizer).register_step_pre_hook(lambda stepping, *_: call(stepping))
            return cast(Callable[[], None], handle.remove)
    return None
