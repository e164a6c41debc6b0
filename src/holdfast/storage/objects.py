"""Storage in a bucket of S3, Google Cloud Storage or Azure, through the package obstore.

An object appears when its upload has ended, and never in part. Only small files are published create-only; the data
of a step has names that no other attempt uses. There are no directories.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.errors import NotFoundError, StorageError, UsageError
from holdfast.process.latch import Latch, start_thread
from holdfast.storage.checks import (
    check_offset,
    check_size,
    flat,
    kept_bytes,
    missing_error,
    split_directory,
    split_path,
    too_large_error,
    too_short_error,
)
from holdfast.storage.digesting import digest_parts
from holdfast.storage.protocol import Entry, Traits

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PART_BYTES: Final = 8 << 20
"""The size of a part of an upload, as long as that gives no more than `_MOST_PARTS`."""
_MOST_PARTS: Final = 10_000
_UPLOADS_AT_ONCE: Final = 12
_READS_AT_ONCE: Final = 16
_QUEUED_PIECES: Final = 2
"""So many pieces wait for the upload; those that are being sent are held by it."""
_TOKEN: Final = "holdfasttoken"
"""A name that all services take: Azure has no hyphens in names of metadata, and others change underscores."""
_TRIES: Final = 5
_PAGE_BYTES: Final = 4096
_LOOK_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.05

_T = TypeVar("_T")

# The process that has started the threads of the client: a forked child has the client without them.
_client_process: int | None = None


class ObjectStorage:
    """**Thread-safe.** A prefix of a bucket; see `Storage` for the contract of each method.

    A process that was forked from one that has used a bucket must not use any: the threads of obstore are not there,
    and its calls would wait for ever. It gets an error.

    Attributes:
        url: The URL of the prefix.
        traits: See `Storage`.
        location: None.
    """

    traits = Traits(
        lists_deep=True,
        is_shared=True,
        names_are_consistent=True,
        read_parallel=_READS_AT_ONCE,
        replaces=True,
        passes_on=True,
    )
    location = None

    def __init__(
        self,
        url: str,
        store: ObjectStore,
        patient: ObjectStore | None = None,
        reopen: Callable[[], ObjectStorage] | None = None,
    ) -> None:
        """Stores its arguments.

        Args:
            url: The URL of the prefix, without credentials.
            store: An obstore store of that prefix.
            patient: The same, which repeats requests for longer, for all after the first; None for the same one.
            reopen: Opens the same in another process; None if it can't be passed to one.
        """
        import obstore

        self.url = url.rstrip("/")
        self._reopen = reopen
        # Where the first request fails, an address or the credentials are wrong: that is to be seen soon.
        self._store, self._patient = store, patient or store
        self._client: Any = obstore

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    def __reduce__(self) -> tuple[Callable[[], ObjectStorage], tuple[()]]:
        """Passes the URL and the options to another process, and never credentials."""
        if self._reopen is None:
            raise TypeError(f"{self!r} cannot be passed to another process")
        return self._reopen, ()

    def make_directory(self, path: str) -> None:
        """Does nothing; see `Storage`."""
        split_directory(path)

    def create(self, path: str, size_bytes: int) -> ObjectWriter:
        """Begins an upload; see `Storage`."""
        split_path(path)
        check_size(size_bytes, path)
        return ObjectWriter(self, path, size_bytes)

    def write(self, path: str, data: bytes) -> None:
        """**Blocks.** Writes a whole new small file; see `Storage`."""
        if not self.publish(path, data):
            raise self.exists_error(path)

    def sync_directory(self, path: str) -> None:
        """Does nothing: what has been put is durable; see `Storage`."""
        split_directory(path)

    def publish(self, path: str, data: bytes) -> bool:
        """**Blocks.** Creates a small object by one conditional put; see `Storage`."""
        split_path(path)
        token = uuid.uuid4().hex
        with self.errors("publish", path):
            for number in range(_TRIES):
                time.sleep(random.uniform(0, _PAUSE_SECONDS * number))
                try:
                    self._client.put(self._store, path, data, mode="create", attributes={_TOKEN: token})
                except self._client.exceptions.AlreadyExistsError:
                    # It may be ours: a reply was lost, and the client has asked again. Or two met, and neither won.
                    found = self._find_token(path)
                    if found is not None:
                        return found == token
                else:
                    return True
        raise StorageError(
            f"cannot publish {self._place(path)}: the service says that it exists, and then that it does not",
            path=path,
            hint="Wait a moment and start again.",
        )

    def replace(self, path: str, data: bytes) -> None:
        """**Blocks.** Puts a small object, in place of an older one if there is one."""
        split_path(path)
        with self.errors("write", path):
            self._client.put(self._store, path, data)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """**Blocks.** Reads a whole small file; see `Storage`."""
        split_path(path)

        def get() -> bytes:
            found = self._client.get(self._store, path)
            size_bytes = found.meta["size"]
            if size_bytes > limit_bytes:
                raise too_large_error(self._place(path), path, size_bytes, limit_bytes)
            return bytes(found.bytes())

        with self.errors("read", path):
            return self._repeat(get)

    def open_reader(self, path: str) -> ObjectReader:
        """**Blocks.** Asks for the size of an object; see `Storage`."""
        split_path(path)
        with self.errors("open", path):
            return ObjectReader(self, path, self._client.head(self._store, path)["size"])

    def modified_at(self, path: str) -> float:
        """**Blocks.** Returns when an object was written, by the clock of the service, in Unix seconds."""
        with self.errors("look at", path):
            return float(self._client.head(self._store, path)["last_modified"].timestamp())

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        """**Blocks.** Returns the entries of a directory, in order of name; see `Storage`."""
        split_directory(path)
        skipped = len(path) + 1 if path else 0
        with self.errors("list", path):
            if deep:
                objects = self._repeat(lambda: self._client.list(self._store, path or None).collect())
                directories: Sequence[str] = ()
            else:
                found = self._repeat(lambda: self._client.list_with_delimiter(self._store, path or None))
                objects, directories = found["objects"], found["common_prefixes"]
        entries = [Entry(one["path"][skipped:], False, one["size"], one["e_tag"] or "") for one in objects]
        entries += [Entry(one[skipped:].rstrip("/"), True, 0) for one in directories]
        return sorted(entries, key=lambda entry: entry.name)

    def delete(self, paths: Iterable[str]) -> bool:
        """**Blocks.** Removes objects; see `Storage`."""
        keys = sorted({"/".join(split_path(path)) for path in paths})
        if not keys:
            return True
        with self.errors("remove", keys[0]):
            try:
                self._client.delete(self._store, keys)
            except FileNotFoundError as error:
                # Not all services take a missing object for a removed one, and all of the others are removed then.
                _check_bucket(error)
                for key in keys:
                    self._delete_one(key)
        return True

    def discard(self, paths: Iterable[str], next_bytes: int) -> None:
        """**Blocks.** Removes objects; see `Storage`."""
        self.delete(paths)

    def retire(self, directory: str) -> str:
        """Returns the directory as it is: nothing can be moved; see `Storage`."""
        split_path(directory)
        return directory

    def upload(self, path: str, pieces: Iterator[bytearray], size_bytes: int) -> None:
        """**Blocks.** Puts an object of pieces, several parts at once; ends when it is durable."""
        if size_bytes <= _PART_BYTES:
            self.write(path, b"".join(pieces))
            return
        part_bytes = max(_PART_BYTES, -(-size_bytes // _MOST_PARTS) + _PAGE_BYTES)
        # Uploads in parts are not conditional. No other attempt writes this name: the look guards against mistakes.
        found: list[StorageError | None] = []
        looked = start_thread(lambda: found.append(self._find_taken(path)), "holdfast-look")

        def checked() -> Iterator[bytearray]:
            sent_bytes = 0
            for piece in pieces:
                sent_bytes += len(piece)
                if sent_bytes == size_bytes:
                    looked.wait(threading.TIMEOUT_MAX)
                    if (error := found[0]) is not None:
                        raise error
                yield piece

        with self.errors("write", path):
            self._client.put(
                self._store,
                path,
                checked(),
                chunk_size=part_bytes,
                max_concurrency=_UPLOADS_AT_ONCE,
                use_multipart=True,
            )

    def fetch(self, path: str, begin: int, length_bytes: int) -> memoryview:
        """**Blocks.** Returns a range of an object, which is not empty."""
        with self.errors("read", path):
            get = lambda: self._client.get_range(self._store, path, start=begin, length=length_bytes)  # noqa: E731
            return memoryview(self._repeat(get))

    def _repeat(self, ask: Callable[[], _T]) -> _T:
        """**Blocks.** Asks again if a reply ends early: the client repeats only requests that got none."""
        for number in range(1, _TRIES):
            try:
                return ask()
            except self._client.exceptions.GenericError as error:
                if re.search("body", str(error)) is None:
                    raise
                time.sleep(random.uniform(0, _PAUSE_SECONDS * 2**number))
        return ask()

    @contextmanager
    def errors(self, doing: str, path: str) -> Iterator[None]:
        """Turns each error of the client into a `StorageError`; `doing` follows "cannot"."""
        global _client_process
        if _client_process is None:
            _client_process = os.getpid()
        elif _client_process != os.getpid():
            raise UsageError(
                f"cannot {doing} {self._place(path)}: this process was forked from one that has used a bucket",
                hint='Start it by "spawn" or "forkserver", or before the bucket is used.',
            )
        try:
            yield
            self._store = self._patient
        except FileNotFoundError as error:
            self._store = self._patient
            text, hint = _explain(error)
            kind = StorageError if _names_bucket(error) else NotFoundError
            raise kind(f"cannot {doing} {self._place(path)}: {text}", path=path, hint=hint) from None
        except (self._client.exceptions.BaseError, OSError, ValueError) as error:
            text, hint = _explain(error)
            raise StorageError(f"cannot {doing} {self._place(path)}: {text}", path=path, hint=hint) from None

    def exists_error(self, path: str) -> StorageError:
        """Returns the error for a name that is taken."""
        return StorageError(
            f"cannot write {self._place(path)}: it already exists", path=path, hint="a file is never overwritten"
        )

    def _find_token(self, path: str) -> str | None:
        """Returns the token of an object, "" for one without a token, None if there is no object."""
        try:
            return str(self._client.get(self._store, path, options={"head": True}).attributes.get(_TOKEN, ""))
        except FileNotFoundError as error:
            _check_bucket(error)
            return None

    def _find_taken(self, path: str) -> StorageError | None:
        """**Blocks.** Returns an error if there is such an object, or the service does not say."""
        try:
            with self.errors("write", path):
                self._client.head(self._store, path)
        except NotFoundError:
            return None
        except StorageError as error:
            return error
        return self.exists_error(path)

    def _delete_one(self, key: str) -> None:
        try:
            self._client.delete(self._store, key)
        except FileNotFoundError as error:
            _check_bucket(error)

    def _place(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url


class ObjectWriter:
    """One new object, written in pieces; see `FileWriter`.

    The upload takes the pieces in their order. A piece that comes early waits for those before it, so a caller with
    several threads begins the pieces in that order. Each is copied, for the client still sends it when a write returns.
    """

    def __init__(self, storage: ObjectStorage, path: str, size_bytes: int) -> None:
        self._storage, self._path, self._size_bytes = storage, path, size_bytes
        # Guards all of the fields below.
        self._changed = threading.Condition()
        self._next_bytes = 0
        self._written_bytes = 0
        self._queue: deque[bytearray] = deque()
        self._failure: StorageError | None = None
        self._is_closed = False
        self._ended: Latch | None = None

    def write_at(self, offset_bytes: int, data: memoryview, parts: Sequence[memoryview] = ()) -> list[str]:
        """**Thread-safe.** **Blocks.** Hands one piece to the upload; see `FileWriter`."""
        piece = flat(data)
        kept = kept_bytes(offset_bytes, piece.nbytes, self._size_bytes, self._path)
        digests = digest_parts(parts)
        with self._changed:
            self._check_open()
            if not kept:
                return digests
            while self._next_bytes != offset_bytes or len(self._queue) >= _QUEUED_PIECES:
                if offset_bytes < self._next_bytes:
                    raise UsageError(f"{self._path}: two pieces overlap at {offset_bytes}", hint="write each byte once")
                self._changed.wait()
                self._check_open()
            if self._ended is None:
                self._ended = start_thread(self._upload, "holdfast-upload")
        copied = _copy_of(piece[:kept])
        with self._changed:
            self._queue.append(copied)
            self._next_bytes += kept
            self._written_bytes += kept
            self._changed.notify_all()
        return digests

    def finish(self) -> None:
        """**Blocks.** Waits until the object is durable; see `FileWriter`."""
        with self._changed:
            self._check_open()
            if self._written_bytes != self._size_bytes:
                raise missing_error(self._path, self._written_bytes, self._size_bytes)
        if self._ended is None:
            self._storage.write(self._path, b"")
        else:
            # The client has a deadline for each request.
            while not self._ended.wait(_LOOK_SECONDS):
                pass
        with self._changed:
            self._check_open()
            self._is_closed = True

    def abandon(self) -> None:
        """Ends the upload; see `FileWriter`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _upload(self) -> None:
        try:
            self._storage.upload(self._path, self._take_pieces(), self._size_bytes)
        except StorageError as error:
            failure = error
        except _AbandonedError:
            return
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that writes
            failure = StorageError(f"cannot write {self._path}: {error!r}", path=self._path)
        else:
            return
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _take_pieces(self) -> Iterator[bytearray]:
        taken_bytes = 0
        while taken_bytes < self._size_bytes:
            with self._changed:
                while not self._queue:
                    if self._is_closed:
                        raise _AbandonedError
                    self._changed.wait()
                piece = self._queue.popleft()
                self._changed.notify_all()
            taken_bytes += len(piece)
            yield piece

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise UsageError(f"the writer of {self._path} is closed", hint="open it again")


