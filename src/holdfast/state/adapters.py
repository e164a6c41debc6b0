"""Reads the state of objects that are not plain values, and puts it back.

An adapter serves one kind of object. The simplest is a `StateAdapter`: one function that reads the state as a tree of
values, and one that puts such a tree back. An adapter that needs more (arrays filled in place, its own names) derives
from `Adapter`.

The tree that `state_of` returns may contain anything that can be stored: values, arrays, other objects with state. Its
arrays are copied after `state_of` has returned and before the capture is over, so it may return live ones.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

import msgspec

from holdfast.errors import UnsupportedValueError
from holdfast.format.codecs import type_named
from holdfast.format.decoding import NAMED, find_tags
from holdfast.format.records import Worker
from holdfast.state.leaves import ArraySpec, Differences, Skeleton

Made = TypeVar("Made")


class Rules(msgspec.Struct, frozen=True):
    """The rules by which a stored tree is compared with the live one.

    Attributes:
        in_place: Live arrays are filled in place. Otherwise each array is a new one, on the live one's device.
        fixed_arrays: Arrays must exist on both sides or on neither; for a live one, nothing else may be stored.
        fixed_shapes: Where there are arrays on both sides, they must have the same shape and type.
        fixed_objects: Live objects with state must have a stored counterpart.
    """

    in_place: bool
    fixed_arrays: bool
    fixed_shapes: bool
    fixed_objects: bool


OWNED = Rules(in_place=True, fixed_arrays=True, fixed_shapes=True, fixed_objects=True)
"""Arrays that the program holds, such as those of a module: they are known, and are filled in place."""

TREE = Rules(in_place=True, fixed_arrays=False, fixed_shapes=False, fixed_objects=True)
"""Dicts, lists and values that the user passed in: they take what is stored, in place where the live arrays fit."""

HANDED_OVER = Rules(in_place=False, fixed_arrays=False, fixed_shapes=False, fixed_objects=False)
"""State for an object's own `load_state_dict`, which judges it: new arrays, as they were stored."""

MADE_ANEW = Rules(in_place=False, fixed_arrays=True, fixed_shapes=True, fixed_objects=True)
"""Trees that describe what to create: they are not changed."""

REPLACED = Rules(in_place=True, fixed_arrays=False, fixed_shapes=True, fixed_objects=False)
"""State that comes and goes, such as an optimizer's: the stored one replaces it, in place where the live arrays fit."""


@dataclass(eq=False)
class CaptureContext:
    """The named objects that are captured or matched together, for adapters that need more than their own object.

    Attributes:
        objects: The named objects, in the user's order.
    """

    objects: Mapping[str, object]
    _list_members: Callable[[Mapping[str, object]], list[tuple[str, Any, Adapter]]]
    _made: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def members(self) -> list[tuple[str, object]]:
        """Returns each object that has an adapter, with its path: named ones, and those in trees of values."""
        return [(path, obj) for path, obj, _ in self._list_members(self.objects)]

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """Returns the result of `make`, which is called once per key and kept as long as the context."""
        if key not in self._made:
            self._made[key] = make()
        return cast(Made, self._made[key])


