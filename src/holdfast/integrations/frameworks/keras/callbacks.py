"""`BackupAndRestore` and `Resumable`: the callbacks to pass to `fit`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import keras

from holdfast.catalog import StoredRun
from holdfast.catalog.deletion import clear_run
from holdfast.errors import UsageError
from holdfast.integrations.frameworks.fit import Directory, check_single, split_options, walk_callers
from holdfast.integrations.frameworks.keras.batch_policy import EveryBatches
from holdfast.integrations.frameworks.keras.fit import OWN_NAMES, FitRun, end_left_fits, find_fit
from holdfast.numbers import check_whole
from holdfast.options import check_switches
from holdfast.policies import Epochs, Latest, RetentionPolicy, SavePolicy
from holdfast.preemption.config import TerminationConfig
from holdfast.storage import open_storage


class Resumable(keras.callbacks.Callback):
    """A callback that makes `fit` continue where the last process stopped, even in the middle of an epoch.

    Weights, the optimizer's state, metrics, seed generators, the random generators of the process, the position in the
    data, and the state of all other callbacks are saved together in the background, and restored when `fit` begins. A
    resumed training is bit for bit the same as an uninterrupted one. A step is one call of the train function
    (`steps_per_execution` batches).

    Example:
        ```python
        model.fit(x, y, epochs=90, callbacks=[holdfast.keras.Resumable("runs/a", save_every=holdfast.Steps(500))])
        ```
    """

    def __init__(
        self,
        directory: Directory,
        *,
        save_every: SavePolicy | int | str | None = None,
        keep: RetentionPolicy | int | str | None = None,
        preemption: Literal["auto", "off"] | TerminationConfig = "auto",
        **options: Any,
    ) -> None:
        """Stores the settings; the directory is read when `fit` begins.

        Args:
            directory: The run's directory, a URL, or an open storage, used by this `fit` only.
            save_every: When to save: a policy, a number of steps such as 500, or text such as "10min" or "1 epoch";
                None for `Auto()`.
            keep: Which checkpoints to keep: a policy, or how many of the newest; None for `Latest(3)`.
            preemption: How to notice a preemption, and how to exit, as in `resumable`.
            **options: Other options of `resumable`, such as `grace`, `failures_allowed`, `incremental` or `quiet`. Any
                other name is a further object to save.

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
        given = {"save_every": save_every, "keep": keep, "preemption": preemption, **options}
        self._settings = split_options(directory, given, OWN_NAMES)
        # Called when training has ended and the run is left; None if a failure of its last save is an error.
        self._at_end: Callable[[], None] | None = None

    def set_model(self, model: Any) -> None:
        """Called by Keras with the model, before the first callback begins."""
        super().set_model(model)
        found = (variables.get("self") for variables in walk_callers())
        callbacks = next((one for one in found if isinstance(one, keras.callbacks.CallbackList)), None)
        if callbacks is not None:
            self._keep_logs(callbacks)

    def on_train_begin(self, logs: Any = None) -> None:
        """Moves to the last place among the callbacks, and restores there once all others have begun."""
        end_left_fits()
        callbacks, iterator = find_fit(self._model)
        check_single(Resumable, callbacks.callbacks, "a fit")
        _check_alone(self._model)
        fit = FitRun(callbacks, iterator, self._settings, self._at_end)
        fit.set_model(self._model)
        fit.set_params(self.params)
        callbacks.callbacks.append(fit)

    def _keep_logs(self, callbacks: Any) -> None:
        """Keeps a log that would be started over, if training resumes."""
        loggers = [one for one in callbacks.callbacks if isinstance(one, keras.callbacks.CSVLogger) and not one.append]
        directory, begins_anew = self._settings.directory, self._settings.options.get("begin_anew")
        if loggers and not begins_anew and StoredRun(open_storage(directory)).look().living:
            for logger in loggers:
                logger.append = True


class BackupAndRestore(Resumable):
    """Replaces Keras' callback of that name, with the same arguments: backs up during `fit`, restores at the next.

    Unlike Keras' own, a backup is never incomplete, a resumed epoch continues with the batch after the last backup and
    in the same order, and EarlyStopping, ReduceLROnPlateau, random generators and the history continue as well.

    Example:
        ```python
        model.fit(x, y, epochs=90, callbacks=[holdfast.keras.BackupAndRestore("runs/backup", save_freq=500)])
        ```
    """

    def __init__(
        self,
        backup_dir: Directory,
        save_freq: Literal["epoch", False] | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
    ) -> None:
        """Stores the settings; the directory is read when `fit` begins.

        A backup that fails (on a full disk, for example) logs a warning, and the previous backup stays.

        Args:
            backup_dir: A directory for the backups of this `fit`, a URL, or an open storage. Other files in it stay.
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
            save_every=Epochs() if save_freq == "epoch" else EveryBatches(batches),
            keep=Latest(2 if double_checkpoint else 1),
            preemption="auto" if save_before_preemption else "off",
            failures_allowed=sys.maxsize,
        )
        self.backup_dir, self.save_freq = backup_dir, save_freq
        self.double_checkpoint, self.delete_checkpoint = double_checkpoint, delete_checkpoint
        self._at_end = self._delete if delete_checkpoint else lambda: None

    def _delete(self) -> None:
        run = StoredRun(open_storage(self.backup_dir))
        for problem in clear_run(run, run.look().generation).problems:
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
