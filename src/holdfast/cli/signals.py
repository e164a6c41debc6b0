"""What a signal does while a verb has files to remove."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ending_on(*numbers: signal.Signals) -> Iterator[None]:
    """Lets signals end the body as an exception does, so that its processes and files go as well.

    One that is ignored (`nohup` does that) stays ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
