"""The records of generations in one tier of a run, and how they come to another one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from holdfast.errors import DamageError, FencedError, NotFoundError, UsageError
from holdfast.format.digests import unseal
from holdfast.format.names import (
    GENERATIONS_DIRECTORY,
    MANIFEST_NAME,
    base_path,
    generation_path,
    join,
    parse_generation_file,
    parse_step_directory,
    parse_summary_file,
    summary_path,
)
from holdfast.format.records import MAX_GENERATION_BYTES, Opening
from holdfast.storage.local.files import sync_to_disk
from holdfast.storage.protocol import Storage

BASE_SUFFIX: Final = ".base.json"

LEAST_GAP: Final = 1000
"""By so much at least the number of a generation that is opened without the farthest tier is larger than the last."""

PARTED_PREFIX: Final = "parted-"
"""The beginning of the name of a directory with steps that another machine's job has passed."""


def set_aside(storage: Storage, parted: int) -> str:
    """**Blocks.** Takes what was saved from a generation on out of the run; returns what became of it, in words.

    The record of that generation goes last. A crash before leaves a tier that is still seen to have parted.
    """
    records = [entry.name for entry in storage.list(GENERATIONS_DIRECTORY)]
    summaries = [one for one in map(parse_summary_file, records) if one is not None and one[0] >= parted]
    storage.delete([summary_path(*one) for one in summaries])
    generations = [one for one in list_generations(storage)[::-1] if one >= parted]
    paths = [path for one in generations for path in (base_path(one), generation_path(one))]
    if (root := storage.location) is None:
        _remove_steps(storage, parted)
        for path in paths:
            storage.delete([path])
        # A save may have begun before that. Without the record none begins.
        _remove_steps(storage, parted)
        return "they were removed"
    steps = _list_steps(storage, parted)
    aside = root / f"{PARTED_PREFIX}{parted:04d}-{read_token(storage, parted)[:8]}"
    (aside / GENERATIONS_DIRECTORY).mkdir(parents=True, exist_ok=True)
    for path in (*steps, *paths):
        # Another worker of this machine may do the same.
        with suppress(FileNotFoundError):
            os.replace(root / path, aside / path)  # noqa: PTH105  Both are paths.
    for directory in (aside, aside / GENERATIONS_DIRECTORY, root / GENERATIONS_DIRECTORY, root):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            sync_to_disk(descriptor)
        finally:
            os.close(descriptor)
    return f"they are in {aside} now"


def _list_steps(storage: Storage, parted: int) -> list[str]:
    steps = [entry.name for entry in storage.list("") if entry.is_directory]
    return [name for name in steps if (step := parse_step_directory(name)) and step.generation >= parted]


def _remove_steps(storage: Storage, parted: int) -> None:
    # Where there are directories, a save that is under way finds its own gone.
    steps = [storage.retire(step) for step in _list_steps(storage, parted)]
    files = [f"{step}/{one.name}" for step in steps for one in storage.list(step)]
    # All manifests first: what has none is not offered.
    storage.delete([path for path in files if path.endswith(f"/{MANIFEST_NAME}")])
    storage.delete(files)
    storage.delete(steps)


def list_generations(storage: Storage, below: str = "", ends: str = ".json") -> list[int]:
    """**Blocks.** Returns the generations with a record whose name ends so, in order; `below` a directory."""
    names = [entry.name for entry in storage.list(join(below, GENERATIONS_DIRECTORY)) if entry.name.endswith(ends)]
    return sorted(filter(None, (parse_generation_file(f"{name.removesuffix(ends)}.json") for name in names)))


def find_parted(near: Storage, beyond: Storage, others: Sequence[int]) -> int | None:
    """**Blocks.** Returns the first generation of a tier from which on it has gone another way than a farther one, or
    None; `others` are the generations that were just seen there.

    Two tiers agree on a generation that has begun in both. One without a base has saved nothing: it may be this job's
    own, of which it has heard no answer. One that has come since `others` was listed may have been passed on from here.
    """
    own, own_begun = list_generations(near), list_generations(near, ends=BASE_SUFFIX)
    begun = [one for one in list_generations(beyond, ends=BASE_SUFFIX) if one in others]
    agreed, is_same = 0, False
    for one in sorted(set(own) & set(others), reverse=True):
        if read_token(near, one) == read_token(beyond, one):
            is_same = True
            if one in begun or one not in own_begun:
                agreed = one
                break
    newer = [one for one in own if one > agreed]
    if not newer or max(begun, default=0) <= agreed:
        return None
    # One that has begun without the farther tier is known by its number.
    if not is_same and own[0] < LEAST_GAP and others[0] <= own[-1]:
        raise UsageError(
            f"{near.url} and {beyond.url} are different runs: no job has opened both",
            hint="Give each run places of its own.",
        )
    return newer[0]


def pass_on(source: Storage, goal: Storage, there: Sequence[int]) -> None:
    """**Blocks.** Gives a tier the records of generations that are newer than its own; of many to an empty one, the
    newest. Those of older steps come with the steps.

    If another job opens a generation there meanwhile, none of the new ones gets its base: so it is not in the lineage
    there, and at the next look either that job has begun, or this goes on. `there` are those that were seen there.
    """
    here = list_generations(source)
    newer = [one for one in here if one > there[-1]] if there else here[-1:]
    if newer:
        goal.make_directory(GENERATIONS_DIRECTORY)
    # The base of the newest may have been recorded only now.
    for one in (passed := (*there[-1:], *newer)):
        _pass_record(source, goal, generation_path(one))
    if newer and set(list_generations(goal)).difference(there, newer):
        return
    for one in passed:
        _pass_record(source, goal, base_path(one))


def _pass_record(source: Storage, goal: Storage, path: str) -> None:
    with suppress(NotFoundError):
        record = source.read(path, MAX_GENERATION_BYTES)
        # Looked at first: what is there needs no room.
        if not _has_record(goal, path, record) and not goal.publish(path, record):
            _has_record(goal, path, record)


def _has_record(storage: Storage, path: str, record: bytes) -> bool:
    """Returns True if a record is there, and raises `FencedError` if another one is."""
    try:
        if storage.read(path, MAX_GENERATION_BYTES) != record:
            raise FencedError(f"{storage.url}: another job has opened {path.rpartition('/')[2]} just now")
    except NotFoundError:
        return False
    return True


def read_token(storage: Storage, generation: int) -> str:
    """**Blocks.** Returns the token of who opened a generation; the record as it is, if it cannot be read."""
    path = generation_path(generation)
    data = storage.read(path, MAX_GENERATION_BYTES)
    try:
        return unseal(Opening, data, path=path).token
    except DamageError:
        return data.hex()
