"""`holdfast doctor`: checks the installation and a place, measures a save, and recommends how often to save."""

from __future__ import annotations

import logging
import math
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import click
import numpy as np

import holdfast
from holdfast.catalog import StoredRun
from holdfast.checkpoint import Checkpoint
from holdfast.cli.bucket import BucketExamination
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.findings import PREFIX, Finding, Status, are_fit
from holdfast.cli.report import Report, text_columns, verb
from holdfast.cli.screen import (
    BAD,
    FAINT,
    GOOD,
    NOTABLE,
    STRONG,
    Words,
    figure_text,
    parse_seconds,
    parse_size,
)
from holdfast.errors import DamageError, NoCheckpointError, NotFoundError, StorageError, StorageFullError, UsageError
from holdfast.format.names import SPARE_NAME
from holdfast.manager import CheckpointManager
from holdfast.numbers import size_text, span_text, time_text
from holdfast.policies import Auto, Latest, SaveMoment
from holdfast.policies.saving import DEFAULT_MTBF_SECONDS, Bound
from holdfast.process.exit import ending_on
from holdfast.process.progress import show_progress
from holdfast.save import copy_plan
from holdfast.storage import LocalStorage, digesting, open_storage
from holdfast.storage.checks import as_storage_errors
from holdfast.storage.local.direct import SMALLEST_DIRECT_BYTES
from holdfast.storage.local.mounts import find_mount
from holdfast.storage.objects import ObjectStorage

_DEFAULT_BYTES: Final = 10**9
_MIN_BYTES: Final = 100_000
"""A smaller size does not measure a disk, and usually lacks its unit by mistake."""
_TRIAL_BYTES: Final = 128_000_000
"""The most that is saved at once: with five saves and as many restores the whole takes a few seconds."""
_SAVES: Final = 5
_ARRAY_BYTES: Final = 16 << 20
_CLOCK_SECONDS: Final = 2.0
_TIMEOUT_SECONDS: Final = 3600.0
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYERED: Final = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})

_LIBRARIES: Final = ("numpy", "xxhash", "torch", "jax", "lightning", "transformers", "keras", "ray")

_STYLES: Final = {"ok": GOOD, "note": NOTABLE, "unfit": BAD}
_FLOOR_SECONDS: Final = 60.0
_FLOOR_SHARE: Final = 0.01
"""The shortest interval that is recommended, and its largest share of the time between failures."""

_WHY: Final = {
    "optimum": "This interval minimizes the time lost to saves and failures (Young's formula, refined by Daly).",
    "overhead": "Young's formula gives {young}, but saves would take more than one percent of the time.",
    "durable": "Young's formula gives {young}, but a save takes longer than that to be durable.",
    "floor": "Young's formula gives {young}: saves are cheap here. A minute is often enough, with fewer saves.",
}


