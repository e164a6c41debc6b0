"""The parts of `holdfast bench`: how much is written, what is reckoned and advised from it, and where its files lie."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.bench import page_cache
from holdfast.bench.advice import MOST_SHARE, advise, plain_figure
from holdfast.bench.figures import Measured, Series, make_series, reckon_costs
from holdfast.bench.file_system import find_mount, look_up
from holdfast.bench.memory import State, available_bytes
from holdfast.bench.place import LOCK_NAME, PREFIX, open_place, sweep
from holdfast.bench.plan import SMALLEST_TRIAL_BYTES, check_trial, plan_trial
from holdfast.bench.trial import Trial
from holdfast.cli.bench_page import share_text
from holdfast.cli.wording import parse_seconds, parse_size, rough_text
from holdfast.errors import StorageError, StorageFullError, UsageError
from holdfast.policies import Auto, SaveMoment, Seconds, Steps
from holdfast.policies.expectation import expect_losses

GB = 10**9
CONTEXT = click.Context(click.Command("bench"))
OPTION = click.Option(["--some"])


# How much is written.


def plan(size: int, rate: float = 1e12, memory: int | None = None, room: int | None = None) -> tuple[int, str | None]:
    planned = plan_trial(size, rate=rate, available_bytes=memory, free_bytes=room)
    return planned.size_bytes, planned.limited_by


def test_a_state_is_measured_whole_where_that_is_quick() -> None:
    assert plan(GB, rate=2.0 * GB) == (GB, None)
    assert plan(GB, rate=1.5 * GB) == (GB, None)  # Nearly all of it is all of it.
    assert plan(1000, rate=1.0) == (1000, None)


def test_what_limits_a_trial() -> None:
    assert plan(100 * GB, rate=2.0 * GB) == (GB, "time")
    assert plan(100 * GB, rate=1.0) == (32 << 20, "time")
    assert plan(100 * GB, memory=4 * GB, room=40 * GB) == (GB, "memory")
    assert plan(100 * GB, memory=40 * GB, room=4 * GB) == (GB, "room")
    assert plan(100 * GB, room=4000) == (SMALLEST_TRIAL_BYTES, "room")


@given(
    st.integers(1, 10**14), st.floats(1, 1e12), st.none() | st.integers(0, 10**13), st.none() | st.integers(0, 10**13)
)
def test_a_trial_is_never_larger_than_the_state_nor_than_what_may_be_taken(
    size: int, rate: float, memory: int | None, room: int | None
) -> None:
    trial, limited_by = plan(size, rate, memory, room)
    assert 1 <= trial <= size
    assert (limited_by is None) == (trial == size)
    for left in (memory, room):
        assert left is None or trial <= max(left // 4, SMALLEST_TRIAL_BYTES)


def test_a_trial_that_was_asked_for_is_refused_where_it_cannot_be() -> None:
    check_trial(100, available_bytes=200, free_bytes=200)
    check_trial(100, available_bytes=None, free_bytes=None)
    with pytest.raises(UsageError, match="a trial of 100 bytes takes twice as much memory"):
        check_trial(100, available_bytes=199, free_bytes=200)
    with pytest.raises(StorageFullError, match="twice as much room, and 199 bytes are free"):
        check_trial(100, available_bytes=200, free_bytes=199)


# What is reckoned.


def measured(**changes: Any) -> Measured:
    fields: dict[str, Any] = {
        "trial_bytes": 1000,
        "is_direct": True,
        "copy": Series((100.0, 300.0, 200.0)),
        "copy_fresh": Series((50.0,)),
        "digest": Series((400.0,)),
        "write": Series((10.0, 20.0)),
        "rewrite": Series((40.0,)),
        "read_cold": Series((25.0,)),
        "read_warm": Series((100.0,)),
        "publish_seconds": Series((0.5,)),
        "first_stall_seconds": Series((30.0,)),
        "stall_seconds": Series((5.0, 4.0, 9.0)),
        "durable_new_seconds": Series((60.0, 70.0)),
        "durable_again_seconds": Series((30.0,)),
        "restore_cold_seconds": Series((50.0,)),
        "restore_warm_seconds": Series((12.0,)),
    }
    return Measured(**{**fields, **changes})


def test_costs_are_in_proportion_and_held_against_the_best_rate() -> None:
    costs = reckon_costs(measured(), 2000)
    assert list(costs) == ["first_stall", "stall", "durable", "durable_new", "restore_cold", "restore_warm"]
    stall = costs["stall"]
    assert (stall.seconds.lowest, stall.seconds.median, stall.seconds.highest) == (8.0, 10.0, 18.0)
    assert stall.limit_seconds == pytest.approx(2000 / 300)
    assert stall.times_limit == pytest.approx(1.5)
    # Each is held against what the disk gives for the same: a new file, or one that is there.
    assert (costs["durable_new"].limit_seconds, costs["durable_new"].seconds.median) == (100.0, 130.0)
    assert (costs["durable"].limit_seconds, costs["durable"].seconds.median) == (50.0, 60.0)
    assert costs["first_stall"].times_limit == 1.5


def test_where_no_space_is_used_again_all_saves_write_new_files() -> None:
    costs = reckon_costs(measured(rewrite=None, durable_again_seconds=None), 2000)
    assert costs["durable"] == costs["durable_new"]


def test_without_cold_reads_there_is_no_cost_of_them() -> None:
    costs = reckon_costs(measured(read_cold=make_series([]), restore_cold_seconds=None), 1000)
    assert list(costs) == ["first_stall", "stall", "durable", "durable_new", "restore_warm"]


def test_rounds_that_differ_widely_are_noisy() -> None:
    assert not measured().is_noisy
    assert measured(write=Series((10.0, 21.0))).is_noisy
    assert measured(restore_cold_seconds=Series((1.0, 3.0))).is_noisy


# What is advised.


@pytest.mark.parametrize(
    ("figure", "plain"),
    [
        (843.2, 850),
        (840, 840),
        (66.0, 66),
        (65.1, 66),
        (9.81, 9.9),
        (9.8, 9.8),
        (0.1234, 0.13),
        (1.0, 1.0),
        (99.5, 100),
    ],
)
def test_a_plain_figure_is_rounded_up_to_two_digits(figure: float, plain: float) -> None:
    assert plain_figure(figure) == plain
    assert len(repr(plain_figure(figure))) <= len(repr(figure))


@given(st.floats(1e-5, 1e9))
def test_a_plain_figure_is_never_much_less_and_never_much_more(figure: float) -> None:
    assert figure * (1 - 1e-9) <= plain_figure(figure) <= figure * 1.1 + 1e-12


def test_the_advice_is_what_auto_chooses() -> None:
    for stall, durable in ((0.16, 0.7), (30.0, 60.0), (0.001, 500.0)):
        advice = advise(stall_seconds=stall, durable_seconds=durable, restore_seconds=2.0, mtbf_seconds=86400.0)
        chosen = Auto(mtbf_seconds=86400.0).chosen(
            SaveMoment(step=1, save_blocked_seconds=stall, save_durable_seconds=durable)
        )
        assert advice.bound == chosen.bound
        assert advice.auto == Auto(mtbf_seconds=86400.0)
        assert advice.policy == Seconds(plain_figure(chosen.seconds))
        assert advice.choice.interval_seconds == plain_figure(chosen.seconds) >= chosen.seconds
        assert advice.choice.losses == expect_losses(
            advice.choice.interval_seconds,
            stall_seconds=stall,
            durable_seconds=durable,
            restore_seconds=2.0,
            mtbf_seconds=86400.0,
        )


def test_known_advice() -> None:
    advice = advise(stall_seconds=0.16, durable_seconds=0.7, restore_seconds=1.0, mtbf_seconds=6 * 3600.0)
    assert repr(advice.policy) == "Seconds(84)"  # Young's is sqrt(2 * 0.16 * 21600) = 83.1.
    assert advice.bound == "optimum"
    assert advice.choice.losses.per_failure_seconds == pytest.approx(43.6, abs=0.1)
    assert [other.interval_seconds for other in advice.others] == [60.0, 600.0, 3600.0]
    slow = advise(stall_seconds=0.16, durable_seconds=700.0, restore_seconds=1.0, mtbf_seconds=6 * 3600.0)
    assert (repr(slow.policy), slow.bound) == ("Seconds(700)", "durable")
    assert [other.interval_seconds for other in slow.others] == [3600.0]
    dear = advise(stall_seconds=30.0, durable_seconds=60.0, restore_seconds=1.0, mtbf_seconds=6 * 3600.0)
    assert (repr(dear.policy), dear.bound) == ("Seconds(3000)", "overhead")
    # Young's is sqrt(2 * 30 * 21600) = 1138.4; it can be compared with.
    assert dear.optimum_seconds == pytest.approx(1138.4, rel=0.02)
    assert [other.interval_seconds for other in dear.others] == [60.0, 600.0, dear.optimum_seconds, 3600.0]
    assert min(dear.others, key=lambda other: other.losses.lost_share).interval_seconds == dear.optimum_seconds


def test_advice_in_steps() -> None:
    costs = {"stall_seconds": 0.16, "durable_seconds": 0.7, "restore_seconds": 1.0, "mtbf_seconds": 6 * 3600.0}
    advice = advise(**costs, step_seconds=0.35)
    assert advice.policy == Steps(240)  # 238 of them take 83.1 s.
    assert advice.choice.interval_seconds == pytest.approx(240 * 0.35)
    assert advise(**costs, step_seconds=600.0).policy == Steps(1)
    assert advise(**costs, step_seconds=600.0).choice.interval_seconds == 600.0


def test_advice_where_a_step_is_longer_than_any_good_interval() -> None:
    advice = advise(
        stall_seconds=0.16, durable_seconds=0.7, restore_seconds=1.0, mtbf_seconds=3600.0, step_seconds=7200.0
    )
    assert (advice.policy, advice.bound) == (Steps(1), "step")
    assert advice.choice.losses.lost_share > MOST_SHARE
    assert advice.others == ()  # All usual ones are shorter than a step, and come to one.


def test_advice_allows_saves_more_where_most_would_be_lost_otherwise() -> None:
    """200 GB on a slow machine, and a failure every ten minutes: with one percent for saves nothing would be left."""
    costs = {"stall_seconds": 74.0, "durable_seconds": 400.0, "restore_seconds": 100.0, "mtbf_seconds": 600.0}
    advice = advise(**costs)
    assert advice.policy == Seconds(400)
    assert advice.auto.chosen(SaveMoment(step=1, save_blocked_seconds=74.0, save_durable_seconds=400.0)).seconds <= 400
    assert advice.choice.losses.lost_share < expect_losses(7400.0, **costs).lost_share
    usual = advise(**{**costs, "mtbf_seconds": 86400.0})
    assert (usual.auto, usual.bound) == (Auto(mtbf_seconds=86400.0), "overhead")
    assert usual.optimum_seconds in {other.interval_seconds for other in usual.others}


@given(
    st.floats(1e-3, 1e4),
    st.floats(1e-3, 1e5),
    st.floats(1e-3, 1e5),
    st.floats(1, 1e7),
    st.none() | st.floats(1e-2, 1e5),
)
def test_no_interval_of_the_table_is_better_than_the_advice_unless_saves_are_kept_rare(
    stall: float, behind: float, restore: float, mtbf: float, step: float | None
) -> None:
    advice = advise(
        stall_seconds=stall,
        durable_seconds=stall + behind,
        restore_seconds=restore,
        mtbf_seconds=mtbf,
        step_seconds=step,
    )
    least = min((other.losses.lost_share for other in advice.others), default=1.0)
    # Saves may be kept rare where that loses little; the page says by what, and the table what it costs.
    is_rare = advice.bound == "overhead" and advice.choice.losses.lost_share <= MOST_SHARE
    # Where most of the time is lost whatever one does, figures are rounded all the same.
    rounding = 0.02 if least <= MOST_SHARE else 0.1
    assert is_rare or advice.choice.losses.lost_share <= least + rounding
    for other in advice.others:
        assert other.interval_seconds >= max(stall + behind, step or 0.0)


# Words.


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5GB", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("500 mb", 500_000_000),
        ("4096", 4096),
        ("1k", 1000),
        (".5KiB", 512),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(CONTEXT, OPTION, text) == size


@pytest.mark.parametrize("text", ["", "GB", "1.5XB", "-1GB", "1e9", "nan", "0", "0.1", "10000000PB", "1 GB 2", "٣GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is no size|is not between"):
        parse_size(CONTEXT, OPTION, text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("24h", 86400.0), ("90min", 5400.0), ("350ms", 0.35), ("7 d", 604800.0), ("1.5S", 1.5)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(CONTEXT, OPTION, text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "24", "5m", "-1h", "inf", "0s", "99999999d", "1h30min"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is no time|is not between"):
        parse_seconds(CONTEXT, OPTION, text)


def test_options_that_are_left_out() -> None:
    assert parse_size(CONTEXT, OPTION, None) is None
    assert parse_seconds(CONTEXT, OPTION, None) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00056, "0.56 ms"), (0.0123, "12 ms"), (0.16, "0.16 s"), (66.04, "66 s"), (850, "14.2 min"), (21600, "6 h")],
)
def test_rough_times(seconds: float, text: str) -> None:
    assert rough_text(seconds) == text


def test_shares() -> None:
    assert [share_text(share) for share in (0.5, 0.081, 0.0009, 1e-6)] == ["50 %", "8.1 %", "0.090 %", "<0.001 %"]


# What it lies on.

MOUNTS = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw
31 22 0:40 / /mnt/with\040space rw shared:1 master:2 - nfs4 server:/export rw,vers=4.2
32 22 0:41 / /mnt rw - xfs /dev/vdb rw
33 32 0:42 / /mnt rw - overlay overlay rw
not a line of it
"""


