"""A training job for tests that send it signals; its options are JSON in the first argument.

It stops where it is told to until a line comes on standard input, and says "paused" first, so that a test knows where
it is. What it has learned depends on every step and on a random generator, and is printed at the end.

It may be one of several workers, which meet in a directory. Then what it has learned is its own; and where the options
say so, the workers wait for each other in each step, as in a collective.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from file_engine import join_in_directory
from holdfast.cluster import AloneCluster, Cluster
from holdfast.cluster.store import JoinedCluster
from holdfast.errors import StorageError
from holdfast.events import Event
from holdfast.format.names import MANIFEST_NAME
from holdfast.storage import Entry, LocalStorage
from holdfast.storage.local.streams import LocalWriter

OPTIONS: dict[str, Any] = json.loads(sys.argv[1])
LONGEST_SECONDS = 100
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def say(*words: object) -> None:
    # In one piece: events are told on several threads.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def pause(place: object) -> None:
    if place in OPTIONS.get("pause", []):
        say("paused")
        # Woken now and then: Python handles a signal that comes just before a call that waits only after that call.
        while not select.select([0], [], [], 0.02)[0]:
            pass
        if not os.read(0, 1):
            # The test does not go on: it waits for the end.
            while True:
                time.sleep(0.02)


class UnspeakableError(Exception):
    """An error that cannot be sent anywhere, nor even say what it is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no words")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("the loss is no number"),
    "UnspeakableError": UnspeakableError,
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "StopIteration": StopIteration,
}


class Learned:
    """What is trained."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.values = np.zeros(OPTIONS.get("size", 1000))
        self.steps = 0

    def step(self) -> int:
        # The pause is amid the step, when half of the state has changed.
        self.values += random.random()
        pause(self.steps)
        if self.steps == OPTIONS.get("raise_in"):
            raise ERRORS[OPTIONS["error"]]()
        time.sleep(OPTIONS.get("step_seconds", 0.0))  # How long a step takes is what some tests are about.
        if OPTIONS.get("lockstep"):
            self.meet()
        self.values *= 1.0001
        self.steps += 1
        if self.steps % 10 == 0:
            say("step", self.steps)
        return self.steps

    def meet(self) -> None:
        """Waits until all workers are in this step, as a collective does: for ever, if one of them never comes."""
        self.cluster.set(f"step/{self.steps}/{RANK}", b"")
        rank = 0
        while rank < WORLD_SIZE:
            try:
                self.cluster.wait_get(f"step/{self.steps}/{rank}", 1000)
                rank += 1
            except Exception:
                if OPTIONS.get("swallow") != "step":
                    raise

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pause("restore")
        self.values = state["values"]
        self.steps = state["steps"]


class SlowStorage(LocalStorage):
    """A disk that takes its time for every file."""

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        time.sleep(OPTIONS["disk_seconds"])
        return super().create(path, size_bytes)


class SilentStorage(LocalStorage):
    """Storage that does not answer any more when it is first looked at, or a step is to be committed, or has been."""

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        if "looking" in OPTIONS.get("pause", []):
            pause("looking")
            OPTIONS["pause"].remove("looking")
            if OPTIONS.get("look_fails"):
                raise StorageError("it is gone", path=path)
        return super().list(path, deep=deep)

    def publish(self, path: str, data: bytes) -> bool:
        if path.startswith("step-") and path.endswith(MANIFEST_NAME):
            pause("publishing")
        published = super().publish(path, data)
        if path.startswith("step-") and path.endswith(MANIFEST_NAME):
            pause("published")
        return published


class SlowCluster(JoinedCluster):
    """The workers of a job for one that is slow to go on when all have met for the first time."""

    def add(self, key: str, amount: int) -> int:
        total = super().add(key, amount)
        if key.endswith("meeting/1/read"):
            pause("met")
        return total


def limit_files() -> None:
    # Python would leave the compiled form of a module behind cut off, and every later process would fail to import it.
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (OPTIONS["file_bytes"], resource.RLIM_INFINITY))


def tell(event: Event) -> None:
    # A disk that is full until something has happened, or from then on.
    if OPTIONS.get("file_bytes_until") == type(event).__name__:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if OPTIONS.get("file_bytes_from") == type(event).__name__:
        limit_files()
    say("event", type(event).__name__, getattr(event, "step", ""))


def evaluate(learned: Learned, block: contextlib.AbstractContextManager[Any]) -> None:
    """At the end of the step, and within the block that the job's options ask for."""
    if learned.steps - 1 in OPTIONS.get("evaluate", []):
        with block if OPTIONS.get("checkpointable") else contextlib.nullcontext():
            if OPTIONS.get("change"):
                learned.values += 1
            # The generator is used here; nobody may notice after a restart.
            random.random()
            pause("evaluation")
            if OPTIONS.get("change"):
                learned.values -= 1
        if OPTIONS.get("change_behind"):
            learned.values += random.random()
            pause("behind")


SAVE: list[Callable[[], Any]] = []
SAVED: list[int] = []


def save_or_raise() -> Any:
    SAVED.append(1)
    if len(SAVED) not in OPTIONS.get("failing_saves", [len(SAVED)]):
        return SAVE[0]()
    if OPTIONS["save_fn"] in ERRORS:
        raise ERRORS[OPTIONS["save_fn"]]()
    if OPTIONS["save_fn"] == "raises":
        raise ZeroDivisionError("of the user's")
    if OPTIONS["save_fn"] == "exits":
        sys.exit(3)
    pause("save_fn")
    return SAVE[0]()


