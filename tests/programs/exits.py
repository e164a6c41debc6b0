"""Jobs that are asked to leave in odd surroundings: MODE DIRECTORY [MORE]."""

from __future__ import annotations

import concurrent.futures
import faulthandler
import os
import signal
import sys
import threading
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.events import Event, Warned
from holdfast.preemption import Notice, Signals


def make_state() -> dict[str, Any]:
    return {"value": np.zeros(10)}


def ask_to_leave(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def catch_exits(directory: str, sources: str) -> None:
    preemption: Any = {"auto": "auto", "config": hf.TerminationConfig()}[sources]
    for life in range(2):
        try:
            with hf.resumable(directory, state={"value": life}, save_every=hf.Steps(100), preemption=preemption) as run:
                for step in run.steps(100):
                    if step == 3 * life + 2:
                        ask_to_leave()
        except SystemExit as leaving:
            print(leaving.code, run.step)


def catch_exit_in_block(directory: str) -> None:
    with hf.resumable(directory, state=make_state(), save_every=hf.Steps(100)) as run:
        try:
            for step in run.steps(10):
                if step == 4:
                    ask_to_leave()
        except SystemExit:
            print("caught")


def set_own_handler(directory: str) -> None:
    said: list[int] = []
    with hf.resumable(directory, state=make_state(), save_every=hf.Steps(100)) as run:
        signal.signal(signal.SIGUSR1, lambda *_: said.append(run.step))
        for step in run.steps(10):
            if step < 4:
                ask_to_leave(signal.SIGUSR1)
            else:
                assert said == [0, 1, 2, 3]
                ask_to_leave()


def keep_foreign_handlers(directory: str) -> None:
    def tell(event: Event) -> None:
        if isinstance(event, Warned):
            print(event.text, flush=True)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        faulthandler.register(number, all_threads=False)
    state = make_state()
    with hf.resumable(directory, state=state, save_every=hf.Steps(100), sinks=[tell]) as run:
        for _ in run.steps(3):
            ask_to_leave(signal.SIGUSR1)
    ask_to_leave(signal.SIGUSR1)
    with hf.resumable(directory, state=state, save_every=hf.Steps(100)) as run:
        for step in run.steps(9):
            ask_to_leave(signal.SIGTERM if step == 4 else signal.SIGUSR1)


class Broken:
    def write(self, text: str) -> int:
        raise RuntimeError("no words")

    def flush(self) -> None:
        pass


def lose_errors(directory: str, way: str, number: int) -> None:
    with hf.resumable(directory, state=make_state(), save_every=hf.Steps(100)) as run:
        match way:
            case "closed":
                sys.stderr.close()
            case "none":
                sys.stderr = None
            case "descriptor closed":
                os.close(2)
            case "broken":
                sys.stderr = Broken()
        for step in run.steps(10):
            if step == 4:
                ask_to_leave(number)


def fill_log(directory: str, stream: int, fails: bool) -> None:
    def fail() -> None:
        raise OSError("no room")

    os.dup2(os.open("/dev/full", os.O_WRONLY), stream)
    config = hf.TerminationConfig(save_fn=fail if fails else None)
    with hf.resumable(directory, state=make_state(), save_every=hf.Steps(100), preemption=config) as run:
        for step in run.steps(10):
            print("of the user's")
            if step == 4:
                ask_to_leave()


def train_in_thread(directory: str, api: str, thread: str) -> None:
    def train() -> None:
        w = np.zeros(4)
        config = hf.TerminationConfig(sources=[], termination_watcher_fn=lambda: w[0] > 0)

        def step() -> None:
            w[0] += 1

        try:
            if api == "resumable":
                with hf.resumable(directory, w=w, preemption=config) as run:
                    for _ in run.steps(10**9):
                        step()
            else:
                with hf.CheckpointManager(directory, hf.Checkpoint(w=w)) as manager:
                    with hf.PreemptionCheckpointHandler(manager, config) as handler:
                        while True:
                            handler.run(step)
        finally:
            print("unwound", flush=True)

    if thread == "Thread":
        training = threading.Thread(target=train)
        training.start()
        training.join()
        return
    with concurrent.futures.ThreadPoolExecutor() as pool:
        future = pool.submit(train)
    if thread == "pool that is asked":
        future.result()
    if thread == "pool whose exit is caught":
        try:
            future.result()
        except SystemExit as leaving:
            sys.exit(int(leaving.code or 0) + 1)


def listen_in_child() -> None:
    def take(notice: Notice) -> bool:
        heard.append(notice)
        return True

    heard: list[Notice] = []
    outer = Signals()
    outer.open(lambda notice: True)
    child = os.fork()
    if child == 0:
        inner = Signals()
        inner.open(take)
        signal.raise_signal(signal.SIGTERM)
        os._exit(len(heard))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["catch exits", directory, sources]:
            catch_exits(directory, sources)
        case ["catch exit in block", directory]:
            catch_exit_in_block(directory)
        case ["set own handler", directory]:
            set_own_handler(directory)
        case ["keep foreign handlers", directory]:
            keep_foreign_handlers(directory)
        case ["lose errors", directory, way, number]:
            lose_errors(directory, way, int(number))
        case ["fill log", directory, stream, code]:
            fill_log(directory, int(stream), fails=code == "74")
        case ["train in thread", directory, api, thread]:
            train_in_thread(directory, api, thread)
        case ["listen in child"]:
            listen_in_child()
        case _:
            raise SystemExit(f"what is {sys.argv[1:]}?")
