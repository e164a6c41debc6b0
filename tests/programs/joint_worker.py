"""One worker of a job whose saves are tested: a program that needs no framework. Its argument says what befalls it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from file_engine import join_in_directory
from holdfast.errors import FencedError, HoldfastError, PeerError
from holdfast.events import Diverged
from holdfast.testing.cluster_scenarios import say

LIVENESS_SECONDS = 2.0


def main(directory: Path, store: Path, what: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cluster = join_in_directory(store, rank, world_size, timeout_seconds=60)
    arrays: dict[str, Any] = {"shared": np.zeros(200_000), "own": hf.PerWorker(np.zeros(200_000))}
    manager = hf.CheckpointManager(
        directory,
        hf.Checkpoint(**arrays),
        cluster=cluster,
        liveness_seconds=LIVENESS_SECONDS,
        timeout_seconds=60,
        check_replicas=what == "flip",
        sinks=[tell_diverged],
    )
    restored = manager.restore()
    begin = restored.step if restored else 0
    say({"begun": begin})
    for step in range(begin + 1, 100_000):
        if what == "flip" and rank == 2 and step in (3, 4):
            # The last bit of one number among very many, and back.
            arrays["shared"].view(np.uint64)[123_456] ^= 1
        try:
            manager.save(step).wait_committed()
        except HoldfastError as error:
            cause = error.__cause__
            say(
                {
                    "failed": step,
                    "kind": type(cause).__name__,
                    "rank": cause.rank if isinstance(cause, PeerError) else None,
                    "of": cause.kind if isinstance(cause, PeerError) else None,
                    "text": str(cause),
                }
            )
            if what == "full" and step < 5:
                manager.wait()
                if rank == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                continue
            manager.abandon()
            # Others are not to hear a goodbye if it is they that are to find out.
            os._exit(4 if isinstance(cause, FencedError) else 3)
        say({"committed": step})
        if what == "full" and step == 2 and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
        if what in ("full", "flip") and step == 5:
            break
    manager.close()


def tell_diverged(event: hf.events.Event) -> None:
    if isinstance(event, Diverged):
        say({"diverged": event.step, "tensor": event.tensor, "ranks": event.ranks})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
