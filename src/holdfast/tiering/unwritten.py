"""The start of a job whose run has images in memory: a save that was copied by a dead process is written now.

All workers agree on the newest save of which every part is whole in the memory of some machine. If no tier has it,
each machine writes its parts, and the manifest follows. The step is then in memory and in a tier.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from holdfast.catalog import StoredRun
from holdfast.catalog.publish import make_manifest
from holdfast.cluster.peers import Peers
from holdfast.errors import HoldfastError
from holdfast.format.digests import seal, unseal
from holdfast.format.names import StepName, generation_path, parse_step_directory
from holdfast.format.records import Opening
from holdfast.process.terminal import inform
from holdfast.restore.copying import RunCopier
from holdfast.restore.engine import make_agreement
from holdfast.storage import Storage, open_storage
from holdfast.storage.kept_images import ImageRecord
from holdfast.storage.kept_memory import HostMemory, KeptMemory
from holdfast.storage.tiers import Tiers
from holdfast.tiering.workers import Nearby

_WHAT = "the start of the job"


class ImageOffer(msgspec.Struct, frozen=True):
    """An image that a worker can read.

    Attributes:
        record: Its record, without the index.
        keeper: What keeps it: workers with the same one can read it all.
        is_written: True if its step was committed in the tier of all workers. If it is gone there, a person has removed
            it.
    """

    record: ImageRecord
    keeper: str
    is_written: bool


class Unwritten(msgspec.Struct, frozen=True):
    """The save that is to be written from memory.

    Attributes:
        directory: The step; empty if there is none.
        manifest: Its manifest.
        keepers: For each worker, what keeps the images that it can read; empty if none does.
    """

    directory: str = ""
    manifest: bytes = b""
    keepers: tuple[str, ...] = ()


def open_memory(
    tiers: Tiers, memory: KeptMemory, peers: Peers | None, nearby: Nearby, say: Callable[[str], object]
) -> bool:
    """**Collective.** **Blocks.** Finds what earlier processes left in memory, and writes what was not written.

    If it cannot be written, a warning says so, and the run goes on from its newest step.

    Returns:
        True if a step was added to the run.
    """
    rank, start = 0, os.urandom(16)
    if peers is not None:
        rank, start = peers.rank, peers.gather_decide_broadcast(start, lambda records: records[0], _WHAT)
    memory.open(rank, start.hex())
    if memory.problem:
        say(f"nothing is kept in memory: {memory.problem}")
    goal = tiers.nearest if nearby.is_common else tiers.tiers[-1].storage
    offers = list_offers(memory, nearby)

    def decide(records: list[bytes]) -> bytes:
        each = [msgspec.json.decode(one, type=tuple[str, list[ImageOffer]]) for one in records]
        found = choose_unwritten(goal, [offer for _, some in each for offer in some])
        return msgspec.json.encode(msgspec.structs.replace(found, keepers=tuple(keeper for keeper, _ in each)))

    own = msgspec.json.encode((memory.keeper, offers))
    answer = decide([own]) if peers is None else peers.gather_decide_broadcast(own, decide, _WHAT)
    found = msgspec.json.decode(answer, type=Unwritten)
    name = parse_step_directory(found.directory)
    if name is None:
        return False
    group = [other for other, keeper in enumerate(found.keepers) if keeper and keeper == memory.keeper]

    def write() -> None:
        if not group:
            return
        if not nearby.is_common:
            tiers.align()
        memory.images.add_manifest(name, found.manifest)
        copier = RunCopier(StoredRun(memory.images), goal, lambda one: group[one % len(group)] == rank)
        try:
            copier.open([name.generation])
            copier.copy(name)
            memory.images.note_written(name)
        except HoldfastError as error:
            say(f"step {name.step} is whole in memory, but it cannot be written: {error.message}")

    make_agreement(peers, tiers.url).run(write)
    is_leader = rank == 0
    if is_leader and StoredRun(goal).step(name).is_committed():
        inform(f"step {name.step} was in memory only; it is written now")
    return True


def list_offers(memory: KeptMemory, nearby: Nearby) -> list[ImageOffer]:
    """Returns the images that this worker can read."""
    return [
        ImageOffer(
            msgspec.structs.replace(record, index=b""),
            memory.keeper,
            # Of machines with disks of their own, one may be gone, and not by a person's wish.
            nearby.is_common and memory.images.is_written(record),
        )
        for record in memory.images.list_records()
    ]


def choose_unwritten(goal: Storage, offers: Sequence[ImageOffer]) -> Unwritten:
    """**Blocks.** Returns the newest save that is whole in memory, if it continues the run and no tier has it."""
    records: defaultdict[StepName, dict[int, ImageRecord]] = defaultdict(dict)
    for offer in offers:
        records[offer.record.name][offer.record.rank] = offer.record
    whole = [name for name, parts in records.items() if sorted(parts) == [*range(parts[min(parts)].world_size)]]
    if not whole:
        return Unwritten()
    run = StoredRun(goal)
    newest, catalog = max(whole, key=lambda name: (name.generation, name.step, name.attempt)), run.look(closely=True)
    parts = [records[newest][rank] for rank in sorted(records[newest])]
    if any(offer.is_written for offer in offers if offer.record.name == newest):
        return Unwritten()
    if newest in catalog.committed or newest.generation != catalog.generation:
        return Unwritten()
    if catalog.newest is not None and newest.step <= catalog.newest.step:
        return Unwritten()
    opening = unseal(Opening, parts[0].opening, path=generation_path(newest.generation))
    if run.opening(newest.generation).token != opening.token:
        return Unwritten()
    return Unwritten(newest.directory, parts[0].manifest or _make_manifest(newest, parts))


def _make_manifest(name: StepName, records: Sequence[ImageRecord]) -> bytes:
    # Most jobs have one worker.
    from holdfast.save.joint.protocol import PartRecord
    from holdfast.save.joint.run_writer import put_together

    first = records[0]
    receipts = put_together([msgspec.json.decode(one.part, type=PartRecord) for one in records])
    return seal(make_manifest(receipts, name, metrics=first.metrics, metadata=first.metadata, exempt=first.exempt))


def main(url: str) -> None:
    """Writes what is in memory, in a process that is started when no program has come for it; exits with 1 if it can't.

    Args:
        url: The place of the first tier that outlives the processes.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    storage = open_storage(url)
    tiers = Tiers(HostMemory(), storage)
    assert tiers.memory is not None
    open_memory(tiers, tiers.memory, None, Nearby(), inform)
    offers = list_offers(tiers.memory, Nearby())
    # A run without the images' generation is not there at this moment: its disk may not be mounted.
    generation = StoredRun(storage).look().generation
    is_left = any(offer.record.generation > generation for offer in offers)
    is_left = is_left or bool(choose_unwritten(storage, offers).directory)
    tiers.memory.close(is_done=False)
    sys.exit(is_left)
