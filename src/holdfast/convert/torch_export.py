"""Checkpoints as one file that `torch.load(path, weights_only=True)` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from holdfast.convert.leaf_stream import LeafReader, StoredLeaf
from holdfast.convert.leaf_tree import ArrayRef, LeftOut, ObjectState, Special
from holdfast.convert.optimizer_forms import number_parameters
from holdfast.convert.output_files import deliver_file
from holdfast.convert.pickle_write import Call, write_pickle
from holdfast.convert.torch_pickles import special_value, tensor_call
from holdfast.convert.torch_zip import ArchiveWriter, take
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.encoding import escape
from holdfast.format.strides import order_dimensions

_RECORD_BYTES = 512
"""What a record of the archive takes beside its bytes, at the most."""


class TensorTable:
    """The storages of one archive: a leaf that stands in several places is one storage, as it was one tensor's memory.

    Attributes:
        keys: For each leaf the name of its storage.
    """

    def __init__(self, reader: LeafReader) -> None:
        self._reader = reader
        self.keys: dict[str, str] = {}

    def call(self, array: ArrayRef) -> Call:
        """**Pure.** The tensor of a leaf."""
        key = self.keys.setdefault(array.leaf, str(len(self.keys)))
        return tensor_call(key, self._reader.leaves[array.leaf], self._reader.strides.get(array.leaf))


def torch_value(value: Any, path: str, array: Callable[[ArrayRef], Any], left: list[LeftOut]) -> Any:
    """**Pure.** A tree with what stands for tensors, and for values of torch's own; what cannot stand there is noted.

    Args:
        value: The tree.
        path: What it is called.
        array: Gives what stands for an array.
        left: What is left out is added here.
    """
    if type(value) is ArrayRef:
        return array(value)
    if type(value) is ObjectState:
        state = number_parameters(value.state) if value.kind == "torch.optimizer" else value.state
        return torch_value(state, path, array, left)
    if isinstance(value, dict):
        return {key: torch_value(part, f"{path}/{escape(str(key))}", array, left) for key, part in value.items()}
    if type(value) in (list, tuple):
        parts = [torch_value(part, f"{path}/{number}", array, left) for number, part in enumerate(value)]
        return tuple(parts) if type(value) is tuple else parts
    if type(value) is Special:
        found = special_value(value)
        if found is None:
            left.append(LeftOut(path, f"it is a {value.tag}"))
        return found
    return value


def write_torch(
    reader: LeafReader,
    tree: Any,
    out: Path,
    *,
    overwrite: bool,
    left: list[LeftOut],
    expect: Callable[[int], None],
    advance: Callable[[int], None],
) -> list[str]:
    """**Blocks.** Writes a tree as `torch.save` does, a piece at a time.

    Args:
        reader: Where the leaves come from.
        tree: What is saved.
        out: The file.
        overwrite: Whether one that is there may go.
        left: What is left out is added here.
        expect: Told how much will be written.
        advance: Told of each piece.

    Returns:
        The name of the file.

    Raises:
        UsageError: If something is there already.
        DamageError: If the checkpoint is damaged.
        StorageError: If a place fails.
    """
    table = TensorTable(reader)
    pickle = write_pickle(torch_value(tree, "", table.call, left))
    leaves_bytes = sum(reader.leaves[leaf].size_bytes for leaf in table.keys)
    size_bytes = len(pickle) + leaves_bytes + _RECORD_BYTES * (len(table.keys) + 4)
    expect(leaves_bytes)
    with deliver_file(out, size_bytes, overwrite=overwrite) as delivery:
        with delivery.create("archive") as file:
            archive = ArchiveWriter(file, "archive")
            archive.begin(pickle)
            pieces = reader.stream(map(reader.whole, table.keys))
            for leaf, key in table.keys.items():
                leaf_bytes = reader.leaves[leaf].size_bytes
                own: Iterable[memoryview] = take(pieces, leaf_bytes)
                if leaf in reader.strides:
                    own = [_reorder(own, reader.leaves[leaf], reader.strides[leaf])]
                archive.add(f"data/{key}", leaf_bytes, own)
                advance(leaf_bytes)
            archive.finish()
        delivery.place_file("archive", overwrite=overwrite)
    return [out.name]


def _reorder(pieces: Iterable[memoryview], leaf: StoredLeaf, strides: tuple[int, ...]) -> memoryview:
    """The bytes of a leaf, which come in row-major order, in the order in which it lies in memory. All are held."""
    import numpy as np

    data = bytearray(leaf.size_bytes)
    place = 0
    for piece in pieces:
        data[place : place + len(piece)] = piece
        place += len(piece)
    values = np.frombuffer(data, f"V{ITEM_BYTES[leaf.dtype]}").reshape(leaf.shape)
    return memoryview(values.transpose(order_dimensions(leaf.shape, strides)).tobytes())
