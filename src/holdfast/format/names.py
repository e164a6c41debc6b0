"""The names of files and directories in the format. Pure."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Final, TypeAlias

import msgspec

GENERATIONS_DIRECTORY: Final = "generations"
EVENTS_DIRECTORY: Final = "events"
MANIFEST_NAME: Final = "manifest.json"
COMMITTED_NAME: Final = "committed"
TRASH_PREFIX: Final = ".trash-"
SPARE_NAME: Final = ".holdfast-spare"
DATA_SUFFIX: Final = ".safetensors"
OWN_PREFIX: Final = "$"
"""The prefix of names of objects that holdfast itself adds to a checkpoint. No user's object has such a name."""

RUN_CALLS: Final = OWN_PREFIX + "total_run_calls"
"""The name of a `PreemptionCheckpointHandler`'s count."""

HYPERPARAMETERS: Final = OWN_PREFIX + "hyperparameters"
"""The name of the script's settings of optimizers and schedules."""

FOLLOWED_DATA: Final = OWN_PREFIX + "data"
"""The name of the places in the loaders of `run.batches`."""

OLD_RUN_CALLS: Final = "total_run_calls"
"""The name of that count before holdfast had reserved names."""

IMPORTED_FROM: Final = "imported_from"
"""The key, in the metadata of an imported step, of the source file or directory."""

IMPORTED: Final = "imported"
"""The key, in the same metadata, of the names of its objects, its format, and the framework's progress."""

WENT_BACK: Final = "went_back"
"""The key, in the metadata of a step, of how often training has gone back to it and left out what followed."""

START_NAME: Final = ".holdfast-start"
"""A file in the run's root while a job of several workers begins: the leader writes it, the others must see it."""

MAX_STEP: Final = 10**15
MAX_GENERATION: Final = 10**9
MAX_ATTEMPT: Final = 10**6
MAX_WORKERS: Final = 10**6

# What a record may hold; checked where it is decoded.
StepNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
GenerationNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_GENERATION)]
AttemptNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_ATTEMPT)]
WorldSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

# Leading zeros make names sort as numbers do; a number that needs more digits takes them.
_STEP = re.compile(r"step-([0-9]{9,16})\.g([0-9]{4,10})(?:\.a([0-9]{1,7}))?")
_GENERATION = re.compile(r"([0-9]{4,10})\.json")
_SUMMARY = re.compile(r"([0-9]{4,10})\.summary-([0-9]{4,10})\.json")
_PART = re.compile(r"(?:data|index)-[0-9]{5,7}-of-[0-9]{5,7}\.(?:safetensors|json)")
_GENERATION_TEMPORARY = re.compile(r"\.([0-9]{4,10})(?:\.base|\.summary-[0-9]+)?\.json\.[0-9A-Za-z_-]{1,64}\.tmp")
_METRICS = re.compile(r"metrics-[0-9]{4}\.json")
_TEMPORARY = re.compile(r"\.(?:manifest|metrics-[0-9]{4})\.json\.[0-9A-Za-z_-]{1,64}\.tmp")


class StepName(msgspec.Struct, frozen=True, order=True, gc=False):
    """A checkpoint: the step, the generation that saved it, and the number of the attempt in that generation.

    If a generation saves the same step twice (after a failure, or to replace it), the second save is another attempt,
    so a directory is never written twice.
    """

    step: int
    generation: int
    attempt: int = 1

    @property
    def directory(self) -> str:
        """The name of its directory, such as `step-000000500.g0007` or `step-000000500.g0007.a2`."""
        suffix = "" if self.attempt == 1 else f".a{self.attempt}"
        return f"step-{self.step:09d}.g{self.generation:04d}{suffix}"

    @property
    def manifest_path(self) -> str:
        """The path of its manifest below the run's root."""
        return f"{self.directory}/{MANIFEST_NAME}"

    @property
    def committed_path(self) -> str:
        """The path of the file that proves, if its manifest is lost, that it was committed."""
        return f"{self.directory}/{COMMITTED_NAME}"

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation})"


def is_own(name: str) -> bool:
    """**Pure.** Returns True if an object of that name is holdfast's own, which users need not know."""
    return name.startswith(OWN_PREFIX)