def _parse_measurable(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    size_bytes = parse_size(ctx, param, text)
    if size_bytes is not None and size_bytes < _MIN_BYTES:
        raise click.BadParameter(f"{text!r} is {size_bytes} B, too little to measure; write 500MB or 5GB.", ctx, param)
    return size_bytes


@verb("doctor")
@click.argument("directory", metavar="[DIRECTORY]", required=False, type=click.Path())
@click.option(
    "--size",
    metavar="SIZE",
    callback=_parse_measurable,
    help="The size of the state.  [default: that of the newest checkpoint there, or 1GB]",
)
@click.option(
    "--mtbf", metavar="TIME", callback=parse_seconds, help="The mean time between failures.  [default: 6h, as for Auto]"
)
def command(report: Report, directory: str | None, size: int | None, mtbf: float | None) -> None:
    """Check the installation and a directory, measure a save there, and recommend how often to save.

    DIRECTORY is the directory that a job saves into, or any other on the same disk. Without it, only the installation
    is checked. Of the URL of a bucket, such as s3://bucket/runs, permissions, clock and speed are checked.

    The check takes a few seconds. It writes into a hidden directory, which it removes at the end, and does not touch
    a run that is there. The exit code is 0 if everything is fit for use, and 5 if not.

    Write sizes as 500MB, 1.5GB or 2GiB, and times with their unit: 350ms, 30s, 90min, 24h or 7d.
    """
    if directory is None:
        findings = list(examine_installation())
        report.fields = {"is_fit": are_fit(findings), "findings": [finding._asdict() for finding in findings]}
        if report.is_page:
            _show_findings(report, findings)
        else:
            report.table(text_columns("name", "value"), [(one.name.replace(" ", "_"), one.text) for one in findings])
        _end(report, findings)
        return
    storage = _find_place(directory)
    if isinstance(storage, ObjectStorage):
        if size is not None or mtbf is not None:
            raise UsageError("--size and --mtbf are for directories", hint="Leave them out for a bucket.")
        _show_bucket(report, storage)
        return
    step, size_bytes, has_checkpoint = _find_size(storage, size)
    # The trial's own saves are no business of the person's: what ends them comes back as an error.
    logging.getLogger("holdfast").addHandler(logging.NullHandler())
    with (
        ending_on(signal.SIGTERM, signal.SIGHUP),
        show_progress("", counts_bytes=False) as bar,
        _scratch(Path(storage.url)) as scratch,
    ):
        examined = Examination(LocalStorage(scratch), size_bytes)
        bar.label("looking at the file system")
        examined.look(has_checkpoint=has_checkpoint)
        if examined.can_commit:
            examined.measure(bar.label)
            examined.advise(mtbf or DEFAULT_MTBF_SECONDS)
    is_fit = are_fit(examined.findings)
    report.fields = {
        "directory": storage.url,
        "is_fit": is_fit,
        "findings": [finding._asdict() for finding in examined.findings],
        "size_bytes": size_bytes,
        "size_of_step": step,
        "figures": examined.figures,
        "save_every": examined.save_every,
        "bound": examined.bound,
    }
    if report.is_page:
        verdict = ("fit for checkpoints", GOOD) if is_fit else ("not fit for checkpoints", BAD)
        report.line((directory, STRONG), "   ", verdict)
        _show_findings(report, examined.findings, indent=2)
        if examined.can_commit:
            _show_costs(report, examined, step)
    else:
        rows = [("directory", "fit" if is_fit else "unfit")]
        rows += [(one.name.replace(" ", "_"), one.status) for one in examined.findings]
        rows += [(name, str(n) if isinstance(n, int) else figure_text(n)) for name, n in examined.figures.items()]
        report.table(text_columns("name", "value"), [*rows, ("save_every", examined.save_every or "-")])
    _end(report, examined.findings)


def _show_bucket(report: Report, storage: ObjectStorage) -> None:
    examined = BucketExamination(storage)
    with ending_on(signal.SIGTERM, signal.SIGHUP), show_progress("", counts_bytes=False) as bar:
        examined.examine(bar.label)
    is_fit = are_fit(examined.findings)
    report.fields = {
        "directory": storage.url,
        "is_fit": is_fit,
        "findings": [finding._asdict() for finding in examined.findings],
        "figures": examined.figures,
        "remains_rule": examined.remains_rule,
    }
    if report.is_page:
        verdict = ("fit for checkpoints", GOOD) if is_fit else ("not fit for checkpoints", BAD)
        report.line((storage.url, STRONG), "   ", verdict)
        _show_findings(report, examined.findings, indent=2)
        report.line()
        for line in examined.remains_rule.splitlines():
            report.line(line)
    else:
        rows = [("directory", "fit" if is_fit else "unfit")]
        rows += [(one.name.replace(" ", "_"), one.status) for one in examined.findings]
        rows += [(name, figure_text(figure)) for name, figure in examined.figures.items()]
        report.table(text_columns("name", "value"), rows)
    _end(report, examined.findings)


def _find_place(location: str) -> LocalStorage | ObjectStorage:
    storage = open_storage(location)
    if isinstance(storage, ObjectStorage):
        return storage
    if not isinstance(storage, LocalStorage):
        raise UsageError(
            f"{location} is neither a directory of this machine nor a bucket",
            hint="Name a mounted directory, or the URL of a bucket.",
        )
    root = Path(storage.url)
    if os.path.isdir(root):  # noqa: PTH112  It gives False, not an error, where we may not look.
        return storage
    if os.path.lexists(root):
        raise NoCheckpointError(f"{location} is not a directory", hint="Name the directory that the job saves into.")
    above = next(place for place in root.parents if os.path.isdir(place))  # noqa: PTH112
    raise NoCheckpointError(
        f"there is no directory {location}",
        hint=f"Create it first (mkdir -p), or name an existing directory on the same disk, such as {above}.",
    )


def _find_size(storage: LocalStorage, size_bytes: int | None) -> tuple[int | None, int, bool]:
    """The step that has the size of the state or None, that size, and whether the run has a checkpoint."""
    catalog = StoredRun(storage).look()
    for name in reversed(catalog.living) if size_bytes is None else ():
        with suppress(DamageError, NotFoundError):
            manifest = StoredRun(storage).step(name).manifest()
            return name.step, max(manifest.size_bytes + manifest.referred_bytes, 1), True
    return None, size_bytes or _DEFAULT_BYTES, bool(catalog.committed)


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """**Blocks.** Lends a new directory to the body, and removes it with all that is in it."""
    with as_storage_errors("write in", "", root):
        lent = tempfile.TemporaryDirectory(prefix=PREFIX, dir=root)
    with lent as scratch:
        yield Path(scratch)


def examine_installation() -> Iterator[Finding]:
    """Lists the installed libraries, and checks whether holdfast can use them."""
    yield Finding("holdfast", "ok", f"{holdfast.__version__}, from {Path(holdfast.__file__).parent}")
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.python_implementation()}")
    system = f"{platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        yield Finding("platform", "ok", system)
    else:
        yield Finding("platform", "unfit", system, "holdfast works on Linux only")
    yield _find_compiled_code()
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            yield Finding(library, "ok", version(library))


