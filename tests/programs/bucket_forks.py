"""Trains on a bucket in a process that forks all the time: `bucket_forks.py URL`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.errors import UsageError
from holdfast.storage import open_storage


class Rows(Dataset[torch.Tensor]):
    """Rows of a table; one of them kills the worker that reads it."""

    def __init__(self, deadly: int = -1) -> None:
        self._deadly = deadly

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> torch.Tensor:
        if row == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((500,), float(row))


def train(url: str) -> None:
    model = torch.nn.Linear(500, 2000)
    kept = DataLoader(Rows(), batch_size=8, num_workers=2, persistent_workers=True)
    forks = multiprocessing.get_context("fork")
    with holdfast.resumable(url, model=model, save_every=holdfast.Steps(1), keep=holdfast.Latest(2)) as run:
        for step in run.steps(4):
            for loader in (kept, DataLoader(Rows(), batch_size=8, num_workers=2)):
                for rows in loader:
                    model(rows).sum().backward()
            with torch.no_grad():
                model.bias.fill_(step)
            child = forks.Process(target=len, args=("does not use the bucket",))
            child.start()
            child.join()
            subprocess.run([sys.executable, "-c", ""], check=True)
            print("children", child.exitcode, end_of_fork(os._exit))
        try:
            list(DataLoader(Rows(deadly=9), batch_size=8, num_workers=2))
        except (RuntimeError, EOFError, ConnectionError):
            print("a worker was killed")


def end_of_fork(leave: object) -> int:
    pid = os.fork()
    if not pid:
        leave(0)  # type: ignore[operator]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork_during_an_upload(url: str) -> None:
    storage = open_storage(url)
    data = memoryview(os.urandom(40 << 20))
    writer = storage.create("file", len(data))

    def write() -> None:
        for begin in range(0, len(data), 1 << 20):
            writer.write_at(begin, data[begin : begin + (1 << 20)])
        writer.finish()

    thread = threading.Thread(target=write)
    thread.start()
    forks = 0
    while forks < 10 or (thread.is_alive() and forks < 200):
        end_of_fork(sys.exit if forks % 5 == 0 else os._exit)
        forks += 1
    thread.join()
    print("uploaded", storage.read("file", len(data)) == data)
    uses: dict[str, Callable[[], object]] = {
        "its storage": lambda: storage.read("file", len(data)),
        "a new one": lambda: open_storage(url).list(""),
        "a loaded step": lambda: holdfast.load(f"{url}/run"),
    }
    for what, use in uses.items():
        print(what, "in a child:", flush=True)
        pid = os.fork()
        if not pid:
            try:
                use()
            except UsageError as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    train(f"{sys.argv[1]}/run")
    fork_during_an_upload(sys.argv[1])
