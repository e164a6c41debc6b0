"""The work of each worker of a job while its cluster is tested: the part of the contract that runs in many processes.

All workers run the same scenario at the same time. One that ends without an error has seen what it expected.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.cluster.barrier import gather_decide_broadcast
from holdfast.cluster.failure_detector import Heartbeat, find_machine
from holdfast.cluster.protocol import MAX_COUNT, MAX_KEY_BYTES, MAX_VALUE_BYTES, Cluster
from holdfast.errors import AbsentError, ClosedError, ClusterError, DeadlineError, HoldfastError, UsageError

PATIENCE_SECONDS: Final = 30.0
"""The timeout for events that come at once on a machine that is not overloaded."""

SHORT_SECONDS: Final = 0.5
"""The timeout for events that never come."""

LOSS_SECONDS: Final = 3.0
"""The time after which a killed worker is lost."""

BAD_KEYS: Final = ("", "/", "/a", "a/", "a//b", "a b", "ä", "a\n", "x" * (MAX_KEY_BYTES + 1))


def gather(cluster: Cluster, name: str, record: bytes, timeout_seconds: float) -> list[bytes]:
    """**Collective.** **Blocks.** Returns the records of all workers, by rank; see `gather_decide_broadcast`."""
    answer = gather_decide_broadcast(cluster, name, record, msgspec.msgpack.encode, timeout_seconds)
    return msgspec.msgpack.decode(answer, type=list[bytes])


def rendezvous(cluster: Cluster, name: str, timeout_seconds: float) -> None:
    """**Collective.** **Blocks.** Waits until all workers have come to this meeting; see `gather_decide_broadcast`."""
    gather_decide_broadcast(cluster, name, b"", lambda records: b"", timeout_seconds)


def play(cluster: Cluster, scenario: str) -> None:
    """Runs one scenario, or with `all` all that end by themselves, and prints each result as a line of JSON."""
    names = list(SCENARIOS) if scenario == "all" else [scenario]
    for name in names:
        begun_at = time.monotonic()
        try:
            {**SCENARIOS, **ENDLESS}[name](cluster)
            error = ""
        except (AssertionError, HoldfastError) as failure:
            error = f"rank {cluster.rank}: {type(failure).__name__}: {failure}"
            import traceback

            traceback.print_exc()
        say({"scenario": name, "error": error, "seconds": time.monotonic() - begun_at})


def say(record: dict[str, object]) -> None:
    """Prints a record in one piece, so that lines of several workers do not mix."""
    os.write(sys.stdout.fileno(), (json.dumps(record) + "\n").encode())


def check_members(cluster: Cluster) -> None:
    """All agree on the members."""
    assert isinstance(cluster, Cluster)
    assert 0 <= cluster.rank < cluster.world_size
    told = gather(cluster, "members", f"{cluster.rank} {cluster.incarnation} {cluster.node}".encode(), PATIENCE_SECONDS)
    ranks, incarnations, nodes = zip(*(record.decode().split(" ", 2) for record in told), strict=True)
    assert list(ranks) == [str(rank) for rank in range(cluster.world_size)]
    assert set(incarnations) == {cluster.incarnation}
    assert cluster.incarnation
    assert [cluster.node_of(rank) for rank in range(cluster.world_size)] == list(nodes)


def check_values(cluster: Cluster) -> None:
    """All can read a value that one has set."""
    own = f"values/{cluster.rank}"
    assert cluster.try_get(own) is None
    for value in (b"", b"\0\xff = bytes", b"x" * MAX_VALUE_BYTES, b"last of %d" % cluster.rank):
        cluster.set(own, value)
        assert cluster.try_get(own) == value
        assert cluster.wait_get(own, 0) == value
    rendezvous(cluster, "values-are-set", PATIENCE_SECONDS)
    for rank in range(cluster.world_size):
        assert cluster.try_get(f"values/{rank}") == b"last of %d" % rank
    rendezvous(cluster, "values-are-read", PATIENCE_SECONDS)
    cluster.delete(own)
    cluster.delete(own)
    assert cluster.try_get(own) is None


def check_deleted(cluster: Cluster) -> None:
    """A value that is deleted while others read it is whole, or missing."""
    value = b"a value"
    if cluster.rank == 0:
        for _ in range(500):
            cluster.set("deleted", value)
            cluster.delete("deleted")
        cluster.set("deleted-enough", b"")
    while cluster.try_get("deleted-enough") is None:
        assert cluster.try_get("deleted") in (None, value)


def check_set_once(cluster: Cluster) -> None:
    """Of all that set a key once, one succeeds, and all learn its value."""
    mine = b"" if cluster.rank == 0 else str(cluster.rank).encode()
    for number in range(20):
        standing = cluster.set_once(f"once/{number}", mine)
        assert cluster.try_get(f"once/{number}") == standing
        assert set(gather(cluster, f"once-{number}", standing, PATIENCE_SECONDS)) == {standing}
        assert cluster.set_once(f"once/{number}", b"later") == standing
    cluster.delete("once/0")
    rendezvous(cluster, "once-deleted", PATIENCE_SECONDS)
    assert cluster.set_once("once/0", b"anew") == b"anew"


def check_counters(cluster: Cluster) -> None:
    """No sum is lost."""
    assert cluster.add(f"high/{cluster.rank}", MAX_COUNT - 1) == MAX_COUNT - 1
    assert cluster.add(f"high/{cluster.rank}", 1 - MAX_COUNT) == 0
    assert cluster.add(f"high/{cluster.rank}", 1 - MAX_COUNT) == 1 - MAX_COUNT
    assert cluster.add(f"high/{cluster.rank}", 0) == 1 - MAX_COUNT
    sums = [cluster.add("counter", 3) for _ in range(100)]
    assert sums == sorted(set(sums))
    rendezvous(cluster, "counted", PATIENCE_SECONDS)
    assert cluster.add("counter", 0) == 300 * cluster.world_size
    rendezvous(cluster, "count-read", PATIENCE_SECONDS)
    cluster.add("counter", -301)
    rendezvous(cluster, "counted-back", PATIENCE_SECONDS)
    assert cluster.add("counter", 0) == -cluster.world_size
    rendezvous(cluster, "count-read-again", PATIENCE_SECONDS)
    cluster.delete("counter")
    rendezvous(cluster, "count-deleted", PATIENCE_SECONDS)
    assert cluster.add("counter", 0) == 0


def check_limits(cluster: Cluster) -> None:
    """Invalid values are refused before the store is queried."""
    calls: list[Callable[[str], object]] = [
        lambda key: cluster.set(key, b""),
        lambda key: cluster.set_once(key, b""),
        cluster.try_get,
        lambda key: cluster.wait_get(key, 1),
        lambda key: cluster.add(key, 1),
        cluster.delete,
    ]
    for call in calls:
        for key in BAD_KEYS:
            _expect(UsageError, lambda call=call, key=key: call(key))  # type: ignore[misc]
    for store in (cluster.set, cluster.set_once):
        error = _expect(UsageError, lambda store=store: store("large", b"x" * (MAX_VALUE_BYTES + 1)))  # type: ignore[misc]
        assert str(MAX_VALUE_BYTES) in str(error)
    _expect(UsageError, lambda: cluster.add("number", 1 << 70))
    longest = "k" * MAX_KEY_BYTES
    cluster.set(longest, b"value")
    assert cluster.try_get(longest) == b"value"


def check_waits(cluster: Cluster) -> None:
    """A wait ends with its deadline or when the value comes, and holds up no others."""
    begun_at = time.monotonic()
    _expect(DeadlineError, lambda: cluster.wait_get("never", SHORT_SECONDS))
    assert SHORT_SECONDS <= time.monotonic() - begun_at < PATIENCE_SECONDS
    found: list[bytes] = []
    keys = [f"later/{cluster.rank}/{number}" for number in range(4)]
    waiters = [
        threading.Thread(target=lambda key=key: found.append(cluster.wait_get(key, PATIENCE_SECONDS))) for key in keys
    ]
    for waiter in waiters:
        waiter.start()
    begun_at = time.monotonic()
    for number in range(50):
        cluster.set(f"busy/{cluster.rank}", str(number).encode())
        assert cluster.try_get(f"busy/{cluster.rank}") == str(number).encode()
    assert not found
    assert time.monotonic() - begun_at < PATIENCE_SECONDS / 2
    for key in keys:
        cluster.set(key, b"here")
    for waiter in waiters:
        waiter.join(PATIENCE_SECONDS)
    assert found == [b"here"] * len(keys)


def check_threads(cluster: Cluster) -> None:
    """Any number of threads may use it at a time."""
    sums: list[int] = []

    def use(number: int) -> None:
        for turn in range(20):
            cluster.set(f"thread/{cluster.rank}/{number}", str(turn).encode())
            assert cluster.try_get(f"thread/{cluster.rank}/{number}") == str(turn).encode()
            sums.append(cluster.add(f"threads/{cluster.rank}", 1))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert sorted(sums) == list(range(1, 161))


def check_gather(cluster: Cluster) -> None:
    """All get the records of all, however large, and nothing stays in the store."""
    for size_bytes in (0, 1, MAX_VALUE_BYTES // 2, MAX_VALUE_BYTES):
        name = f"gathered-{size_bytes}"
        records = gather(cluster, name, bytes([cluster.rank]) * size_bytes, PATIENCE_SECONDS)
        assert records == [bytes([rank]) * size_bytes for rank in range(cluster.world_size)]
        # All have left that meeting when all have come to the next but one.
        rendezvous(cluster, f"{name}-after", PATIENCE_SECONDS)
        rendezvous(cluster, f"{name}-long-after", PATIENCE_SECONDS)
        left = [f"{name}/outcome", f"{name}/answer/0", f"{name}/answer/1", f"{name}/record/{cluster.rank}"]
        assert [cluster.try_get(key) for key in left] == [None] * len(left)


def check_absent(cluster: Cluster) -> None:
    """A worker that does not come is named, with its node, and one that comes too late gets the same error."""
    absent = cluster.world_size - 1
    if cluster.world_size == 1:
        return
    if cluster.rank == absent:
        cluster.wait_get("absent/missed", PATIENCE_SECONDS)
        error = _expect(AbsentError, lambda: rendezvous(cluster, "absent", PATIENCE_SECONDS))
    else:
        error = _expect(AbsentError, lambda: rendezvous(cluster, "absent", SHORT_SECONDS))
        cluster.set("absent/missed", b"")
    assert isinstance(error, AbsentError)
    assert error.ranks == (absent,)
    assert error.nodes == (cluster.node_of(absent),)
    assert f"rank {absent}" in str(error)
    assert isinstance(error, DeadlineError)
    # The leader's absence differs from that of others.
    rendezvous(cluster, "present", PATIENCE_SECONDS)
    if cluster.rank == 0:
        cluster.wait_get("absent/leader-missed", PATIENCE_SECONDS)
    else:
        error = _expect(AbsentError, lambda: rendezvous(cluster, "leaderless", SHORT_SECONDS))
        assert isinstance(error, AbsentError)
        assert 0 in error.ranks
        cluster.set("absent/leader-missed", b"")
    rendezvous(cluster, "present-again", PATIENCE_SECONDS)


def check_many_keys(cluster: Cluster) -> None:
    """A store that many keys went through works like a new one."""
    for number in range(300):
        key = f"many/{cluster.rank}/{number}"
        cluster.set(key, b"x" * 100)
        cluster.add(f"{key}/count", 1)
        cluster.delete(key)
        cluster.delete(f"{key}/count")
        assert cluster.try_get(key) is None
    assert cluster.add(f"many/{cluster.rank}/0/count", 0) == 0


def check_heartbeat(cluster: Cluster) -> None:
    """Live workers are there, and those that leave have left."""
    heartbeat = Heartbeat(cluster, 0.05, LOSS_SECONDS, name="beats")
    leaver = cluster.world_size - 1
    rendezvous(cluster, "all-beat", PATIENCE_SECONDS)
    heartbeat.check()
    assert not heartbeat.lost
    assert not heartbeat.gone
    if cluster.world_size > 1:
        rendezvous(cluster, "before-leaving", PATIENCE_SECONDS)
        if cluster.rank == leaver:
            heartbeat.stop()
        else:
            error = _expect(AbsentError, lambda: _watch(heartbeat, (leaver,)))
            assert isinstance(error, AbsentError)
            assert error.ranks == heartbeat.gone == (leaver,)
            assert not heartbeat.lost
            heartbeat.check(range(leaver))
    # Not before: else it is the others that leave.
    rendezvous(cluster, "beats-end", PATIENCE_SECONDS)
    heartbeat.stop()
    heartbeat.stop()


def check_close(cluster: Cluster) -> None:
    """After the end there is an error that says so. This one is run last."""
    rendezvous(cluster, "all-close", PATIENCE_SECONDS)
    _leave_together(cluster, cluster.world_size)
    cluster.close()
    cluster.close()
    for call in (lambda: cluster.set("key", b""), lambda: cluster.try_get("key"), lambda: cluster.add("key", 1)):
        _expect(ClosedError, call)


def play_bereaved(cluster: Cluster) -> None:
    """The test kills the last worker. The others miss it, and continue to meet without it."""
    victim = cluster.world_size - 1
    # Where the system reports the end of a process, no worker waits for its signs of life.
    heartbeat = Heartbeat(cluster, 0.1, 4 * PATIENCE_SECONDS if find_machine() else LOSS_SECONDS)
    # Each registers its process after its first sign of life, so with a second sign it has.
    for rank in range(cluster.world_size):
        _await_count(cluster, f"heartbeat/{rank}", 2)
    rendezvous(cluster, "all-live", PATIENCE_SECONDS)
    say({"ready": cluster.rank, "pid": os.getpid()})
    error = _expect(AbsentError, lambda: _watch(heartbeat, None))
    assert isinstance(error, AbsentError)
    assert error.ranks == heartbeat.lost == (victim,)
    assert error.nodes == (cluster.node_of(victim),)
    _expect(AbsentError, lambda: rendezvous(cluster, "without-it", SHORT_SECONDS))
    _leave_together(cluster, cluster.world_size - 1)


def play_storeless(cluster: Cluster) -> None:
    """The test kills the store's host. Every call reports it within its deadline."""
    heartbeat = Heartbeat(cluster, 0.1, LOSS_SECONDS)
    rendezvous(cluster, "all-live", PATIENCE_SECONDS)
    say({"ready": cluster.rank, "pid": os.getpid()})
    begun_at = time.monotonic()
    error = _expect(ClusterError, lambda: cluster.wait_get("never", 4 * PATIENCE_SECONDS))
    assert "store" in str(error)
    _expect(ClusterError, lambda: cluster.set("key", b"value"))
    _expect(ClusterError, lambda: rendezvous(cluster, "nowhere", 4 * PATIENCE_SECONDS))
    # A worker that hosted it is known to have died.
    _expect(HoldfastError, lambda: _watch(heartbeat, None))
    assert time.monotonic() - begun_at < 4 * PATIENCE_SECONDS
    heartbeat.stop()


