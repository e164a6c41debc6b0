"""How many steps a handler has run, and which of them is saved: one count for all handlers of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from holdfast.checkpoint import Checkpoint, backup_url, own_objects
from holdfast.errors import UsageError
from holdfast.format.names import RUN_CALLS
from holdfast.policies import SavePolicy
from holdfast.preemption.final_save import Saves
from holdfast.preemption.progress import LastSave
from holdfast.restore.records import Restoration
from holdfast.save.handle import SaveHandle
from holdfast.state.adapters import Adapter
from holdfast.state.capture import capture_objects
from holdfast.state.oversights import count_taken
from holdfast.state.registry import list_members
from holdfast.state.rng import RNG
from holdfast.tracebacks import short_traceback


class Manager(Saves, Protocol):
    """What the handler asks of a manager: `CheckpointManager` has it."""

    checkpoint: Checkpoint
    begin_anew: bool
    restored: Restoration | None
    newest_asked: int
    closing: list[Callable[[], object]]
    save_every: SavePolicy | None
    check_ready: Callable[[], None]

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> SaveHandle:
        """Copies the state and returns; writing goes on in the background."""
        ...

    def save_if_due(self, step: int) -> SaveHandle | None:
        """Saves if the manager's policy says so."""
        ...

    def restore(
        self, step: int | None = None, *, only: str | None = None, strict: bool = True, keep_current: Iterable[str] = ()
    ) -> Restoration | None:
        """Gives the live objects the state of a checkpoint."""
        ...

    def steps(self) -> tuple[int, ...]:
        """The steps that are committed on the living line."""
        ...


class RunCalls:
    """How many steps were run, over all restarts; it is saved with everything else.

    Attributes:
        count: How many are complete.
        last: The step that was saved last, by whichever handler.
        mid_step: The handlers that are within a step of a loop of theirs, which does not count yet.
        in_step: Whether one of them runs a step now.
        is_loaded: Whether the last restore has found a count.
        is_torn: Whether an error has ended a handler's block: the state may be that of half a step.
    """

    def __init__(self) -> None:
        self.count = 0
        self.in_step = self.is_loaded = self.is_torn = False
        self.last = LastSave()
        self.mid_step: set[object] = set()
        self._manager: Manager | None = None
        self._restored: Restoration | None = None

    def state_dict(self) -> dict[str, int]:
        """The count."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the count of a checkpoint."""
        self.count = int(state["count"])
        self.is_loaded = True

    def join(self, manager: Manager) -> None:
        """Another handler begins to count, after it has restored what was to be restored.

        Args:
            manager: The one that saves. What another one has saved does not lie where this one's checkpoints do.
        """
        if manager is not self._manager or manager.restored is not self._restored:
            self._manager, self._restored = manager, manager.restored
            self.last.note(None if manager.restored is None else self.count, None)

    def counts_for(self, manager: Manager) -> bool:
        """Whether a handler of that manager has counted, so that what it keeps is live."""
        return manager is self._manager

    def is_safe(self, step: int, provisional: int | None = None) -> bool:
        """Whether the step is committed or on its way, or nothing was trained.

        Args:
            step: The step.
            provisional: The one that was saved in the midst of it; None if there is none.
        """
        manager = self._manager
        if manager is not None and manager.restored is not self._restored:
            # The user has gone back: what was saved under a number since then is of another line.
            self._restored = manager.restored
            self.last.note(None if manager.restored is None else manager.restored.step, None)
        return step == 0 or self.last.is_whole(step, provisional)


def restore_calls(
    manager: Manager, strict: bool, keep_current: Iterable[str] = ()
) -> tuple[RunCalls, Restoration | None]:
    """**Blocks.** Adds the count to what is kept, and restores unless what the manager keeps is live already.

    The further arguments are those of `CheckpointManager.restore`.

    Returns:
        The count, and what was restored; None if nothing was.

    Raises:
        MismatchError: If checkpoint and objects differ.
        NoWholeCheckpointError: If checkpoints are there but none is whole.
        UsageError: If a `WorkerTrainingState` has restored the objects already.
        StorageError: If the place fails.
    """
    own, earlier = own_objects(manager.checkpoint), manager.restored
    known = own.get(RUN_CALLS)
    if known is not None and not known.is_torn and (earlier is not None or known.counts_for(manager)):
        # Another handler of the same checkpoint has seen to it.
        return known, earlier
    calls = own.setdefault(RUN_CALLS, RunCalls())
    calls.is_loaded = False
    if not calls.is_torn and (earlier is not None or manager.newest_asked >= 0):
        # What is live was trained or restored without a handler.
        step = manager.newest_asked
        if earlier is not None and step <= earlier.step:
            step = earlier.step
            manager.restore(step, only=RUN_CALLS, strict=False)
        if not calls.is_loaded:
            calls.count = calls.count or step
        return calls, earlier
    if manager.begin_anew:
        return calls, None
    if url := backup_url(manager.checkpoint):
        raise UsageError(
            f"the WorkerTrainingState of {url} has restored these objects already, and the handler would restore "
            f"another state over that, the newest step of {manager.url}",
            hint="Make the PreemptionCheckpointHandler before you call restore() of the WorkerTrainingState.",
        )
    restoration = manager.restore(strict=strict, keep_current=keep_current)
    if restoration is not None and not calls.is_loaded:
        # The run was begun without a handler: its steps are what was counted.
        calls.count = restoration.step
    return calls, restoration


