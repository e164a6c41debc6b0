"""Element types: those of safetensors, and others that are raw bytes in a data file. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes: TypeAlias = npt.NDArray[np.uint8]
    Numbers: TypeAlias = npt.NDArray[np.float64] | npt.NDArray[np.complex128]


class ElementType(NamedTuple):
    """One type of an array's elements.

    Attributes:
        name: Its name in the index: that of safetensors, or else the libraries' own.
        item_bytes: The bytes of one element.
        library_name: Its name in the libraries.
        libraries: The libraries whose arrays may have it.
        torch_storage: Torch's name of a storage of it in a file; empty if it is a storage of bytes.
    """

    name: str
    item_bytes: int
    library_name: str
    libraries: str
    torch_storage: str = ""

    @property
    def is_raw(self) -> bool:
        """True if safetensors lacks the type, so a data file declares bytes."""
        return self.name == self.library_name


ELEMENT_TYPES: Final = (
    ElementType("BOOL", 1, "bool", "torch numpy jax", "BoolStorage"),
    ElementType("U8", 1, "uint8", "torch numpy jax", "ByteStorage"),
    ElementType("I8", 1, "int8", "torch numpy jax", "CharStorage"),
    ElementType("F8_E5M2", 1, "float8_e5m2", "torch numpy jax"),
    ElementType("F8_E4M3", 1, "float8_e4m3fn", "torch numpy jax"),
    ElementType("F8_E8M0", 1, "float8_e8m0fnu", "torch numpy jax"),
    ElementType("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", "torch numpy jax"),
    ElementType("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", "torch numpy jax"),
    ElementType("I16", 2, "int16", "torch numpy jax", "ShortStorage"),
    ElementType("U16", 2, "uint16", "torch numpy jax"),
    ElementType("F16", 2, "float16", "torch numpy jax", "HalfStorage"),
    ElementType("BF16", 2, "bfloat16", "torch numpy jax", "BFloat16Storage"),
    ElementType("I32", 4, "int32", "torch numpy jax", "IntStorage"),
    ElementType("U32", 4, "uint32", "torch numpy jax"),
    ElementType("F32", 4, "float32", "torch numpy jax", "FloatStorage"),
    ElementType("F64", 8, "float64", "torch numpy jax", "DoubleStorage"),
    ElementType("I64", 8, "int64", "torch numpy jax", "LongStorage"),
    ElementType("U64", 8, "uint64", "torch numpy jax"),
    ElementType("C64", 8, "complex64", "torch numpy jax", "ComplexFloatStorage"),
    ElementType("complex32", 4, "complex32", "torch"),
    ElementType("complex128", 16, "complex128", "torch numpy jax", "ComplexDoubleStorage"),
    # Two elements to a byte, which counts as one.
    ElementType("float4_e2m1fn_x2", 1, "float4_e2m1fn_x2", "torch"),
    ElementType("qint8", 1, "qint8", "torch"),
    ElementType("quint8", 1, "quint8", "torch"),
    ElementType("qint32", 4, "qint32", "torch"),
    # A byte each, as in the memory of the host. NumPy has these, and others above, with the package ml_dtypes.
    ElementType("int2", 1, "int2", "numpy jax"),
    ElementType("uint2", 1, "uint2", "numpy jax"),
    ElementType("int4", 1, "int4", "numpy jax"),
    ElementType("uint4", 1, "uint4", "numpy jax"),
    ElementType("float4_e2m1fn", 1, "float4_e2m1fn", "numpy jax"),
    ElementType("float8_e3m4", 1, "float8_e3m4", "numpy jax"),
    ElementType("float8_e4m3", 1, "float8_e4m3", "numpy jax"),
    ElementType("float8_e4m3b11fnuz", 1, "float8_e4m3b11fnuz", "numpy jax"),
)

ITEM_BYTES: Final[dict[str, int]] = {one.name: one.item_bytes for one in ELEMENT_TYPES}
"""Bytes per element of each type that an index may name."""

RAW_TYPES: Final = frozenset(one.name for one in ELEMENT_TYPES if one.is_raw)
"""The types that safetensors lacks."""

QUANTIZED_TYPES: Final = {"qint8": (-(1 << 7), 1 << 7), "quint8": (0, 1 << 8), "qint32": (-(1 << 31), 1 << 31)}
"""The types of torch's quantized tensors: the range of their integers, the last exclusive."""


class Quantizer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The map from the integers of a quantized array to numbers: `(integer - zero point) * scale`.

    Attributes:
        axis: The dimension along which scales and zero points vary; None if all share one.
        scales: The scales.
        zero_points: The zero points.
    """

    axis: int | None
    scales: tuple[float, ...]
    zero_points: tuple[int, ...]


class QuantizerRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The quantizer of one leaf."""

    leaf: str
    quantizer: Quantizer


