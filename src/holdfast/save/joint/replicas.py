"""Compares replicated state: whether all workers have it, and, if requested, with equal values.

Each worker reports little: for each set of workers with which it shares boxes, their number, a digest of their names,
dtypes and shapes, and one of their values. More is requested only if these differ.

Values are digested in place, while training waits for its copy: a copy of everything that a worker holds would take as
much host memory again for each worker of a machine.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from holdfast.cluster.peers import Failure, Peers, make_sendable
from holdfast.cluster.protocol import ANSWER_SECONDS, MAX_VALUE_BYTES, name_ranks
from holdfast.errors import DeadlineError, UsageError
from holdfast.format.digests import digest
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.shapes import Box, split_box, whole_box
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.image import Snapshot
from holdfast.state.leaves import ArrayBackend, ArraySpec, Captured, Replica, part_of
from holdfast.storage.buffers import batches

_DIGEST_CHARACTERS: Final = 16
"""How much of a digest is sent: enough to distinguish values that were not made equal on purpose."""

_NAMED_LEAVES: Final = 3

MOST_SIDES: Final = 16
"""How many different groups are examined. If more workers differ, they have nothing in common."""

_PIECE_BYTES: Final = 8 << 20
"""How much of an array outside of host memory is digested at a time."""

LEAVES_HINT: Final = (
    "If only some workers have a piece of state, or each has its own form of it, use holdfast.PerWorker, "
    "holdfast.Shard, or a name of its own: Checkpoint(**{f'stage{number}': model}) for pipeline stages. (Each stage "
    "needs a name that the others lack: a worker that names fewer objects than another is taken to have forgotten one.)"
)

VALUES_HINT: Final = (
    "If all workers name a plain tensor, one copy is saved and all workers get it back, so the copies must be "
    "equal: check whether the module is wrapped in DDP, and whether all workers start with equal values. If each "
    "worker has its own tensor, give it its own name (Checkpoint(**{f'stage{number}': model}) for pipeline "
    "stages), or use holdfast.PerWorker. check_replicas=False turns the check off and saves one copy."
)


class ReplicaDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digests of the boxes that one worker shares with certain others.

    Attributes:
        holders: The digest of their ranks, including this worker's.
        size: How many they are.
        boxes: How many boxes it has.
        names: The digest of their names.
        values: The digest of their values; empty if those are not compared.
        may_differ: True if the values may differ between data-parallel workers.
    """

    holders: str
    size: int
    boxes: int
    names: str
    values: str
    may_differ: bool = False


class Disagreement(NamedTuple):
    """Workers that should all hold the same, and do not.

    Attributes:
        holders: The digest of their ranks.
        sides: The groups of them that agree; the largest first. A worker that has nothing of it is in none.
        are_named_alike: True if only values differ.
        may_differ: True if these may.
    """

    holders: str
    sides: tuple[tuple[int, ...], ...]
    are_named_alike: bool
    may_differ: bool = False


Boxes: TypeAlias = dict[str, list[tuple[str, str]]]
"""One worker's boxes: by leaf, a description of each, and the digest of its values."""


