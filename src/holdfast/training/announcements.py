"""The lines that say where a training begins and how far it is when it ends."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.advice.hyperparameters import HyperparameterChange
from holdfast.advice.watch import describe_epochs, list_overruled
from holdfast.catalog import StoredRun
from holdfast.checkpoint import objects_of
from holdfast.errors import HoldfastError
from holdfast.events.sinks import logger
from holdfast.format.records import Worker
from holdfast.numbers import span_text
from holdfast.policies import SavePolicy, describe_rhythm
from holdfast.process.terminal import inform
from holdfast.restore.records import Restoration
from holdfast.state import Differences
from holdfast.storage import open_storage
from holdfast.training.backup import Backup

if TYPE_CHECKING:
    from holdfast.manager import CheckpointManager

_MOST_SHOWN: Final = 3
_MOST_SIBLINGS: Final = 1000
_SHORTEST_WORD: Final = 4


class Announcements:
    """Reports on the leader where training begins and ends: in the log at level INFO, or on standard error."""

    def __init__(self, url: str, worker: Worker, *, quiet: bool) -> None:
        self.place = name_place(url)
        self._worker = worker
        self._is_quiet = quiet or not worker.is_leader
        self._began_at: int | None = None

    def begin(self, manager: CheckpointManager, restored: Restoration | None, step: int) -> None:
        """Reports that training begins with a step, after a restore, if there was one; its witness has begun by now."""
        self._begin(manager, step)
        reached = manager.witness.reached
        rhythm = describe_saving(manager.options.save_every)
        if restored is None:
            how = "starts from the beginning" if manager.options.begin_anew else "is new"
            again = ""
            if reached and not manager.options.begin_anew:
                again = f"; the steps of an earlier start, up to step {reached}, are trained again and not compared"
            self.say(f"{self.place} {how}" + (f"; {rhythm}" if rhythm else "") + again)
            if self._worker.is_leader and (found := find_namesake(manager.url)) is not None:
                other = name_place(found[0])
                logger.warning(
                    "%s has %d steps: if you meant that one, stop this job and correct the name %s",
                    *(other, found[1], self.place),
                )
        else:
            epochs = describe_epochs(objects_of(manager.checkpoint).all(), manager.lineage.count_epochs)
            after = f", after {epochs}" if epochs else ""
            lost = ("at least " if manager.witness.reached_is_least else "") + str(reached - step)
            self.say(self.describe(restored, f"at step {step}{after}", rhythm, lost if reached > step else ""))
            set_otherwise = list_overruled(manager.checkpoint.objects).items()
            loaders = {path: HyperparameterChange(*pair, can_be_kept=False) for path, pair in set_otherwise}
            self._warn_of_changes(restored, {**restored.hyperparameters, **loaders})

    def _begin(self, manager: CheckpointManager, step: int) -> None:
        self._began_at = step
        manager.emit.entered_at = None if self._is_quiet else time.monotonic()
        if os.getpid() == 1 and threading.current_thread() is threading.main_thread():
            self.say(
                "this program is process 1 of its container, where a SIGTERM that came before this line, such as "
                "during the imports, had no effect: let an init start it (docker run --init)"
            )

    def end(self, manager: CheckpointManager, step: int, total: int = 0) -> None:
        """**Blocks** while it reads the run's directory. Reports the end of a training whose beginning was reported.

        `step` steps are complete, of `total`; 0 if that is not known.
        """
        if self._is_quiet or self._began_at is None or not step:
            return
        # The state is safe by now, or its error is raised: printing the line must not raise another one.
        with suppress(HoldfastError):
            steps = manager.steps()
            if step == self._began_at:
                self.say(f"{self.place} was already at step {step}; no step was added")
            elif step in steps:
                self.say(f"{self.place} is at step {step}{f' of {total}' if step < total else ''}, saved")
            else:
                newest = f"the newest checkpoint is step {steps[-1]}" if steps else "there is no checkpoint"
                self.say(f"{self.place} is at step {step}; {newest}")
            self.say(manager.describe_cost())

    def begin_epochs(self, manager: CheckpointManager, backup: Backup | None) -> None:
        """Reports that training in epochs begins, after a restored backup, if there was one."""
        self._begin(manager, 0)
        if backup is None or backup.restoration is None:
            self.say(
                f"{self.place} starts from the beginning"
                if manager.begin_anew
                else f"{self.place} has no backup; training starts from the beginning"
            )
        else:
            self.say(self.describe(backup.restoration, f"after {backup}"))
            self._warn_of_changes(backup.restoration, backup.restoration.hyperparameters)

    def end_epochs(self, manager: CheckpointManager | None, backup: Backup | None, *, had_backup: bool = True) -> None:
        """Reports, once, that training in epochs has ended, with a backup that stays; None if there is none."""
        if self._began_at is not None and manager is not None:
            self._began_at = None
            if backup is not None:
                self.say(f"{self.place}: the backup of {backup} is kept")
            elif had_backup:
                self.say(f"{self.place}: training is complete, and its backup is deleted")
            else:
                self.say(f"{self.place}: training is complete, and no backup of it was made")
            self.say(manager.describe_cost(keeps=backup is not None))

    def describe(self, restored: Restoration, where: str, rhythm: str = "", lost: str = "") -> str:
        """Describes a restore in one line: `where` training continues, how often it is saved, and the lost steps."""
        seconds = time.time() - restored.manifest.committed_at_unix_seconds
        ago = f"{span_text(seconds)} ago" if seconds >= 1 else "just now"
        # Of another number of workers there is a warning already.
        is_shared = restored.workers == self._worker.world_size > 1
        by = f" by {restored.workers} workers" if is_shared else ""
        tiers = f", read from {' and '.join(map(name_place, restored.tiers))}" if restored.tiers else ""
        again = f"; {lost} steps done after that are repeated" if lost else ""
        if lost == "1":
            again = "; 1 step done after that is repeated"
        return f"resumed {self.place} {where} (saved {ago}{by}{tiers}{again})" + (f", {rhythm}" if rhythm else "")

    def _warn_of_changes(self, restored: Restoration, changes: Mapping[str, HyperparameterChange]) -> None:
        """Warns, even if this is quiet, of what was not restored; on the leader, of values other than the script's."""
        if text := describe_differences(restored.differences):
            logger.warning("%s: %s", self.place, text)
        if changes and self._worker.is_leader:
            logger.warning("%s: %s", self.place, describe_changes(changes))
            if len(changes) > _MOST_SHOWN:
                logger.debug("%s: %s", self.place, describe_changes(changes, len(changes)))

    def say(self, text: str) -> None:
        """Prints a line, unless this is quiet, or there is nothing to say."""
        if text and not self._is_quiet:
            inform(text)


