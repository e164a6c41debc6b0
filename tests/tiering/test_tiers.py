"""A run in tiers: what is saved in the nearest is copied on, and comes back from wherever it is."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import holdfast as hf
from command_line import call, call_json, flip_bit
from holdfast.catalog import StoredRun
from holdfast.errors import (
    DeadlineError,
    FencedError,
    OutOfRangeError,
    SaveFailedError,
    StorageError,
    StorageFullError,
    UsageError,
)
from holdfast.events import Committed, Copied, PassedOver, Restored
from holdfast.format.names import StepName
from holdfast.jobs import UploadTo
from holdfast.storage import LocalStorage
from patience import PATIENCE_SECONDS
from places import TESTS
from repetitions import repeated
from tier_jobs import Job, started, steps_in, wait_until


class Distant(LocalStorage):
    """A directory that can be out of reach, as a bucket can, or full."""

    is_away = is_full = False

    def _check(self) -> None:
        if self.is_away:
            raise StorageError(f"{self.url}: no route to host")

    def create(self, path: str, size_bytes: int) -> Any:
        self._check()
        if self.is_full:
            raise StorageFullError(f"{self.url}: no space left", path=path)
        return super().create(path, size_bytes)

    def publish(self, path: str, data: bytes) -> bool:
        self._check()
        return super().publish(path, data)

    def read(self, path: str, limit_bytes: int) -> bytes:
        self._check()
        return super().read(path, limit_bytes)

    def open_reader(self, path: str) -> Any:
        self._check()
        return super().open_reader(path)

    def list(self, path: str, *, deep: bool = False) -> Any:
        self._check()
        return super().list(path, deep=deep)

    def make_directory(self, path: str) -> None:
        self._check()
        super().make_directory(path)


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    with started() as start:
        yield start


def test_each_step_is_committed_near_and_copied_on(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(near, far)
    handle = job.save(3)
    assert handle.wait_committed() == f"{near}/step-000000003.g0001"
    assert handle.wait_committed(tier=str(far)) == f"{far}/step-000000003.g0001"
    assert handle.wait_committed(tier=-1) == handle.wait_committed(tier=1) == handle.wait_committed(tier=f"{far}/")
    assert handle.wait_committed(tier=0) == handle.wait_committed()
    assert steps_in(near) == steps_in(far) == [3]
    job.manager.close()
    (copied,) = (event for event in job.events if isinstance(event, Copied))
    assert (copied.step, copied.tier) == (3, str(far))
    kinds = [type(event) for event in job.events if isinstance(event, Committed | Copied)]
    assert kinds == [Committed, Copied]


def test_closing_waits_until_the_farthest_has_all(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(near, far)
    for step in range(1, 6):
        job.save(step)
    job.manager.close()
    assert steps_in(far) == [1, 2, 3, 4, 5]


def test_three_tiers(tmp_path: Path, start: Callable[..., Job]) -> None:
    places = [tmp_path / name for name in "abc"]
    job = start(places[0], hf.Tier(places[1], keep=2), places[2], keep=1)
    job.save_all(1, 2, 3)
    job.manager.close()
    assert steps_in(places[0])[-1] == 3
    assert [steps_in(place) for place in places[1:]] == [[2, 3], [3]]
    shutil.rmtree(places[0])
    shutil.rmtree(places[2])
    assert start(*places).restore() == 3


@pytest.mark.parametrize("lost", ["near", "far"])
def test_a_lost_tier_comes_back_from_the_other(near: Path, far: Path, lost: str, start: Callable[..., Job]) -> None:
    first = start(near, far)
    first.save_all(1, 2)
    first.manager.close()
    shutil.rmtree(near if lost == "near" else far)
    second = start(near, far)
    assert second.restore() == 2
    second.save_all(3)
    second.manager.close()
    assert steps_in(near)[-1] == steps_in(far)[-1] == 3
    for place in (near, far):
        alone = start(place, place.with_name("other"))
        assert alone.restore() == 3


def test_each_tier_keeps_its_own(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(hf.Tier(near, keep=hf.Latest(2)), hf.Tier(far, keep=hf.EveryN(3) | hf.Latest(1)))
    job.save_all(1, 2, 3, 4, 5, 6, 7)
    job.manager.close()
    assert steps_in(near) == [6, 7]
    assert steps_in(far) == [3, 6, 7]


def test_a_tier_that_takes_some_steps_only(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(hf.Tier(near, keep=1), hf.Tier(far, every=10, keep="all"))
    job.save_all(4, 8, 12, 17, 23, 29, tier=None)
    job.manager.close()
    assert steps_in(far) == [4, 12, 23], "the first in each ten"
    again = start(near, hf.Tier(far, every=10), keep=1)
    again.restore()
    again.save_all(30)
    again.manager.close()
    assert steps_in(near) == [29, 30], "the run resumed from it"


def test_what_is_waited_for_is_copied_regardless(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(near, hf.Tier(far, every=10))
    job.save_all(1, 2, 3)
    assert steps_in(far) == [1, 2, 3]


def test_steps_that_a_tier_still_needs_stay_near(near: Path, far: Path, start: Callable[..., Job]) -> None:
    bucket = Distant(far)
    job = start(hf.Tier(near, keep=1), hf.Tier(bucket, keep="all"))
    job.save_all(1)
    bucket.is_away = True
    job.save_all(2, 3, 4, tier=None)
    assert steps_in(near) == [2, 3, 4]
    assert len([text for text in job.texts() if "cannot be reached" in text]) == 1
    with pytest.raises(DeadlineError, match=r"step 5 did not come to .*far in time"):
        job.save(5).wait_committed(0.2, tier=1)
    bucket.is_away = False
    job.save_all(6)
    wait_until(lambda: steps_in(far) == [1, 2, 3, 4, 5, 6])
    job.save_all(7)
    job.manager.wait()
    assert steps_in(near) == [7]


def test_a_copy_ends_although_saves_are_quicker(near: Path, far: Path, start: Callable[..., Job]) -> None:
    """Both tiers keep one step: each save makes the one that is being copied superfluous."""
    job = start(near, hf.Tier(far, most_bytes_per_second=40_000), keep=1)
    job.save_all(1, tier=None)
    wait_until((far / "step-000000001.g0001").exists)
    job.save_all(2, 3, tier=None)
    assert steps_in(near) == [1, 3]
    wait_until(lambda: steps_in(far) == [1])
    job.manager.close()
    assert steps_in(far) == [3]


def test_a_nearest_tier_that_was_moved_is_not_made_again(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(near, hf.Tier(far, most_bytes_per_second=40_000))
    job.save_all(1, tier=None)
    wait_until((far / "step-000000001.g0001").exists)
    near.rename(near.with_name("moved"))
    with pytest.raises(SaveFailedError, match="the run was moved"):
        job.save(2).wait_committed()
    job.manager.close()
    assert not near.exists()
    assert job.texts() == []


def test_only_what_a_tier_would_keep_is_copied(near: Path, far: Path, start: Callable[..., Job]) -> None:
    bucket = Distant(far)
    job = start(hf.Tier(near, keep=1), hf.Tier(bucket, keep=2))
    bucket.is_away = True
    with pytest.raises(StorageError, match=r"cannot be reached|no route"):
        start(near, bucket)
    bucket.is_away = False
    job.save_all(1)
    bucket.is_away = True
    job.save_all(2, 3, 4, 5, 6, tier=None)
    assert steps_in(near) == [5, 6], "the far one keeps two"
    bucket.is_away = False
    job.save_all(7)
    assert set(steps_in(far)) <= {1, 5, 6, 7}


def test_a_full_disk_gives_up_what_was_not_copied(near: Path, far: Path, start: Callable[..., Job]) -> None:
    disk, bucket = Distant(near), Distant(far)
    job = start(hf.Tier(disk, keep=1), hf.Tier(bucket, keep="all"))
    job.save_all(1)
    bucket.is_away = True
    job.save_all(2, 3, 4, tier=None)

    class Emptied:
        """The disk has room again as soon as step 2 is gone."""

        def __get__(self, *_: object) -> bool:
            return 2 in steps_in(near)

    Distant.is_full, before = Emptied(), Distant.is_full  # type: ignore[assignment]
    try:
        job.save_all(5, tier=None)
    finally:
        Distant.is_full = before
    assert steps_in(near) == [3, 4, 5]
    assert any("step 2 was removed there before it was copied" in text for text in job.texts())
    bucket.is_away = False
    job.save_all(6)
    job.manager.close()
    assert steps_in(far) == [1, 3, 4, 5, 6]


# Where the farthest tier cannot be reached.


def test_saves_go_on_without_the_farthest_tier(near: Path, far: Path, start: Callable[..., Job]) -> None:
    bucket = Distant(far)
    zeroth = start(near, bucket)
    zeroth.save_all(1)
    zeroth.die()
    bucket.is_away = True
    second = start(near, bucket)
    assert second.restore() == 1
    second.save_all(2, tier=None)
    assert steps_in(near) == [1, 2]
    second.die()
    third = start(near, bucket)
    assert third.restore() == 2
    third.save_all(3, tier=None)
    bucket.is_away = False
    third.save_all(4)
    third.manager.close()
    assert steps_in(far) == [1, 2, 3, 4]
    first, *unseen = StoredRun(LocalStorage(far)).list_generations()
    assert first == 1
    assert len(unseen) == 2
    assert min(unseen) > 1000, "no other job would have taken these numbers meanwhile"
    shutil.rmtree(near)
    assert start(near, bucket).restore() == 4


def test_what_cannot_be_reached_is_not_empty(near: Path, far: Path, start: Callable[..., Job]) -> None:
    bucket = Distant(far)
    first = start(near, bucket)
    first.save_all(1)
    first.manager.close()
    shutil.rmtree(near)
    bucket.is_away = True
    with pytest.raises(StorageError, match="no route to host"):
        start(near, bucket)
    assert not near.exists()


def test_the_step_of_another_machine_that_went_on_counts(tmp_path: Path, start: Callable[..., Job]) -> None:
    here, there, far = (tmp_path / name for name in ("here", "there", "far"))
    first = start(here, far)
    first.save_all(1)
    first.save_all(2, tier=None)
    first.manager.close()
    shutil.rmtree(far / "step-000000002.g0001")
    other = start(there, far)
    assert other.restore() == 1
    other.save_all(5)
    other.die()
    back = start(here, far)
    assert back.restore() == 5, "step 2 here is not of its line"
    back.save_all(6)
    assert back.manager.steps() == (1, 5, 6)


@pytest.mark.parametrize("restarts", [False, True])
def test_two_lines_that_have_parted_are_never_mixed(tmp_path: Path, restarts: bool, start: Callable[..., Job]) -> None:
    """A job here opens a generation unseen, and another one there opens the same number."""
    here, there, far = tmp_path / "here", tmp_path / "there", tmp_path / "far"
    bucket = Distant(far)
    first = start(here, bucket)
    first.save_all(1)
    first.die()
    bucket.is_away = True
    unseen = start(here, bucket)
    assert unseen.restore() == 1
    unseen.save_all(50, tier=None)
    bucket.is_away = False
    other = start(there, far)
    assert other.restore() == 1
    other.save_all(3)
    if restarts:
        unseen.die()
    else:
        # It hears of it in the background, and its next save says so.
        def save_until_fenced() -> bool:
            try:
                unseen.save(unseen.manager.lineage.newest_asked + 1).wait_committed()
            except SaveFailedError as error:
                return isinstance(error.__cause__, FencedError)
            return False

        wait_until(save_until_fenced)
        unseen.die()
    other.save_all(4)
    other.die()
    again = start(here, bucket)
    assert again.restore() == 4
    again.save_all(7)
    again.manager.close()
    assert again.manager.restored is not None
    (aside,) = here.glob("parted-*")
    assert 50 in steps_in(aside), "nothing is lost"
    assert any("another job has gone on" in text for text in [*again.texts(), *unseen.texts()])
    assert 50 not in steps_in(here)
    assert steps_in(far) == [1, 3, 4, 7]
    bucket.is_away = True
    assert start(here, bucket).restore() == 7


def test_a_job_that_goes_back_during_a_copy_copies_on(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(near, hf.Tier(far, most_bytes_per_second=60_000))
    job.save_all(1)
    job.save(2).wait_committed()
    wait_until((far / "step-000000002.g0001").exists)
    assert job.manager.restore(1) is not None
    job.save(2).wait_committed()
    job.manager.close()
    assert StoredRun(LocalStorage(far)).look(closely=True).newest == StepName(2, 2)
    assert job.texts() == []


def test_two_different_runs_are_refused(tmp_path: Path, start: Callable[..., Job]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    start(a, tmp_path / "c").save_all(1)
    start(b, tmp_path / "d").save_all(1)
    with pytest.raises(UsageError, match="are different runs"):
        start(a, b)


def test_a_run_whose_base_never_reached_the_bucket_starts(tmp_path: Path, start: Callable[..., Job]) -> None:
    """It was cut off as it began, and saved here; a job elsewhere knows nothing of that."""
    here, there, far = (tmp_path / name for name in ("here", "there", "far"))
    first = start(here, far)
    first.save_all(1)
    first.die()
    shutil.rmtree(far / "step-000000001.g0001")
    (far / "generations/0001.base.json").unlink()
    other = start(there, far)
    assert other.restore() is None
    other.save_all(3)
    other.die()
    back = start(here, far)
    assert back.restore() == 3
    back.save_all(4)
    assert any("generation 1 and its steps are not in the lineage" in text for text in back.texts())


def test_a_job_that_was_passed_copies_nothing_more(near: Path, far: Path, start: Callable[..., Job]) -> None:
    bucket = Distant(far)
    passed = start(near, hf.Tier(bucket, keep=5))
    passed.save_all(1)
    bucket.is_away = True
    passed.save_all(2, tier=None)
    newer = start(near, hf.Tier(far, keep=1))
    assert newer.restore() == 2
    newer.save_all(3)
    newer.manager.close()
    bucket.is_away = False
    passed.manager.close()
    assert steps_in(near) == [1, 2, 3]
    assert steps_in(far) == [3], "it would have copied the others again"


class Flat(LocalStorage):
    """A directory in which a file that is there is whole, as in a bucket."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.traits = msgspec.structs.replace(self.traits, has_directories=False)
        self.created: list[str] = []

    def create(self, path: str, size_bytes: int) -> Any:
        self.created.append(path)
        return super().create(path, size_bytes)


