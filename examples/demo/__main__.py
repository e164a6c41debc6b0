"""The demo, `make demo`: training that is killed again and again, or asked to leave, and ends bit-identical."""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from demo.reports import FORGETTABLE, Settings
from holdfast.process.exit import ending_on

_EXIT_INTERRUPTED: Final = 130
_STEPS: Final = (160, 24)
_KILLS: Final = (5, 2)
_STEPS_FOR_A_KILL: Final = 4
_PAIR_STEPS: Final = (400, 120)
_PARTS: Final = ("kills", "workers")


@click.command()
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the training and of the kills."
)
@click.option("--kills", type=click.IntRange(1), help=f"How often it is killed.  [default: {_KILLS[0]}]")
@click.option("--steps", type=click.IntRange(_STEPS_FOR_A_KILL), help=f"How many steps.  [default: {_STEPS[0]}]")
@click.option(
    "--forget",
    type=click.Choice(FORGETTABLE),
    multiple=True,
    help="Leaves an object out of the checkpoints, to see what that does. May be given more than once.",
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the run, logs and evidence go, and stay; empty or yet to be made.  [default: a temporary one]",
)
@click.option("--keep", is_flag=True, help="Keeps the temporary directory.")
@click.option("--part", type=click.Choice(_PARTS), help="One part alone.  [default: both]")
@click.option("--quick", is_flag=True, help=f"{_STEPS[1]} small steps and {_KILLS[1]} kills, for a first look.")
def command(
    seed: int,
    kills: int | None,
    steps: int | None,
    forget: tuple[str, ...],
    directory: Path | None,
    keep: bool,
    part: str | None,
    quick: bool,
) -> None:
    """Trains a small GPT twice: once untouched, once killed with SIGKILL again and again, in the middle of writes too.

    At the end it proves that both are the same, bit by bit. A second part does so with two workers under torchrun, of
    which one gets SIGTERM: both stop at one step, and go on from there. It exits with 0 only if all is the same, and
    takes less than two minutes on two cores.
    """
    kills = kills or _KILLS[quick]
    steps = steps or _STEPS[quick]
    if kills * _STEPS_FOR_A_KILL > steps:
        raise click.BadParameter(
            f"{kills} kills need at least {kills * _STEPS_FOR_A_KILL} steps.", param_hint="'--kills'"
        )
    if importlib.util.find_spec("torch") is None:
        raise click.ClickException(
            "the demo trains with torch, which is not installed. From a checkout of holdfast: pip install '.[torch]'"
        )
    try:
        with ending_on(signal.SIGTERM), _place(directory, keep) as files:
            passed = part == "workers" or _run(seed, kills, steps, forget, quick, files)
            if part != "kills":
                passed = _run_pair(_PAIR_STEPS[quick], seed, files) and passed
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(_EXIT_INTERRUPTED)
    except OSError as error:
        raise click.ClickException(f"the demo has no place to work in: {error}") from error
    sys.exit(0 if passed else 1)


def _run(seed: int, kills: int, steps: int, forget: tuple[str, ...], quick: bool, files: Path) -> bool:
    from rich.console import Console

    from demo.figures import read_figures
    from demo.process import DemoError
    from demo.show import Screen, show_summary
    from demo.supervise import run_demo

    size = {"batch": 4, "tokens": 32} if quick else {}
    settings = Settings(seed=seed, steps=steps, save_every_steps=max(2, steps // 16), forget=forget, **size)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    try:
        with Screen(console, settings, kills) as screen:
            outcome = run_demo(settings, kills, files, screen)
    except DemoError as error:
        raise click.ClickException(str(error)) from error
    show_summary(console, outcome, read_figures(outcome))
    return not outcome.objections


def _run_pair(steps: int, seed: int, files: Path) -> bool:
    from rich.console import Console

    from demo.pair import run_pair
    from demo.process import DemoError

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    try:
        return run_pair(steps, seed, files, console)
    except DemoError as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _place(directory: Path | None, keep: bool) -> Iterator[Path]:
    """The directory for the demo's files, which goes at the end if it is temporary."""
    if directory is not None:
        if directory.is_dir() and any(directory.iterdir()):
            raise click.BadParameter(f"{directory} is not empty.", param_hint="'--directory'")
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
    elif keep:
        kept = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
        try:
            yield kept
        finally:
            click.echo(f"The run, the logs and the evidence are in {kept}.")
    else:
        with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as temporary:
            yield Path(temporary)


if __name__ == "__main__":
    command(prog_name="python -m demo")
