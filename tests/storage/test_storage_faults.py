"""A directory of this machine when the system refuses: failed syncs, lost replies, missing calls; what lasts when."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded
from holdfast.format.names import data_name
from holdfast.storage import Entry
from holdfast.storage.local.direct import PAGE_BYTES
from tracing import STRACE, needs_strace

DIRECT_BYTES = 2 << 20

PRELUDE = """
import mmap, os, sys
from holdfast.errors import StorageError
from holdfast.storage import LocalStorage
storage = LocalStorage(sys.argv[1])
content = bytes(range(256)) * 8192

def failure(call, *arguments):
    try:
        call(*arguments)
    except StorageError as error:
        return error
    raise SystemExit(f"{call} did not fail")
"""


def _run(root: Path, code: str, *, under: list[str] | None = None, env: dict[str, str] | None = None) -> str:
    """Runs code in a process of its own; what it printed."""
    command = [*(under or []), sys.executable, "-c", PRELUDE + code, str(root)]
    done = preloaded.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


CHANGES = "pwrite64,fallocate,ftruncate,mkdir,mkdirat,fsync,linkat,renameat2,rename,renameat,unlinkat"


class Trace:
    """System calls of a child process, told to fail where wished, and what they were."""

    def __init__(self, tmp_path: Path) -> None:
        self.log = tmp_path / "trace"
        self.tmp_path = tmp_path
        self.root = tmp_path / "root"

    def run(self, code: str, *options: str) -> str:
        under = [*STRACE, "-y", "-e", f"trace=openat,fcntl,{CHANGES}", "-o", str(self.log), *options]
        return _run(self.root, code, under=under)

    def calls(self, name: str) -> list[str]:
        """All calls of one kind that concern the test's directory, as strace writes them."""
        lines = [line.partition(" ")[2].strip() for line in self.log.read_text().splitlines()]
        return [line for line in lines if line.startswith(f"{name}(") and str(self.tmp_path) in line]

    def steps(self) -> list[str]:
        """The calls that changed the test's directory, such as `fsync root` or `openat manifest`."""
        steps = []
        for line in self.log.read_text().splitlines():
            found = re.match(r"\d+ +(\w+)\((.*)\) = \d", line)
            if found is None or str(self.tmp_path) not in found[2] or found[1] == "fcntl":
                continue
            if found[1] == "openat" and "O_CREAT" not in found[2]:
                continue
            named = re.findall(r'"([^"]*)"', found[2])
            subject = named[-1] if named and found[1] != "pwrite64" else re.findall(r"<([^>]*)>", found[2])[0]
            steps.append(f"{found[1]} {re.sub(r'[.][0-9a-f]{16}[.]', '.', Path(subject).name)}")
        return steps


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path)


# What lasts when.


@needs_strace
def test_order_of_publish(trace: Trace) -> None:
    """The file is synced before it has its name, the directory before anybody hears of it."""
    assert (
        trace.run("print(storage.publish('manifest', b'bytes'), storage.publish('manifest', b'more'))") == "True False"
    )
    temporary = ["openat .manifest.tmp", "pwrite64 .manifest.tmp", "fsync .manifest.tmp"]
    assert trace.steps() == [
        "mkdir root",
        f"fsync {trace.tmp_path.name}",
        *temporary,
        "linkat manifest",
        "unlinkat .manifest.tmp",
        "fsync root",
        *temporary,
        "unlinkat .manifest.tmp",
        "fsync root",
    ]


@needs_strace
def test_order_of_directories(trace: Trace) -> None:
    """Each name is made to last in the directory above it, also where it was there before."""
    trace.run("storage.make_directory('a/b'); storage.make_directory('a/c'); print(storage.retire('a/b'))")
    assert [step if "trash" not in step else "rename" for step in trace.steps()] == [
        "mkdir root",
        f"fsync {trace.tmp_path.name}",
        "mkdirat a",
        "fsync root",
        "mkdirat b",
        "fsync a",
        "fsync root",
        "mkdirat c",
        "fsync a",
        "rename",
        "fsync root",
        "fsync a",
    ]


@needs_strace
def test_the_roots_own_name_is_made_to_last(trace: Trace) -> None:
    """Every directory that was made on the way, and a root that another process made and may not have synced."""
    code = "LocalStorage(storage.url + '/x/y').write('file', b''); LocalStorage(storage.url + '/x').write('file', b'')"
    trace.run(code)
    above = ["mkdir root", f"fsync {trace.tmp_path.name}", "mkdir x", "fsync root", "mkdir y", "fsync x"]
    assert trace.steps() == [*above, "openat file", "fsync file", "fsync root", "openat file", "fsync file"]


