"""When to save, and what to keep: small classes that are combined with `|`. Pure.

A save policy answers one question, `decide_save(moment)`; a retention policy answers one,
`choose_kept(committed, now_seconds)`. Any object with that method is a policy, and may be combined with these:

    Steps(500) | Seconds(600)              saves when either says so
    Latest(3) | Best("val_loss")           keeps what either keeps

Nothing here reads a clock, a file or a counter: the caller says what it knows, and gets the answer with its
reason.
"""

from holdfast.policies.retention import (
    All,
    AnyKeeps,
    Best,
    EveryN,
    KeptCandidate,
    Latest,
    Newer,
    Referrer,
    RetentionPlan,
    RetentionPolicy,
    absent_metrics,
    plan_retention,
    spare_referred,
)
from holdfast.policies.saving import (
    AnySave,
    Auto,
    ChosenInterval,
    SaveDecision,
    SaveMoment,
    SavePolicy,
    Seconds,
    Steps,
    is_by_step,
)

__all__ = [
    "All",
    "AnyKeeps",
    "AnySave",
    "Auto",
    "Best",
    "ChosenInterval",
    "EveryN",
    "KeptCandidate",
    "Latest",
    "Newer",
    "Referrer",
    "RetentionPlan",
    "RetentionPolicy",
    "SaveDecision",
    "SaveMoment",
    "SavePolicy",
    "Seconds",
    "Steps",
    "absent_metrics",
    "is_by_step",
    "plan_retention",
    "spare_referred",
]
