"""Tries all that a job does in a bucket, measures it, and removes what it has written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Final

import numpy as np

from holdfast.cli.findings import PREFIX, Finding, Status
from holdfast.errors import StorageError
from holdfast.format.digests import digest
from holdfast.numbers import size_text, time_text
from holdfast.restore.read import open_pool
from holdfast.storage.objects import NOT_ALLOWED, ObjectStorage
from holdfast.storage.protocol import PIECE_BYTES

_SMALL: Final = 5
_LEAST_PIECES: Final = 2
_MOST_PIECES: Final = 8
_TRIAL_SECONDS: Final = 5.0
"""How long the upload should take: a slow connection moves fewer pieces."""
_CLOCK_SECONDS: Final = 60.0
"""Services refuse requests whose time is off by 5 to 15 minutes."""

_PERMISSIONS: Final = {
    "s3": {"list": "s3:ListBucket", "write": "s3:PutObject", "read": "s3:GetObject", "remove": "s3:DeleteObject"},
    "gs": {way: f"storage.objects.{name}" for way, name in
           (("list", "list"), ("write", "create"), ("read", "get"), ("remove", "delete"))},
    "az": {way: f"Microsoft.Storage/storageAccounts/blobServices/containers/blobs/{name}" for way, name in
           (("list", "read"), ("write", "write"), ("read", "read"), ("remove", "delete"))},
}  # fmt: skip
"""By scheme, the permission that each thing needs, as its cloud names it."""

_REMAINS: Final = {
    "s3": "A killed upload leaves parts that no listing shows. Let the service remove them, once for the bucket:\n"
    "  aws s3api put-bucket-lifecycle-configuration --bucket {bucket} --lifecycle-configuration "
    '\'{{"Rules": [{{"ID": "uploads", "Status": "Enabled", "Filter": {{}}, '
    '"AbortIncompleteMultipartUpload": {{"DaysAfterInitiation": 1}}}}]}}\'',
    "gs": "A killed upload leaves parts that no listing shows. Let the service remove them, once for the bucket:\n"
    '  echo \'{{"rule": [{{"condition": {{"age": 1}}, "action": {{"type": "AbortIncompleteMultipartUpload"}}}}]}}\' '
    "> rule.json; gcloud storage buckets update gs://{bucket} --lifecycle-file=rule.json",
    "az": "A killed upload leaves blocks that no listing shows. Azure removes them after a week.",
}


@dataclass
class BucketExamination:
    """Uses a prefix of a bucket as a job does. The names of figures end with their units."""

    storage: ObjectStorage
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    _denied: list[str] = field(default_factory=list)

    @property
    def remains_rule(self) -> str:
        """The way to remove remains of uploads."""
        scheme, _, rest = self.storage.url.partition("://")
        return _REMAINS[scheme].format(bucket=rest.partition("/")[0])

    def examine(self, label: Callable[[str], None]) -> None:
        """**Blocks.** Tries everything, and removes it; `label` is called with what is being done.

        Raises:
            StorageError: If the service cannot be reached, or knows neither the bucket nor the credentials.
        """
        trial = f"{PREFIX}{os.urandom(6).hex()}"
        label("looking at the bucket")
        with self._allowed("list"):
            self.storage.list(trial)
        try:
            with self._allowed("write"):
                self._look_at_publishing(trial)
            if "write" not in self._denied:
                with self._allowed("read"):
                    self._look_at_clock(trial)
                    self._measure(trial, label)
        finally:
            left = [
                f"{trial}/{name}"
                for name in ("large", "small", "clock", *(f"published-{number}" for number in range(_SMALL)))
            ]
            # It looks for what is left, by a listing.
            with suppress(StorageError) if "list" in self._denied else self._allowed("remove"):
                self.storage.delete(left)
        names = [_PERMISSIONS[self.storage.url.partition("://")[0]][way] for way in dict.fromkeys(self._denied)]
        if names:
            hint = f"the credentials lack {', '.join(names)}"
            hint += (
                f"; the trial's objects below {trial} stay"
                if {"remove", "write"} & {*self._denied} == {"remove"}
                else ""
            )
            self._note("permissions", "unfit", f"{', '.join(names)} denied", hint)
        else:
            self._note("permissions", "ok", "list, read, write and remove")

    def _note(self, name: str, status: Status, text: str, hint: str = "") -> None:
        self.findings.append(Finding(name, status, text, hint))

    @contextmanager
    def _allowed(self, way: str) -> Iterator[None]:
        """Notes if the body is not allowed to do what it does; other errors are raised."""
        try:
            yield
        except StorageError as error:
            if error.hint != NOT_ALLOWED:
                raise
            self._denied.append(way)

    def _look_at_publishing(self, trial: str) -> None:
        samples = []
        for number in range(_SMALL):
            begun_at = time.perf_counter()
            self.storage.publish(f"{trial}/published-{number}", b"first")
            samples.append(time.perf_counter() - begun_at)
        self.figures["publish_seconds"] = median(samples)
        with self._allowed("read"):
            is_replaced = self.storage.publish(f"{trial}/published-0", b"other")
            if is_replaced or self.storage.read(f"{trial}/published-0", 100) != b"first":
                hint = "the service ignores If-None-Match: two jobs could overwrite each other's checkpoints"
                self._note("create-only", "unfit", "it replaces objects", hint)
            else:
                self._note(
                    "create-only", "ok", f"objects are not replaced; {time_text(median(samples))} for a small one"
                )

    def _look_at_clock(self, trial: str) -> None:
        """Compares with the time of an object that was written just now, which services give in whole seconds."""
        path, before = f"{trial}/clock", time.time()
        self.storage.write(path, b"x")
        written_at = self.storage.modified_at(path)
        ahead_seconds = max(written_at - time.time(), 0.0) or min(written_at + 1 - before, 0.0)
        self.figures["clock_ahead_seconds"] = ahead_seconds
        if abs(ahead_seconds) <= _CLOCK_SECONDS:
            self._note("clock", "ok", "agrees with the clock of the service")
            return
        text = f"the service's is {abs(ahead_seconds):.0f} s {'ahead' if ahead_seconds > 0 else 'behind'}"
        self._note("clock", "note", text, f"{text}: requests may be refused; synchronize this machine's clock (NTP)")

    def _measure(self, trial: str, label: Callable[[str], None]) -> None:
        piece = np.random.default_rng(0).bytes(PIECE_BYTES)
        label("uploading")
        begun_at = time.perf_counter()
        with closing_writer(self.storage, f"{trial}/small", PIECE_BYTES) as write:
            write(0, memoryview(piece))
        fitting = int(_TRIAL_SECONDS / (time.perf_counter() - begun_at))
        size_bytes = PIECE_BYTES * min(max(fitting, _LEAST_PIECES), _MOST_PIECES)
        path, begun_at = f"{trial}/large", time.perf_counter()
        with closing_writer(self.storage, path, size_bytes) as write:
            for begin in range(0, size_bytes, PIECE_BYTES):
                write(begin, memoryview(piece))
        self.figures |= {
            "trial_bytes": size_bytes,
            "write_bytes_per_second": size_bytes / (time.perf_counter() - begun_at),
        }
        label("downloading")
        begun_at, expected, found = time.perf_counter(), digest(piece), set[str]()

        def read(begin: int) -> None:
            found.update(reader.read_digested(begin, [memoryview(bytearray(PIECE_BYTES))]))

        with closing(self.storage.open_reader(path)) as reader, open_pool(self.storage, 1, size_bytes) as pool:
            pool.run(partial(read, begin) for begin in range(0, size_bytes, PIECE_BYTES))
        self.figures["read_bytes_per_second"] = size_bytes / (time.perf_counter() - begun_at)
        if found == {expected}:
            self._note("ranges", "ok", "parts of an object are what was written")
        else:
            self._note("ranges", "unfit", "wrong bytes", "the service, or a proxy before it, does not honor ranges")
        for way, name in (("write", "upload"), ("read", "download")):
            speed = self.figures[f"{way}_bytes_per_second"]
            self._note(name, "ok", f"{size_text(speed)}/s, by {size_text(size_bytes)}")


@contextmanager
def closing_writer(
    storage: ObjectStorage, path: str, size_bytes: int
) -> Iterator[Callable[[int, memoryview], list[str]]]:
    """**Blocks.** Lends what writes the pieces of a new object, and ends the upload."""
    writer = storage.create(path, size_bytes)
    try:
        yield writer.write_at
        writer.finish()
    finally:
        writer.abandon()
