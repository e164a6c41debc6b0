"""What all tests have: the fixtures of several files, how examples are found, and what takes long is left out."""

import os
import signal

import hypothesis
import pytest

pytest_plugins = ("command_line",)

# How long an example takes says nothing but how busy the machine is. The gate tries the same examples each time, so
# that what fails there is what was changed; `make crash` looks for others.
IS_LONG = "HOLDFAST_LONG" in os.environ
hypothesis.settings.register_profile(
    "holdfast",
    deadline=None,
    derandomize=not IS_LONG,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("holdfast")

# Threads that compute wait for each other without taking a core: on a machine with other work, as this one is during the
# tests, they take it from the thread that they wait for, and one step of a small model takes seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Who starts a program with `&` from a script has it ignore Ctrl-C, and whoever it starts; many tests send that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what is marked as long, unless that is asked for."""
    if IS_LONG:
        return
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="takes long: `make crash` runs it"))
