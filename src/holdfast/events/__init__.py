"""Typed events, with durations in seconds and sizes in bytes; and the sinks that receive them.

An event is a frozen record; `str(event)` is a line for people. A sink is anything that can be called with an event:
`LoggingSink`, `JsonLinesSink`, `Totals`, a function of the user's. `Fanout` tells several, and lets none of them
break a save.
"""

from holdfast.events.kinds import (
    AnyEvent,
    Committed,
    Diverged,
    Event,
    Failed,
    GenerationOpened,
    GroupEnded,
    Held,
    Leaving,
    NodesTimed,
    NoticeHeard,
    PassedOver,
    Resized,
    Restored,
    Retained,
    Skipped,
    Staged,
    Warned,
    Written,
)
from holdfast.events.sinks import (
    Fanout,
    JsonLinesSink,
    LoggingSink,
    Sink,
    Sums,
    Totals,
    decode_event,
    encode_event,
    read_events,
)

__all__ = [
    "AnyEvent",
    "Committed",
    "Diverged",
    "Event",
    "Failed",
    "Fanout",
    "GenerationOpened",
    "GroupEnded",
    "Held",
    "JsonLinesSink",
    "Leaving",
    "LoggingSink",
    "NodesTimed",
    "NoticeHeard",
    "PassedOver",
    "Resized",
    "Restored",
    "Retained",
    "Sink",
    "Skipped",
    "Staged",
    "Sums",
    "Totals",
    "Warned",
    "Written",
    "decode_event",
    "encode_event",
    "read_events",
]
