"""Imports files of other programs into a committed checkpoint."""

from __future__ import annotations

import json
import math
import numbers
import os
import struct
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from holdfast.catalog import StoredRun
from holdfast.convert.detect import ImportSource
from holdfast.convert.exporter import ProgressWatcher
from holdfast.convert.files import InputArray, read_spans, whole_array
from holdfast.convert.leaf_tree import LeftOut
from holdfast.convert.orbax import MOST_TIMES as MOST_TIMES_COMPRESSED
from holdfast.convert.pickle_read import PickledObject, shown
from holdfast.convert.pickle_write import Global, Persistent
from holdfast.convert.pickled_values import PUBLIC_NAMES, thaw
from holdfast.convert.recognized import MODEL, Recognized, split_list, step_of
from holdfast.convert.torch_file import ArchivedTree, TorchArchive, coded_value_of
from holdfast.errors import FormatError, HoldfastError, UsageError
from holdfast.format.digests import SPAN_BYTES, digest
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.encoding import Encoder, escape, path_part
from holdfast.format.index import Index, Layout, LeafRecord, plan_layout
from holdfast.format.names import (
    GENERATIONS_DIRECTORY,
    IMPORTED,
    IMPORTED_FROM,
    MAX_STEP,
    StepName,
    base_path,
    data_name,
    generation_path,
)
from holdfast.format.scalars import Node, is_text, tagged
from holdfast.format.shapes import StridesRecord, find_layout
from holdfast.numbers import check_whole
from holdfast.policies import All
from holdfast.process.progress import LongRead
from holdfast.restore.candidates import Selection, make_selection
from holdfast.save.handle import Origin
from holdfast.save.run_writer import RunWriter
from holdfast.save.writer import write_index
from holdfast.storage import Storage, open_storage
from holdfast.storage.buffers import take_pages
from holdfast.storage.checks import choose_piece_bytes
from holdfast.tracebacks import short_traceback

_MODULE: Final = (
    "Save its state_dict: load the file with torch, if you trust it, and write "
    "torch.save({'model': model.state_dict()}, 'new.pt')."
)
_UNKNOWN: Final = (
    "Nothing in the file was executed. Leave such values out with --skip-unknown (skip_unknown=True), or choose what "
    "to import, such as --only model --only optimizer."
)
_STEP_NAMES: Final = ("step", "global_step", "iter_num", "iteration", "iter", "num_updates")
"""The names that programs give to the number of their steps, at the top of a file."""

_NUMBERS: Final = {"I64": "<q", "I32": "<i", "F32": "<f", "F64": "<d"}

_WHOLE: Final = "."
_WITH_KEYS: Final = (dict, set, frozenset)
_MOST_TIMES: Final = 4
_MOST_PROGRESS: Final = 1 << 20
_ALWAYS_BYTES: Final = 64 << 20

_OPTIMIZER_STATE: Final = frozenset({"step", "exp_avg", "exp_avg_sq", "momentum_buffer"})
"""Per-parameter optimizer state has these names; its arrays are never tied to other arrays."""


class Import(msgspec.Struct, frozen=True):
    """The result of an import.

    Attributes:
        step: The step.
        name: The name of the checkpoint.
        run: The run that contains it.
        format: The format of the source: `torch`, `dcp`, `safetensors`, `lightning`, `transformers` or `orbax`.
        objects: The names of its objects.
        arrays: How many arrays it has.
        size_bytes: The size of the arrays.
        left_out: What was not imported, and why.
        renamed: The objects whose names lost the prefix `strip_prefix`.
        has_step: False if the source has no step and none was given, so that the run begins at 0.
        seconds: How long it took.
    """

    step: int
    name: StepName
    run: str
    format: str
    objects: tuple[str, ...]
    arrays: int
    size_bytes: int
    left_out: tuple[LeftOut, ...]
    renamed: tuple[str, ...]
    has_step: bool
    seconds: float


