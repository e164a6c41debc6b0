"""The command `holdfast`, also as `python -m holdfast`: if it is not on the path."""

import sys
from pathlib import Path


def main() -> None:
    """Runs the command with this process's arguments, and ends the process."""
    if (
        sys.argv[1:2] == ["worker"]
        and len(sys.argv) > 2
        and Path(sys.argv[2]).suffix == ".py"
        and Path(sys.argv[2]).exists()
    ):
        # A launcher waits for this at each restart: without the modules of the other verbs it takes a few milliseconds.
        from holdfast.supervise import client

        client.run_script(sys.argv[2], sys.argv[3:])
    from holdfast.cli.main import main as run_verb

    run_verb()


if __name__ == "__main__":
    main()
