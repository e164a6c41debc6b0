"""The rules of the house: what is public, what may be imported where, how large things are, and what is never done."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import errors, events
from places import PROGRAMS, ROOT, TESTS

SOURCE = ROOT / "src" / "holdfast"
MODULES = sorted(SOURCE.rglob("*.py"))

PUBLIC = [
    "RNG",
    "All",
    "Auto",
    "Backup",
    "Best",
    "Checkpoint",
    "CheckpointManager",
    "Epochs",
    "EveryHours",
    "EveryN",
    "Followed",
    "HostMemory",
    "Job",
    "JobRunner",
    "LastGood",
    "Latest",
    "LocalSession",
    "MultiNodeCheckpointManager",
    "Newer",
    "PerWorker",
    "PreemptionCheckpointHandler",
    "RaySession",
    "Reply",
    "Restoration",
    "ResumableDataLoader",
    "ResumableSampler",
    "Run",
    "SaveHandle",
    "Seconds",
    "Shard",
    "Steps",
    "TerminationConfig",
    "Tier",
    "Tiers",
    "TorchrunSession",
    "UploadTaskGroupBuilder",
    "WorkerTrainingState",
    "__version__",
    "accelerate",
    "ask",
    "dcp",
    "epoch_limiter",
    "errors",
    "events",
    "export_checkpoint",
    "follow",
    "import_checkpoint",
    "init_process_group",
    "jobs",
    "lightning",
    "keras",
    "load",
    "open_storage",
    "pin",
    "preemption",
    "register_codec",
    "register_type",
    "resumable",
    "transformers",
    "unpin",
    "save",
]

MAX_LINES = 600
"""A file holds one idea, as long as that needs: it is neither packed nor split to meet a smaller number."""

MAX_FILES_IN_A_FOLDER = 15
BUDGETS = {
    # The package, the manager, checkpoints, options and errors.
    ".": 2968,
    # A table of rules and four moments.
    "advice": 1507,
    # A stored run: listing, history, fence, commit, survey, deletion, removal.
    "catalog": 3320,
    # Ten verbs, each with one report for a page, a pipe and JSON.
    "cli": 4953,
    # Joining, the store, failures of workers, a barrier.
    "cluster": 2340,
    # Files of torch, safetensors, DCP, Orbax, Lightning and the Trainer, read without trust.
    "convert": 4329,
    # Each event with its text, and what takes events.
    "events": 1175,
    # Names, records, indexes, digests, and values as nodes, with the one walk over them.
    "format": 3570,
    # The package.
    "integrations": 1,
    # The reader and the writer of DCP.
    "integrations/dcp": 950,
    # Lightning, transformers, Keras and Accelerate over one shared part.
    "integrations/frameworks": 4605,
    # Arrays, clusters, modules of NNX.
    "integrations/jax": 629,
    # Sessions of Ray.
    "integrations/ray": 531,
    # Modules, optimizers, tensors, meshes, loaders, and the position in a loader that is only followed.
    "integrations/torch": 4257,
    # Jobs of several tasks, and those of torchrun.
    "jobs": 3293,
    # Saving and retention, as pure functions.
    "policies": 926,
    # Notices, the agreement of workers, the last save.
    "preemption": 5280,
    # Threads, terminal, interrupts, end of the process.
    "process": 1084,
    # A page about a run: what it shows, its charts, its HTML.
    "report": 596,
    # Candidates, one plan of pieces, resharding, verification, copies in another place.
    "restore": 3043,
    # Request, attempt, image, files, and the conversation of several workers.
    "save": 6440,
    # A tree of objects taken apart, captured, and matched.
    "state": 7453,
    # What runs beside a trainer: supervisor, spare and clients, the page that it writes for them, and the watchdog.
    "supervise": 2866,
    # The protocol, memory, and local directories that survive a crash.
    "storage": 4548,
    # The copies of each step in farther tiers, and the start of workers whose first tiers differ.
    "tiering": 1292,
    # Contracts for storages and clusters of others.
    "testing": 1169,
    # The run, its loop, the handler, the state of workers.
    "training": 3279,
    # The ring of repeated steps.
    "witness": 660,
}
"""How many lines a package may have, with what it does. A commit that raises one lowers another, or says in its message
which feature is worth it.

