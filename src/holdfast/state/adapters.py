"""How the state of an object that is no plain value is read, and put back.

An adapter serves one kind of object. The simplest is a `StateAdapter`: one function that reads the state as a tree
of values, and one that puts such a tree back. An adapter that wants more (arrays filled in place, names of its own)
derives from `Adapter`.

The tree that `state_of` returns may hold anything that can be stored: values, arrays, other objects with state. Its
arrays are copied after `state_of` has returned and before the capture is over, so live ones may be handed out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
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
    """How strictly a stored tree is held against the live one.

    Attributes:
        in_place: Live arrays are filled where they are. Otherwise each array is a new one, where the live one lies.
        fixed_keys: Arrays under keys and fields are to be there on both sides or on neither.
        fixed_lengths: The same for arrays in sequences.
        fixed_kinds: Where an array or an object with state stands, nothing else is to be stored.
    """

    in_place: bool
    fixed_keys: bool
    fixed_lengths: bool
    fixed_kinds: bool


OWNED = Rules(in_place=True, fixed_keys=True, fixed_lengths=True, fixed_kinds=True)
"""Trees that the user handed in: what they hold is known, and is filled where it is."""

HANDED_OVER = Rules(in_place=False, fixed_keys=True, fixed_lengths=False, fixed_kinds=True)
"""State for an object's `load_state_dict`: arrays of its own, and sequences as long as they were."""

MADE_ANEW = Rules(in_place=False, fixed_keys=True, fixed_lengths=True, fixed_kinds=True)
"""Trees that say what is to be made: nothing of them is changed."""

REPLACED = Rules(in_place=True, fixed_keys=False, fixed_lengths=False, fixed_kinds=False)
"""State that comes and goes, as an optimizer's: what is stored stands, in place where the live arrays fit."""


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
        """Each object that has an adapter, with its path: named ones, and those in trees of values."""
        return [(path, obj) for path, obj, _ in self._list_members(self.objects)]

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """What `make` returns, made at the first call with that key and kept as long as the context."""
        if key not in self._made:
            self._made[key] = make()
        return cast(Made, self._made[key])


