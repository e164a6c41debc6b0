"""What may be put into a cluster's store. Pure."""

from __future__ import annotations

import re
from typing import Final

from holdfast.cluster.protocol import MAX_COUNT, MAX_KEY_BYTES, MAX_VALUE_BYTES
from holdfast.errors import UsageError

_KEY: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


def check_key(key: str) -> str:
    """**Pure.** The key, if it is one.

    Raises:
        UsageError: If it is not.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise UsageError(
            f"{key!r} is no key of a cluster's store",
            hint="Use letters, digits, '.', '_' and '-', with '/' between parts.",
        )
    if len(key) > MAX_KEY_BYTES:
        raise UsageError(f"a key of {len(key)} bytes is longer than the {MAX_KEY_BYTES} that may be: {key[:40]}...")
    return key


def check_value(key: str, value: bytes) -> bytes:
    """**Pure.** The value, if the store can hold it.

    Raises:
        UsageError: If it cannot.
    """
    if not isinstance(value, bytes):
        raise UsageError(f"{key}: a value is bytes, not {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise UsageError(
            f"{key}: a value of {len(value)} bytes is larger than the {MAX_VALUE_BYTES} that may be",
            hint="A cluster's store is for small records; write what is large into a file.",
        )
    return value


def check_amount(key: str, amount: int) -> int:
    """**Pure.** The amount, if it is a number that every store can add.

    Raises:
        UsageError: If it is not.
    """
    if not isinstance(amount, int) or isinstance(amount, bool) or not -MAX_COUNT < amount < MAX_COUNT:
        raise UsageError(f"{key}: {amount!r} is no whole number of less than {MAX_COUNT}")
    return amount
