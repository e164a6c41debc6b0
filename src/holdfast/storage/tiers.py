"""A run in several places: each step is saved in the nearest one, and copied on to the farther ones.

Each tier holds the run as a plain storage does, and could be used alone. Seen together, a file is that of the nearest
tier that has it; generations are opened in the farthest tier that can be reached.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from holdfast.errors import (
    DamageError,
    FencedError,
    HoldfastError,
    NotFoundError,
    StorageError,
    StorageFullError,
    UsageError,
)
from holdfast.format.names import (
    DATA_SUFFIX,
    GENERATIONS_DIRECTORY,
    MANIFEST_NAME,
    START_NAME,
    is_part,
    join,
    parse_generation_file,
    parse_step_directory,
    parse_summary_file,
)
from holdfast.numbers import check_whole
from holdfast.policies import RetentionPolicy, read_keep
from holdfast.process.terminal import inform
from holdfast.storage.checks import taking_options_by_name
from holdfast.storage.kept_images import KeptImages
from holdfast.storage.kept_memory import HostMemory, KeptMemory
from holdfast.storage.open import open_storage
from holdfast.storage.protocol import Entry, FileReader, FileWriter, Storage, Traits
from holdfast.storage.tier_records import LEAST_GAP, PARTED_PREFIX, find_parted, list_generations, pass_on, set_aside

_FIRST_REST_SECONDS: Final = 1.0
_MOST_REST_SECONDS: Final = 30.0
"""For so long a tier that could not be reached, or was full, is not tried again: twice as long each time."""

_MEMORY: Final = -1
"""The number of memory among the tiers that data were read from."""

_MOST_GAP: Final = 1_000_000

_T = TypeVar("_T")


@taking_options_by_name
@dataclass(frozen=True)
class Tier:
    """One place of a run in tiers.

    Attributes:
        place: A directory, a URL, or an open storage.
        keep: Which checkpoints to keep there, as in `CheckpointManager`; None for what the manager was given.
        every: Takes only the first checkpoint in each so many steps; None for every checkpoint. The first tier takes
            all.
        most_bytes_per_second: How fast to copy into it; None for as fast as it goes.
    """

    place: str | os.PathLike[str] | Storage
    _: KW_ONLY
    keep: RetentionPolicy | int | str | None = None
    every: int | None = None
    most_bytes_per_second: int | None = None
    policy: RetentionPolicy | None = field(init=False, repr=False)
    storage: Storage = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("every", "most_bytes_per_second"):
            if (value := getattr(self, name)) is not None:
                check_whole(f"Tier({name})", value, 1)
        object.__setattr__(self, "policy", read_keep(self.keep))
        object.__setattr__(self, "storage", open_storage(self.place))

    @property
    def url(self) -> str:
        """The URL of the place."""
        return self.storage.url


class _Down(NamedTuple):
    """Until when a tier is left alone, for how long that is, and why. One that `is_full` is only not written to."""

    until: float = 0.0
    rest_seconds: float = _FIRST_REST_SECONDS / 2
    problem: str = ""
    is_full: bool = False


class Tiers:
    """**Thread-safe.** The tiers of a run as one storage, to be passed wherever a directory is taken.

    Training saves into the first tier, and is free as soon as a save is committed there. In the background each
    checkpoint is copied to the other tiers, and every byte is checked as it passes. A restore takes the newest whole
    checkpoint of the current lineage, and each file of it from the nearest tier that has it.

    `Tiers("/nvme/run", "s3://bucket/run")`: nearest first; `HostMemory()` may come before them. Pass a `Tier` for
    options of a place. Of several workers each may have a first tier of its own, as a disk of its machine is; the last
    tier is one that all of them share.

    As a storage it reads from all tiers and writes into the first; what belongs to a generation goes to all of them.

    Attributes:
        tiers: The tiers, nearest first, without memory.
        memory: The images in memory that outlives this process; None if they are not wanted.
        traits: See `Storage`.
        say: Called with a line if a tier cannot be reached, or has passed what another has.
        first_offering: The first tier whose list of steps counts: the farthest, if workers have a first tier of their
            own, in which each sees only a part of a step.
    """

    def __init__(self, *tiers: HostMemory | Tier | str | os.PathLike[str] | Storage) -> None:
        """Reads and writes nothing yet."""
        places = [one for one in tiers if not isinstance(one, HostMemory)]
        self.tiers = tuple(one if isinstance(one, Tier) else Tier(one) for one in places)
        if len(places) < len(tiers) and not (isinstance(tiers[0], HostMemory) and len(tiers) == len(places) + 1):
            raise UsageError("HostMemory() comes first, and once", hint='For example Tiers(HostMemory(), "/nvme/run").')
        urls = [one.url for one in self.tiers]
        roots = [one.storage.location for one in self.tiers]
        different = {url if root is None else root.resolve() for url, root in zip(urls, roots, strict=True)}
        if len(tiers) == 1 and not urls:
            raise UsageError(
                "HostMemory() alone keeps nothing when the machine is lost",
                hint='Name a place as well: Tiers(HostMemory(), "/nvme/run").',
            )
        if not urls or len(tiers) < 2 or len(different) < len(urls):
            raise UsageError(
                f"Tiers needs two places or more, and different ones, got {', '.join(urls) or 'none'}",
                hint='For example Tiers("/nvme/run", "s3://bucket/run"), nearest first.',
            )
        if any(one.storage.traits.has_tiers for one in self.tiers):
            raise UsageError("a tier cannot have tiers itself", hint="List all places in one Tiers(...).")
        if self.tiers[0].every is not None:
            raise UsageError("the first tier takes every checkpoint", hint="Leave out every=, or set save_every=.")
        if self.tiers[0].most_bytes_per_second is not None:
            raise UsageError("nothing is copied into the first tier", hint="Leave out most_bytes_per_second= there.")
        self.memory = KeptMemory(tiers[0], urls[0]) if isinstance(tiers[0], HostMemory) else None
        self._storages = tuple(one.storage for one in self.tiers)
        shared, self.say = [one.storage.traits for one in self.tiers], inform
        far = shared[-1]
        self.traits = Traits(
            # A late writer is kept out by the nearest tier, which has directories of its own.
            has_directories=False,
            lists_deep=far.lists_deep,
            is_shared=True,
            names_are_consistent=all(traits.names_are_consistent for traits in shared),
            read_parallel=far.read_parallel,
            passes_on=far.passes_on,
            has_tiers=True,
        )
        # Held while records are passed on.
        self._aligning = threading.Lock()
        # Guards the rest, of which none is held during a call of a tier.
        self._lock = threading.Lock()
        self._read: set[int] = set()
        # True if the next generation is to be opened without the farthest tier.
        self._is_alone = False
        self.first_offering = 0
        self._down = [_Down()] * len(urls)
        self._has_said: set[str] = set()
        # From which generation on a tier has gone another way than the farthest one; none if it has not. And those that
        # were set aside: a step of theirs may have appeared later.
        self._parted: list[int | None] = [None] * len(urls)
        self._aside: list[frozenset[int]] = [frozenset()] * len(urls)
        # By tier and path, how often what was read there was damaged.
        self._damages: dict[tuple[int, str], int] = {}

    def __repr__(self) -> str:
        memory = ["HostMemory()"] if self.memory is not None else []
        return f"Tiers({', '.join([*memory, *(repr(one.url) for one in self.tiers)])})"

    @property
    def url(self) -> str:
        """The URL of the nearest tier."""
        return self.tiers[0].url

    @property
    def location(self) -> Path | None:
        """The directory of the nearest tier; None if it has none."""
        return self.tiers[0].storage.location

    @property
    def nearest(self) -> Storage:
        """The tier that saves write into."""
        return self._storages[0]

    def find(self, tier: int | str) -> int:
        """Returns the number of a tier: by its number, -1 for the farthest, or by its place as it was written.

        Raises:
            UsageError: If there is none.
        """
        names = [{one.url, str(one.place).rstrip("/")} for one in self.tiers]
        if isinstance(tier, str):
            found = [number for number, known in enumerate(names) if tier.rstrip("/") in known]
        else:
            found = [*range(len(names))][check_whole("tier", tier, -len(names), len(names) - 1) :][:1]
        if not found:
            known = ", ".join(one.url for one in self.tiers)
            raise UsageError(f"{tier!r} is not a tier of the run", hint=f"They are {known}.")
        return found[0]

    def take_sources(self) -> tuple[str, ...]:
        """Returns the URLs of the tiers whose data were read since the last call."""
        with self._lock:
            read, self._read = sorted(self._read), set()
        return tuple(KeptImages.url if number == _MEMORY else self.tiers[number].url for number in read)

    def is_up(self, number: int) -> bool:
        """Returns True unless a tier could not be reached just now."""
        return self._down[number].is_full or self.takes(number)

    def is_full(self, number: int) -> bool:
        """Returns True if a tier had no room when it was last written to."""
        return self._down[number].is_full

    def takes(self, number: int) -> bool:
        """Returns True unless a tier could not be reached, or was full, when it was last tried."""
        return not self._down[number].until

    def rests_until(self, number: int) -> float:
        """Returns until when a tier is not tried again, by the monotonic clock; 0 if it is."""
        return self._down[number].until

    def hasten(self, number: int) -> float:
        """Lets a tier that is left alone be tried again soon; returns when, by the monotonic clock."""
        with self._lock:
            down = self._down[number]
            self._down[number] = down._replace(until=min(down.until, time.monotonic() + _FIRST_REST_SECONDS))
            return self._down[number].until

    def _end_rests(self) -> None:
        """Lets tiers be tried again that have been left alone long enough.

        Only before a look at the run begins: one that took the steps of one tier, and then the records of two, would
        take old steps for those of the current lineage.
        """
        with self._lock:
            now = time.monotonic()
            self._down = [one._replace(until=one.until * (one.until > now)) for one in self._down]

    def note_down(self, number: int, error: HoldfastError) -> None:
        """Leaves a tier alone for a while, and says so once. One that is full is read from all the same."""
        is_full = isinstance(error, StorageFullError)
        if not (self.takes(number) if is_full else self.is_up(number)):
            return
        with self._lock:
            rest_seconds = min(2 * self._down[number].rest_seconds, _MOST_REST_SECONDS)
            self._down[number] = _Down(time.monotonic() + rest_seconds, rest_seconds, error.message, is_full)
        key, state = f"down {number}", "cannot be reached, and is left alone for a while"
        if is_full:
            key, state = f"full {number}", f"is full, so new checkpoints stay in {self.url} until there is room"
        self._say_once(key, f"{self.tiers[number].url} {state}: {error.message}")

    def note_up(self, number: int) -> None:
        """Forgets that a tier could not be reached, or was full."""
        with self._lock:
            self._down[number] = _Down()
            self._has_said -= {f"down {number}", f"full {number}"}

    def avoid(self, path: str) -> bool:
        """Reads a damaged file from another tier from now on, and others of its step as well, if that one has them.

        Returns:
            False if no other tier has it.
        """
        if self.memory is not None and self.memory.images.forget(path):
            return True
        having = [number for number in self._order(path) if self._has(number, path)] if path else []
        for one in (path, path.partition("/")[0]):
            with self._lock:
                for number in having[:1]:
                    self._damages[number, one] = self._damages.get((number, one), 0) + 1
        return any((number, path) not in self._damages for number in having[1:])

    def align(self, *, begins: bool = True) -> bool:
        """**Blocks.** Makes the records of generations the same in all tiers that can be reached.

        Unless it `begins`, the nearest tier has records already. One that was moved or unmounted is not made again, and
        the result is False.

        What the farthest has others get. What others have opened while it could not be reached it gets, if no job has
        opened a newer generation there. If one has, what the nearer tier has since then is set aside, in a directory of
        its own: it is not in the lineage.

        Raises:
            FencedError: If that was not known when the run was last looked at.
            StorageError: If a storage fails that is not merely out of reach.
        """
        with self._aligning:
            if not (begins or list_generations(self.nearest)):
                return False
            self._end_rests()
            self._align(self._find_farthest())
            return True

    def find_least(self) -> int:
        """**Blocks.** Returns the least number that the next generation may have; 0 for any.

        It is larger than those that were set aside. Where the farthest tier cannot be reached, or is full, it is one
        that no other job will choose meanwhile: a step has the same name in no other line.
        """
        least = max((number + 1 for number in self._list_aside(0)), default=0)
        self._is_alone = not self.takes(len(self.tiers) - 1)
        if self._is_alone:
            gap = LEAST_GAP + int.from_bytes(os.urandom(4), "big") % _MOST_GAP
            least = max([least, *list_generations(self.nearest)[-1:]]) + gap
        return least

    def _list_aside(self, number: int) -> list[int]:
        """Returns the generations that were set aside in a tier."""
        storage = self._storages[number]
        names = [entry.name for entry in storage.list("") if entry.name.startswith(PARTED_PREFIX)]
        return [generation for name in names for generation in list_generations(storage, name)]

    def _align(self, far: int) -> None:
        for number in range(far):
            known, parted, aside = self._parted[number], None, ""
            near, beyond = self._storages[number], self._storages[far]
            with self._reaching(far):
                seen = list_generations(beyond)
                parted = find_parted(near, beyond, seen)
                if parted is not None:
                    aside = set_aside(near, parted)
                    self._parted[number] = None
            if self.takes(far):
                with self._reaching(far):
                    pass_on(near, beyond, seen)
            if self.is_up(far) and (number == 0 or self.takes(number)):
                with self._reaching(far, number):
                    pass_on(beyond, near, list_generations(near))
            if parted is not None:
                text = (
                    f"{self.tiers[number].url}: another job has gone on in {self.tiers[far].url}, so generation "
                    f"{parted} and its steps are not in the lineage; {aside}"
                )
                self._say_once(f"parted {number} {parted}", text)
                if known is None:
                    raise FencedError(text, hint="Start this job again; it resumes from the newest step of the others.")

    def _find_farthest(self) -> int:
        return max(number for number in range(len(self.tiers)) if number == 0 or self.is_up(number))

    def _say_once(self, key: str, text: str) -> None:
        with self._lock:
            if key in self._has_said:
                return
            self._has_said.add(key)
        self.say(text)

    @contextmanager
    def _reaching(self, number: int, goal: int | None = None) -> Iterator[None]:
        """Notes that a farther tier cannot be reached, instead of its error, or that the `goal` of a copy is full."""
        try:
            yield
        except StorageFullError as error:
            if not (full := number if goal is None else goal):
                raise
            self.note_down(full, error)
        except StorageError as error:
            if number == 0:
                raise
            # If it is the nearest that fails, this says so.
            self.nearest.list(GENERATIONS_DIRECTORY)
            self.note_down(number, error)

    # What follows is a `Storage`.

    def make_directory(self, path: str) -> None:
        """**Blocks.** Creates a directory in the nearest tier; that of the generations in all; see `Storage`."""
        for number, storage in enumerate(self._storages):
            if number == 0 or (path == GENERATIONS_DIRECTORY and self.takes(number)):
                with self._reaching(number):
                    storage.make_directory(path)

    def create(self, path: str, size_bytes: int) -> FileWriter:
        """Begins a new file in the nearest tier; see `Storage`."""
        return self.nearest.create(path, size_bytes)

    def write(self, path: str, data: bytes) -> None:
        """**Blocks.** Writes a small file into the nearest tier; see `Storage`."""
        self.nearest.write(path, data)

    def sync_directory(self, path: str) -> None:
        """**Blocks.** Makes names of the nearest tier durable; see `Storage`."""
        self.nearest.sync_directory(path)

    def publish(self, path: str, data: bytes) -> bool:
        """**Blocks.** Makes a small file appear; that of a generation first in the farthest tier, whose answer counts.

        See `Storage`.
        """
        if path == START_NAME:
            return self._storages[-1].publish(path, data)
        is_opening = path.startswith(f"{GENERATIONS_DIRECTORY}/") and parse_generation_file(path.rpartition("/")[2])
        if is_opening and not self._is_alone and not self.takes(len(self.tiers) - 1):
            # The number was chosen for a tier that takes it.
            raise self._make_down_error(-1, path)
        if not path.startswith(f"{GENERATIONS_DIRECTORY}/"):
            return self.nearest.publish(path, data)
        decided = False
        for number in reversed(range(len(self.tiers))):
            # A base never comes to a tier before its opening: it would look there as if another job had gone on.
            if number and (self._is_alone or not self.takes(number)):
                continue
            with self._reaching(number):
                made = self._storages[number].publish(path, data)
                if not decided and not made:
                    return False
                decided = True
            if is_opening and not decided and not self._is_alone:
                raise self._make_down_error(number, path)
        return True

    def read(self, path: str, limit_bytes: int) -> bytes:
        """**Blocks.** Reads a whole small file of the nearest tier that has it; see `Storage`."""
        return self._find(path, lambda storage: storage.read(path, limit_bytes))[1]

    def open_reader(self, path: str) -> FileReader:
        """**Blocks.** Opens a file of the nearest tier that has it; see `Storage`."""
        if self.memory is not None and (image := self.memory.images.find(path)) is not None:
            number, reader = _MEMORY, image
        else:
            number, reader = self._find(path, lambda storage: storage.open_reader(path))
        if path.endswith(DATA_SUFFIX):
            with self._lock:
                self._read.add(number)
        return reader

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        """**Blocks.** Returns what is in a directory of any tier; see `Storage`.

        Raises:
            StorageError: If a tier cannot be reached, and the others have nothing there: of the run's root, no
                committed step of the newest generation that they know. What cannot be reached is not taken for empty,
                and what another machine has saved there not for lost.
        """
        if path == "":
            self._end_rests()
        far = self._find_farthest()
        failure: StorageError | None = None
        if path == "":
            for number in range(len(self.tiers) - 1):
                self._aside[number] = frozenset(self._list_aside(number))
                with self._reaching(far):
                    storages = self._storages[number], self._storages[far]
                    self._parted[number] = (
                        find_parted(*storages, list_generations(storages[1])) if number < far else None
                    )
        found: dict[str, Entry] = {}
        for number in reversed(range(self.first_offering, len(self.tiers))):
            try:
                if number and not self.is_up(number):
                    raise self._make_down_error(number, path)
                entries = self._storages[number].list(path, deep=deep)
            except StorageError as error:
                if number == 0:
                    raise
                self.note_down(number, error)
                failure = error
                continue
            found |= {one.name: one for one in entries if not self._is_hidden(number, join(path, one.name))}
        if failure is not None and (self.first_offering or not (self._has_newest(found) if path == "" else found)):
            raise failure
        return sorted(found.values(), key=lambda entry: entry.name)

    def delete(self, paths: Iterable[str]) -> bool:
        """**Blocks.** Removes files from all tiers; see `Storage`."""
        listed, are_gone = list(paths), True
        for storage in self._storages:
            are_gone = storage.delete(listed) and are_gone
        return are_gone

    def discard(self, paths: Iterable[str], next_bytes: int) -> None:
        """**Blocks.** Removes files of the nearest tier; see `Storage`."""
        self.nearest.discard(paths, next_bytes)

    def retire(self, directory: str) -> str:
        """Returns the directory as it is; see `Storage`."""
        return directory

    def _find(self, path: str, look: Callable[[Storage], _T]) -> tuple[int, _T]:
        """Returns what the first tier has that has it, in the order in which they are to be asked."""
        problem: HoldfastError | None = None
        for number in self._order(path):
            if number and not self.is_up(number):
                problem = problem or self._make_down_error(number, path)
                continue
            try:
                return number, look(self._storages[number])
            except NotFoundError as error:
                problem = problem or error
            except DamageError as error:
                problem = error
            except StorageError as error:
                if number == 0:
                    raise
                self.note_down(number, error)
                # It may be there: it is not said to be missing.
                problem = error if problem is None or isinstance(problem, NotFoundError) else problem
        raise problem or NotFoundError(f"{path} is in no tier", path=path)

    def _order(self, path: str) -> Sequence[int]:
        """Returns the tiers in which a file may be, the best first: those whose copy of it was not found damaged."""
        if path == START_NAME:
            return (len(self.tiers) - 1,)
        directory = path.partition("/")[0]
        first = 0 if is_part(path.rpartition("/")[2]) else self.first_offering
        numbers = [number for number in range(first, len(self.tiers)) if not self._is_hidden(number, path)]
        if not self._damages:
            return numbers

        def rank(number: int) -> tuple[int, int, int]:
            return self._damages.get((number, path), 0), self._damages.get((number, directory), 0), number

        return sorted(numbers, key=rank)

    def _is_hidden(self, number: int, path: str) -> bool:
        """Returns True for what a tier has from a generation on that has parted, and for summaries.

        A summary speaks of the steps of its own tier.
        """
        directory, _, rest = path.partition("/")
        parted = self._parted[number]
        if directory == GENERATIONS_DIRECTORY:
            name = rest.removesuffix(".base.json")
            generation = parse_generation_file(rest) or parse_generation_file(f"{name}.json")
            is_passed = parted is not None and generation is not None and generation >= parted
            return is_passed or parse_summary_file(rest) is not None
        if (step := parse_step_directory(directory)) is None:
            return False
        return (parted is not None and step.generation >= parted) or step.generation in self._aside[number]

    def _make_down_error(self, number: int, path: str) -> StorageError:
        state = "is full" if self._down[number].is_full else "cannot be reached"
        return StorageError(f"{self.tiers[number].url} {state}: {self._down[number].problem}", path=path)

    def _has(self, number: int, path: str) -> bool:
        with suppress(HoldfastError):
            if self.is_up(number):
                self._storages[number].open_reader(path).close()
                return True
        return False

    def _has_newest(self, found: dict[str, Entry]) -> bool:
        """Returns True if a step is committed here of the newest generation that is known here.

        Else another machine may have opened that one, and saved what only the others have.
        """
        newest = max(list_generations(self.nearest), default=0)
        steps = {name: step for name in found if (step := parse_step_directory(name.partition("/")[0])) is not None}
        own = [name for name in reversed(steps) if steps[name].generation == newest]
        if any("/" in name for name in own):
            return any(name.endswith(f"/{MANIFEST_NAME}") for name in own)
        return any(one.name == MANIFEST_NAME for name in own for one in self.nearest.list(name))
