"""Makes `docs/reference/python.md` of the docstrings, without importing what they stand in.

python tests/reference_page.py writes it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

import holdfast as hf

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "reference" / "python.md"

_INTRODUCTION: Final = """# Python

Everything that `import holdfast as hf` gives, made of the docstrings. The guides show how it is used; this page says
what each part takes, does and raises. **Collective** is what all workers of a job have to call; what **blocks** may
wait for a disk or for other workers. What is not on this page is no part of the interface, and may change.

[`hf.errors`](errors.md) and [`hf.events`](events.md) have pages of their own. What begins with `jobs.` is in `hf.jobs`.
"""

_GROUPS: Final = {
    "A run": ["resumable", "Run"],
    "Saving and restoring": ["CheckpointManager", "Checkpoint", "SaveHandle", "Restoration"],
    "One tree": ["save", "load"],
    "When to save, and what to keep": ["Steps", "Seconds", "Auto", "All", "Latest", "Newer", "EveryN", "Best"],
    "State": [
        "PerWorker",
        "Shard",
        "RNG",
        "ResumableSampler",
        "ResumableDataLoader",
        "register_type",
        "register_codec",
    ],
    "Leaving in time": ["PreemptionCheckpointHandler", "TerminationConfig"],
    "Process groups": ["init_process_group"],
    "Files of other programs": ["export_checkpoint", "import_checkpoint"],
    "Epochs and worker state": ["WorkerTrainingState", "Backup"],
    "Jobs of several nodes": [
        "Job",
        "JobRunner",
        "MultiNodeCheckpointManager",
        "UploadTaskGroupBuilder",
        "epoch_limiter",
        "LocalSession",
        "TorchrunSession",
        "RaySession",
        "jobs.Session",
        "jobs.Task",
        "jobs.TaskGroup",
        "jobs.TaskOutput",
        "jobs.RemoteOutput",
        "jobs.Workspace",
        "jobs.Counter",
        "jobs.NodeCheckpointManager",
        "jobs.MetadataHandler",
        "jobs.ManifestMetadataHandler",
        "jobs.NodeDurations",
        "jobs.UploadTo",
        "jobs.JobResult",
    ],
    "Frameworks": [
        "lightning.Resumable",
        "lightning.HoldfastCheckpointIO",
        "transformers.Resumable",
        "accelerate.resumable",
        "keras.Resumable",
        "keras.BackupAndRestore",
        "dcp.StorageWriter",
        "dcp.StorageReader",
    ],
    "A storage of your own": [
        "storage.open_storage",
        "storage.Storage",
        "storage.FileWriter",
        "storage.FileReader",
        "storage.Entry",
    ],
}

_MADE_BY_HOLDFAST: Final = {"Run", "SaveHandle", "Restoration", "Session", "TaskOutput", "RemoteOutput", "Workspace"}
"""Classes whose objects users get, and never make: how they are made is not shown."""

_SESSION: Final = {
    *("bind", "check_open", "make_objects", "note_end", "open_store", "run_placed"),
    *("share", "try_replace"),
}
_DCP: Final = {
    *("reset", "validate_checkpoint_id", "prepare_local_plan", "prepare_global_plan"),
    *("set_up_storage_writer", "write_data", "finish", "set_up_storage_reader", "read_metadata", "read_data"),
}
_INTERNAL: Final = {
    "Resumable": {
        *("on_init_end", "on_train_begin", "on_epoch_begin", "on_epoch_end", "on_log", "on_prediction_step"),
        *("setup", "teardown", "on_exception", "on_validation_batch_start", "on_validation_end", "set_model"),
    },
    "HoldfastCheckpointIO": {"save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"},
    **dict.fromkeys(("StorageWriter", "StorageReader"), _DCP),
    "SaveHandle": {"has_place", "must_be_replaced"},
    **dict.fromkeys(("Session", "LocalSession", "TorchrunSession", "RaySession"), _SESSION),
    "Task": {"nodes_in", "note_results"},
    "TaskGroup": {"freeze", "include", "named_nodes", "runs_on_all"},
    "Workspace": {"begin_epoch", "note_made", "replace", "was_made"},
}
"""Methods by which holdfast's own parts speak with each other; those that begin with `mark_` are left out as well."""

_SECTION: Final = re.compile(r"^(Example|Args|Attributes|Returns|Raises|Yields):$", re.MULTILINE)
_WIDTH: Final = 100

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def make_page() -> str:
    """The page, as Markdown."""
    named = {name for names in _GROUPS.values() for name in names}
    modules = {"errors", "events", "preemption", "__version__", *hf._MODULES}
    wanted = {*hf.__all__, *(f"jobs.{name}" for name in hf.jobs.__all__ if name not in hf.__all__)}
    missing = wanted - named - modules
    assert not missing, f"in no group of the page: {missing}"
    return "\n".join([_INTRODUCTION, *(line for group in _GROUPS for line in _group(group))])


def _group(title: str) -> Iterator[str]:
    yield f"## {title}\n"
    for name in _GROUPS[title]:
        node, module = _find(name)
        yield f"### {name}\n"
        if isinstance(node, ast.ClassDef):
            yield from _class(node, name, module)
        else:
            yield from _described(node, name, module)


