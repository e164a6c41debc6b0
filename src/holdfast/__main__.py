"""The command `holdfast`, also as `python -m holdfast`: if it is not on the path."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Runs the command with this process's arguments, and ends the process."""
    if sys.argv[1:2] in (["run"], ["worker"]):
        _open_closed_streams()
    if (
        sys.argv[1:2] == ["worker"]
        and len(sys.argv) > 2
        and Path(sys.argv[2]).suffix == ".py"
        and Path(sys.argv[2]).exists()
    ):
        # A launcher waits for this at each restart: without the modules of the other verbs it takes a few milliseconds.
        from holdfast.supervise import client

        client.run_script(sys.argv[2], sys.argv[3:])
    try:
        from holdfast.cli.main import main as run_verb
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run_verb()


def _open_closed_streams() -> None:
    """Opens /dev/null where a standard stream is closed: files that are opened later must not take its place."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main()
