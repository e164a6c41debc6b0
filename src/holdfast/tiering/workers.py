"""The start of a job of several workers whose run has tiers, of which each may have the first for itself.

A step may be committed, and be in parts on several machines and nowhere else. Then no worker could restore it, so each
copies what it has of it into the farthest tier first. Afterwards that tier alone says what there is to restore, the
same to all workers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.catalog import StoredRun
from holdfast.cluster.peers import Peers
from holdfast.errors import DamageError, NotFoundError, StorageError
from holdfast.format.names import StepName, data_name, index_name, parse_step_directory
from holdfast.format.records import MAX_MANIFEST_BYTES, Manifest, choose_living, decode_manifest, make_base
from holdfast.restore.copying import RunCopier
from holdfast.restore.engine import make_agreement
from holdfast.storage import Storage
from holdfast.storage.tiers import Tiers

TIER_NAME: Final = ".holdfast-tier"
"""A file in the root of a nearest tier, with random text, by which workers know whether they share it."""

_MOST_STEPS: Final = 4
"""So many of the newest steps of a worker are looked at: all older ones have been copied, or given up."""


class Nearby(msgspec.Struct, frozen=True):
    """The workers that share this worker's nearest tier.

    Attributes:
        rank: This worker's.
        group: The ranks of all of them, in order.
        is_common: True if these are all workers of the job.
    """

    rank: int = 0
    group: tuple[int, ...] = (0,)
    is_common: bool = True

    @property
    def is_apart(self) -> bool:
        """True if the leader has another one."""
        return 0 not in self.group

    def takes(self, rank: int) -> bool:
        """Returns True if this worker copies the files of a rank that are in their tier."""
        return self.group[rank % len(self.group)] == self.rank


class Holding(msgspec.Struct, frozen=True, omit_defaults=True):
    """The files of a tier for steps that may not be committed in the farthest one.

    Attributes:
        manifests: The manifests of those that are committed there, by directory.
        files: The names of the files of each directory.
        committed: Of the farthest tier, what is committed there.
        bases: Of the farthest tier and the leader's, the base of each generation, as step, generation and attempt.
    """

    manifests: dict[str, str] = {}
    files: dict[str, list[str]] = {}
    committed: list[str] = []
    bases: dict[int, tuple[int, int, int] | None] = {}


def find_nearby(tiers: Tiers, peers: Peers) -> Nearby:
    """**Collective.** **Blocks.** Finds out which workers share a nearest tier."""
    near = tiers.nearest
    near.make_directory("")
    near.publish(TIER_NAME, os.urandom(16).hex().encode())
    own = near.read(TIER_NAME, 64)

    def decide(records: list[bytes]) -> bytes:
        return msgspec.json.encode([record.decode() for record in records])

    known = msgspec.json.decode(peers.gather_decide_broadcast(own, decide, "the start of the job"), type=list[str])
    group = tuple(rank for rank, one in enumerate(known) if one == known[peers.rank])
    return Nearby(peers.rank, group, len(group) == len(known))


def complete_newest(tiers: Tiers, peers: Peers, nearby: Nearby) -> None:
    """**Collective.** **Blocks.** Copies the newest step into the farthest tier, if it is whole in all tiers together.

    Raises:
        StorageError: If it is, and cannot be copied. Then nothing is restored: an older step would take its place.
    """
    far = tiers.tiers[-1].storage
    holding = Holding()
    if nearby.group[0] == nearby.rank:
        holding = look_for_steps(tiers.nearest, far if peers.is_leader else None)

    def decide(records: list[bytes]) -> bytes:
        return msgspec.json.encode(choose_incomplete([msgspec.json.decode(one, type=Holding) for one in records]))

    answer = peers.gather_decide_broadcast(msgspec.json.encode(holding), decide, "the start of the job")
    manifests = msgspec.json.decode(answer, type=dict[str, str])
    if not manifests:
        return

    def copy() -> None:
        tiers.align()
        run = StoredRun(tiers.nearest)
        for directory, text in manifests.items():
            name = parse_step_directory(directory)
            if name is None or not run.step(name).has_data():
                continue
            run.storage.publish(name.manifest_path, text.encode())
            run.storage.sync_directory(directory)
            copier = RunCopier(run, far, nearby.takes)
            copier.open([name.generation])
            copier.copy(name)

    def check() -> None:
        lacking = [directory for directory in manifests if not _is_committed(far, directory)]
        if lacking and peers.is_leader:
            raise StorageError(
                f"{lacking[0]} is not whole in {far.url}, though all workers have copied what they have of it",
                path=lacking[0],
            )

    agreement = make_agreement(peers, tiers.url)
    # Damage leaves the next older step, as in a restore.
    if agreement.run(copy) is None:
        agreement.run(check)


def look_for_steps(near: Storage, far: Storage | None) -> Holding:
    """**Blocks.** Looks at the newest steps of a nearest tier; on the leader at all of the farthest as well."""
    run = StoredRun(near)
    catalog = run.look(closely=True)
    committed = sorted(catalog.committed)[-_MOST_STEPS:]
    other = sorted((*catalog.unfinished, *catalog.lost))[-_MOST_STEPS:]
    files = {name.directory: sorted(run.step(name).list_names()) for name in (*committed, *other)}
    manifests: dict[str, str] = {}
    for name in committed:
        with suppress(NotFoundError, DamageError):
            manifests[name.directory] = near.read(name.manifest_path, MAX_MANIFEST_BYTES).decode()
    if far is None:
        return Holding(manifests, files)
    there = StoredRun(far).look(closely=True)
    for name in there.unfinished:
        files.setdefault(name.directory, []).extend(StoredRun(far).step(name).list_names())
    bases = {
        generation: None if (begun := base.name) is None else (begun.step, begun.generation, begun.attempt)
        for generation, base in {**catalog.bases, **there.bases}.items()
    }
    return Holding(manifests, files, [name.directory for name in there.committed], bases)


def choose_incomplete(holdings: Sequence[Holding]) -> dict[str, str]:
    """**Pure.** Returns the manifests of the steps to be copied into the farthest tier, so that it has the newest one.

    That is the newest of the current lineage that is there, or of which all files are in some tier; with it go the
    steps that it refers to. None if it is there.
    """
    files: dict[str, set[str]] = {}
    manifests: dict[StepName, tuple[str, Manifest]] = {}
    for holding in holdings:
        for directory, names in holding.files.items():
            files.setdefault(directory, set()).update(names)
        for directory, text in holding.manifests.items():
            if (name := parse_step_directory(directory)) is not None:
                with suppress(DamageError):
                    manifests[name] = text, decode_manifest(text.encode(), path=name.manifest_path, expected=name)
    committed = {name for one in holdings for each in one.committed if (name := parse_step_directory(each)) is not None}
    bases = {
        generation: make_base(generation, None if base is None else StepName(*base))
        for holding in holdings
        for generation, base in holding.bases.items()
    }
    whole = {name for name, (_, manifest) in manifests.items() if _has_all(files[name.directory], manifest)}
    while living := choose_living(committed | whole, bases):
        newest = living[-1]
        if newest in committed:
            break
        needed = _find_needed(newest, manifests, committed)
        if needed <= whole:
            return {name.directory: manifests[name][0] for name in sorted(needed)}
        whole.discard(newest)
    return {}


def _has_all(files: set[str], manifest: Manifest) -> bool:
    size = manifest.world_size
    return all({data_name(rank, size), index_name(rank, size)} <= files for rank in range(size))


def _find_needed(
    name: StepName, manifests: Mapping[StepName, tuple[str, Manifest]], committed: set[StepName]
) -> set[StepName]:
    needed: set[StepName] = set()
    ahead = [name]
    while ahead:
        if (one := ahead.pop()) not in needed and one not in committed:
            needed.add(one)
            ahead += [reference.name for reference in manifests[one][1].references] if one in manifests else []
    return needed


def _is_committed(storage: Storage, directory: str) -> bool:
    name = parse_step_directory(directory)
    return name is not None and StoredRun(storage).step(name).is_committed()