def test_a_copy_leaves_data_in_a_bucket_that_are_whole(near: Path, far: Path, start: Callable[..., Job]) -> None:
    """They may be of another job that copies the same step at this moment."""
    bucket = Flat(far)
    first = start(near, bucket)
    first.save_all(1)
    first.manager.close()
    for name in ("index-00000-of-00001.json", "manifest.json", "committed"):
        (far / "step-000000001.g0001" / name).unlink()
    begun = far / "step-000000001.g0001/data-00000-of-00001.safetensors"
    inode = begun.stat().st_ino
    second = start(near, bucket)
    assert second.restore() == 1
    second.save_all(2)
    second.manager.close()
    assert steps_in(far) == [1, 2]
    assert begun.stat().st_ino == inode
    assert bucket.created == [f"step-00000000{step}.g000{step}/data-00000-of-00001.safetensors" for step in (1, 2)]
    shutil.rmtree(near)
    assert start(near, bucket).manager.restore(1) is not None


# Damage.


def _flip(path: Path) -> None:
    """In the middle of what it is: a data file is padded at its beginning."""
    flip_bit(path, path.stat().st_size - (3000 if path.suffix == ".safetensors" else 30))


def _file(place: Path, name: str) -> Path:
    return place / "step-000000002.g0001" / name


