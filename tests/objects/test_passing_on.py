"""Workers that restore the same from a bucket: they read it once together, and pass it on to each other."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.cluster.protocol import Cluster
from holdfast.storage.objects import ObjectStorage
from memory_engine import MemoryEngine, numpy_is_known, run_workers

__all__ = ["numpy_is_known"]
pytestmark = pytest.mark.usefixtures("numpy_is_known")

SIZE_BYTES = 48 << 20
STAGE_BYTES = 8 << 20


class CountedStorage(ObjectStorage):
    """Counts the bytes that are read by ranges."""

    def __init__(self) -> None:
        super().__init__(f"memory-objects://{uuid.uuid4().hex}", MemoryStore())
        self.lock = threading.Lock()
        self.read_bytes = 0

    def fetch(self, path: str, begin: int, length_bytes: int) -> memoryview:
        with self.lock:
            self.read_bytes += length_bytes
        return super().fetch(path, begin, length_bytes)


def make_state(seed: int) -> dict[str, np.ndarray]:
    large = {f"layer{number}": np.arange(SIZE_BYTES // 32) + seed + number for number in range(4)}
    return {**large, "small": np.arange(100) * seed, "matrix": np.full((30, 40), seed)}


def make_objects(rank: int, seed: int) -> dict[str, dict[str, Any]]:
    """Returns what all workers have, what every two of them have, and what each has by itself."""
    stage = {"weights": np.arange(STAGE_BYTES // 8) * seed + rank // 2}
    own = {"rank": holdfast.PerWorker(np.full(10, float(rank * seed)))}
    return {"state": make_state(seed), f"stage{rank // 2}": stage, "own": own}


def save(storage: ObjectStorage, count: int) -> None:
    def work(cluster: Cluster) -> None:
        checkpoint = holdfast.Checkpoint(**make_objects(cluster.rank, 7))
        with holdfast.CheckpointManager(storage, checkpoint, cluster=cluster) as manager:
            manager.save(1)

    run_workers(count, work)


def restore(cluster: Cluster, storage: ObjectStorage) -> list[str]:
    """Restores as one worker, checks every value, and returns what is said of the others."""
    objects = make_objects(cluster.rank, 3)
    said: list[str] = []
    with holdfast.CheckpointManager(
        storage, holdfast.Checkpoint(**objects), cluster=cluster, sinks=[lambda event: said.append(str(event))]
    ) as manager:
        manager.restore()
    for name, expected in make_objects(cluster.rank, 7).items():
        for leaf, array in expected.items():
            found = objects[name][leaf]
            if name == "own":
                array, found = array.value, found.value
            assert np.array_equal(found, array), (name, leaf)
    return [text for text in said if "did not pass on" in text]


class Detour(MemoryEngine):
    """Leads who connects to one worker through a bad network: `fault` is what happens to the bytes."""

    def __init__(self, rank: int, fault: Callable[[socket.socket, socket.socket], None]) -> None:
        super().__init__()
        self._rank, self._fault = rank, fault
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)

    def set(self, key: str, value: bytes) -> None:
        if re.search(rf"passing-\d+/{self._rank}$", key):
            offer = json.loads(value)
            there = offer["host"], offer["port"]
            threading.Thread(target=self._accept, args=(there,), daemon=True).start()
            offer["host"], offer["port"] = self._listener.getsockname()
            value = json.dumps(offer).encode()
        super().set(key, value)

    def close(self) -> None:
        self._listener.close()

    def _accept(self, there: tuple[str, int]) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(near, there), daemon=True).start()

    def _pass_on(self, near: socket.socket, there: tuple[str, int]) -> None:
        with closing(near), closing(socket.create_connection(there)) as far:
            with suppress(OSError):
                self._fault(near, far)


def pass_bytes(near: socket.socket, far: socket.socket, size_bytes: int) -> None:
    while size_bytes and (data := near.recv(min(size_bytes, 1 << 16))):
        far.sendall(data)
        size_bytes -= len(data)


def falsify(near: socket.socket, far: socket.socket) -> None:
    pass_bytes(near, far, 5_000_000)
    data = near.recv(1)
    far.sendall(bytes([data[0] ^ 1]))
    pass_bytes(near, far, 1 << 40)


def die(near: socket.socket, far: socket.socket) -> None:
    pass_bytes(near, far, 5_000_000)


def talk_nonsense(near: socket.socket, far: socket.socket) -> None:
    pass_bytes(near, far, 36)
    far.sendall(b"GET / HTTP/1.1\r\n\r\n")
    near.recv(1)


def know_no_secret(near: socket.socket, far: socket.socket) -> None:
    far.sendall(b"0" * 32 + struct.pack("<I", 1))
    far.recv(1)


def stall(near: socket.socket, far: socket.socket) -> None:
    pass_bytes(near, far, 5_000_000)
    far.recv(1)


def test_four_workers_read_one_copy() -> None:
    storage = CountedStorage()
    save(storage, 4)
    storage.read_bytes = 0
    engine = MemoryEngine()
    assert run_workers(4, lambda cluster: restore(cluster, storage), engine) == [[]] * 4
    assert storage.read_bytes < 1.05 * (SIZE_BYTES + 2 * STAGE_BYTES)
    assert not [key for key in engine.keys if "passing" in key]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param(falsify, "do not match their digest", id="wrong_bytes"),
        pytest.param(die, "the connection ended", id="die", marks=pytest.mark.long),
        pytest.param(talk_nonsense, "something else than pieces", id="nonsense", marks=pytest.mark.long),
        pytest.param(know_no_secret, "could not be reached", id="no_secret", marks=pytest.mark.long),
        pytest.param(stall, "too slow", id="stall", marks=pytest.mark.long),
    ],
)
def test_a_worker_reads_itself_what_does_not_come(
    fault: Callable[[socket.socket, socket.socket], None], why: str
) -> None:
    storage = CountedStorage()
    save(storage, 3)
    storage.read_bytes = 0
    with closing(Detour(2, fault)) as engine:
        said = run_workers(3, lambda cluster: restore(cluster, storage), engine)
    assert [len(warnings) for warnings in said] == [0, 0, 2]
    assert all(why in warning for warning in said[2])
    assert storage.read_bytes < 2 * (SIZE_BYTES + 2 * STAGE_BYTES)
