"""The tree of errors, grouped by what a handler does about them.

* `UsageError`: the call, or an object that was handed in, is wrong. Mend the program.
* `MismatchError`: checkpoint and live objects do not fit. Restore with `strict=False`, or mend the objects.
* `StorageError`: the place where bytes lie failed. Make room, or try again.
* `DamageError`: bytes are there but are not what was written. Fall back to an older step.
* `NoCheckpointError`: there is nothing to restore. Begin anew, or look at the directory.
* `SaveFailedError`: an earlier save failed in the background. Go on, or stop.
* `TaskFailedError`: a task of an epoch job raised. Mend it, and start the job again: it goes on from the last epoch.
* `NodeLostError`: a node of an epoch job is gone. Start the job again, or let the session replace it.
* `OutOfMemoryError`: there is no host memory for what is on its way. Use a machine with more, or keep less.
* `FencedError`: another job has taken over the directory. Stop this one.
* `ClusterError`: the workers of the job cannot reach each other, or one has failed. Stop, and start the job again.
* `DeadlineError`: a wait ran out of time.

Every error carries a `hint`: one sentence that says what to do. Its traceback shows the user's frames, and not those
of holdfast; with `HOLDFAST_TRACEBACK=1` in the environment it shows all.
"""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """The root of all errors that holdfast raises.

    Attributes:
        hint: What to do about it, one sentence, or an empty string.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> Any:
        # Frameworks send errors to other processes. Python would make them anew from their message alone.
        return _remake, (type(self), self.args), vars(self)


def _remake(cls: type[HoldfastError], args: tuple[object, ...]) -> HoldfastError:
    return cls.__new__(cls, *args)


class UsageError(HoldfastError, ValueError):
    """The call, or an object that was handed in, is wrong. Frameworks raise a `ValueError` there."""


class UnsupportedValueError(UsageError):
    """A value has no codec, or an array has a form that cannot be stored.

    Attributes:
        path: Where the value stands, such as `scheduler/lr_lambdas/0`.
    """

    def __init__(self, message: str, *, path: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class OutOfRangeError(UsageError):
    """A number is not one that can be meant."""


class UnnamedError(UsageError, TypeError):
    """Objects were given without names."""


class MissingPackageError(UsageError, ImportError):
    """A part of holdfast was asked for that needs a package which is not installed."""


class StepExistsError(UsageError):
    """The step is committed already and `replace` was not asked for."""


class ClosedError(UsageError):
    """The manager was closed before this call."""


class MismatchError(HoldfastError):
    """What is stored does not fit the live objects; nothing has been changed.

    Attributes:
        differences: A `holdfast.state.Differences`, with a list for each kind of difference.
    """

    def __init__(self, message: str, *, differences: Any, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.differences = differences


class ApplyError(HoldfastError):
    """An object refused the state that was read for it, or live arrays that share memory cannot hold what is stored.

    Objects before it have been changed.
    """


class StorageError(HoldfastError):
    """The place where the bytes lie failed.

    Attributes:
        path: The path below the storage's root, or the whole path.
    """

    def __init__(self, message: str, *, path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class StorageFullError(StorageError):
    """No room is left, or a quota is reached."""


class NotFoundError(StorageError):
    """Nothing lies at that path."""


class DamageError(HoldfastError):
    """Bytes are there, but they are not what was written.

    Attributes:
        step: The step whose checkpoint is damaged, or None where that is not known.
        path: The damaged file.
        offset_bytes: Where in the file the bad span begins, or None.
        tensor: The leaf that the bad span belongs to, or an empty string.
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
    """There is no checkpoint at that place, or no such step."""


class NoWholeCheckpointError(NoCheckpointError):
    """Checkpoints are there, but none of them is whole; also if all their manifests are gone.

    Attributes:
        damages: What is wrong with each, newest first.
    """

    def __init__(self, message: str, *, damages: tuple[DamageError, ...], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.damages = damages


class SaveFailedError(HoldfastError):
    """A save failed in the background. Its cause is `__cause__`.

    Attributes:
        step: The step that was not committed.
        next_save: The handle of the save that was being asked for when this was raised, which goes on; or None.
    """

    def __init__(self, message: str, *, step: int, next_save: Any = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.step = step
        self.next_save = next_save


class ChangedError(HoldfastError):
    """State changed while it was copied, though it was to stay as it is until a step that waits.

    Attributes:
        leaves: The names of the arrays that changed.
    """

    def __init__(self, message: str, *, leaves: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.leaves = leaves


class TaskFailedError(HoldfastError):
    """A task of a job raised an error, which is its `__cause__`; or it had to be given up.

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
    """There is no host memory for bytes on their way."""


class FencedError(HoldfastError):
    """Another job has opened a newer generation of this run; this one can commit no more."""


class ClusterError(HoldfastError):
    """The store through which the workers of a job agree does not answer."""


class PeerError(ClusterError):
    """Another worker of the job has failed.

    Attributes:
        rank: Which worker.
        kind: The name of the error's type there.
        text: What the error says.
        traceback: Where it was raised there, as Python prints it; empty if that is not known. It is a note as well.
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
    """A wait ran out of time; what was waited for may still happen."""


class AbsentError(DeadlineError):
    """Workers that were waited for did not come, or have not been heard of.

    Attributes:
        ranks: Who is missing.
        nodes: Where they run, in the same order.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...], nodes: tuple[str, ...], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ranks = ranks
        self.nodes = nodes
