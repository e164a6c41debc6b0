"""What is left of a job's epochs when it has come to its end."""

from __future__ import annotations

import time

from holdfast.catalog import read_catalog
from holdfast.errors import HoldfastError
from holdfast.events import Retained, Sink, Warned
from holdfast.policies import RetentionPolicy
from holdfast.save.line import Line
from holdfast.storage import Storage


def tidy_run(storage: Storage, keep: RetentionPolicy, emit: Sink) -> None:
    """**Blocks.** Removes the epochs that a policy does not keep.

    While a job runs, the epoch that it has gone on from stays whatever the policy says, as it is known to be good; and
    a kill between a commit and what is removed behind it leaves one more, or half of one. A job that has come to its
    end needs none of these.
    What goes wrong here is told of, and changes nothing of how the job has ended. Nothing is removed where a newer job
    saves by now.

    Args:
        storage: The epochs.
        keep: The policy.
        emit: Told of what happens.
    """
    begun_at = time.monotonic()
    try:
        newest = read_catalog(storage).newest
        if newest is None:
            return
        line = Line(storage, keep, reuse_space=False)
        # As the one that has saved last: what it, and those before it, left unfinished is swept as well.
        line.follow(newest.generation, newest)
        cleaning = line.clean(newest, {newest: "the newest"})
    except Exception as error:  # noqa: BLE001  A policy of the user's own may raise anything.
        reason = error.message if isinstance(error, HoldfastError) else repr(error)
        emit(Warned(text=f"{storage.url}: the job is at its end, but old epochs are not removed: {reason}"))
        return
    for problem in cleaning.problems:
        emit(Warned(text=f"{storage.url}: an old epoch could not be removed: {problem.message}"))
    if cleaning.removed:
        kept = {name.step: cleaning.kept[name] for name in sorted(cleaning.kept)}
        removed = tuple(name.step for name in cleaning.removed)
        emit(Retained(kept=kept, removed=removed, background_seconds=time.monotonic() - begun_at))
