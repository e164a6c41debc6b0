"""One `fit` in a run: restored after all callbacks have begun, counted after each step, and ended with an exit code."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any, Final

import keras
import msgspec
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from msgspec.structs import asdict, replace

from holdfast.errors import SaveFailedError, StorageError, UsageError
from holdfast.integrations.frameworks.fit import Fit, Replaced, Settings, walk_callers
from holdfast.integrations.frameworks.keras.batch_policy import EveryBatches
from holdfast.integrations.frameworks.keras.data import Arrays, DataSource, Loader, PyDatasetSource, read_again
from holdfast.integrations.frameworks.keras.state import (
    CallbackStates,
    FurtherOptimizers,
    Kept,
    Variables,
    copy_small,
    list_buffers,
    put_back,
    read_global_seed,
    write_global_seed,
)
from holdfast.policies import counts_epochs
from holdfast.process.pulse import PULSE
from holdfast.process.terminal import inform
from holdfast.state.data.replay import Watched, describe_change
from holdfast.state.rng import RNG
from holdfast.supervise.board import BETWEEN, EVALUATE

_NOTHING: Final = object()
_UNSET: Final = object()

_OF_DATA: Final = ("epoch", "place", "is_stopped", "data", "own_random")
"""The part of the state of a fit that says how far training is in the data."""

OWN_NAMES: Final = ("model", "optimizer", "metrics", "buffers", "fit", "rng")


def find_fit(model: Any) -> tuple[Any, Any]:
    """Returns the list of callbacks and the `EpochIterator` of the `fit` in progress with that model.

    Keras passes neither to a callback, so they are taken from the frame of `fit`.

    Raises:
        UsageError: If there is no such `fit`.
    """
    callbacks = None
    for own in walk_callers():
        if callbacks is None and isinstance(own.get("self"), keras.callbacks.CallbackList):
            callbacks = own["self"]
        iterator = own.get("epoch_iterator")
        if callbacks is not None and isinstance(iterator, EpochIterator):
            return callbacks, iterator
    raise UsageError(
        f"{type(model).__name__} is not trained by Keras' Model.fit, so its position in the data is unknown",
        hint="In your own training loop, use holdfast.resumable.",
    )


_RUNNING: Final[set[FitRun]] = set()
"""Those that have begun and were not ended."""


def end_left_fits() -> None:
    """Ends runs that an error has left open: Python may not have collected them yet."""
    iterators = [own.get("epoch_iterator") for own in walk_callers()]
    for left in [one for one in _RUNNING if not any(one.iterator() is each for each in iterators if each is not None)]:
        left.abandon()


class PlaceInData(msgspec.Struct):
    """The position of training in an epoch.

    Attributes:
        step: How many batches of the epoch are trained.
        is_complete: True if these are all, and the epoch has not ended yet.
        opening: The random generators' state when the current pass through the data began; None if none has.
        drawing: Their state when its first batch was requested, if that was not at once; the order is drawn then.
        is_renewed: True if loader workers existed already.
        taken: How many batches of the pass were taken.
        sizes: How many samples a batch has, and how many batches an epoch, as far as these are known.
    """

    step: int = 0
    is_complete: bool = False
    opening: Any = None
    drawing: Any = None
    is_renewed: bool = False
    taken: int = 0
    sizes: tuple[int | None, int | None] | None = None


class Feed(Watched):
    """The batches of one `fit`, and its position in them.

    `fit` creates an `EpochIterator` before the first callback is called, and iterates it once per epoch. The order of
    an epoch is drawn when its iterator is created, from the generators that the process shares. So their state at that
    time and the number of batches since then are the position. To resume, the generators are set back, and the data
    comes back to the position in its own way (`DataSource`). A weak reference leads to the `EpochIterator`.

    Attributes:
        place: The position of training.
        source: The data.
    """

    def __init__(self, iterator: Any, fit: FitRun) -> None:
        self.place = PlaceInData()
        self.source = _find_source(iterator)
        self._iterator: Any = weakref.proxy(iterator)
        self._class = type(iterator)
        self._fit: Any = weakref.proxy(fit)
        # Where to take up the data, until that is done.
        self._resumed: PlaceInData | None = None
        self._pending: PlaceInData | None = None
        self._opening: Any = None
        self._has_looked = False
        iterator._enumerate_iterator = self._enumerate
        iterator._get_iterator = self._get_iterator

    def follow_batches(self, see: Callable[[Any], None]) -> Callable[[], object] | None:
        """See `Watched`; not with TensorFlow, which takes the batches within its graph."""
        return None if keras.backend.backend() == "tensorflow" else super().follow_batches(see)

    def counts_batches(self) -> bool:
        """Returns True if it is known which batch is the last one of an epoch."""
        return bool(self._iterator.steps_per_epoch or self._iterator.data_adapter.num_batches)

    def describe(self) -> object:
        """Returns what decides which batches come, as far as the program announces it."""
        iterator, adapter = self._iterator, self._iterator.data_adapter
        return iterator.steps_per_execution, iterator.steps_per_epoch, adapter.batch_size, adapter.num_batches

    def resume(self, place: PlaceInData) -> None:
        """Resumes the data at that position, in the epoch that begins next."""
        is_within = place.step and not place.is_complete
        if is_within and place.sizes not in (None, self.sizes) and not self._is_kept_over_epochs():
            place = self._convert(place)
        self.place = place
        self._resumed = place
        self._pending = place if place.opening is not None and (is_within or self._is_kept_over_epochs()) else None

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """How many samples a batch has, and how many batches an epoch, as far as these are known."""
        adapter = self._iterator.data_adapter
        return adapter.batch_size, adapter.num_batches

    def _convert(self, place: PlaceInData) -> PlaceInData:
        """Returns a position within an epoch in the present batches."""
        (former, before), (batch, batches) = place.sizes or self.sizes, self.sizes
        samples = place.taken * (former or 1)
        taken = min(samples // batch if former and batch else place.taken, (batches or sys.maxsize) - 1)
        taken -= taken % self._iterator.steps_per_execution
        is_same_data = former and batch and before == -(-(batches or 0) * batch // former)
        changes = {"batch size": (batch, former), "batches of an epoch": (batches, before)}
        self.source.remark = describe_change(changes, is_exact=bool(is_same_data and taken * (batch or 0) == samples))
        return replace(place, step=taken, taken=taken)

    def read_random(self) -> dict[str, Any]:
        """Returns the state of the generators that the process shares, and of the data's own."""
        return {"shared": RNG().state_dict(), "own": [one.get_state() for one in self.source.generators()]}

    def write_random(self, state: dict[str, Any]) -> None:
        """Restores them."""
        RNG().load_state_dict(state["shared"])
        for generator, value in zip(self.source.generators(), state["own"], strict=False):
            generator.set_state(value)

    def end_epoch(self) -> PlaceInData:
        """Makes the next epoch begin with its first batch; an iterator that is kept for it continues."""
        if self._is_kept_over_epochs():
            return replace(self.place, step=0, is_complete=False, taken=self._iterator._steps_seen)
        return PlaceInData()

    def release(self) -> None:
        """Restores the `EpochIterator` as Keras created it, if it still exists."""
        with suppress(ReferenceError, AttributeError):
            del self._iterator._enumerate_iterator, self._iterator._get_iterator

    def _is_kept_over_epochs(self) -> bool:
        return bool(self._iterator.steps_per_epoch)

    def _enumerate(self) -> Generator[Any, None, None]:
        """Replaces `EpochIterator._enumerate_iterator`: gives the remaining steps of an epoch."""
        iterator = self._iterator
        resumed, self._resumed = self._resumed, None
        self._fit.begin_batches()
        if resumed is not None and resumed.is_complete:
            yield from self._fit.stand_still()
            return
        if not self._is_kept_over_epochs():
            if self._pending is not None:
                self.write_random(self._pending.opening)
            self._opening = self.read_random()
        if self._pending is not None:
            self.source.prepare(self._pending.taken)
        kept = self._pending if self._is_kept_over_epochs() else None
        steps = self._class._enumerate_iterator(iterator)
        step = 0 if resumed is None else resumed.step
        item = next(steps, _NOTHING)
        if kept is not None:
            iterator._steps_seen += kept.taken - step
        for _ in range(step // iterator.steps_per_execution):
            item = next(steps, _NOTHING)
        if resumed is not None and resumed.step:
            self._fit.take_up()
        while item is not _NOTHING:
            taken = iterator._steps_seen
            if self._is_kept_over_epochs() and taken == iterator.steps_per_execution:
                self.place.drawing = self.read_random()
            place = replace(self.place, step=step + iterator.steps_per_execution, is_complete=False, taken=taken)
            yield item
            if not self._has_looked:
                self._has_looked = True
                self.source.look()
            step = place.step
            item = next(steps, _NOTHING)
            if item is not _NOTHING:
                self.place = place
                self._fit.end_step(is_last=False)
        self.place = replace(self.place, step=step, is_complete=True, taken=iterator._steps_seen)
        self._fit.end_step(is_last=True)

    def _get_iterator(self) -> Any:
        """Replaces `EpochIterator._get_iterator`."""
        return self._open() if self.see is None else map(self._pass_on, self._open())

    def _pass_on(self, batch: Any) -> Any:
        if self.see is not None:
            self.see(batch)
        return batch

    def _open(self) -> Any:
        """Returns the batches of a pass, and notes with which random numbers it begins."""
        pending, self._pending = self._pending, None
        if pending is None:
            opening = self.read_random() if self._opening is None else self._opening
            self.place = replace(self.place, opening=opening, drawing=None, is_renewed=self.source.is_renewed())
            self._opening = None
            return self._make()
        self._opening = None
        present = self.read_random() if self._is_kept_over_epochs() else None
        if present is not None:
            self.write_random(pending.opening)
        self.source.renew(pending.is_renewed)

        def draw() -> None:  # Called once the iterator of the batches is there.
            if pending.drawing is not None:
                self.write_random(pending.drawing)

        made = self.source.take_up(self._make, pending.taken, draw)
        if present is not None:
            self.write_random(present)
        return made

    def _make(self) -> Any:
        return self.source.open(self._class._get_iterator(self._iterator))


def _find_source(iterator: Any) -> DataSource:
    adapter = iterator.data_adapter
    if keras.backend.backend() == "tensorflow":
        from holdfast.integrations.frameworks.keras.pipeline import Pipeline

        return Pipeline(iterator)
    if isinstance(adapter, ArrayDataAdapter):
        return Arrays(adapter)
    if isinstance(adapter, TorchDataLoaderAdapter):
        return Loader(adapter)
    if isinstance(adapter, PyDatasetAdapter):
        if adapter.enqueuer is not None and iterator.steps_per_epoch:
            raise UsageError(
                "the position of a PyDataset with workers cannot be saved if steps_per_epoch is given: "
                "batches are carried over from one epoch to the next, so a resumed run would train other data",
                hint="Leave out steps_per_epoch, or give the PyDataset workers=0.",
            )
        return PyDatasetSource(adapter)
    source = DataSource(adapter)
    source.remark = read_again(adapter)
    return source


class _RestoredEpoch(msgspec.Struct):
    """Restored values that are put back once the callbacks have begun the epoch.

    Attributes:
        state: What was stored of callbacks and data.
        copies: Small variables.
        random: The random generators.
        held: What is saved in place of what there is, once training has gone back: a new process goes on.
    """

    state: dict[str, Any]
    copies: list[tuple[Any, Any]] = msgspec.field(default_factory=list)
    random: dict[str, Any] | None = None
    held: dict[str, Any] = msgspec.field(default_factory=dict)


class FitRun(keras.callbacks.Callback, Fit):
    """The last callback of one `fit`; counts for a run what the others have trained."""

    def __init__(self, callbacks: Any, iterator: Any, settings: Settings, at_end: Callable[[], None] | None) -> None:
        """Prepares; `on_train_begin` begins.

        Args:
            callbacks: The list of all callbacks.
            iterator: The source of the batches.
            settings: What the user's callback was given.
            at_end: Called when training has ended and the run is left, whether or not its last save has failed; None if
                a failure of that save is an error.
        """
        keras.callbacks.Callback.__init__(self)
        Fit.__init__(self)
        self._callbacks: Callable[[], Any] = weakref.ref(callbacks)
        self._settings, self._at_end = settings, at_end
        self._feed = Feed(iterator, self)
        self.iterator: Callable[[], Any] = weakref.ref(iterator)
        self._epoch, self._is_stopped = 0, False
        # Whether the last step of the epoch was counted before its end: the job was asked to stop, here or earlier.
        self._is_counted = False
        # The figures of the last step, which a train_step of the user's own may name otherwise than the metrics.
        self._logs: dict[str, Any] = {}
        self._restored: _RestoredEpoch | None = None
        # What an evaluation changes and what it began with.
        self._before_test: dict[str, Any] | None = None
        self._initial_epoch: Any = _UNSET
        self._end: Any = None

    def hold_place(self) -> Callable[[], object]:
        """See `Fit`."""
        if hasattr(self._model, "jax_state_sync"):
            self._model.jax_state_sync()  # Else its trainer's arrays are saved, and not the restored ones.
        left = self._read()

        def hold() -> None:
            assert self._restored is not None  # The restore has called `_write`.
            self._restored.held = {**self._restored.state, **{name: left[name] for name in _OF_DATA}}

        return hold

    def count_restored_epochs(self) -> int:
        """See `Fit`."""
        return 0 if self._restored is None else int(self._restored.state.get("epoch", 0))

    # As `fit` calls it.

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores, after all other callbacks have begun."""
        model = self._model
        callbacks = self._callbacks()
        self._states = CallbackStates([one for one in callbacks.callbacks if self._is_kept(one)])
        self._optimizers = FurtherOptimizers(model)
        self._feed.source.build(model)
        # Not at the end of the program: there the run itself says what becomes of a save on its way.
        self._end = weakref.finalize(self.iterator(), self.abandon)
        self._end.atexit = False
        run = self.enter(self._settings, self._list_objects(model))
        run.manager.witness.follow("the training data", self._feed.follow_batches, self._feed.describe)
        _RUNNING.add(self)
        self._initial_epoch = model._initial_epoch
        if run.restored is not None:
            kept = self._restored or _RestoredEpoch({})
            restored, kept.random = kept.state, self._feed.read_random()
            kept.copies = copy_small(self._list_variables(model))
            kept.random["own"] = restored["own_random"]
            for kind in self._states.write(restored["callbacks"]):
                run.warn(f"the checkpoint has the state of a {kind}, but this fit has no such callback")
            sizes = restored["place"].get("sizes")
            self._feed.resume(PlaceInData(**restored["place"] | {"sizes": None if sizes is None else tuple(sizes)}))
            self._is_counted = self._feed.place.is_complete
            self._feed.source.write(restored["data"])
            self._feed.write_random({"shared": {}, "own": restored["own_random"]})
            epochs = int(self.params["epochs"])
            if restored["is_stopped"] and restored["epoch"] < epochs:
                self._is_stopped = True
                inform(f"a callback stopped training after epoch {restored['epoch']}; it stays stopped")
            model._initial_epoch = epochs if restored["is_stopped"] else restored["epoch"]
            self._epoch = restored["epoch"]
        run.manager.follow_epochs(lambda: self._epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch
        self._model._initial_epoch = self._initial_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the step's metrics."""
        self._logs = dict(logs or {})
        if self.run is not None and "loss" in self._logs:
            self.run.manager.witness.note_loss(self._logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the last step of the epoch, after the other callbacks have handled its end."""
        if self.run is None:
            return
        model = self._model
        self._feed.place = self._feed.end_epoch()
        self._epoch, self._is_stopped = epoch + 1, bool(model.stop_training)
        self._before_test = None
        figures = {str(name): value for name, value in (logs or {}).items() if isinstance(value, Real)}
        is_last = self._is_stopped or epoch + 1 >= int(self.params["epochs"])
        with self._leaving():
            self.run.report(**figures)
            self._count(ends_epoch=True, is_last=is_last)
            if is_last:
                # Later actions, such as restoring the best weights, are repeated by a restart.
                self.run.save_last()

    def on_test_begin(self, logs: Any = None) -> None:
        """Notes what an evaluation at the end of an epoch changes."""
        PULSE.enter(EVALUATE)
        if self.run is not None and self._feed.place.is_complete:
            self._before_test = {
                "copies": copy_small(self._list_variables(self._model)),
                "callbacks": self._states.read(),
                "random": self._feed.read_random(),
            }

    def on_test_end(self, logs: Any = None) -> None:
        """Notes the end of the evaluation."""
        PULSE.enter(BETWEEN)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Exits from within the evaluation if the job was asked to stop: a restart evaluates again."""
        before = self._before_test
        if self.run is None or before is None or not self.run.should_stop():
            return
        if hasattr(self._model, "jax_state_sync"):
            self._model.jax_state_sync()
        put_back(before["copies"])
        self._states.write(before["callbacks"])
        self._feed.write_random(before["random"])
        with self._leaving():
            self._count()

    def on_train_end(self, logs: Any = None) -> None:
        """Leaves the run, which waits for its saves."""
        self._model._initial_epoch = self._initial_epoch
        self._close()
        if self.run is None or self._at_end is None:
            self.leave()
            return
        # A backup that failed was a warning; what is trained is not lost for it.
        with suppress(SaveFailedError, StorageError):
            self.leave()
        self._at_end()

    def abandon(self, error: BaseException | None = None) -> None:
        """Ends the run after an error; a second call does nothing."""
        if self._initial_epoch is not _UNSET and self._model is not None:
            self._model._initial_epoch = self._initial_epoch
        self._close()
        self.leave(error or RuntimeError("fit has ended with an error"))

    # As the data's feed calls it.

    def begin_batches(self) -> None:
        """Undoes what callbacks changed when they began the epoch a second time."""
        if (restored := self._restored) is None:
            return
        if restored.copies and self._feed.place.step:
            put_back(restored.copies)
            self._states.write(restored.state["callbacks"])
        restored.copies = []

    def take_up(self) -> None:
        """Restores the position in the data and the random generators."""
        restored, self._restored = self._restored, None
        if restored is not None and restored.random is not None:
            self._feed.source.write(restored.state["data"])
            self._feed.write_random(restored.random)

    def end_step(self, *, is_last: bool) -> None:
        """Counts a step; the last one of an epoch counts when the epoch has ended, unless the job was asked to stop."""
        remark, self._feed.source.remark = self._feed.source.remark, ""
        if remark and self.run is not None:
            self.run.warn(remark)
        if self.run is not None and (self.run.should_stop() if is_last else self._feed.counts_batches()):
            with self._leaving():
                self._count()

    def stand_still(self) -> Iterator[Any]:
        """Lets `fit` reach the end of an epoch that is already trained, by a step in which nothing runs."""
        model, callbacks, replaced = self._model, self._callbacks(), Replaced()
        restored, self._restored = self._restored, None
        figures = self._logs = self._logs if restored is None else dict(restored.state["logs"])
        is_jax = keras.backend.backend() == "jax"
        replaced.value(model, "train_function", lambda *state: (figures, state[0]) if is_jax else figures)
        for name in ("on_train_batch_begin", "on_train_batch_end"):
            replaced.method(callbacks, name, lambda *_, **__: None)
        try:
            if restored is not None and restored.random is not None:
                self._feed.write_random(restored.random)
            *numbers, _ = next(EpochIterator(np.zeros((1, 1)))._enumerate_iterator())
            yield (*numbers, itertools.repeat(None))  # A step without batches.
        finally:
            replaced.undo()

    # What is kept.

    def _list_objects(self, model: Any) -> dict[str, object]:
        optimizer = [] if model.optimizer is None else model.optimizer.variables
        objects: dict[str, object] = {
            "model": Variables(model, model.variables),
            "optimizer": Variables(model, optimizer),
            "metrics": Variables(model, model.metrics_variables, is_trained=False),
        }
        if keras.backend.backend() == "torch" and (buffers := list_buffers(model)):
            objects["buffers"] = buffers
        return {**objects, "fit": Kept(self._read, self._write), **self._settings.others, "rng": RNG()}

    def _list_variables(self, model: Any) -> list[Any]:
        optimizer = [] if model.optimizer is None else list(model.optimizer.variables)
        return [*model.variables, *optimizer, *self._optimizers.list_variables(), *model.metrics_variables]

    def _read(self) -> dict[str, Any]:
        place = self._feed.place
        return {
            "epoch": self._epoch,
            "place": {**asdict(place), "sizes": self._feed.sizes},
            "is_stopped": self._is_stopped,
            "logs": {str(name): float(value) for name, value in self._logs.items() if isinstance(value, Real)},
            "callbacks": self._states.read(),
            "data": self._feed.source.read(),
            "own_random": [one.get_state() for one in self._feed.source.generators()],
            "optimizers": self._optimizers.read(),
            "seed": read_global_seed(),
            **({} if self._restored is None else self._restored.held),
        }

    def _write(self, state: dict[str, Any]) -> None:
        self._restored = _RestoredEpoch(state)
        # Older versions have stored neither.
        self._optimizers.write(state.pop("optimizers", {}))
        write_global_seed(state.pop("seed", None))

    def _is_kept(self, callback: Any) -> bool:
        return callback is not self and not isinstance(callback, keras.callbacks.ProgbarLogger)

    def _count(self, *, ends_epoch: bool = False, is_last: bool = False) -> None:
        if self.run is None:
            return
        callbacks = self._callbacks()
        for name in ("_flush_futures", "_clear_futures"):
            # Callbacks that say that they are safe in a thread may still be at work on the step.
            if callbacks is not None and hasattr(callbacks, name):
                getattr(callbacks, name)()
                break
        was_counted, saves = self._is_counted, self.run.manager.save_every
        self._is_counted = not ends_epoch and self._feed.place.is_complete
        if was_counted:
            if is_last or (ends_epoch and counts_epochs(saves)):
                # In place of what was saved before the evaluation, which has none of its results.
                self.run.save_last(again=True)
            self.run.pass_boundary()
            return
        if isinstance(saves, EveryBatches):
            saves.note(int(self.iterator().steps_per_execution))
        self.run.finish_step()

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Ends the run with the exception that leaves the block, because `fit` passes no error to its callbacks."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    def _close(self) -> None:
        _RUNNING.discard(self)
        if self._end is not None:
            self._end.detach()
        self._feed.release()
        self._before_test = self._restored = None
        callbacks = self._callbacks()
        if callbacks is not None and self in callbacks.callbacks:
            callbacks.callbacks.remove(self)
