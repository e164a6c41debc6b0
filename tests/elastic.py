"""Starts workers with the agent of torchrun, but forks them: torch is imported once, not by each start of each.

python tests/elastic.py PROGRAM WORKERS RESTARTS ARGUMENT...

PROGRAM is a module beside this one; its `main` is called with the arguments.
"""

from __future__ import annotations

import sys
from importlib import import_module

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main(program: str, workers: int, restarts: int, *arguments: str) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",
    )
    train = import_module(program).main
    # An optimizer imports it with its first step, and each worker would anew.
    import_module("torch._dynamo")
    elastic_launch(config, train)(*arguments)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
