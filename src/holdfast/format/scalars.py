"""Encodes values that contain no other values as JSON. Pure, except that time zones come from the machine's database.

Values that JSON represents exactly are stored as they are: None, bools, ints of 64 bits, finite floats, text.
Everything else is an object with a tag, `{"$": tag, "v": payload}`, some with a further argument `k`. Only exact types
are supported: a subclass would come back as another type.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import fractions
import pathlib
import re
import struct
import sys
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

_Value = TypeVar("_Value")

Node: TypeAlias = Any
"""A JSON value."""

MAX_INT_DIGITS: Final = 1 << 16
"""Hexadecimal digits of the largest int. Computations with ints (fractions in lowest terms) stay quick."""

MAX_DECIMAL_CHARACTERS: Final = 1 << 16

_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1
_HEXADECIMAL = re.compile(r"-?[0-9a-f]+")
_ZONE_KEY = re.compile(r"[A-Za-z0-9_+-]+(?:/[A-Za-z0-9_+-]+)*")
_NUMPY_TIME = re.compile(r"(?:datetime64|timedelta64)(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_NUMPY_NUMBERS: Final = frozenset(
    {"bool", "float16", "float32", "float64", "complex64", "complex128", "longlong", "ulonglong"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


class Malformed(Exception):  # noqa: N818  (it never leaves the format: the decoder makes a FormatError of it)
    """A payload does not fit its tag, or a value cannot be encoded.

    Attributes:
        hint: What to do about it. A payload with such an error is valid, but this machine cannot make the value.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


def tagged(tag: str, payload: Node, argument: Node = None) -> Node:
    """**Pure.** Returns a node with a tag; an argument of None is left out."""
    if argument is None:
        return {"$": tag, "v": payload}
    return {"$": tag, "k": argument, "v": payload}


def is_text(value: str) -> bool:
    """**Pure.** Returns True if a str can be encoded as UTF-8."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_str(value: str) -> Node:
    """**Pure.** Encodes text as itself, other str (with lone surrogates) as bytes."""
    return value if is_text(value) else tagged("str", _base64(value.encode("utf-8", "surrogatepass")))


def encode_int(value: int) -> Node:
    """**Pure.** Encodes an int.

    Raises:
        Malformed: If it is too large.
    """
    if _INT64_MIN <= value <= _INT64_MAX:
        return value
    if value.bit_length() > 4 * MAX_INT_DIGITS:
        what = f"an int of {value.bit_length()} bits, more than {4 * MAX_INT_DIGITS}"
        raise Malformed(what, "Store its bytes (int.to_bytes).")
    return tagged("int", f"{value:x}")


def encode_float(value: float) -> Node:
    """**Pure.** Encodes a float; one that is not finite by its exact bits."""
    return value if value - value == 0.0 else tagged("float", struct.pack(">d", value).hex())


def encode_numpy(value: Any) -> Node | None:
    """**Pure.** Encodes a NumPy scalar; None if the value is something else or of a type that has no exact codec."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return None
    cls = type(value)
    if cls is numpy.str_:
        return tagged("numpy", encode_str(str(value)), "str")
    if cls is numpy.bytes_:
        return tagged("numpy", _base64(bytes(value)), "bytes")
    name = "bool" if cls is numpy.bool_ else cls.__name__
    if name in _NUMPY_NUMBERS and cls is _numpy_class(name):
        dtype = numpy.dtype(cls)
    elif cls in (numpy.datetime64, numpy.timedelta64):
        dtype = value.dtype
        name = dtype.name
    else:
        return None
    raw = numpy.array(value, dtype).astype(dtype.newbyteorder("<")).tobytes()
    return tagged("numpy", _base64(raw), name)


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def encode_zoneinfo(value: Any) -> Node | None:
    """Encodes a `ZoneInfo` by its key; None if the value is something else.

    Raises:
        Malformed: If it cannot be rebuilt from the key.
    """
    zoneinfo = sys.modules.get("zoneinfo")
    if zoneinfo is None or type(value) is not zoneinfo.ZoneInfo:
        return None
    if value.key is None:
        raise Malformed("a time zone that was read from a file and has no key", "Use zoneinfo.ZoneInfo(key).")
    _find_zone(value.key)
    return tagged("zoneinfo", value.key)


def _encode_zone(zone: datetime.tzinfo | None) -> Node:
    if zone is None:
        return None
    by_key = encode_zoneinfo(zone)
    if by_key is not None:
        return by_key["v"]
    if type(zone) is not datetime.timezone:
        raise Malformed(
            f"a time in a zone of type {type(zone).__module__}.{type(zone).__qualname__}",
            "Use a zoneinfo.ZoneInfo or a datetime.timezone, or store the time in UTC.",
        )
    # The name is an argument of the constructor only where it was given; `__getinitargs__` tells.
    arguments = zone.__getinitargs__()  # type: ignore[attr-defined]
    name = encode_str(arguments[1]) if len(arguments) == 2 else None
    return [tagged("timedelta", _encode_timedelta(arguments[0])), name]