@needs_strace
def test_order_of_a_large_file(trace: Trace) -> None:
    printed = trace.run(f"""
writer = storage.create("step/data", {DIRECT_BYTES + 1})
writer.write_at(0, memoryview(mmap.mmap(-1, {DIRECT_BYTES + PAGE_BYTES})))
writer.finish()
storage.sync_directory("step")
print(writer.is_direct)
""")
    assert [step for step in trace.steps() if step != "pwrite64 data"][2:] == [
        "mkdirat step",
        "fsync root",
        "openat data",
        "fallocate data",
        "ftruncate data",
        "fsync data",
        "fsync step",
    ]
    sizes = [int(call.rpartition("=")[2]) for call in trace.calls("pwrite64")]
    assert sizes == ([PAGE_BYTES, DIRECT_BYTES + PAGE_BYTES] if printed == "True" else [DIRECT_BYTES + 1])


# Failed syncs and writes.


@needs_strace
def test_a_failed_sync_ends_the_writer(trace: Trace) -> None:
    trace.run(
        """
writer = storage.create("data", len(content))
writer.write_at(0, memoryview(content))
first = failure(writer.finish)
assert failure(writer.finish) is first and failure(writer.write_at, 0, memoryview(content)) is first
assert first.path == "data" and "EIO" in str(first) and "kernel" in first.hint, first
assert isinstance(first.__cause__, OSError)
writer.abandon()
assert not [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
            and os.readlink(f"/proc/self/fd/{name}").endswith("data")]
""",
        *("-e", "inject=fsync:error=EIO:when=2"),
    )
    assert [call for call in trace.calls("fsync") if "/data>" in call] == [
        call for call in trace.calls("fsync") if "(INJECTED)" in call
    ]


@needs_strace
def test_a_failed_write_ends_the_writer(trace: Trace) -> None:
    trace.run(
        """
writer = storage.create("data", len(content))
first = failure(writer.write_at, 0, memoryview(content))
assert failure(writer.write_at, 0, memoryview(content)) is first and failure(writer.finish) is first
""",
        *("-e", "inject=pwrite64:error=EIO:when=2"),
    )
    assert len(trace.calls("pwrite64")) == 2
    assert [call for call in trace.calls("fsync") if "/data>" in call] == []


@needs_strace
def test_a_write_that_is_cut_short_goes_on(trace: Trace) -> None:
    """From the beginning of the page that it came to, if it is a direct one, and after a signal all the same."""
    printed = trace.run(
        """
memory = memoryview(mmap.mmap(-1, len(content)))
writer = storage.create("data", len(content))
writer.write_at(0, memory)
writer.finish()
print(writer.is_direct)
""",
        *("-e", "inject=pwrite64:retval=5000:when=2", "-e", "inject=fsync:error=EINTR:when=2"),
    )
    if printed != "True":
        pytest.skip("the file system of the temporary directory has no direct writes")
    ends = [call.rpartition(", ")[2] for call in trace.calls("pwrite64")]
    assert ends == ["4096) = 4096", "0) = 5000 (INJECTED)", f"4096) = {DIRECT_BYTES - 4096}"]


@needs_strace
@pytest.mark.parametrize("call_number", [2, 3])
def test_a_publish_that_cannot_be_made_to_last_leaves_nothing(trace: Trace, call_number: int) -> None:
    """Neither when the file nor when the directory cannot be synced."""
    code = "error = failure(storage.publish, 'manifest', b'1'); assert 'EIO' in str(error); print(storage.list(''))"
    assert trace.run(code, "-e", f"inject=fsync:error=EIO:when={call_number}") == "[]"


@needs_strace
def test_a_small_write_that_cannot_be_made_to_last_leaves_nothing(trace: Trace) -> None:
    code = "error = failure(storage.write, 'file', b'1'); assert 'EIO' in str(error); print(storage.list(''))"
    assert trace.run(code, "-e", "inject=fsync:error=EIO:when=2") == "[]"


# File systems that cannot do all.


@needs_strace
@pytest.mark.parametrize(
    "refusal", ["fcntl:error=EINVAL:when=2", "pwrite64:error=EINVAL:when=1", "pwrite64:retval=512:when=1"]
)
def test_no_direct_writes(trace: Trace, refusal: str) -> None:
    """The page cache is used, and that is said once."""
    printed = trace.run(
        """
for name in ("first", "second"):
    writer = storage.create(name, len(content))
    assert not writer.is_direct
    writer.write_at(0, memoryview(content))
    writer.finish()
    assert storage.read(name, len(content)) == content
print(storage.traits.hindrance)
print(LocalStorage(storage.url).traits.hindrance, end="")
""",
        *("-P", str(trace.root / "first"), "-e", f"inject={refusal}"),
    )
    assert printed.startswith(f"{trace.root}: its file system does not support direct writes")
    assert len(printed.splitlines()) == 1


