"""Messages between the processes beside a training program: JSON of a known length, with descriptors."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterable
from typing import Any, Final

_LENGTH_BYTES: Final = 4
_MOST_BYTES: Final = 1 << 24
_MOST_DESCRIPTORS: Final = 8


def tell(connection: socket.socket, message: dict[str, Any], descriptors: Iterable[int] = ()) -> bool:
    """**Blocks.** Sends a message; returns False if the other end is closed."""
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    try:
        connection.sendmsg([len(data).to_bytes(_LENGTH_BYTES, "little")], rights)
        connection.sendall(data)
    except OSError:
        return False
    return True


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """**Blocks.** Returns the next message with its descriptors; None if there is none to come."""
    descriptors: list[int] = []
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MOST_DESCRIPTORS)
        length = int.from_bytes(head, "little")
        if len(head) == _LENGTH_BYTES and length <= _MOST_BYTES:
            data = bytearray()
            while len(data) < length and (part := connection.recv(length - len(data))):
                data += part
            if len(data) == length and isinstance(message := json.loads(data), dict):
                return message, descriptors
    except (OSError, ValueError):
        pass
    for descriptor in descriptors:
        os.close(descriptor)
    return None
