"""What kind of file system a directory lies on, and how much room it has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.storage.failures import as_storage_errors

_MOUNTS: Final = Path("/proc/self/mountinfo")
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYERED: Final = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
_SHARED: Final = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "virtiofs"),
        *("ceph", "fuse.ceph", "fuse.ceph-fuse", "glusterfs", "fuse.glusterfs", "lustre", "beegfs", "gpfs", "wekafs"),
        *(
            "fuse.sshfs",
            "fuse.s3fs",
            "fuse.mount-s3",
            "fuse.gcsfuse",
            "fuse.blobfuse",
            "fuse.blobfuse2",
            "fuse.juicefs",
        ),
        *("fuse.goofys", "fuse.rclone", "orangefs", "pvfs2", "ocfs2", "gfs2"),
    }
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What a directory lies on.

    Attributes:
        kind: What the system calls it, such as `ext4`; empty if that is not known.
        source: The device or the server; empty if that is not known.
        mount_point: Where it is mounted; empty if that is not known.
        free_bytes: How much may still be written there; None if it does not say.
        total_bytes: How large it is; None if it does not say.
    """

    kind: str
    source: str
    mount_point: str
    free_bytes: int | None
    total_bytes: int | None

    @property
    def is_in_memory(self) -> bool:
        """Whether what lies there ends with the machine's next start."""
        return self.kind in _IN_MEMORY

    @property
    def is_layered(self) -> bool:
        """Whether it may be a layer of a container, which ends with that."""
        return self.kind in _LAYERED

    @property
    def is_shared(self) -> bool:
        """Whether it lies behind a network, or is shared by several machines."""
        return self.kind in _SHARED


def look_up(directory: Path) -> FileSystem:
    """**Blocks.** What a directory lies on.

    Raises:
        StorageError: If it cannot be asked.
    """
    with as_storage_errors("look at", "", directory):
        place = directory.resolve(strict=True)
        status = os.statvfs(place)
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        mounts = []  # Another system than Linux.
    kind, source, mount_point = find_mount(mounts, place)
    # Some network file systems say zero for everything.
    known = status.f_blocks > 0
    return FileSystem(
        kind=kind,
        source=source,
        mount_point=mount_point,
        free_bytes=status.f_bavail * status.f_frsize if known else None,
        total_bytes=status.f_blocks * status.f_frsize if known else None,
    )


def find_mount(mounts: Iterable[str], place: Path) -> tuple[str, str, str]:
    """**Pure.** The kind, source and mount point of what is mounted over a place; empty if nothing is known.

    Args:
        mounts: The lines of Linux's `mountinfo`.
        place: A path without links.
    """
    found = ("", "", "")
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, sources = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(sources) < 2:
            continue
        mount_point = _unescape(fields[4])
        # Of two that are mounted over each other the later one is seen.
        if place.is_relative_to(mount_point) and len(mount_point) >= len(found[2]):
            found = (sources[0], _unescape(sources[1]), mount_point)
    return found


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
