"""The process of one contender: does what it is told and says how long it took. `python -m benchmarks.worker`."""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from benchmarks.frameworks import FRAMEWORKS
from benchmarks.limits import BareCopy, Limits
from benchmarks.live import THREADS
from benchmarks.messages import Order, Reply, Start
from benchmarks.peers import make_peer
from benchmarks.peers.peer import MissingError
from benchmarks.workloads import make_workload, place_tensors, state_shapes


class Duties:
    """What one kind of contender can be told to do: each method is a verb."""

    note: str = ""

    def open(self, order: Order) -> dict[str, float]:
        """Opens what is to be measured with its memory."""
        return {}

    def close(self, order: Order) -> dict[str, float]:
        """Ends whatever was opened."""
        return {}


class LimitDuties(Duties):
    """Measures the machine."""

    def __init__(self, start: Start) -> None:
        places, size_bytes = place_tensors(state_shapes(make_workload(start.workload, start.scale)))
        self._limits = Limits(Path(start.directory), mmap.mmap(start.memory, size_bytes), places)

    def measure(self, order: Order) -> dict[str, float]:
        """All limits, once."""
        try:
            return {
                "copy": self._limits.copy_seconds(),
                "write": self._limits.write_seconds(),
                "rewrite": self._limits.rewrite_seconds(),
                "read_cold": self._limits.read_cold_seconds(),
                "read_warm": self._limits.read_warm_seconds(),
            }
        finally:
            self._limits.remove()


class PeerDuties(Duties):
    """Saves and restores state that comes from shared memory."""

    def __init__(self, start: Start) -> None:
        self._peer = make_peer(start.contender)
        _limit_threads()
        workload = make_workload(start.workload, start.scale)
        places, size_bytes = place_tensors(state_shapes(workload))
        # Their page tables are filled here, so that no peer pays for that.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(start.memory, size_bytes, flags=flags)
        self._copy = BareCopy(memory, mmap.mmap(start.memory, size_bytes, flags=flags, offset=size_bytes), places)
        self._state = self._peer.make_state(workload, memory)
        self._start = start
        self.note = self._peer.makes_last

    def open(self, order: Order) -> dict[str, float]:
        """Opens the peer."""
        self._peer.open(Path(self._start.directory), self._state, self._start.keep)
        return {}

    def touch(self, order: Order) -> dict[str, float]:
        """Reads all that is saved, as a step of training does before a save."""
        self._state.touch()
        return {}

    def copy(self, order: Order) -> dict[str, float]:
        """One bare copy of the tensors, under the same conditions as a save."""
        return {"copy": self._copy.seconds()}

    def save(self, order: Order) -> dict[str, float]:
        """One save, until it is durable."""
        self._peer.prepare()
        begun_at = time.perf_counter()
        self._peer.save(order.step)
        stall_seconds = time.perf_counter() - begun_at
        wait_seconds = self._peer.wait_copied()
        self._peer.wait_durable()
        return {
            "stall": stall_seconds,
            "held": stall_seconds + wait_seconds,
            "durable": time.perf_counter() - begun_at,
            "settling_saves": self._peer.settling_saves,
        }

    def restore(self, order: Order) -> dict[str, float]:
        """One restore; the values are then where they were before."""
        self._state.forget()
        begun_at = time.perf_counter()
        parts = self._peer.restore(order.step)
        seconds = time.perf_counter() - begun_at
        self._state.come_home()
        return {"restore": seconds, **parts}

    def retain(self, order: Order) -> dict[str, float]:
        """Removes what need not be kept."""
        self._peer.retain(order.step)
        return {}

    def remove(self, order: Order) -> dict[str, float]:
        """Removes a save."""
        self._peer.remove(order.step)
        return {}

    def close(self, order: Order) -> dict[str, float]:
        """Closes the peer."""
        self._peer.close()
        return {}


class TrainingDuties(Duties):
    """Trains, and saves while it does."""

    def __init__(self, start: Start) -> None:
        self._peer = make_peer(start.contender)
        _limit_threads()
        self._training = self._peer.make_training(start.scale)
        self._peer.open(Path(start.directory), self._training.state)

    def train(self, order: Order) -> dict[str, float]:
        """One stretch of training."""
        lost = self._training.measure(self._peer, order.step, order.pairs, order.interval_steps)
        wait = {} if lost.wait_seconds is None else {"wait": lost.wait_seconds}
        return {
            "lost": lost.lost_seconds,
            "step": lost.step_seconds,
            "stall": lost.stall_seconds,
            **wait,
            "size_bytes": self._training.size_bytes,
        }

    def close(self, order: Order) -> dict[str, float]:
        """Closes the peer."""
        self._peer.close()
        return {}


class FitDuties(Duties):
    """Trains with a framework. What it saves by, or that it does not, is the contender."""

    def __init__(self, start: Start) -> None:
        import torch

        from benchmarks.frameworks.fit import make_fit

        # As others do by themselves: numbers too small to be held in full make steps take longer.
        torch.set_flush_denormal(True)
        self._fit = make_fit(start.workload, start.contender, Path(start.directory), start.scale)
        _limit_threads()

    def lose(self, order: Order) -> dict[str, float]:
        """A fit with some saves."""
        return self._fit.measure_saves(order.saves, order.interval_steps)

    def prepare(self, order: Order) -> dict[str, float]:
        """Leaves a checkpoint within an epoch. Others do the same meanwhile."""
        sys.modules["torch"].set_num_threads(1)
        self._fit.prepare(order.step, is_stream=order.is_stream)
        return {}

    def restart(self, order: Order) -> dict[str, float]:
        """Takes the epoch up."""
        return self._fit.measure_restart(order.step, is_stream=order.is_stream)

    def begin(self, order: Order) -> dict[str, float]:
        """Begins an epoch."""
        return self._fit.measure_start(order.step, is_stream=order.is_stream)


class SmallDuties(Duties):
    """Measures what has no state, and no torch."""

    def __init__(self, start: Start) -> None:
        self._directory = Path(start.directory)

    def measure(self, order: Order) -> dict[str, float]:
        """All small figures, once."""
        from benchmarks.small import start_seconds, step_seconds

        return {**start_seconds(), **step_seconds(self._directory)}


def main() -> int:
    """Serves orders until the input ends."""
    # Whatever a peer prints goes elsewhere: the output belongs to the replies.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    orders = sys.stdin.buffer
    duties: Duties
    try:
        start = msgspec.json.decode(orders.readline(), type=Start)
        if start.workload == "small":
            duties = SmallDuties(start)
        elif start.workload == "training":
            duties = TrainingDuties(start)
        elif start.contender == "limits":
            duties = LimitDuties(start)
        elif start.workload in FRAMEWORKS:
            duties = FitDuties(start)
        else:
            duties = PeerDuties(start)
    except MissingError as error:
        _say(replies, Reply(missing=str(error)))
        return 0
    except Exception as error:
        _say(replies, Reply(error=_describe(error)))
        raise
    _say(replies, Reply(note=duties.note))
    for line in orders:
        order = msgspec.json.decode(line, type=Order)
        try:
            _say(replies, Reply(figures=getattr(duties, order.verb)(order)))
        except Exception as error:
            _say(replies, Reply(error=_describe(error)))
            raise
    return 0


def _limit_threads() -> None:
    """Frameworks that a peer has imported compute with as many threads as the others."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(THREADS)


def _say(replies: BinaryIO, reply: Reply) -> None:
    replies.write(msgspec.json.encode(reply) + b"\n")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