class StepNumbers(Iterator[int]):
    """The numbers of the steps that are still to be done, for one loop; `len` is how many are left."""

    def __init__(
        self, name: str, checkpoint: Checkpoint, begin: Callable[[StepNumbers], int], count_left: Callable[[], int]
    ) -> None:
        """Makes the steps of a loop that begins at once: between this and the first step, no batch is taken.

        Args:
            name: How the program calls them, as "run.steps(n)".
            checkpoint: What is kept, the loaders among it.
            begin: Ends the step before, begins the next one and returns its number; raises StopIteration at the end.
            count_left: Returns how many are left.
        """
        self._name, self._begin, self._count_left = name, begin, count_left
        self._checkpoint = checkpoint
        self._taken: dict[str, int] | None = count_taken(checkpoint.objects)

    @short_traceback
    def __next__(self) -> int:
        if self._taken is not None:
            self._check_begin(self._taken)
            self._taken = None
        return self._begin(self)

    def __repr__(self) -> str:
        return f"<{self._name}: {len(self)} left>"

    def __len__(self) -> int:
        """How many steps are left."""
        return self._count_left()

    def _check_begin(self, taken: dict[str, int]) -> None:
        for path, number in count_taken(self._checkpoint.objects).items():
            if number > taken.get(path, number):
                raise UsageError(
                    f"a batch was taken from {path} before the step that trains it began, as zip(loader, {self._name}) "
                    "does: the position that is saved would be one batch ahead, and a restart would leave it out",
                    hint=f"Write batches = loader.stream(), then for step in {self._name}: batch = next(batches).",
                )


def check_loaders(checkpoint: Checkpoint) -> None:
    """Makes sure, before the first step, that what gives batches has a place in the data that can be kept.

    Raises:
        UnsupportedValueError: If it has not, as what accelerate makes of a loader.
    """
    for path, obj, adapter in list_members(checkpoint.objects):
        adapter.gives_batches(obj, path)


class PlaceWatch:
    """Finds loops that take batches, or draw random numbers, between the steps of `run`, where saves cannot see it.

    A save of a step is made before the next one begins, so what the arguments of that one have taken by then counts as
    trained. holdfast's own loaders know which of their batches were taken since a step ended; others do not. Each of
    those is looked at until it moves for the first time.
    """

    def __init__(self, checkpoint: Checkpoint, warn: Callable[[str], object]) -> None:
        """Begins when the first step has ended."""
        members = list_members(checkpoint.objects)
        self._warn = warn
        self._loaders = {
            path: (obj, adapter)
            for path, obj, adapter in members
            if type(adapter).gives_batches is not Adapter.gives_batches
        }
        self._generators = [path for path, obj, _ in members if isinstance(obj, RNG)]
        self._drawn = self._read_generators()
        self._is_first = True
        self._ended = self._read_places()
        self._begun: dict[str, Any] = {}

    def begin_step(self) -> None:
        """Looks at what has moved since the last step ended.

        Raises:
            UsageError: If a loader has, between the first two steps; later that is a warning.
        """
        self._begun = self._read_places()
        for path, place in self._ended.items():
            if self._begun.get(path, place) != place:
                self._say_moved(path)
        if self._is_first and self._read_generators() != self._drawn:
            self._warn(
                f"random numbers were drawn between two steps of handler.run, and {self._generators[0]} keeps their "
                "generators. If the arguments of run draw them, as in handler.run(train_step, get_batch()), a restart "
                "leaves out a batch: draw them within the step, handler.run(lambda: train_step(get_batch()))"
            )
        self._is_first = False

    def end_step(self) -> None:
        """Notes where the loaders are; those that have moved within the step are not looked at any more."""
        places = self._read_places()
        for path, place in places.items():
            if self._begun.get(path) != place:
                del self._loaders[path]
        self._ended = {path: place for path, place in places.items() if path in self._loaders}

    def _say_moved(self, path: str) -> None:
        text = (
            f"{path} gave a batch between two steps of handler.run: a save of the step before would be one batch ahead "
            "of it, and a restart would leave that batch out"
        )
        hint = (
            "Take the batch in the step, handler.run(lambda: train_step(next(batches))), or call "
            "handler.save_checkpoint_if_preempted() at the end of each step in place of handler.run. "
            "From hf.ResumableDataLoader a batch may be taken anywhere."
        )
        if self._is_first:
            raise UsageError(text, hint=hint)
        # It may as well be a loader for evaluation: that does not end a job which has trained for long.
        self._warn(f"{text}. {hint}")
        del self._loaders[path]

    def _read_places(self) -> dict[str, Any]:
        return {
            path: capture_objects({"loader": obj}).objects
            for path, (obj, adapter) in self._loaders.items()
            if adapter.gives_batches(obj, path)
        }

    def _read_generators(self) -> Any:
        return capture_objects({"rng": RNG()}).objects if self._generators else None
