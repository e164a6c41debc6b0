"""How workers find each other, meet, and miss each other: by threads, over a store that can be cut."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

import holdfast as hf
from command_line import run_python
from holdfast.cluster.barrier import count_read, wait_counted
from holdfast.cluster.connection_pool import ConnectionPool
from holdfast.cluster.discover import describe_lone_task
from holdfast.cluster.failure_detector import Heartbeat
from holdfast.cluster.mailbox import StoreMailbox, Watch
from holdfast.cluster.peers import Failure, Peers
from holdfast.cluster.polling import (
    CALLS_PER_SECOND,
    JOINING,
    NEWS,
    ONE_KEY,
    SOME_KEYS,
    URGENT_NEWS,
    Backoff,
    poll,
)
from holdfast.cluster.protocol import Cluster, name_ranks
from holdfast.cluster.store import Joining
from holdfast.errors import AbsentError, ClosedError, ClusterError, HoldfastError, PeerError, UsageError
from holdfast.events import Event, Warned
from holdfast.testing.cluster_scenarios import gather, rendezvous
from memory_engine import MemoryEngine, run_workers

PATIENCE_SECONDS = 30.0
SHORT_SECONDS = 0.3


class Job:
    """Starts processes of a job, as threads: each joins as if it had never joined before."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self._threads = ThreadPoolExecutor(32)
        self._pools: list[ConnectionPool] = []

    def start(self, rank: int, world_size: int, timeout_seconds: float = PATIENCE_SECONDS) -> Future[str]:
        pool = ConnectionPool(self.engine.connect, "this process")
        self._pools.append(pool)
        joining = Joining(pool, "job", rank, world_size, f"node-{rank}", timeout_seconds)
        return self._threads.submit(joining.join)

    def wait_key(self, start: str) -> None:
        end_at = time.monotonic() + PATIENCE_SECONDS
        while not any(key.startswith(start) for key in self.engine.keys):
            assert time.monotonic() < end_at
            time.sleep(0.001)  # It is the store's own memory, which tells nobody of what is written.

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        for pool in self._pools:
            pool.close()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def tokens(futures: list[Future[str]]) -> set[str]:
    return {future.result(PATIENCE_SECONDS) for future in futures}


# Joining.


@pytest.mark.parametrize("sizes", [(1,), (2,), (16,), (3, 3, 3), (2, 4, 1, 3)])
def test_each_start_has_a_token_of_its_own(job: Job, sizes: tuple[int, ...]) -> None:
    seen = []
    for size in sizes:
        (token,) = tokens([job.start(rank, size) for rank in reversed(range(size))])
        seen.append(token)
    assert len(set(seen)) == len(sizes)
    # What stays is a word for each rank that there ever was, and one key for each start.
    assert len(job.engine.keys) == max(sizes) + len(sizes)


def test_what_the_dead_have_left_is_not_taken_for_a_worker(job: Job) -> None:
    dead = job.start(1, 2, SHORT_SECONDS)
    with pytest.raises(AbsentError) as caught:
        dead.result(2 * PATIENCE_SECONDS)
    assert caught.value.ranks == (0,)
    leader = job.start(0, 2)
    # It finds the word of the dead one, and waits for an answer.
    job.wait_key("job/invite/")
    assert tokens([leader, job.start(1, 2)]) == {leader.result(2 * PATIENCE_SECONDS)}


def test_what_a_dead_leader_has_left_is_not_followed(job: Job) -> None:
    dead = job.start(0, 2, SHORT_SECONDS)
    with pytest.raises(AbsentError) as caught:
        dead.result(2 * PATIENCE_SECONDS)
    assert caught.value.ranks == (1,)
    assert "rank 1 of 2 did not join within 0.3 s" in str(caught.value)
    follower = job.start(1, 2)
    job.wait_key("job/join/1")
    assert len(tokens([follower, job.start(0, 2)])) == 1


