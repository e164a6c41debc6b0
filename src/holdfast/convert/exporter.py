"""Exports a step of a run to files that other programs read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import structs

from holdfast.catalog import Catalog, StoredRun, find_step, split_place
from holdfast.convert.dcp import write_dcp
from holdfast.convert.leaf_stream import LeafReader
from holdfast.convert.leaf_tree import KeyPath, LeftOut, ObjectState, join_objects, list_arrays, list_values, make_tree
from holdfast.convert.safetensors import ADAPTER_CONFIG, DESCRIPTIONS, write_safetensors
from holdfast.convert.torch_file import TORCH_DTYPES, write_torch
from holdfast.errors import DamageError, FormatError, NoCheckpointError, StorageError, UsageError
from holdfast.format.dtypes import ITEM_BYTES, RAW_TYPES
from holdfast.format.encoding import escape
from holdfast.format.names import MAX_STEP, StepName, is_own
from holdfast.numbers import check_whole
from holdfast.process.progress import LongRead
from holdfast.restore.candidates import make_selection
from holdfast.restore.verify import open_step
from holdfast.storage import Storage
from holdfast.tracebacks import short_traceback

FORMATS: Final = ("safetensors", "transformers", "torch", "dcp")
FILE_BYTES: Final = 5_000_000_000
"""The size of one file of several: what the Hugging Face hub recommends."""


_MOST_ATTEMPTS: Final = 30


class ProgressWatcher(Protocol):
    """Receives the progress of an export or an import."""

    def expect(self, total_bytes: int) -> None:
        """Called with the total amount of work."""
        ...

    def advance(self, moved_bytes: int) -> None:
        """Called with the amount that was just done."""
        ...


class ExportOptions(msgspec.Struct, frozen=True):
    """The options of an export; the arguments of `export_checkpoint`."""

    to: str
    only: str | Iterable[str] | None = None
    keep_prefix: bool = False
    repeat_shared: bool = False
    overwrite: bool = False
    file_bytes: int = FILE_BYTES
    threads: int = 3
    watcher: ProgressWatcher | None = None


class Export(msgspec.Struct, frozen=True):
    """The result of an export.

    Attributes:
        step: The step.
        name: The name of the checkpoint.
        out: The path of the export.
        files: The names of the files.
        arrays: How many arrays they contain.
        size_bytes: The size of the arrays, each counted once.
        left_out: What was not exported, and why.
        seconds: How long it took.
    """

    step: int
    name: StepName
    out: str
    files: tuple[str, ...]
    arrays: int
    size_bytes: int
    left_out: tuple[LeftOut, ...]
    seconds: float


@short_traceback
def export_checkpoint(
    run: str | os.PathLike[str] | Storage,
    out: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "transformers", "torch", "dcp"],
    step: int | None = None,
    only: str | Iterable[str] | None = None,
    keep_prefix: bool = False,
    repeat_shared: bool = False,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
    threads: int = 3,
    watcher: ProgressWatcher | None = None,
) -> Export:
    """**Blocks.** Exports a checkpoint of a run to files that other programs read; every byte is checked on the way.

    Memory use does not depend on the size of the checkpoint. The export appears under its name once it is complete.

    Args:
        run: The run's directory, with a step after it or not, such as `runs/gpt@best:val_loss`; a URL, or an open
            storage.
        out: The path to write. For safetensors, a directory, which gets `model.safetensors` or several files and an
            index, or one file, if the name ends in `.safetensors`; for torch a file; for dcp a directory.
        to: The format: `safetensors`; `transformers`, a directory for `from_pretrained`, of a model that the Hugging
            Face Trainer has trained; `torch`, for `torch.load(path, weights_only=True)`; or `dcp`, for
            `torch.distributed.checkpoint`.
        step: The step; None for the newest of the current lineage.
        only: Names of objects (`"model"`) or patterns of leaves (`"model/layers.0.*"`); None for everything.
        keep_prefix: True to keep the object's name as a prefix even if `only` selects a single object.
        repeat_shared: For safetensors, True to write arrays that share memory once under each of their names.
        overwrite: True to replace an existing export.
        file_bytes: The total size of the arrays in one file, if the format allows several files.
        threads: The number of threads that read.
        watcher: Receives the progress; None for a bar on a terminal, if it takes longer than a moment.

    Raises:
        UsageError: If an argument is wrong, or the path already exists.
        NoCheckpointError: If the checkpoint does not exist.
        DamageError: If the checkpoint is damaged.
        StorageError: If the storage fails.
    """
    storage, location, asked = split_place(run)
    if step is not None:
        check_whole("step", step, 0, MAX_STEP)
        if asked is not None:
            raise UsageError(f"{run} names a step, and step={step} another", hint=f"Write {location!r} or omit step.")
    choose = partial(find_step, StoredRun(storage), asked=asked if step is None else step)
    with LongRead("exporting", lambda: 0) as shown:
        watcher = watcher or shown
        options = ExportOptions(to, only, keep_prefix, repeat_shared, overwrite, file_bytes, threads, watcher)
        return export_chosen(storage, choose, Path(out), options)


def export_chosen(
    storage: Storage,
    choose: Callable[[Catalog], StepName],
    out: Path,
    options: ExportOptions,
) -> Export:
    """**Blocks.** Exports a step of a run; chooses another one if a running job has removed it meanwhile.

    Raises:
        UsageError: If an option is wrong, or the path already exists.
        NoCheckpointError: If the checkpoint does not exist, or no longer.
        DamageError: If the checkpoint is damaged.
        StorageError: If the storage fails.
    """
    _check(options)
    run = storage.location
    if run is not None and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(run)):
        raise UsageError(
            f"{out} is inside the run {storage.url}, where an export could damage checkpoints",
            hint="Export to another directory.",
        )
    attempts, gone = 0, None
    while True:
        try:
            name = choose(StoredRun(storage).look())
        except NoCheckpointError as error:
            if gone is None:
                raise
            raise NoCheckpointError(
                f"step {gone.step} of {storage.url} was removed while it was being read",
                hint="Export a step that the running job keeps for longer; `holdfast list` shows the steps.",
            ) from error
        try:
            return export_step(storage, name.directory, name, storage, out, options)
        except (StorageError, DamageError, NoCheckpointError):
            # A running job has removed it, and committed a newer one before: that is not damage.
            if attempts == _MOST_ATTEMPTS or StoredRun(storage).step(name).is_committed():
                raise
        attempts, gone = attempts + 1, name


def export_step(
    storage: Storage,
    directory: str,
    expected: StepName | None,
    beside: Storage | None,
    out: Path,
    options: ExportOptions,
) -> Export:
    """**Blocks.** Exports one step like `export_checkpoint`, given its directory.

    It may be any step if none is `expected`; `beside` is where the steps are that it refers to.

    Raises:
        UsageError: If an option is wrong, or the path already exists.
        DamageError: If the checkpoint is damaged.
        StorageError: If the storage fails.
    """
    begun_at = time.monotonic()
    _check(options)
    opened = open_step(storage, directory, expected)
    step = opened.manifest.step
    joined = join_objects([index.objects for index in opened.indexes])
    objects = {name: node for name, node in joined.items() if not is_own(name)}
    descriptions: dict[str, str] | None = None
    if options.to == "transformers":
        descriptions = find_descriptions(objects, step)
        options = structs.replace(options, only=options.only or "model")
    selection = make_selection(options.only)
    tree, left = make_tree(objects, selection)
    if selection is not None and selection.unmatched:
        raise UsageError(
            f"step {step} has no object or leaf named {', '.join(map(repr, selection.unmatched))}",
            hint=f"Its objects are {', '.join(map(repr, objects))}; a leaf has a name like 'model/head.weight'.",
        )
    inner = None
    if options.only is not None and not options.keep_prefix and len(tree) == 1:
        (inner,) = tree.values()
    advance = options.watcher.advance if options.watcher is not None else None
    with closing(LeafReader(storage, opened, beside, threads=options.threads, advance=advance)) as reader:
        leaves = {array.leaf for _, array in list_arrays(tree)}
        for leaf in leaves - reader.leaves.keys():
            raise FormatError(f"{leaf!r} is referenced but not stored", step=step, tensor=leaf)
        _check_types(reader, leaves, options.to)
        names: dict[str, str] = {}
        if options.to in ("safetensors", "transformers"):
            names, notes = name_arrays(tree, has_prefix=inner is None, repeat_shared=options.repeat_shared)
            left += notes
            if descriptions is not None and ADAPTER_CONFIG in descriptions:
                # The arrays of the default PEFT adapter, with the names that its files use.
                names = {
                    name.replace(".default", "").replace(".modules_to_save", ""): leaf
                    for name, leaf in names.items()
                    if ".default" in name
                }
            if not names:
                raise UsageError(
                    f"the selected part of step {step} contains no array",
                    hint="Safetensors files contain only arrays: use --to torch, or select other objects.",
                )
        if options.watcher is not None:
            options.watcher.expect(sum(reader.leaves[leaf].size_bytes for leaf in names.values() or leaves))
        if options.to in ("safetensors", "transformers"):
            metadata = {"format": "pt", "holdfast.step": str(step)}
            files = write_safetensors(
                *(reader, names, out),
                file_bytes=options.file_bytes,
                metadata=metadata,
                overwrite=options.overwrite,
                beside=descriptions,
            )
        elif options.to == "torch":
            files = write_torch(reader, tree if inner is None else inner, out, overwrite=options.overwrite, left=left)
        else:
            modules = [name for name, one in objects.items() if type(one) is dict and one.get("k") == "torch.module"]
            state = inner.state if type(inner) is ObjectState else inner
            state = state if isinstance(state, dict) else tree
            files = write_dcp(
                *(reader, state, modules, out), file_bytes=options.file_bytes, overwrite=options.overwrite, left=left
            )
        size_bytes = sum(reader.leaves[leaf].size_bytes for leaf in leaves)
    return Export(
        step=step,
        name=opened.name,
        out=str(out),
        files=tuple(files),
        arrays=len(leaves),
        size_bytes=size_bytes,
        left_out=tuple(left),
        seconds=time.monotonic() - begun_at,
    )


def find_descriptions(objects: dict[str, Any], step: int) -> dict[str, str]:
    """**Pure.** Returns the files that describe the model that the Hugging Face Trainer has trained, by name.

    Raises:
        UsageError: If the checkpoint has none.
    """
    tree, _ = make_tree({name: node for name, node in objects.items() if name == "trainer"}, None)
    state = getattr(tree.get("trainer"), "state", None)
    files = state.get("files") if isinstance(state, dict) else None
    known = {name: text for name, text in (files or {}).items() if name in DESCRIPTIONS and isinstance(text, str)}
    if not known:
        raise UsageError(
            f"step {step} does not record which transformers model it contains",
            hint="holdfast.transformers.Resumable records that. Use --to safetensors, and add the model's config.json.",
        )
    return known


def name_arrays(tree: dict[str, Any], *, has_prefix: bool, repeat_shared: bool) -> tuple[dict[str, str], list[LeftOut]]:
    """**Pure.** Names arrays for a flat list of names: by the keys on the way, joined with dots.

    Returns the leaf of each name, and what is left out: an array with several names gets the first one, or with
    `repeat_shared` each of them.

    Raises:
        UsageError: If two arrays get the same name.
    """
    names: dict[str, str] = {}
    paths: dict[str, KeyPath] = {}
    first: dict[str, str] = {}
    left = [LeftOut(_path(keys), "it is not an array") for keys in list_values(tree) if keys]
    for keys, array in list_arrays(tree):
        name = ".".join(map(str, keys if has_prefix or len(keys) == 1 else keys[1:]))
        if name in names:
            raise UsageError(
                f"{_path(paths[name])} and {_path(keys)} would both be named {name!r}",
                hint="Export them one at a time, with --only.",
            )
        paths[name] = keys
        if array.leaf in first and not repeat_shared:
            left.append(LeftOut(_path(keys), f"it is the same array as {first[array.leaf]}, which is written once"))
            continue
        first.setdefault(array.leaf, name)
        names[name] = array.leaf
    return names, left


def _path(keys: KeyPath) -> str:
    return "/".join(escape(str(key)) for key in keys)


def _check(options: ExportOptions) -> None:
    if options.to not in FORMATS:
        raise UsageError(f"{options.to!r} is not an export format", hint=f"Use one of {', '.join(FORMATS)}.")
    check_whole("file_bytes", options.file_bytes, 1)
    check_whole("threads", options.threads, 1)


def _check_types(reader: LeafReader, leaves: Iterable[str], to: str) -> None:
    held = ITEM_BYTES.keys() - RAW_TYPES if to in ("safetensors", "transformers") else TORCH_DTYPES.keys()
    for leaf in sorted(leaves):
        dtype = reader.leaves[leaf].dtype
        if dtype not in held:
            raise UsageError(
                f"{leaf} has dtype {dtype}, which a {to} file cannot contain here",
                hint="Use --to torch, or select other objects."
                if dtype in TORCH_DTYPES
                else "Select other objects; `holdfast show` lists the dtypes.",
            )
