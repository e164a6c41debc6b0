"""What a job that is to leave makes of a save that fails before the last one."""

from __future__ import annotations

from types import TracebackType

from holdfast.errors import SaveFailedError
from holdfast.preemption.notice_inbox import NoticeInbox


class Tolerance:
    """For `with`, around a save by policy. Its failure does not end the training of a job that is to leave.

    That failure is an event, and the last save, which is to come, says what is saved.
    """

    def __init__(self, hearing: NoticeInbox) -> None:
        """Looks at what was heard when a save has failed."""
        self._hearing = hearing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, SaveFailedError) and self._hearing.is_to_leave