class Detail(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one worker holds together with certain others.

    Attributes:
        holders: Their ranks.
        boxes: What it has.
    """

    holders: tuple[int, ...]
    boxes: Boxes


class Divergence(NamedTuple):
    """A leaf that differs between workers that should hold the same.

    Attributes:
        leaf: Its name.
        ranks: The groups of workers that agree; the largest first.
        may_differ: True if it may differ between data-parallel workers.
    """

    leaf: str
    ranks: tuple[tuple[int, ...], ...]
    may_differ: bool = False


class HeldReplicas:
    """The boxes that one worker shares with others.

    Attributes:
        replicas: The boxes.
        groups: Their digests.
    """

    def __init__(self, replicas: Sequence[Replica], digests: Sequence[str]) -> None:
        self.replicas = replicas
        self._details: dict[str, Detail] = {}
        may_differ: set[str] = set()
        holders_by_id: dict[tuple[int, bool], str] = {}
        kinds: dict[tuple[ArraySpec, Box], str] = {}
        for number, replica in enumerate(replicas):
            # Very many boxes have the very same holders.
            same = (id(replica.holders), replica.may_differ)
            holders = holders_by_id.get(same)
            if holders is None:
                holders = _digest(",".join(map(str, replica.holders)) + (" may differ" if replica.may_differ else ""))
                holders_by_id[same] = holders
                if replica.may_differ:
                    may_differ.add(holders)
                self._details.setdefault(holders, Detail(tuple(replica.holders), {}))
            kind = f"the same array as {replica.same_as}" if replica.same_as else kinds.get((replica.spec, replica.box))
            if kind is None:
                kind = kinds[replica.spec, replica.box] = _describe(replica.spec, replica.box)
            value = digests[number] if digests else ""
            self._details[holders].boxes.setdefault(replica.leaf, []).append((kind, value))
        for detail in self._details.values():
            for boxes in detail.boxes.values():
                boxes.sort()
        self.groups = [_sum_up(holders, detail, holders in may_differ) for holders, detail in self._details.items()]

    def details(self, holders: Collection[str]) -> dict[str, Detail]:
        """Returns all details of these groups, in records that can be sent."""
        return {
            one: Detail(
                detail.holders,
                {
                    make_sendable(leaf): [(make_sendable(kind), value) for kind, value in boxes]
                    for leaf, boxes in detail.boxes.items()
                },
            )
            for one, detail in self._details.items()
            if one in holders
        }


def sum_up_replicas(snapshot: Snapshot, last: HeldReplicas) -> HeldReplicas:
    """Returns what the worker of a snapshot holds together with others: usually the same as at the previous save."""
    has_values = any(group.values for group in last.groups)
    if not snapshot.state.digests and not has_values and snapshot.state.replicas == last.replicas:
        return last
    return HeldReplicas(snapshot.state.replicas, snapshot.state.digests)


class _Piece(NamedTuple):
    """A part of an array that is digested by itself: its replica, and where its bytes are, if anywhere."""

    number: int
    backend: ArrayBackend
    array: Any
    size_bytes: int
    address: int | None


def digest_values(captured: Captured, moments: Mapping[str, object], pool: WorkerPool) -> tuple[str, ...]:
    """**Blocks.** Returns digests of the current values of each replica; nothing if none are compared.

    `moments` has, by library, what reading them must wait for.
    """
    pieces = list(_cut(captured))
    found = [""] * len(pieces)

    def take(batch: Sequence[tuple[int, _Piece]]) -> None:
        for place, piece in batch:
            if piece.address is not None:
                found[place] = digest(memoryview((ctypes.c_ubyte * piece.size_bytes).from_address(piece.address)))
                continue
            image = memoryview(bytearray(piece.size_bytes))
            devices = piece.backend.devices
            if devices is None:
                piece.backend.copy_out([piece.array], image, [0])
            else:
                targets = devices.targets([piece.array], image, [0])
                if transfer := devices.start([piece.array], targets, moments[piece.backend.name]):
                    transfer.wait()
            found[place] = digest(image)

    pool.run(partial(take, batch) for batch in batches(enumerate(pieces), lambda one: one[1].size_bytes, _PIECE_BYTES))
    values: list[list[str]] = [[] for _ in captured.compared]
    for piece, value in zip(pieces, found, strict=True):
        values[piece.number].append(value)
    return tuple(_digest(" ".join(parts)) for parts in values)


def _cut(captured: Captured) -> Iterator[_Piece]:
    """Splits what is compared into pieces: the same way on all workers, wherever the arrays are."""
    for number, compared in enumerate(captured.compared):
        if compared is None:
            continue
        backend, array = compared
        replica = captured.replicas[number]
        box, item_bytes = whole_box(replica.box.shape), ITEM_BYTES[replica.spec.dtype]
        if not box.elements:
            continue
        address = backend.address(array)
        count = 1 if backend.is_immutable else -(-box.elements * item_bytes // _PIECE_BYTES)
        begin = 0
        for part in [box] if count == 1 else split_box(box, count):
            size_bytes = item_bytes * part.elements
            own = array if part == box or address is not None else part_of(array, part)
            yield _Piece(number, backend, own, size_bytes, None if address is None else address + begin)
            begin += size_bytes


def find_disagreements(groups: Sequence[Sequence[ReplicaDigest]]) -> list[Disagreement]:
    """**Pure.** Returns the groups of workers that do not agree, from each worker's report, in order of rank."""
    reported: dict[str, dict[int, ReplicaDigest]] = {}
    for rank, own in enumerate(groups):
        for group in own:
            reported.setdefault(group.holders, {})[rank] = group
    disagreements = []
    for holders, by_rank in reported.items():
        names = {(group.boxes, group.names) for group in by_rank.values()}
        are_named_alike = len(names) == 1 and all(group.size == len(by_rank) for group in by_rank.values())
        # A worker that was not asked to compare values has none to show.
        values = {group.values for group in by_rank.values() if group.values}
        if not are_named_alike or len(values) > 1:
            sides: dict[ReplicaDigest, list[int]] = {}
            for rank, group in by_rank.items():
                sides.setdefault(group, []).append(rank)
            may_differ = all(group.may_differ for group in by_rank.values())
            disagreements.append(Disagreement(holders, _order(sides.values()), are_named_alike, may_differ))
    return disagreements


def name_difference(disagreement: Disagreement, details: Mapping[int, Detail]) -> tuple[int, str]:
    """**Pure.** Returns a worker that differs from most, and the message.

    `details` are those of the first worker of a side, of some sides.
    """
    sides = [(side, details[side[0]]) for side in disagreement.sides if side[0] in details]
    if not sides:
        return disagreement.sides[-1][0], "its leaves differ from those of the others"
    holders = set(sides[0][1].holders)
    without = tuple(sorted(holders.difference(*disagreement.sides)))
    if without:
        sides.append((without, Detail((), {})))
    sides.sort(key=lambda side: (-len(side[0]), side[0]))
    (most, usual), (few, other) = sides[0], sides[-1]
    if len(sides) == 1:
        return disagreement.sides[-1][0], f"its leaves differ from those of {name_ranks(most)}"
    differing = [
        leaf
        for leaf in [*usual.boxes, *(leaf for leaf in other.boxes if leaf not in usual.boxes)]
        if _kinds(usual, leaf) != _kinds(other, leaf)
    ]
    differences = [
        _describe_difference(leaf, _kinds(usual, leaf), _kinds(other, leaf), name_ranks(most)) for leaf in differing
    ]
    more = f"; and {len(differences) - _NAMED_LEAVES} more leaves" if len(differences) > _NAMED_LEAVES else ""
    also = f"; the same goes for {name_ranks(few[1:])}" if len(few) > 1 else ""
    return few[0], f"{'; '.join(differences[:_NAMED_LEAVES])}{more}{also}"


def name_divergences(disagreement: Disagreement, details: Mapping[int, Detail]) -> list[Divergence]:
    """**Pure.** Returns the leaves whose values differ; see `name_difference`."""
    sides = [(side, details[side[0]]) for side in disagreement.sides if side[0] in details]
    found = []
    for leaf in sides[0][1].boxes if sides else ():
        values: dict[tuple[str, ...], list[int]] = {}
        for side, detail in sides:
            found_there = tuple(value for _, value in detail.boxes.get(leaf, ()))
            if all(found_there):
                values.setdefault(found_there, []).extend(side)
        if len(values) > 1:
            found.append(Divergence(leaf, _order(values.values()), disagreement.may_differ))
    return found


def find_refused(divergences: Sequence[Divergence], replicas: Sequence[Replica]) -> tuple[int, str] | None:
    """**Pure.** Returns a worker whose values differ from those of the others but should not, and the message.

    None if all that differs may differ. Parameters and the state of optimizers may not. In other objects, such as a
    dict with the best weights so far, a smaller part may: copied batch norm statistics, for example.
    """
    tolerated = _find_tolerated(divergences, replicas)
    refused = [divergence for divergence in divergences if divergence.leaf not in tolerated]
    if not refused:
        return None
    first = refused[0]
    leaves = ", ".join(divergence.leaf for divergence in refused[:_NAMED_LEAVES])
    more = f" and {len(refused) - _NAMED_LEAVES} more leaves" if len(refused) > _NAMED_LEAVES else ""
    others = tuple(sorted(rank for ranks in first.ranks[1:] for rank in ranks))
    who = f"{name_ranks(others)} {'differs' if len(others) == 1 else 'differ'} from {name_ranks(first.ranks[0])}"
    return first.ranks[-1][0], f"the values of {leaves}{more} are not the same on all workers: {who}"


def describe_apart(divergences: Sequence[Divergence], replicas: Sequence[Replica]) -> str:
    """**Pure.** Describes values that may differ, and do; empty if none do, or DDP makes them equal by itself."""
    renewed = {make_sendable(replica.leaf) for replica in replicas if replica.is_renewed}
    tolerated = _find_tolerated(divergences, replicas)
    found = [one for one in divergences if one.leaf in tolerated and one.leaf not in renewed]
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"{found[0].leaf}{more} differ between workers. One worker's values are saved, and a restore gives them "
        "to all. If each worker needs its own, wrap them in holdfast.PerWorker"
    )