@needs_strace
@pytest.mark.parametrize("refusal", ["error=EOPNOTSUPP", "error=EINTR"])
def test_no_preallocation(trace: Trace, refusal: str) -> None:
    trace.run(
        """
writer = storage.create("file", len(content))
writer.write_at(0, memoryview(content))
writer.finish()
assert storage.read("file", len(content)) == content
""",
        *("-e", f"inject=fallocate:{refusal}"),
    )
    assert "ftruncate file" in trace.steps()


@needs_strace
def test_missing_direct_writes_are_reported_once(trace: Trace) -> None:
    """Of two managers of one process, the first tells."""
    data = [f"{trace.root}/step-00000000{step}.g000{step}/{data_name(0, 1)}" for step in (1, 2)]
    printed = trace.run(
        """
import logging
import numpy as np
import holdfast as hf
from holdfast.events import Warned
logging.disable()
told = []
for step in (1, 2):
    objects = hf.Checkpoint(weights=np.ones(len(content), np.uint8))
    with hf.CheckpointManager(storage.url, objects, sinks=[told.append]) as manager:
        manager.restore()
        manager.save(step)
print(*(event for event in told if isinstance(event, Warned)), sep="\\n")
""",
        *("-P", data[0], "-P", data[1], "-e", "inject=fcntl:error=EINVAL:when=2"),
    )
    assert printed.startswith(f"{trace.root}: its file system does not support direct writes")
    assert len(printed.splitlines()) == 1
    assert len([call for call in trace.calls("fcntl") if "INJECTED" in call]) == 2


PUBLISH_TWICE = "print(storage.publish('manifest', b'first'), storage.publish('manifest', b'second'), storage.list(''))"


@needs_strace
def test_no_hard_links(trace: Trace) -> None:
    """A rename that replaces nothing does as well."""
    printed = trace.run(PUBLISH_TWICE, "-e", "inject=linkat:error=EPERM")
    assert printed == f"True False {[Entry('manifest', False, 5)]}"
    temporary = ["openat .manifest.tmp", "pwrite64 .manifest.tmp", "fsync .manifest.tmp"]
    first, second = ["renameat2 manifest"], ["unlinkat .manifest.tmp"]
    assert trace.steps()[2:] == [*temporary, *first, "fsync root", *temporary, *second, "fsync root"]


@needs_strace
def test_neither_hard_links_nor_such_a_rename(trace: Trace) -> None:
    printed = trace.run(
        "print(failure(storage.publish, 'manifest', b'1'), storage.list(''))",
        *("-e", "inject=linkat:error=EOPNOTSUPP", "-e", "inject=renameat2:error=EINVAL"),
    )
    assert "neither hard links nor an atomic rename without overwriting" in printed
    assert printed.endswith("[]")


# Wrong answers.

LYING_LINK = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
int linkat(int from, const char *old, int to, const char *name, int flags) {
    long result = syscall(SYS_linkat, from, old, to, name, flags);
    errno = atoi(getenv("LINK_SAYS"));
    return result == 0 || errno != EEXIST ? -1 : (int)result;
}
"""


@pytest.fixture(scope="module")
def lying_link(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes each link, and then says that it failed."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler to make a lying link with")
    directory = tmp_path_factory.mktemp("library")
    (directory / "link.c").write_text(LYING_LINK)
    library = directory / "link.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, directory / "link.c"], check=True)
    return library


@pytest.mark.parametrize("code", ["EIO", "EEXIST", "ETIMEDOUT"])
def test_link_reported_as_failed_but_made_counts_as_published(tmp_path: Path, lying_link: Path, code: str) -> None:
    env = {"LD_PRELOAD": str(lying_link), "LINK_SAYS": str(getattr(errno, code))}
    printed = _run(tmp_path / "root", "print(storage.publish('manifest', b'first'), storage.list(''))", env=env)
    assert printed == f"True {[Entry('manifest', False, 5)]}"


def test_a_failed_link_that_is_not_ours(tmp_path: Path, lying_link: Path) -> None:
    (tmp_path / "manifest").write_bytes(b"theirs")
    env = {"LD_PRELOAD": str(lying_link), "LINK_SAYS": str(errno.EIO)}
    printed = _run(tmp_path, "print(failure(storage.publish, 'manifest', b'ours'), storage.list(''))", env=env)
    assert "EIO" in printed
    assert printed.endswith(f"{[Entry('manifest', False, 6)]}")
    env["LINK_SAYS"] = str(errno.EEXIST)
    assert _run(tmp_path, "print(storage.publish('manifest', b'theirs'))", env=env) == "False"


@needs_strace
def test_a_link_that_did_fail(trace: Trace) -> None:
    printed = trace.run(
        "print(failure(storage.publish, 'manifest', b'1'), storage.list(''))", "-e", "inject=linkat:error=EIO"
    )
    assert printed.endswith("[]")
