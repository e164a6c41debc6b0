"""The order of a save's writes, fsyncs and links, as the kernel saw it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
import sys, numpy as np, holdfast as hf
with hf.CheckpointManager(sys.argv[1], hf.Checkpoint(a=np.ones(3_000_000)), keep=hf.Latest(1)) as manager:
    manager.save(1)
    manager.wait()
    print("first", flush=True)
    manager.save(2)
"""

CALLS = "openat,mkdirat,mkdir,pwrite64,write,fsync,fdatasync,linkat,renameat,renameat2,unlinkat,unlink,rmdir"

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The calls of the second save that succeeded, each as `name path ...` with paths below the run's root."""
    directory = tmp_path_factory.mktemp("order")
    run, log = directory / "run", directory / "log"
    command = ["strace", "-f", "-y", "-s", "16", "-o", str(log), "-e", f"trace={CALLS}", sys.executable, "-c"]
    done = subprocess.run(
        [*command, textwrap.dedent(PROGRAM), str(run)], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0 and "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    lines = join_parted(log.read_text().splitlines())
    begin = next(number for number, line in enumerate(lines) if '"first' in line)
    return [shorten(line, run) for line in lines[begin:] if str(run) in line and "= -1" not in line]


def join_parted(lines: list[str]) -> list[str]:
    """Calls that another thread interrupted stand where they ended."""
    begun: dict[str, str] = {}
    joined: list[str] = []
    for line in lines:
        thread, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            begun[thread] = rest.removesuffix("<unfinished ...>")
        elif resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
            joined.append(begun.pop(thread, "") + resumed[1])
        else:
            joined.append(rest)
    return joined


def shorten(line: str, run: Path) -> str:
    return line.replace(str(run), "RUN")


def where(trace: list[str], pattern: str) -> list[int]:
    return [number for number, line in enumerate(trace) if re.search(pattern, line)]


STEP = r"RUN/step-000000002\.g0001"
DATA = STEP + r"/data-00000-of-00001\.safetensors>"
INDEX = STEP + r"/index-00000-of-00001\.json>"
SYNC = r"^f(data)?sync\(\d+<"


def only(trace: list[str], pattern: str) -> int:
    found = where(trace, pattern)
    assert len(found) == 1, (pattern, [trace[number] for number in found])
    return found[0]


def test_a_later_save_reads_no_record_of_a_generation(trace: list[str]) -> None:
    """They never change, and a long job has many."""
    assert [line for line in trace if "generations" in line], "it looks which there are"
    assert not [line for line in trace if ".base.json" in line]


def test_each_thing_lasts_before_what_relies_on_it(trace: list[str]) -> None:
    made = only(trace, r"^mkdir(at)?\(.*step-000000002\.g0001\"")
    root_synced = next(number for number in where(trace, SYNC + "RUN>") if number > made)
    data_written = where(trace, r"^pwrite64\(\d+<" + DATA)
    data_synced = only(trace, SYNC + DATA)
    index_written = where(trace, r"^p?write(64)?\(\d+<" + INDEX)
    index_synced = only(trace, SYNC + INDEX)
    directory_synced = where(trace, SYNC + STEP + ">")
    temporary_synced = only(trace, SYNC + STEP + r"/\.manifest\.json\.")
    linked = only(trace, r"^linkat\(.*\.manifest\.json\.\w+\.tmp\".*\"manifest\.json\"")

    assert max(data_written) < data_synced < linked
    assert max(index_written) < index_synced < linked
    assert root_synced < linked, "the step's own directory lasts before its manifest appears"
    before = [number for number in directory_synced if number < linked]
    after = [number for number in directory_synced if number > linked]
    assert max(*data_written, *index_written) < max(before), "the files' names last before the manifest appears"
    assert temporary_synced < linked, "the manifest's bytes last before its name appears"
    assert after, "the manifest's name lasts before anybody is told"
    copied = where(trace[linked:], r"^p?write(64)?\(\d+<" + STEP + "/committed>")
    assert where(trace[linked:], r"^p?write(64)?\(\d+<" + STEP) == copied, "nothing but the manifest's copy is written"
    assert linked + min(copied) > min(after), "after the commit"


def test_old_step_goes_after_the_new_commit_manifest_first(trace: list[str]) -> None:
    linked = only(trace, r"^linkat\(.*\"manifest\.json\"")
    committed = min(number for number in where(trace, SYNC + STEP + ">") if number > linked)
    copy_removed = only(trace, r"^unlink(at)?\(\d+<RUN/step-000000001\.g0001>, \"committed\"")
    manifest_removed = only(trace, r"^unlink(at)?\(\d+<RUN/step-000000001\.g0001>, \"manifest\.json\"")
    old_synced = min(
        number for number in where(trace, SYNC + r"RUN/step-000000001\.g0001>") if number > manifest_removed
    )
    others = where(trace, r"^unlink(at)?\(\d+<RUN/step-000000001\.g0001>, \"(data|index)-")
    assert committed < copy_removed < manifest_removed < old_synced < min(others)


def test_the_data_goes_past_the_page_cache_in_large_writes(trace: list[str]) -> None:
    sizes = [
        int(match[1])
        for number in where(trace, r"^pwrite64\(\d+<" + DATA)
        if (match := re.search(r"= (\d+)$", trace[number]))
    ]
    assert sum(sizes) >= 24_000_000
    assert len([size for size in sizes if size >= 1 << 20]) <= 6
