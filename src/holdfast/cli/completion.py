"""Completion in a shell: the script, and what is offered for `RUN` and `RUN@STEP`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar, Final

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

from holdfast.catalog import StoredRun
from holdfast.catalog.named_step import LATEST
from holdfast.cli.target import find_runs
from holdfast.errors import HoldfastError
from holdfast.format.names import parse_step_directory
from holdfast.storage import LocalStorage, open_storage

COMPLETE_VARIABLE: Final = "_HOLDFAST_COMPLETE"
"""With this in the environment the command answers its shell."""


class HoldfastBash(BashComplete):
    """Completes in bash, which divides a word at `@` and `:` and completes the last part of it."""

    source_template: ClassVar[str] = """\
%(complete_func)s() {
    local IFS=$'\\n' reply
    COMPREPLY=()
    for reply in $(env COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_BREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1"); do
        case "$reply" in
            dir,*) compopt -o dirnames ;;
            file,*) compopt -o default ;;
            *) COMPREPLY+=("${reply#*,}") ;;
        esac
    done
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
    _given = 0

    def get_completion_args(self) -> tuple[list[str], str]:
        """Returns the words before the one to complete, and that one as far as it is typed."""
        line, breaks = os.environ["COMP_WORDS"], os.environ.get("COMP_BREAKS", "")
        words = split_arg_string(line)
        begun = "" if line[-1:].isspace() else words.pop()
        colon = begun.rfind(":") + 1 if ":" in breaks else 0
        self._given = colon or max(begun.find("@") if "@" in breaks else 0, 0)
        return words[1:], begun

    def format_completion(self, item: CompletionItem) -> str:
        """Returns what bash puts in place of the part."""
        return f"{item.type},{item.value[self._given :]}"


add_completion_class(HoldfastBash)


class RunPath(click.Path):
    """A run, or with `takes_step` one of its steps, as an argument."""

    def __init__(self, *, takes_step: bool = True) -> None:
        super().__init__()
        self._takes_step = takes_step

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """**Blocks.** Offers the runs below the directory that is typed, or directories; after an `@` the steps."""
        location, at, begun = incomplete.partition("@")
        if at and self._takes_step:
            return [CompletionItem(f"{location}@{name}") for name in _list_names(location) if name.startswith(begun)]
        if "://" in incomplete:
            return _list_prefixes(incomplete)
        directory = os.path.dirname(incomplete)  # noqa: PTH120 - what is typed stays as it is
        root = LocalStorage(os.path.expanduser(directory or "."))  # noqa: PTH111
        runs = [os.path.join(directory, relative) for relative in find_runs(root) if relative]  # noqa: PTH118
        found = [run for run in runs if run.startswith(incomplete)]
        if not found:
            return [CompletionItem(incomplete, type="dir")]
        return [CompletionItem(run) for run in (*found, *(f"{run}@" for run in found[:1] if self._takes_step))]


def _list_prefixes(incomplete: str) -> list[CompletionItem]:
    """**Blocks.** Offers what is next to the URL that is typed, by one listing."""
    above = incomplete.rpartition("/")[0]
    with suppress(HoldfastError):
        names = [entry.name for entry in open_storage(above).list("") if entry.is_directory]
        found = [f"{above}/{name}" for name in names if not (name.startswith(".") or parse_step_directory(name))]
        return [CompletionItem(url) for url in found if url.startswith(incomplete)]
    return []


def _list_names(location: str) -> Iterator[str]:
    """**Blocks.** Yields the steps of a run, the newest first, and the names of steps; nothing if it cannot be read."""
    with suppress(HoldfastError):
        run = StoredRun(open_storage(location))
        living = run.look().living
        yield from (str(name.step) for name in reversed(living))
        if living:
            metrics: Any = run.step(living[-1]).manifest().metrics
            yield from (LATEST, "best", *(f"{kind}:{metric}" for kind in ("best", "min", "max") for metric in metrics))