def test_all_that_are_missing_are_named(job: Job) -> None:
    futures = [job.start(rank, 5, SHORT_SECONDS) for rank in (0, 2, 4)]
    for future in futures:
        with pytest.raises(AbsentError) as caught:
            future.result(2 * PATIENCE_SECONDS)
        assert caught.value.ranks == (1, 3)


def test_who_was_replaced_does_not_join(job: Job) -> None:
    replaced = job.start(1, 3)
    job.wait_key("job/join/1")
    leader = job.start(0, 3)
    # It has answered, and the leader waits for rank 2.
    successor = job.start(1, 3)
    assert len(tokens([leader, successor, job.start(2, 3)])) == 1
    with pytest.raises((ClusterError, AbsentError)):
        replaced.result(2 * PATIENCE_SECONDS)


def test_no_rank_joins_a_start_twice(job: Job) -> None:
    """Two starts at once, which nobody should make: each worker joins one of them, or has an error."""
    generator = random.Random(5)
    for _ in range(10):
        places = [(rank, 3) for rank in range(3)] * 2
        generator.shuffle(places)
        futures = []
        for rank, size in places:
            futures.append((rank, job.start(rank, size, 0.5)))
            # Sometimes one after the other, sometimes all at once.
            time.sleep(generator.choice((0.0, 0.0, 0.002, 0.01)))
        joined: Counter[tuple[str, int]] = Counter()
        for rank, future in futures:
            try:
                joined[future.result(PATIENCE_SECONDS), rank] += 1
            except HoldfastError:
                continue
        assert not joined or max(joined.values()) == 1


# Meetings.


def test_many_meet_many_times() -> None:
    def meet(cluster: Cluster) -> None:
        for number in range(10):
            records = gather(cluster, f"meeting-{number}", f"{number} {cluster.rank}".encode(), PATIENCE_SECONDS)
            assert records == [f"{number} {rank}".encode() for rank in range(cluster.world_size)]
        assert [cluster.node_of(rank) for rank in (0, 15)] == ["node-0", "node-15"]

    engine = MemoryEngine()
    run_workers(16, meet, engine)
    assert not [key for key in engine.keys if "meeting" in key]


def test_meeting_ends_with_the_same_answer_for_all_workers() -> None:
    """Whose time runs out is a matter of chance; that all have the same answer is not."""

    def meet(cluster: Cluster) -> list[object]:
        ends: list[object] = []
        generator = random.Random(cluster.rank)
        for number in range(30):
            rendezvous(cluster, f"ready-{number}", PATIENCE_SECONDS)
            # Some come in time and some do not: the meeting lasts 0.01 s.
            time.sleep(generator.uniform(0.0, 0.02))
            try:
                gather(cluster, f"meeting-{number}", b"", 0.01)
                ends.append(None)
            except AbsentError as error:
                ends.append(error.ranks)
        return ends

    ends = run_workers(4, meet)
    assert all(other == ends[0] for other in ends)
    assert {type(end) for end in ends[0]} <= {type(None), tuple}


