"""The program's own types that may be written and rebuilt, as the program has registered them. Pure.

A checkpoint names its types by tag or by name, but such a name is looked up only here and on the live objects: an
unregistered name is an error.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from holdfast.errors import UsageError
from holdfast.format.scalars import ENCODERS

T = TypeVar("T")


class Codec(msgspec.Struct, frozen=True):
    """A codec: how the values of one exact type are converted to other values, and back.

    Attributes:
        cls: The type.
        tag: The name that is stored.
        encode: Takes a value, returns a tree of plain values and arrays.
        decode: Takes such a tree, returns an equal value of the type.
    """

    cls: type
    tag: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


FACTORIES: Final[Mapping[str, Any]] = {
    **{
        cls.__name__: cls
        for cls in (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
    },
    **{cls.__name__: cls for cls in (collections.Counter, collections.OrderedDict, collections.deque)},
}
"""The factories that a defaultdict may have, by the name that is stored."""

FACTORY_NAMES: Final[Mapping[Any, str]] = {factory: name for name, factory in FACTORIES.items()}

_codecs_by_type: dict[type, Codec] = {}
_codecs_by_tag: dict[str, Codec] = {}
_types_by_name: dict[str, type] = {}
_type_sources: list[Callable[[str], type | None]] = []


def register_codec(cls: type[T], *, tag: str, encode: Callable[[T], Any], decode: Callable[[Any], T]) -> None:
    """Registers how to store the values of a type.

    Register before saving, and before restoring in every process that restores.

    Args:
        cls: The type; subclasses are not included.
        tag: A name for it that stays the same in all versions of the program, such as `myproject.Vocabulary`.
        encode: Takes a value, returns its content: any tree of plain values, tensors and arrays.
        decode: Takes the result of `encode`, returns an equal value. Its tensors and arrays are new ones with the
            stored values, on the device of the value that is replaced, or else of the parameter whose state it is.

    Raises:
        UsageError: If the type needs no codec, or the tag belongs to another type.
    """
    if cls in ENCODERS:
        raise UsageError(
            f"values of {cls.__qualname__} are stored as they are, without a codec",
            hint="Register a subclass of your own.",
        )
    if not tag or not isinstance(tag, str):
        raise UsageError("a codec needs a tag, the name that is stored with each value")
    other = _codecs_by_tag.get(tag)
    if other is not None and name_of(other.cls) != name_of(cls):
        raise UsageError(f"the tag {tag!r} already belongs to {name_of(other.cls)}", hint="Choose another tag.")
    _codecs_by_tag[tag] = _codecs_by_type[cls] = Codec(cls, tag, encode, decode)


def register_type(cls: type[T], *, name: str | None = None) -> type[T]:
    """Lets a restore create values of a dataclass, enum, namedtuple or tensor subclass; also a class decorator.

    This is needed only if there is no live value of the type at the same path when the restore begins, for example for
    the elements of a list that is still empty, or for the state of an optimizer that has not stepped yet. Types that
    the program or a library passed to `torch.serialization.add_safe_globals` need no registration.

    A tensor subclass must have `__tensor_flatten__` and `__tensor_unflatten__`, which define its plain tensors.

    Args:
        cls: The type.
        name: The name under which it was stored, if the class has moved since: `module:qualified name`.

    Returns:
        The class itself.

    Raises:
        UsageError: If it is another kind of type.
    """
    if not (is_plain_dataclass(cls) or issubclass(cls, enum.Enum) or is_namedtuple(cls) or is_tensor_subclass(cls)):
        raise UsageError(
            f"{name_of(cls)} is not a dataclass, enum, namedtuple or tensor subclass with __tensor_flatten__",
            hint="For other types, use register_codec.",
        )
    _types_by_name[name or name_of(cls)] = cls
    return cls


def codec_for(cls: type) -> Codec | None:
    """Returns the codec of an exact type, or None."""
    return _codecs_by_type.get(cls)


def codec_tagged(tag: str) -> Codec | None:
    """Returns the codec with a tag, or None."""
    return _codecs_by_tag.get(tag)


def register_type_source(find: Callable[[str], type | None]) -> None:
    """Registers another place where the program registers types, such as a framework; `find` takes a stored name."""
    _type_sources.append(find)


def type_named(name: str) -> type | None:
    """Returns the registered type with that stored name, or None."""
    registered = _types_by_name.get(name)
    if registered is not None:
        return registered
    for find in _type_sources:
        if (found := find(name)) is not None:
            return found
    return None


def name_of(cls: type) -> str:
    """**Pure.** Returns the name under which a type is stored."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_namedtuple(cls: type) -> bool:
    """**Pure.** Returns True if a type was made by `namedtuple` or `NamedTuple`."""
    fields = getattr(cls, "_fields", None)
    return (
        tuple in cls.__bases__
        and type(fields) is tuple
        and all(type(field) is str for field in fields)
        and callable(getattr(cls, "_make", None))
    )


def is_tensor_subclass(cls: type) -> bool:
    """**Pure.** Returns True if a type defines, through torch's protocol, what tensors its values are made of."""
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def is_plain_dataclass(cls: type) -> bool:
    """**Pure.** Returns True if a type is a dataclass without a built-in base type, so its fields are its value."""
    return dataclasses.is_dataclass(cls) and all(
        ancestor is object or ancestor.__module__ != "builtins" for ancestor in cls.__mro__
    )


def _register_namespace(cls: type) -> None:
    def make(attributes: Any) -> Any:
        made = cls()
        vars(made).update(attributes)
        return made

    register_codec(cls, tag=f"{cls.__module__}.{cls.__qualname__}", encode=lambda value: dict(vars(value)), decode=make)


def _make_file(state: Any) -> io.BytesIO:
    file = io.BytesIO(state[0])
    file.seek(state[1])
    return file


register_codec(io.BytesIO, tag="io.BytesIO", encode=lambda file: [file.getvalue(), file.tell()], decode=_make_file)
_register_namespace(argparse.Namespace)
_register_namespace(types.SimpleNamespace)
