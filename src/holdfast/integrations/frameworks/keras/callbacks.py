"""`BackupAndRestore` and `Resumable`: the callbacks to pass to `fit`."""

from __future__ import annotations

import inspect
import os
import sys
from functools import partial
from typing import Any, Literal

import keras

from holdfast.catalog import StoredRun
from holdfast.catalog.deletion import clear_run
from holdfast.checkpoint import Checkpoint
from holdfast.errors import UsageError
from holdfast.integrations.frameworks.keras.fit import OWN_NAMES, FitRun, FitSaves, end_left_fits, find_fit
from holdfast.numbers import check_whole
from holdfast.options import SaveOptions, check_kept_objects, check_names, check_switches
from holdfast.policies import Auto, Latest, RetentionPolicy, SavePolicy
from holdfast.preemption.config import TerminationConfig, make_termination
from holdfast.storage import Storage, open_storage
from holdfast.training.run import Run, resumable

_OPTIONS = {
    name: one.default for name, one in inspect.signature(resumable).parameters.items() if one.kind is one.KEYWORD_ONLY
}


class Resumable(keras.callbacks.Callback):
    """A callback that makes `fit` continue where the last process stopped, even in the middle of an epoch.

    Weights, the optimizer's state, metrics, seed generators, the random generators of the process, the position in the
    data, and the state of all other callbacks are saved together in the background, and restored when `fit` begins. A
    resumed training is bit for bit the same as an uninterrupted one. A step is one call of the train function
    (`steps_per_execution` batches).

    Example:
        ```python
        model.fit(x, y, epochs=90, callbacks=[hf.keras.Resumable("runs/a", save_every=hf.Steps(500))])
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        *,
        save_every: SavePolicy | Literal["epoch"] | None = None,
        keep: RetentionPolicy | None = None,
        preemption: Literal["auto", "off"] | TerminationConfig = "auto",
        **options: Any,
    ) -> None:
        """Stores the settings; the directory is read when `fit` begins.

        Args:
            directory: The run's directory, a URL, or an open storage, used by this `fit` only.
            save_every: When to save: a policy, "epoch" for the end of each epoch, or None for `Auto()`.
            keep: Which checkpoints to keep; None for `Latest(3)`.
            preemption: How to notice a preemption, and how to exit, as in `resumable`.
            **options: Other options of `resumable`, such as `failures_allowed`, `incremental` or `quiet`. Any other
                name is a further object to save.

        Raises:
            UsageError: If an argument is wrong, or the backend is not torch, JAX or TensorFlow. Also a `ValueError`.
        """
        super().__init__()
        backend = keras.backend.backend()
        if backend not in ("torch", "jax", "tensorflow"):
            raise UsageError(
                f"Keras uses the {backend} backend, which holdfast does not know",
                hint="Set KERAS_BACKEND to torch, jax or tensorflow, or use keras.callbacks.BackupAndRestore.",
            )
        if not directory:
            raise UsageError("the directory is empty", hint="Pass the path of the run's directory.")
        saves = FitSaves(at_epochs=True) if save_every == "epoch" else save_every
        self._directory, self._saves = directory, saves
        others = {name: value for name, value in options.items() if name not in _OPTIONS}
        self._options = {
            **{name: value for name, value in options.items() if name in _OPTIONS},
            "save_every": saves,
            "keep": keep,
            "preemption": preemption,
        }
        taken = sorted({*OWN_NAMES} & others.keys())
        if taken:
            raise UsageError(
                f"an object named {taken[0]} is already saved by Resumable", hint="Give the object another name."
            )
        check_names(others, self._options)
        check_kept_objects(others)
        make_termination(preemption, others)
        SaveOptions.pick({**_OPTIONS, **self._options}, save_every=Auto(), keep=Latest(3))
        self._others = others
        self._at_end: Any = None

    def set_model(self, model: Any) -> None:
        """Called by Keras with the model, before the first callback begins."""
        super().set_model(model)
        own = sys._getframe(1).f_locals.get("self")
        if isinstance(own, keras.callbacks.CallbackList):
            self._keep_logs(own)

    def on_train_begin(self, logs: Any = None) -> None:
        """Moves to the last place among the callbacks, and restores there once all others have begun."""
        end_left_fits()
        callbacks, iterator = find_fit(self._model)
        if sum(isinstance(one, Resumable) for one in callbacks.callbacks) > 1:
            raise UsageError(
                "a fit takes one Resumable or BackupAndRestore",
                hint="Remove the others: each would resume the same fit.",
            )
        _check_alone(self._model)
        fit = FitRun(callbacks, iterator, self._make_run, self._saves, self._others, self._at_end)
        fit.set_model(self._model)
        fit.set_params(self.params)
        callbacks.callbacks.append(fit)

    def _make_run(self, checkpoint: Checkpoint) -> Run:
        return resumable(self._directory, checkpoint, **self._options)

    def _keep_logs(self, callbacks: Any) -> None:
        """Keeps a log that would be started over, if training resumes."""
        loggers = [one for one in callbacks.callbacks if isinstance(one, keras.callbacks.CSVLogger) and not one.append]
        if loggers and not self._options.get("begin_anew") and StoredRun(open_storage(self._directory)).look().living:
            for logger in loggers:
                logger.append = True


class BackupAndRestore(Resumable):
    """Replaces Keras' callback of that name, with the same arguments: backs up during `fit`, restores at the next.

    Unlike Keras' own, a backup is never incomplete, a resumed epoch continues with the batch after the last backup and
    in the same order, and EarlyStopping, ReduceLROnPlateau, random generators and the history continue as well.

    Example:
        ```python
        model.fit(x, y, epochs=90, callbacks=[hf.keras.BackupAndRestore("runs/backup", save_freq=500)])
        ```
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch", False] | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
    ) -> None:
        """Stores the settings; the directory is read when `fit` begins.

        A backup that fails (on a full disk, for example) logs a warning, and the previous backup stays.

        Args:
            backup_dir: A directory for the backups of this `fit`. Other files in it stay.
            save_freq: "epoch" to back up at the end of each epoch, a number to back up after that many batches, or
                False to back up on preemption only.
            double_checkpoint: True to keep two backups: a second one in case the newest is damaged.
            delete_checkpoint: True to delete the backups when `fit` has ended.
            save_before_preemption: True to back up when the job is asked to stop (SIGTERM, for example), and exit with
                code 42. If False, such a signal ends the process as usual.

        Raises:
            UsageError: If an argument is wrong, or the backend is not torch, JAX or TensorFlow. Also a `ValueError`.
        """
        if not backup_dir:
            raise UsageError("Empty `backup_dir` argument passed")
        check_switches(
            double_checkpoint=double_checkpoint,
            delete_checkpoint=delete_checkpoint,
            save_before_preemption=save_before_preemption,
        )
        batches = 0
        if save_freq is False:
            if not save_before_preemption:
                raise UsageError(
                    "nothing would be backed up: both save_freq and save_before_preemption are False",
                    hint='Pass save_freq="epoch", a number of batches, or save_before_preemption=True.',
                )
        elif save_freq != "epoch":
            batches = check_whole("save_freq", save_freq, 1, hint='"epoch" and False are also allowed.')
        super().__init__(
            backup_dir,
            save_every=FitSaves(batches=batches, at_epochs=save_freq == "epoch"),
            keep=Latest(2 if double_checkpoint else 1),
            preemption="auto" if save_before_preemption else "off",
            failures_allowed=sys.maxsize,
        )
        self.backup_dir, self.save_freq = backup_dir, save_freq
        self.double_checkpoint, self.delete_checkpoint = double_checkpoint, delete_checkpoint
        self._at_end = partial(_end, backup_dir, delete_checkpoint)


def _end(directory: str | os.PathLike[str], deletes: bool) -> None:
    if not deletes:
        return
    storage = open_storage(directory)
    clearing = clear_run(StoredRun(storage), StoredRun(storage).look().generation)
    for problem in clearing.problems:
        raise problem


def _check_alone(model: Any) -> None:
    """Refuses jobs of several processes, and TensorFlow's strategies for several devices.

    Raises:
        UsageError: If this is one.
    """
    if keras.backend.backend() == "tensorflow" and model.distribute_strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"{type(model.distribute_strategy).__name__} trains this model on several devices; with TensorFlow, its "
            "position in the data can be restored on one device only",
            hint="Train without a strategy, or use keras.callbacks.BackupAndRestore.",
        )
    if getattr(keras.distribution.distribution(), "_is_multi_process", False):
        raise UsageError(
            "several processes train this model together; their position in the data cannot be restored",
            hint="Train in one process; with JAX it may use several devices.",
        )
