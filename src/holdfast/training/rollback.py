"""Going back, within the running process, to a step from before training went wrong, on all workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from holdfast.advice.watch import count_taken
from holdfast.catalog import StoredRun
from holdfast.checkpoint import objects_of
from holdfast.errors import (
    DamageError,
    HoldfastError,
    NoCheckpointError,
    NotFiniteError,
    NotFoundError,
    RolledBackError,
    UsageError,
)
from holdfast.format.names import FOLLOWED_DATA, WENT_BACK
from holdfast.policies import find_good
from holdfast.preemption.grace import StopOrder
from holdfast.state.registry import list_members
from holdfast.state.rng import RNG
from holdfast.tracebacks import print_elsewhere
from holdfast.witness.ring import remove_rings

if TYPE_CHECKING:
    from holdfast.manager import CheckpointManager
    from holdfast.restore.records import Restoration
    from holdfast.training.announcements import Announcements
    from holdfast.training.loop import TrainingLoop

Ending = TypeVar("Ending", bound=HoldfastError)

_MOST_ROLLBACKS: Final = 2
"""A third one to the same step would end as those before."""


class Rollbacks:
    """Takes a run back. It belongs to the training thread.

    Attributes:
        hold_place: Of a framework, which can go on in a new process only: notes the place in its data; what it returns
            has that place saved, with all else as it was restored. None for a loop of the program's own.
    """

    def __init__(self, manager: CheckpointManager, loop: TrainingLoop, announcements: Announcements) -> None:
        self._manager, self._loop, self._announcements = manager, loop, announcements
        self.hold_place: Callable[[], Callable[[], object]] | None = None

    def check_data(self, skipped_batches: int | None = None) -> None:
        """Raises `UsageError` if the place in the data cannot be moved: the program has an iterator of its own."""
        if self.hold_place is not None:
            if skipped_batches is not None:
                raise UsageError(
                    f"skip_batches={skipped_batches} needs a loop of your own: a framework's data goes on where it is",
                    hint="Leave out skip_batches: what was drawn since the step is left out.",
                )
            return
        objects, data = self._manager.checkpoint.objects, self._loop.taken.data
        foreign = [
            path
            for path, obj, adapter in list_members(objects)
            if adapter.gives_batches(obj, path) and adapter.find_sampler(obj) is None
        ]
        if foreign or not (data.has_loaders or count_taken(objects)):
            what = f"the iterator of {foreign[0]} is" if foreign else "its batches come from an iterator that is"
            raise UsageError(
                f"training cannot go back: {what} the program's own",
                hint="Take batches from run.batches(loader), or pass a ResumableDataLoader to resumable.",
            )
        if data.has_lead:
            raise UsageError(
                "training cannot go back: the batch of the next step was taken before that step begins",
                hint="Take the batch inside the step: for step, batch in zip(run.steps(n), run.batches(loader)).",
            )

    def make_error(self, cause: str, step: int) -> NotFiniteError:
        """**Blocks.** Returns the error that ends training, on all workers; on one of a machine it is printed whole."""
        good, place = self._find_newest_good(), self._announcements.place
        hint = "No checkpoint is finite: find the cause, and start over."
        if good is not None:
            hint = f"Step {good} is the newest good one: find the cause, then `holdfast rollback {place}@{good}`."
        return self._print_once(NotFiniteError(cause, step=step, hint=hint))

    def make_error_together(self, cause: str, step: int) -> NotFiniteError:
        """**Collective.** **Blocks.** The same, once all workers are here: no one ends because another one has."""
        self._await_others()
        return self.make_error(cause, step)

    def _await_others(self) -> None:
        if self._manager.participant is not None:
            self._manager.participant.peers.gather_decide_broadcast(b"", lambda _: b"", "the end of training")

    def _print_once(self, error: Ending) -> Ending:
        if self._manager.participant is not None:
            cluster = self._manager.participant.peers.cluster
            if cluster.rank and cluster.node_of(0) == cluster.node:
                print_elsewhere(error, "rank 0")
        return error

    def go_back(self, order: StopOrder, step: int) -> Restoration:
        """**Collective.** **Blocks.** Restores the step of an order, and commits the place in the data that follows.

        A kill before that commit leaves the run as it was; one after it, what training goes on from.

        Raises:
            NotFiniteError: If no checkpoint is finite, or this one was gone back to twice.
            NoCheckpointError: If there is no such step.
            UsageError: If the place in the data cannot be moved.
            RolledBackError: In a framework, when all is done: a new process goes on.
        """
        manager, loop, data = self._manager, self._loop, self._loop.taken.data
        manager.lineage.settle()
        self.check_data()
        target, before = self._choose(order)
        if target is None:
            raise self.make_error_together(f"{order.cause}, and there is no finite checkpoint to go back to", step)
        if before >= _MOST_ROLLBACKS:
            text = f"{order.cause}; training has gone back to step {target} twice, and it came to this again"
            raise self.make_error_together(text, target)
        skipped, kept = self._count_skipped(target, order.skipped_batches), self._note_places()
        # Of a framework the random generators stay, too: the order of its next epoch is drawn from them.
        random, hold = RNG().state_dict(), None if self.hold_place is None else self.hold_place()
        find_steps, manager.lineage.find_steps = manager.lineage.find_steps, None
        try:
            with data.returning():
                restoration = manager.restore(target)
                for path, obj, adapter in list_members(manager.checkpoint.objects):
                    if (sampler := adapter.find_sampler(obj)) is not None and path in kept:
                        if skipped is None:
                            sampler.load_state_dict(kept[path])
                        sampler.skip(0 if skipped is None else skipped[path])
                batches = 0 if skipped is None else skipped.get(FOLLOWED_DATA, 0)
                lacking = data.go_back(kept[FOLLOWED_DATA] if skipped is None else None, batches)
        finally:
            manager.lineage.find_steps = find_steps
        if hold is not None:
            hold()
            RNG().load_state_dict(random)
        assert restoration is not None, "it was chosen"
        loop.rewind(target)
        manager.witness.end()
        remove_rings(manager.storage)  # The steps that follow are others.
        notes = {**restoration.manifest.metadata, WENT_BACK: before + 1}
        loop.save(target, metadata=notes, replace=True).wait_committed()
        left_out = "what was drawn since" if skipped is None else _batches_text(max(skipped.values()) - lacking)
        left_out += ", at the end of the last epoch" if lacking else ""
        way = f"went back from step {step} to step {target}, without {left_out}"
        if hold is not None:
            self._await_others()
            hint = f"Start the program again, as `holdfast run` does by itself: it goes on from step {target}."
            text = f"{order.cause}; {self._announcements.place} {way}"
            raise self._print_once(RolledBackError(text, step=target, hint=hint))
        self._announcements.say(f"{self._announcements.place} {way}: {order.cause}")
        return restoration

    def _choose(self, order: StopOrder) -> tuple[int | None, int]:
        """**Collective.** Returns the step to go back to, and how often that was done before: the leader looks."""
        participant, found = self._manager.participant, (order.step, 0)
        if participant is None or participant.peers.is_leader:
            target = self._find_newest_good() if order.step is None else order.step
            found = target, 0 if target is None else self._count_before(target)
        if participant is not None:
            own = msgspec.json.encode(found)
            answer = participant.peers.gather_decide_broadcast(own, lambda records: records[0], "the rollback")
            found = msgspec.json.decode(answer, type=tuple[int | None, int])
        return found

    def _count_before(self, target: int) -> int:
        """Returns how often training has gone back to that step, in this process and those before."""
        run, count = StoredRun(self._manager.storage), 0
        with suppress(NoCheckpointError, NotFoundError, DamageError):  # The restore says so, on all workers.
            name = run.look().find(target, self._announcements.place)
            count = run.step(name).manifest().metadata.get(WENT_BACK, 0)
        return count if isinstance(count, int) else 0

    def _find_newest_good(self) -> int | None:
        run = StoredRun(self._manager.storage)
        good = find_good(self._manager.options.keep, run.history.candidates(run.look().living))
        return good[-1].step if good else None

    def _note_places(self) -> dict[str, Any]:
        """Returns the places in the data, by path."""
        samplers = {
            path: sampler.look().state_dict()
            for path, obj, adapter in list_members(self._manager.checkpoint.objects)
            if (sampler := adapter.find_sampler(obj)) is not None
        }
        return {**samplers, FOLLOWED_DATA: self._loop.taken.data.state_dict()}

    def _count_skipped(self, target: int, given: int | None) -> dict[str, int] | None:
        """Returns how many batches to leave out, by the path of what gives them.

        None to go on at the present place instead: an earlier process has saved the step, or there are several loaders.
        """
        if self.hold_place is not None:
            return None
        now = count_taken(objects_of(self._manager.checkpoint).all())
        then = self._loop.count.drawn.get(target)
        if given is not None:
            return dict.fromkeys(now, given)
        if then is None or self._loop.taken.data.count_trained() > 1:
            return None
        return {path: number - then.get(path, 0) for path, number in now.items()}


def _batches_text(number: int) -> str:
    return "leaving out a batch" if not number else "1 batch" if number == 1 else f"{number} batches"
