"""Pools of threads in processes whose memory ends where their threads begin."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from holdfast.process.worker_pool import WorkerPool


def work(spare_bytes: int) -> bool:
    """Whether a pool does its job with so much memory left."""
    taken_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + spare_bytes, -1))
    signal.alarm(60)  # A process that still waits then dies of it.
    pool, done = WorkerPool(3, "pool"), list[int]()
    pool.start()
    pool.run([lambda: done.append(1)])
    pool.close()
    return done == [1]


# A thread's stack takes 8 MiB, as a rule, and what is left then may be too little for its first call.
for spare_bytes in range(8 << 20, (8 << 20) + (300 << 10), 4 << 10):
    process = os.fork()
    if not process:
        is_done = False
        try:
            is_done = work(spare_bytes)
        finally:
            os._exit(0 if is_done else 1)
    _, status = os.waitpid(process, 0)
    assert status == 0, (spare_bytes, status)
