"""Starts workers with the agent of torchrun, but forks them: torch is imported once, not by each start of each.

python tests/programs/elastic.py PROGRAM WORKERS RESTARTS ARGUMENT...
python tests/programs/elastic.py PROGRAM WORKERS RESTARTS ARGUMENT... -- WORKERS RESTARTS ARGUMENT... -- ...

PROGRAM is a module beside this one; its `main` is called with the arguments. Or it is the path of a program, which is
run as one and gets no arguments. Several jobs run one after the other.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import groupby

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main(program: str, *words: str) -> None:
    train = program_at(program) if program.endswith(".py") else import_module(program).main
    # An optimizer imports it with its first step, and each worker would anew.
    import_module("torch._dynamo")
    for is_end, job in groupby(words, "--".__eq__):
        if not is_end:
            launch(train, *job)


def program_at(path: str) -> Callable[..., object]:
    def run() -> None:
        runpy.run_path(path, run_name="__main__")

    return run


def launch(train: Callable[..., object], workers: str, restarts: str, *arguments: str) -> None:
    # While a worker connects, a thread of the agent looks up its name, under a lock of the C library. A worker that is
    # forked meanwhile inherits that lock, and would wait for it for ever. (torchrun itself does not fork its agent.)
    all_forked = multiprocessing.get_context("fork").Barrier(int(workers))

    def begin(*given: str) -> object:
        all_forked.wait()
        return train(*given)

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(workers),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=int(restarts),
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(config, begin)(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
