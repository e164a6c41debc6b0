"""What all tests have: the fixtures of several files, how examples are found, and what takes long is left out."""

import gc
import os
import signal

import hypothesis
import pytest

from places import SUPPORT
from repetitions import repeated

pytest_plugins = (
    "command_line",
    "last_words",
    "left_open",
    "memory_engine",
    "s3_server",
    "second_run",
)

# How long an example takes says nothing but how busy the machine is. The gate tries the same examples each time, so
# that what fails there is what was changed; `make crash` looks for others.
IS_LONG = "HOLDFAST_LONG" in os.environ
hypothesis.settings.register_profile(
    "holdfast",
    deadline=None,
    max_examples=repeated(100, in_gate=30),
    derandomize=not IS_LONG,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("holdfast")

# Threads that compute are to wait for each other without taking a core: where others work as well, as during the tests,
# it is taken from the thread that they wait for, and one step of a small model takes seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Many tests start a second job beside a first one on purpose, to see that one is fenced; `test_owning.py` shows that it
# is refused without this.
os.environ["HOLDFAST_TAKE_OVER"] = "1"
# A process beside each run of each test would take a minute in all; the tests of watchdogs turn it on.
os.environ["HOLDFAST_WATCHDOG"] = "off"

# Where it is set, a program that prints to a full disk fails in `print`; where not, at its end. What the tests start is
# to be the same wherever they run: the latter, as it comes.
os.environ.pop("PYTHONUNBUFFERED", None)

# Each program that a test starts finds what the tests share, wherever it lies itself.
paths = [str(SUPPORT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(paths)))

# Who starts a program with `&` from a script has it ignore Ctrl-C, and whoever it starts; many tests send that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what is marked as long, unless that is asked for; and orders the files.

    Several processes of pytest take turns at the tests: one slow test that begins last keeps the others waiting, so
    slow files come first. Those of benchmarks, the demo and the examples come last: the others tell more, and sooner.
    """
    _order_files(items)
    _skip_without_cuda([item for item in items if item.get_closest_marker("cuda") is not None])
    if IS_LONG:
        return
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="takes long: `make crash` runs it"))


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        reason = f"torch {torch.__version__} sees no CUDA device: `make gpu` runs it on a machine that has one"
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Has the collector pass over what was imported and collected: to look through all of it takes half a second.

    Many tests ask the collector whether something is gone, and what these make is looked at as ever.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # Python looks through all again when a quarter has been added to what it saw last: to nothing, now.


def _order_files(items: list[pytest.Item]) -> None:
    """In each of the equal shares that processes begin with. A file stays whole: its tests share set-ups."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    last = {item.path for item in items if item.path.parent.name in ("benchmarks", "examples")}
    first_files, last_files = sorted(slow - last), [*sorted(last & slow), *sorted(last - slow)]
    others = [item for item in items if item.path not in slow | last]
    size = -(-len(items) // processes)
    shares = []
    for number in range(processes):
        first = [item for item in items if item.path in first_files[number::processes]]
        end = [item for file in last_files[number::processes] for item in items if item.path == file]
        count = max(size - len(first) - len(end), 0)
        shares.append([*first, *others[:count], *end])
        del others[:count]
    items[:] = [*(item for share in shares for item in share), *others]