@lru_cache(maxsize=1 << 8)
def _find_zone(key: str) -> datetime.tzinfo:
    """Returns the time zone with that key.

    `ZoneInfo` would search for any key in packages below `tzdata`, so the key must be known before.

    Raises:
        Malformed: If the machine has no such zone.
    """
    import zoneinfo

    is_known = _ZONE_KEY.fullmatch(key) is not None and (
        any(pathlib.Path(directory, key).is_file() for directory in zoneinfo.TZPATH) or key in _tzdata_keys()
    )
    if not is_known:
        raise Malformed(
            f"the time zone {key!r}, which this machine does not have,",
            "Install the system's time zones, or the package tzdata.",
        )
    return zoneinfo.ZoneInfo(key)


def _tzdata_keys() -> list[str]:
    """The time zones of the package tzdata."""
    import importlib.resources

    try:
        return importlib.resources.files("tzdata").joinpath("zones").read_text(encoding="utf-8").split()
    except (ImportError, OSError):
        return []


def _encode_timedelta(value: datetime.timedelta) -> Node:
    return [value.days, value.seconds, value.microseconds]


def _encode_time(value: datetime.time) -> Node:
    parts = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return [*parts, _encode_zone(value.tzinfo)]


def _encode_datetime(value: datetime.datetime) -> Node:
    parts = [value.year, value.month, value.day, value.hour, value.minute, value.second]
    return [*parts, value.microsecond, value.fold, _encode_zone(value.tzinfo)]


def _encode_decimal(value: decimal.Decimal) -> Node:
    text = str(value)
    if len(text) > MAX_DECIMAL_CHARACTERS:
        what = f"a Decimal of {len(text)} characters, more than {MAX_DECIMAL_CHARACTERS}"
        raise Malformed(what, "Store its text (str).")
    return text


def decode_base64(payload: Node) -> bytes:
    """**Pure.** Decodes base64 text.

    Raises:
        Malformed: If it is not base64.
    """
    if type(payload) is not str:
        raise Malformed("expected base64 text")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:
        raise Malformed(f"the base64 text is malformed: {error}") from error


def _list_of(payload: Node, length: int) -> list[Node]:
    if type(payload) is not list or len(payload) != length:
        raise Malformed(f"expected a list of {length}")
    return payload


def _text(payload: Node) -> str:
    if type(payload) is not str:
        raise Malformed("expected text")
    return payload


def decode_int(node: Node) -> int:
    """**Pure.** Decodes an int, tagged or plain.

    Raises:
        Malformed: If it is not one.
    """
    if type(node) is int:
        return node
    if type(node) is dict and node.keys() == {"$", "v"} and node["$"] == "int":
        return _decode_large_int(node["v"])
    raise Malformed("expected an int")


def _decode_large_int(payload: Node) -> int:
    text = _text(payload)
    if len(text) > MAX_INT_DIGITS + 1 or not _HEXADECIMAL.fullmatch(text):
        raise Malformed("expected a hexadecimal number")
    return int(text, 16)


def _decode_str(payload: Node) -> str:
    return decode_base64(payload).decode("utf-8", "surrogatepass")


def _plain_or_tagged_str(node: Node) -> str:
    if type(node) is dict and node.keys() == {"$", "v"} and node["$"] == "str":
        return _decode_str(node["v"])
    return _text(node)


def _decode_float(payload: Node) -> float:
    text = _text(payload)
    if len(text) != 16 or not _HEXADECIMAL.fullmatch(text):
        raise Malformed("expected 16 hexadecimal digits")
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def _plain_or_tagged_float(node: Node) -> float:
    if type(node) is float:
        return node
    if type(node) is dict and node.keys() == {"$", "v"} and node["$"] == "float":
        return _decode_float(node["v"])
    raise Malformed("expected a float")


def _decode_complex(payload: Node) -> complex:
    real, imaginary = _list_of(payload, 2)
    return complex(_plain_or_tagged_float(real), _plain_or_tagged_float(imaginary))


def _from_ints(make: Callable[..., _Value], count: int) -> Callable[[Node], _Value]:
    return lambda payload: make(*map(decode_int, _list_of(payload, count)))


_decode_timedelta: Final = _from_ints(datetime.timedelta, 3)


def _decode_zone(payload: Node) -> datetime.timezone:
    offset, name = _list_of(payload, 2)
    if type(offset) is not dict or offset.keys() != {"$", "v"} or offset["$"] != "timedelta":
        raise Malformed("expected an offset")
    delta = _decode_timedelta(offset["v"])
    if name is None:
        return datetime.UTC if not delta else datetime.timezone(delta)
    return datetime.timezone(delta, _plain_or_tagged_str(name))


def _zone_or_none(payload: Node) -> datetime.tzinfo | None:
    if type(payload) is str:
        return _find_zone(payload)
    return None if payload is None else _decode_zone(payload)


