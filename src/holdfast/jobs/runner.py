"""`JobRunner`: runs a job from its beginning, or from a checkpoint, to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal

from holdfast.errors import FencedError, NodeLostError, SaveFailedError, UsageError
from holdfast.events import Failed, Fanout, GroupEnded, Sink, Warned
from holdfast.events.sinks import LoggingSink
from holdfast.format.records import ALONE
from holdfast.jobs.checkpoints import MultiNodeCheckpointManager
from holdfast.jobs.job import Job, TaskGroup
from holdfast.jobs.node_store import Saving
from holdfast.jobs.session import Session, noting_on
from holdfast.jobs.upload import UploadTaskGroupBuilder
from holdfast.numbers import check_whole
from holdfast.options import check_step
from holdfast.preemption.config import TerminationConfig, make_termination
from holdfast.preemption.epoch_guard import EpochGuard
from holdfast.save.handle import SaveHandle
from holdfast.save.joint.participant import JointParticipant
from holdfast.save.mark import Mark

_STOPPED: Final = "stopped"


@dataclass(frozen=True, slots=True)
class JobResult:
    """The progress of a job, and its failures.

    Attributes:
        last_epoch: The last complete epoch.
        resumed_from: The epoch that was loaded last, usually at the start; None if the job started from the beginning.
        replacements: How often nodes were lost and replaced.
        last_saved_epoch: The newest epoch that is saved for all nodes, by this run or before it; None if none is.
        saves_committed: How many epochs this run has saved.
        saves_failed: How many epochs it could not save.
        failed_epochs: Those epochs.
        upload_error: Why the last saved epoch was not uploaded; None if it was, or no upload was requested.
    """

    last_epoch: int = 0
    resumed_from: int | None = None
    replacements: int = 0
    last_saved_epoch: int | None = None
    saves_committed: int = 0
    saves_failed: int = 0
    failed_epochs: tuple[int, ...] = ()
    upload_error: Exception | None = None


class _Epochs:
    """The epochs of a job, in the form that a guard needs."""

    worker = ALONE
    participant: JointParticipant | None = None
    save_seconds: float | None = None

    def __init__(self, manager: MultiNodeCheckpointManager, emit: Sink) -> None:
        self.emit = emit
        self.url = manager.url
        self.timeout_seconds = manager.timeout_seconds
        self._manager = manager

    def describe_cost(self) -> str:
        return ""

    def mark(self) -> Mark:
        raise UsageError("a job saves its nodes only at the end of an epoch")

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Does nothing: the runner tells the guard which save to wait for."""

    def latest_step(self) -> int | None:
        return max(self._manager.epochs(), default=None)

    def abandon(self) -> None:
        """Does nothing: the end of the process abandons a save in progress."""


