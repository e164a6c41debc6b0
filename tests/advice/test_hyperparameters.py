"""Hyperparameters that a script has changed since: a restore says so, and leaves what it is asked to leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

import holdfast as hf
import old_versions
from holdfast.advice.hyperparameters import HyperparameterChange
from holdfast.errors import ApplyError, HoldfastError, MismatchError, UsageError
from holdfast.training.announcements import describe_changes, describe_saving

OLD, NEW, DONE, TOTAL = 0.1, 0.4, 7, 20

Make = Callable[[torch.optim.Optimizer], Any]

PROPORTIONAL: dict[str, Make] = {
    "step": lambda optimizer: schedules.StepLR(optimizer, 3, 0.5),
    "several steps": lambda optimizer: schedules.MultiStepLR(optimizer, [2, 9], 0.5),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 15),
    "cosine with a floor": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 15, eta_min=0.02),
    "warm restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 4, 2, eta_min=0.01),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: min(1.0, step / 10)),
    "factors": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda step: 0.9),
    "linear": lambda optimizer: schedules.LinearLR(optimizer, 0.2, total_iters=10),
    "polynomial": lambda optimizer: schedules.PolynomialLR(optimizer, 18, 2.0),
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
    "warmup, then cosine": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.CosineAnnealingLR(optimizer, 14)], [4]
    ),
    "still in the warmup": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=9), schedules.CosineAnnealingLR(optimizer, 9)], [9]
    ),
    "two at once": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 9), schedules.ExponentialLR(optimizer, 0.95)]
    ),
    "plateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
}


def make(make_schedule: Make | None, lr: float = OLD, **options: Any) -> dict[str, Any]:
    """An optimizer with two groups, of which one has twice the rate, and its schedule."""
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 2 * lr}]
    optimizer = torch.optim.AdamW(groups, lr=lr, **options)
    made: dict[str, Any] = {"optimizer": optimizer}
    if make_schedule is not None:
        made["schedule"] = make_schedule(optimizer)
    return made


def train(made: dict[str, Any], steps: int) -> list[list[float]]:
    """The rates of each step."""
    optimizer, schedule, rates = made["optimizer"], made.get("schedule"), []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        if isinstance(schedule, schedules.ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()
    return rates


def save(place: Path, made: dict[str, Any], steps: int = DONE) -> None:
    with hf.CheckpointManager(place, hf.Checkpoint(**made)) as manager:
        train(made, steps)
        manager.save(steps)


def restore(place: Path, made: dict[str, Any], *keep: str) -> hf.Restoration:
    with hf.CheckpointManager(place, hf.Checkpoint(**made)) as manager:
        restored = manager.restore(keep_current=keep)
    assert restored is not None
    return restored


@pytest.mark.parametrize("make_schedule", PROPORTIONAL.values(), ids=PROPORTIONAL)
def test_schedule_continues_as_if_it_had_begun_with_the_new_rate(tmp_path: Path, make_schedule: Make) -> None:
    save(tmp_path, make(make_schedule))
    made = make(make_schedule, NEW)
    assert restore(tmp_path, made, "optimizer.lr").hyperparameters == {}
    expected = train(make(make_schedule, NEW), TOTAL)[DONE:]
    last = getattr(made["schedule"], "_last_lr", None)
    assert last is None or last == pytest.approx(expected[0])
    found = train(made, TOTAL - DONE)
    assert [rate for rates in found for rate in rates] == pytest.approx([rate for rates in expected for rate in rates])


def test_what_is_kept_lasts(tmp_path: Path) -> None:
    make_schedule = PROPORTIONAL["cosine"]
    save(tmp_path, make(make_schedule))
    made = make(make_schedule, NEW)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(**made)) as manager:
        manager.restore(keep_current="optimizer.lr")
        train(made, 1)
        manager.save(DONE + 1)
    expected = train(made, 3)
    # The next start finds it, with the argument and without.
    for keep in ([], ["optimizer.lr"]):
        again = make(make_schedule, NEW)
        assert restore(tmp_path, again, *keep).hyperparameters == {}
        assert train(again, 3) == expected


def test_a_change_is_reported_and_one_that_training_makes_is_not(tmp_path: Path) -> None:
    def by_hand(made: dict[str, Any]) -> dict[str, Any]:
        for group in made["optimizer"].param_groups:
            group["lr"] *= 0.5
        return made

    made = make(None, weight_decay=0.1)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(**made)) as manager:
        train(by_hand(made), 1)
        manager.save(1)
    assert restore(tmp_path, make(None, weight_decay=0.1)).hyperparameters == {}
    changed = restore(tmp_path, make(None, NEW, weight_decay=0.2, betas=(0.8, 0.9)))
    assert changed.hyperparameters == {
        "optimizer.lr": ([NEW, 2 * NEW], [OLD / 2, OLD], True),
        "optimizer.betas": ([0.8, 0.9], [0.9, 0.999], True),
        "optimizer.weight_decay": (0.2, 0.1, True),
    }
    # Only what is asked for stays, in all groups.
    made = make(None, NEW, weight_decay=0.2, betas=(0.8, 0.9))
    kept = restore(tmp_path, made, "optimizer.weight_decay", "optimizer.lr")
    assert list(kept.hyperparameters) == ["optimizer.betas"]
    assert [(group["lr"], group["weight_decay"], group["betas"]) for group in made["optimizer"].param_groups] == [
        (NEW, 0.2, (0.9, 0.999)),
        (2 * NEW, 0.2, (0.9, 0.999)),
    ]


def test_a_cyclic_schedule_changes_momentum_and_nothing_is_reported(tmp_path: Path) -> None:
    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        top = [10 * group["lr"] for group in optimizer.param_groups]
        return schedules.OneCycleLR(optimizer, top, total_steps=TOTAL)

    save(tmp_path, make(one_cycle))
    assert restore(tmp_path, make(one_cycle)).hyperparameters == {}
    made = make(one_cycle, NEW)
    assert all(not change.can_be_kept for change in restore(tmp_path, made).hyperparameters.values())
    made = make(one_cycle, NEW)
    before = made["optimizer"].state_dict()
    with pytest.raises(UsageError, match="a OneCycleLR sets it"):
        restore(tmp_path, made, "optimizer.lr")
    assert made["optimizer"].state_dict() == before
    # With the schedule itself it begins anew.
    restore(tmp_path, made, "schedule")
    assert train(made, TOTAL - 1) == train(make(one_cycle, NEW), TOTAL - 1)


def test_longer_schedule_is_reported_and_continues_at_its_position(tmp_path: Path) -> None:
    longer: Make = lambda optimizer: schedules.CosineAnnealingLR(optimizer, 30)  # noqa: E731
    save(tmp_path, make(PROPORTIONAL["cosine"]))
    assert restore(tmp_path, make(longer)).hyperparameters == {"schedule.T_max": (30, 15, True)}
    made = make(longer, NEW)
    restore(tmp_path, made, "schedule.T_max", "optimizer.lr")
    expected = train(make(longer, NEW), TOTAL)[DONE:]
    found = train(made, TOTAL - DONE)
    assert [rate for rates in found for rate in rates] == pytest.approx([rate for rates in expected for rate in rates])


def test_a_part_of_a_composed_schedule_is_reported_and_cannot_be_kept(tmp_path: Path) -> None:
    def composed(total: int, floor: float = 0.0) -> Make:
        return lambda optimizer: schedules.SequentialLR(
            optimizer,
            [schedules.LinearLR(optimizer), schedules.CosineAnnealingLR(optimizer, total, eta_min=floor)],
            [5],
        )

    save(tmp_path, make(composed(15)))
    assert restore(tmp_path, make(composed(30))).hyperparameters == {"schedule.1.T_max": (30, 15, False)}
    with pytest.raises(UsageError, match=r"schedule\.1\.T_max cannot be kept"):
        restore(tmp_path, make(composed(30)), "schedule.1.T_max")
    with pytest.raises(UsageError, match="eta_min"):
        restore(tmp_path, make(composed(15, 0.01)), "optimizer.lr")


def test_a_whole_object_stays_as_the_script_made_it(tmp_path: Path) -> None:
    save(tmp_path, make(PROPORTIONAL["cosine"]) | {"model": nn.Linear(2, 2), "seen": [1, 2]})
    model = nn.Linear(3, 3)
    weight = model.weight.detach().clone()
    made = make(PROPORTIONAL["polynomial"], NEW) | {"model": model, "seen": []}
    restored = restore(tmp_path, made, "schedule", "model")
    assert restored.hyperparameters == {}
    assert (made["seen"], model.weight.equal(weight)) == ([1, 2], True)
    # The new schedule begins, with the rates that it was made for.
    assert train(made, TOTAL) == train(make(PROPORTIONAL["polynomial"], NEW), TOTAL)


def test_a_rate_that_is_a_tensor_stays_that_tensor(tmp_path: Path) -> None:
    def compiled(lr: float) -> dict[str, Any]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=torch.tensor(lr))
        return {"optimizer": optimizer, "schedule": schedules.StepLR(optimizer, 3, 0.5)}

    save(tmp_path, compiled(OLD))
    assert list(restore(tmp_path, compiled(NEW)).hyperparameters) == ["optimizer.lr"]
    made = compiled(NEW)
    rate = made["optimizer"].param_groups[0]["lr"]
    assert restore(tmp_path, made, "optimizer.lr").hyperparameters == {}
    assert made["optimizer"].param_groups[0]["lr"] is rate
    assert train(made, 6) == [pytest.approx(rates) for rates in train(compiled(NEW), DONE + 6)[DONE:]]


def test_what_cannot_be_kept_is_refused_at_once(tmp_path: Path) -> None:
    made = make(PROPORTIONAL["cosine"])
    for name in ("optimizer.rate", "optimiser", "optimizer.params", ""):
        with pytest.raises(UsageError, match=f"keep_current contains '{name}'") as refused:
            hf.resumable(tmp_path / "run", **made, keep_current=[name])
        assert "'optimizer.lr'" in str(refused.value.hint)
    with pytest.raises(UsageError, match="keep_current contains 3"):
        hf.resumable(tmp_path / "run", **made, keep_current=[3])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="keep_current must be a list of names, got True"):
        hf.resumable(tmp_path / "run", **made, keep_current=True)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    # An object that is kept no more is none of them.
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(**made)) as manager:
        del manager.checkpoint["optimizer"]
        with pytest.raises(UsageError, match="not an object or hyperparameter"):
            manager.restore(keep_current="optimizer.lr")
    # A rate of 0 says nothing of what the schedule has made of it.
    zero = make(PROPORTIONAL["cosine"], 0.0)
    for group in zero["optimizer"].param_groups:
        group["lr"] = 0.3
    save(tmp_path, zero, 1)
    with pytest.raises(ApplyError, match="was 0"):
        restore(tmp_path, make(PROPORTIONAL["cosine"]), "optimizer.lr")


def test_a_checkpoint_without_the_record_is_compared_with_what_it_restores(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(optimizer=make(None)["optimizer"].state_dict())) as manager:
        manager.save(1)
    rates = ([NEW, 2 * NEW], [OLD, 2 * OLD], True)
    assert restore(tmp_path, make(None, NEW)).hyperparameters == {"optimizer.lr": rates}


def test_all_that_restores_takes_it(tmp_path: Path) -> None:
    made = make(None)
    run = hf.resumable(tmp_path / "run", **made)
    with run:
        run.finish_step()
    made = make(None, weight_decay=0.5)
    with hf.resumable(tmp_path / "run", **made, keep_current="optimizer.weight_decay") as run:
        assert made["optimizer"].param_groups[1]["weight_decay"] == 0.5
    made = make(None, weight_decay=0.5)
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(**made)) as manager:
        with pytest.raises(UsageError, match=r"keep_current contains 'optimizer\.decay'"):
            hf.PreemptionCheckpointHandler(manager, keep_current=["optimizer.decay"])
        with hf.PreemptionCheckpointHandler(manager, keep_current=["optimizer.weight_decay"]):
            assert made["optimizer"].param_groups[1]["weight_decay"] == 0.5
        for wrong in (hf.PreemptionCheckpointHandler, hf.CheckpointManager.restore):
            with pytest.raises(UsageError, match="keep_current must be a list of names, got 1"):
                wrong(manager, keep_current=1)  # type: ignore[arg-type]
    with hf.WorkerTrainingState(tmp_path / "backup", hf.Checkpoint(**make(None))) as state:
        state.restore()
        state.back_up(0)
    made = make(None, weight_decay=0.5)
    kept = hf.WorkerTrainingState(
        tmp_path / "backup", hf.Checkpoint(**made), keep_current=["optimizer.weight_decay"], quiet=True
    )
    with kept:
        kept.restore()
    assert made["optimizer"].param_groups[1]["weight_decay"] == 0.5
    with pytest.raises(UsageError, match="quiet must be True or False, got 2"):
        hf.resumable(tmp_path / "run", **made, quiet=2)  # type: ignore[arg-type]


def test_the_words_for_changes() -> None:
    changes = {f"optimizer.{key}": HyperparameterChange(0.5, 0.1, key != "b") for key in "abcde"}
    assert describe_changes(changes) == (
        "optimizer.a 0.1 restored (your script says 0.5), optimizer.b 0.1 restored (your script says 0.5), "
        'optimizer.c 0.1 restored (your script says 0.5), and 2 more; keep_current=["optimizer.a", "optimizer.c"] '
        "keeps the script's"
    )
    assert describe_changes(dict(list(changes.items())[1:2])) == ("optimizer.b 0.1 restored (your script says 0.5)")
    assert describe_changes({}) == ""
    assert describe_saving(hf.Steps(1)) == "saves every step"
    assert describe_saving(hf.Steps(500) | hf.Seconds(600)) == "saves every 500 steps or every 10 min"
    assert describe_saving(hf.Auto()) == "saves as often as is worthwhile (holdfast.Auto)"
    assert "save_every=holdfast.Steps(n)" in describe_saving(None)


class Trainer:
    """An object of the program's own, which saves its schedule."""

    def __init__(self, schedule: Any, *others: Any) -> None:
        self.schedules = [schedule, *others]

    def state_dict(self) -> dict[str, Any]:
        return {"schedules": [one.state_dict() for one in self.schedules]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, stored in zip(self.schedules, state["schedules"], strict=True):
            one.load_state_dict(stored)


def schedule_warnings(directory: Path, **objects: Any) -> list[str]:
    events: list[hf.events.Event] = []
    with hf.resumable(
        directory, hf.Checkpoint(**objects), save_every=hf.Steps(1), sinks=[events.append], begin_anew=True
    ) as run:
        for _ in run.steps(3):
            objects["optimizer"].step()
    texts = [event.text for event in events if isinstance(event, hf.events.Warned)]
    return [text for text in texts if "scheduler" in text]


@pytest.mark.parametrize("kind", [*PROPORTIONAL, "swa"])
def test_a_schedule_that_is_not_saved_is_warned_of_once(tmp_path: Path, kind: str) -> None:
    make_schedule = PROPORTIONAL.get(kind) or (lambda optimizer: SWALR(optimizer, swa_lr=0.05))
    made = make(make_schedule)
    if kind == "swa":
        old_versions.skip_if_it_holds_a_function(made["schedule"])
    texts = schedule_warnings(tmp_path / "without", optimizer=made["optimizer"])
    if kind == "plateau":
        assert texts == [], "torch marks no optimizer for it"
    else:
        assert [text.partition(" and ")[0] for text in texts] == [
            "a learning-rate scheduler sets the rates of optimizer"
        ]
    assert schedule_warnings(tmp_path / "with", **made) == []
    assert schedule_warnings(tmp_path / "plain", optimizer=make(None)["optimizer"]) == []


def test_a_schedule_that_is_saved_in_another_way_is_not_warned_of(tmp_path: Path) -> None:
    made = make(PROPORTIONAL["cosine"])
    optimizer, schedule = made["optimizer"], made["schedule"]
    other = make(PROPORTIONAL["lambda"])["optimizer"]
    kept: list[dict[str, Any]] = [
        {"both": [optimizer, {"any": schedule}]},
        {"trainer": Trainer(schedule)},
        {"state": {"schedule": schedule.state_dict()}},
        {"schedule_state": schedule.state_dict()},
    ]
    for number, objects in enumerate(kept):
        assert schedule_warnings(tmp_path / f"{number}", optimizer=optimizer, **objects) == []
    (text,) = schedule_warnings(tmp_path / "two", other=other, **made)
    assert "the rates of other and is not saved" in text


def test_a_schedule_in_a_wrapper_is_not_warned_of(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    made = make(PROPORTIONAL["linear"])
    optimizer, schedule = accelerate.Accelerator(cpu=True).prepare(made["optimizer"], made["schedule"])
    assert schedule_warnings(tmp_path / "with", optimizer=optimizer, schedule=schedule) == []
    assert schedule_warnings(tmp_path / "in", optimizer=optimizer, trainer=Trainer(schedule)) == []
    assert len(schedule_warnings(tmp_path / "without", optimizer=optimizer)) == 1


def test_a_changed_precision_size_or_name_is_refused_with_the_way(tmp_path: Path) -> None:
    with hf.resumable(tmp_path, model=nn.Linear(2, 2), quiet=True) as run:
        for _ in run.steps(1):
            pass
    for other in (nn.Linear(2, 2).half(), nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(MismatchError) as caught, hf.resumable(tmp_path, model=other):
            pass
        assert "from scratch" in caught.value.hint
        assert "guide on restoring" in caught.value.hint
    with pytest.raises(MismatchError) as caught, hf.resumable(tmp_path, model=nn.Linear(2, 2), scaler={"scale": 1}):
        pass
    assert "from scratch" not in caught.value.hint  # An object more is what strict=False is for.


@pytest.mark.parametrize("before", ["absent", "disabled"])
def test_scaler_enabled_later_is_refused_unless_kept_by_name(tmp_path: Path, before: str) -> None:
    model = nn.Linear(2, 2)
    scaler: dict[str, Any] = {} if before == "absent" else {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
    with hf.resumable(tmp_path, model=model, quiet=True, **scaler) as run:
        for _ in run.steps(3):
            pass
    enabled = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.raises(HoldfastError) as caught, hf.resumable(tmp_path, model=nn.Linear(2, 2), scaler=enabled):
        pass
    if before == "disabled":
        assert 'keep_current=["scaler"]' in caught.value.hint
    fresh = nn.Linear(2, 2)
    way: dict[str, Any] = {"keep_current": ["scaler"]} if before == "disabled" else {"strict": False}
    with hf.resumable(tmp_path, model=fresh, scaler=enabled, quiet=True, **way) as run:
        assert run.restored is not None
        assert run.restored.differences.missing == ([] if before == "disabled" else ["scaler"])
        assert run.step == 3
        for _ in run.steps(4):
            pass
    assert torch.equal(fresh.weight, model.weight)
    assert enabled.state_dict()["scale"] == 4.0
    # Switched off again, the named one stays and takes what is stored.
    with hf.resumable(tmp_path, model=fresh, scaler=torch.amp.GradScaler("cpu", enabled=False), quiet=True) as run:
        assert run.step == 4


def test_longer_one_cycle_continues_at_its_position(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(total: int, end: int, directory: str, **options: Any) -> list[float]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=OLD, momentum=0.9)
        schedule = schedules.OneCycleLR(optimizer, NEW, total_steps=total)
        rates = []
        objects: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule}
        with hf.resumable(tmp_path / directory, **objects, preemption="off", quiet=True, **options) as run:
            if options and run.step:
                schedule.last_epoch = run.step - 1
                schedule.step()
            for _ in run.steps(end):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                schedule.step()
        return rates

    whole = train(20, 18, "whole")
    train(8, 5, "other")
    rest = [*train(20, 9, "other", keep_current=["schedule"]), *train(20, 18, "other", keep_current=["schedule"])]
    assert rest == whole[5:]
    train(8, 5, "warned")
    train(20, 6, "warned")
    assert "to continue a longer OneCycleLR, see the guide on restoring" in caplog.text