@pytest.mark.parametrize("name", ["data-00000-of-00001.safetensors", "index-00000-of-00001.json", "manifest.json"])
def test_damage_falls_through_to_the_same_step(near: Path, far: Path, name: str, start: Callable[..., Job]) -> None:
    first = start(near, far)
    first.save_all(1, 2)
    first.die()
    _flip(_file(near, name))
    job = start(near, far)
    assert job.restore() == 2
    assert any("it is read from another tier" in text for text in job.texts())
    _flip(_file(far, name))
    job = start(near, far)
    assert job.restore() == 1, "both are damaged"
    assert job.texts(PassedOver)


def test_one_file_damaged_here_and_another_one_there(near: Path, far: Path, start: Callable[..., Job]) -> None:
    first = start(near, far)
    first.save_all(1, 2)
    first.die()
    _flip(_file(near, "data-00000-of-00001.safetensors"))
    _flip(_file(far, "index-00000-of-00001.json"))
    assert start(near, far).restore() == 2


def test_a_damaged_step_is_not_copied(near: Path, far: Path, start: Callable[..., Job]) -> None:
    bucket = Distant(far)
    job = start(near, bucket)
    job.save_all(1)
    bucket.is_away = True
    handle = job.save(2)
    handle.wait_committed()
    _flip(_file(near, "data-00000-of-00001.safetensors"))
    bucket.is_away = False
    job.save_all(3)
    with pytest.raises(StorageError, match=r"step 2 was not copied into .* do not match their digest"):
        handle.wait_committed(tier=-1)
    assert steps_in(far) == [1, 3]


