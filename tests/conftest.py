"""Fixtures that several files of tests use."""

import signal

from hypothesis import HealthCheck, settings

pytest_plugins = ("command_line",)

# Who starts a program with `&` from a script has it ignore Ctrl-C, and whoever it starts; many tests send that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine any example may take long, and that says nothing of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
