"""Files of `torch.save`: the tree in them, and where their tensors lie. Nothing in them is executed."""

from __future__ import annotations

from typing import Any, Final

from holdfast.convert.input_arrays import StoredTensor
from holdfast.convert.input_files import Record, SourceFile, read_directory
from holdfast.convert.pickle_read import Made, read_pickle, shown
from holdfast.convert.pickle_write import Global, Persistent
from holdfast.convert.torch_pickles import DTYPES, STORAGES, UNTYPED
from holdfast.errors import FormatError
from holdfast.format.dtypes import ITEM_BYTES, array_bytes
from holdfast.format.soundness import MAX_DIMENSIONS

MAX_PICKLE_BYTES: Final = 256 << 20
"""The pickle in a file holds no tensors, only what is said of them, and plain values."""

_DTYPES: Final = {Global("torch", torch_name): name for name, torch_name in DTYPES.items()}
_STORAGES: Final = {Global("torch", storage): name for name, storage in STORAGES.items()}
_REBUILDERS: Final = {
    Global("torch._utils", "_rebuild_tensor"): (4, None),
    Global("torch._utils", "_rebuild_tensor_v2"): (6, None),
    Global("torch._utils", "_rebuild_tensor_v3"): (7, 6),
}
"""For each function that makes a tensor, how many arguments it has at least, and which one is the element type."""

_PARAMETERS: Final = frozenset(
    {Global("torch._utils", "_rebuild_parameter"), Global("torch._utils", "_rebuild_parameter_with_state")}
)
_SIZE: Final = Global("torch", "Size")
_MAX_DEVICE_BITS: Final = 32
_DEVICE: Final = Global("torch", "device")

ALLOWED: Final = frozenset({*_DTYPES, *_STORAGES, *_REBUILDERS, *_PARAMETERS, _SIZE, _DEVICE, UNTYPED})
"""What such a file may name."""

_STRANGE: Final = "Only plain tensors can be taken in: save what it is made of, on the CPU and dense."


class TorchArchive:
    """One archive of `torch.save`, in a file of its own or within another one.

    Attributes:
        value: What was saved; what is no plain value is a `Made` or a `Global`.
    """

    def __init__(self, file: SourceFile, begin: int, size_bytes: int, *, keep_unknown: bool = False) -> None:
        """**Blocks.** Reads what was saved, but for the tensors' values.

        Args:
            file: The file.
            begin: Where the archive begins in it.
            size_bytes: How long it is.
            keep_unknown: Whether what is unknown is kept as what it is, and no error.

        Raises:
            FormatError: If it is malformed, or names what it may not.
            StorageError: If it cannot be read.
        """
        self._file = file
        self._path = str(file.path)
        self._records = read_directory(file, begin, size_bytes)
        pickle = self._small("data.pkl", MAX_PICKLE_BYTES)
        if "byteorder" in self._records and self._small("byteorder", 16) != b"little":
            raise FormatError(f"{self._path}: its numbers are big-endian", path=self._path)
        self.value = read_pickle(memoryview(pickle), ALLOWED, self._path, keep_unknown=keep_unknown)

    def tensor(self, made: Made, depth: int = 0) -> StoredTensor | None:
        """**Pure.** The tensor that something stands for; None if it is no tensor.

        Raises:
            FormatError: If it cannot be one that lies in the archive.
        """
        if made.function in _PARAMETERS and made.arguments and type(made.arguments[0]) is Made and depth < 2:
            return self.tensor(made.arguments[0], depth + 1)
        form = _REBUILDERS.get(made.function)
        if form is None:
            return None
        least, dtype_place = form
        arguments = made.arguments
        if len(arguments) < least or type(arguments[0]) is not Persistent:
            raise self._malformed("a tensor is not described as torch describes one")
        dtype, record = self._storage(arguments[0])
        if dtype_place is not None:
            named = arguments[dtype_place]
            dtype = _DTYPES.get(named, "") if type(named) is Global else ""
        offset, shape, strides = arguments[1], lengths_of(arguments[2]), lengths_of(arguments[3])
        if not dtype or shape is None or strides is None or len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
            raise self._malformed("a tensor is not described as torch describes one")
        if type(offset) is not int or offset < 0:
            raise self._malformed("a tensor begins before its storage")
        try:
            array_bytes(dtype, shape)
        except ValueError as error:
            raise self._malformed(f"a tensor cannot be: {error}") from error
        tensor = StoredTensor(self._file, record.offset_bytes + offset * ITEM_BYTES[dtype], dtype, shape, strides)
        if (offset + tensor.reach) * ITEM_BYTES[dtype] > record.size_bytes:
            raise self._malformed(f"a tensor of shape {list(shape)} does not lie within its storage")
        return tensor

    def _storage(self, persistent: Persistent) -> tuple[str, Record]:
        """The element type and the bytes of a storage."""
        parts = persistent.id
        if len(parts) != 5 or parts[0] != "storage" or type(parts[2]) is not str or type(parts[4]) is not int:
            raise self._malformed("a storage is not named as torch names one")
        dtype = "U8" if parts[1] == UNTYPED else _STORAGES.get(parts[1]) if type(parts[1]) is Global else None
        if dtype is None:
            raise self._malformed(f"storages of the type {shown(parts[1])} cannot be taken in")
        record = self._records.get(f"data/{parts[2]}")
        if record is None or not 0 <= parts[4] * ITEM_BYTES[dtype] <= record.size_bytes:
            raise self._malformed(f"the storage {shown(parts[2])} is missing, or shorter than is said")
        return dtype, record

    def _small(self, name: str, limit_bytes: int) -> bytearray:
        record = self._records.get(name)
        if record is None or record.size_bytes > limit_bytes:
            size = (
                "is missing" if record is None else f"has {record.size_bytes} bytes, and at most {limit_bytes} may be"
            )
            raise self._malformed(f"{name} {size}")
        return self._file.read(record.offset_bytes, record.size_bytes)

    def _malformed(self, what: str) -> FormatError:
        return FormatError(f"{self._path}: {what}", path=self._path, hint=_STRANGE)


def special_of(value: Any) -> tuple[str, Any] | None:
    """**Pure.** The codec's tag and its value, for what torch has of its own; None for anything else."""
    if type(value) is Global and value in _DTYPES:
        return "torch.dtype", f"torch.{value.name}"
    if type(value) is not Made:
        return None
    if value.function == _SIZE and len(value.arguments) == 1:
        lengths = lengths_of(value.arguments[0])
        return None if lengths is None else ("torch.Size", list(lengths))
    if value.function == _DEVICE and value.arguments and type(value.arguments[0]) is str:
        numbers = value.arguments[1:2]
        if all(type(number) is int and number.bit_length() < _MAX_DEVICE_BITS for number in numbers):
            return "torch.device", ":".join(map(str, (value.arguments[0], *numbers)))
    return None


def lengths_of(value: Any) -> tuple[int, ...] | None:
    """**Pure.** The lengths that a shape, or the like, consists of; None if it is none."""
    if type(value) is Made and value.function == _SIZE and len(value.arguments) == 1:
        value = value.arguments[0]
    if type(value) not in (tuple, list) or not all(type(one) is int and one >= 0 for one in value):
        return None
    return tuple(value)
