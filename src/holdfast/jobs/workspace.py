"""The workspace of a job's node: named values, which are its state."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

from holdfast.errors import UsageError
from holdfast.format.codecs import is_namedtuple, is_plain_dataclass, name_of, type_named
from holdfast.format.decoding import malformed
from holdfast.format.scalars import ENCODERS
from holdfast.state.adapters import TREE, Adapter, CaptureContext, Loading
from holdfast.state.leaves import Skeleton
from holdfast.state.registry import adapter_of, find_stateful, parts_of, register_adapter

KIND: Final = "holdfast.workspace"
"""The type name of a workspace in a checkpoint."""


class Workspace(MutableMapping[str, Any]):
    """The named values of one node: numbers, arrays, tensors, trees of these, and objects with state.

    All of it is saved with each epoch. Values are created from a checkpoint. An object with state (a model, a reader)
    is not: it must exist already, and gets its state back; see `Job.add_object`.

    The tasks of a group that run on the same node share the workspace. Each single access is safe, a sequence of them
    is not: use a `Counter`, or your own lock.

    Attributes:
        node: The node's name.
    """

    __slots__ = ("_epoch", "_given", "_looked_at", "_made", "_values", "node")

    def __init__(self, node: str = "local") -> None:
        self.node = check_name("a node", node)
        self._epoch = 0
        self._values: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        # What was there before a run began, which the program puts there at each start.
        self._given: dict[str, Any] = {}
        # By name, the kind of value that was there when it was last asked whether a restart can make it.
        self._looked_at: dict[str, type] = {}

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 1, or the last one that ran; 0 before the first."""
        return self._epoch

    def begin_epoch(self, epoch: int) -> None:
        """Called by the session before tasks run."""
        self._epoch = epoch

    def note_made(self, name: str, value: Any) -> None:
        """Called by the session: names an object that was created for a job."""
        self[name] = self._made[name] = value

    def was_made(self, name: str) -> bool:
        """Returns True if the value of that name was created for a job, and not by a task or the user."""
        return name in self._made and self._values.get(name) is self._made[name]

    def note_given(self) -> None:
        """Called by the session before a run: the current values exist at each start."""
        self._given = dict(self._values)

    def find_unmakeable(self) -> list[str]:
        """Called before a save: describes each new value that a restart cannot recreate, and what to do; each once."""
        found = []
        for name, value in self._values.items():
            kind = type(value)
            if kind in ENCODERS or self._looked_at.get(name) is kind:
                continue
            self._looked_at[name] = kind
            if self.was_made(name) or self._given.get(name) is value:
                continue
            path = f"{self.node}/{name}"
            for where, obj, adapter in find_stateful(value, path):
                if adapter is not None:
                    what = f"{where} is an object with state ({type(obj).__qualname__})"
                    found.append(f"{what}, and a restart would not recreate it: {_advise_object(name)}")
                    break
            else:
                unknown = _find_unregistered(value, set())
                if unknown is not None:
                    what = f"{path} holds a value of the type {name_of(unknown).replace(':', '.')}"
                    found.append(f"{what}, which a restart would not know: register it with holdfast.register_type")
        return found

    def replace(self, values: dict[str, Any], *, whole: bool) -> None:
        """Called by a restore: sets values, and if they are the `whole` of it, removes all others."""
        earlier, self._values = self._values, dict(values) if whole else {**self._values, **values}
        # A container that was put there has been made again, around the objects in it.
        for origin in (self._made, self._given):
            origin.update(
                {name: values[name] for name in origin if name in values and earlier.get(name) is origin[name]}
            )

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            known = ", ".join(self._values) or "nothing"
            raise KeyError(f"{self.node} has no value {name!r}; the names are {known}") from None

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets a value, or replaces an earlier one.

        Raises:
            UsageError: If the name is not allowed.
        """
        self._values[check_name("a value", name)] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Workspace({self.node!r}: {', '.join(self._values) or 'empty'})"


class Counter:
    """**Thread-safe.** A whole number in a workspace that tasks of a group may change at the same time."""

    def __init__(self, value: int = 0) -> None:
        self._value = value
        # Guards the value between reading and writing it.
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """The current number."""
        return self._value

    def add(self, amount: int = 1) -> int:
        """Adds to the number, and returns the sum."""
        with self._lock:
            self._value += amount
            return self._value

    def try_take(self) -> bool:
        """Subtracts one and returns True; returns False if none is left."""
        with self._lock:
            if self._value <= 0:
                return False
            self._value -= 1
            return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the number."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a stored number.

        Raises:
            UsageError: If the state is not that of a counter.
        """
        value = state.get("value")
        if type(value) is not int:
            raise UsageError(f"{value!r} is not the value of a counter")
        with self._lock:
            self._value = value

    def __repr__(self) -> str:
        return f"Counter({self._value})"