def test_names_of_ranks() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks((1, 2)) == "ranks 1 and 2"
    assert name_ranks(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


# Looking again and again.


@pytest.mark.parametrize(
    ("backoff", "calls"), [(ONE_KEY, 1), (JOINING, 1), (SOME_KEYS, 3), (NEWS, 1), (URGENT_NEWS, 2)]
)
@pytest.mark.parametrize("world_size", [2, 100, 2_500, 10_000, 50_000])
def test_a_long_wait_of_all_workers_leaves_a_store_time_for_others(
    backoff: Backoff, calls: int, world_size: int
) -> None:
    spread = backoff.spread(world_size, calls)
    assert calls * world_size / spread.pause_seconds(10_000.0) <= CALLS_PER_SECOND
    assert spread.pause_seconds(0.0) == backoff.shortest_seconds, "what is there soon is seen soon"
    assert backoff.spread(2, calls) == backoff, "a few workers are not held up for the sake of many"


def test_polling_looks_once_more_at_the_deadline() -> None:
    looks = iter([None, None, b"late"])
    assert poll(lambda: next(looks), Backoff(0.0, 0.0), time.monotonic() + PATIENCE_SECONDS) == b"late"
    assert poll(lambda: b"there", ONE_KEY, 0.0) == b"there"
    assert poll(lambda: None, ONE_KEY, 0.0) is None


# The store.


def test_a_call_that_hangs_is_given_up() -> None:
    engine = MemoryEngine()
    pool = ConnectionPool(engine.connect, "this process")
    engine.cut()
    for _ in range(16):
        with pytest.raises(ClusterError, match=r"setting: no answer within 0\.001 s"):
            pool.call(lambda store: store.set("key", b"value"), 0.001, "setting")
    # Threads do not pile up.
    with pytest.raises(ClusterError, match="16 earlier calls"):
        pool.call(lambda store: store.set("key", b"value"), PATIENCE_SECONDS, "setting")
    engine.mend()
    end_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            assert pool.call(lambda store: store.try_get("key"), PATIENCE_SECONDS, "reading") == b"value"
            break
        except ClusterError:
            assert time.monotonic() < end_at
    pool.close()
    with pytest.raises(ClosedError):
        pool.call(lambda store: store.try_get("key"), PATIENCE_SECONDS, "reading")


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    pool = ConnectionPool(MemoryEngine().connect, "this process")
    pool.prestart(3)
    pool.call(lambda store: store.set("key", b"value"), PATIENCE_SECONDS, "setting")
    pool.close()
    assert threading.active_count() == before


def test_an_engine_that_raises_is_quoted() -> None:
    def refuse(timeout_seconds: float) -> MemoryEngine:
        raise ConnectionRefusedError("nobody is there\nat all")

    pool = ConnectionPool(refuse, "the moon")
    with pytest.raises(ClusterError) as caught:
        pool.call(lambda store: store.try_get("key"), PATIENCE_SECONDS, "reading")
    assert str(caught.value).startswith("reading: ConnectionRefusedError: nobody is there\n")
    assert "the moon" in caught.value.hint
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    pool.close()


# The mailbox.


@pytest.fixture
def mailbox() -> Iterator[StoreMailbox]:
    mailbox = StoreMailbox(2)
    yield mailbox
    mailbox.close()


def test_posts_are_written_in_order_and_again_until_the_store_answers(mailbox: StoreMailbox) -> None:
    written: list[int] = []
    errors: list[HoldfastError] = [ClusterError("no answer"), ClusterError("no answer"), UsageError("no record")]

    def write(number: int) -> None:
        if number == 1 and errors:
            raise errors.pop(0)
        written.append(number)

    for number in range(3):
        mailbox.post(partial(write, number))
    assert mailbox.wait(lambda: len(written) == 2, time.monotonic() + PATIENCE_SECONDS)
    # What can never be written is left out, and does not hold up the rest.
    assert (written, errors, mailbox.trouble) == ([0, 2], [], "")
    assert mailbox.ask(lambda: written[-1]) == 2


def test_a_closed_mailbox_has_written_what_was_posted() -> None:
    mailbox = StoreMailbox(2)
    written: list[int] = []
    for number in range(100):
        mailbox.post(partial(written.append, number))
    mailbox.close()
    mailbox.close()
    assert written == list(range(100))


def test_a_watch_looks_when_woken_and_often_while_something_is_under_way(mailbox: StoreMailbox) -> None:
    looks: list[int] = []
    # By the clock alone it would not look a second time within this test.
    watch = Watch(lambda: looks.append(0), Backoff(1e6, 1e6), is_urgent=lambda: 3 <= len(looks) < 20)
    mailbox.watch(watch)
    wait_until(lambda: len(looks) == 1)
    mailbox.wake()
    wait_until(lambda: len(looks) == 2)
    mailbox.wake()
    wait_until(lambda: len(looks) == 20)
    mailbox.unwatch(watch)
    mailbox.wake()
    done: list[int] = []
    mailbox.post(lambda: done.append(0))
    assert mailbox.wait(lambda: bool(done), time.monotonic() + PATIENCE_SECONDS)
    assert len(looks) == 20


def test_a_look_that_fails_is_made_again_and_others_go_on(mailbox: StoreMailbox) -> None:
    failures = [ClusterError("no answer")] * 3
    looks: list[str] = []

    def look() -> None:
        if failures:
            raise failures.pop()
        looks.append("first")

    mailbox.watch(Watch(look, Backoff(0.001, 0.001)))
    mailbox.watch(Watch(lambda: looks.append("second"), Backoff(0.001, 0.001)))
    wait_until(lambda: {"first", "second"} <= set(looks))


def test_who_waits_for_a_mailbox_hears_of_its_end(mailbox: StoreMailbox) -> None:
    def fail() -> None:
        raise ClosedError("the cluster was closed before this call")

    changed = mailbox.changed
    mailbox.watch(Watch(fail))
    assert not mailbox.wait(lambda: False, time.monotonic() + PATIENCE_SECONDS)
    assert mailbox.trouble == "the cluster was closed"
    assert changed.wait(PATIENCE_SECONDS)
    assert mailbox.ask(lambda: "an answer") is None


def test_a_wait_for_a_worker_that_left_because_of_another_one_ends() -> None:
    def wait(cluster: Cluster) -> PeerError | None:
        peers = Peers(cluster, liveness_seconds=PATIENCE_SECONDS, timeout_seconds=PATIENCE_SECONDS)
        if peers.rank == 0:
            peers.failures.explain(peers.failures.make_error(Failure.of(1, "ValueError", "no")))
        peers.gather_decide_broadcast(b"", lambda records: b"", "the end")
        try:
            if peers.rank == 2:
                peers.wait_any([peers.key("never")], lambda: (0,), "speak")
        except PeerError as error:
            return error
        finally:
            peers.close()
        return None

    error = run_workers(3, wait)[2]
    assert error is not None
    assert (error.rank, error.kind, error.text) == (1, "ValueError", "no")


def test_a_namespace_is_shared_by_all_workers_and_apart_from_the_next() -> None:
    def speak(cluster: Cluster) -> tuple[Failure, Failure | None]:
        peers = Peers(cluster, liveness_seconds=PATIENCE_SECONDS, timeout_seconds=PATIENCE_SECONDS)
        first, second = peers.open_namespace("talk"), peers.open_namespace("talk")
        own = Failure.of(peers.rank, "ValueError", "no")
        first.post(own, "said", peers.rank)
        for rank in range(3):
            peers.wait_any([first.key("said", rank)], lambda: range(3), "speak")
            assert first.read(Failure, "said", rank) == Failure.of(rank, "ValueError", "no")
        standing = first.post_once(own, "first")
        assert first.count(1, "heard") >= 1
        read = second.read(Failure, "first")
        peers.gather_decide_broadcast(b"", lambda records: b"", "the end")
        first.delete(first.key("said", peers.rank))
        peers.close()
        return standing, read

    told = run_workers(3, speak)
    assert len({standing for standing, _ in told}) == 1
    assert [read for _, read in told] == [None] * 3


def test_a_worker_that_read_and_left_does_not_count_for_another() -> None:
    """The leader waits for the one that is left, since the store may lie in the leader's process."""
    turns = {1: threading.Event(), 2: threading.Event()}
    seen: list[bool] = []

    def leave(cluster: Cluster) -> None:
        if cluster.rank in turns:
            if cluster.rank == 2:
                assert turns[2].wait(PATIENCE_SECONDS)
            count_read(cluster, "heard")
            turns[1].set()
            return
        assert turns[1].wait(PATIENCE_SECONDS)
        # Rank 1 has read; both are gone, of whom rank 2 will not read; rank 2 may read yet.
        end_at = time.monotonic() + PATIENCE_SECONDS
        seen.extend(wait_counted(cluster, "heard", partial(set, gone), end_at, lambda: True) for gone in ({1, 2}, {1}))
        turns[2].set()
        assert not wait_counted(cluster, "heard", lambda: {1}, time.monotonic() + PATIENCE_SECONDS)
        assert cluster.add("heard", 0) == 2

    run_workers(3, leave)
    assert seen == [False, True]


# Signs of life.


def test_a_silent_worker_is_lost_and_one_that_speaks_again_is_not() -> None:
    barrier = threading.Barrier(3)

    def live(cluster: Cluster) -> None:
        heartbeat = Heartbeat(cluster, 0.02, 0.4)
        rendezvous(cluster, "all-beat", PATIENCE_SECONDS)
        if cluster.rank == 1:
            # Its process stands still: no sign, and no goodbye.
            cluster.close()
            barrier.wait(PATIENCE_SECONDS)
            return
        wait_until(lambda: heartbeat.lost == (1,))
        with pytest.raises(AbsentError, match=r"rank 1 of 3 on node-1 has not been heard of for 0\.4 s") as caught:
            heartbeat.check()
        assert caught.value.nodes == ("node-1",)
        heartbeat.check([0, 2])
        rendezvous_of_two(cluster)
        if cluster.rank == 0:
            cluster.add("heartbeat/1", 1)
        wait_until(lambda: heartbeat.lost == ())
        heartbeat.check()
        barrier.wait(PATIENCE_SECONDS)
        heartbeat.stop()

    run_workers(3, live)


def rendezvous_of_two(cluster: Cluster) -> None:
    cluster.add("both", 1)
    wait_until(lambda: cluster.add("both", 0) == 2)


def wait_until(holds: object) -> None:
    end_at = time.monotonic() + PATIENCE_SECONDS
    assert callable(holds)
    while not holds():
        assert time.monotonic() < end_at
        time.sleep(0.005)  # It may be anything that is waited for.


def test_times_that_do_not_fit() -> None:
    def begin(cluster: Cluster) -> None:
        with pytest.raises(UsageError, match="four heartbeat intervals"):
            Heartbeat(cluster, 5.0, 15.0)

    run_workers(1, begin)


def test_no_thread_that_asks_an_engine_outlives_the_program() -> None:
    """It would be ended by force amid the engine's own frames, and take the process along."""
    done = run_python(
        """
        import _thread, atexit, time

        def tell(threads):
            # A thread that ends, or is started, is counted until, or from when, it is given the time to do so.
            end_at = time.monotonic() + 10
            while _thread._count() != threads and time.monotonic() < end_at:
                time.sleep(0.001)
            print("threads", _thread._count())

        # What is registered first runs last.
        atexit.register(tell, 0)
        import holdfast as hf
        from holdfast.cluster.connection_pool import ConnectionPool

        manager = hf.CheckpointManager
        pool = ConnectionPool(lambda seconds: object(), "this process")
        pool.prestart(2)
        assert pool.call(lambda store: 5, 10, "a call") == 5
        tell(2)
        """,
        preload=None,
    )
    assert done.stdout.split() == ["threads", "2", "threads", "0"], (done.stdout, done.stderr)


# Tasks of a launcher that were not made workers.


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_NTASKS"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "3"}, "PMI_SIZE"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, ""),
        ({"SLURM_NTASKS": "1"}, ""),
        ({"PMI_SIZE": "many"}, ""),
        ({}, ""),
    ],
)
def test_lone_task_is_named_with_the_variable(environment: dict[str, str], named: str) -> None:
    """The shell of a batch job has the number of tasks too, but it is no task."""
    assert f"({named})" in describe_lone_task(environment) if named else not describe_lone_task(environment)


def test_one_of_several_tasks_that_saves_alone_is_warned_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    choices: tuple[tuple[Literal["auto", "alone"], int], ...] = (("auto", 1), ("alone", 0))
    for cluster, count in choices:
        events: list[Event] = []
        manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(count=1), cluster=cluster, sinks=[events.append])
        manager.close()
        assert len([event for event in events if isinstance(event, Warned) and "PMI_SIZE" in event.text]) == count