def _decode_time(payload: Node) -> datetime.time:
    *parts, fold, zone = _list_of(payload, 6)
    hour, minute, second, microsecond = (decode_int(part) for part in parts)
    return datetime.time(hour, minute, second, microsecond, _zone_or_none(zone), fold=decode_int(fold))


def _decode_datetime(payload: Node) -> datetime.datetime:
    *parts, fold, zone = _list_of(payload, 9)
    year, month, day, hour, minute, second, microsecond = (decode_int(part) for part in parts)
    moment = datetime.datetime(year, month, day, hour, minute, second, microsecond, fold=decode_int(fold))
    return moment.replace(tzinfo=_zone_or_none(zone))


def _decode_decimal(payload: Node) -> decimal.Decimal:
    text = _text(payload)
    if len(text) > MAX_DECIMAL_CHARACTERS:
        raise Malformed(f"a Decimal of {len(text)} characters")
    return decimal.Decimal(text)


def _decode_uuid(payload: Node) -> uuid.UUID:
    if len(_text(payload)) != 32:
        raise Malformed("expected 32 hexadecimal digits")
    return uuid.UUID(hex=payload)


def _numpy_class(name: str) -> Any:
    import numpy as np

    return np.bool_ if name == "bool" else getattr(np, name)


def decode_numpy(payload: Node, name: Node) -> Any:
    """**Pure.** Decodes a NumPy scalar.

    Raises:
        Malformed: If type or bytes are invalid.
    """
    import numpy as np

    if name == "str":
        return np.str_(_plain_or_tagged_str(payload))
    raw = decode_base64(payload)
    if name == "bytes":
        return np.bytes_(raw)
    if type(name) is not str or not (name in _NUMPY_NUMBERS or _NUMPY_TIME.fullmatch(name)):
        raise Malformed("expected a NumPy scalar type")
    dtype = np.dtype(_numpy_class(name)) if name in _NUMPY_NUMBERS else np.dtype(name)
    if len(raw) != dtype.itemsize:
        raise Malformed(f"expected {dtype.itemsize} bytes")
    return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype)[0]


class _Codec(NamedTuple):
    """Encodes and decodes the values of one exact type.

    Attributes:
        tag: The tag of their nodes.
        cls: The type.
        encode: Returns the payload of a value.
        decode: Returns the value of a payload.
    """

    tag: str
    cls: type
    encode: Callable[[Any], Node]
    decode: Callable[[Node], Any]


def _path_codec(tag: str, cls: type[pathlib.PurePath]) -> _Codec:
    return _Codec(tag, cls, lambda value: encode_str(str(value)), lambda payload: cls(_plain_or_tagged_str(payload)))


_CODECS: Final = (
    _Codec("bytes", bytes, _base64, decode_base64),
    _Codec("bytearray", bytearray, _base64, lambda payload: bytearray(decode_base64(payload))),
    _Codec("complex", complex, lambda one: [encode_float(one.real), encode_float(one.imag)], _decode_complex),
    _Codec(
        "range", range, lambda one: [encode_int(part) for part in (one.start, one.stop, one.step)], _from_ints(range, 3)
    ),
    _Codec("datetime", datetime.datetime, _encode_datetime, _decode_datetime),
    _Codec("date", datetime.date, lambda one: [one.year, one.month, one.day], _from_ints(datetime.date, 3)),
    _Codec("time", datetime.time, _encode_time, _decode_time),
    _Codec("timedelta", datetime.timedelta, _encode_timedelta, _decode_timedelta),
    _Codec("timezone", datetime.timezone, _encode_zone, _decode_zone),
    _Codec("decimal", decimal.Decimal, _encode_decimal, _decode_decimal),
    _Codec(
        "fraction",
        fractions.Fraction,
        lambda one: list(map(encode_int, one.as_integer_ratio())),
        _from_ints(fractions.Fraction, 2),
    ),
    _Codec("uuid", uuid.UUID, lambda one: one.hex, _decode_uuid),
    _path_codec("path", type(pathlib.Path())),
    _path_codec("posixpath", pathlib.PurePosixPath),
    _path_codec("windowspath", pathlib.PureWindowsPath),
)


def _node_encoder(codec: _Codec) -> Callable[[Any], Node]:
    return lambda value: tagged(codec.tag, codec.encode(value))


ENCODERS: Final[dict[type, Callable[[Any], Node]]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: encode_int,
    float: encode_float,
    str: encode_str,
    **{codec.cls: _node_encoder(codec) for codec in _CODECS},
}
"""For each exact type, its codec. It raises `Malformed` for a value that cannot be encoded."""

DECODERS: Final[dict[str, Callable[[Node], Any]]] = {
    "int": _decode_large_int,
    "float": _decode_float,
    "str": _decode_str,
    "zoneinfo": lambda payload: _find_zone(_text(payload)),
    **{codec.tag: codec.decode for codec in _CODECS},
}
"""For each tag, its decoder. It raises `Malformed`, `ValueError`, `TypeError`, `OverflowError` or `ArithmeticError`."""
