"""One worker of a job: carries out orders, with the others. torchrun starts it with the number of a port."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from benchmarks.peers.peer import MissingError, TorchPeer
from benchmarks.results import LIMITS
from benchmarks.several_workers.bare import BareWorker
from benchmarks.several_workers.orders import WorkerReply, WorkersOrder
from benchmarks.several_workers.state import WorkersState, make_workers_state
from benchmarks.several_workers.training import WorkersTraining
from benchmarks.several_workers.ways import make_way

_MEETING_SECONDS: Final = 600.0
"""The process that compares has shorter limits; this one only sees to it that nothing stays."""


class WorkerDuties:
    """What a worker can be told to do: each method is a verb."""

    def __init__(self) -> None:
        self._state: WorkersState | None = None
        self._training: WorkersTraining | None = None
        self._ways: dict[str, TorchPeer] = {}
        self._bare: BareWorker | None = None

    def open(self, order: WorkersOrder) -> WorkerReply:
        """**Collective.** Makes the state, unless an order before this one has, and opens a way of saving it."""
        assert order.setup is not None
        if self._state is None:
            self._state = make_workers_state(order.setup)
        pieces = [(part.data_ptr(), part.nbytes) for part in self._state.parts()]
        held = {"held_bytes": [float(sum(length for _, length in pieces))], "tensors": [float(len(pieces))]}
        if order.way != LIMITS:
            return self._reply(figures=held, note=self._open_way(order, self._state))
        directory = Path(order.directory)
        directory.mkdir(parents=True, exist_ok=True)
        rank, workers = dist.get_rank(), dist.get_world_size()
        self._bare = BareWorker(directory, pieces, rank, workers, dist.barrier, is_replicated=order.setup.is_replicated)
        return self._reply(figures=held)

    def open_training(self, order: WorkersOrder) -> WorkerReply:
        """**Collective.** Makes a loop, unless an order before this one has, and opens a way of saving it."""
        if self._training is None:
            self._training = WorkersTraining(order.scale)
        return self._reply(note=self._open_way(order, self._training.state))

    def bare(self, order: WorkersOrder) -> WorkerReply:
        """**Collective.** What the machine can do; the reads alone where there are no saves."""
        assert self._bare is not None
        figures = self._bare.measure() if order.count else self._bare.measure_read()
        return self._reply(figures={name: [seconds] for name, seconds in figures.items()})

    def change(self, order: WorkersOrder) -> WorkerReply:
        """Gives the state the values of a version, as training changes it."""
        assert self._state is not None
        self._state.change(order.version)
        return self._reply()

    def save(self, order: WorkersOrder) -> WorkerReply:
        """**Collective.** Saves, each right after the one before is durable or a while later."""
        assert self._state is not None
        way = self._ways[order.way]
        figures: dict[str, list[float]] = {"stall": [], "durable": []}
        for step in range(order.step, order.step + order.count):
            if order.pause_seconds:
                time.sleep(order.pause_seconds)
            way.prepare()
            if step == order.step:
                self._state.touch()
            dist.barrier()
            begun_at = time.perf_counter()
            way.save(step)
            stall_seconds = time.perf_counter() - begun_at
            figures["stall"].append(stall_seconds + way.wait_copied())
            way.wait_durable()
            figures["durable"].append(time.perf_counter() - begun_at)
        return self._reply(figures=figures)

    def retain(self, order: WorkersOrder) -> WorkerReply:
        """**Collective.** Removes all saves but the newest."""
        self._ways[order.way].retain(order.step)
        return self._reply()

    def restore(self, order: WorkersOrder) -> WorkerReply:
        """**Collective.** Restores in place, and compares."""
        assert self._state is not None
        way = self._ways[order.way]
        way.prepare()
        self._state.wipe()
        dist.barrier()
        begun_at = time.perf_counter()
        way.restore(order.step)
        seconds = time.perf_counter() - begun_at
        wrong = self._state.differing(order.version)
        if wrong:
            raise ValueError(f"{len(wrong)} tensors did not come back as they were saved, {wrong[0]} for one")
        return self._reply(figures={"restore": [seconds]})

    def train(self, order: WorkersOrder) -> WorkerReply:
        """**Collective.** Trains, and saves while it does."""
        assert self._training is not None
        lost = self._training.measure(self._ways[order.way], order.step, order.count, order.interval_steps)
        size_bytes = float(self._training.size_bytes)
        return self._reply(
            figures={
                "lost": [lost.lost_seconds],
                "step": [lost.step_seconds],
                "stall": [lost.stall_seconds],
                "wait": [lost.wait_seconds or 0.0],
                "held_bytes": [size_bytes],
            }
        )

    def close(self, order: WorkersOrder) -> WorkerReply:
        """**Collective.** Ends what was opened, and lets go of the state."""
        for way in self._ways.values():
            way.close()
        if self._bare is not None:
            self._bare.close()
        self._ways, self._bare, self._state, self._training = {}, None, None, None
        gc.collect()
        return self._reply()

    def _open_way(self, order: WorkersOrder, state: WorkersState) -> str:
        way = make_way(order.way)
        directory = Path(order.directory)
        directory.mkdir(parents=True, exist_ok=True)
        way.open(directory, state, keep=1)
        self._ways[order.way] = way
        return way.makes_last

    @staticmethod
    def _reply(*, figures: dict[str, list[float]] | None = None, note: str = "") -> WorkerReply:
        return WorkerReply(rank=dist.get_rank(), pid=os.getpid(), figures=figures or {}, note=note)


def main(port: int) -> int:
    """Serves orders until there are no more."""
    rank = int(os.environ["RANK"])
    with socket.create_connection(("127.0.0.1", port)) as line, line.makefile("rwb", buffering=0) as channel:
        channel.write(msgspec.json.encode(WorkerReply(rank=rank, pid=os.getpid())) + b"\n")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
        dist.init_process_group("gloo", timeout=timedelta(seconds=_MEETING_SECONDS))
        duties = WorkerDuties()
        for message in channel:
            order = msgspec.json.decode(message, type=WorkersOrder)
            try:
                reply = getattr(duties, order.verb)(order)
            except MissingError as error:
                reply = WorkerReply(rank=rank, pid=os.getpid(), missing=str(error))
            except BaseException as error:  # noqa: BLE001  Some of DCP's errors are no `Exception`.
                reply = WorkerReply(rank=rank, pid=os.getpid(), error=_describe(error))
            channel.write(msgspec.json.encode(reply) + b"\n")
    # Without the waits at an end that is in order: the one who compares ends the others as well.
    sys.stderr.flush()
    os._exit(0)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


if __name__ == "__main__":
    main(int(sys.argv[1]))
