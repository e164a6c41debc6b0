"""Fixtures that several files of tests use."""

pytest_plugins = ("command_line",)
