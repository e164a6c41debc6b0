"""`Witness`: records what each step takes and gives, and compares what is repeated after a restart."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from numbers import Real
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

import xxhash

from holdfast.errors import ResumeDiffersError
from holdfast.events import Sink, WitnessAgreed, WitnessDiffers
from holdfast.format.records import Worker
from holdfast.state.registry import backend_of, list_members
from holdfast.storage import Storage
from holdfast.witness.batches import BatchLog, combine
from holdfast.witness.ring import DATA, LOSS, Repetition, Ring, StepRecord, read_ring, read_sign

P = ParamSpec("P")

_log: Final = logging.getLogger("holdfast")
_LIBRARIES: Final = ("holdfast", "torch", "numpy", "jax", "jaxlib", "keras", "tensorflow", "lightning", "transformers")
_MOST_PENDING: Final = 64
"""A device that has more steps to compute still: then the loss of the oldest is left out."""


def _harmless(method: Callable[Concatenate[Witness, P], None]) -> Callable[Concatenate[Witness, P], None]:
    """Makes a failure of the witness end only that; one that has not begun does nothing."""

    @wraps(method)
    def call(self: Witness, /, *args: P.args, **options: P.kwargs) -> None:
        if self.process:
            try:
                method(self, *args, **options)
            except Exception as error:
                self.end()
                if isinstance(error, ResumeDiffersError):
                    raise
                _log.debug("holdfast no longer compares repeated steps", exc_info=True)

    return call


class Witness:
    """The witness of one worker of a run, for its training thread. It does nothing before `begin`.

    Attributes:
        process: The process of the run, from `begin` to `end`; 0 otherwise.
    """

    def __init__(self, storage: Storage, worker: Worker, emit: Sink) -> None:
        self._storage, self._worker, self._emit = storage, worker, emit
        self.process = 0
        self._logs: list[BatchLog] = []
        self._undo: list[Callable[[], object]] = []
        self._more: list[Callable[[], None]] = []  # What is to be followed each time that this begins.
        self._loss: float | Callable[[], float | None] | None = None
        self._pending: deque[tuple[StepRecord, Callable[[], float | None] | None]] = deque()
        self._ring = Ring(storage, worker.rank)
        self._lines, self._contexts = (0, 0), (0, 0)
        self._repetition, self._is_strict = Repetition(), False
        self._say: Callable[[str], object] = lambda _: None

    def begin(
        self,
        objects: Mapping[str, object],
        step: int | None,
        say: Callable[[str], object],
        *,
        saved_at: float,
        same_loss: bool,
        strict: bool,
    ) -> None:
        """Begins, when everything is restored.

        Args:
            objects: The saved objects, by name: the loaders among them are followed.
            step: The step that was restored; None if none was, so that nothing is compared.
            say: Called with the line for people when all repeated steps agree.
            saved_at: When that step was saved, in seconds since 1970; 0 if none was restored.
            same_loss: False if the restore has changed something that changes the loss.
            strict: True to make a difference an error.
        """
        self.end()
        self.process, self._say, self._is_strict = os.getpid(), say, strict
        self._contexts, self._ring = (0, 0), Ring(self._storage, self._worker.rank)
        self._begin(objects, step, saved_at, same_loss=same_loss)

    @property
    def reached(self) -> int:
        """The last step that an earlier process had done and this one is to repeat, as this begins; 0 if none is."""
        return self._repetition.reached

    @property
    def reached_is_least(self) -> bool:
        """True if that process may have done more steps than `reached`."""
        return self._repetition.is_least

    @_harmless
    def _begin(self, objects: Mapping[str, object], step: int | None, saved_at: float, *, same_loss: bool) -> None:
        records = read_ring(self._storage, self._worker.rank)
        # What lies beyond a place to which the program went back is of another line.
        begin = min((one for one in records if step is not None and one >= step), default=None)
        line, loss_line = (int.from_bytes(os.urandom(4), "little") for _ in range(2))
        if begin is not None:
            line, loss_line = records[begin].line, records[begin].loss_line if same_loss else loss_line
        self._lines = line, loss_line
        self._repetition = Repetition(
            {one: record for one, record in records.items() if step is not None and one > step and record.line == line}
        )
        signed, signed_at = read_sign(self._storage, self._worker.rank)
        done = records if step is None else self._repetition.expected
        self._repetition.reached = max([*done, signed if signed_at >= saved_at else 0])
        self._repetition.is_least = self._repetition.reached not in done
        for path, obj, adapter in list_members(objects):
            if adapter.follow_batches is not None:
                self._follow(path, partial(adapter.follow_batches, obj), partial(adapter.facts_of_batches, obj))
        for follow in self._more:
            follow()

    def follow(
        self,
        name: str,
        follow: Callable[[Callable[[Any], None]], Callable[[], object] | None],
        facts: Callable[[], object],
    ) -> None:
        """Follows what gives batches besides the saved objects, from the beginning or from now on, and each time that
        this begins again.

        Args:
            name: Its name, for people.
            follow: Is passed a function to call with each batch that training takes; returns what ends that, or None
                if that is impossible, or done already.
            facts: See `BatchLog`.
        """
        self._more.append(partial(self._follow, name, follow, facts))
        if self.process:
            self._more[-1]()

    def _follow(
        self,
        name: str,
        follow: Callable[[Callable[[Any], None]], Callable[[], object] | None],
        facts: Callable[[], object],
    ) -> None:
        log = BatchLog(name, facts)
        if (undo := follow(partial(self._see, log))) is not None:
            self._undo.append(undo)
            self._logs.append(log)

    @_harmless
    def _see(self, log: BatchLog, batch: Any) -> None:
        log.add(batch)

    @_harmless
    def note_loss(self, loss: Any) -> None:
        """Notes the loss of the step in progress; the last one before the step is counted is kept."""
        if (library := backend_of(loss)) is not None:
            self._loss = library.sight.follow_number(loss)
        else:
            self._loss = float(loss) if isinstance(loss, float | Real) else None

    @_harmless
    def note_step(self, step: int) -> None:
        """Called when that many steps are complete.

        Raises:
            ResumeDiffersError: If it, or an earlier one, differs from what it repeats, and that is an error here.
        """
        if self.process != os.getpid():
            return  # A child of the run's process.
        loss, self._loss = self._loss, None
        known = (DATA if self._logs else 0) | (LOSS if loss is not None else 0)
        if not known:
            self._ring.sign(step)  # There is nothing to compare, but a restart can report how far this came.
        else:
            if self._contexts == (0, 0):
                facts = [(log.name, log.facts()) for log in self._logs]
                first = repr([self._worker.world_size, self._worker.rank, facts]).encode(errors="replace")
                second = repr(_describe_machine()).encode()
                self._contexts = xxhash.xxh32_intdigest(first), xxhash.xxh32_intdigest(first + second)
            batches, data = combine([log.take() for log in self._logs])
            here, read = (loss, None) if isinstance(loss, float) else (0.0, loss)
            record = StepRecord(step, *self._lines, *self._contexts, known, batches, data, here)
            if read is None and not self._pending:
                self._keep(record)
            else:
                self._pending.append((record, read))
        while self._pending:
            record, read = self._pending[0]
            if read is not None:
                if (found := read()) is not None:
                    record = record._replace(loss=found)
                elif len(self._pending) <= _MOST_PENDING:
                    return
                else:
                    record = record._replace(known=record.known & DATA)
            self._pending.popleft()
            self._keep(record)

    def _keep(self, record: StepRecord) -> None:
        if self._repetition.expected:
            # An error leaves the record of before, so that the next start raises it as well.
            if (found := self._repetition.compare(record)) is not None:
                self._differ(record.step, *found)
            if max(self._repetition.expected, default=0) < record.step:
                self._report()
        self._ring.write(record)

    def _differ(self, step: int, what: str, known: int, before: float, now: float) -> None:
        self._repetition = Repetition()
        loader = ", ".join(log.name for log in self._logs) if known & DATA else ""
        rank, strict = self._worker.rank, self._is_strict
        event = WitnessDiffers(step=step, what=what, loader=loader, before=before, now=now, rank=rank, is_raised=strict)
        self._emit(event)
        if strict:
            hint = "Find the cause, or pass strict_resume=False to train on nevertheless."
            raise ResumeDiffersError(str(event), step=step, what=what, hint=hint)

    def _report(self) -> None:
        repetition, self._repetition = self._repetition, Repetition()
        agreed = [(step, known) for step, known in repetition.repeated if known]
        text, left_out = "", "steps that were repeated"
        if agreed:
            both = [name for bit, name in ((DATA, "data"), (LOSS, "loss")) if all(known & bit for _, known in agreed)]
            event = WitnessAgreed(first_step=agreed[0][0], last_step=agreed[-1][0], what=" and ".join(both) or "data")
            self._emit(event)
            text, left_out = str(event), "; losses"
        if repetition.why and repetition.repeated:
            text += f"{left_out} are not compared: {repetition.why}"
        if text:
            self._say(text)

    def end(self) -> None:
        """Ends it; may be repeated."""
        if self.process == os.getpid():
            with suppress(Exception):
                self._report()
        self.process = 0
        self._pending.clear()
        self._logs.clear()
        while self._undo:
            self._undo.pop()()
        self._ring.close()


def _describe_machine() -> list[object]:
    """Returns what may change the last bits of a result: the software, the processor, the device, and the threads."""
    about: list[object] = [sys.version, len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")]
    about += [getattr(sys.modules.get(library), "__version__", "") for library in _LIBRARIES]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        about += [line for line in lines if line.startswith(("model name", "flags"))]
    torch: Any = sys.modules.get("torch")
    with suppress(Exception):
        about += [torch.get_num_threads(), torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""]
    return about
