"""`resumable`: a training loop that continues where the last process stopped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Final, Literal

from msgspec.structs import asdict

from holdfast.advice.hyperparameters import check_kept
from holdfast.checkpoint import Checkpoint, find_given
from holdfast.cluster import Cluster
from holdfast.deadlines import DEFAULT_TIMEOUT_SECONDS, LIVENESS_SECONDS
from holdfast.errors import UsageError
from holdfast.events import Sink
from holdfast.manager import CheckpointManager
from holdfast.options import SaveOptions, check_kept_objects, check_names, check_switches
from holdfast.policies import Auto, Latest, RetentionPolicy, SavePolicy
from holdfast.preemption.config import TerminationConfig, make_termination
from holdfast.preemption.guard import make_guard
from holdfast.preemption.inbox import EarlyNotices
from holdfast.save.joint.setup import explaining
from holdfast.storage import Storage
from holdfast.tracebacks import short_traceback
from holdfast.training.ledger import Ledger
from holdfast.training.loop import TrainingLoop
from holdfast.training.run import Resumption, Run
from holdfast.training.watchdog import Watchdog

_ON_NONFINITE: Final = ("warn", "raise", "rollback")


@short_traceback
def resumable(
    directory: str | os.PathLike[str] | Storage,
    *checkpoint: Checkpoint,
    save_every: SavePolicy | int | str | None = None,
    keep: RetentionPolicy | int | str | None = None,
    strict: bool = True,
    begin_anew: bool = False,
    start_from: int | None = None,
    incremental: bool = False,
    reuse_space: bool = True,
    failures_allowed: int = 0,
    when_busy: Literal["wait", "skip"] = "wait",
    sinks: Iterable[Sink] = (),
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    threads: int = 6,
    overlap_copy: bool = False,
    reserve_bytes: int | Literal["auto"] | None = None,
    cluster: Cluster | Literal["auto", "alone"] = "auto",
    liveness_seconds: float = LIVENESS_SECONDS,
    check_replicas: bool | Literal["first"] = "first",
    on_resize: Literal["allow", "refuse"] = "allow",
    preemption: Literal["auto", "off"] | TerminationConfig = "auto",
    grace: float | str | None = None,
    keep_current: str | Iterable[str] = (),
    strict_resume: bool = False,
    on_nonfinite: Literal["warn", "raise", "rollback"] = "warn",
    watchdog: str = "report",
    quiet: bool = False,
    **objects: object,
) -> Run:
    """Creates a run to enter with `with`: it restores, saves by policy, saves at the end, and waits for its saves.

    Example:
        ```python
        with holdfast.resumable("runs/gpt", model=model, optimizer=optimizer, loader=loader, rng=holdfast.RNG(),
                          save_every=holdfast.Steps(500), keep=holdfast.Latest(3)) as run:
            for step in run.steps(10_000):
                loss = train_step(next(batches))
                run.report(loss=loss)
        ```

    Args:
        directory: The run's directory, a `file://` URL, or an open storage.
        checkpoint: A `Checkpoint` with the objects, instead of `objects`: it allows any names.
        save_every: When to save: a policy, a number of steps such as 500, or text such as "10min" or "1 epoch"; None
            for `Auto()`, which measures the cost of a save.
        keep: Which checkpoints to keep: a policy, or how many of the newest; None for `Latest(3)`.
        strict: False to restore what fits, if objects have changed since the save; a warning names the rest.
        begin_anew: True to start from the beginning even if there are checkpoints.
        start_from: A step to go back to, once: the run resumes there, and newer steps no longer count. The next start
            continues from what was saved since, so the option may stay in the script.
        incremental: True to write only arrays that have changed, and refer to earlier steps for the others.
        reuse_space: False to never write a save over the data file of a removed checkpoint; see `CheckpointManager`.
        failures_allowed: How many saves in a row may fail without an error; one more ends the loop.
        when_busy: What to do with a save if the previous one is still in progress: wait for it, or skip this one.
        sinks: Functions that are called with each event.
        timeout_seconds: The deadline of each wait.
        threads: The number of threads that write, and read during a restore. They mostly wait for the disk.
        overlap_copy: True to copy parameters and optimizer state while training continues; see `CheckpointManager`.
        reserve_bytes: Host memory for the first save: None to make it ready slowly during the first steps; a number or
            "auto" to allocate it at once, 0 to leave it to the first save; see `CheckpointManager`.
        cluster: The workers of the job: "auto" to find them, "alone" for a worker that saves on its own, or a cluster.
        liveness_seconds: A worker that gives no sign of life for this long is taken for dead.
        check_replicas: At which saves to compare replicated state between workers; see `CheckpointManager`.
        on_resize: "refuse" to resume only with the number of workers that saved; "allow" for any number.
        preemption: How to notice a preemption, and how to exit: "auto" for signals and the sources that fit the
            machine, "off" for Ctrl-C only, or a `TerminationConfig`. Several workers stop at the same step.
        grace: How long to train on after a notice such as SIGTERM: seconds, or text such as "30s". The state is saved
            at once, and again before that time is over. None to stop at once, unless the notice says how much time
            remains.
        keep_current: What the restore leaves as the script set it, as in `CheckpointManager.restore`: hyperparameters
            such as `"optimizer.lr"`, or names of whole objects.
        strict_resume: True to make it an error if a step is repeated with other data, or another loss, than before the
            restart; it is a warning otherwise.
        on_nonfinite: What happens if a step is saved whose parameters or optimizer states have nan or an infinity:
            "warn" logs it; "raise" ends training with a `NotFiniteError`, on all workers at the same step;
            "rollback" goes back to the newest good step, as `run.rollback()` does, without the batches drawn since; in
            a framework, by a new start after a `RolledBackError`.
        watchdog: What happens if training makes no progress for much longer than usual: "report" writes the stacks of
            all threads into the run's directory and says so; "restart", under `holdfast run`, also starts the program
            again; "off" does nothing. Limits may follow: "report step=2min unmarked=30min first=1h".
        quiet: True to omit the lines that say where the run begins and ends; warnings and errors stay.
        **objects: The objects to save, by name. An object with the name of an option needs a `Checkpoint`:
            `resumable(directory, Checkpoint(threads=..., model=model))`.

    Raises:
        UsageError: If an argument is wrong, or no objects are given.
        UnnamedError: If an object is given without a name.
        UnsupportedValueError: If an object is a wrapper that cannot be saved, such as one of FSDP1.
        StorageError: If the directory cannot be read, or differs from that of the other workers.
        AbsentError: If other workers of the job do not join.
        ClusterError: If the job's store does not respond.
    """
    given = locals()
    named = {name: given[name] for name in resumable.__kwdefaults__ or ()}
    check_names(objects, named)
    kept = find_given(directory, checkpoint, objects)
    check_kept_objects(kept.objects)
    termination = make_termination(preemption, objects, grace=grace)
    if not isinstance(strict, bool):
        raise UsageError(f"strict must be True or False, got {strict!r}")
    check_switches(quiet=quiet, strict_resume=strict_resume)
    if on_nonfinite not in _ON_NONFINITE:
        raise UsageError(f"on_nonfinite={on_nonfinite!r} is none of {', '.join(map(repr, _ON_NONFINITE))}")
    options = SaveOptions.pick(given, save_every=Auto(), keep=Latest(3))
    with EarlyNotices(termination) as early:
        names = check_kept(keep_current, kept.objects)
        ledger = Ledger()
        manager = CheckpointManager(directory, kept, **asdict(options) | {"sinks": (*options.sinks, ledger)})
        with explaining(manager.participant):
            loop = TrainingLoop(manager, partial(make_guard, manager, termination))
            watched = Watchdog(watchdog, manager.url, manager.worker, ledger)
            resumption = Resumption(strict, [*names], strict_resume, on_nonfinite)
            run = Run(loop, resumption, watched, quiet=quiet)
            early.hand_over(loop.guard.inbox.receive)
    return run