def warn_never_entered(place: str, process: int) -> None:
    """Warns that a run was created in this process and never entered, when it is collected or the program ends."""
    if os.getpid() == process and sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:
        logger.warning(
            "%s: the run was created but never entered, so nothing was restored or saved: write `with "
            "resumable(...) as run:`",
            place,
        )


def describe_changes(changes: Mapping[str, HyperparameterChange], most: int = _MOST_SHOWN) -> str:
    """**Pure.** Lists restored values that differ from the script's, at most `most`; empty if there are none."""
    if not changes:
        return ""
    shown = list(changes.items())[:most]
    named = [
        f"{path} {_value_text(one.restored)} restored (your script says {_value_text(one.script)})"
        for path, one in shown
    ]
    more = [f"and {len(changes) - most} more"] if len(changes) > most else []
    kept = ", ".join(f'"{path}"' for path, one in shown if one.can_be_kept)
    hint = f"; keep_current=[{kept}] keeps the script's" if kept else ""
    if any(path.endswith(".total_steps") and not one.can_be_kept for path, one in shown):
        hint += "; to continue a longer OneCycleLR, see the guide on restoring"
    return ", ".join([*named, *more]) + hint


def describe_differences(differences: Differences) -> str:
    """**Pure.** Names what a restore that was not strict has left out, at most a few; empty if that is nothing."""
    wrong = (*differences.wrong_shape, *differences.wrong_dtype, *differences.wrong_kind)
    live = [*differences.missing, *(one.partition(": ")[0] for one in wrong)]
    parts = [
        f"{what}: {', '.join(names[:_MOST_SHOWN])}"
        + (f" ({more} more)" if (more := len(names) - _MOST_SHOWN) > 0 else "")
        for what, names in (("not restored", live), ("in the checkpoint only", differences.extra))
        if names
    ]
    return f"strict=False: {'; '.join(parts)}" if parts else ""


def describe_saving(policy: SavePolicy | None) -> str:
    """**Pure.** Describes how often training is saved; empty if that is not known."""
    if policy is None:
        return (
            "saves only when the job is asked to stop, and at save(); to save while it trains: "
            "CheckpointManager(save_every=holdfast.Steps(n))"
        )
    rhythm = describe_rhythm(policy)
    return rhythm and f"saves {rhythm}"


def find_namesake(url: str) -> tuple[str, int] | None:
    """**Blocks.** Returns the run beside a new one whose name differs by a slip, and how many steps it has.

    Only a directory is looked into, and no more than some of its entries: a start waits for no long listing.
    """
    path = Path(url)
    if path.is_absolute():
        with suppress(OSError, HoldfastError), os.scandir(path.parent) as entries:
            for entry in islice(entries, _MOST_SIBLINGS):
                if is_slip(path.name, entry.name) and entry.is_dir():
                    living = StoredRun(open_storage(entry.path)).look().living
                    if living:
                        return entry.path, living[-1].step
    return None


def is_slip(one: str, other: str) -> bool:
    """**Pure.** Returns True if two names differ by one letter, or by two that are swapped, in a long word.

    Other names of runs are made to differ by little: `exp1` and `exp2`, or `model-s` and `model-m`.
    """
    if len(one) > len(other):
        one, other = other, one
    begin = next((place for place, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1), len(one))
    same, rest, longer = len(one) == len(other), one[begin:], other[begin:]
    is_swapped = same and rest[1:2] + rest[:1] + rest[2:] == longer
    if one == other or not (is_swapped or rest[same:] == longer[1:]):
        return False
    word = next(found for found in re.finditer(r"[^\W\d_]+|.", other) if found.end() > begin)[0]
    return len(word) >= _SHORTEST_WORD and (not same or rest[0].isalpha())


def name_place(url: str) -> str:
    """Returns the path relative to the working directory, if that is shorter."""
    with suppress(OSError, ValueError):
        relative = os.path.relpath(url) if os.path.isabs(url) else url  # noqa: PTH117
        return url if relative.startswith(".") else relative
    return url


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = ", ".join(map(_value_text, value[:_MOST_SHOWN]))
        return f"[{shown}{', ...' if len(value) > _MOST_SHOWN else ''}]"
    return str(value)