def _find_compiled_code() -> Finding:
    lacking = [] if copy_plan.NATIVE is not None else ["copying"]
    lacking += [] if digesting.find_native() is not None else ["digests"]
    if not lacking:
        return Finding("compiled code", "ok", "in use")
    hint = (
        f"the slow path is in use for {' and '.join(lacking)}, so saves block training longer: install a C compiler "
        "and the headers of Python (Debian: build-essential python3-dev), then install holdfast again"
    )
    return Finding("compiled code", "note", "not in use", hint)


@dataclass
class Examination:
    """Uses an empty directory as a job does. Each method raises `StorageError` if the file system fails.

    The names of figures end with their units.
    """

    storage: LocalStorage
    size_bytes: int
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    bound: Bound | Literal["floor"] = "unmeasured"

    @property
    def can_commit(self) -> bool:
        """True if a save could be committed; otherwise there is nothing to measure."""
        return "publish_seconds" in self.figures

    @property
    def save_every(self) -> str | None:
        """The policy as it is written in a program; None where nothing could be saved."""
        seconds = self.figures.get("interval_seconds")
        return None if seconds is None else f"holdfast.Seconds({seconds:.0f})"

    def _note(self, name: str, status: Status, text: str, hint: str = "") -> None:
        self.findings.append(Finding(name, status, text, hint))

    def look(self, *, has_checkpoint: bool) -> None:
        """**Blocks.** Looks at all that a save needs; whether the run has a checkpoint decides how many have to fit."""
        mount = find_mount(Path(self.storage.url))
        if mount.bucket_hint:
            self._note("file system", "unfit", mount.kind, mount.bucket_hint)
            return
        if (kind := mount.kind) in _IN_MEMORY:
            self._note("file system", "unfit", kind, f"{kind} is memory: its files are lost when the machine stops")
        elif kind in _LAYERED:
            hint = f"{kind} is usually the layer of a container, which is deleted with it: save to a volume instead"
            self._note("file system", "note", kind, hint)
        else:
            self._note("file system", "ok", kind)
        self._look_at_publishing()
        self._look_at_direct_writes()
        self._look_at_room(has_checkpoint)
        self._look_at_clock()
        self.findings.append(_find_compiled_code())

    def _look_at_publishing(self) -> None:
        """A checkpoint is committed by a file that appears whole, for good, and only where there is none yet."""
        samples = []
        try:
            for number in range(_SAVES):
                begun_at = time.perf_counter()
                self.storage.publish(f"published-{number}", b"first")
                samples.append(time.perf_counter() - begun_at)
            is_replaced = self.storage.publish("published-0", b"other")
            is_replaced = is_replaced or self.storage.read("published-0", 100) != b"first"
        except StorageFullError:
            raise
        except StorageError as error:
            self._note("create-only", "unfit", "it fails", f"{error.message}; {error.hint}")
            return
        if is_replaced:
            hint = "an existing file was replaced: two jobs could both believe that they committed the checkpoint"
            self._note("create-only", "unfit", "it replaces files", hint)
        else:
            self._note("create-only", "ok", "existing files are not replaced")
        self.figures["publish_seconds"] = median(samples)
        self._note("fsync", "ok", f"{time_text(median(samples))} for a small file and its name")

    def _look_at_direct_writes(self) -> None:
        writer = self.storage.create("direct", SMALLEST_DIRECT_BYTES)
        writer.abandon()
        self.storage.delete(["direct"])
        if writer.is_direct:
            self._note("direct I/O", "ok", "large files bypass the page cache")
        else:
            hint = "bytes pass through the page cache: this costs processor time during training, and the restores"
            self._note("direct I/O", "note", "none", f"{hint} measured here may have been from memory")

    def _look_at_room(self, has_checkpoint: bool) -> None:
        with as_storage_errors("look at", "", Path(self.storage.url)):
            status = os.statvfs(self.storage.url)
        if not status.f_blocks:  # As some network file systems say.
            self._note("room", "note", "unknown", "the file system does not report its free space")
            return
        free_bytes = status.f_bavail * status.f_frsize
        self.figures["free_bytes"] = free_bytes
        free, size = f"{size_text(free_bytes)} free", f"a checkpoint of {size_text(self.size_bytes)}"
        if free_bytes < self.size_bytes:
            self._note("room", "unfit", free, f"{size} does not fit: remove old checkpoints, or save elsewhere")
        elif free_bytes < 2 * self.size_bytes and not has_checkpoint:
            hint = f"only {size} fits, but the second is written before the first is removed"
            self._note("room", "note", free, hint)
        else:
            self._note("room", "ok", free)

    def _look_at_clock(self) -> None:
        before = time.time()
        self.storage.write("clock", b"x")
        with as_storage_errors("look at", "clock", Path(self.storage.url)):
            written_at = (Path(self.storage.url) / "clock").stat().st_mtime
        ahead_seconds = max(written_at - time.time(), 0.0) or min(written_at - before, 0.0)
        self.figures["clock_ahead_seconds"] = ahead_seconds
        if abs(ahead_seconds) <= _CLOCK_SECONDS:
            self._note("clock", "ok", "agrees with the clock of the file system")
            return
        text = f"the file system's is {abs(ahead_seconds):.0f} s {'ahead' if ahead_seconds > 0 else 'behind'}"
        self._note("clock", "note", text, f"{text}: displayed ages will be wrong; synchronize both clocks (NTP)")

    def measure(self, label: Callable[[str], None]) -> None:
        """**Blocks.** Saves and restores as a job does; what that takes is scaled up to the size of the state.

        Raises:
            StorageFullError: If there is too little room.
            SaveFailedError: If the place fails in a save.
        """
        # Of the room: a checkpoint and the one that follows it, and as much for all others.
        free_bytes = self.figures.get("free_bytes", math.inf)
        trial_bytes = int(min(self.size_bytes, _TRIAL_BYTES, max(free_bytes // 4, 1)))
        directory = Path(self.storage.url) / "run"
        objects = Checkpoint(model=_make_arrays(trial_bytes))
        blocked, durable, restored = [], [], []
        with _open_manager(directory, objects) as manager:
            for number in range(1, _SAVES + 1):
                label(f"saving, {number} of {_SAVES}")
                begun_at = time.perf_counter()
                handle = manager.save(number)
                blocked.append(time.perf_counter() - begun_at)
                place = Path(handle.wait_committed())
                durable.append(time.perf_counter() - begun_at)
                manager.wait()
                label(f"restoring, {number} of {_SAVES}")
                _forget(place)
                # A manager that has restored opens a generation when it saves next, which a job does only once.
                with _open_manager(directory, objects) as reader:
                    begun_at = time.perf_counter()
                    reader.restore()
                    restored.append(time.perf_counter() - begun_at)
            is_reused = os.path.lexists(directory / SPARE_NAME)
        how = "saves reuse the files of removed checkpoints" if is_reused else "each save writes new files"
        self._note("reuse of space", "ok", how)
        times = self.size_bytes / trial_bytes
        self.figures |= {
            "trial_bytes": trial_bytes,
            # The first one, which imports and touches fresh memory, is left out: it is no measure for others.
            "blocked_seconds": median(blocked[1:]) * times,
            # From the third on a save may be written over a removed one.
            "durable_seconds": median(durable[2:]) * times,
            "restore_seconds": median(restored) * times,
            "write_bytes_per_second": trial_bytes / median(durable[2:]),
            "read_bytes_per_second": trial_bytes / median(restored),
        }

    def advise(self, mtbf_seconds: float) -> None:
        """**Pure.** Finds how often to save by what was measured, as `Auto` does, and what is lost with that.

        `Auto` may save more often. A program that names an interval itself needs no more than one save a minute.
        """
        blocked, durable = self.figures["blocked_seconds"], self.figures["durable_seconds"]
        moment = SaveMoment(step=0, save_blocked_seconds=blocked, save_durable_seconds=durable)
        chosen = Auto(mtbf_seconds=mtbf_seconds).chosen(moment)
        floor_seconds = min(_FLOOR_SECONDS, mtbf_seconds * _FLOOR_SHARE)
        self.bound = chosen.bound if chosen.seconds >= floor_seconds else "floor"
        interval_seconds = math.ceil(max(chosen.seconds, floor_seconds))
        # A failure undoes half a period on average, and falls back to the save before while the newest is not durable.
        period_seconds = interval_seconds + blocked
        per_failure_seconds = period_seconds / 2 + max(durable - blocked, 0.0) + self.figures["restore_seconds"]
        self.figures |= {
            "mtbf_seconds": mtbf_seconds,
            "young_seconds": math.sqrt(2 * blocked * mtbf_seconds),
            "interval_seconds": interval_seconds,
            "per_failure_seconds": per_failure_seconds,
            "lost_share": min(blocked / period_seconds + per_failure_seconds / mtbf_seconds, 1.0),
        }


def _open_manager(directory: Path, objects: Checkpoint) -> CheckpointManager:
    # Alone, even if the environment speaks of a job: this may be a shell within one of its workers.
    return CheckpointManager(directory, objects, keep=Latest(1), timeout_seconds=_TIMEOUT_SECONDS, cluster="alone")


def _make_arrays(size_bytes: int) -> dict[str, Any]:
    """Arrays as large as a model's, of bytes that no disk can make smaller."""
    random = np.frombuffer(np.random.default_rng(0).bytes(min(size_bytes, _ARRAY_BYTES)), np.uint8)
    sizes = [min(_ARRAY_BYTES, size_bytes - begin) for begin in range(0, size_bytes, _ARRAY_BYTES)]
    return {f"layers.{number}.weight": random[:size].copy() for number, size in enumerate(sizes)}


def _forget(directory: Path) -> None:
    """Asks the page cache to let go of a checkpoint's files, where the system has a call for that."""
    if not hasattr(os, "posix_fadvise"):
        return
    with as_storage_errors("read", "", directory):
        for path in directory.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _show_findings(report: Report, findings: Sequence[Finding], *, indent: int = 0) -> None:
    rows: list[list[Words]] = [[(one.status, _STYLES[one.status]), one.name, (one.text, FAINT)] for one in findings]
    report.table(text_columns("", "", ""), rows, indent=indent)


def _end(report: Report, findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.hint:
            report.note((f"{finding.status}: ", _STYLES[finding.status]), f"{finding.name}: {finding.hint}")
    report.exit_code = ExitCode.OK if are_fit(findings) else ExitCode.UNFIT


def _show_costs(report: Report, examined: Examination, step: int | None) -> None:
    figures = examined.figures
    origin = f" as in step {step}," if step is not None else ""
    trial = size_text(figures["trial_bytes"])
    report.line()
    report.line(f"what a save of {size_text(examined.size_bytes)} costs,", f"{origin} by saves of {trial}")
    write, read = (f"{size_text(figures[f'{way}_bytes_per_second'])}/s" for way in ("write", "read"))
    costs: list[list[Words]] = [
        ["training waits", time_text(figures["blocked_seconds"]), ""],
        ["durable after", time_text(figures["durable_seconds"]), (write, FAINT)],
        ["a restore takes", time_text(figures["restore_seconds"]), (f"{read}, every byte checked", FAINT)],
    ]
    report.table(text_columns("", "", ""), costs, indent=2)
    report.line()
    report.line(f"how often to save, with a failure every {span_text(figures['mtbf_seconds'])}")
    report.line((f"  save_every={examined.save_every}", f"bold {GOOD}"))
    report.line("  ", _WHY[examined.bound].format(young=time_text(figures["young_seconds"])))
    lost, failure = f"{100 * figures['lost_share']:.2g} %", time_text(figures["per_failure_seconds"])
    report.line(f"  Saves and failures then take {lost} of the time, and one failure costs {failure}.")
