"""Processes that fork while they save: MODE DIRECTORY."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.storage import LocalStorage, MemoryStorage

GO_ON = threading.Event()


class HeldPublication(MemoryStorage):
    """A storage that publishes once that is allowed."""

    def publish(self, path: str, data: Any) -> Any:
        GO_ON.wait()
        return super().publish(path, data)


class HeldWriter(LocalStorage):
    """A storage that writes once that is allowed."""

    def create(self, path: str, size_bytes: int) -> Any:
        GO_ON.wait()
        return super().create(path, size_bytes)


def save_in_child(directory: str) -> None:
    hf.CheckpointManager(directory, hf.Checkpoint(a=np.zeros(1_000_000))).save(1)


def fork_one_that_saves(directory: str) -> None:
    pid = os.fork()
    if pid == 0:
        save_in_child(directory)
        sys.exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def start_one_that_saves(directory: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=save_in_child, args=(directory,))
    process.start()
    process.join()
    sys.exit(process.exitcode)


def fork_one_that_waits() -> None:
    """Exits with the number of waits that were refused in the child."""
    manager = hf.CheckpointManager(HeldPublication(), hf.Checkpoint(a=np.zeros(3)))
    handle = manager.save(1)
    pid = os.fork()
    if pid == 0:
        refused = 0
        for wait in (manager.wait, handle.wait_committed):
            try:
                wait()
            except UsageError:
                refused += 1
        os._exit(refused)
    refused = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    GO_ON.set()
    manager.close()
    sys.exit(refused)


def fork_in_loop(directory: str) -> None:
    with hf.resumable(HeldWriter(directory), a=np.zeros(3), save_every=hf.Steps(1)) as run:
        for step in run.steps(3):
            if step == 1:
                pid = os.fork()
                if pid == 0:
                    try:
                        run.manager.save(9)
                    except UsageError as error:
                        print(error)
                    break
                os.waitpid(pid, 0)
                GO_ON.set()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fork one that saves", directory]:
            fork_one_that_saves(directory)
        case ["start one that saves", directory]:
            start_one_that_saves(directory)
        case ["fork one that waits"]:
            fork_one_that_waits()
        case ["fork in loop", directory]:
            fork_in_loop(directory)
        case _:
            raise SystemExit(f"what is {sys.argv[1:]}?")
