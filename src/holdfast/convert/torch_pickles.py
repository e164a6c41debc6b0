"""How torch writes tensors down: names of types, storages, and what rebuilds a tensor. Pure."""

from __future__ import annotations

import math
from typing import Any, Final

from holdfast.convert.leaf_stream import StoredLeaf
from holdfast.convert.leaf_tree import Special
from holdfast.convert.pickle_write import Call, Global, Persistent
from holdfast.format.dtypes import ITEM_BYTES, QUANTIZED_TYPES, names_in
from holdfast.format.strides import row_major

DTYPES: Final = {name: torch_name for torch_name, name in names_in("torch").items() if name not in QUANTIZED_TYPES}
"""Torch's names of the element types."""

STORAGES: Final = {
    "BOOL": "BoolStorage",
    "U8": "ByteStorage",
    "I8": "CharStorage",
    "I16": "ShortStorage",
    "I32": "IntStorage",
    "I64": "LongStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "F32": "FloatStorage",
    "F64": "DoubleStorage",
    "C64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""The classes of storages of older element types; the newer ones lie in storages of bytes, and name their type."""

UNTYPED: Final = Global("torch.storage", "UntypedStorage")
OLD_REBUILD: Final = Global("torch._utils", "_rebuild_tensor_v2")
NEW_REBUILD: Final = Global("torch._utils", "_rebuild_tensor_v3")
ORDERED: Final = Global("collections", "OrderedDict")
SIZE: Final = Global("torch", "Size")


def dtype_global(dtype: str) -> Global:
    """**Pure.** What torch calls an element type."""
    return Global("torch", DTYPES[dtype])


def tensor_call(key: str, leaf: StoredLeaf, strides: tuple[int, ...] | None = None) -> Call:
    """**Pure.** A dense tensor that is all of a storage.

    Args:
        key: The storage's name in the archive.
        leaf: What the tensor is.
        strides: How it lies there; None for row-major order.
    """
    elements = math.prod(leaf.shape)
    strides = strides or row_major(leaf.shape)
    hooks = Call(ORDERED, ())
    storage = STORAGES.get(leaf.dtype)
    if storage is not None:
        persistent = Persistent(("storage", Global("torch", storage), key, "cpu", elements))
        return Call(OLD_REBUILD, (persistent, 0, leaf.shape, strides, False, hooks))
    persistent = Persistent(("storage", UNTYPED, key, "cpu", elements * ITEM_BYTES[leaf.dtype]))
    return Call(NEW_REBUILD, (persistent, 0, leaf.shape, strides, False, hooks, dtype_global(leaf.dtype)))


def special_value(value: Special) -> Any:
    """**Pure.** What stands for a value of torch's own; None if it is none that a careful reader takes."""
    if value.tag == "torch.Size" and type(value.value) is list and all(type(one) is int for one in value.value):
        return Call(SIZE, (tuple(value.value),))
    if type(value.value) is not str:
        return None
    if value.tag == "torch.device":
        return Call(Global("torch", "device"), (value.value,))
    name = value.value.removeprefix("torch.")
    if value.tag == "torch.dtype" and name in DTYPES.values():
        return Global("torch", name)
    return None