@lru_cache(maxsize=1 << 15)
def parse_step_directory(name: str) -> StepName | None:
    """**Pure.** Returns the checkpoint of a directory's name, or None if it is not such a name.

    Only the canonical spelling counts: two directories are never the same checkpoint. A run with a long history has
    the same names each time, so results are cached.
    """
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step, generation, attempt = int(match[1]), int(match[2]), int(match[3] or 1)
    parsed = StepName(step, generation, attempt)
    in_range = step <= MAX_STEP and 1 <= generation <= MAX_GENERATION and 1 <= attempt <= MAX_ATTEMPT
    return parsed if in_range and parsed.directory == name else None


def find_order_problem(source: StepName, name: StepName) -> str:
    """**Pure.** Returns why one step cannot refer to another; empty if it can.

    A step refers only to earlier ones. So no two steps can refer to each other, and of two that are removed at the same
    time the one that refers to the other can be removed first.
    """
    if source.generation > name.generation or source >= name:
        return f"{source.directory} is not older than {name.directory}, which refers to it"
    return ""


def generation_path(generation: int) -> str:
    """**Pure.** Returns the path of the record that opens a generation."""
    return f"{GENERATIONS_DIRECTORY}/{generation:04d}.json"


def base_path(generation: int) -> str:
    """**Pure.** Returns the path of the record with the step that a generation began from."""
    return f"{GENERATIONS_DIRECTORY}/{generation:04d}.base.json"


def summary_path(generation: int, number: int) -> str:
    """**Pure.** Returns the path of a generation's summary with that number."""
    return f"{GENERATIONS_DIRECTORY}/{generation:04d}.summary-{number:04d}.json"


def events_path(generation: int) -> str:
    """**Pure.** Returns the path of the events of a job that began with a generation, in a bucket."""
    return f"{EVENTS_DIRECTORY}/{generation:04d}.jsonl"


def parse_summary_file(name: str) -> tuple[int, int] | None:
    """**Pure.** Returns the generation and the number in the name of a summary, or None if it is not such a name."""
    match = _SUMMARY.fullmatch(name)
    if match is None:
        return None
    generation, number = int(match[1]), int(match[2])
    is_canonical = (
        1 <= generation <= MAX_GENERATION and number and summary_path(generation, number).endswith(f"/{name}")
    )
    return (generation, number) if is_canonical else None


def parse_generation_file(name: str) -> int | None:
    """**Pure.** Returns the generation that a record of this name opens, or None if it is not such a name."""
    match = _GENERATION.fullmatch(name)
    if match is None:
        return None
    generation = int(match[1])
    canonical = 1 <= generation <= MAX_GENERATION and f"{generation:04d}.json" == name
    return generation if canonical else None


def parse_generation_temporary(name: str) -> int | None:
    """**Pure.** Returns the generation of a half-published record of this name, or None if it is not such a name."""
    match = _GENERATION_TEMPORARY.fullmatch(name)
    return int(match[1]) if match else None


def data_name(rank: int, world_size: int) -> str:
    """**Pure.** Returns the name of a worker's data file."""
    return f"data-{rank:05d}-of-{world_size:05d}{DATA_SUFFIX}"


def index_name(rank: int, world_size: int) -> str:
    """**Pure.** Returns the name of a worker's index."""
    return f"index-{rank:05d}-of-{world_size:05d}.json"


def join(directory: str, name: str) -> str:
    """**Pure.** Returns the path of a file in a directory, which may be the root."""
    return f"{directory}/{name}" if directory else name


def metrics_name(number: int) -> str:
    """**Pure.** Returns the name of a record of metrics that were reported after a save; they count from 0."""
    return f"metrics-{number:04d}.json"


def is_own_file(name: str) -> bool:
    """**Pure.** Returns True for the names that holdfast gives to files in a step's directory, and for no others."""
    is_record = name in (MANIFEST_NAME, COMMITTED_NAME) or _METRICS.fullmatch(name) is not None
    return is_record or is_part(name) or _TEMPORARY.fullmatch(name) is not None


def is_part(name: str) -> bool:
    """**Pure.** Returns True for the names of data files and indexes."""
    return _PART.fullmatch(name) is not None