class Loading(Protocol):
    """The interface for an adapter while it prepares to put one object's state back.

    `at` is the way from the object to the value, one part for each step, unescaped.
    """

    @property
    def path(self) -> str:
        """The object's path."""

    @property
    def context(self) -> CaptureContext:
        """The objects that are restored together."""

    def value(self, stored: Skeleton, live: Any, *at: str, rules: Rules = HANDED_OVER, like: Any = None) -> Any:
        """Returns the stored value, with arrays that get their values only before `apply` runs; differences are noted.

        Args:
            stored: A tree, or a part of one, as it was passed to `begin_load`.
            live: The current value, with the kinds of arrays, dataclasses and enums; or None.
            at: Its path.
            rules: How strictly the two are compared, and whether live arrays are filled in place.
            like: An array; a new array with its shape gets its sharding, and its memory layout if the checkpoint has
                none.
        """

    def values(
        self,
        stored: Mapping[str, Skeleton],
        live: Mapping[str, Any],
        *at: str,
        rules: Rules = HANDED_OVER,
        like: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the results of `value` for many parts, all at once if none is unusual.

        Args:
            stored: The parts, by name.
            live: The current values by the same names, as far as they exist. A part may be an array or a dict of
                arrays.
            at: The path of all of them.
            rules: As in `value`, for each of them.
            like: As in `value`, by the same names.
        """

    def spec_of(self, stored: Skeleton) -> ArraySpec | None:
        """Returns the description of the stored array that a node refers to; None if it refers to none."""

    def children(self, stored: Skeleton, *at: str) -> dict[str, Skeleton]:
        """Returns the parts of a stored dict whose keys are plain strings.

        Raises:
            FormatError: If something else is stored there.
        """

    def wants(self, *at: str) -> bool:
        """Returns True if that path is to be restored; everything is, unless a part was requested."""

    def complete(self, value: Any) -> Any:
        """Returns a value of `value`, after all arrays have been read: with arrays instead of their replacements.

        Arrays that can be changed are in it from the beginning. A dict or a list is changed in place.
        """

    def put(self, live: Any, value: Any) -> Any:
        """Replaces a live value by one of `value`, after all arrays have been read.

        Returns:
            The value from now on: `live` itself if it could be changed, otherwise the new value.
        """

    def name(self, *at: str) -> str:
        """Returns the path for a list in `differences` or for a message."""

    @property
    def differences(self) -> Differences:
        """The differences, to which the adapter adds those that it finds."""


class _Refusal(NamedTuple):
    """Why objects of a class cannot be saved, and what to use instead."""

    text: str
    hint: str


_FULLY_SHARD: Final = (
    "Use fully_shard (FSDP2) from torch.distributed.fsdp: its shards record where they belong, and can be "
    "restored on any number of workers."
)
_OWN_FORM: Final = "splits its state among the workers in its own format"
_DEEPSPEED: Final = _Refusal(
    _OWN_FORM,
    "Save it with the engine's own save_checkpoint, or shard the model and the optimizer with fully_shard (FSDP2).",
)
_MEGATRON: Final = _Refusal(
    _OWN_FORM,
    "Save it with Megatron's own save_checkpoint, or shard the model and the optimizer with fully_shard (FSDP2).",
)

FSDP1: Final = _Refusal(
    "(FSDP1) holds a flat piece of the parameters on each worker, which does not record where it belongs", _FULLY_SHARD
)

_REFUSED: Final[Mapping[tuple[str, str], _Refusal]] = MappingProxyType(
    {
        ("torch", "FullyShardedDataParallel"): FSDP1,
        ("torch", "ZeroRedundancyOptimizer"): _Refusal(
            "holds the state of different parameters on each worker",
            "Use fully_shard (FSDP2), which shards the optimizer's state too, or use the optimizer without this "
            "wrapper.",
        ),
        ("deepspeed", "DeepSpeedEngine"): _DEEPSPEED,
        ("deepspeed", "DeepSpeedZeroOptimizer"): _DEEPSPEED,
        ("deepspeed", "DeepSpeedZeroOptimizer_Stage3"): _DEEPSPEED,
        ("deepspeed", "BF16_Optimizer"): _DEEPSPEED,
        ("megatron", "DistributedOptimizer"): _MEGATRON,
        ("megatron", "ChainedOptimizer"): _MEGATRON,
    }
)
"""By package and class, wrappers whose state on each worker is a different part, without a description. (By name, so
that no framework is imported for it.)
"""


def refuse_type(cls: type, path: str) -> None:
    """Refuses objects of a class whose state would be lost on all workers but one.

    Raises:
        UnsupportedValueError: If it is such a class.
    """
    for ancestor in cls.__mro__:
        refusal = _REFUSED.get((str(ancestor.__module__).partition(".")[0], ancestor.__qualname__))
        if refusal is not None:
            raise make_refusal(refusal, ancestor.__qualname__, path)


def make_refusal(refusal: _Refusal, name: str, path: str) -> UnsupportedValueError:
    """Returns the error for an object of that name."""
    return UnsupportedValueError(f"{path}: {name} {refusal.text}, and cannot be saved", path=path, hint=refusal.hint)


class Replication(NamedTuple):
    """The replication of the plain arrays of an object's state over the workers.

    Attributes:
        holders: The ranks of the workers that hold them; None for all workers.
        trained: The live arrays among them that training keeps equal on these workers; None for all of them.
        is_trained: True if those can only differ by a mistake: parameters, and the state of their optimizer.
        renewed: The live arrays among the others that the first worker broadcasts, or that may well differ.
    """

    holders: Sequence[int] | None = None
    trained: Sequence[Any] | None = None
    is_trained: bool = False
    renewed: Sequence[Any] = ()


class Oversights(NamedTuple):
    """Things that a program seems to have forgotten about an object; empty if there are none.

    Attributes:
        lack: What the object lacks after a restore.
        draws: The part of the object that draws from the generators that the whole process shares.
        find_loss: Describes what a save now would lose of the object's work, "" if nothing; None if that never happens.
            It may compare with the moment when it was created.
        trains: The live parameters that the object changes, as an optimizer does.
        find_owners: Returns the live modules that have some of these parameters.
        holds: The live parameters that are its own state, as a module's.
        watch_unsaved: Begins to watch values that the object has and its state lacks, before anything is trained. The
            result lists those that have changed since it was last called, by name; None if there is nothing to watch.
    """

    lack: str = ""
    draws: str = ""
    find_loss: Callable[[], str] | None = None
    trains: Sequence[Any] = ()
    find_owners: Callable[[Sequence[Any]], Sequence[Any]] = lambda _: ()
    holds: Sequence[Any] = ()
    watch_unsaved: Callable[[], Callable[[], Sequence[tuple[str, Any]]]] | None = None


class LoadNeeds(NamedTuple):
    """The arrays that a load must find in an object.

    Attributes:
        shapes: The shapes of its arrays, by name.
        own_prefixes: How the names begin that the object loads in its own way, which may change them.
    """

    shapes: Mapping[str, tuple[int, ...]]
    own_prefixes: tuple[str, ...]


class Readable(enum.Enum):
    """When the state of an object may be read.

    Attributes:
        ALWAYS: At any time.
        LATER: Once the object has been prepared or used; before that, its state may differ, or be missing.
        WHEN_SAVED: When it is saved, and otherwise only if there is no other way, because reading may change the
            object. A data loader may start its workers, or draw random numbers.
    """

    ALWAYS = "always"
    LATER = "later"
    WHEN_SAVED = "when saved"


class Adapter:
    """Reads the state of one kind of object and puts it back. Adapters hold no state of their own.

    Attributes:
        kind: The stored name; state goes back only to an object whose adapter has the same.
        last: True for objects that the loading of others may disturb, such as random generators.
        is_per_worker: True for objects whose state differs per worker.
        knows_wrappers: True to serve also objects that only claim to be of a class which the adapter serves.
        follow_optimizers: For objects that optimizers train: calls a function with each optimizer that has stepped, on
            the thread that stepped it; returns a function that ends that.
        follow_loaders: For the same objects: calls a function with each loader without a place of its own that training
            begins to iterate; returns a function that ends that.
        follow_batches: For objects that may give batches: is passed one, and a function to call with each batch that
            training takes from it. Returns what ends that; None if the object gives none, or is followed already.
        make_place: For loaders: returns a `LoaderPlace` for one; None if it can only be read again.
        facts_of_batches: For such an object, returns what decides which batches come, as far as the program announces
            it: the batch size, say.
    """

    kind: str = ""
    last: bool = False
    is_per_worker: bool = False
    knows_wrappers: bool = False
    follow_optimizers: Callable[[Callable[[Any], None]], Callable[[], None]] | None = None
    follow_loaders: Callable[[Callable[[Any], None]], Callable[[], None]] | None = None
    follow_batches: Callable[[Any, Callable[[Any], None]], Callable[[], object] | None] | None = None
    make_place: Callable[[Any], Any] = staticmethod(lambda _: None)
    facts_of_batches: Callable[[Any], object] = staticmethod(lambda _: None)

    def check(self, obj: Any, path: str) -> None:
        """Checks that an object is not one whose state is incomplete.

        Raises:
            UnsupportedValueError: If it is, or contains one; `path` is its path.
        """
        refuse_type(type(obj), path)

    def prepare(self, obj: Any) -> None:
        """Called for every object before the state of any is read."""
        prepare = getattr(obj, "prepare_for_checkpoint", None)
        if callable(prepare):
            prepare()

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """Returns the state, as a tree of values."""
        raise NotImplementedError  # Each kind of object has its own. Not abstract: a plain Adapter() prepares others.

    def readable(self, obj: Any) -> Readable:
        """Returns when `state_of` may be called: once it is prepared, for an object that asks for that."""
        return Readable.LATER if callable(getattr(obj, "prepare_for_checkpoint", None)) else Readable.ALWAYS

    def replication_of(self, obj: Any) -> Replication:
        """Returns which workers hold the plain arrays of an object's state, and which of these training keeps equal."""
        return Replication()

    def find_sampler(self, obj: Any) -> Any:
        """Returns what counts the batches that training takes from an object; None if nothing does."""
        return None

    def gives_batches(self, obj: Any, path: str) -> bool:
        """Returns True if the object's own state is a position in the data, which moves when a batch is taken from it.

        Args:
            obj: The object.
            path: Its name in an error.

        Raises:
            UnsupportedValueError: If it has a position in the data that cannot be saved.
        """
        return False

    def oversights_of(self, obj: Any) -> Oversights:
        """Returns what a restart is likely to lack although the object is saved."""
        return Oversights()

    def list_trained(self, obj: Any) -> Iterable[str]:
        """Returns the parts of the state that training computes: parameters, and the state of optimizers.

        Each is a name below the object's path, escaped, and includes all that is below it; `""` is the whole state.
        """
        return ()

    def layout_of(self, obj: Any) -> LoadNeeds | None:
        """Returns what a load must find in an object; None if that is not known, or the object has no names."""
        return None

    def before_step(
        self, obj: Any, call: Callable[[object], None], *, is_own: bool = False
    ) -> Callable[[], None] | None:
        """Lets `call` be called with the stepping object before each step, which must not begin before it returns.

        Args:
            obj: The object.
            call: The function to call.
            is_own: True for the steps that the object itself takes, and for no others that change the same arrays.

        Returns:
            A function that ends that, or None for an object without such steps.
        """
        return None

    def stepped_arrays(self, obj: Any) -> list[Any]:
        """Returns the live arrays that only the object's own step changes; only used if `before_step` works."""
        return []

    def awaited_bytes(self, obj: Any) -> int:
        """Returns by how much the object's state will grow once the object has been used, as far as that is known."""
        return 0

    def begin_anew(self, obj: Any, stored: Skeleton, worker: Worker) -> Callable[[], None] | None:
        """Handles per-worker state that was stored by a job with another number of workers.

        Args:
            obj: The object.
            stored: The state of one of those workers.
            worker: This worker.

        Returns:
            A function that gives the object a state that differs from that of all other workers, or None to leave it.
        """
        return None

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Compares the stored state with the object, which is not changed.

        Returns:
            A function that puts the state into the object. It is called after all arrays have been filled, or never.
        """
        raise NotImplementedError  # As for `state_of`.


class StateAdapter(Adapter):
    """Serves objects whose whole state is read by one function and put back by another."""

    def __init__(
        self,
        kind: str,
        read: Callable[[Any], Any],
        write: Callable[[Any, Any], object],
        *,
        last: bool = False,
        compare: bool = True,
    ) -> None:
        """Creates an adapter.

        Args:
            kind: The stored name, such as `torch.dataloader`.
            read: Takes the object, returns its state.
            write: Takes the object and a state.
            last: True to put the object back after all others.
            compare: True to compare the stored state with the current one. Otherwise nothing can differ, and the
                current state is not read; values that need a live template are not found then.
        """
        self.kind = kind
        self.last = last
        self._read = read
        self._write = write
        self._compare = compare

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """Returns the result of `read`."""
        return self._read(obj)

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Passes the stored state to `write`."""
        live = self._read(obj) if self._compare or not loading.wants() else None
        state = loading.value(stored, live, rules=MADE_ANEW)
        return lambda: void(self._write(obj, loading.complete(state)))


class StateDictAdapter(StateAdapter):
    """Serves any object that has `state_dict` and `load_state_dict`.

    A restore passes the stored state on and does not ask the object for its current state, unless it must.
    """

    def __init__(self, *, may_change: bool = True) -> None:
        """Creates an adapter.

        Args:
            may_change: False for classes that `state_dict` is known not to change.
        """
        super().__init__("state_dict", lambda obj: obj.state_dict(), lambda obj, state: obj.load_state_dict(state))
        self._may_change = may_change

    def readable(self, obj: Any) -> Readable:
        """See `Adapter`. The effect of `state_dict` is not known, unless the class is."""
        return Readable.WHEN_SAVED if self._may_change else super().readable(obj)

    def gives_batches(self, obj: Any, path: str) -> bool:
        """See `Adapter`: True for iterables that are not collections."""
        cls = type(obj)
        return hasattr(cls, "__next__") or (hasattr(cls, "__iter__") and not hasattr(cls, "__getitem__"))

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Prepares `load_state_dict`.

        The current state is read if only a part is restored, and if the stored state contains other objects, or types
        that only a live value can name. It is also read if arrays are stored, because it tells their device; but not
        for an iterable object: that may begin to load data.
        """
        tags = set(find_tags(stored))
        needs_types = any(tag in NAMED and type_named(str(name)) is None for tag, name in tags)
        has_arrays = any(tag == "array" for tag, _ in tags)
        is_iterable = hasattr(type(obj), "__iter__") or hasattr(type(obj), "__next__")
        has_objects = any(tag == "object" for tag, _ in tags)
        needs_live = has_objects or needs_types or (has_arrays and not is_iterable)
        live = self._read(obj) if needs_live or not loading.wants() else None
        state = loading.value(stored, live)
        return lambda: void(self._write(obj, loading.complete(state)))


def void(_: object) -> None:
    """Drops a result."""
