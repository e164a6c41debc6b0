"""Starts a spare for a program, and lets it fork the program once for each line of input. Imports no holdfast but that.

    python spare_driver.py SOURCE RECORD TARGET [ARGUMENT...]

It prints a line of JSON when the spare is ready, or unfit, and one for each end of the program.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import types

source, record, *words = sys.argv[1:]
package = types.ModuleType("holdfast")
package.__path__ = [source]
sys.modules["holdfast"] = package

from holdfast.supervise.board import Board  # noqa: E402
from holdfast.supervise.linux import adopt_orphans  # noqa: E402
from holdfast.supervise.program import WORDS_BYTES, Program  # noqa: E402
from holdfast.supervise.supervisor import SpareProcess  # noqa: E402

adopt_orphans()
target, *arguments = words
program = Program(target, False, arguments, [], record, board=-1, words=-1)
board, memory = Board.create(), os.memfd_create("words")
os.truncate(memory, WORDS_BYTES)
spare = SpareProcess(program, ())
os.utime(record)
spare.start()
while spare.pid and not spare.is_ready:
    spare.hear()
print(json.dumps({"ready": spare.is_ready, "cause": spare.cause}), flush=True)
ignored = [number for number in (1, 2, 3, 20) if signal.getsignal(number) == signal.SIG_IGN]
for _ in sys.stdin:
    pid = spare.fork(board.fd, memory, ignored)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else None
    print(json.dumps({"code": code, "cause": spare.cause}), flush=True)
spare.end()
