"""Programs that end with a save that failed, or that hangs: MODE [DIRECTORY]."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.errors import DeadlineError, StorageFullError
from holdfast.storage import LocalStorage, MemoryStorage


class Full(LocalStorage):
    """A storage that has no room."""

    def create(self, path: str, size_bytes: int) -> Any:
        raise StorageFullError("no room", path=path)


class Stuck(MemoryStorage):
    """A storage that never ends to publish a manifest."""

    def publish(self, path: str, data: Any) -> Any:
        if path.endswith("manifest.json"):
            threading.Event().wait()
        return super().publish(path, data)


def fail_by_hand(directory: str) -> None:
    with hf.CheckpointManager(Full(directory), hf.Checkpoint(a=np.zeros(3))) as manager:
        manager.save(1)
        sys.exit(0)


def fail_in_loop(directory: str) -> None:
    with hf.resumable(Full(directory), a=np.zeros(3)) as run:
        next(run.steps(9))
        run.save()
        sys.exit(0)


def fail_without_listener(directory: str) -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)
    fail_by_hand(directory)


def hang(**options: Any) -> hf.CheckpointManager:
    manager = hf.CheckpointManager(Stuck(), hf.Checkpoint(a=np.zeros(3)), **options)
    manager.save(2)
    return manager


def exit_from_handler() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    hang()


def close_in_time() -> None:
    try:
        hang().close(timeout_seconds=0.1)
    except DeadlineError:
        print("late")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fail by hand", directory]:
            fail_by_hand(directory)
        case ["fail in loop", directory]:
            fail_in_loop(directory)
        case ["fail without listener", directory]:
            fail_without_listener(directory)
        case ["hang"]:
            hang()
        case ["hang in block"]:
            with hang():
                pass
        case ["hang in close"]:
            hang().close()
        case ["hang in block for 3 s"]:
            with hang(timeout_seconds=3):
                pass
        case ["close in time"]:
            close_in_time()
        case ["exit from handler"]:
            exit_from_handler()
        case _:
            raise SystemExit(f"what is {sys.argv[1:]}?")