@pytest.mark.parametrize(
    ("place", "kind", "source"),
    [
        ("/", "ext4", "/dev/vda"),
        ("/home/ann", "ext4", "/dev/vda"),
        ("/dev/shm/runs", "tmpfs", "tmpfs"),
        ("/dev/shmother", "ext4", "/dev/vda"),
        ("/mnt/with space/run", "nfs4", "server:/export"),
        ("/mnt/run", "overlay", "overlay"),
    ],
)
def test_what_is_mounted_over_a_place(place: str, kind: str, source: str) -> None:
    assert find_mount(MOUNTS.splitlines(), Path(place))[:2] == (kind, source)


def test_a_system_that_does_not_say_what_is_mounted() -> None:
    assert find_mount([], Path("/")) == ("", "", "")


def test_look_up(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    found = look_up(tmp_path / "link")
    assert found == look_up(tmp_path) or found.kind
    assert found.free_bytes is None or 0 <= found.free_bytes <= (found.total_bytes or 0)
    with pytest.raises(StorageError):
        look_up(tmp_path / "missing")


# Memory.


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory_of_the_machine(tmp_path: Path) -> None:
    proc = write_tree(
        tmp_path / "proc", {"meminfo": "MemTotal: 9 kB\nMemAvailable:    1000 kB\n", "self/cgroup": "0::/"}
    )
    assert available_bytes(proc, tmp_path / "cgroup") == 1024000
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
    assert (available_bytes() or 0) > 0


def test_available_memory_of_control_groups(tmp_path: Path) -> None:
    proc = write_tree(tmp_path / "proc", {"meminfo": "MemAvailable: 1000000 kB\n", "self/cgroup": "0::/a/b\n"})
    groups = write_tree(
        tmp_path / "cgroup",
        {
            "a/memory.max": "5000\n",
            "a/memory.current": "3000\n",
            "a/memory.stat": "anon 2000\ninactive_file 600\n",
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "1\n",
        },
    )
    assert available_bytes(proc, groups) == 2600
    (groups / "a" / "memory.current").write_text("9999")
    assert available_bytes(proc, groups) == 0
    older = write_tree(tmp_path / "v1", {"self/cgroup": "4:cpu,memory:/job\n3:pids:/job\n"})
    write_tree(groups, {"memory/job/memory.limit_in_bytes": "800", "memory/job/memory.usage_in_bytes": "100"})
    assert available_bytes(older, groups) == 700


def test_a_state_is_touched_and_looks_like_tensors() -> None:
    state = State((16 << 20) + 1000)
    assert sum(state.fill()) >= state.size_bytes
    arrays = state.arrays()
    assert sum(array.nbytes for array in arrays.values()) == state.size_bytes
    assert all(array.__array_interface__["data"][0] % 4096 == 64 for array in arrays.values())
    assert len(state.image) % 4096 == 0
    assert len(np.unique(arrays["layers.0.weight"][:4096])) > 200


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(UsageError, match="cannot be had"):
        State(10**17)


# Its directory.


def test_a_place_is_made_and_removed(tmp_path: Path) -> None:
    with open_place(tmp_path) as place:
        (place / "run").mkdir()
        (place / "run" / "file").write_text("x")
        (place / "link").symlink_to(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [place.name]
        # Another bench leaves it alone.
        assert sweep(tmp_path).left_alone == (place.name,)
        assert place.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_place_is_removed_whatever_ends_the_body(tmp_path: Path) -> None:
    def be_interrupted() -> None:
        with open_place(tmp_path) as place:
            (place / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert list(tmp_path.iterdir()) == []


def test_what_the_dead_have_left_is_swept(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}0123456789abcdef"
    write_tree(left, {LOCK_NAME: "", "written": "12345", "run/step-000000001.g0001/data": "678"})
    (tmp_path / f"{PREFIX}0000000000000000").mkdir()  # It died before it had a lock.
    foreign = write_tree(tmp_path, {f"{PREFIX}mine/file": "x", f"{PREFIX}0123456789abcdee": "a file", "runs/x": "x"})
    swept = sweep(tmp_path)
    assert (swept.removed, swept.removed_bytes) == (1, 8)
    assert {path.name for path in foreign.iterdir()} == {f"{PREFIX}mine", f"{PREFIX}0123456789abcdee", "runs"}


def test_a_directory_without_its_lock_is_left_alone_unless_it_is_empty(tmp_path: Path) -> None:
    """The lock is made first and removed last: what lies in a directory without one is not a bench's."""
    write_tree(tmp_path, {f"{PREFIX}0123456789abcdef/notes": "mine"})
    assert sweep(tmp_path).removed == 0
    assert (tmp_path / f"{PREFIX}0123456789abcdef" / "notes").exists()


def test_a_lock_that_is_held(tmp_path: Path) -> None:
    left = write_tree(tmp_path / f"{PREFIX}0123456789abcdef", {LOCK_NAME: ""})
    lock = os.open(left / LOCK_NAME, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep(tmp_path).left_alone == (left.name,)
    finally:
        os.close(lock)
    assert sweep(tmp_path).removed == 1


# A trial.


def test_a_trial_saves_and_restores_what_it_was_given(tmp_path: Path) -> None:
    arrays = {"a": np.arange(1 << 20, dtype=np.uint8), "b": np.ones(3, np.uint8)}
    with Trial(tmp_path / "run", arrays, 2) as trial:
        for _ in range(3):
            stall, durable = trial.save()
            assert 0 < stall < durable
        assert len(list((tmp_path / "run").glob("step-*"))) == 1
        assert trial.files[0].name.startswith("data-")
        expected = {name: array.copy() for name, array in arrays.items()}
        for array in arrays.values():
            array[:] = 7
        page_cache.drop(trial.files)
        assert trial.restore() > 0
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, expected[name])
        trial.save()
    assert {path.name for path in (tmp_path / "run" / "generations").iterdir()} == {"0001.json", "0001.base.json"}