class ObjectReader:
    """One object, read by ranges; see `FileReader`.

    Attributes:
        size_bytes: The object's size.
    """

    def __init__(self, storage: ObjectStorage, path: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._storage, self._path = storage, path
        self._is_closed = False

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Thread-safe.** **Blocks.** Fills `into` from the object; see `FileReader`."""
        self._read(offset_bytes, [flat(into)])

    def read_digested(self, offset_bytes: int, parts: Sequence[memoryview]) -> list[str]:
        """**Thread-safe.** **Blocks.** Fills many places of memory, and digests them; see `FileReader`."""
        self._read(offset_bytes, parts)
        return digest_parts(parts)

    def close(self) -> None:
        """Closes; may be repeated."""
        self._is_closed = True

    def _read(self, offset_bytes: int, parts: Sequence[memoryview]) -> None:
        if self._is_closed:
            raise UsageError(f"the reader of {self._path} is closed", hint="open it again")
        check_offset(offset_bytes, self._path)
        wanted_bytes = sum(part.nbytes for part in parts)
        missing_bytes = offset_bytes + wanted_bytes - self.size_bytes
        if wanted_bytes and missing_bytes > 0:
            raise too_short_error(self._path, self._path, self.size_bytes, missing_bytes)
        if not wanted_bytes:
            return
        got = self._storage.fetch(self._path, offset_bytes, wanted_bytes)
        if len(got) != wanted_bytes:
            raise too_short_error(self._path, self._path, offset_bytes + len(got), wanted_bytes - len(got))
        at = 0
        for part in parts:
            _move(got[at : at + part.nbytes], part)
            at += part.nbytes


class _AbandonedError(Exception):
    """The upload has been given up."""


def _copy_of(data: memoryview) -> bytearray:
    copied = bytearray(len(data))
    _move(data, memoryview(copied))
    return copied


def _move(source: memoryview, into: memoryview) -> None:
    """Copies bytes; large ones without the interpreter's lock, which the training thread waits for."""
    if into.nbytes < _PAGE_BYTES or source.readonly:
        into[:] = source
        return
    to = ctypes.addressof(ctypes.c_char.from_buffer(into))
    ctypes.memmove(to, ctypes.addressof(ctypes.c_char.from_buffer(source)), into.nbytes)


_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_NO_BUCKET: Final = "NoSuchBucket|ContainerNotFound|bucket does not exist"
NOT_ALLOWED: Final = "The credentials do not allow this: see the permissions in the guide."
_HINTS: Final = {
    _NO_BUCKET: "There is no such bucket, or it is in another region or account: check the URL.",
    # Where the machines of a cloud ask for their own credentials, if no others are found.
    r"169\.254\.|metadata\.google\.internal": "No credentials were found: set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or those of your cloud.",
    "PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation": "The bucket is in another region: set AWS_REGION "
    "or pass region= to holdfast.open_storage.",
    "RequestTimeTooSkewed|RequestExpired": "The clock of this machine is wrong: set it, and start again.",
    "ExpiredToken|TokenExpired|InvalidToken": "The credentials have expired: log in again, or use credentials that "
    "renew themselves.",
    "SignatureDoesNotMatch|InvalidAccessKeyId|AuthenticationFailed": "The credentials are wrong: check the key and the "
    "secret.",
    "SlowDown|TooManyRequests|429|503": "The service asks for fewer requests: save less often, or use another prefix.",
    "error sending request|dns error|Connection refused": "The service cannot be reached: check the endpoint, the "
    "proxy and the network.",
    "AccessDenied|Forbidden|privileges": NOT_ALLOWED,
}
"""Hints, by a pattern of the client's message; the first that fits."""


def _explain(error: BaseException) -> tuple[str, str]:
    """Returns an error of the client in one line, and a hint; what follows `?` in an address may be a signature."""
    whole = str(error)
    text = re.sub(r"<\?xml.*", "", whole.partition("Debug source")[0], flags=re.S)
    text = " ".join(re.sub(r"\?[^\s\"'<>)]*", "", text).split()).rstrip(": ")
    code = _CODE.search(whole)
    if code is not None:
        text = f"{text} ({code[1]})"
    return text, next((hint for pattern, hint in _HINTS.items() if re.search(pattern, whole)), "")


def _names_bucket(error: BaseException) -> bool:
    return re.search(_NO_BUCKET, str(error)) is not None


def _check_bucket(error: FileNotFoundError) -> None:
    """Raises the error if not the object is missing, but the whole bucket."""
    if _names_bucket(error):
        raise error
