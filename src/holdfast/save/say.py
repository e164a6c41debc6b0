"""What holdfast itself has to say to people, on standard error. Nothing of it ever raises: training goes on unheard."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TextIO


def say(text: str) -> None:
    """**Thread-safe.** Prints lines, in one piece; they are lost if nobody reads them any more."""
    stream = sys.stderr
    if stream is None:
        return
    # Nobody reads the pipe any more, the disk is full, the stream was closed, or it is one of the user's own.
    with contextlib.suppress(Exception):
        try:
            stream.write(f"{text}\n")
            stream.flush()
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EBADF) and stream is sys.__stderr__:
                _lead_nowhere(sys.stderr)
            raise


def _lead_nowhere(stream: TextIO) -> None:
    """What is left in the buffer would be written again at the end, and Python ends with 120 if that fails."""
    nowhere, lost = os.open(os.devnull, os.O_WRONLY), stream.fileno()
    if nowhere != lost:
        os.dup2(nowhere, lost)
        os.close(nowhere)
    stream.flush()


def say_amid(text: str) -> None:
    """**Thread-safe.** Prints lines from within a signal handler too, whatever the interrupted code was amid."""
    if sys.__stderr__ is None:
        return  # Started without one, so that the descriptor may be that of any file.
    # One write, past the stream: that may be what was interrupted.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