class Loading(Protocol):
    """What an adapter may ask for while it prepares to put one object's state back.

    Where a method takes `at`, it is the way from the object to the value, a part for each step, unescaped.
    """

    @property
    def path(self) -> str:
        """The object's path."""

    @property
    def context(self) -> CaptureContext:
        """The objects that are restored together."""

    def value(self, stored: Skeleton, live: Any, *at: str, rules: Rules = HANDED_OVER, like: Any = None) -> Any:
        """The stored value, with arrays that hold their values only when `apply` runs; differences are noted.

        Args:
            stored: A tree, or a part of one, as it came to `begin_load`.
            live: The present value, which says what kinds of arrays, dataclasses and enums stand there; or None.
            at: Where it stands.
            rules: How strictly the two are compared, and whether live arrays are filled in place.
            like: An array; one that is made anew, and has its shape, is divided among the workers as that one is. It
                lies in memory as that one does, too, if the checkpoint has no memory layouts.
        """

    def values(
        self,
        stored: Mapping[str, Skeleton],
        live: Mapping[str, Any],
        *at: str,
        rules: Rules = HANDED_OVER,
        like: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What `value` gives for each of many parts, found all at once where nothing is odd about any.

        Args:
            stored: The parts, by name.
            live: The present values by the same names, of those that there are. A part may be an array or a dict of
                such.
            at: Where they all stand.
            rules: As for `value`, for each of them.
            like: As for `value`, by the same names.
        """

    def spec_of(self, stored: Skeleton) -> ArraySpec | None:
        """What the stored array is that a node refers to; None if it refers to none."""

    def children(self, stored: Skeleton, *at: str) -> dict[str, Skeleton]:
        """The parts of a stored dict whose keys are plain strings.

        Raises:
            FormatError: If something else is stored there.
        """

    def wants(self, *at: str) -> bool:
        """Whether what stands there is to be restored at all; everything is, unless a part was asked for."""

    def complete(self, value: Any) -> Any:
        """A value of `value`, when all arrays have been read: with arrays in the places of what had to stand for them.

        Arrays that can be changed stand there from the beginning. A dict or a list is changed where it is.
        """

    def put(self, live: Any, value: Any) -> Any:
        """Puts a value of `value` in the place of a live one, when all arrays have been read.

        Returns:
            The value from now on: `live` itself if it could be changed, otherwise the new value.
        """

    def name(self, *at: str) -> str:
        """The path for a list in `differences` or for a message."""

    @property
    def differences(self) -> Differences:
        """Where differences that the adapter finds by itself are noted."""


class _Refusal(NamedTuple):
    """Why objects of a class cannot be saved, and what to use in their place."""

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
"""By package and class, wrappers whose state on each worker is another part, which nothing in it says. (By name: that
of no framework is imported for it.)"""


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
    """The error for an object of that name."""
    return UnsupportedValueError(f"{path}: {name} {refusal.text}, and cannot be saved", path=path, hint=refusal.hint)


class Replication(NamedTuple):
    """How the plain arrays of an object's state lie with the workers.

    Attributes:
        holders: The ranks of the workers that hold them; None for all workers.
        trained: The live arrays among them that training keeps equal on these workers; None for all of them.
        is_trained: Whether those can only differ by a mistake: parameters, and the state of their optimizer.
        renewed: The live arrays among the others that are given to all by the first worker, or may well differ.
    """

    holders: Sequence[int] | None = None
    trained: Sequence[Any] | None = None
    is_trained: bool = False
    renewed: Sequence[Any] = ()


class Oversights(NamedTuple):
    """What a program seems to have forgotten of an object; empty where it has forgotten nothing.

    Attributes:
        lack: What the object lacks after a restore.
        draws: What of the object draws from the generators that the whole process shares.
        find_loss: Says of a save that is made when it is called what of the object's work that leaves out, "" if
            nothing; None where there never is such a thing. It may compare with the moment when it was made.
        trains: The live parameters that the object changes, as an optimizer does.
        holds: The live parameters that are its own state, as a module's.
    """

    lack: str = ""
    draws: str = ""
    find_loss: Callable[[], str] | None = None
    trains: Sequence[Any] = ()
    holds: Sequence[Any] = ()


class Readable(enum.Enum):
    """When the state of an object may be read.

    Attributes:
        ALWAYS: At any time.
        LATER: Once the object has been prepared or used; before that, its state may be another one, or none.
        WHEN_SAVED: When it is saved, and otherwise only where nothing else will do: to read it may change the object. A
            loader of data may start its workers, or draw random numbers.
    """

    ALWAYS = "always"
    LATER = "later"
    WHEN_SAVED = "when saved"


class Adapter:
    """Reads the state of one kind of object and puts it back. Adapters hold no state of their own.

    Attributes:
        kind: A name that is stored; state goes back only to an object whose adapter has the same.
        last: True for objects that the loading of others may disturb, such as random generators.
        is_per_worker: True for objects whose state is each worker's own.
        knows_wrappers: True to serve also what only says that it is of a class which the adapter serves.
        follow_optimizers: For objects that optimizers train: has a function called with each optimizer that has
            stepped, whichever it is, on the thread that stepped it; returns what ends that.
    """

    kind: str = ""
    last: bool = False
    is_per_worker: bool = False
    knows_wrappers: bool = False
    follow_optimizers: Callable[[Callable[[Any], None]], Callable[[], None]] | None = None

    def check(self, obj: Any, path: str) -> None:
        """Makes sure that an object is not of those whose state says less than it means.

        Raises:
            UnsupportedValueError: If it is, or holds such; `path` says where it stands.
        """
        refuse_type(type(obj), path)

    def prepare(self, obj: Any) -> None:
        """Called for every object before the state of any is read."""
        prepare = getattr(obj, "prepare_for_checkpoint", None)
        if callable(prepare):
            prepare()

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """The state, as a tree of values."""
        raise NotImplementedError  # Each kind of object has its own. Not abstract: a plain Adapter() prepares others.

    def readable(self, obj: Any) -> Readable:
        """When `state_of` may be called: once it is prepared, for an object that asks for that."""
        return Readable.LATER if callable(getattr(obj, "prepare_for_checkpoint", None)) else Readable.ALWAYS

    def replication_of(self, obj: Any) -> Replication:
        """Which workers hold the plain arrays of an object's state, and which of these training keeps equal."""
        return Replication()

    def gives_batches(self, obj: Any, path: str) -> bool:
        """Whether the object's own state is a place in the data, which moves when a batch is taken from the object.

        Args:
            obj: The object.
            path: What it is called in an error.

        Raises:
            UnsupportedValueError: If it has a place in the data that cannot be kept.
        """
        return False

    def oversights_of(self, obj: Any) -> Oversights:
        """What a restart is likely to lack although the object is kept."""
        return Oversights()

    def before_step(
        self, obj: Any, call: Callable[[object], None], *, is_own: bool = False
    ) -> Callable[[], None] | None:
        """Has `call` called with whatever steps before each step of the object, which must not begin before it returns.

        Args:
            obj: The object.
            call: What is called.
            is_own: True to have it called for the steps that the object itself takes, and for no others that change the
                same arrays.

        Returns:
            What ends that, or None for an object that has no steps which could wait.
        """
        return None

    def stepped_arrays(self, obj: Any) -> list[Any]:
        """The live arrays that nothing but the object's own step changes; only asked where `before_step` works."""
        return []

    def awaited_bytes(self, obj: Any) -> int:
        """By how much the object's state will have grown once the object has been used, as far as can be told."""
        return 0

    def begin_anew(self, obj: Any, stored: Skeleton, worker: Worker) -> Callable[[], None] | None:
        """What to do with state of each worker's own that was stored by a job of another number of workers.

        Args:
            obj: The object.
            stored: What one of those workers had stored.
            worker: This worker.

        Returns:
            What gives the object a state that differs from that of all other workers, or None to leave it as it is.
        """
        return None

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Compares what is stored with the object, which is not changed.

        Returns:
            What puts the state into the object. It is called after the arrays of `loading.value` have been filled,
            or never.
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
        """Makes one.

        Args:
            kind: The name that is stored, such as `torch.dataloader`.
            read: Takes the object, returns its state.
            write: Takes the object and a state.
            last: Whether the object is put back after all others.
            compare: Whether the stored state is held against the present one. Without it nothing that is stored can
                differ, and the present state is not read; values that need a live template are not found then.
        """
        self.kind = kind
        self.last = last
        self._read = read
        self._write = write
        self._compare = compare

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """What `read` returns."""
        return self._read(obj)

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Hands the stored state to `write`."""
        live = self._read(obj) if self._compare or not loading.wants() else None
        state = loading.value(stored, live)
        return lambda: void(self._write(obj, loading.complete(state)))


class StateDictAdapter(StateAdapter):
    """Serves any object that has `state_dict` and `load_state_dict`.

    A restore hands over what is stored and does not ask the object for its present state, unless it cannot do without.
    """

    def __init__(self, *, may_change: bool = True) -> None:
        """Makes one.

        Args:
            may_change: False for classes that `state_dict` is known not to change.
        """
        super().__init__("state_dict", lambda obj: obj.state_dict(), lambda obj, state: obj.load_state_dict(state))
        self._may_change = may_change

    def readable(self, obj: Any) -> Readable:
        """See `Adapter`. What `state_dict` does is not known, unless the class is."""
        return Readable.WHEN_SAVED if self._may_change else super().readable(obj)

    def gives_batches(self, obj: Any, path: str) -> bool:
        """See `Adapter`: what is iterated and is no collection."""
        cls = type(obj)
        return hasattr(cls, "__next__") or (hasattr(cls, "__iter__") and not hasattr(cls, "__getitem__"))

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Prepares `load_state_dict`.

        The present state is read where a part alone is restored, and where what is stored holds other objects, or
        types that only a live value can name. It is also read where arrays are stored, since it says on which device
        they belong; but not that of an object which can be iterated: it may begin to load data when it is asked.
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
