"""One worker of a job whose cluster is tested: a program. It says which cluster by its first argument."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

from file_engine import join_in_directory
from holdfast.cluster import Cluster, open_cluster
from holdfast.testing.cluster_scenarios import play


def join(kind: str) -> Cluster:
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if kind.startswith("directory:"):
        return join_in_directory(Path(kind.removeprefix("directory:")), rank, world_size, timeout_seconds=60)
    if kind.startswith(("tcp://", "file://")):
        import torch.distributed

        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        torch.distributed.init_process_group(
            "gloo", init_method=kind, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
        )
    elif kind.startswith("jax:"):
        import jax

        jax.distributed.initialize(kind.removeprefix("jax:"), world_size, rank)
    return open_cluster("auto", 60)


if __name__ == "__main__":
    play(join(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    # Frameworks have meetings of their own at the end, to which those that were killed do not come.
    os._exit(0)
