"""A file that is written into the room of another one on the disk: when that is done, and that nobody else sees it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faulty import FaultyStorage
from holdfast.errors import StorageError, StorageFullError
from holdfast.format.names import SPARE_NAME
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.storage.local.recycle import remove_spare, try_keep
from mounts import mounted, small_disk
from patience import PATIENCE_SECONDS
from places import PROGRAMS
from repetitions import repeated
from spare_files import MIB, can_reuse, identity, lay, lay_over, pattern, reader_of, spare_of

ANY_SIZE = 1 << 40


@pytest.fixture(params=[True, False], ids=["direct", "plain"])
def storage(tmp_path: Path, request: pytest.FixtureRequest) -> LocalStorage:
    if not can_reuse(tmp_path):
        pytest.skip("this file system does not write over files in place, or cannot tell who has them open")
    return LocalStorage(tmp_path / "run", direct=request.param)


# What is written into the room of another file.


@pytest.mark.parametrize("size_bytes", [MIB, 2 * MIB, 3 * MIB - 5, 3 * MIB, 3 * MIB + 1, 7 * MIB + 4097])
def test_the_same_file_with_new_bytes_and_its_own_size(storage: LocalStorage, size_bytes: int) -> None:
    old = lay(storage, "old/data", 1, 3 * MIB)
    number = identity(old)
    assert try_keep(storage.location, "old/data", 3 * MIB)
    assert not old.exists()
    new = lay_over(storage, "new/data", 2, size_bytes)
    assert identity(new) == number
    assert new.read_bytes() == pattern(2, size_bytes)
    assert not os.path.lexists(spare_of(storage))
    assert new.stat().st_blocks * 512 <= size_bytes + 16 * 4096, "what is not needed of it is given back"
    assert new.stat().st_mode == lay(storage, "other/data", 3, MIB).stat().st_mode


def test_without_a_spare_a_new_file_is_made(storage: LocalStorage) -> None:
    assert lay_over(storage, "new/data", 2, 2 * MIB).read_bytes() == pattern(2, 2 * MIB)


def test_again_and_again_in_the_room_of_one_file(storage: LocalStorage) -> None:
    numbers = set()
    for turn, size_bytes in enumerate((5 * MIB, 2 * MIB, 4 * MIB + 12345, 4 * MIB, MIB + 1, 6 * MIB)):
        new = lay_over(storage, f"{turn}/data", turn, size_bytes)
        assert new.read_bytes() == pattern(turn, size_bytes)
        numbers.add(identity(new))
        assert try_keep(storage.location, f"{turn}/data", size_bytes)
    assert len(numbers) == 1
    assert remove_spare(storage.location)
    assert not remove_spare(storage.location)


def test_a_writer_that_was_given_up_leaves_no_spare(storage: LocalStorage) -> None:
    lay(storage, "old/data", 1, 3 * MIB)
    assert try_keep(storage.location, "old/data", 3 * MIB)
    storage.create("new/data", 3 * MIB).abandon()
    assert [entry.name for entry in storage.list("")] == ["new", "old"]
    storage.delete(["new/data"])


def test_a_name_that_is_taken_is_never_written_over(storage: LocalStorage) -> None:
    lay(storage, "old/data", 1, 2 * MIB)
    mine = lay(storage, "mine/data", 2, 2 * MIB)
    assert try_keep(storage.location, "old/data", 2 * MIB)
    with pytest.raises(StorageError, match="EEXIST"):
        storage.create("mine/data", 2 * MIB)
    assert mine.read_bytes() == pattern(2, 2 * MIB)


# What is kept.


def test_the_largest_is_kept_and_there_is_only_one(storage: LocalStorage) -> None:
    for number, size_bytes in enumerate((2 * MIB, 3 * MIB, MIB)):
        lay(storage, f"{number}/data", number, size_bytes)
    assert try_keep(storage.location, "0/data", 3 * MIB)
    assert try_keep(storage.location, "1/data", 3 * MIB)
    assert not try_keep(storage.location, "2/data", 3 * MIB)
    assert spare_of(storage).read_bytes() == pattern(1, 3 * MIB)
    assert [path.name for path in Path(storage.url).rglob("data")] == ["data"]


def test_file_unfit_as_a_spare_is_not_kept(storage: LocalStorage, tmp_path: Path) -> None:
    small = lay(storage, "small/data", 1, MIB - 1)
    large = lay(storage, "large/data", 1, 4 * MIB)
    linked = lay(storage, "linked/data", 1, 2 * MIB)
    os.link(linked, tmp_path / "copy")
    storage.make_directory("odd")
    odd = Path(storage.url) / "odd"
    (odd / "link").symlink_to(large)
    os.mkfifo(odd / "fifo")
    (odd / "directory").mkdir()
    names = ("small/data", "linked/data", "odd/link", "odd/fifo", "odd/directory", "odd/nothing", "nowhere/data")
    for path in names:
        assert not try_keep(storage.location, path, ANY_SIZE), path
    assert not try_keep(storage.location, "large/data", 2 * MIB - 1), "the next file will be much smaller"
    assert not os.path.lexists(spare_of(storage))
    assert all(path.exists() for path in (small, large, linked))
    spare_of(storage).mkdir()
    assert not try_keep(storage.location, "large/data", ANY_SIZE), "a directory stands in the way"
    assert not remove_spare(storage.location)
    assert lay_over(storage, "new/data", 3, 2 * MIB).read_bytes() == pattern(3, 2 * MIB)
    assert spare_of(storage).is_dir()


def test_a_small_file_does_not_take_it(storage: LocalStorage) -> None:
    lay(storage, "old/data", 1, 2 * MIB)
    assert try_keep(storage.location, "old/data", 2 * MIB)
    lay_over(storage, "new/data", 2, MIB - 1)
    assert not remove_spare(storage.location, 2 * MIB)
    assert remove_spare(storage.location, 2 * MIB - 1)
    assert not os.path.lexists(spare_of(storage))


def test_discarded_file_is_kept_for_a_file_of_its_size(storage: LocalStorage) -> None:
    for number, size_bytes in enumerate((2 * MIB, 3 * MIB, 6 * MIB + 1)):
        lay(storage, f"{number}/data", number, size_bytes)
    storage.discard(["0/data", "1/data", "2/data"], 3 * MIB)
    assert spare_of(storage).read_bytes() == pattern(1, 3 * MIB), "the largest of at most twice the size"
    assert list(Path(storage.url).rglob("data")) == []
    storage.discard((), 2 * MIB)
    assert os.path.lexists(spare_of(storage))
    storage.discard((), MIB)
    assert not os.path.lexists(spare_of(storage))
    lay(storage, "3/data", 3, 2 * MIB)
    storage.discard(["3/data"], 0)
    assert not os.path.lexists(spare_of(storage))


def test_storages_that_cannot_do_it_do_not_say_that_they_can(tmp_path: Path) -> None:
    assert LocalStorage(tmp_path).traits.keeps_space
    assert not MemoryStorage().traits.keeps_space
    assert not FaultyStorage(LocalStorage(tmp_path)).traits.keeps_space


def test_nothing_is_kept_in_memory(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=20m", "tmpfs") as root:
        assert not can_reuse(root)


# Who else could see the bytes.


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_who_reads_the_old_file_keeps_reading_the_old_bytes(storage: LocalStorage, how: str) -> None:
    from hashlib import sha256

    old = lay(storage, "old/data", 1, 3 * MIB)
    with reader_of(old, how) as reader:
        assert try_keep(storage.location, "old/data", 3 * MIB)
        new = lay_over(storage, "new/data", 2, 3 * MIB)
        assert reader.communicate("go\n", timeout=60)[0].strip() == sha256(pattern(1, 3 * MIB)).hexdigest()
    assert new.read_bytes() == pattern(2, 3 * MIB)
    assert not os.path.lexists(spare_of(storage))


def test_an_open_file_of_this_process_counts_too(storage: LocalStorage) -> None:
    old = lay(storage, "old/data", 1, 3 * MIB)
    with old.open("rb") as mine:
        assert try_keep(storage.location, "old/data", 3 * MIB)
        lay_over(storage, "new/data", 2, 3 * MIB)
        assert mine.read() == pattern(1, 3 * MIB)


def test_a_hard_link_that_came_later_keeps_its_bytes(storage: LocalStorage, tmp_path: Path) -> None:
    lay(storage, "old/data", 1, 3 * MIB)
    assert try_keep(storage.location, "old/data", 3 * MIB)
    os.link(spare_of(storage), tmp_path / "copy")
    assert lay_over(storage, "new/data", 2, 3 * MIB).read_bytes() == pattern(2, 3 * MIB)
    assert (tmp_path / "copy").read_bytes() == pattern(1, 3 * MIB)


def test_other_permissions_than_a_new_file_has_are_not_inherited(storage: LocalStorage) -> None:
    old = lay(storage, "old/data", 1, 3 * MIB)
    usual = old.stat().st_mode
    old.chmod(0o640 if usual & 0o777 != 0o640 else 0o600)
    assert try_keep(storage.location, "old/data", 3 * MIB)
    new = lay_over(storage, "new/data", 2, 3 * MIB)
    assert new.stat().st_mode == usual


def test_a_link_under_its_name_leads_nowhere(storage: LocalStorage, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(pattern(9, 3 * MIB))
    storage.make_directory("")
    for turn in range(2):
        spare_of(storage).symlink_to(outside)
        assert lay_over(storage, f"{turn}/data", turn, 3 * MIB).read_bytes() == pattern(turn, 3 * MIB)
        assert not os.path.lexists(spare_of(storage))
    spare_of(storage).symlink_to(outside)
    assert try_keep(storage.location, "0/data", 3 * MIB)
    assert spare_of(storage).is_file()
    assert not spare_of(storage).is_symlink()
    assert outside.read_bytes() == pattern(9, 3 * MIB)


def test_a_fifo_or_a_socket_under_its_name_holds_nothing_up(storage: LocalStorage) -> None:
    storage.make_directory("")
    os.mkfifo(spare_of(storage))
    assert lay_over(storage, "new/data", 2, 3 * MIB).read_bytes() == pattern(2, 3 * MIB)
    assert not os.path.lexists(spare_of(storage))
    os.mkfifo(spare_of(storage))
    assert remove_spare(storage.location)


def start_writer(program: str, directory: Path, *numbers: int) -> subprocess.Popen[str]:
    """One of `programs/spare_writers.py`."""
    command: list[str | Path] = [sys.executable, PROGRAMS / "spare_writers.py", program, directory, *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_others_that_open_it_at_any_moment_do_not_end_the_process(tmp_path: Path) -> None:
    """The signal that tells of them would do that by default."""
    if not can_reuse(tmp_path):
        pytest.skip("this file system does not write over files in place")
    turns = repeated(300, in_gate=100)
    run = tmp_path / "run"
    opening: list[str | Path] = [sys.executable, PROGRAMS / "file_readers.py", "again and again", run / SPARE_NAME]
    openers = [
        subprocess.Popen([*opening, *(run / str(turn) / "data" for turn in each)])
        for each in (range(0, turns, 2), range(1, turns, 2))
    ]
    writer = start_writer("write_in_turn", run, turns)
    try:
        ended = writer.communicate(timeout=300)
    finally:
        writer.kill()
        for opener in openers:
            opener.kill()
            opener.wait(PATIENCE_SECONDS)
    assert writer.returncode != -signal.SIGIO
    assert (writer.returncode, ended[0]) == (0, "through\n"), ended


# Two that take it at the same moment.


def test_of_two_processes_one_takes_it_and_both_write_whole_files(tmp_path: Path) -> None:
    if not can_reuse(tmp_path):
        pytest.skip("this file system does not write over files in place")
    turns = repeated(200, in_gate=80)
    running = [start_writer("compete", tmp_path / "run", turns, number) for number in (1, 2)]
    ended = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], ended
    assert sum(int(output) for output, _ in ended) > turns // 4, "they have met at the spare"


# Full disks.


def fill(root: Path) -> Path:
    """Leaves no room on a disk but what the file systems wants for itself."""
    filler = root / "filler"
    with filler.open("wb", buffering=0) as file:
        for size_bytes in (MIB, 4096):
            try:
                while file.write(bytes(size_bytes)) == size_bytes:
                    os.fsync(file.fileno())
            except OSError:
                continue
    return filler


def make_many(storage: LocalStorage) -> None:
    for number in range(20):
        storage.make_directory(f"new-{number}/{'x' * 200}")


def test_the_spare_is_never_why_there_is_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64 * MIB) as root:
        storage = LocalStorage(root / "run")
        takes_room: dict[str, Callable[[], object]] = {
            "make_directory": lambda: make_many(storage),
            "write": lambda: storage.write("old/small", pattern(3, MIB)),
            "publish": lambda: storage.publish("manifest.json", pattern(3, MIB)),
            "small create": lambda: storage.create("old/small", MIB - 1).abandon(),
            "create": lambda: storage.create("old/large", 8 * MIB).abandon(),
        }
        for name, take_room in takes_room.items():
            lay(storage, "old/data", 1, 8 * MIB)
            assert try_keep(storage.location, "old/data", 8 * MIB), name
            filler = fill(root)
            take_room()
            filler.unlink()
            assert not os.path.lexists(spare_of(storage)), name
            shutil.rmtree(root / "run")
            storage = LocalStorage(root / "run")


def test_reused_file_that_outgrows_the_disk_is_a_full_disk_error(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64 * MIB) as root:
        storage = LocalStorage(root)
        lay(storage, "old/data", 1, 8 * MIB)
        assert try_keep(storage.location, "old/data", 8 * MIB)
        with pytest.raises(StorageFullError, match="200000000 bytes are needed"):
            storage.create("new/data", 200_000_000)
        assert [entry.name for entry in storage.list("new")] == []
        assert not os.path.lexists(spare_of(storage))


def test_a_nearly_full_disk_is_written_in_the_room_that_the_old_file_had(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64 * MIB) as root:
        storage = LocalStorage(root / "run")
        lay(storage, "old/data", 1, 16 * MIB)
        assert try_keep(storage.location, "old/data", 16 * MIB)
        filler = fill(root)
        # A little for the directory.
        os.truncate(filler, filler.stat().st_size - 64 * 1024)
        number = identity(spare_of(storage))
        new = lay_over(storage, "new/data", 2, 16 * MIB)
        assert identity(new) == number
        assert new.read_bytes() == pattern(2, 16 * MIB)


def test_a_disk_with_less_free_than_it_takes_keeps_none(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64 * MIB) as root:
        storage = LocalStorage(root / "run")
        lay(storage, "old/data", 1, 32 * MIB)
        assert not try_keep(storage.location, "old/data", 32 * MIB)
        storage.delete(["old/data"])
