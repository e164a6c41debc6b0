"""One `fit` in a run: restored after all callbacks have begun, counted after each step, and ended with an exit code."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from numbers import Real
from types import FrameType
from typing import Any, Final

import keras
from keras.src.trainers.epoch_iterator import EpochIterator
from msgspec.structs import asdict

from holdfast.checkpoint import Checkpoint
from holdfast.errors import SaveFailedError, StorageError, UsageError
from holdfast.integrations.frameworks.keras.data import Feed, PlaceInData, make_step
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
from holdfast.policies import SavePolicy
from holdfast.policies.saving import SaveDecision, SaveMoment
from holdfast.process.terminal import inform
from holdfast.state.rng import RNG
from holdfast.training.run import Run

_UNSET: Final = object()

OWN_NAMES: Final = ("model", "optimizer", "metrics", "buffers", "fit", "rng")


class FitSaves(SavePolicy):
    """Saves at the end of each epoch, or when that many batches were trained since the previous save.

    Attributes:
        batches: After how many batches; 0 for never within an epoch.
        at_epochs: True to save at the end of each epoch.
    """

    # Workers find the same by themselves.
    by_step = True

    def __init__(self, *, batches: int = 0, at_epochs: bool = False) -> None:
        self.batches, self.at_epochs = batches, at_epochs
        self._since, self._ends_epoch = 0, False

    def note(self, batches: int, *, ends_epoch: bool) -> None:
        """Counts a step with that many batches."""
        self._since += batches
        self._ends_epoch = ends_epoch

    def decide_save(self, moment: SaveMoment) -> SaveDecision:
        """Returns whether to save at this moment, and why."""
        if self.batches and self._since >= self.batches:
            self._since = 0
            return SaveDecision(True, f"{self.batches} batches were trained")
        if self.at_epochs and self._ends_epoch:
            return SaveDecision(True, "an epoch has ended")
        return SaveDecision(False, "no epoch has ended, and too few batches were trained")

    def __repr__(self) -> str:
        return f"FitSaves(batches={self.batches}, at_epochs={self.at_epochs})"


def find_fit(model: Any) -> tuple[Any, Any]:
    """Returns the list of callbacks and the `EpochIterator` of the `fit` in progress with that model.

    Keras passes neither to a callback, so they are taken from the frame of `fit`.

    Raises:
        UsageError: If there is no such `fit`.
    """
    callbacks = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        own = frame.f_locals
        if callbacks is None and isinstance(own.get("self"), keras.callbacks.CallbackList):
            callbacks = own["self"]
        iterator = own.get("epoch_iterator")
        if callbacks is not None and isinstance(iterator, EpochIterator):
            return callbacks, iterator
        frame = frame.f_back
    raise UsageError(
        f"{type(model).__name__} is not trained by Keras' Model.fit, so its position in the data is unknown",
        hint="In your own training loop, use holdfast.resumable.",
    )


_RUNNING: Final[set[FitRun]] = set()
"""Those that have begun and were not ended."""


def end_left_fits() -> None:
    """Ends runs that an error has left open: Python may not have collected them yet."""
    iterators = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        iterators.append(frame.f_locals.get("epoch_iterator"))
        frame = frame.f_back
    for left in [one for one in _RUNNING if not any(one.iterator() is each for each in iterators if each is not None)]:
        left.abandon()


class FitRun(keras.callbacks.Callback):
    """The last callback of one `fit`; counts for a run what the others have trained."""

    def __init__(
        self,
        callbacks: Any,
        iterator: Any,
        make_run: Callable[[Checkpoint], Run],
        saves: object,
        others: dict[str, object],
        at_end: Callable[[], None] | None,
    ) -> None:
        """Prepares; `on_train_begin` begins.

        Args:
            callbacks: The list of all callbacks.
            iterator: The source of the batches.
            make_run: Creates the run that saves the objects.
            saves: The policy by which it saves.
            others: Further objects to save.
            at_end: Called when training has ended and the run is left, whether or not its last save has failed.
        """
        super().__init__()
        self._callbacks: Callable[[], Any] = weakref.ref(callbacks)
        self._make_run, self._saves = make_run, saves
        self._others, self._at_end = others, at_end
        self._feed = Feed(iterator, self)
        self.iterator: Callable[[], Any] = weakref.ref(iterator)
        self._run: Run | None = None
        self._epoch, self._per_step = 0, int(iterator.steps_per_execution)
        self._is_stopped = False
        # Whether the last step of the epoch was counted before its end: the job was asked to stop, here or earlier.
        self._is_counted = False
        # The figures of the last step, which a train_step of the user's own may name otherwise than the metrics.
        self._logs: dict[str, Any] = {}
        # What was stored of callbacks and data, and small variables: put back when the callbacks have begun the epoch.
        self._restored: dict[str, Any] | None = None
        self._copies: list[tuple[Any, Any]] = []
        self._random: dict[str, Any] | None = None
        # What an evaluation changes and what it began with.
        self._before_test: dict[str, Any] | None = None
        self._initial_epoch: Any = _UNSET
        self._end: Any = None

    # As `fit` calls it.

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores, after all other callbacks have begun."""
        model = self._model
        callbacks = self._callbacks()
        self._states = CallbackStates([one for one in callbacks.callbacks if self._is_kept(one)])
        self._optimizers = FurtherOptimizers(model)
        self._feed.source.build(model)
        run = self._make_run(self._list_objects(model))
        # Not at the end of the program: there the run itself says what becomes of a save on its way.
        self._end = weakref.finalize(self.iterator(), self.abandon)
        self._end.atexit = False
        run.__enter__()
        self._run = run
        run.manager.witness.follow("the training data", self._feed.follow_batches, self._feed.describe)
        _RUNNING.add(self)
        self._initial_epoch = model._initial_epoch
        if run.restored is not None:
            self._random = self._feed.read_random()
            self._copies = copy_small(self._list_variables(model))
            restored = self._restored or {}
            self._random["own"] = restored["own_random"]
            for kind in self._states.write(restored["callbacks"]):
                run._loop.warn(f"the checkpoint has the state of a {kind}, but this fit has no such callback")
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

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch
        self._model._initial_epoch = self._initial_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the step's metrics."""
        self._logs = dict(logs or {})
        if self._run is not None and "loss" in self._logs:
            self._run.manager.witness.note_loss(self._logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the last step of the epoch, after the other callbacks have handled its end."""
        if self._run is None:
            return
        model = self._model
        self._feed.place = self._feed.end_epoch()
        self._epoch, self._is_stopped = epoch + 1, bool(model.stop_training)
        self._before_test = None
        figures = {str(name): value for name, value in (logs or {}).items() if isinstance(value, Real)}
        is_last = self._is_stopped or epoch + 1 >= int(self.params["epochs"])
        with self._leaving():
            self._run.report(**figures)
            self._count(ends_epoch=True, is_last=is_last)
            if is_last:
                # Later actions, such as restoring the best weights, are repeated by a restart.
                self._run._loop.save_last()

    def on_test_begin(self, logs: Any = None) -> None:
        """Notes what an evaluation at the end of an epoch changes."""
        if self._run is not None and self._feed.place.is_complete:
            self._before_test = {
                "copies": copy_small(self._list_variables(self._model)),
                "callbacks": self._states.read(),
                "random": self._feed.read_random(),
            }

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Exits from within the evaluation if the job was asked to stop: a restart evaluates again."""
        before = self._before_test
        if self._run is None or before is None or not self._run.should_stop():
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
        run, self._run = self._run, None
        self._close()
        if run is None:
            return
        if self._at_end is None:
            run.__exit__(None, None, None)
            return
        # A backup that failed was a warning; what is trained is not lost for it.
        with suppress(SaveFailedError, StorageError):
            run.__exit__(None, None, None)
        self._at_end()

    def abandon(self, error: BaseException | None = None) -> None:
        """Ends the run after an error; a second call does nothing."""
        run, self._run = self._run, None
        if self._initial_epoch is not _UNSET and self._model is not None:
            self._model._initial_epoch = self._initial_epoch
        self._close()
        if run is not None:
            ended = error or RuntimeError("fit has ended with an error")
            run.__exit__(type(ended), ended, ended.__traceback__)

    # As the data's feed calls it.

    def begin_batches(self) -> None:
        """Undoes what callbacks changed when they began the epoch a second time."""
        if self._copies and self._feed.place.step:
            put_back(self._copies)
            self._put_callbacks_back()
        self._copies = []

    def take_up(self) -> None:
        """Restores the position in the data and the random generators."""
        if self._restored is not None and self._random is not None:
            self._feed.source.write(self._restored["data"])
            self._feed.write_random(self._random)
        self._restored = self._random = None

    def end_step(self, *, is_last: bool) -> None:
        """Counts a step; the last one of an epoch counts when the epoch has ended, unless the job was asked to stop."""
        remark, self._feed.source.remark = self._feed.source.remark, ""
        if remark and self._run is not None:
            self._run._loop.warn(remark)
        if self._run is not None and (self._run.should_stop() if is_last else self._feed.counts_batches):
            with self._leaving():
                self._count()

    def stand_still(self) -> Iterator[Any]:
        """Lets `fit` reach the end of an epoch that is already trained, by a step in which nothing runs."""
        model, callbacks = self._model, self._callbacks()
        if self._restored is not None:
            self._logs = dict(self._restored["logs"])
        figures = self._logs
        function = model.train_function
        is_jax = keras.backend.backend() == "jax"
        model.train_function = lambda *state: (figures, state[0]) if is_jax else figures
        callbacks.on_train_batch_begin = callbacks.on_train_batch_end = _ignore
        try:
            if self._random is not None:
                self._feed.write_random(self._random)
            self._restored = self._random = None
            yield make_step(model)
        finally:
            model.train_function = function
            del callbacks.on_train_batch_begin, callbacks.on_train_batch_end

    # What is kept.

    def _list_objects(self, model: Any) -> Checkpoint:
        optimizer = [] if model.optimizer is None else model.optimizer.variables
        objects: dict[str, object] = {
            "model": Variables(model, model.variables),
            "optimizer": Variables(model, optimizer),
            "metrics": Variables(model, model.metrics_variables),
        }
        if keras.backend.backend() == "torch" and (buffers := list_buffers(model)):
            objects["buffers"] = buffers
        objects |= {"fit": Kept(self._read, self._write), **self._others, "rng": RNG()}
        return Checkpoint(**objects)

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
        }

    def _write(self, state: dict[str, Any]) -> None:
        self._restored = state
        # Older versions have stored neither.
        self._optimizers.write(state.pop("optimizers", {}))
        write_global_seed(state.pop("seed", None))

    def _put_callbacks_back(self) -> None:
        if self._restored is not None:
            self._states.write(self._restored["callbacks"])

    def _is_kept(self, callback: Any) -> bool:
        return callback is not self and not isinstance(callback, keras.callbacks.ProgbarLogger)

    def _count(self, *, ends_epoch: bool = False, is_last: bool = False) -> None:
        if self._run is None:
            return
        callbacks = self._callbacks()
        for name in ("_flush_futures", "_clear_futures"):
            # Callbacks that say that they are safe in a thread may still be at work on the step.
            if callbacks is not None and hasattr(callbacks, name):
                getattr(callbacks, name)()
                break
        loop, was_counted = self._run._loop, self._is_counted
        self._is_counted = not ends_epoch and self._feed.place.is_complete
        if was_counted:
            if is_last or (ends_epoch and isinstance(self._saves, FitSaves) and self._saves.at_epochs):
                # In place of what was saved before the evaluation, which has none of its results.
                loop.begin_steps()
                loop.save(loop.count.done, replace=True)
            loop.pass_boundary()
            return
        if isinstance(self._saves, FitSaves):
            self._saves.note(self._per_step, ends_epoch=ends_epoch)
        self._run.finish_step()

    def _leaving(self) -> _Leaving:
        return _Leaving(self)

    def _close(self) -> None:
        _RUNNING.discard(self)
        if self._end is not None:
            self._end.detach()
        self._feed.release()
        self._before_test = self._restored = None
        self._copies = []
        callbacks = self._callbacks()
        if callbacks is not None and self in callbacks.callbacks:
            callbacks.callbacks.remove(self)


class _Leaving:
    """Ends the run with the exception that leaves the block, because `fit` tells its callbacks of no error."""

    def __init__(self, fit: FitRun) -> None:
        self._fit = fit

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fit.abandon(error)


def _ignore(*_: Any, **__: Any) -> None:
    """Calls no callback."""
