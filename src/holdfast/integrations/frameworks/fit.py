"""Shared by the integrations of all frameworks: options, replaced methods, one fit from its restore to its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

import msgspec

from holdfast.catalog import StoredRun
from holdfast.checkpoint import Checkpoint
from holdfast.errors import DamageError, NotFoundError, UsageError
from holdfast.format.names import IMPORTED, IMPORTED_FROM
from holdfast.options import SaveOptions, check_kept_objects, check_names, check_switches
from holdfast.policies import Auto, Latest
from holdfast.preemption.config import make_termination
from holdfast.storage import Storage, open_storage
from holdfast.tracebacks import print_short
from holdfast.training.resumable import resumable
from holdfast.training.run import Run
from holdfast.training.watchdog import read_watchdog

Directory = str | os.PathLike[str] | Storage


class Settings(NamedTuple):
    """The arguments of a callback, checked.

    Attributes:
        directory: The run's directory.
        options: The options of its run.
        others: Further objects to save.
    """

    directory: Directory
    options: dict[str, Any]
    others: dict[str, Any]


def split_options(directory: Directory, given: Mapping[str, Any], taken: Collection[str] = ()) -> Settings:
    """Splits the arguments of a callback into the options of `resumable` and further objects to save; checks both.

    Args:
        directory: The run's directory.
        given: The other arguments by name, with the callback's own defaults.
        taken: The names of the objects that the callback itself saves, as far as they are known.

    Raises:
        UsageError: If an option or an object is wrong.
    """
    known = resumable.__kwdefaults__ or {}
    options = {name: value for name, value in given.items() if name in known}
    objects = {name: value for name, value in given.items() if name not in known}
    check_names(objects, {**known, **options})
    check_untaken(objects, taken)
    check_kept_objects(objects)
    every = {**known, **options}
    make_termination(every["preemption"], objects, grace=every["grace"])
    check_switches(**{name: every[name] for name in ("strict", "strict_resume", "quiet")})
    read_watchdog(every["watchdog"])
    SaveOptions.pick(every, save_every=Auto(), keep=Latest(3))
    return Settings(directory, options, objects)


def check_untaken(objects: Iterable[str], taken: Collection[str]) -> None:
    """**Pure.** Raises `UsageError` if an object has the name of one that is saved already."""
    for name in sorted(set(objects) & set(taken)):
        raise UsageError(f"an object named {name} is already saved", hint="Give the object another name.")


def check_single(kind: type, callbacks: Iterable[object], owner: str) -> None:
    """**Pure.** Raises `UsageError` if several callbacks of one trainer are of a kind that resumes its fit."""
    if sum(isinstance(each, kind) for each in callbacks) > 1:
        raise UsageError(
            f"{owner} takes one {kind.__name__}", hint="Remove the others: each would resume the same training."
        )


def walk_callers(function: FunctionType | None = None) -> Iterator[Mapping[str, Any]]:
    """Yields the local variables of the functions that are running, the innermost first; of `function` alone, if given.

    Some frameworks pass a callback neither their trainer nor the source of its batches. Nothing else looks into frames.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if function is None or frame.f_code is function.__code__:
            yield frame.f_locals
        frame = frame.f_back


class Replaced:
    """The attributes of a framework's objects that are replaced until a fit ends; what the program has put there stays.

    It puts back what it finds as it left it, so nothing that the program has replaced meanwhile is lost.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def method(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replaces a method, or a function of a module, by `call`, which gets the one before in front of all others."""
        original = getattr(owner, name)
        self.value(owner, name, MethodType(lambda _, *args, **options: call(original, *args, **options), owner))

    def value(self, owner: Any, name: str, value: object) -> None:
        """Replaces an attribute by a value."""
        is_own, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is not value:
                return  # The program has put something else there since.
            if is_own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        self._undo.append(undo)

    def undo_last(self) -> None:
        """Puts back what was replaced last."""
        self._undo.pop()()

    def undo(self) -> None:
        """Puts everything back, the last first."""
        while self._undo:
            self.undo_last()


class ImportedStart(msgspec.Struct, frozen=True):
    """An imported checkpoint from which no job has saved yet.

    Attributes:
        source: The name of the file or folder.
        objects: The names of its objects.
        progress: The progress that the framework has stored; None if the source has none of that framework.
    """

    source: str
    objects: frozenset[str]
    progress: Any


def find_import(settings: Settings, format_name: str) -> ImportedStart | None:
    """**Blocks.** Returns the newest checkpoint of a run if `holdfast import` has made it; None for any other.

    Raises:
        UsageError: If it has a step, but no progress of that framework.
    """
    run = StoredRun(open_storage(settings.directory))
    name = None if settings.options.get("begin_anew") else max(run.look().living, default=None)
    try:
        metadata = {} if name is None else run.step(name).manifest().metadata
    except (DamageError, NotFoundError):
        return None  # The restore says so.
    kept = metadata.get(IMPORTED)
    if name is None or not isinstance(kept, dict) or not isinstance(kept.get("objects"), list):
        return None
    progress = kept.get("progress") if kept.get("format") == format_name else None
    if not progress and name.step:
        raise UsageError(
            f"{metadata.get(IMPORTED_FROM)} was imported at step {name.step}, without the progress of such a Trainer",
            hint="To train from its weights, import it with --step 0 --only model.",
        )
    return ImportedStart(str(metadata.get(IMPORTED_FROM)), frozenset(kept["objects"]), progress)


class Fit:
    """One fit of a framework that is saved: its run, and what is replaced in the framework until it ends.

    Attributes:
        run: The run, from its restore to the end of the training; None before and after.
        replaced: What is replaced.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.replaced = Replaced()
        print_short()  # The framework calls what is replaced, and adds its frames to an error.

    def count_restored_epochs(self) -> int:
        """Returns how many epochs were complete at the save that was restored; 0 if that is not known."""
        return 0

    def hold_place(self) -> Callable[[], object]:
        """Notes the place in the data; what it returns has the next save store that, and all else as restored."""
        raise NotImplementedError

    def enter(self, settings: Settings, objects: Mapping[str, Any], imported: ImportedStart | None = None) -> Run:
        """**Blocks.** Restores, from what an imported checkpoint has, if there is one, and begins the run.

        Raises:
            HoldfastError: As entering a run of `resumable` does.
        """
        if imported is None:
            run = resumable(settings.directory, Checkpoint(**objects), **settings.options)
        else:
            # One process has written it.
            present = {name: obj for name, obj in objects.items() if name in imported.objects}
            run = resumable(settings.directory, Checkpoint(**present), **{**settings.options, "on_resize": "allow"})
        run.manager.lineage.restored_by = "Resumable(...)"
        run.manager.lineage.count_epochs = self.count_restored_epochs
        run.go_on_by_restart(self.hold_place)
        run.__enter__()
        self.run = run
        if imported is not None:
            rest = {name: obj for name, obj in objects.items() if name not in imported.objects}
            for name, obj in rest.items():
                run.checkpoint[name] = obj
            run.warn(
                f"{imported.source} was imported: it has no {', '.join(rest)}; these begin as the program made them"
            )
        return run

    def end(self, error: BaseException | None = None) -> None:
        """**Blocks.** Puts back what is replaced, and leaves the run, unless that is done.

        Args:
            error: What ends the training; None if it is complete.

        Raises:
            HoldfastError: If the last save has failed.
        """
        self.replaced.undo()
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """**Blocks.** Leaves the run, as `end` does, and nothing else."""
        run, self.run = self.run, None
        if run is not None:
            run.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)