class JobRunner:
    """Runs a job: init, then epoch after epoch, each saved for all nodes at once, then upload, download and exit.

    Example:
        ```python
        runner = holdfast.JobRunner(job, holdfast.MultiNodeCheckpointManager("runs/job", keep=holdfast.Latest(2)))
        with holdfast.LocalSession(["trainer_0", "trainer_1"]) as session:
            last_epoch = runner.train(session)
        ```
    """

    def __init__(
        self,
        job: Job,
        checkpoint_manager: MultiNodeCheckpointManager | None = None,
        resume_from_epoch: int | None = None,
        upload_task_group_builder: UploadTaskGroupBuilder | None = None,
        *,
        failures_allowed: int = 3,
        sinks: Iterable[Sink] = (),
        preemption: Literal["auto", "off"] | TerminationConfig = "auto",
    ) -> None:
        """Stores the settings; runs nothing yet.

        Args:
            job: The job to run.
            checkpoint_manager: Saves and restores; None to save nothing.
            resume_from_epoch: The epoch to resume from; None for the choice of the manager's metadata handler: the
                newest epoch, or the beginning if there is none.
            upload_task_group_builder: Makes the tasks that upload the last saved epoch.
            failures_allowed: How many saves in a row may fail before the job ends. A failure of the last save is always
                raised, after everything else is done.
            sinks: Functions that are called with the job's own events; the manager has its own.
            preemption: How to notice a preemption while the job runs, and how to exit: "auto" for signals and the
                sources that fit the machine, "off" for none, or a `TerminationConfig`. None without a manager.

        Raises:
            UsageError: If an argument is wrong, or needs a manager and there is none.
        """
        if not isinstance(job, Job):
            raise UsageError(f"expected a Job, got {job!r}")
        if not isinstance(checkpoint_manager, MultiNodeCheckpointManager | None):
            raise UsageError(
                f"expected a MultiNodeCheckpointManager, got {checkpoint_manager!r}",
                hint="Create one: MultiNodeCheckpointManager(directory).",
            )
        if not isinstance(upload_task_group_builder, UploadTaskGroupBuilder | None):
            raise UsageError(
                f"expected an UploadTaskGroupBuilder, got {upload_task_group_builder!r}",
                hint="Derive from UploadTaskGroupBuilder, or use UploadTo.",
            )
        check_whole("failures_allowed", failures_allowed)
        if resume_from_epoch is not None:
            check_step(resume_from_epoch, "resume_from_epoch")
        for name, value in (
            ("resume_from_epoch", resume_from_epoch),
            ("upload_task_group_builder", upload_task_group_builder),
        ):
            if value is not None and checkpoint_manager is None:
                raise UsageError(f"{name}={value!r} needs a checkpoint manager", hint="Pass checkpoint_manager=.")
        self._job = job
        self._manager = checkpoint_manager
        self._resume_from_epoch = resume_from_epoch
        self._upload_builder = upload_task_group_builder
        self._failures_allowed = failures_allowed
        self._emit = Fanout([LoggingSink(), *sinks])
        self._result = JobResult()
        # The epoch whose save has no end yet that is known, and the save once it has begun.
        self._pending: tuple[int, Saving | None] | None = None
        self._failures_in_a_row = 0
        self._last_failure: SaveFailedError | None = None
        # Which of the stop conditions that are outputs of tasks were true after the last epoch. They are kept with it:
        # only another epoch could tell again.
        self._outputs: list[bool] = []
        self._termination = None if preemption == "off" else make_termination(preemption)
        self._guard: EpochGuard | None = None
        self._handle: SaveHandle | None = None

    @property
    def result(self) -> JobResult:
        """The result of the run; while it runs, or if it failed, its progress."""
        return self._result

    def train(self, session: Session) -> int:
        """**Blocks.** Runs the job to its end.

        From the beginning: the init tasks and a save of epoch 0; then an epoch, the stop conditions and a save, until
        one condition is true. From a checkpoint: the checkpoint is loaded, and the epochs continue after it; if a stop
        condition is already true, none runs. Then the upload, the download tasks and the exit tasks.

        If the job is asked to stop meanwhile (SIGTERM, for example), the save in progress is completed and the process
        exits with code 42. The current epoch is not waited for: it is run again.

        Returns:
            The last epoch.

        Raises:
            UsageError: If the job cannot be run like this; no task has run.
            SystemExit: When the job exits.
            NoCheckpointError: If the epoch to resume from was not saved; no task has run.
            NoWholeCheckpointError: If the epoch to resume from is damaged; no task has run.
            MismatchError: If the checkpoint does not fit the job; no task has run.
            NodeLostError: If a node is gone, and the session does not replace it or nothing is saved.
            TaskFailedError: If a task failed. A failed upload is raised after everything else is done.
            SaveFailedError: If more saves in a row have failed than are allowed; or, at the end, if the last one
                failed.
        """
        _check_session(session)
        with (
            _running_alone(self._job.run_lock, "the job is already running", "Create a job for each run."),
            _running_alone(session.run_lock, "the session is already running a job", "Create a session for each run."),
        ):
            if not (self._job.stop_outputs or len(self._job.stop_group)):
                raise UsageError(
                    "the job has no stop condition, so it would never end",
                    hint="Call epoch_limiter(job, n) or job.add_stop_condition(...).",
                )
            session.bind(self._job.named_nodes())
            self._job.freeze(session.nodes)
            self._result = JobResult()
            self._pending, self._last_failure, self._failures_in_a_row = None, None, 0
            self._handle = None
            try:
                self._listen(session)
                epoch = self._train(session)
                if self._manager is not None:
                    self._manager.close()
            except BaseException as error:
                session.note_end(error)
                if self._manager is not None:
                    with noting_on(error):  # It takes precedence over the result of a save in progress.
                        self._manager.close()
                    self._note_committed(self._manager)
                raise
            finally:
                guard, self._guard = self._guard, None
                if guard is not None:
                    guard.close()
        self._raise_what_was_left()
        if self._manager is not None:
            self._manager.tidy()
        return epoch

    def save_checkpoints(self, epoch: int, session: Session) -> bool:
        """**Blocks.** Saves all nodes now, as an epoch later than all existing ones.

        Returns:
            True if it was saved; a failure is counted.

        Raises:
            UsageError: If there is no manager.
            SaveFailedError: If more saves in a row have failed than are allowed.
        """
        self._ready(session)
        failed_before = self._result.saves_failed
        self._save(epoch)
        self._settle()
        return self._result.saves_failed == failed_before

    def load_blobs_from_checkpoints(
        self, names: str | Iterable[str], epoch: int, session: Session
    ) -> dict[str, tuple[str, ...]]:
        """**Blocks.** Loads single values of an epoch into the workspaces of their nodes.

        Args:
            names: The values; those of that name on all nodes.
            epoch: The epoch.
            session: The session of the workspaces; they need not have been trained.

        Returns:
            For each node, the names of its loaded values.

        Raises:
            UsageError: If there is no manager, or no node has a value of some name; nothing has been loaded.
            NoCheckpointError: If the epoch was not saved.
            MismatchError: If a value does not fit the existing one.
        """
        return self._ready(session).load_blobs(names, epoch)

    def _train(self, session: Session) -> int:
        """Runs the job to its end, replacing lost nodes."""
        goes_on = False
        while True:
            try:
                return self._run_all(session, goes_on=goes_on)
            except NodeLostError as lost:
                if self._manager is None or not session.try_replace(lost):
                    raise
                self._emit(Warned(text=f"{lost.message}; every node resumes from the last epoch that all nodes have"))
                self._pending = None
                self._result = replace(self._result, replacements=self._result.replacements + 1)
                # What an earlier run has left is not this one's to go on from.
                goes_on = self._result.last_saved_epoch is not None

    def _run_all(self, session: Session, *, goes_on: bool) -> int:
        job = self._job
        epoch, stopped = self._begin(session, goes_on=goes_on)
        while not stopped:
            epoch += 1
            self._run(session, job.epoch_group, epoch)
            self._result = replace(self._result, last_epoch=epoch)
            self._outputs = session.share(
                f"the outputs of epoch {epoch}",
                [any(map(bool, output.task.results().values())) for output in job.stop_outputs],
            )[0]
            stopped = self._is_stopped(session, epoch) or any(self._outputs)
            if self._manager is not None:
                self._save(epoch)
        self._settle()
        self._upload(session)
        self._run(session, job.download_group, epoch)
        self._run(session, job.exit_group, epoch)
        return epoch

    def _note_committed(self, manager: MultiNodeCheckpointManager) -> None:
        """Notes the save in progress, if it has ended well: Ctrl-C, say, has ended the wait for it."""
        if self._pending is not None and manager.committed == self._pending[0]:
            self._note_saved(self._pending[0])

    def _ready(self, session: Session) -> MultiNodeCheckpointManager:
        """Returns the manager, prepared for a session that is not in a run."""
        if self._manager is None:
            raise UsageError("the runner has no checkpoint manager", hint="Pass checkpoint_manager= to the runner.")
        _check_session(session)
        session.bind(self._job.named_nodes())
        nodes = self._job.nodes_to_checkpoint(session.nodes)
        if not self._manager.is_ready_for(session, nodes):
            self._manager.init(session, nodes)
            session.make_objects(self._job.objects)
        return self._manager

    def _begin(self, session: Session, *, goes_on: bool) -> tuple[int, bool]:
        """Reaches the point from which the epochs continue: the last complete one, and whether it is to be the last."""
        job, manager = self._job, self._manager
        self._outputs = []
        if manager is None:
            session.make_objects(job.objects, anew=True)
            self._run(session, job.init_group, 0)
            return 0, False
        manager.init(session, job.nodes_to_checkpoint(session.nodes), goes_on=goes_on)
        asked_for = None if goes_on else self._resume_from_epoch
        resume_from = manager.choose_epoch(asked_for)
        session.make_objects(job.objects, anew=resume_from is None)
        if resume_from is None:
            self._run(session, job.init_group, 0)
            self._save(0)
            return 0, False
        loaded = manager.load(resume_from, or_older=asked_for is None)
        epoch = loaded.epoch
        self._rest(epoch)
        self._result = replace(self._result, last_epoch=epoch, resumed_from=epoch, last_saved_epoch=epoch)
        if loaded.new_nodes:
            self._run(session, job.init_group, epoch, only=loaded.new_nodes)
        outputs = loaded.metadata.get(_STOPPED)
        if isinstance(outputs, list) and len(outputs) == len(job.stop_outputs):
            self._outputs = [one is True for one in outputs]
        return epoch, any(self._outputs) or self._is_stopped(session, epoch)

    def _run(self, session: Session, group: TaskGroup, epoch: int, *, only: Sequence[str] | None = None) -> None:
        begun_at = time.monotonic()
        session.run(group, epoch=epoch, only=only)
        if len(group):
            self._emit(GroupEnded(group=group.name, epoch=epoch, seconds=time.monotonic() - begun_at))

    def _is_stopped(self, session: Session, epoch: int) -> bool:
        """Returns True if a stop condition that is not an output of the epoch's tasks is true."""
        session.run(self._job.stop_group, epoch=epoch)
        found = [value for task in self._job.stop_group for value in task.results().values()]
        return bool(session.share(f"the end after epoch {epoch}", any(map(bool, found)))[0])

    def _save(self, epoch: int) -> None:
        assert self._manager is not None, "who has no manager saves nothing"
        guard = self._guard
        if guard is not None:
            guard.hold()
        self._settle()
        self._pending, self._handle = (epoch, None), None
        try:
            saving = self._manager.begin_save(epoch, {_STOPPED: self._outputs})
            self._pending, self._handle = (epoch, saving), saving.handle
        except SaveFailedError as failure:
            self._note_failure(epoch, failure)
        else:
            if not self._manager.background:
                self._settle()
        if guard is not None:
            guard.pass_boundary(epoch)
            self._rest(epoch)

    def _listen(self, session: Session) -> None:
        """Starts handling preemption notices, if something is saved that the job could resume from."""
        config, manager = self._termination, self._manager
        if config is None or manager is None:
            return
        if config.sources == "auto" and threading.current_thread() is not threading.main_thread():
            return  # Another thread is the program's main one, and signals come there.
        guard = EpochGuard(_Epochs(manager, self._emit), config, self._find_save, "epoch {}".format, session.note_exit)
        guard.pause(0)
        guard.open()
        self._guard = guard

    def _rest(self, epoch: int) -> None:
        """From now on the job may exit at any moment, once the save of that epoch has ended."""
        is_known = self._handle is not None or (self._pending is None and self._last_failure is None)
        if self._guard is not None and is_known:
            self._guard.pause(epoch, saved=self._handle)

    def _find_save(self, epoch: int) -> SaveHandle | None:
        """Returns the save of the last epoch, for the guard.

        Raises:
            SaveFailedError: If it has failed.
        """
        if self._handle is None and self._pending is not None:
            self._settle()  # It is made by other processes.
        if self._last_failure is not None:
            raise self._last_failure
        return self._handle

    def _settle(self) -> None:
        """Waits for the save in progress, and records its result."""
        if self._pending is None or self._manager is None:
            return
        epoch, saving = self._pending
        assert saving is not None, "what has not begun has raised"
        try:
            self._manager.finish_save(epoch, saving)
        except SaveFailedError as failure:
            self._note_failure(epoch, failure)
        else:
            self._note_saved(epoch)

    def _note_saved(self, epoch: int) -> None:
        self._pending, self._failures_in_a_row, self._last_failure = None, 0, None
        self._result = replace(self._result, last_saved_epoch=epoch, saves_committed=self._result.saves_committed + 1)

    def _note_failure(self, epoch: int, failure: SaveFailedError) -> None:
        self._pending, self._failures_in_a_row, self._last_failure = None, self._failures_in_a_row + 1, failure
        self._result = replace(
            self._result,
            saves_failed=self._result.saves_failed + 1,
            failed_epochs=(*self._result.failed_epochs, epoch),
        )
        if isinstance(failure.__cause__, FencedError):
            raise failure
        if self._failures_in_a_row > self._failures_allowed:
            failure.add_note(
                f"{self._failures_in_a_row} saves in a row have failed; {self._failures_allowed} are allowed."
            )
            raise failure

    def _upload(self, session: Session) -> None:
        """Uploads the last saved epoch. An error is reported, and raised after everything else is done."""
        if self._upload_builder is None or self._manager is None:
            return
        epoch = self._result.last_saved_epoch
        try:
            if epoch is None:
                raise SaveFailedError("no epoch was saved, so none can be uploaded", step=self._result.last_epoch)
            if epoch != self._result.last_epoch:
                self._emit(Warned(text=f"the last saved epoch, {epoch}, is uploaded", step=epoch))
            group = self._upload_builder.build(epoch, self._manager)
            self._run(session, group, self._result.last_epoch)
        except NodeLostError:
            raise
        except Exception as error:  # noqa: BLE001  An upload is the user's code as well.
            self._result = replace(self._result, upload_error=error)
            self._emit(Failed(stage="upload", error=getattr(error, "message", repr(error)), step=epoch))

    def _raise_what_was_left(self) -> None:
        failures = [error for error in (self._result.upload_error, self._last_failure) if error is not None]
        if not failures:
            return
        for other in failures[1:]:
            failures[0].add_note(f"{type(other).__name__} as well: {other}")
        raise failures[0]


def _check_session(session: object) -> None:
    if not isinstance(session, Session):
        raise UsageError(
            f"expected a session, got {session!r}", hint="Use a LocalSession, TorchrunSession or RaySession."
        )
    session.check_open()


@contextmanager
def _running_alone(run_lock: threading.Lock, trouble: str, hint: str) -> Iterator[None]:
    """Checks that a job, or a session, has one run at a time: tasks and nodes have one place for outputs.

    Raises:
        UsageError: If it already has one.
    """
    if not run_lock.acquire(blocking=False):
        raise UsageError(trouble, hint=hint)
    try:
        yield
    finally:
        run_lock.release()