def _class(node: ast.ClassDef, name: str, module: str) -> Iterator[str]:
    methods = [part for part in node.body if isinstance(part, _Function)]
    begin = next((part for part in methods if part.name == "__init__"), None)
    is_protocol = any(ast.unparse(one) == "Protocol" for one in node.bases)
    if node.name not in _MADE_BY_HOLDFAST and not is_protocol:
        if begin is not None:
            yield from _fenced(_signature(begin, name, module))
        elif fields := [part for part in node.body if isinstance(part, ast.AnnAssign) and not _is_private(part)]:
            first = ["*"] if _is_keyword_only(node) else []
            yield from _fenced(_call(name, [*first, *(_parameter(part, part.value, module) for part in fields)], ""))
    yield from _text(ast.get_docstring(node))
    if begin is not None and node.name not in _MADE_BY_HOLDFAST:
        yield from _text(ast.get_docstring(begin), without_first=True)
    for method in methods:
        if _is_for_users(node.name, method.name) and ast.get_docstring(method):
            yield f"#### {node.name}.{method.name}\n"
            yield from _described(method, f".{method.name}", module)


def _is_for_users(class_name: str, name: str) -> bool:
    return not name.startswith(("_", "mark_")) and name not in _INTERNAL.get(class_name, ())


def _is_keyword_only(node: ast.ClassDef) -> bool:
    """Whether the fields of a dataclass or a msgspec struct can be given by name only."""
    calls = [one for one in node.decorator_list if isinstance(one, ast.Call)]
    keywords = [*node.keywords, *(keyword for call in calls for keyword in call.keywords)]
    return any(one.arg == "kw_only" and ast.unparse(one.value) == "True" for one in keywords)


def _described(node: _Function, name: str, module: str) -> Iterator[str]:
    if not any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
        yield from _fenced(_signature(node, name, module))
    yield from _text(ast.get_docstring(node))


def _signature(node: _Function, name: str, module: str) -> str:
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    # A function's first argument may be called `cls` too; it is a method's alone that callers do not give.
    begin = 1 if plain and plain[0].arg in ("self", "cls") and node not in _parse(module).body else 0
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + [*given.defaults]
    parts = [_parameter(one, default, module) for one, default in zip(plain, defaults, strict=True)]
    if len(given.posonlyargs) > begin:
        parts.insert(len(given.posonlyargs), "/")
    parts = parts[begin:]
    if given.vararg:
        parts.append(f"*{ast.unparse(given.vararg)}")
    elif given.kwonlyargs:
        parts.append("*")
    parts += [
        _parameter(one, default, module) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        parts.append(f"**{ast.unparse(given.kwarg)}")
    ends = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return _call(name, parts, ends)


def _parameter(one: ast.arg | ast.AnnAssign, default: ast.expr | None, module: str) -> str:
    name = one.arg if isinstance(one, ast.arg) else ast.unparse(one.target)
    kind = f": {ast.unparse(one.annotation)}" if one.annotation else ""
    if default is None:
        return name + kind
    if isinstance(default, ast.Call) and ast.unparse(default.func).endswith("field"):
        (keyword,) = default.keywords
        shown = f"{ast.unparse(keyword.value)}()" if keyword.arg == "default_factory" else ast.unparse(keyword.value)
    else:
        # Whoever reads the page wants to know how long that is.
        shown = ast.unparse(_resolve(default, module))
    return f"{name}{kind} = {shown}" if kind else f"{name}={shown}"


def _resolve(value: ast.expr, module: str) -> ast.expr:
    """The value of a constant as the module knows it that uses it; any other value as it is."""
    if not isinstance(value, ast.Name):
        return value
    for node in _parse(module).body:
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == value.id:
            return _resolve(node.value, module)
        if isinstance(node, ast.Assign) and value.id in map(ast.unparse, node.targets):
            return _resolve(node.value, module)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if value.id == (alias.asname or alias.name) and node.module.startswith("holdfast"):
                    return _resolve(ast.Name(alias.name), node.module)
    return value


def _call(name: str, parts: list[str], ends: str) -> str:
    line = f"{name}({', '.join(parts)}){ends}"
    return line if len(line) <= _WIDTH else "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){ends}"])


def _fenced(text: str) -> Iterator[str]:
    yield f"```text\n{text}\n```\n"


def _text(docstring: str | None, *, without_first: bool = False) -> Iterator[str]:
    """A docstring's paragraphs, and its sections as lists."""
    pieces = _SECTION.split(docstring or "")
    if not without_first and pieces[0].strip():
        yield pieces[0].strip() + "\n"
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        body, *behind = re.split(r"\n(?=\S)", body, maxsplit=1)
        if title == "Example":
            yield textwrap.dedent(body).strip() + "\n"
            yield from (text.strip() + "\n" for text in behind)
            continue
        yield f"{title}:\n"
        # An entry begins where the section's own indentation does; what is indented more goes on with it.
        for entry in re.split(r"\n    (?=\S)", body.rstrip()):
            words = " ".join(entry.split())
            named = re.match(r"(\*{0,2}\w+): (.*)", words)
            if words:
                yield f"- `{named[1]}`: {named[2]}" if named and title != "Returns" else f"- {words}"
        yield ""


def _find(name: str) -> tuple[ast.ClassDef | _Function, str]:
    """A definition, and the module that it is in."""
    module, _, part = name.rpartition(".")
    if module:
        return _find_in(hf._MODULES.get(module, f"holdfast.{module}"), part)
    home = hf._HOMES.get(name) or ("holdfast.checkpoint" if name == "Checkpoint" else "holdfast.policies")
    return _find_in(home, name)


def _find_in(module: str, name: str) -> tuple[ast.ClassDef | _Function, str]:
    """As `_find`, also where a package only hands it on."""
    for node in ast.walk(_parse(module)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return node, module
        if isinstance(node, ast.ImportFrom) and node.module and any(one.name == name for one in node.names):
            return _find_in(node.module, name)
    raise AssertionError(f"{module} has no {name}")


@cache
def _parse(module: str) -> ast.Module:
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _is_private(part: ast.AnnAssign) -> bool:
    return ast.unparse(part.target).startswith("_") or "ClassVar" in ast.unparse(part.annotation)


if __name__ == "__main__":
    PAGE.write_text(make_page())
