"""A process whose forked child gets a signal before any other code of the child runs."""

from __future__ import annotations

import os
import signal

is_forking: list[bool] = []


def signal_child() -> None:
    if is_forking:
        os.kill(os.getpid(), signal.SIGTERM)


# Before the functions that the library registers: they run in the order in which they were registered.
os.register_at_fork(after_in_child=signal_child)

from holdfast.preemption import Signals  # noqa: E402
from holdfast.preemption.sources.wakeup import Wakeup  # noqa: E402

if __name__ == "__main__":
    Signals().open(lambda notice: True)
    bell = Wakeup()
    bell.take_signals()
    is_forking.append(True)
    child = os.fork()
    if not child:
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, bell.listen(0.2), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
