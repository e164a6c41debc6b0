"""One of several workers with the same state in a bucket: `passing_workers.py URL save|restore`.

It prints the digest of its state, and after a restore the bytes and the requests that it has read from the bucket.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter

import numpy as np
import torch.distributed as dist

import holdfast
from holdfast.storage.objects import ObjectStorage

SIZE_BYTES = 256 << 20


def main(url: str, doing: str) -> None:
    dist.init_process_group("gloo")
    state = {f"layer{number}": np.arange(SIZE_BYTES // 64) + number for number in range(8)}
    storage = holdfast.open_storage(url)
    assert isinstance(storage, ObjectStorage)
    count, lock, fetch = Counter[str](), threading.Lock(), storage.fetch

    def fetch_and_count(path: str, begin: int, length_bytes: int) -> memoryview:
        with lock:
            count["bytes"] += length_bytes
            count["requests"] += 1
        return fetch(path, begin, length_bytes)

    storage.fetch = fetch_and_count  # type: ignore[method-assign]
    with holdfast.CheckpointManager(storage, holdfast.Checkpoint(state=state), begin_anew=doing == "save") as manager:
        if doing == "save":
            manager.save(1)
        else:
            for array in state.values():
                array[...] = 0
            manager.restore()
    digest = hashlib.sha256(b"".join(array.tobytes() for array in state.values())).hexdigest()
    print(digest, *([count["bytes"], count["requests"]] if doing == "restore" else []), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
