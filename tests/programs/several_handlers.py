"""Handlers of one manager, one of which leaves at step 5: MODE DIRECTORY."""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np

import holdfast as hf
from holdfast.events import Event, NoticeHeard

STATE = {"values": np.zeros(100)}
heard = threading.Semaphore(0)


def hear(event: Event) -> None:
    if isinstance(event, NoticeHeard):
        heard.release()


MANAGER = hf.CheckpointManager(sys.argv[2], hf.Checkpoint(state=STATE), sinks=[hear])


def make_handler() -> hf.PreemptionCheckpointHandler:
    return hf.PreemptionCheckpointHandler(MANAGER)


def step() -> None:
    STATE["values"] += 1


def ask_to_leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def ask_until_both_have_acted() -> None:
    """A handler hears the second signal after it has dealt with the first one, as far as it does so beside the loop."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
        for _ in range(2):
            heard.acquire()


def wait_for_the_end() -> None:
    threading.Event().wait()


def run_one_after_the_other(*, is_first_life: bool = False) -> None:
    with MANAGER:
        with make_handler() as handler:
            before = handler.total_run_calls
            for _ in range(5):
                handler.run(step)
        if is_first_life:
            MANAGER.save(before + 5)
            sys.exit(0)
        with make_handler():
            ask_to_leave()
            wait_for_the_end()


def run_one_within_the_other() -> None:
    with MANAGER, make_handler() as outer:
        for _ in range(5):
            outer.run(step)
        with make_handler() as inner:
            # The state may be that of no step here: nothing is saved before it is known to be one's.
            ask_until_both_have_acted()
            inner.run(step)


def run_one_beside_an_idle_one() -> None:
    def take_long_step() -> None:
        step()
        ask_until_both_have_acted()  # In which the idle one could leave.
        step()

    with MANAGER, make_handler() as active, make_handler():
        for _ in range(4):
            active.run(step)
        active.run(take_long_step)
        active.run(step)


def end_idle_one_within_a_step() -> None:
    with MANAGER, make_handler() as active, make_handler():
        for number in active.steps(9):
            step()
            if number == 4:
                ask_to_leave()
                break


def pause_both() -> None:
    with MANAGER, make_handler() as active, make_handler():
        for _ in range(5):
            active.run(step)
        with active.checkpointable():
            ask_to_leave()
            wait_for_the_end()


def save_by_hand() -> None:
    with MANAGER:
        with make_handler() as handler:
            for _ in range(5):
                handler.run(step)
        MANAGER.save(5)
        with make_handler():
            ask_to_leave()
            wait_for_the_end()


if __name__ == "__main__":
    match sys.argv[1]:
        case "first of two lives":
            run_one_after_the_other(is_first_life=True)
        case "one after the other":
            run_one_after_the_other()
        case "one within the other":
            run_one_within_the_other()
        case "one beside an idle one":
            run_one_beside_an_idle_one()
        case "the idle one ends within a step":
            end_idle_one_within_a_step()
        case "both pause":
            pause_both()
        case "saved by hand":
            save_by_hand()
        case mode:
            raise SystemExit(f"what is {mode}?")
