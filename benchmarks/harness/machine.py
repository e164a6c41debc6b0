"""The machine, in words that name no particular one."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

_PACKAGES: Final = (
    "torch",
    "safetensors",
    "torch_checkpointing",
    "orbax-checkpoint",
    "jax",
    "tensorflow-cpu",
    "lightning",
    "transformers",
    "keras",
    "flax",
    "numpy",
    "xxhash",
)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run took place.

    Attributes:
        processor: The processor's model.
        cores: How many cores a process may use.
        memory_bytes: The memory.
        file_system: The kind of file system that was written to.
        system: The operating system's kernel.
        versions: Of Python and of packages, by name.
    """

    processor: str
    cores: int
    memory_bytes: int
    file_system: str
    system: str
    versions: dict[str, str]

    def is_like(self, other: Machine) -> bool:
        """**Pure.** True if figures of both may be shown together: what is installed on both is of one version."""
        mine, others = self.versions, other.versions
        return replace(self, versions={}) == replace(other, versions={}) and all(
            mine[name] == others[name] for name in mine.keys() & others.keys()
        )

    def differences(self, other: Machine) -> str:
        """**Pure.** In what `other` is not like this one."""
        mine, others = self.versions, other.versions
        pairs = [(key, getattr(self, key), getattr(other, key)) for key in self.__struct_fields__ if key != "versions"]
        pairs += [(name, mine[name], others[name]) for name in mine if name in others]
        return ", ".join(
            f"{key.replace('_', ' ')} {one}, here {another}" for key, one, another in pairs if one != another
        )

    def joined(self, other: Machine) -> Machine:
        """**Pure.** This one, with what is installed there as well."""
        return replace(self, versions={**other.versions, **self.versions})


def describe_machine(directory: Path) -> Machine:
    """This machine, and the file system of an existing directory."""
    versions = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        file_system=_file_system(directory),
        # Without what a distribution or a host adds to the version.
        system=f"{platform.system()} {platform.release().partition('-')[0]}",
        versions=versions,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _file_system(directory: Path) -> str:
    """The type of the mount with the longest path above the directory."""
    place = directory.resolve()
    kind, longest = "unknown", -1
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        _, mount, mounted, *_ = line.split()
        # Of two mounts at one place, the later one is what is seen.
        if place.is_relative_to(mount) and len(mount) >= longest:
            kind, longest = mounted, len(mount)
    return kind
