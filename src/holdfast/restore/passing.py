"""Reads once what several workers of a job need, and passes it on between them.

A storage whose traits say `passes_on` is slow, or costs money, where each of many workers reads the same. So one of the
workers that take a piece as a whole is its reader: it reads and checks the piece, and sends it to the others, who check
it by the same digests. What does not come, comes late or is wrong, a worker reads itself: nothing here makes a restore
fail.

Each worker that takes part posts an offer with an address and a secret. A reader connects to it, and sends the secret,
its rank as 4 bytes, and its pieces: the file's name and the piece's place as JSON, with the length of that as 4 bytes
before it, and then the bytes. It gets no reply.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

import msgspec

from holdfast.cluster.peers import Namespace
from holdfast.errors import HoldfastError
from holdfast.process.latch import Latch, start_thread
from holdfast.process.worker_pool import WorkerPool
from holdfast.restore.read import Destinations, Order, Parts, Piece, find_damages, list_reads, plan_pieces, read_orders
from holdfast.restore.records import Part
from holdfast.storage.digesting import digest_parts
from holdfast.storage.protocol import FileReader, Storage

_GROUP: Final = 16
"""So many workers of adjacent ranks pass pieces on to each other: each has a connection to each."""

_LEAST_BYTES: Final = 32 << 20
"""A worker that takes less reads it itself."""

_CONNECT_SECONDS: Final = 5.0
_SEND_SECONDS: Final = 10.0
_GRACE_SECONDS: Final = 10.0
"""How long a worker that has read its own part waits for the others, besides twice the time that it took itself."""

_NUMBER: Final = struct.Struct("<I")
_MOST_HEADER_BYTES: Final = 4096

Orders: TypeAlias = Sequence[tuple[Part, Order]]


class _Offer(msgspec.Struct, frozen=True):
    """The arrays that a worker takes as a whole, and its address.

    Attributes:
        taken: Of each file, by its key, one bit for each array, the lowest first.
    """

    host: str
    port: int
    secret: str
    taken: dict[str, bytes]


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """Comes before a piece."""

    file: str
    begin: int
    end: int


class _Passed(NamedTuple):
    """A piece that several workers take: the first of `ranks` reads it, and passes it on to the others."""

    part: Part
    piece: Piece
    destinations: Destinations
    ranks: tuple[int, ...]

    @property
    def header(self) -> _Header:
        return _Header(_key_of(self.part), self.piece.begin, self.piece.end)


class Passing:
    """One worker's part in one restore; use it with `closing`.

    Attributes:
        problems: Sentences about workers that did not pass on what they should have.
    """

    def __init__(self, records: Namespace, rank: int, world_size: int) -> None:
        """`records` is for this restore alone, and the same on all workers."""
        self._records, self._rank = records, rank
        first = rank - rank % _GROUP
        self._others = [other for other in range(first, min(first + _GROUP, world_size)) if other != rank]
        self._secret = os.urandom(16).hex()
        self._listener: socket.socket | None = None
        self._outlets: dict[int, _Outlet] = {}
        # Guards the three below it: the connections that others have made, and their ranks.
        self._lock = threading.Lock()
        self._inlets: list[tuple[socket.socket, Latch]] = []
        self._connected: set[int] = set()
        self._is_ended = False
        # By rank what has yet to come, which the thread of its connection alone removes, and what went wrong.
        self._awaited: dict[int, dict[_Header, _Passed]] = {}
        self._faults: dict[int, str] = {}
        self.problems: list[str] = []

    def offer(self, orders: Orders) -> None:
        """Tells the others what this worker takes. All have called it, or never will, before one calls `fill`."""
        taken: dict[str, bytes] = {}
        size_bytes = 0
        for part, order in orders:
            bits = bytearray(len(part.index.leaves) // 8 + 1)
            for number in order.whole:
                bits[number >> 3] |= 1 << (number & 7)
                size_bytes += part.index.leaves[number].end - part.index.leaves[number].begin
            taken[_key_of(part)] = bytes(bits)
        if size_bytes < _LEAST_BYTES or not self._others:
            return
        with suppress(OSError, HoldfastError):
            # Without it, the worker reads alone, and the others read without it.
            listener = socket.create_server((_find_own_address(), 0), backlog=_GROUP)
            host, port = listener.getsockname()
            self._records.post(_Offer(host, port, self._secret, taken), self._rank)
            self._listener = listener

    def fill(
        self,
        storage: Storage,
        orders: Orders,
        readers: Mapping[str, FileReader],
        pool: WorkerPool,
        advance: Callable[[int], object] | None,
    ) -> int:
        """**Collective.** **Blocks.** Like `read_orders`, from the storage and from the other workers."""
        begun_at = time.monotonic()
        offers: dict[int, _Offer] = {}
        if self._listener is not None:
            with suppress(HoldfastError):
                found = {rank: self._records.read(_Offer, rank) for rank in (self._rank, *self._others)}
                offers = {rank: offer for rank, offer in found.items() if offer is not None}
        passed, rest = self._divide(orders, offers) if len(offers) > 1 else ([], orders)
        own = [one for one in passed if one.ranks[0] == self._rank]
        read = partial(_read_pieces, storage, readers, pool)
        try:
            if passed:
                self._connect(passed, offers, pool, advance)
            read(own, partial(self._take, advance=advance))
            size_bytes = read_orders(storage, rest, readers, pool, storage, advance)
            now = time.monotonic()
            self._wait(begun_at + _CONNECT_SECONDS, now + _GRACE_SECONDS + 2 * (now - begun_at))
        finally:
            self._disconnect()
        missing = [one for waited in self._awaited.values() for one in waited.values()]
        read(missing, partial(_put, advance=advance))
        return size_bytes + sum(one.piece.size_bytes for one in passed)

    def close(self) -> None:
        """Withdraws the offer, once all workers have filled; may be repeated."""
        self._disconnect()
        if self._listener is not None:
            self._listener = None
            self._records.delete(self._records.key(self._rank))

    def _disconnect(self) -> None:
        """**Blocks** for a moment. Ends all connections: no thread fills anything any more."""
        with self._lock:
            self._is_ended = True
            inlets = self._inlets.copy()
        for sock in [self._listener, *(outlet.sock for outlet in self._outlets.values()), *(one for one, _ in inlets)]:
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # It wakes a thread that waits for it.
                sock.close()
        for _, ended in inlets:
            ended.wait(threading.TIMEOUT_MAX)

    def _divide(self, orders: Orders, offers: Mapping[int, _Offer]) -> tuple[list[_Passed], Orders]:
        """**Pure.** Returns the pieces that several workers take, the same on each, and what this one reads alone.

        The readers take turns, so that each reads about as much.
        """
        passed: list[_Passed] = []
        rest: list[tuple[Part, Order]] = []
        for part, order in orders:
            taken = {rank: offer.taken.get(_key_of(part), b"") for rank, offer in offers.items()}
            takers = {number: tuple(sorted(_find_takers(taken, number))) for number in sorted(order.whole)}
            shared = {number for number, ranks in takers.items() if len(ranks) > 1}
            alone = _choose(order, {*order.whole, *order.shares} - shared)
            if alone:
                rest.append((part, alone))
            if not shared:
                continue
            destinations = Destinations(part.index, _choose(order, shared))
            turns: dict[tuple[int, ...], int] = {}
            for ranks, numbers in groupby(sorted(shared), key=takers.__getitem__):
                for piece in plan_pieces(part.index, numbers, {}):
                    turn = turns.setdefault(ranks, part.index.rank) % len(ranks)
                    turns[ranks] += 1
                    passed.append(_Passed(part, piece, destinations, (*ranks[turn:], *ranks[:turn])))
        return passed, rest

    def _connect(
        self,
        passed: Iterable[_Passed],
        offers: Mapping[int, _Offer],
        pool: WorkerPool,
        advance: Callable[[int], object] | None,
    ) -> None:
        """Connects to those to whom this worker passes pieces on, and accepts those that pass them on to it."""
        wanted: set[int] = set()
        for one in passed:
            if one.ranks[0] == self._rank:
                wanted.update(one.ranks[1:])
            else:
                self._awaited.setdefault(one.ranks[0], {})[one.header] = one
        if self._awaited:
            start_thread(partial(self._accept, advance), "holdfast-accept")
        self._outlets = {rank: _Outlet() for rank in wanted}
        hello = _NUMBER.pack(self._rank)
        pool.run(partial(self._outlets[rank].connect, offers[rank], hello) for rank in sorted(wanted))

    def _take(self, one: _Passed, parts: Parts, *, advance: Callable[[int], object] | None) -> None:
        """Passes on a piece that this worker has read and checked."""
        encoded = msgspec.json.encode(one.header)
        for rank in one.ranks[1:]:
            self._outlets[rank].send([_NUMBER.pack(len(encoded)) + encoded, *parts])
        _put(one, parts, advance=advance)

    def _accept(self, advance: Callable[[int], object] | None) -> None:
        """Accepts the connections of others, each of which has a thread, until this is closed."""
        listener = self._listener
        with suppress(OSError):
            while listener is not None:
                sock, _ = listener.accept()
                with self._lock:
                    if self._is_ended:
                        sock.close()
                        return
                    ended = start_thread(partial(self._receive, sock, advance), "holdfast-receive")
                    self._inlets.append((sock, ended))

    def _receive(self, sock: socket.socket, advance: Callable[[int], object] | None) -> None:
        """Takes the pieces of another worker; ends with the connection, or once all have come."""
        rank = -1
        try:
            sock.settimeout(_CONNECT_SECONDS)
            if not hmac.compare_digest(_receive_bytes(sock, len(self._secret)), self._secret.encode()):
                return
            rank = _NUMBER.unpack(_receive_bytes(sock, _NUMBER.size))[0]
            with self._lock:
                if rank in self._connected:
                    return
                self._connected.add(rank)
            sock.settimeout(None)  # `_wait` has the deadline, and closes it.
            while self._awaited.get(rank):
                self._receive_piece(sock, rank, advance)
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            self._faults.setdefault(rank, str(error) or "the connection ended")
        finally:
            sock.close()

    def _receive_piece(self, sock: socket.socket, rank: int, advance: Callable[[int], object] | None) -> None:
        length_bytes = _NUMBER.unpack(_receive_bytes(sock, _NUMBER.size))[0]
        if length_bytes > _MOST_HEADER_BYTES:
            raise ValueError("it sends something else than pieces")
        header = msgspec.json.decode(_receive_bytes(sock, length_bytes), type=_Header)
        one = self._awaited[rank].get(header)
        if one is None:
            raise ValueError(f"it sends {header}, which was not awaited")
        parts = one.destinations.parts_of(one.piece)
        for part in parts:
            _receive_into(sock, part)
        for damage in find_damages(one.part.index, one.part.path, one.piece, digest_parts(parts)):
            raise ValueError(f"what it sends is wrong: {damage.message}")
        _put(one, parts, advance=advance)
        del self._awaited[rank][header]

    def _wait(self, connected_at: float, end_at: float) -> None:
        """**Blocks.** Waits until all has come, as long as there is hope and time."""
        while waited := [rank for rank, left in self._awaited.items() if left]:
            with self._lock:
                under_way = [ended for _, ended in self._inlets if not ended.is_open]
                may_come = not self._connected.issuperset(waited)
            now = time.monotonic()
            if now > end_at or not (under_way or (may_come and now < connected_at)):
                break
            if under_way:
                under_way[0].wait(min(0.1, end_at - now))
            else:
                time.sleep(0.01)
        for rank in waited:
            pieces = len(self._awaited[rank])
            why = self._faults.get(rank, "it was too slow, or could not be reached")
            self.problems.append(f"rank {rank} did not pass on {pieces} pieces, which were read again: {why}")


class _Outlet:
    """**Thread-safe.** A connection to a worker, to which pieces are passed on until that fails.

    Attributes:
        sock: The connection; None if there is none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sock: socket.socket | None = None

    def connect(self, offer: _Offer, hello: bytes) -> None:
        """**Blocks** for a few seconds at most."""
        with suppress(OSError):
            sock = socket.create_connection((offer.host, offer.port), _CONNECT_SECONDS)
            sock.settimeout(_SEND_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(offer.secret.encode() + hello)
            self.sock = sock

    def send(self, buffers: Iterable[bytes | memoryview]) -> None:
        """**Blocks.** Sends what belongs together; the first failure ends the connection."""
        with self._lock:
            if self.sock is None:
                return
            try:
                for buffer in buffers:
                    self.sock.sendall(buffer)
            except OSError:
                self.sock.close()
                self.sock = None


def _key_of(part: Part) -> str:
    # The numbers of arrays are those of an index: two may refer to one file.
    return f"{part.index.rank}:{part.path}"


def _find_takers(taken: Mapping[int, bytes], number: int) -> Iterator[int]:
    return (rank for rank, bits in taken.items() if number >> 3 < len(bits) and bits[number >> 3] >> (number & 7) & 1)


def _choose(order: Order, numbers: set[int]) -> Order:
    return Order(
        {number: target for number, target in order.whole.items() if number in numbers},
        {number: shares for number, shares in order.shares.items() if number in numbers},
    )


def _put(one: _Passed, parts: Parts, *, advance: Callable[[int], object] | None) -> None:
    one.destinations.receive(one.piece, parts)
    if advance is not None:
        advance(one.piece.size_bytes)


def _read_pieces(
    storage: Storage,
    readers: Mapping[str, FileReader],
    pool: WorkerPool,
    pieces: Iterable[_Passed],
    take: Callable[[_Passed, Parts], None],
) -> None:
    """**Blocks.** Reads pieces from the storage, and gives those that are whole to `take`."""
    with ExitStack() as files:
        jobs: list[Callable[[], None]] = []
        opened = dict(readers)
        for one in pieces:
            path = one.part.path
            if path not in opened:
                opened[path] = files.enter_context(closing(one.part.open(storage, storage)))

            def receive(piece: Piece, parts: Parts, found: list[str], one: _Passed = one) -> None:
                for damage in find_damages(one.part.index, one.part.path, piece, found):
                    raise damage
                take(one, parts)

            jobs += list_reads(one.part, opened[path], [one.piece], one.destinations.parts_of, receive)
        pool.run(jobs)


def _receive_bytes(sock: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    _receive_into(sock, memoryview(data))
    return bytes(data)


def _receive_into(sock: socket.socket, into: memoryview) -> None:
    while into.nbytes:
        count = sock.recv_into(into)
        if not count:
            raise EOFError
        into = into[count:]


def _find_own_address() -> str:
    """Returns the address by which other machines reach this one, as far as its routes tell."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # Nothing is sent: the address is one for documents.
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])
