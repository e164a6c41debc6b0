"""Who is told of what a manager does."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.events import Fanout, Sink, Warned
from holdfast.events.sinks import LoggingSink, RunJournal
from holdfast.storage import Storage, local_directory, pass_on_warnings


def open_audience(storage: Storage, sinks: Iterable[Sink], *, keeps_journal: bool) -> Fanout:
    """The log, the sinks, and on a local disk the run's own journal; they also hear what the storage warns of.

    Args:
        storage: The run.
        sinks: Functions that are told of each event.
        keeps_journal: Whether this worker writes the journal.
    """
    journal = [RunJournal(storage.url)] if keeps_journal and local_directory(storage) is not None else []
    audience = Fanout([LoggingSink(), *journal, *sinks])
    pass_on_warnings(storage, lambda text: audience(Warned(text=text)))
    return audience