# The arguments.


def test_wrong_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two places or more"):
        hf.Tiers(tmp_path)
    with pytest.raises(UsageError, match="two places or more"):
        hf.Tiers(tmp_path, tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="two places or more"):
        hf.Tiers(tmp_path / "run", tmp_path / "link" / "run")
    with pytest.raises(UsageError, match="takes every checkpoint"):
        hf.Tiers(hf.Tier(tmp_path / "a", every=2), tmp_path / "b")
    with pytest.raises(UsageError, match="nothing is copied into the first tier"):
        hf.Tiers(hf.Tier(tmp_path / "a", most_bytes_per_second=9), tmp_path / "b")
    with pytest.raises(UsageError, match="cannot have tiers itself"):
        hf.Tiers(tmp_path / "a", hf.Tiers(tmp_path / "b", tmp_path / "c"))
    with pytest.raises(OutOfRangeError):
        hf.Tier(tmp_path, every=0)
    misused: list[tuple[Callable[..., object], tuple[object, ...], str]] = [
        (hf.HostMemory, (60,), r"HostMemory\(keep_seconds=60\)"),
        (hf.Tier, ("a", 3), r"Tier\('a', keep=3\)"),
        (hf.Tiers, (["a", "b"],), r'Tiers\("/nvme/run", "s3://bucket/run"\)'),
        (hf.open_storage, (hf.Tier("a"),), r'Tiers\("/nvme/run", "s3://bucket/run"\)'),
    ]
    for call_it, arguments, hint in misused:
        with pytest.raises(UsageError) as caught:
            call_it(*arguments)
        assert re.search(hint, caught.value.hint)


