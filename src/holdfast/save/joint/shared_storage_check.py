"""Checks that all workers see one and the same run, wherever they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from holdfast.catalog.publish import Receipts
from holdfast.cluster.peers import Failure, make_sendable
from holdfast.cluster.polling import ELSEWHERE_HINT, find_patience, look_again
from holdfast.errors import DamageError, HoldfastError, StorageError
from holdfast.format.digests import digest
from holdfast.format.names import START_NAME, StepName, data_name, generation_path, index_name
from holdfast.format.records import MAX_GENERATION_BYTES
from holdfast.save.joint.protocol import NameRecord
from holdfast.storage.open import nearest_of
from holdfast.storage.protocol import Storage

_HINT: Final = "All workers must save into one directory: is it on a file system that all nodes share?"


def try_put_token(storage: Storage) -> str:
    """**Blocks.** On the leader, creates a file in the run's directory, which the other workers must see.

    A crash before it is removed leaves it there; the next one replaces it. Returns its content; empty if nothing can be
    written: a job that only restores needs only to read.
    """
    token = os.urandom(16).hex()
    try:
        storage.delete([START_NAME])
        return token if storage.publish(START_NAME, token.encode()) else ""
    except HoldfastError:
        return ""


def check_token(storage: Storage, token: str, leader_url: str, who: str, timeout_seconds: float) -> None:
    """**Blocks.** Raises `StorageError`, which names this worker (`who`), unless it sees the leader's file.

    At most half of `timeout_seconds` is spent on looking again; no time where names are consistent.
    """

    def look() -> str:
        seen = storage.read(START_NAME, len(token))
        return "" if seen.decode(errors="replace") == token else f"{START_NAME} belongs to another job"

    _check_seen(
        storage,
        START_NAME,
        leader_url,
        look,
        timeout_seconds,
        f"{who} does not see what rank 0 writes there",
        f"the directory of {who} is {storage.url}, but that of rank 0 is {leader_url}: what rank 0 writes does "
        "not appear there",
    )


def read_opening_digest(storage: Storage, generation: int) -> str:
    """**Blocks.** Returns a digest that identifies the opening of a generation."""
    return digest(storage.read(generation_path(generation), MAX_GENERATION_BYTES))


def check_opening(storage: Storage, place: NameRecord, who: str, timeout_seconds: float) -> None:
    """**Blocks.** Like `check_token`, for the generation that the leader has opened, by the digest of its record."""
    path = generation_path(place.generation)
    if place.records and storage.traits.has_tiers:
        storage = nearest_of(storage)  # It has them from the leader; the farthest may be out of reach.

    def look() -> str:
        is_same = read_opening_digest(storage, place.generation) == place.opening
        return "" if is_same else f"{path} belongs to another run"

    unseen = f"does not see generation {place.generation}, which rank 0 has opened"
    _check_seen(
        storage,
        path,
        place.url,
        look,
        timeout_seconds,
        f"{who} {unseen}",
        f"{who} saves into {storage.url}, but rank 0 into {place.url}: it {unseen} there",
    )


def _check_seen(
    storage: Storage,
    path: str,
    leader_url: str,
    look: Callable[[], str],
    timeout_seconds: float,
    unseen: str,
    unseen_elsewhere: str,
) -> None:
    """**Blocks.** Checks a file repeatedly; raises the problem in the end.

    The last two are the messages if this worker was given the same path as the leader, and another one.
    """
    is_elsewhere = make_sendable(storage.url) != leader_url

    def find_problem() -> str:
        try:
            return look()
        except (StorageError, DamageError) as error:
            return error.message

    patience_seconds = find_patience(timeout_seconds, is_elsewhere=is_elsewhere)
    problem = look_again(find_problem, 0 if storage.traits.names_are_consistent else patience_seconds)
    if problem and is_elsewhere:
        raise StorageError(f"{unseen_elsewhere} ({problem})", path=path, hint=ELSEWHERE_HINT)
    if problem:
        raise StorageError(f"{storage.url}: {unseen}: {problem}", path=path, hint=_HINT)


def find_unseen(storage: Storage, name: StepName, receipts: Receipts, timeout_seconds: float) -> Failure | None:
    """**Blocks.** Returns a worker whose files are not visible here, now or after a while; None if all are."""
    world_size = len(receipts.workers)
    expected = {
        file: (rank, size_bytes)
        for rank, worker in enumerate(receipts.workers)
        for file, size_bytes in (
            (data_name(rank, world_size), worker.data_bytes),
            (index_name(rank, world_size), worker.index_bytes),
        )
    }

    def look() -> Failure | None:
        found = {entry.name: entry.size_bytes for entry in storage.list(name.directory)}
        for file, (rank, size_bytes) in expected.items():
            if found.get(file) != size_bytes:
                text = f"it has written {name.directory}/{file}, but rank 0 does not see the file in {storage.url}"
                return Failure.of(rank, StorageError.__name__, text, _HINT)
        return None

    return look_again(look, find_patience(timeout_seconds))
