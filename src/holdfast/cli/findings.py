"""The findings of `holdfast doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

Status: TypeAlias = Literal["ok", "note", "unfit"]

PREFIX: Final = ".holdfast-doctor-"
"""Prefix of the trial's directory. It begins with a dot, so verbs and jobs ignore the directory."""


class Finding(NamedTuple):
    """One thing that was looked at: what was found, and, unless all is well, what that means and what to do."""

    name: str
    status: Status
    text: str
    hint: str = ""


def are_fit(findings: Sequence[Finding]) -> bool:
    """**Pure.** True if nothing among the findings makes the installation or the place unfit."""
    return all(finding.status != "unfit" for finding in findings)