@short_traceback
def import_checkpoint(
    source: str | os.PathLike[str],
    run: str | os.PathLike[str] | Storage,
    *,
    step: int | None = None,
    only: str | Iterable[str] | None = None,
    name: str = MODEL,
    rename: Mapping[str, str] | None = None,
    strip_prefix: str = "",
    skip_unknown: bool = False,
    watcher: ProgressWatcher | None = None,
) -> Import:
    """**Blocks.** Makes a committed checkpoint from the file of another program; nothing in it is executed.

    Memory use does not depend on the size of the arrays. The outermost entries of the source become the objects: from
    `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`, a run with a `model` and an `optimizer` can
    resume. It can also resume from a checkpoint of Lightning or of the Hugging Face Trainer, including its `scheduler`.

    Args:
        source: A file of `torch.save` or of Lightning, a folder of the Hugging Face Trainer, a directory of Orbax or of
            `torch.distributed.checkpoint`, a safetensors file, or a directory of safetensors files.
        run: The run's directory, a URL, or an open storage. It must not contain a checkpoint yet.
        step: The step of the checkpoint, from which a job resumes. None for the one in the source, or 0: the step that
            a framework has stored, or a whole number at the top of the file that is named `step`, `global_step`,
            `iter_num`, `iteration`, `iter` or `num_updates`.
        only: The objects to import, by their new names; None for all that are state of the training. An object that is
            chosen by its name in the source keeps that name.
        name: The name of the model, and of the only object of a source such as a plain `model.state_dict()`.
        rename: New names for objects, by those that they have in the source. The name of a part, such as
            `state/params`, makes that part a separate object; `.` makes one object of everything.
        strip_prefix: A prefix to remove from the names of a model's arrays, such as `model.`.
        skip_unknown: True to skip values of unknown classes instead of raising an error.
        watcher: Receives the progress; None for a bar on a terminal, if it takes longer than a moment.

    Raises:
        UsageError: If an argument is wrong, the source cannot be imported, or the run already has checkpoints.
        UnsupportedValueError: If a value that was chosen cannot be stored.
        NoCheckpointError: If the source does not exist.
        FormatError: If the source is malformed, or what was chosen of it contains something that is not supported.
        StorageError: If the storage fails.
    """
    begun_at = time.monotonic()
    step = None if step is None else check_whole("step", step, 0, MAX_STEP)
    if not is_text(name):
        raise UsageError(
            f"{name!r} cannot be the name of an object", hint="A name must be text that can be encoded as UTF-8."
        )
    storage = open_storage(run)
    committed = StoredRun(storage).look().committed
    if committed:
        raise UsageError(
            f"{storage.url} already contains checkpoints, the newest of step {committed[-1].step}",
            hint="Each file is a run of its own: name a new RUN. `holdfast diff` compares two runs.",
        )
    with closing(ImportSource(Path(source))) as opened:
        found = opened.recognized or list_objects(opened.root, name)
        if opened.recognized is None:
            steps = (_whole_number(found.objects[name]) for name in _STEP_NAMES if name in found.objects)
            found.step = next((number for number in steps if number is not None), None)
            _rename_states(found, name)
        has_step = step is not None or found.step is not None
        step = min(found.step or 0, MAX_STEP) if step is None else step
        if opened.recognized is not None and name != MODEL and MODEL in found.objects:
            _rename(found, {MODEL: name}, str(source))
        _rename(found, rename or {}, str(source))
        objects = _select(found, make_selection(only), str(source))
        renamed = _strip(objects, strip_prefix, str(source)) if strip_prefix else []
        encoder = _ImportEncoder(str(source), skip_unknown=skip_unknown)
        nodes = {key: encoder.encode(value, escape(key)) for key, value in objects.items()}
        left = {one.path for one in encoder.left}
        nodes = {key: node for key, node in nodes.items() if escape(key) not in left}
        arrays = encoder.arrays
        size_bytes = sum(array.size_bytes for array in arrays.values())
        most_times = MOST_TIMES_COMPRESSED if opened.format == "orbax" else _MOST_TIMES
        if size_bytes > most_times * opened.size_bytes + _ALWAYS_BYTES:
            raise FormatError(
                f"{source}: its arrays would take {size_bytes} bytes, but its files have only {opened.size_bytes}",
                path=str(source),
                hint=(
                    "Expanded tensors may be the reason: make them contiguous before saving, or save the tensors "
                    "that they were expanded from."
                ),
            )
        if not arrays and not any(nodes.values()):
            raise UsageError(f"{source} contains nothing that can be stored", hint=_MODULE)
        # torch's own files say which tensors were one, and arrays of JAX never are.
        ties = [] if opened.format in ("torch", "lightning", "orbax") else encoder.tied_candidates
        kept = {"objects": list(nodes), "format": opened.format, "progress": _as_json(found.progress)}
        metadata = {IMPORTED_FROM: escape(Path(source).name), IMPORTED: kept}
        with LongRead("importing", lambda: size_bytes) as shown:
            committed_name = _commit(storage, step, nodes, arrays, ties, metadata, watcher or shown)
        return Import(
            step=step,
            name=committed_name,
            run=storage.url,
            format=opened.format,
            objects=tuple(nodes),
            arrays=len(arrays),
            size_bytes=size_bytes,
            left_out=(*encoder.left, *found.left),
            renamed=tuple(renamed),
            has_step=has_step,
            seconds=time.monotonic() - begun_at,
        )


