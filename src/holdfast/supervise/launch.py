"""Starts the lean processes beside a training program, which use the standard library alone, and passes their messages.

The supervisor, the spare and what becomes the program must not run `holdfast/__init__`, which a program may never
import. So each begins with an empty module in its place, through which only the modules of this package are found.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

_ROOT: Final = str(Path(__file__).parents[1])

_CODE: Final = (
    "import sys, types; p = types.ModuleType('holdfast'); p.__path__ = [{root!r}]; sys.modules['holdfast'] = p; "
    "from holdfast.supervise import {module} as m; n = int(sys.argv[1]) + 2; "
    "m.main(*__import__('json').loads(''.join(sys.argv[2:n])))"
)

KEEPER: Final = ["holdfast", "memory"]
"""The last words in the command line of what keeps memory, by which a supervisor knows it."""

_PIECE: Final = 30_000
"""Characters of an argument: Linux allows 128 KiB."""

_LENGTH_BYTES: Final = 4
_MOST_BYTES: Final = 1 << 24
_MOST_DESCRIPTORS: Final = 8


def make_command(module: str, *arguments: Any, flags: list[str], show: list[str] | None = None) -> list[str]:
    """**Pure.** Returns the command line of a process that calls `main` of a module of this package.

    Args:
        module: The name of the module.
        arguments: What `main` is called with; JSON must hold it.
        flags: Options of the interpreter.
        show: Further words, which the process does not read: they show in lists of processes.
    """
    code = _CODE.format(root=_ROOT, module=module)
    text = json.dumps(arguments, ensure_ascii=False)
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return [sys.executable, *flags, "-c", code, str(len(pieces)), *pieces, *(show or [])]


def find_flags() -> list[str]:
    """Returns the options of this interpreter, such as -O; the environment's are inherited."""
    found: list[str] = []
    words = iter(sys.orig_argv[1:])
    for word in words:
        if not word.startswith("-") or word in ("-m", "-c"):
            break
        found += [word, next(words, "")] if word in ("-X", "-W") else [word]
    return found


def forget_stub() -> None:
    """Removes the empty module and what was found through it, so that the program imports holdfast itself."""
    if getattr(sys.modules.get("holdfast"), "__file__", None) is not None:
        return
    for name in [name for name in sys.modules if name == "holdfast" or name.startswith("holdfast.")]:
        del sys.modules[name]


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
