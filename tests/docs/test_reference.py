"""The pages of the Python API show every public name, all that users may call of it, and nothing that is private."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import holdfast as hf
import holdfast.storage
from places import ROOT

PAGES: Final = sorted((ROOT / "docs" / "reference" / "python").glob("*.md"))

DIRECTIVE: Final = re.compile(r"^::: (\S+)\n((?:    .*\n?)*)", re.MULTILINE)

MADE_BY_HOLDFAST: Final = {
    *("Run", "SaveHandle", "Restoration", "Reply", "Followed", "Session", "TaskOutput", "RemoteOutput", "Workspace"),
}
"""Classes whose objects users get, and never make: how they are made is not shown."""

STORAGES: Final = {"LocalStorage", "MemoryStorage", "Tiers"}
"""What their methods do is said where `Storage` is shown."""

SESSION: Final = {
    *("bind", "check_open", "make_objects", "note_end", "open_store", "run_placed"),
    *("share", "try_replace", "check_store", "call_all"),
}
DCP: Final = {
    *("reset", "validate_checkpoint_id", "prepare_local_plan", "prepare_global_plan"),
    *("set_up_storage_writer", "write_data", "finish", "set_up_storage_reader", "read_metadata", "read_data"),
}
FOR_HOLDFAST: Final[dict[str, set[str]]] = {
    "Resumable": {
        *(
            "on_init_end",
            "on_train_begin",
            "setup",
            "teardown",
            "on_exception",
            "on_validation_batch_start",
            "on_validation_end",
            "set_model",
        ),
        "on_train_batch_end",
    },
    "HoldfastCheckpointIO": {"save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"},
    **dict.fromkeys(("StorageWriter", "StorageReader"), DCP),
    "CheckpointManager": {
        "mark",
        "abandon",
        "check_ready",
        "describe_cost",
        "follow_epochs",
        "follow_nonfinite",
        "wait_copied",
        "wait_until_free",
    },
    "Job": {"freeze", "named_nodes", "stop_outputs", "stop_group", "has_stop_condition"},
    "MultiNodeCheckpointManager": {
        *("is_ready_for", "init", "choose_epoch", "load", "begin_save", "finish_save", "load_blobs", "tidy"),
    },
    "NodeCheckpointManager": {"init"},
    "ResumableSampler": {"look", "count_complete", "has_taken_last", "skip"},
    "Run": {"save_last", "warn", "pass_boundary", "go_on_by_restart"},
    "SaveHandle": {"copy_seconds", "has_place", "must_be_replaced", "is_joint", "reach", "try_cancel", "wait_served"},
    **dict.fromkeys(("Session", "LocalSession", "TorchrunSession", "RaySession"), SESSION),
    "Task": {"nodes_in", "note_results"},
    "TaskGroup": {"freeze", "include", "named_nodes", "runs_on_all"},
    "Workspace": {"begin_epoch", "note_made", "replace", "was_made", "note_given", "find_unmakeable"},
}
"""Methods by which holdfast's own parts speak with each other, or a framework with them; those that begin with `mark_`
are left out as well."""

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Shown(NamedTuple):
    """What one directive of a page shows."""

    page: str
    path: str
    options: str

    @property
    def members(self) -> set[str]:
        """The methods that are listed. A class without any has `members: false`."""
        listed = re.search(r"^ +members: \[(.*)\]$", self.options, re.MULTILINE)
        return set(listed[1].split(", ")) if listed else set()


def list_shown() -> Iterator[Shown]:
    for page in PAGES:
        for path, options in DIRECTIVE.findall(page.read_text()):
            yield Shown(page.name, path, options)


@cache
def parse(module: str) -> ast.Module:
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def find(module: str, name: str) -> str:
    """Where something is defined, also where a package re-exports it. Nothing is imported: it may need a framework."""
    for node in ast.walk(parse(module)):
        if isinstance(node, (ast.ClassDef, Function)) and node.name == name:
            return f"{module}.{name}"
        if isinstance(node, ast.ImportFrom) and node.module and any(one.name == name for one in node.names):
            return find(node.module, name)
    raise AssertionError(f"{module} has no {name}")


def definition(path: str) -> ast.ClassDef | Function:
    module, _, name = path.rpartition(".")
    (found,) = [node for node in parse(module).body if isinstance(node, (ast.ClassDef, Function)) and node.name == name]
    return found


def public_paths() -> dict[str, str]:
    """The names that users write, each with the place of what is called so."""
    modules = {"errors", "events", "preemption", "__version__", *hf._MODULES}
    homes = {**dict.fromkeys(set(hf.__all__) - modules, "holdfast"), **hf._HOMES}
    paths = {f"holdfast.{name}": find(homes[name], name) for name in set(hf.__all__) - modules}
    for module, home in hf._MODULES.items():
        # What `holdfast.jobs` has is shown as `holdfast.Job` where it is there too; `accelerate.resumable` is another.
        names = set(hf.jobs.__all__) - set(hf.__all__) if module == "jobs" else exported(home)
        paths |= {f"holdfast.{module}.{name}": find(home, name) for name in names}
    for name in ("SavePolicy", "RetentionPolicy"):  # What a policy of a user's own derives from.
        paths[f"holdfast.policies.{name}"] = find("holdfast.policies", name)
    names = set(holdfast.storage.__all__)
    return paths | {f"holdfast.storage.{name}": find("holdfast.storage", name) for name in names}


def exported(module: str) -> list[str]:
    """The list in a module's `__all__`; without one, its public classes and functions."""
    body = parse(module).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return [node.name for node in body if isinstance(node, (ast.ClassDef, Function)) and node.name[0] != "_"]


def test_every_public_name_is_shown_once_under_its_name_and_no_other() -> None:
    shown = {re.search(r'heading: "(.+)"', one.options)[1]: one.path for one in list_shown()}  # type: ignore[index]
    assert len(shown) == len(list(list_shown()))
    assert shown == public_paths()


def test_all_that_users_may_call_is_shown_and_nothing_else() -> None:
    for one in list_shown():
        node = definition(one.path)
        assert ast.get_docstring(node), one.path
        if isinstance(node, ast.ClassDef):
            methods = {part.name for part in node.body if isinstance(part, Function) and ast.get_docstring(part)}
            public = {name for name in methods if not name.startswith(("_", "mark_"))}
            expected = set() if node.name in STORAGES else public - FOR_HOLDFAST.get(node.name, set())
            assert one.members == expected, one.path
            assert bool(one.members) != ("members: false" in one.options), one.path


def test_how_an_object_is_made_is_shown_where_users_make_it() -> None:
    for one in list_shown():
        name = one.path.rpartition(".")[2]
        assert (name in MADE_BY_HOLDFAST) == ("merge_init_into_class: false" in one.options), one.path


def test_what_is_for_holdfast_alone_is_there() -> None:
    shown = {one.path.rpartition(".")[2]: one.path for one in list_shown()}
    assert set(FOR_HOLDFAST) <= set(shown)