def play_restarted(cluster: Cluster) -> None:
    """The test starts the job a second time. Nothing of the first is left."""
    say({"incarnation": cluster.incarnation})
    own = f"restarted/{cluster.rank}"
    rendezvous(cluster, "all-begin", PATIENCE_SECONDS)
    assert cluster.try_get(f"{own}/value") is None
    assert cluster.set_once(f"{own}/once", cluster.incarnation.encode()) == cluster.incarnation.encode()
    assert cluster.add(f"{own}/count", 1) == 1
    cluster.set(f"{own}/value", b"")
    rendezvous(cluster, "all-end", PATIENCE_SECONDS)
    _leave_together(cluster, cluster.world_size - 1)


def _leave_together(cluster: Cluster, count: int) -> None:
    """Lets the leader leave last: it may be the one that hosts the store."""
    cluster.add("leaving", 1)
    if cluster.rank == 0:
        _await_count(cluster, "leaving", count)


def _await_count(cluster: Cluster, key: str, count: int) -> None:
    end_at = time.monotonic() + PATIENCE_SECONDS
    while cluster.add(key, 0) < count and time.monotonic() < end_at:
        time.sleep(0.01)  # It is a counter, and only values can be waited for.


def _watch(heartbeat: Heartbeat, ranks: tuple[int, ...] | None) -> None:
    end_at = time.monotonic() + 2 * PATIENCE_SECONDS
    while time.monotonic() < end_at:
        heartbeat.check(ranks)
        time.sleep(0.01)  # A heartbeat is asked; it makes no calls.


def _expect(kind: type[HoldfastError], call: Callable[[], object]) -> HoldfastError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


SCENARIOS: Final[dict[str, Callable[[Cluster], None]]] = {
    "members": check_members,
    "values": check_values,
    "deleted": check_deleted,
    "set_once": check_set_once,
    "counters": check_counters,
    "limits": check_limits,
    "waits": check_waits,
    "threads": check_threads,
    "gather": check_gather,
    "absent": check_absent,
    "many_keys": check_many_keys,
    "heartbeat": check_heartbeat,
    "close": check_close,
}
"""Those that end by themselves, in the order in which they are played."""

ENDLESS: Final[dict[str, Callable[[Cluster], None]]] = {
    "bereaved": play_bereaved,
    "storeless": play_storeless,
    "restarted": play_restarted,
}
"""Those for which the test kills a process, or starts the job again."""
