"""When to save, and which checkpoints to keep: small classes that are combined with `|`. Pure.

A save policy has one method, `decide_save(moment)`; a retention policy has one, `choose_kept(committed, now_seconds)`.
Any object with that method is a policy, and can be combined with these:

    Steps(500) | Seconds(600)              saves when either says so
    Latest(3) | Best("val_loss")           keeps what either keeps

Policies read no clock, file or counter: the caller passes the facts, and gets the answer with its reason.
"""

from holdfast.policies.plain import read_keep, read_save_every
from holdfast.policies.retention import (
    All,
    AnyKeeps,
    Best,
    EveryHours,
    EveryN,
    KeptCandidate,
    LastGood,
    Latest,
    Newer,
    Referrer,
    RetentionPlan,
    RetentionPolicy,
    absent_metrics,
    count_kept,
    find_good,
    find_modes,
    plan_retention,
    spare_referred,
)
from holdfast.policies.saving import (
    AnySave,
    Auto,
    ChosenInterval,
    Epochs,
    SaveDecision,
    SaveMoment,
    SavePolicy,
    Seconds,
    Steps,
    counts_epochs,
    describe_rhythm,
    is_by_step,
    learns_failures,
)

__all__ = [
    "All",
    "AnyKeeps",
    "AnySave",
    "Auto",
    "Best",
    "ChosenInterval",
    "Epochs",
    "EveryHours",
    "EveryN",
    "KeptCandidate",
    "LastGood",
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
    "count_kept",
    "counts_epochs",
    "describe_rhythm",
    "find_good",
    "find_modes",
    "is_by_step",
    "learns_failures",
    "plan_retention",
    "read_keep",
    "read_save_every",
    "spare_referred",
]
