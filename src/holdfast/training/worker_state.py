"""`WorkerTrainingState`: backups of a running training, for training loops that count epochs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

from msgspec.structs import asdict

from holdfast.advice.hyperparameters import check_kept
from holdfast.advice.watch import EpochWatch
from holdfast.catalog import StoredRun
from holdfast.checkpoint import Checkpoint, check_order, objects_of
from holdfast.cluster import Cluster
from holdfast.deadlines import DEFAULT_TIMEOUT_SECONDS, LIVENESS_SECONDS
from holdfast.errors import ClosedError, ClusterError, DeadlineError, SaveFailedError, StorageError, UsageError
from holdfast.events import Fanout, Sink, Warned
from holdfast.events.sinks import LoggingSink
from holdfast.manager import CheckpointManager
from holdfast.numbers import check_whole
from holdfast.options import SaveOptions, check_metrics, check_switches
from holdfast.policies import Latest, RetentionPolicy
from holdfast.preemption.config import TerminationConfig, make_termination
from holdfast.preemption.epoch_guard import EpochGuard
from holdfast.restore.engine import make_agreement
from holdfast.save.handle import SaveHandle
from holdfast.save.joint.delete_run import JointDelete
from holdfast.storage import Storage, open_storage
from holdfast.tracebacks import short_traceback
from holdfast.training.announcements import Announcements
from holdfast.training.backup import Backup, Backups, check_newest, make_note, read_note
from holdfast.training.loop import TrainingLoop

Mode: TypeAlias = Literal["train", "test", "predict"]

_MODES: Final = ("train", "test", "predict")


@short_traceback
class WorkerTrainingState:
    """Backs up a training after each epoch, or within one, and restores it when the program is started again.

    The epoch is saved together with the state, in one commit. Use it from one thread, the training thread; leaving a
    `with` block waits for the backup in progress. In a job of several workers, each creates one, and all call the same
    methods at the same places: together they write one backup, and the leader deletes it when all have finished.

    If the job is asked to stop while it trains (SIGTERM, for example), the backup in progress is completed and the
    process exits with code 42. Anything trained since that backup is trained again.

    Example:
        ```python
        checkpoint = holdfast.Checkpoint(model=model, optimizer=optimizer)
        with holdfast.WorkerTrainingState("runs/net/backup", checkpoint) as state:
            state.restore()
            for epoch in range(state.maybe_load_initial_epoch_from_ckpt(0, "train", epochs=20), 20):
                train_epoch(model, optimizer)
                state.back_up(epoch)
            state.delete_backup()
        ```

    Attributes:
        checkpoint: The objects that are backed up. Objects may be added to it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        checkpoint: Checkpoint,
        *,
        save_freq: Literal["epoch"] | int = "epoch",
        keep: RetentionPolicy | int | str | None = None,
        begin_anew: bool = False,
        failures_allowed: int | None = None,
        sinks: Iterable[Sink] = (),
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        threads: int = 6,
        cluster: Cluster | Literal["auto", "alone"] = "auto",
        liveness_seconds: float = LIVENESS_SECONDS,
        preemption: Literal["auto", "off"] | TerminationConfig = "auto",
        grace: float | str | None = None,
        on_resize: Literal["allow", "refuse"] = "allow",
        keep_current: str | Iterable[str] = (),
        quiet: bool = False,
    ) -> None:
        """Reads the directory; creates nothing there until the first backup.

        In a job of several workers this waits for the others.

        Args:
            directory: A directory, a URL, or an open storage that is used for backups only.
            checkpoint: The objects to back up. Include `RNG()` and the source of the batches (a `ResumableDataLoader`
                or `ResumableSampler`), so that a backup within an epoch resumes with the next batch.
            save_freq: How often `back_up_if_due` backs up: after that many batches of an epoch, or never within one.
            keep: Which backups to keep: a policy, or how many of the newest; None for `Latest(2)`: a second one in case
                the newest is damaged.
            begin_anew: True to start from the beginning even if there are backups.
            failures_allowed: How many backups in a row may fail before training ends; None for any number.
            sinks: Functions that are called with each event.
            timeout_seconds: The deadline of each wait.
            threads: The number of threads that write, and read during a restore. They mostly wait for the disk.
            cluster: The workers of the job, as in `CheckpointManager`.
            liveness_seconds: A worker that gives no sign of life for this long is taken for dead.
            preemption: How to notice a preemption, and how to exit: "auto" for signals and the sources that fit the
                machine, "off" for none, or a `TerminationConfig`. Notices are handled from the first backup or
                `maybe_load_initial_...` until the end, unless a run or a handler does so in the same thread.
            grace: How long to train on after a notice, such as 30 or "30s"; see `resumable`.
            on_resize: "refuse" to restore only backups of the same number of workers; "allow" for any number.
            keep_current: What `restore` leaves as the script set it, as in `CheckpointManager.restore`.
            quiet: True to omit the lines that say where training begins and ends; warnings and errors stay.

        Raises:
            UsageError: If an argument is wrong.
            UnsupportedValueError: If an object is a wrapper that cannot be saved, such as one of FSDP1.
            StorageError: If the directory cannot be read, or differs from that of the other workers.
            AbsentError: If other workers of the job do not join.
            ClusterError: If the job's store does not respond.
        """
        check_order("WorkerTrainingState", directory, checkpoint)
        self.checkpoint = checkpoint
        self._save_freq = (
            save_freq
            if save_freq == "epoch"
            else check_whole("save_freq", save_freq, 1, hint='"epoch" is also allowed.')
        )
        is_off = preemption == "off" and grace is None
        self._termination = None if is_off else make_termination(preemption, grace=grace)
        self._storage = open_storage(directory)
        self._options = SaveOptions.pick(locals(), keep=Latest(2), failures_allowed=sys.maxsize)
        self._emit = Fanout([LoggingSink(), *self._options.sinks])
        check_switches(quiet=quiet)
        self._keep_current = check_kept(keep_current, checkpoint.objects)
        self._together = JointDelete(cluster, liveness_seconds=liveness_seconds, timeout_seconds=timeout_seconds)
        self._loop: TrainingLoop | None = None
        self._begins_anew, self._closed = begin_anew, False
        try:
            loop = self._loop = self._make_loop(begin_anew=begin_anew)
            catalog = StoredRun(self._storage).look()
            is_empty = begin_anew or not (catalog.living or StoredRun(self._storage).find_lost(catalog))
        except BaseException as error:
            if self._loop is not None:
                if self._loop.manager.participant is not None:
                    self._loop.manager.participant.fail(error)
                self._loop.manager.close()
                self._loop.guard.close()
            self._together.close()
            raise
        self._announcements = Announcements(self._storage.url, loop.manager.worker, quiet=quiet)
        loop.count.done = 0 if begin_anew else max((name.step for name in catalog.living), default=0)
        self._backups = Backups(catalog.generation, are_unseen=not is_empty)
        self._steps_per_epoch: int | None = None
        self._watch = EpochWatch({}, self._warn)

    @property
    def saved(self) -> Backup | None:
        """The newest backup that this object restored, or made and committed; None if there is none."""
        return self._backups.newest

    def back_up(
        self, epoch: int, batch: int | None = None, *, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Copies the state and returns; the backup is written and committed in the background.

        A backup that fails (because the disk is full, for example) is reported, and training continues unless
        `failures_allowed` says otherwise; the previous backup stays.

        Args:
            epoch: The complete epoch, counted from 0; or, with `batch`, the epoch in progress.
            batch: The last complete batch of the epoch, counted from 0; None if the whole epoch is complete.
            metrics: Metrics to store with the backup.

        Returns:
            The save, to wait for if needed.

        Raises:
            UsageError: If an argument is wrong, or there are backups that were not restored.
            UnsupportedValueError: If an object has state that cannot be stored.
            SaveFailedError: If more backups have failed than are allowed, or another job has taken over the directory.
                This backup continues; its handle is the error's `next_save`.
            DeadlineError: If the previous backup does not end in time.
            PeerError: If another worker died, left or failed. Without it no backup can be made.
            ClusterError: If the job's store does not respond.
        """
        backup = self._check_backup(epoch, batch)
        with self._saving(rests=True):
            return self._begin(backup, metrics)

    def back_up_if_due(
        self, epoch: int, batch: int, *, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle | None:
        """Backs up within an epoch if `save_freq` says so; call it last in each batch.

        The last batch of an epoch is left to `back_up(epoch)`, if `maybe_load_initial_counters_from_ckpt` was given the
        number of batches per epoch. If the job is asked to stop, this batch is backed up, and the process exits with
        code 42; in a job of several workers the process exits without that backup.

        Args:
            epoch: The epoch in progress, counted from 0.
            batch: The complete batch, counted from 0.
            metrics: Metrics to store with the backup.

        Returns:
            The save, or None if none was due.

        Raises:
            SystemExit: When the job exits.
            UsageError: As in `back_up`, like its other errors.
        """
        backup = self._check_backup(epoch, batch)
        metrics = check_metrics(metrics)
        is_last = self._steps_per_epoch is not None and batch + 1 >= self._steps_per_epoch
        is_due = isinstance(self._save_freq, int) and (batch + 1) % self._save_freq == 0 and not is_last
        loop = self._open()
        with self._saving(rests=is_last or loop.manager.participant is not None):
            if is_due:
                return self._begin(backup, metrics)
            loop.count.done += 1
            self._backups.reached = backup
        return None

    def restore(self, *, strict: bool = True) -> Backup | None:
        """**Blocks.** Loads the newest whole backup into the objects; every byte is checked.

        Args:
            strict: False to restore everything that fits, and report the rest in the result's
                `restoration.differences`.

        Returns:
            A description of the restored backup, or None if there is none.

        Raises:
            NoWholeCheckpointError: If there are backups, but all of them are damaged.
            MismatchError: If backup and objects differ; nothing is changed.
            UsageError: If the directory contains checkpoints that are not backups.
            StorageError: If the storage fails.
        """
        loop = self._open()
        manager = loop.manager
        peers = None if manager.participant is None else manager.participant.peers
        # The others are notified if one refuses: they would wait for it in the restore.
        check = partial(check_newest, self._storage) if self._backups.are_unseen else lambda: None
        damage = make_agreement(peers, self._storage.url).run(check)
        if damage is not None:
            raise damage
        manager.lineage.restored_by = "restore(...)"
        restoration = None if self._begins_anew else manager.restore(strict=strict, keep_current=self._keep_current)
        objects_of(self.checkpoint).backup_url = self._storage.url
        self._begin_watch(may_predict=True)
        self._backups = Backups(self._backups.generation)
        if restoration is None:
            self._announcements.begin_epochs(manager, None)
            return None
        self._backups.generation = max(self._backups.generation, restoration.name.generation)
        loop.count.done = max(loop.count.done, restoration.step)
        loop.count.note(restoration.step, None)
        epoch, batch = read_note(restoration.manifest, self._storage.url)
        backup = Backup(epoch, batch, restoration)
        self._backups.begin_from(restoration.step, backup)
        self._announcements.begin_epochs(manager, backup)
        return backup

    def delete_backup(self) -> bool:
        """**Blocks.** Removes all backups at the end of training; a second call does nothing.

        Files that are not holdfast's stay, and so do the directory, the journal of events, and a record of a few
        hundred bytes that prevents a late writer from adding a backup afterwards.

        A backup of a later epoch than the run asks for (`epochs=`) is kept, and so is one that was not restored. If
        this run restored a backup and made none, because an earlier run had trained all its epochs, the backup is set
        aside: the next run begins with its first epoch, and the files stay until backups are deleted the next time.
        Each of these cases logs a warning.

        In a job of several workers, the leader removes the backups once all have called this, because one of them may
        still need them.

        Returns:
            True if no backup remains to restore, False if the backup was kept; the same on all workers.

        Raises:
            FencedError: If another job now backs up there; nothing was removed.
            StorageError: If the storage fails.
            DeadlineError: If the backup in progress does not end in time, or another worker does not join or dies.
            PeerError: If one of these happened on the leader.
            ClusterError: If the job's store does not respond.
        """
        self._check_open()
        unseen = "it existed before and was not restored" if self._backups.are_unseen else ""
        kept_for = self._together.agree_to_clear(self._backups.kept_for or unseen)
        if kept_for:
            self._warn(f"the backup is kept: {kept_for}")
            return False
        if self._loop is not None:
            # A backup that failed was an event; now that all are to go, it matters no more.
            with suppress(SaveFailedError, StorageError):
                self._loop.manager.close()
        began_from = self._backups.began_from if self._backups.total is None else None
        if began_from is not None:
            text = (
                f"no epoch was trained: the backup of {began_from} was the last one of an earlier run. It is set "
                "aside, and the next run begins with its first epoch. If this run was to have fewer epochs than "
                "that one, pass epochs= when you ask for the first epoch; then the backup is kept"
            )
            self._warn(text)
        if self._loop is not None:
            self._loop.guard.close()
        had_backup, manager = self.saved is not None, self._manager
        self._watch.finish("a restart would have started from the beginning")
        clearing = self._together.clear(self._storage, self._backups.generation, keeps_files=began_from is not None)
        self._loop, self._backups = None, Backups(clearing.generation or self._backups.generation)
        for problem in clearing.problems:
            raise problem
        self._announcements.end_epochs(manager, None, had_backup=had_backup)
        return True

    def maybe_load_initial_epoch_from_ckpt(self, initial_epoch: int, mode: Mode, *, epochs: int | None = None) -> int:
        """**Blocks.** Returns the epoch to begin with; call it after `restore`.

        Before training, this checks that the objects can be backed up, and that the directory can be written.

        Args:
            initial_epoch: The epoch to begin with if there is no backup, counted from 0.
            mode: What is about to run. Only training resumes where it stopped.
            epochs: How many epochs training has in total. If the backup is of a later epoch, `delete_backup` keeps it,
                with a warning.

        Returns:
            The epoch after the one that the backup completed; the same epoch if the backup was made within it; or
            `initial_epoch`.

        Raises:
            UsageError: If an argument is wrong, or there are backups that were not restored.
            UnsupportedValueError: If an object has state that cannot be stored.
            StorageError: If the directory cannot be created or written.
        """
        first = check_whole("initial_epoch", initial_epoch)
        total = None if epochs is None else check_whole("epochs", epochs)
        if mode not in _MODES:
            raise UsageError(f"mode {mode!r} is not known", hint=f"Use one of {', '.join(map(repr, _MODES))}.")
        if mode != "train":
            return first
        if self._backups.are_unseen:
            raise UsageError(
                f"{self._storage.url} contains a backup that was not restored", hint="Call restore() first."
            )
        self._open().manager.check_ready()
        self._backups.wait_ended()
        backup = self.saved
        self._backups.trains, self._backups.total = True, total
        self._listen()
        self._begin_watch()
        if backup is None:
            return first
        if first not in (0, backup.next_epoch):
            text = f"training continues with epoch {backup.next_epoch}, from the backup, instead of {first}"
            self._emit(Warned(text=text))
        if total is not None:
            self._backups.kept_for = ""
            if backup.next_epoch > total:
                self._backups.kept_for = f"it is of {backup}, but this run asks for only {total} epochs, counted from 0"
                self._warn(f"nothing is trained, and the backup is kept: {self._backups.kept_for}")
        return backup.next_epoch

    def maybe_load_initial_counters_from_ckpt(
        self, steps_per_epoch: int, initial_epoch: int, mode: Mode, *, epochs: int | None = None
    ) -> tuple[int, int]:
        """**Blocks.** Returns the epoch and the batch to begin with, for backups within epochs.

        A backed-up sampler or loader begins with the right batch itself, if its `set_epoch` is called at the beginning
        of each epoch; then the second number only says how many of the epoch's batches are done.

        Args:
            steps_per_epoch: How many batches an epoch has.
            initial_epoch: As in `maybe_load_initial_epoch_from_ckpt`.
            mode: As there.
            epochs: As there.

        Raises:
            UsageError: As there.
        """
        steps = self._steps_per_epoch = check_whole("steps_per_epoch", steps_per_epoch, 1)
        first = self.maybe_load_initial_epoch_from_ckpt(initial_epoch, mode, epochs=epochs)
        backup = self.saved if mode == "train" else None
        if backup is None or backup.batch is None:
            return first, 0
        return (first + 1, 0) if backup.batch + 1 >= steps else (first, backup.batch + 1)

    def close(self, timeout_seconds: float | None = None) -> None:
        """**Blocks.** Waits for the backup in progress, and ends all threads; a second call does nothing.

        Raises:
            SaveFailedError: If the last backup failed: then the end of training is not saved.
            DeadlineError: If the backup does not end in time.
        """
        with self._ending(None):
            if self._loop is not None:
                self._loop.manager.close(timeout_seconds)

    def __repr__(self) -> str:
        state = str(self._backups)
        if self._closed:
            state = f"{state.removesuffix(', committed')}, closed"
        return f"<WorkerTrainingState of {self._storage.url}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ending(error):
            if self._loop is not None:
                if error is not None:
                    self._explain_to_others(error)
                self._loop.manager.__exit__(kind, error, trace)

    @property
    def _manager(self) -> CheckpointManager | None:
        return None if self._loop is None else self._loop.manager

    @contextmanager
    def _ending(self, error: BaseException | None) -> Iterator[None]:
        """Signs off from the other workers after the body has closed the manager, unless the close will be retried."""
        if self._loop is not None and not self._closed:
            self._pause(self._loop)
        try:
            began_from = self._backups.began_from
            is_idle = began_from is not None and self._backups.trains and self._backups.total is None
            if error is None and is_idle and not self._closed:
                self._warn(
                    f"no backup was made after that of {began_from}, which was restored. If all epochs were "
                    "trained, call delete_backup(); until then every run continues after that epoch"
                )
            if not isinstance(error, Exception):
                self._watch.finish("nothing was saved", is_error=True)
            yield
            if error is None and self._backups.began_from is None and self.saved is not None:
                self._announcements.end_epochs(self._manager, self.saved)
        except DeadlineError:
            raise
        except BaseException as failure:
            if isinstance(failure, SaveFailedError):
                self._backups.explain(failure)
            self._leave()
            raise
        self._leave()

    def _check_backup(self, epoch: int, batch: int | None) -> Backup:
        backup = Backup(check_whole("epoch", epoch), None if batch is None else check_whole("batch", batch))
        if self._backups.are_unseen:
            raise UsageError(
                f"{self._storage.url} contains a backup that was not restored; this one would replace it",
                hint="Call restore() before training, or pass begin_anew=True to start from the beginning.",
            )
        if (begun := self._backups.began_from) is not None and epoch < begun.next_epoch:
            raise UsageError(
                f"{begun} was restored, and epoch {epoch} is not after it: it would be trained a second time",
                hint="Start the loop at maybe_load_initial_epoch_from_ckpt(0, 'train').",
            )
        return backup

    def _begin(self, backup: Backup, metrics: Mapping[str, float] | None) -> SaveHandle:
        loop = self._open()
        step = loop.count.done = loop.count.done + 1
        self._backups.name_next(step, backup)
        loop.metrics, loop.metadata = check_metrics(metrics), make_note(backup)
        try:
            return loop.save(step)
        except SaveFailedError as failure:
            self._backups.explain(failure)
            raise
        finally:
            # A save that reports an earlier failure continues nevertheless.
            if (begun := loop.count.saved) is not None and loop.count.saved_step == step:
                self._backups.begin(begun, backup)
                self._watch.note_counted()
                self._begins_anew = False

    def _listen(self) -> None:
        """Starts handling preemption notices; does nothing if it already does."""
        config = self._termination
        if config is None or (self._loop is not None and self._loop.guard.is_open):
            return
        if config.sources == "auto" and threading.current_thread() is not threading.main_thread():
            return  # Another thread is the program's main one, and signals come there.
        loop = self._open()
        self._pause(loop)
        loop.guard.open()

    def _pause(self, loop: TrainingLoop) -> None:
        """Lets the job exit at any moment, unless it already may."""
        if not loop.guard.leaving:
            loop.guard.pause(loop.count.done, saved=loop.count.saved)

    @contextmanager
    def _saving(self, *, rests: bool) -> Iterator[None]:
        """Wraps the end of an epoch or a batch: exits after the body if that was requested.

        Args:
            rests: True if the job may exit at any moment from then on. Otherwise it exits at the next such end.
        """
        loop = self._open()
        self._listen()
        loop.begin_steps()
        loop.guard.inbox.patient = False  # Ctrl-C has the effect that it always had.
        try:
            self._check_others(loop)
            yield
            if not rests or self._backups.reached is None:
                loop.guard.pass_boundary(loop.count.done)
        finally:
            self._backups.reached = None
            if rests:
                self._pause(loop)

    def _check_others(self, loop: TrainingLoop) -> None:
        """Checks that the other workers are there. If this one was asked to stop as well, it does that instead."""
        if loop.manager.participant is not None:
            try:
                loop.manager.participant.peers.failures.check_all()
            except ClusterError:
                loop.guard.pass_boundary(loop.count.done)
                raise

    def _explain_to_others(self, error: BaseException) -> None:
        """Explains to the other workers why this one ends."""
        if self._loop is not None and self._loop.manager.participant is not None:
            self._loop.manager.participant.peers.failures.explain(error)

    def _keep(self, _: int) -> SaveHandle | None:
        """Begins the backup of a batch for the guard, if there is a batch that is not backed up."""
        count, reached, self._backups.reached = self._open().count, self._backups.reached, None
        if reached is not None:
            count.done -= 1
            try:
                return self._begin(reached, None)
            except SaveFailedError as failure:
                if failure.next_save is None:
                    raise
        return count.saved

    def _begin_watch(self, *, may_predict: bool = False) -> None:
        self._watch.end()
        self._watch = EpochWatch(self.checkpoint.objects, self._warn)
        self._watch.may_predict = may_predict

    def _warn(self, text: str, *, is_error: bool = False) -> None:
        self._emit(Warned(text=f"{self._storage.url}: {text}", is_error=is_error))

    def _leave(self) -> None:
        self._closed = True
        if self._loop is not None:
            self._loop.guard.close()
        self._together.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this WorkerTrainingState of {self._storage.url} is closed", hint="Create a new one.")

    def _open(self) -> TrainingLoop:
        self._check_open()
        if self._loop is None:
            # The backups of the run before are deleted.
            self._loop = self._make_loop(begin_anew=True)
        return self._loop

    def _make_loop(self, *, begin_anew: bool) -> TrainingLoop:
        options = asdict(self._options) | {"begin_anew": begin_anew, "cluster": self._together.cluster}
        manager = CheckpointManager(self._storage, self.checkpoint, **options)
        config = self._termination or TerminationConfig(sources=[])
        return TrainingLoop(
            manager,
            lambda _: EpochGuard(manager, config, self._keep, self._name_backup, self._explain_to_others),
        )

    def _name_backup(self, step: int) -> str:
        return self._backups.name(step)  # By a restore others take their place.