def make_termination() -> hf.TerminationConfig:
    options: dict[str, Any] = {"grace_period": OPTIONS.get("grace")}
    calls: list[int] = []

    def exit_once_for_good() -> None:
        calls.append(1)
        say("exit_fn")
        if len(calls) > OPTIONS["returns"]:
            if "exit_error" in OPTIONS:
                raise ERRORS[OPTIONS["exit_error"]]()
            sys.exit(7)

    def watch() -> bool:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError("a watcher that raises")
        return True

    def advise() -> hf.preemption.Notice | None:
        if not Path(OPTIONS["advice"]).exists():
            return None
        return hf.preemption.Notice(source="advice", text="save now", demand=hf.preemption.Demand.SAVE)

    if "advice" in OPTIONS:
        options["termination_watcher_fn"] = advise
    if "returns" in OPTIONS:
        options["exit_fn"] = exit_once_for_good
    if "save_fn" in OPTIONS:
        options["save_fn"] = save_or_raise
    if OPTIONS.get("watcher"):
        options["termination_watcher_fn"] = watch
    if "file" in OPTIONS:
        options["sources"] = [hf.preemption.FileAppears(OPTIONS["file"], interval_seconds=0.01)]
    if "exit_code" in OPTIONS:
        options["exit_code"] = OPTIONS["exit_code"]
    return hf.TerminationConfig(**options)


def with_resumable(storage: Any, learned: Learned, cluster: Cluster) -> None:
    with hf.resumable(
        storage,
        learned=hf.PerWorker(learned),
        cluster=cluster,
        liveness_seconds=OPTIONS.get("liveness", 15.0),
        timeout_seconds=OPTIONS.get("timeout", 1800.0),
        rng=hf.RNG(),
        save_every=hf.Steps(OPTIONS.get("every", 1000)),
        keep=hf.All(),
        sinks=[tell],
        preemption=make_termination(),
    ) as run:
        pause("before")
        for _ in run.steps(OPTIONS["total"]):
            learned.step()
            if learned.steps == OPTIONS.get("return_after"):
                break
            evaluate(learned, run.checkpointable())
            if run.should_stop():
                say("should stop")
        pause("after")
    pause("outside")


def with_handler(storage: Any, learned: Learned, cluster: Cluster) -> None:
    checkpoint = hf.Checkpoint(learned=hf.PerWorker(learned), rng=hf.RNG())
    with hf.CheckpointManager(
        storage,
        checkpoint,
        save_every=hf.Steps(OPTIONS.get("every", 1000)),
        keep=hf.All(),
        sinks=[tell],
        cluster=cluster,
        liveness_seconds=OPTIONS.get("liveness", 15.0),
        timeout_seconds=OPTIONS.get("timeout", 1800.0),
    ) as manager:
        with hf.PreemptionCheckpointHandler(manager, termination_config=make_termination()) as handler:
            say("calls", handler.total_run_calls)
            SAVE.append(lambda: manager.save(handler.total_run_calls))
            pause("before")
            try:
                LOOPS[OPTIONS["loop"]](handler, learned)
            finally:
                pause("finally")
                time.sleep(OPTIONS.get("finally_seconds", 0.0))
            if OPTIONS.get("saves_last"):
                manager.save(learned.steps)
            pause("after")
        manager.wait()
        if learned.steps not in manager.steps():
            manager.save(learned.steps)
    pause("outside")


def loop_run(handler: hf.PreemptionCheckpointHandler, learned: Learned) -> None:
    while handler.total_run_calls < OPTIONS["total"]:
        if learned.steps == OPTIONS.get("return_after"):
            return
        try:
            assert handler.run(learned.step) == handler.total_run_calls == learned.steps
        except Exception:
            if OPTIONS.get("swallow") != "run":
                raise
        evaluate(learned, handler.checkpointable())


def loop_steps(handler: hf.PreemptionCheckpointHandler, learned: Learned) -> None:
    for step in handler.steps(OPTIONS["total"]):
        assert learned.step() == step + 1
        if step in OPTIONS.get("evaluate", []):
            evaluate(learned, handler.checkpointable())


def loop_of_ones_own(handler: hf.PreemptionCheckpointHandler, learned: Learned) -> None:
    while handler.total_run_calls < OPTIONS["total"]:
        learned.step()
        handler.save_checkpoint_if_preempted()
        evaluate(learned, handler.checkpointable())


LOOPS: dict[str, Callable[[hf.PreemptionCheckpointHandler, Learned], None]] = {
    "run": loop_run,
    "steps": loop_steps,
    "own": loop_of_ones_own,
}


def main() -> None:
    # Whoever waits for this process waits no longer than that.
    signal.alarm(LONGEST_SECONDS)
    if "signals_before" in OPTIONS:
        signal.signal(signal.SIGTERM, lambda number, frame: say("mine"))
    random.seed(1 + RANK)
    cluster: Cluster = AloneCluster()
    if WORLD_SIZE > 1:
        kind = SlowCluster if "met" in OPTIONS.get("pause", []) else JoinedCluster
        cluster = join_in_directory(Path(OPTIONS["store"]), RANK, WORLD_SIZE, timeout_seconds=60, kind=kind)
    storage: Any = OPTIONS["directory"]
    if "disk_seconds" in OPTIONS:
        storage = SlowStorage(storage)
    if {"looking", "publishing", "published"} & set(OPTIONS.get("pause", [])):
        storage = SilentStorage(storage)
    learned = Learned(cluster)
    if "file_bytes" in OPTIONS and "file_bytes_from" not in OPTIONS:
        limit_files()
    if OPTIONS.get("loop", "resumable") == "resumable":
        with_resumable(storage, learned, cluster)
    else:
        with_handler(storage, learned, cluster)
    say("learned", learned.steps, hashlib.sha256(learned.values.tobytes()).hexdigest(), random.random())


if __name__ == "__main__":
    main()
