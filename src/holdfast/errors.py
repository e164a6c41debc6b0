"""The tree of errors, grouped by what a handler does about them.

* `UsageError`: the call, or an object that was passed, is wrong. Fix the program.
* `MismatchError`: checkpoint and live objects differ. Restore with `strict=False`, or fix the objects.
* `StorageError`: the storage failed. Make room, or try again.
* `DamageError`: the stored bytes are not those that were written. Fall back to an older step.
* `NoCheckpointError`: there is nothing to restore. Start from the beginning, or check the directory.
* `ResumeDiffersError`: a restart did not repeat what was trained before. Find the cause, or allow it.
* `NotFiniteError`: parameters or optimizer states have nan or an infinity. Go back, or leave out the cause.
* `RolledBackError`: training goes on from an earlier step in a new process. Start it.
* `SaveFailedError`: an earlier save failed in the background. Continue, or stop.
* `TaskFailedError`: a task of an epoch job raised. Fix it, and start the job again: it resumes from the last epoch.
* `NodeLostError`: a node of an epoch job is gone. Start the job again, or let the session replace it.
* `OutOfMemoryError`: there is no host memory for a copy of the state. Use a machine with more, or save less.
* `FencedError`: another job has taken over the directory. Stop this one.
* `ClusterError`: the workers cannot reach each other, or one has failed. Stop, and start the job again.
* `DeadlineError`: a wait ran out of time.
* `NotRunningError`: no job has the run open, so none can be asked. Start it.

Every error has a `hint`: one sentence that says what to do. Its traceback shows the user's frames, and not those of
holdfast; with `HOLDFAST_TRACEBACK=1` in the environment it shows all.
"""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """The base class of all errors that holdfast raises.

    Attributes:
        hint: What to do about it, in one sentence; or an empty string.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> Any:
        # Frameworks send errors to other processes. Python would recreate them from their message alone.
        return _remake, (type(self), self.args), vars(self)


def _remake(cls: type[HoldfastError], args: tuple[object, ...]) -> HoldfastError:
    return cls.__new__(cls, *args)


class UsageError(HoldfastError, ValueError):
    """The call, or an object that was passed to it, is wrong. Also a `ValueError`."""


class UnsupportedValueError(UsageError):
    """A value has no codec, or an array has a form that cannot be stored.

    Attributes:
        path: The path of the value, such as `scheduler/lr_lambdas/0`.
    """

    def __init__(self, message: str, *, path: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class OutOfRangeError(UsageError):
    """A number is outside of its valid range."""


class UnnamedError(UsageError, TypeError):
    """Objects were given without names."""


class MissingPackageError(UsageError, ImportError):
    """A part of holdfast needs a package that is not installed."""


class StepExistsError(UsageError):
    """The step is already committed, and `replace` was not given."""


class ClosedError(UsageError):
    """The manager was closed before this call."""


class MismatchError(HoldfastError):
    """The checkpoint does not fit the live objects; nothing has been changed.

    Attributes:
        differences: A `holdfast.state.Differences`, with a list for each kind of difference.
    """

    def __init__(self, message: str, *, differences: Any, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.differences = differences


class ApplyError(HoldfastError):
    """An object rejected its stored state, or live arrays that share memory cannot hold the stored values.

    Objects before it have already been changed.
    """


class StorageError(HoldfastError):
    """The storage failed.

    Attributes:
        path: The path below the storage's root, or the whole path.
    """

    def __init__(self, message: str, *, path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class StorageFullError(StorageError):
    """The disk is full, or a quota is reached."""


class NotFoundError(StorageError):
    """The path does not exist."""


class DamageError(HoldfastError):
    """The stored bytes are not those that were written.

    Attributes:
        step: The step of the damaged checkpoint, or None if it is not known.
        path: The damaged file.
        offset_bytes: Where in the file the damaged span begins, or None.
        tensor: The leaf that the damaged span belongs to, or an empty string.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        path: str = "",
        offset_bytes: int | None = None,
        tensor: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.step = step
        self.path = path
        self.offset_bytes = offset_bytes
        self.tensor = tensor