The last growth, and its reasons. catalog: the survey of a run and the plan of a removal, which were the command
line's, and a stored run in place of functions elsewhere. format: the walker of nodes, likewise. advice: pairs that
are forgotten whole, draws that are not saved, modules that change. state and integrations/torch: what samplers count
in containers; the facts of arrays as a table for a restore and a save, and rows of a replay buffer at once both ways.
restore: the verdict on a step, which was the command line's. convert:
lists at the top of a file, and plain values. testing and storage: traits, and the contract for storages without
directories. process: one owner of interrupts. save: the lineage and
the guard of calls, which were the manager's and the options'.
"""

MAX_MODULES = 325

MAX_ATTRIBUTES = 15
"""Attributes that an object of a class has of its own."""

MORE_ATTRIBUTES: dict[str, int] = {}
"""Classes that have more, and how many: none of them may grow, and there are to be no others."""

FRIEND_FUNCTIONS = {
    "checkpoint.py: objects_of",
}
"""Functions that use private attributes of a class of their module: what they do belongs in the class. No others."""

MAX_TOUCHED_MODULES, MAX_TOUCHED_FUNCTIONS, MAX_MORE_TOUCHED_MODULES = 39, 211, 15
"""How many modules and functions a save of one worker calls, and how many modules more that of several. The aim is 36
and 160, and 20 more: what is saved here is never given back."""

IN_EACH_INTEGRATION = {"Resumable"}
"""Classes that each framework's integration has under the same name, as its users look for it."""

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "core", "base", "types", "misc"}

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "dbm", "runpy", "code"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
UNPICKLING = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("pd", "read_pickle"), ("importlib", "__import__")}

RUNS_A_PROGRAM = {"supervise/program.py": frozenset({"runpy", "compile", "exec"})}
"""Modules that run the user's own program, as the interpreter does, and how."""

IMPORT_BY_NAME = {
    "__init__.py",
    "cli/main.py",
    "cluster/discover.py",
    "extras.py",
    "preemption/__init__.py",
    "preemption/consensus/abort.py",
    "save/copy_plan.py",
    "state/match/compare.py",
    "state/registry.py",
    "storage/digesting.py",
    "supervise/program.py",
    "supervise/spare.py",
}
"""These import by name, out of fixed tables: of the verbs, of the integrations; and what is compiled. The spare imports
what the user's own program has imported."""

QUIET = {"torch", "numpy", "jax", "rich", "click", "asyncio"}
"""What `import holdfast` does not import."""

ENGINE = {"holdfast.manager", "holdfast.state", "holdfast.save", "holdfast.restore", "holdfast.storage"}
"""What it leaves to the first use, so that it is quick."""

SEVERAL = {
    "holdfast.cluster.store",
    "holdfast.cluster.peers",
    "holdfast.preemption.consensus.coordinator",
    "holdfast.restore.joint_agreement",
    "holdfast.save.joint.participant",
    "holdfast.save.joint.run_writer",
}
"""What a worker without others does without."""


@cache
def parse(module: Path) -> ast.Module:
    return ast.parse(module.read_text(), str(module))


def list_offences(find: Callable[[Path], Iterable[str]]) -> list[str]:
    """What a rule finds in all modules, each with the module's name: one test for all modules takes less time."""
    return [f"{module.relative_to(SOURCE)}: {offence}" for module in MODULES for offence in find(module)]


def run(command: list[str | Path], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, cwd=directory, capture_output=True, text=True, timeout=120)


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


# What is public.


def test_the_public_list() -> None:
    assert sorted(hf.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(hf))


def public(name: str) -> Any:
    """What is called so, if what it needs is installed."""
    if name == "RaySession":
        pytest.importorskip("ray")
    return getattr(hf, name)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    assert (public(name).__doc__ or "").strip()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_typed(name: str) -> None:
    thing = public(name)
    callables = [thing] if inspect.isfunction(thing) else []
    if inspect.isclass(thing):
        callables = [found for key, found in vars(thing).items() if inspect.isfunction(found) and key[0] != "_"]
    for found in callables:
        signature = inspect.signature(found)
        untyped = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.annotation is parameter.empty and parameter.name != "self"
        ]
        assert not untyped, f"{found.__qualname__}: {untyped}"
        assert signature.return_annotation is not signature.empty, found.__qualname__


# What may be imported.


