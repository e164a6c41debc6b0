"""The records of generations in one tier of a run, and how they come to another one."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from holdfast.errors import DamageError, FencedError, NotFoundError
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

PARTED_PREFIX: Final = "parted-"
"""The beginning of the name of a directory with steps that another machine's job has passed."""


def set_aside(storage: Storage, parted: int) -> str:
    """**Blocks.** Takes what was saved from a generation on out of the run; returns what became of it, in words.

    The record of that generation goes last. A crash before leaves a tier that is still seen to have parted.
    """
    steps = [entry.name for entry in storage.list("") if entry.is_directory]
    steps = [name for name in steps if (step := parse_step_directory(name)) and step.generation >= parted]
    records = [entry.name for entry in storage.list(GENERATIONS_DIRECTORY)]
    summaries = [one for one in map(parse_summary_file, records) if one is not None and one[0] >= parted]
    storage.delete([summary_path(*one) for one in summaries])
    generations = [one for one in list_generations(storage)[::-1] if one >= parted]
    paths = [path for one in generations for path in (base_path(one), generation_path(one))]
    if (root := storage.location) is None:
        files = [f"{step}/{one.name}" for step in steps for one in storage.list(step)]
        # All manifests first: what has none is not offered.
        storage.delete([path for path in files if path.endswith(f"/{MANIFEST_NAME}")])
        storage.delete(files)
        storage.delete(steps)
        for path in paths:
            storage.delete([path])
        return "they were removed"
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


def list_generations(storage: Storage, below: str = "", ends: str = ".json") -> list[int]:
    """**Blocks.** Returns the generations with a record whose name ends so, in order; `below` a directory."""
    names = [entry.name for entry in storage.list(join(below, GENERATIONS_DIRECTORY)) if entry.name.endswith(ends)]
    return sorted(filter(None, (parse_generation_file(f"{name.removesuffix(ends)}.json") for name in names)))


def pass_on(source: Storage, goal: Storage) -> None:
    """**Blocks.** Gives a tier the records of generations that are newer than its own; of many to an empty one, the
    newest.

    Those of older steps come with the steps.
    """
    there, here = list_generations(goal), list_generations(source)
    newer = [one for one in here if one > there[-1]] if there else here[-1:]
    if newer:
        goal.make_directory(GENERATIONS_DIRECTORY)
    # The base of the newest may have been recorded only now.
    for generation in (*there[-1:], *newer):
        for path in (generation_path(generation), base_path(generation)):
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
