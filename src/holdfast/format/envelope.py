"""The outer form of every record: a JSON object that names its kind and digests its body. Pure.

`{"holdfast": "manifest", "version": 1, "digest": "...", "body": {...}}`, where `digest` is taken over the bytes of the
body as they stand. A record that was cut short or changed is found before a field of it is believed.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from holdfast.errors import FormatError
from holdfast.format.digests import digest

FORMAT_VERSION: Final = 1

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    holdfast: str
    version: int
    digest: str
    body: msgspec.Raw


def seal(kind: str, record: msgspec.Struct) -> bytes:
    """**Pure.** The bytes of a record of some kind."""
    body = msgspec.json.encode(record)
    envelope = _Envelope(holdfast=kind, version=FORMAT_VERSION, digest=digest(body), body=msgspec.Raw(body))
    return msgspec.json.encode(envelope)


def unseal(kind: str, record_type: type[RecordT], data: bytes, *, path: str, step: int | None = None) -> RecordT:
    """**Pure.** The record that the bytes hold.

    Args:
        kind: The kind that it must be.
        record_type: The type to decode its body into.
        data: The bytes of the file.
        path: Where they came from, for the error.
        step: The step that they belong to, for the error.

    Raises:
        FormatError: If it is not whole, not of this kind, or of a newer format.
    """

    def fault(what: str, hint: str = "") -> FormatError:
        return FormatError(f"{path}: {what}", path=path, step=step, hint=hint)

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