def _as_json(progress: Any) -> Any:
    """Returns a framework's progress if it is JSON, and of a size for a manifest; else None."""
    try:
        text = json.dumps(progress, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return json.loads(text) if len(text) < _MOST_PROGRESS else None


def list_objects(root: Any, name: str) -> Recognized:
    """**Pure.** Returns the objects in a tree: its outermost entries, or one if it is the state of one object."""
    archive = root.archive if type(root) is ArchivedTree else None
    value = root.value if type(root) is ArchivedTree else root
    is_named = type(value) is dict and all(type(key) is str and key and is_text(key) for key in value)
    if type(value) in (tuple, list) and (split := split_list(value, archive, name, _is_array)) is not None:
        return split
    # A module's own extra state lies between its tensors. Anything else beside a tensor makes it a file of objects.
    tensors = [key for key, part in value.items() if _is_array(part, archive)] if is_named else []
    if not is_named or all(key in tensors or key.endswith("_extra_state") for key in value):
        return Recognized({name: ArchivedTree(value, archive)}, [name])
    objects = {key: part if type(part) is ArchivedTree else ArchivedTree(part, archive) for key, part in value.items()}
    return Recognized(objects, list(objects))


def _whole_number(tree: ArchivedTree) -> int | None:
    """**Blocks.** Returns the number that a value is, also one of NumPy, or an array with one element."""
    value = thaw(tree.value)
    if type(value) is PickledObject and tree.archive is not None and (tensor := tree.archive.tensor(value)) is not None:
        value = whole_array(tensor)
    if type(value) is InputArray and value.dtype in _NUMBERS and math.prod(value.shape) == 1:
        (value,) = struct.unpack(_NUMBERS[value.dtype], next(read_spans(value, SPAN_BYTES)))
    is_whole = not isinstance(value, bool) and isinstance(value, numbers.Real) and value == value // 1
    return step_of(int(cast(Any, value))) if is_whole else None


def _rename_states(found: Recognized, model: str) -> None:
    """Gives `model_state_dict` and `optimizer_state_dict` the names of their objects; `state_dict` is the model's."""
    for old in list(found.objects):
        new = model if old == "state_dict" else old.removesuffix("_state_dict")
        if new and new not in found.objects and type(found.objects[old].value) is dict:
            found.objects = {new if key == old else key: tree for key, tree in found.objects.items()}
            found.former[old] = new
    found.taken = list(found.objects)


def _rename(found: Recognized, names: Mapping[str, str], source: str) -> None:
    """Renames objects, or makes objects of parts of them, which then count as selected."""
    moved: dict[str, ArchivedTree] = {}
    if _WHOLE in names:
        found.objects[_WHOLE] = ArchivedTree({name: found.objects.pop(name) for name in found.taken}, None)
        found.taken = [_WHOLE]
    for old, new in names.items():
        if not is_text(new) or not new:
            raise UsageError(
                f"{new!r} cannot be the name of an object", hint="A name must be text that can be encoded as UTF-8."
            )
        name, *way = (old if old in found.objects else found.former.get(old, old)).split("/")
        if old in found.objects or old in found.former:
            name, way = found.former.get(old, old), []
        tree = found.objects.get(name)
        part: Any = tree.value if tree is not None else None
        outer: Any = None
        for key in way:
            outer, part = part, part.get(key) if type(part) is dict else None
        if tree is None or part is None or new in moved:
            raise UsageError(
                f"{source} has no object named {old!r}" if new not in moved else f"two objects would be named {new!r}",
                hint=f"Its objects are {', '.join(map(repr, found.objects))}." if found.objects else "",
            )
        if way:
            del outer[way[-1]]
            moved[new] = part if type(part) is ArchivedTree else ArchivedTree(part, tree.archive)
        else:
            moved[new] = found.objects.pop(name)
            found.taken = [one for one in found.taken if one != name]
    for new, tree in moved.items():
        if new in found.objects:
            raise UsageError(f"{source} has another object named {new!r}", hint="Rename that object too.")
        found.objects[new] = tree
        found.taken.append(new)
    for former in found.former.keys() & names.keys():
        del found.former[former]


def _select(found: Recognized, selection: Selection | None, source: str) -> dict[str, ArchivedTree]:
    if selection is None:
        for key in found.objects.keys() - set(found.taken):
            found.left.append(LeftOut(key, "imported only if --only selects it"))
        found.left.sort(key=lambda one: one.path)
        return {key: found.objects[key] for key in found.taken}
    former = {new: old for old, new in found.former.items()}
    chosen = {}
    for key, tree in found.objects.items():
        if selection(escape(key)):
            chosen[key] = tree
        elif key in former and selection(escape(former[key])):
            chosen[former[key]] = tree
    if selection.unmatched:
        raise UsageError(
            f"{source} has no object named {', '.join(map(repr, selection.unmatched))}",
            hint=f"Its objects are {', '.join(map(repr, found.objects))}.",
        )
    return chosen


def _strip(objects: Mapping[str, ArchivedTree], prefix: str, source: str) -> list[str]:
    """Removes a prefix from the names of arrays, and returns the objects that had it."""
    prefix = f"{prefix.rstrip('.')}."
    stripped = []
    for key, tree in objects.items():
        value = tree.value
        if type(value) is not dict or not any(_is_array(part, tree.archive) for part in value.values()):
            continue
        names = {name: name.removeprefix(prefix) if type(name) is str else name for name in value}
        if len(set(names.values())) < len(names):
            raise UsageError(f"{source}: without the prefix {prefix!r}, two arrays of {key} would have the same name")
        if names.keys() != set(names.values()):
            tree.value = {names[name]: part for name, part in value.items()}
            stripped.append(key)
    if not stripped:
        raise UsageError(
            f"{source}: no array has a name with the prefix {prefix!r}",
            hint="Import without the option, then `holdfast show` lists the names.",
        )
    return stripped


def _is_array(value: Any, archive: TorchArchive | None) -> bool:
    if type(value) is PickledObject and archive is not None and archive.tensor(value) is not None:
        return True
    return type(thaw(value)) is InputArray


class _ImportEncoder(Encoder):
    """Encodes what was found; arrays get names, and are read later.

    Attributes:
        arrays: The arrays by name.
        left: What was left out.
        tied_candidates: For each dict with several arrays, their nodes: some of them may be tied weights.
    """

    def __init__(self, source: str, *, skip_unknown: bool) -> None:
        super().__init__()
        self._source = source
        self._skip_unknown = skip_unknown
        self._archive: TorchArchive | None = None
        self._names: dict[Hashable, str] = {}
        self.arrays: dict[str, InputArray] = {}
        self.left: list[LeftOut] = []
        self.tied_candidates: list[dict[str, Node]] = []

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        if type(value) is ArchivedTree:
            outer, self._archive = self._archive, value.archive
            try:
                return self.encode(value.value, path, depth)
            finally:
                self._archive = outer
        value = thaw(value)
        if self._is_unknown(value):
            if self._skip_unknown:
                self.left.append(LeftOut(path, f"it is a {_name_of(value)}"))
                return None
            raise FormatError(
                f"{self._source}: {path} is a {_name_of(value)}, which is not supported",
                path=path,
                hint=_MODULE if _is_module(value) else _UNKNOWN,
            )
        if type(value) in _WITH_KEYS and PickledObject in map(type, value):
            keys = [thaw(key) for key in value]
            value = dict(zip(keys, value.values(), strict=True)) if type(value) is dict else type(value)(keys)
        if self._skip_unknown and type(value) is dict:
            # What is left out has no place in what is stored: a job that goes on from it would have to have one too.
            unknown = [(key, number) for number, key in enumerate(value) if self._is_unknown(value[key])]
            for key, number in unknown:
                self.left.append(LeftOut(f"{path}/{path_part(key, number)}", f"it is a {_name_of(value[key])}"))
            if unknown:
                value = {key: part for key, part in value.items() if not self._is_unknown(part)}
        node = super().encode(value, path, depth)
        if type(value) is dict and "$" not in node and _OPTIMIZER_STATE.isdisjoint(node):
            arrays = {key: part for key, part in node.items() if type(part) is dict and part.get("$") == "array"}
            self.tied_candidates += [arrays] if len(arrays) > 1 else []
        return node

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        if type(value) is InputArray:
            return self._array(value, path)
        given = coded_value_of(value)
        if given is not None:
            return tagged("codec", given[1], given[0])
        if type(value) is PickledObject and self._archive is not None:
            tensor = self._archive.tensor(value)
            if tensor is not None:
                return self._array(whole_array(tensor), path)
        return None

    def coded(self, made: Any, path: str, depth: int) -> Node:
        """The values in a namespace may be of any kind that a file may contain."""
        return self.encode_apart(made, path, depth)

    def _is_unknown(self, value: Any) -> bool:
        value = thaw(value)
        if type(value) in _WITH_KEYS:
            return any(self._is_unknown(key) for key in value if type(key) in (PickledObject, Global))
        is_odd = type(value) in (PickledObject, Global, Persistent)
        return is_odd and coded_value_of(value) is None and not _is_array(value, self._archive)

    def _array(self, array: InputArray, path: str) -> Node:
        key = array.key
        name = self._names.get(key) if key is not None else None
        if name is None:
            name, number = path, 2
            while name in self.arrays:
                name = f"{path}~{number}"
                number += 1
            self.arrays[name] = array
            if key is not None:
                self._names[key] = name
        return {"$": "array", "k": array.library, "v": name}


def _is_module(value: Any) -> bool:
    """**Pure.** Returns True if a whole module was pickled, and not its state_dict."""
    return type(value) is PickledObject and type(value.state) is dict and "_parameters" in value.state


def _name_of(value: Any) -> str:
    if type(value) in _WITH_KEYS:
        return f"{type(value).__name__} with a key of an unknown class"
    what = value.function if type(value) is PickledObject else value
    return PUBLIC_NAMES.get(what, shown(what)) if type(what) is Global else "storage without a tensor"


def _commit(
    storage: Storage,
    step: int,
    objects: dict[str, Node],
    arrays: Mapping[str, InputArray],
    ties: list[dict[str, Node]],
    metadata: dict[str, Any],
    watcher: ProgressWatcher | None,
) -> StepName:
    """Writes the checkpoint as a new generation. If this ends before the commit, nothing is left."""
    layout = plan_layout(
        [(name, array.dtype, array.shape) for name, array in arrays.items()],
        {"format": "holdfast", "step": str(step)},
    )
    if watcher is not None:
        watcher.expect(layout.size_bytes)
    line = RunWriter(storage, All(), reuse_space=False)
    root = storage.location
    is_new = root is not None and not root.exists()
    name, _ = line.open(Origin(seen_generation=StoredRun(storage).look().generation), step)
    try:
        leaves = _write(storage, name, layout, arrays, watcher)
        _tie_equal(ties, {leaf.name: leaf for leaf in leaves}, arrays)
        index = Index(
            step=name.step,
            generation=name.generation,
            attempt=name.attempt,
            rank=0,
            world_size=1,
            data_bytes=layout.size_bytes,
            header_bytes=len(layout.header),
            header_digest=digest(layout.header),
            span_bytes=SPAN_BYTES,
            leaves=tuple(leaves),
            objects=objects,
            strides=tuple(_list_strides(arrays)),
        )
        receipts = write_index(index, storage, name.directory)
        line.commit(receipts, name, {}, metadata)
    except BaseException as error:
        try:
            line.give_up(name)
            _take_back(storage, name.generation)
            if root is not None and is_new:
                # It may contain files, or be gone.
                with suppress(OSError):
                    root.rmdir()
        except HoldfastError as left:
            error.add_note(f"The partly written import is still there, but is not a checkpoint: {left}")
        raise
    with suppress(HoldfastError):  # No restore needs it: the next start of the job writes it.
        StoredRun(storage).step(name).renew_copy()
    return name


def _take_back(storage: Storage, generation: int) -> None:
    """**Blocks.** Removes the records of a generation in which nothing was saved, unless another has begun since."""
    if max(StoredRun(storage).list_generations(), default=0) == generation:
        # In this order: a crash in between leaves a generation that saved nothing.
        storage.delete([base_path(generation)])
        storage.delete([generation_path(generation), GENERATIONS_DIRECTORY])


def _write(
    storage: Storage,
    name: StepName,
    layout: Layout,
    arrays: Mapping[str, InputArray],
    watcher: ProgressWatcher | None,
) -> list[LeafRecord]:
    """Writes the data file piece by piece, and computes digests on the way."""
    writer = storage.create(f"{name.directory}/{data_name(0, 1)}", layout.size_bytes)
    leaves: list[LeafRecord] = []
    offset_bytes = 0

    def list_parts() -> Iterator[memoryview]:
        yield memoryview(layout.header)
        for place in layout.places:
            spans: list[str] = []
            for span in read_spans(arrays[place.name], SPAN_BYTES):
                spans.append(digest(span))
                yield span
            leaves.append(LeafRecord(place.name, place.dtype, place.shape, place.begin, place.end, "".join(spans)))

    try:
        for piece in _pack(list_parts(), take_pages(choose_piece_bytes(storage.traits, layout.size_bytes))):
            writer.write_at(offset_bytes, piece)
            offset_bytes += len(piece)
            if watcher is not None:
                watcher.advance(len(piece))
        writer.finish()
    finally:
        writer.abandon()
    return leaves


def _pack(parts: Iterable[memoryview], memory: memoryview) -> Iterator[memoryview]:
    """Combines parts to pieces that fill the memory; each piece is valid until the next one is requested."""
    filled = 0
    for part in parts:
        begin = 0
        while begin < len(part):
            count = min(len(part) - begin, len(memory) - filled)
            memory[filled : filled + count] = part[begin : begin + count]
            begin += count
            filled += count
            if filled == len(memory):
                yield memory
                filled = 0
    if filled:
        yield memory[:filled]


def _tie_equal(
    groups: Iterable[Mapping[str, Node]], leaves: Mapping[str, LeafRecord], arrays: Mapping[str, InputArray]
) -> None:
    """Makes equal arrays share one stored array, if the format does not record which were tied.

    Two parameters that were trained separately do not have equal values, unless all values are the same, such as zeros.
    A live module with two parameters gets the values in both; one with a tied parameter would reject two stored arrays.
    """
    for group in groups:
        first: dict[tuple[Any, ...], str] = {}
        for node in group.values():
            leaf = leaves[node["v"]]
            same = first.setdefault((leaf.dtype, leaf.shape, leaf.spans), leaf.name)
            if same != leaf.name and leaf.spans and not _is_constant(arrays[leaf.name]):
                node["v"] = same


def _is_constant(array: InputArray) -> bool:
    """Returns True if all elements of an array are the same bytes."""
    import numpy as np

    kind = f"V{ITEM_BYTES[array.dtype]}"
    element = b""
    for span in read_spans(array, SPAN_BYTES):
        element = element or bytes(span[: ITEM_BYTES[array.dtype]])
        if (np.frombuffer(span, kind) != np.frombuffer(element, kind)).any():
            return False
    return True


def _list_strides(arrays: Mapping[str, InputArray]) -> Iterator[StridesRecord]:
    """Returns the strides of the tensors that are not in row-major order in their file."""
    for name, array in arrays.items():
        layout = find_layout(array.shape, array.chunks[0].tensor.strides) if len(array.chunks) == 1 else None
        if layout is not None:
            yield StridesRecord(name, layout)