def test_the_import_contracts_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    ended = run([tool, "--no-cache"], ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_importing_holdfast_is_quiet() -> None:
    program = f"import sys, holdfast; print(sorted({QUIET | ENGINE} & sys.modules.keys()))"
    ended = run([sys.executable, "-c", program], ROOT)
    assert ended.stdout.strip() == "[]", ended.stderr


def test_one_worker_imports_nothing_of_several_and_a_save_no_module() -> None:
    program = f"""
import sys
import holdfast as hf
with hf.resumable("memory://run", count=1) as run:
    before = set(sys.modules)
    for _ in run.steps(2):
        pass
imported = {{name for name in set(sys.modules) - before if name.startswith("holdfast.")}}
print(sorted(imported | {SEVERAL} & sys.modules.keys()))
"""
    ended = run([sys.executable, "-c", program], ROOT)
    assert ended.stdout.strip() == "[]", ended.stdout + ended.stderr


def test_what_runs_beside_a_trainer_imports_the_standard_library_only() -> None:
    found = {
        name
        for module in (SOURCE / "supervise").glob("*.py")
        for name in imported_names(parse(module))
        if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith("holdfast.supervise")
    }
    assert found == set()


def test_nothing_is_unpickled_or_executed() -> None:
    def find(module: Path) -> Iterator[str]:
        tree = parse(module)
        allowed = RUNS_A_PROGRAM.get(str(module.relative_to(SOURCE)), frozenset())
        for name in ({name.partition(".")[0] for name in imported_names(tree)} & FORBIDDEN_IMPORTS) - allowed:
            yield f"it imports {name}"
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            if isinstance(called, ast.Name) and called.id in FORBIDDEN_CALLS - allowed:
                yield f"it calls {called.id} in line {node.lineno}"
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                pair = (called.value.id, called.attr)
                if pair in UNPICKLING:
                    yield f"it calls {ast.unparse(called)} in line {node.lineno}"

    assert list_offences(find) == []


def test_only_these_modules_import_by_name() -> None:
    found = {
        str(module.relative_to(SOURCE))
        for module in MODULES
        for node in ast.walk(parse(module))
        if (isinstance(node, ast.Attribute) and node.attr == "import_module")
        or (isinstance(node, ast.ImportFrom) and node.module == "importlib" and node.names[0].name == "import_module")
    }
    assert found == IMPORT_BY_NAME


# How things are named, and how large they are.


def test_a_module_says_what_it_is_and_is_not_too_long() -> None:
    def find(module: Path) -> Iterator[str]:
        if not (ast.get_docstring(parse(module)) or "").strip():
            yield "it has no docstring"
        if (lines := len(module.read_text().splitlines())) > MAX_LINES:
            yield f"it has {lines} lines"

    assert list_offences(find) == []


def test_a_class_has_at_most_fifteen_attributes() -> None:
    found: dict[str, int] = {}
    for module in MODULES:
        for node in ast.walk(parse(module)):
            if isinstance(node, ast.ClassDef) and len(attributes := list_attributes(node)) > MAX_ATTRIBUTES:
                found[node.name] = len(attributes)
    assert found == MORE_ATTRIBUTES


def list_attributes(node: ast.ClassDef) -> set[str]:
    """What the methods of a class assign to `self`."""
    return {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and isinstance(item.value, ast.Name)
        and item.value.id == "self"
    }


def test_functions_use_no_private_attributes_of_classes() -> None:
    def find(module: Path) -> Iterator[str]:
        tree = parse(module)
        own: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                own |= {name for name in list_attributes(node) | methods if re.match("_[a-z]", name)}
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and own & {
                node.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Attribute)
            }:
                yield function.name

    # Torch's modules have a private dict of the same name.
    found = {offence for offence in list_offences(find) if not offence.startswith("integrations/torch/module_walks.py")}
    assert found == FRIEND_FUNCTIONS


def test_each_class_name_is_defined_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for node in ast.walk(parse(module)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(module.relative_to(SOURCE)))
    assert {name: places for name, places in found.items() if len(places) > 1 and name not in IN_EACH_INTEGRATION} == {}


def test_the_house_and_its_folders_do_not_grow() -> None:
    folders = Counter(module.parent.relative_to(SOURCE) for module in MODULES)
    assert {folder: count for folder, count in folders.items() if count > MAX_FILES_IN_A_FOLDER} == {}
    assert len(MODULES) <= MAX_MODULES


def test_each_package_keeps_to_its_budget() -> None:
    lines: Counter[str] = Counter()
    for module in MODULES:
        lines[package_of(module)] += len(module.read_text().splitlines())
    assert lines.keys() == BUDGETS.keys()
    assert {package: count for package, count in lines.items() if count > BUDGETS[package]} == {}


def package_of(module: Path) -> str:
    """The package that a module's lines count for: a folder of its own, or one of those within the integrations."""
    folders = module.relative_to(SOURCE).parts[:-1]
    return "/".join(folders[: 2 if folders[:1] == ("integrations",) else 1]) or "."


def test_files_are_named_for_a_stage_or_a_thing() -> None:
    def find(module: Path) -> Iterator[str]:
        path = module.relative_to(SOURCE)
        yield from FORBIDDEN_NAMES & {*path.parts[:-1], path.stem}
        packages = ["holdfast", *path.parts[:-1]]
        if any(path.stem == package or path.stem.startswith(f"{package}_") for package in packages):
            yield "it stutters"

    assert list_offences(find) == []


