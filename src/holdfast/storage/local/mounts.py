"""The file system of a directory: its type, and whether it is a bucket that a program mounts by FUSE."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_MOUNTS: Final = Path("/proc/self/mountinfo")
_URLS: Final = {
    "mountpoint-s3": "s3://",
    "s3fs": "s3://",
    "goofys": "s3://",
    "geesefs": "s3://",
    "gcsfuse": "gs://",
    "blobfuse": "az://",
    "blobfuse2": "az://",
}
"""The programs that mount buckets, and the scheme of the URL to use instead."""


class Mount(NamedTuple):
    """The file system of a directory.

    Attributes:
        kind: Its type, as Linux names it; `unknown` if Linux does not list it.
        source: What is mounted: a device, or what a program says.
    """

    kind: str
    source: str = ""

    @property
    def bucket_hint(self) -> str:
        """Advice if it is a bucket, with the program that mounts it; empty if it is none."""
        names = {self.kind.partition(".")[2], self.source} if self.kind.partition(".")[0] == "fuse" else set()
        for program in sorted(names & _URLS.keys()):
            return (
                f"This is a bucket, mounted by {program}, without atomic renames and links. Use {_URLS[program]} "
                "instead: give the bucket's URL in place of the directory."
            )
        return ""


def find_mount(directory: Path) -> Mount:
    """**Blocks.** Returns the file system of a directory, or of the nearest one above it that exists."""
    with suppress(OSError):
        place = next(place for place in (directory, *directory.absolute().parents) if os.path.exists(place))  # noqa: PTH110
        return parse_mounts(_MOUNTS.read_text(errors="surrogateescape"), place.stat().st_dev)
    return Mount("unknown")


def parse_mounts(text: str, device: int) -> Mount:
    """**Pure.** Finds a device in the text of `/proc/self/mountinfo`."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ")[2:3] == [number]:
            kind, source, *_ = after.split(" ")
            return Mount(kind, source)
    return Mount("unknown")