def test_a_wait_for_a_wrong_tier(near: Path, far: Path, tmp_path: Path, start: Callable[..., Job]) -> None:
    handle = start(near, far).save(1)
    with pytest.raises(UsageError, match="'s3://b/run' is not a tier of the run"):
        handle.wait_committed(tier="s3://b/run")
    with hf.CheckpointManager(tmp_path / "plain", hf.Checkpoint(w=np.zeros(3))) as manager:
        with pytest.raises(UsageError, match="the run has no tiers"):
            manager.save(1).wait_committed(tier=1)


# Leaving.


PROGRAM = """
import os, signal, sys
import numpy as np
import holdfast as hf

far = hf.Tier(sys.argv[2], most_bytes_per_second=int(sys.argv[3]))
state = {"w": np.zeros(1000)}
with hf.resumable(hf.Tiers(sys.argv[1], far), state=state, save_every=1000, grace=float(sys.argv[4])) as run:
    for step in run.steps(100):
        state["w"][:] = step
        if step == 20:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_notice_waits_for_the_farthest_tier_in_time(near: Path, far: Path, is_quick: bool) -> None:
    arguments = (near, far, 10**9, 60) if is_quick else (near, far, 10, 2)
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 42, done.stderr
    where = f"in {near} and {far}" if is_quick else f"in {near}, not in {far} yet"
    found = re.search(rf"step (\d+) is saved \({re.escape(where)}\); leaving with exit code 42", done.stderr)
    assert found, done.stderr
    assert steps_in(near)[-1:] == [int(found[1])]
    assert steps_in(far)[-1:] == ([int(found[1])] if is_quick else [])


ENDED = """
import sys
import numpy as np
import holdfast as hf