def _find_tolerated(divergences: Sequence[Divergence], replicas: Sequence[Replica]) -> set[str]:
    """Returns the leaves that differ and do not fail a save: see `find_refused`."""
    differing = {divergence.leaf for divergence in divergences}
    all_bytes: dict[str, int] = {}
    differing_bytes: dict[str, int] = {}
    strict: set[str] = set()
    for replica in replicas:
        leaf = make_sendable(replica.leaf)
        if replica.may_differ:
            continue
        if replica.is_trained:
            strict.add(leaf)
            continue
        root, size_bytes = leaf.partition("/")[0], replica.box.elements * ITEM_BYTES[replica.spec.dtype]
        all_bytes[root] = all_bytes.get(root, 0) + size_bytes
        if leaf in differing:
            differing_bytes[root] = differing_bytes.get(root, 0) + size_bytes
    mostly_alike = {root for root, size_bytes in all_bytes.items() if 2 * differing_bytes.get(root, 0) < size_bytes}
    return {
        one.leaf
        for one in divergences
        if one.may_differ or (one.leaf not in strict and one.leaf.partition("/")[0] in mostly_alike)
    }


def _order(sides: Collection[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted((tuple(sorted(side)) for side in sides), key=lambda side: (-len(side), side)))


def _describe_difference(leaf: str, usual: Sequence[str], other: Sequence[str], most: str) -> str:
    ending = "" if most.startswith("ranks") else "s"
    if not other:
        return f"it lacks {leaf} ({', '.join(usual)}), which {most} hold{ending}"
    if not usual:
        return f"it holds {leaf} ({', '.join(other)}), which {most} lack{ending}"
    return f"its {leaf} is {', '.join(other)}, but on {most} it is {', '.join(usual)}"


def _kinds(detail: Detail, leaf: str) -> list[str]:
    return [kind for kind, _ in detail.boxes.get(leaf, ())]


def _describe(spec: ArraySpec, box: Box) -> str:
    whole = f"{spec.dtype} {list(spec.shape)}"
    return whole if box.is_whole(spec.shape) else f"{box} of {whole}"


def _sum_up(holders: str, detail: Detail, may_differ: bool) -> ReplicaDigest:
    ordered = sorted(detail.boxes.items())
    names = "\n".join(f"{leaf}\t{kind}" for leaf, boxes in ordered for kind, _ in boxes)
    values = "".join(value for _, boxes in ordered for _, value in boxes)
    count = sum(len(boxes) for _, boxes in ordered)
    return ReplicaDigest(
        holders, len(detail.holders), count, _digest(names), _digest(values) if values else "", may_differ
    )


def _digest(words: str) -> str:
    return digest(words.encode(errors="surrogatepass"))[:_DIGEST_CHARACTERS]


_MOST_PIECES: Final = 64
"""How many values of the store one worker's details may take. If it would need more, it sends nothing."""


class _ReplicaQuestion(msgspec.Struct, frozen=True, array_like=True):
    """The groups of workers that must send details."""

    ranks: tuple[int, ...]
    groups: tuple[str, ...]


class ReplicaQuery:
    """The questions and answers of one save. Not thread-safe.

    question                  the leader's question: which workers, about what
    detail/RANK/NUMBER        the details of one of these, in pieces
    detail/RANK               the number of pieces

    Methods raise `ClusterError` if the store does not respond.
    """

    def __init__(self, peers: Peers, key: Callable[[str], str]) -> None:
        self._peers = peers
        self._key = key
        self._asked: tuple[int, ...] = ()
        self.question = key("question")

    def compare(self, groups: Sequence[Sequence[ReplicaDigest]], own: HeldReplicas) -> list[Divergence]:
        """**Blocks** if something differs. Returns the leaves whose values differ, from each worker's report.

        Raises:
            PeerError: If workers do not hold the same leaves; the error names one of them.
        """
        disagreements = find_disagreements(groups)
        if not disagreements:
            return []
        named = tuple(one.holders for one in disagreements)
        # Those that agree would say the same.
        asked = sorted({side[0] for one in disagreements for side in one.sides[:MOST_SIDES]} - {self._peers.rank})
        self._asked = tuple(asked)
        self._peers.cluster.set(self.question, msgspec.msgpack.encode(_ReplicaQuestion(self._asked, named)))
        end_at = time.monotonic() + ANSWER_SECONDS
        details = {self._peers.rank: own.details(named)}
        for rank in asked:
            # Its bytes are durable: if it is gone, what it holds just is not known.
            with suppress(DeadlineError):
                details[rank] = self._wait_details(rank, end_at)
        found: list[Divergence] = []
        for one in disagreements:
            held = {rank: detail[one.holders] for rank, detail in details.items() if one.holders in detail}
            if not one.are_named_alike:
                rank, text = name_difference(one, held)
                raise self._peers.failures.make_error(Failure.of(rank, UsageError.__name__, text, LEAVES_HINT))
            found += name_divergences(one, held)
        return found

    def answer(self, question: bytes, own: HeldReplicas) -> None:
        """Sends what this worker holds, if it is asked."""
        asked = msgspec.msgpack.decode(question, type=_ReplicaQuestion)
        if self._peers.rank not in asked.ranks:
            return
        data = msgspec.msgpack.encode(own.details(asked.groups))
        pieces = [data[begin : begin + MAX_VALUE_BYTES] for begin in range(0, len(data), MAX_VALUE_BYTES)]
        if len(pieces) > _MOST_PIECES:
            pieces = [msgspec.msgpack.encode({})]
        for number, piece in enumerate(pieces):
            self._peers.cluster.set(self._key(f"detail/{self._peers.rank}/{number}"), piece)
        self._peers.cluster.set(self._key(f"detail/{self._peers.rank}"), b"%d" % len(pieces))

    def forget(self) -> None:
        """On the leader, deletes all records."""
        for rank in self._asked:
            pieces = int(self._peers.cluster.try_get(self._key(f"detail/{rank}")) or 0)
            self._peers.delete(self._key(f"detail/{rank}/{number}") for number in range(pieces))
            self._peers.delete([self._key(f"detail/{rank}")])
        if self._asked:
            self._peers.delete([self.question])
            self._asked = ()

    def _wait_details(self, rank: int, end_at: float) -> dict[str, Detail]:
        cluster = self._peers.cluster
        pieces = int(cluster.wait_get(self._key(f"detail/{rank}"), max(end_at - time.monotonic(), 0.0)))
        data = b"".join(cluster.wait_get(self._key(f"detail/{rank}/{number}"), 0.0) for number in range(pieces))
        return msgspec.msgpack.decode(data, type=dict[str, Detail])