class WorkspaceAdapter(Adapter):
    """Adapter of workspaces: stored values replace the current ones, except objects, which must exist."""

    kind = KIND
    is_per_worker = True

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """Returns the values by name."""
        return {name: obj[name] for name in obj}

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Finds or creates each requested value."""
        nodes = loading.children(stored)
        taken: dict[str, Any] = {}
        for name, node in nodes.items():
            if find_name_problem(name):
                raise malformed(loading.name(name), "a value cannot have that name")
            live = obj.get(name)
            if live is None and not loading.wants(name):
                continue
            value = loading.value(node, live, name, rules=TREE)
            if value is not None or node is None:
                taken[name] = value
        for name in obj:
            if name not in nodes and adapter_of(obj[name]) is not None and loading.wants(name):
                loading.differences.missing.append(loading.name(name))
        whole = loading.wants()
        return lambda: obj.replace(loading.complete(taken), whole=whole)


register_adapter(Workspace, WorkspaceAdapter())


def _advise_object(name: str) -> str:
    return f"register the function that makes it, job.add_object({name!r}, ...); then the job can resume"


def explain_missing(workspace: Workspace, paths: Sequence[str]) -> str:
    """**Pure.** Says what to do about stored objects that a workspace does not have."""
    names = dict.fromkeys(path.split("/")[1].replace("~0", "~") for path in paths if path.count("/"))
    return f"Nothing created {', '.join(names)} on {workspace.node}: {_advise_object(next(iter(names)))}."


def _find_unregistered(value: Any, seen: set[int]) -> type | None:
    """Returns a type in a tree of values that a restore cannot create, if there is one."""
    cls = type(value)
    if cls in ENCODERS or id(value) in seen:
        return None
    seen.add(id(value))
    is_named = is_namedtuple(cls) or is_plain_dataclass(cls) or isinstance(value, enum.Enum)
    if is_named and type_named(name_of(cls)) is not cls:
        return cls
    parts = [part for _, part in parts_of(value) if type(part) not in ENCODERS]
    return next((found for part in parts if (found := _find_unregistered(part, seen)) is not None), None)


def find_name_problem(name: object) -> str:
    """**Pure.** Returns why a text cannot name a node or a value; empty if it can."""
    if not isinstance(name, str) or not name or not name.isprintable():
        return "a name must consist of printable characters"
    if name[0] == "$" or name == "__metadata__":
        return "a name must not begin with '$' or be '__metadata__'"
    wrong = [character for character in "/*?[]" if character in name]
    return f"a name must not contain {', '.join(map(repr, wrong))}" if wrong else ""


def check_name(what: str, name: str) -> str:
    """**Pure.** Returns the name, if it is allowed.

    Raises:
        UsageError: If it is not.
    """
    problem = find_name_problem(name)
    if problem:
        raise UsageError(f"{name!r} cannot name {what}", hint=f"{problem[0].upper()}{problem[1:]}.")
    return name
