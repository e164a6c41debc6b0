"""Fixtures that several files of tests use."""

import signal

pytest_plugins = ("command_line",)

# Who starts a program with `&` from a script has it ignore Ctrl-C, and whoever it starts; many tests send that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