class FormatError(DamageError):
    """A record or a header is malformed, hostile, or of a format that this version cannot read."""


class NoCheckpointError(HoldfastError):
    """The directory has no checkpoint, or not of that step."""


class NoWholeCheckpointError(NoCheckpointError):
    """There are checkpoints, but all of them are damaged or have lost their manifests.

    Attributes:
        damages: The damage of each checkpoint, newest first.
    """

    def __init__(self, message: str, *, damages: tuple[DamageError, ...], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.damages = damages


class NotFiniteError(HoldfastError):
    """Parameters or optimizer states of a committed step have nan or an infinity.

    Attributes:
        step: The step; or the one to which training has gone back too often.
    """

    def __init__(self, message: str, *, step: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.step = step


class RolledBackError(HoldfastError):
    """Training has gone back to an earlier step, and goes on there in a new process: its framework cannot go back.

    Attributes:
        step: That step.
    """

    def __init__(self, message: str, *, step: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.step = step


class SaveFailedError(HoldfastError):
    """A save failed in the background. Its cause is `__cause__`.

    Attributes:
        step: The step that was not committed.
        next_save: The handle of the save that was being requested when this was raised, and continues; or None.
    """

    def __init__(self, message: str, *, step: int, next_save: Any = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.step = step
        self.next_save = next_save


class ChangedError(HoldfastError):
    """State changed while it was being copied, although it should change only in an optimizer step, which waits.

    Attributes:
        leaves: The names of the arrays that changed.
    """

    def __init__(self, message: str, *, leaves: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.leaves = leaves


class ResumeDiffersError(HoldfastError):
    """With `strict_resume=True`: a step that was repeated after a restart took other data, or gave another loss.

    Attributes:
        step: The first step that differs.
        what: `data` or `loss`.
    """

    def __init__(self, message: str, *, step: int, what: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.step = step
        self.what = what


class TaskFailedError(HoldfastError):
    """A task of a job raised an error, which is its `__cause__`; or the task was abandoned.

    Attributes:
        group: The group that was running.
        task: The task.
        node: The node on which it ran.
    """

    def __init__(self, message: str, *, group: str, task: str, node: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.group = group
        self.task = task
        self.node = node


class NodeLostError(HoldfastError):
    """A node of a job is gone: its process has ended, or its machine.

    Attributes:
        nodes: The nodes.
    """

    def __init__(self, message: str, *, nodes: tuple[str, ...], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.nodes = nodes


class OutOfMemoryError(HoldfastError, MemoryError):
    """There is no host memory for a copy or a buffer."""


class FencedError(HoldfastError):
    """Another job has opened a newer generation of this run; this job can no longer commit."""


class OtherGenerationError(FencedError):
    """A request was meant for an earlier start of the run than the one that is alive."""


class NotRunningError(HoldfastError):
    """No job has the run open, so none answers."""


class ClusterError(HoldfastError):
    """The store through which the workers of the job coordinate does not respond."""


class PeerError(ClusterError):
    """Another worker of the job has failed.

    Attributes:
        rank: The rank of that worker.
        kind: The name of the error's type there.
        text: The error's message.
        traceback: The traceback there, as Python prints it; empty if it is not known. It is a note as well.
    """

    def __init__(self, message: str, *, rank: int, kind: str, text: str, traceback: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.kind = kind
        self.text = text
        self.traceback = traceback
        if traceback:
            self.add_note(f"On rank {rank}:\n{traceback}")


class DeadlineError(HoldfastError, TimeoutError):
    """A wait ran out of time; the awaited event may still happen."""


class UnansweredError(DeadlineError):
    """A job that is alive does not do what it was asked to: it hangs, or its step is longer than the wait."""


class AbsentError(DeadlineError):
    """Some workers did not join, or have not been heard of.

    Attributes:
        ranks: The missing workers.
        nodes: The nodes they run on, in the same order.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...], nodes: tuple[str, ...], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ranks = ranks
        self.nodes = nodes