def test_names_of_tests_have_at_most_seventy_characters() -> None:
    names = [
        name
        for module in TESTS.rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", module.read_text(), re.MULTILINE)
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name) > 70] == []


def test_tests_are_in_folders_and_import_no_other_tests() -> None:
    assert [module.name for module in TESTS.glob("*.py")] == ["conftest.py"]
    modules = sorted(TESTS.rglob("test_*.py"))
    assert [name for name, count in Counter(module.name for module in modules).items() if count > 1] == []
    names = {module.stem for module in modules}
    assert [module for module in modules if names.intersection(imported_names(parse(module)))] == []


def test_no_text_speaks_of_where_it_was_made() -> None:
    texts = [*MODULES, *TESTS.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    for text in texts:
        assert f"{ROOT}/" not in text.read_text(), text


# Errors and events.


def error_classes() -> list[type[BaseException]]:
    """All error classes that holdfast defines, wherever they stand, but for those of its own tests' tools."""
    found: set[type[BaseException]] = set()
    for info in pkgutil.walk_packages(hf.__path__, "holdfast."):
        if info.name.startswith(("holdfast.testing", "holdfast.integrations")):
            continue
        module = importlib.import_module(info.name)
        found |= {
            thing
            for thing in vars(module).values()
            if inspect.isclass(thing) and issubclass(thing, BaseException) and thing.__module__ == info.name
        }
    return sorted(found, key=lambda error: error.__name__)


def test_public_errors_have_one_base_class_and_are_documented() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for error in error_classes():
        if error.__module__ == "holdfast.errors":
            assert issubclass(error, errors.HoldfastError)
            assert f"| `{error.__name__}` |" in page, f"{error.__name__} is not in docs/reference/errors.md"
    elsewhere = {error.__name__ for error in error_classes() if error.__module__ != "holdfast.errors"}
    # Each is caught by the module's own package, and never reaches a user, but for the exits, which are `SystemExit`s.
    assert elsewhere <= {
        "LeavingExit",
        "EarlyExit",
        "Malformed",
        "CannotPublishError",
        "PeerFailedError",
        "LeftOutError",
        "CalledOffError",
        "_AbandonedError",
        "_CommittedError",
        "_StoppedError",
    }


def test_errors_carry_what_their_page_says() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for error in error_classes():
        if error.__module__ == "holdfast.errors":
            own = {
                name
                for name in inspect.signature(error).parameters
                if name not in ("message", "hint", "args", "kwargs")
            }
            line = next(line for line in page.splitlines() if line.startswith(f"| `{error.__name__}` |"))
            inherited = "as `" in line or issubclass(error, errors.StorageError)
            assert inherited or all(f"`{name}`" in line for name in own), f"{error.__name__}: {own}"


def test_every_event_and_each_of_its_fields_is_on_its_page() -> None:
    page = (ROOT / "docs" / "reference" / "events.md").read_text()
    kinds = [thing for thing in vars(events).values() if inspect.isclass(thing) and issubclass(thing, events.Event)]
    assert len(kinds) > 5
    for kind in kinds:
        if kind is events.Event:
            continue
        tag = msgspec.inspect.type_info(kind).tag  # type: ignore[attr-defined]
        line = next((line for line in page.splitlines() if line.startswith(f"| `{kind.__name__}` | `{tag}` |")), "")
        assert line, f"{kind.__name__} is not in docs/reference/events.md"
        for field in kind.__struct_fields__:
            assert field == "at_unix_seconds" or f"`{field}`" in line, f"{kind.__name__}.{field}"


def test_no_storage_is_named_outside_of_its_package() -> None:
    """All else takes a `Storage`, and asks `holdfast.storage` what it has to know of where that lies."""
    allowed = {"storage", "cli", "testing", "demo", "bench"}
    for module in MODULES:
        if module.relative_to(SOURCE).parts[0] not in allowed:
            names = {node.id for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Name)}
            assert not names & {"LocalStorage", "MemoryStorage"}, module


# How far one has to walk.


def test_a_save_touches_few_modules_and_functions() -> None:
    """A real save of one worker, and one of two, on all threads."""
    program = PROGRAMS / "touched_worker.py"
    alone = json.loads(run([sys.executable, program, "alone"], ROOT).stdout)
    joint = json.loads(run([sys.executable, program, "joint"], ROOT).stdout)
    counts = {"modules": len(alone), "functions": sum(map(len, alone.values())), "more": len(joint.keys() - alone)}
    assert counts["modules"] <= MAX_TOUCHED_MODULES, counts
    assert counts["functions"] <= MAX_TOUCHED_FUNCTIONS, counts
    assert counts["more"] <= MAX_MORE_TOUCHED_MODULES, counts
