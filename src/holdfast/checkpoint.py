"""`Checkpoint`: names the objects whose state is saved."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from holdfast.errors import UnnamedError, UsageError
from holdfast.format.scalars import ENCODERS
from holdfast.tracebacks import short_traceback


class NamedObjects:
    """Holds a checkpoint's objects, and what holdfast itself keeps with them: their names are the user's.

    Attributes:
        objects: The user's objects by name, in the order in which they were added.
        own: Those of holdfast itself, by their reserved names.
        assigned: The names that were assigned another object after their first one, by a restore or by the program.
        backup_url: The location of the backup that the objects were to be restored from by a `WorkerTrainingState`;
            empty if there was no such restore.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.assigned: set[str] = set()
        self.backup_url = ""
        # What a restore has put here, and nothing has read since; True if the program held another object before.
        self._unread: dict[str, bool] = {}

    def all(self) -> dict[str, Any]:
        """Returns everything that is saved and restored."""
        return {**self.objects, **self.own}

    def assign(self, name: str, obj: Any) -> None:
        """Adds an object, or replaces the one of that name."""
        if name in self.objects:
            self.assigned.add(name)
        self.objects[name] = obj
        self._unread.pop(name, None)

    def put_restored(self, values: Mapping[str, Any]) -> None:
        """Replaces objects that could not be changed by the restored ones."""
        for name, value in values.items():
            live = self.objects.get(name)
            self.assign(name, value)
            is_held = type(live) not in ENCODERS
            if is_held or type(live) is not type(value) or live != value:
                self._unread[name] = is_held

    def note_read(self, name: str) -> None:
        """Called when the program reads or removes an object."""
        self._unread.pop(name, None)

    def take_unread(self, only_held: bool) -> list[str]:
        """Returns the names of restored objects that nothing has read since, each once.

        Args:
            only_held: True to leave out those that the program began with as a number, text or None.
        """
        names = [name for name, is_held in self._unread.items() if is_held or not only_held]
        for name in names:
            del self._unread[name]
        return names


@short_traceback
class Checkpoint:
    """Names the objects whose state is saved together. It does no I/O; a manager saves and restores it.

    An object is a torch module, optimizer, scheduler or data loader, anything with `state_dict` and `load_state_dict`,
    a tensor, an array, a number, a string, bytes, or a tree (dict, list, tuple, dataclass) of these.

        checkpoint = Checkpoint(model=model, optimizer=optimizer, rng=RNG(), epoch=0)
        checkpoint.epoch += 1          # the same as checkpoint["epoch"] += 1
        checkpoint["loader"] = loader  # objects may be added at any time

    A restore changes objects in place. Immutable objects, such as numbers, are replaced in the checkpoint: after a
    restore, read `checkpoint.epoch`, not a variable of your own. Brackets accept every name; if a name is also an
    attribute of this class (`objects`), only brackets can read and set it.
    """

    __slots__ = ("_named",)
    _named: NamedObjects

    def __init__(self, /, *unnamed: object, **objects: Any) -> None:
        """Creates a checkpoint of the given objects, by name.

        Raises:
            UnnamedError: If an object is given without a name.
            UsageError: If a name is not allowed.
        """
        if unnamed:
            given = ", ".join(type(obj).__name__ for obj in unnamed)
            raise UnnamedError(
                f"objects must be given by name, got {given} without a name",
                hint=("Write Checkpoint(model=model, optimizer=optimizer): the keyword is its stored name."),
            )
        self._named = NamedObjects()
        for name, obj in objects.items():
            self[name] = obj

    @property
    def objects(self) -> Mapping[str, Any]:
        """The objects by name, in the order in which they were added; a read-only view."""
        return MappingProxyType(self._named.objects)

    def __getitem__(self, name: str) -> Any:
        self._named.note_read(name)
        try:
            return self._named.objects[name]
        except KeyError:
            raise KeyError(f"no object {name!r}; the names are: {', '.join(self) or 'none'}") from None

    def __setitem__(self, name: str, obj: Any) -> None:
        """Adds an object, or replaces the one of that name.

        Raises:
            UsageError: If the name is not allowed.
        """
        if not isinstance(name, str) or not name or not name.isprintable():
            raise UsageError(f"{name!r} cannot be the name of an object", hint="Use a name of printable characters.")
        if "/" in name or name.startswith("$") or name == "__metadata__":
            raise UsageError(
                f"{name!r} cannot be the name of an object",
                hint="A name must not contain '/', begin with '$' or be '__metadata__'.",
            )
        self._named.assign(name, obj)

    def __delitem__(self, name: str) -> None:
        self._named.note_read(name)
        del self._named.objects[name]

    def __contains__(self, name: object) -> bool:
        return name in self._named.objects

    def __iter__(self) -> Iterator[str]:
        return iter(self._named.objects)

    def __len__(self) -> int:
        return len(self._named.objects)

    def __getattr__(self, name: str) -> Any:
        # Copying asks for attributes before there are any.
        if name in Checkpoint.__slots__ or name not in self._named.objects:
            raise AttributeError(f"the checkpoint has no object {name!r}", name=name, obj=self)
        return self[name]

    def __setattr__(self, name: str, obj: Any) -> None:
        if name in Checkpoint.__slots__:
            object.__setattr__(self, name, obj)
            return
        if hasattr(type(self), name):
            raise AttributeError(f"{name!r} is an attribute of Checkpoint itself; write checkpoint[{name!r}] = ...")
        self[name] = obj

    def __delattr__(self, name: str) -> None:
        if name not in self._named.objects:
            raise AttributeError(f"the checkpoint has no object {name!r}", name=name, obj=self)
        del self[name]

    def __copy__(self) -> Checkpoint:
        copied = Checkpoint(**self._named.objects)
        copied._named.own.update(self._named.own)
        return copied

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(f'{name}={_show(obj)}' for name, obj in tuple(self._named.objects.items()))})"


