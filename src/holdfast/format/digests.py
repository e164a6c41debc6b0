"""Digests of bytes, the spans that they cover, and records that contain their own digest. Pure.

Every record is a JSON object that names its kind and digests its body: `{"holdfast": "manifest", "version": 1,
"digest": "...", "body": {...}}`, where `digest` is that of the body's bytes. A record that was cut short or changed is
detected before any of its fields is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Final, TypeAlias, TypeVar

import msgspec
import xxhash

from holdfast.errors import FormatError

SPAN_BYTES: Final = 1 << 20
"""An array's bytes are split into spans of this many, from its first byte; the last may be shorter.

Small enough that a partial read checks little more than it needs, large enough that the digests cost nothing.
"""

DIGEST_CHARACTERS: Final = 32

Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""The result of `digest`, in a record; checked when it is decoded."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """**Pure.** Returns the 128-bit XXH3 digest of some bytes, as 32 lower-case hexadecimal characters.

    It detects damage, but not a checkpoint that was forged on purpose.
    """
    return xxhash.xxh3_128_hexdigest(data)


def digest_each(parts: Iterable[memoryview]) -> list[str]:
    """**Pure.** Returns the digest of each of many pieces of memory."""
    return list(map(xxhash.xxh3_128_hexdigest, parts))


def span_count(size_bytes: int, span_bytes: int) -> int:
    """**Pure.** Returns how many spans an array of this size has; none if it is empty."""
    return -(-size_bytes // span_bytes)


_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
MIX_FIRST: Final = 0xBF58476D1CE4E5B9
MIX_SECOND: Final = 0x94D049BB133111EB
"""The factors of `mix`."""


def mix(word: int) -> int:
    """**Pure.** A bijection of the 64-bit numbers that leaves no pattern."""
    word = ((word ^ (word >> 30)) * MIX_FIRST) & _MASK
    word = ((word ^ (word >> 27)) * MIX_SECOND) & _MASK
    return word ^ (word >> 31)


def derive(*words: int) -> int:
    """**Pure.** Derives one 64-bit number from several, all of whose bits depend on all of theirs."""
    derived = 0
    for word in words:
        derived = mix((derived + word + _STEP) & _MASK)
    return derived


FORMAT_VERSION: Final = 1


class SealedRecord(msgspec.Struct, frozen=True):
    """The body of a file of its own.

    Attributes:
        kind: The kind that the file names.
    """

    kind: ClassVar[str]


RecordT = TypeVar("RecordT", bound=SealedRecord)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    holdfast: str
    version: int
    digest: str
    body: msgspec.Raw


def seal(record: SealedRecord) -> bytes:
    """**Pure.** Returns the bytes of the file of a record."""
    body = msgspec.json.encode(record)
    envelope = _Envelope(holdfast=record.kind, version=FORMAT_VERSION, digest=digest(body), body=msgspec.Raw(body))
    return msgspec.json.encode(envelope)


def unseal(record_type: type[RecordT], data: bytes, *, path: str, step: int | None = None) -> RecordT:
    """**Pure.** Returns the record in the bytes.

    Args:
        record_type: Its expected type.
        data: The bytes of the file.
        path: The file, for the error.
        step: The step that it belongs to, for the error.

    Raises:
        FormatError: If it is not whole, not of this kind, or of a newer format.
    """

    def fault(what: str, hint: str = "") -> FormatError:
        return FormatError(f"{path}: {what}", path=path, step=step, hint=hint)

    kind = record_type.kind
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise fault(f"is not a holdfast record ({error})") from error
    if envelope.holdfast != kind:
        raise fault(f"holds a record of kind {envelope.holdfast[:40]!r}, not {kind!r}")
    if envelope.version != FORMAT_VERSION:
        raise fault(
            f"has format version {envelope.version}, this holdfast reads version {FORMAT_VERSION}",
            hint="Read it with the version of holdfast that wrote it, or a newer one.",
        )
    if digest(bytes(envelope.body)) != envelope.digest:
        raise fault("does not match its digest: it was damaged after it was written")
    try:
        return msgspec.json.decode(envelope.body, type=record_type)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise fault(f"is not a well-formed {kind} ({error})") from error
