"""One process of a contender: carries out orders. `python -m benchmarks.harness.worker PORT`."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from typing import Any

import msgspec
from benchmarks.harness.messages import MissingError, Order, Reply


class Duties:
    """The orders that a contender carries out: each method is a verb, and may return what it has measured.

    Attributes:
        note: What the contender makes durable by itself.
    """

    note: str = ""

    def open(self) -> None:
        """Opens what is to be measured with its memory."""
        return

    def close(self) -> None:
        """Ends all that was opened."""
        return


def load(place: str) -> Any:
    """The object at `module:name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def main(port: int) -> None:
    """Serves orders until the connection ends."""
    rank, pid = int(os.environ.get("RANK", "0")), os.getpid()
    with socket.create_connection(("127.0.0.1", port)) as line, line.makefile("rwb") as channel:

        def say(reply: Reply) -> None:
            channel.write(msgspec.json.encode(reply) + b"\n")
            channel.flush()

        say(Reply(rank=rank, pid=pid))
        duties: Any = None
        for message in channel:
            order = msgspec.json.decode(message, type=Order)
            try:
                figures = None
                if order.verb == "make":
                    # What was made before has been closed, and frees its memory first.
                    duties = None
                    gc.collect()
                    place = order.arguments.pop("place")
                    duties = load(place)(**order.arguments)
                else:
                    figures = getattr(duties, order.verb)(**order.arguments)
                say(Reply(rank=rank, pid=pid, figures=figures or {}, note=duties.note))
            except MissingError as error:
                say(Reply(rank=rank, pid=pid, missing=str(error)))
            except BaseException as error:  # noqa: BLE001  Some of DCP's errors are no `Exception`.
                say(Reply(rank=rank, pid=pid, error=f"{type(error).__name__}: {error}".partition("\n")[0]))
    # Without the waits of an orderly end: the process that compares ends the others as well.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