def find_quantizer_problem(dtype: str, shape: tuple[int, ...], quantizer: Quantizer | None) -> str:
    """**Pure.** Returns why an array cannot have that quantizer, or none; empty if it can."""
    if dtype not in QUANTIZED_TYPES:
        return f"an array of {dtype} cannot have a quantizer" if quantizer is not None else ""
    if quantizer is None:
        return f"an array of {dtype} needs a quantizer"
    axis, count = quantizer.axis, len(quantizer.scales)
    if axis is not None and not 0 <= axis < len(shape):
        return f"a quantizer along dimension {axis} of {len(shape)}"
    if len(quantizer.zero_points) != count or count != (1 if axis is None else shape[axis]):
        return f"a quantizer of {count} scales and {len(quantizer.zero_points)} zero points for {list(shape)}"
    least, beyond = QUANTIZED_TYPES[dtype]
    if not all(map(math.isfinite, quantizer.scales)) or any(not least <= z < beyond for z in quantizer.zero_points):
        return f"a quantizer of {dtype} with invalid scales or zero points"
    return ""


def names_in(library: str) -> dict[str, str]:
    """**Pure.** Returns the types that the arrays of a library may have: by the library's name, that of the index."""
    return {one.library_name: one.name for one in ELEMENT_TYPES if library in one.libraries.split()}


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """**Pure.** Returns the element type and shape of an array in the header of a data file.

    Types that safetensors lacks are bytes there, with one more dimension for those of an element.
    """
    return ("U8", (*shape, ITEM_BYTES[dtype])) if dtype in RAW_TYPES else (dtype, shape)


MAX_DIMENSIONS: Final = 64

MAX_ARRAY_BYTES: Final = 1 << 53
"""The largest array: sizes stay exact in JSON readers that hold numbers as doubles."""


def array_bytes(dtype: str, shape: Iterable[int]) -> int:
    """**Pure.** Returns the size of a contiguous array in bytes.

    Args:
        dtype: A key of `ITEM_BYTES`.
        shape: The length of each dimension; empty for a scalar.

    Raises:
        ValueError: If the type is unknown, a length is negative, there are more than `MAX_DIMENSIONS`, or the array
            would be larger than `MAX_ARRAY_BYTES`.
    """
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise ValueError(f"unknown element type {dtype!r}")
    lengths = tuple(shape)
    if len(lengths) > MAX_DIMENSIONS:
        raise ValueError(f"an array of {len(lengths)} dimensions")
    if lengths and min(lengths) < 0:
        raise ValueError(f"negative length in shape {list(lengths)}")
    total = math.prod(lengths, start=item_bytes)
    if total > MAX_ARRAY_BYTES:
        raise ValueError(f"shape {list(lengths)} of {dtype} is larger than {MAX_ARRAY_BYTES} bytes")
    return total


_EIGHT_BITS: Final = {
    # Bits of the exponent, bits of the fraction, the exponent's bias, and the codes of NaN and of infinity.
    "F8_E5M2": (5, 2, 15, range(0x7D, 0x80), 0x7C),
    "F8_E4M3": (4, 3, 7, range(0x7F, 0x80), None),
    "F8_E5M2FNUZ": (5, 2, 16, range(0), None),
    "F8_E4M3FNUZ": (4, 3, 8, range(0), None),
    "F8_E8M0": (8, 0, 127, range(0), None),
}
_NATIVE: Final = {
    one.name: one.library_name
    for one in ELEMENT_TYPES
    if one.name == "complex128" or not (one.is_raw or one.name in _EIGHT_BITS or one.name == "BF16")
}
"""The types that NumPy has by itself, with its names."""


def is_numeric(dtype: str) -> bool:
    """**Pure.** True if `to_numbers` can convert elements of this type."""
    return dtype in _NATIVE or dtype in _EIGHT_BITS or dtype == "BF16"


def to_numbers(data: Bytes, dtype: str) -> Numbers:
    """**Pure.** Converts bytes to float64 or complex128; `is_numeric(dtype)` must be true."""
    import numpy as np

    if dtype in _EIGHT_BITS:
        return _eight_bit_table(dtype)[data]
    with np.errstate(invalid="ignore"):  # A NaN that signals is a NaN.
        if dtype == "BF16":
            wide = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).astype(np.float64)
        numbers = data.view(np.dtype(_NATIVE[dtype]))
        return numbers.astype(np.complex128) if numbers.dtype.kind == "c" else numbers.astype(np.float64)


@cache
def _eight_bit_table(dtype: str) -> npt.NDArray[np.float64]:
    import numpy as np

    exponent_bits, fraction_bits, bias, nans, infinity = _EIGHT_BITS[dtype]
    table = np.zeros(256)
    for code in range(256):
        sign = -1.0 if code >> (exponent_bits + fraction_bits) else 1.0
        magnitude = code & ((1 << (exponent_bits + fraction_bits)) - 1)
        exponent, fraction = magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1)
        # Without bits of a fraction there is no number below the smallest exponent, nor a sign.
        is_normal = exponent > 0 or fraction_bits == 0
        value = (is_normal + fraction / (1 << fraction_bits)) * 2.0 ** (max(exponent, int(not is_normal)) - bias)
        if magnitude in nans or (dtype.endswith("FNUZ") and code == 0x80) or (dtype == "F8_E8M0" and code == 0xFF):
            value = math.nan
        elif infinity is not None and magnitude == infinity:
            value = math.inf
        table[code] = sign * value
    return table