def _show(obj: object) -> str:
    """Returns numbers and short text as they are, and a description of any other object."""
    if obj is None or type(obj) in (bool, int, float, complex, str, bytes):
        return reprlib.repr(obj)
    if type(obj) in (dict, list, tuple, set):
        return f"{type(obj).__name__} of {len(obj)}"  # type: ignore[arg-type]
    return type(obj).__name__


def objects_of(checkpoint: Checkpoint) -> NamedObjects:
    """Returns the objects: no attribute of a checkpoint itself, as each name there is one that a user may give."""
    return checkpoint._named


def check_order(maker: str, directory: object, checkpoint: object) -> None:
    """**Pure.** Checks that both arguments have the right type, in the order that all classes share.

    Raises:
        UsageError: If they do not.
    """
    if isinstance(directory, Checkpoint):
        raise UsageError(
            f"{maker} takes the directory first, got a Checkpoint",
            hint=f"Write {maker}(directory, checkpoint).",
        )
    if not isinstance(checkpoint, Checkpoint):
        raise UsageError(
            f"expected a Checkpoint, got {checkpoint!r}", hint="Name the objects to save: Checkpoint(model=model, ...)."
        )


def find_given(directory: object, given: tuple[object, ...], objects: Mapping[str, object]) -> Checkpoint:
    """**Pure.** Returns the objects to save, in whichever way they are given."""
    named = objects.get("checkpoint")
    if isinstance(directory, Checkpoint) or isinstance(named, Checkpoint):
        raise UsageError(
            "resumable takes the directory first and a Checkpoint second",
            hint="Write resumable(directory, Checkpoint(model=model, ...)).",
        )
    unnamed = ", ".join(type(obj).__name__ for obj in given if not isinstance(obj, Checkpoint))
    if unnamed:
        raise UnnamedError(
            f"objects must be given by name, got {unnamed} without a name",
            hint=("Write resumable(directory, model=model, optimizer=optimizer): the keyword is its stored name."),
        )
    if len(given) + bool(objects) > 1:
        raise UsageError("pass the objects to save in one Checkpoint or by name, not both")
    kept = given[0] if given else Checkpoint(**objects)
    if not isinstance(kept, Checkpoint) or not kept.objects:
        raise UsageError(
            "no objects were given to save", hint="Pass objects by name: resumable(directory, model=model, ...)."
        )
    return kept