far = hf.Tier(sys.argv[2], most_bytes_per_second=int(sys.argv[3]))
state = {"w": np.zeros(1000)}
with hf.resumable(hf.Tiers(sys.argv[1], far), state=state, grace=float(sys.argv[4])) as run:
    for step in run.steps(5):
        state["w"][:] = step
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 42)])
def test_one_signal_ends_the_last_wait_for_copies(near: Path, far: Path, number: int, code: int) -> None:
    command = [sys.executable, "-c", ENDED, str(near), str(far)]
    with subprocess.Popen([*command, "10", "2"], stderr=subprocess.PIPE, text=True) as ended:
        assert ended.stderr is not None
        told = next(line for line in ended.stderr if "training is done" in line)
        assert f"are being copied to {far}. Ctrl-C leaves" in told
        ended.send_signal(number)
        rest = ended.stderr.read()
        assert ended.wait(PATIENCE_SECONDS) == code, rest
    assert f"step 5 is saved (in {near}, not in {far} yet); leaving with exit code {code}." in rest
    assert (steps_in(near)[-1:], steps_in(far)) == ([5], [])
    done = subprocess.run([*command, "1000000000", "2"], timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0
    assert steps_in(far)[-1:] == [5], "the next start copies it, although it trains nothing"


def test_a_copy_that_has_failed_is_tried_once_more_at_the_end(near: Path, far: Path, start: Callable[..., Job]) -> None:
    bucket = Distant(far)
    job = start(near, bucket)
    job.save_all(1)
    bucket.is_away = True
    job.save_all(2, tier=None)
    wait_until(lambda: any("cannot be reached" in text for text in job.texts()))
    bucket.is_away = False
    job.manager.close()
    assert steps_in(far) == [1, 2]
    assert not any("not in" in text for text in job.texts())


def test_a_restore_says_where_it_came_from(near: Path, far: Path, start: Callable[..., Job]) -> None:
    first = start(near, far)
    first.save_all(1)
    first.manager.close()
    second = start(near, far)
    second.restore()
    assert any(f"step 1 restored from {near}: " in text for text in second.texts(Restored))
    second.manager.close()
    shutil.rmtree(near)
    third = start(near, far)
    third.restore()
    assert any(f"step 1 restored from {far}: " in text for text in third.texts(Restored))


def test_late_metrics_come_to_all_tiers(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(near, far)
    job.save_all(1)
    job.manager.add_metrics(1, {"val_loss": 0.5})
    wait_until(lambda: StoredRun(LocalStorage(far)).step(StepName(1, 1)).manifest().metrics == {"val_loss": 0.5})


def test_a_tree_in_tiers(near: Path, far: Path) -> None:
    hf.save(hf.Tiers(near, far), {"w": np.arange(5)})
    shutil.rmtree(near)
    assert hf.load(hf.Tiers(near, far))["w"].tolist() == [0, 1, 2, 3, 4]
    assert hf.load(far)["w"].tolist() == [0, 1, 2, 3, 4]


def test_an_epoch_job_has_no_tiers(near: Path, far: Path) -> None:
    with pytest.raises(UsageError, match="has no tiers"):
        hf.MultiNodeCheckpointManager(hf.Tiers(near, far))
    with pytest.raises(UsageError, match="has no tiers"):
        UploadTo(hf.Tiers(near, far))


def test_a_list_says_where_each_step_is(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(hf.Tier(near, keep=1), far)
    job.save_all(1, 2, 3)
    job.manager.close()
    listed = call_json("list", near, "--tier", far)["steps"]
    assert [step["step"] for step in listed] == [1, 2, 3]
    assert listed[0]["tiers"] == [str(far)]
    assert listed[2]["tiers"] == [str(near), str(far)]
    assert call_json("show", f"{near}@1", "--tier", far)["step"] == 1
    assert call("list", near, far, "--tier", far).exit_code == 2
    for verb in ("list", "show", "copy"):
        done = call(verb, near, *([far.with_name("new")] if verb == "copy" else []), "--tier", far.with_name("fra"))
        assert done.exit_code == 3
        assert f"--tier {far.with_name('fra')}: no job has copied a run there" in done.output
        assert f"Its job has copied to {far}." in done.output


# Kills.


def test_workers_of_machines_that_are_lost(tmp_path: Path) -> None:
    """Killed at any moment, any set of first tiers deleted, restored on one to three workers."""
    rounds = repeated(500, in_gate=5)
    command = [sys.executable, "-m", "crash.tiers", "--rounds", str(rounds), "--directory", str(tmp_path / "crash")]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{rounds} rounds" in done.stdout
