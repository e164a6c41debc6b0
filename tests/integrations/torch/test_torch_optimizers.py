from __future__ import annotations

import copy
import dataclasses
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import holdfast as hf
import old_versions
from holdfast.errors import FormatError, UnsupportedValueError
from holdfast.events import Event, Warned
from holdfast.format import codecs
from holdfast.state.capture import capture_objects
from holdfast.state.rng import RNG
from holdfast.storage import MemoryStorage
from state_trip import Stored, bring_back, match, store
from torch_models import model, same_state, train

# Optimizers

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_as_if_nothing_had_happened(name: str, stepped: bool) -> None:
    source = model(1)
    optimizer = OPTIMIZERS[name](source.parameters())
    train(source, optimizer)
    stored = store(model=source, optimizer=optimizer)
    train(source, optimizer, seed=10)

    live = model(2)
    other = OPTIMIZERS[name](live.parameters())
    if stepped:
        train(live, other, steps=5, seed=3)
    bring_back(stored, {"model": live, "optimizer": other})
    train(live, other, seed=10)
    assert same_state(live.state_dict(), source.state_dict())
    assert same_state(other.state_dict(), optimizer.state_dict())


def test_state_is_named_by_parameter() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer)
    stored = store(net=net, optimizer=optimizer)
    assert "optimizer/state/net.0.weight/exp_avg" in stored.specs
    assert stored.objects["optimizer"]["v"]["groups"][0]["params"][0] == "net.0.weight"
    assert "optimizer/state/group0.1/exp_avg" in store(optimizer=optimizer).specs
    named = torch.optim.Adam(net.named_parameters())
    train(net, named)
    assert "optimizer/state/0.weight/exp_avg" in store(net=net, optimizer=named).specs


def test_the_order_of_parameters_and_groups_does_not_matter() -> None:
    source = model(1)
    optimizer = torch.optim.Adam([{"params": source[0].parameters(), "lr": 0.1}, {"params": source[2].parameters()}])
    train(source, optimizer)
    live = model(2)
    other = torch.optim.Adam([{"params": [live[2].bias, live[2].weight]}, {"params": [live[0].bias, live[0].weight]}])
    bring_back(store(model=source, optimizer=optimizer), {"model": live, "optimizer": other})
    assert [group["lr"] for group in other.param_groups] == [0.001, 0.1]
    for left, right in zip(source.parameters(), live.parameters(), strict=True):
        assert same_state(optimizer.state.get(left), other.state.get(right))


def test_wrapped_modules_give_the_names_of_bare_ones() -> None:
    source = model(1)
    compiled: Any = torch.compile(source)
    optimizer = torch.optim.Adam(compiled.parameters())
    train(source, optimizer)
    live = nn.DataParallel(model(2))
    other = torch.optim.Adam(live.parameters())
    bring_back(store(model=compiled, optimizer=optimizer), {"model": live, "optimizer": other})
    assert same_state(other.state_dict(), optimizer.state_dict())

    given = torch.optim.Adam(compiled.named_parameters())
    train(source, given)
    another = torch.optim.Adam(live.named_parameters())
    bring_back(store(optimizer=given), {"optimizer": another})
    assert same_state(another.state_dict()["state"], given.state_dict()["state"])


def test_parameters_that_differ_are_collected() -> None:
    source, live = model(1), model(2)
    live.append(nn.Linear(2, 2))
    optimizer = torch.optim.Adam([*source[0].parameters(), source[1].weight])
    other = torch.optim.Adam([*live[0].parameters(), live[3].bias])
    train(source, optimizer)
    train(live, other)
    before = copy.deepcopy(other.state[live[3].bias])
    stored = store(optimizer=optimizer, model=source)
    differences = match(stored, {"optimizer": other, "model": live}).differences
    assert differences.missing == ["optimizer/state/model.3.bias", "model/3.weight", "model/3.bias"]
    assert differences.extra == ["optimizer/state/model.1.weight"]
    bring_back(stored, {"optimizer": other, "model": live}, strict=False)
    assert same_state(other.state[live[0].weight], optimizer.state[source[0].weight])
    assert same_state(other.state[live[3].bias], before)


def test_groups_that_are_divided_in_another_way_are_a_difference() -> None:
    source, live = model(1), model(2)
    optimizer = torch.optim.SGD(source.parameters(), 0.1)
    other = torch.optim.SGD([{"params": live[:2].parameters()}, {"params": live[2].parameters()}], 0.1)
    matching = match(store(model=source, optimizer=optimizer), {"model": live, "optimizer": other})
    assert len(matching.differences.wrong_kind) == 2


def test_groups_that_were_added_come_back() -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model(seed)
        optimizer = torch.optim.Adam(net[0].parameters())
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.5})
        return net, optimizer

    source, optimizer = make(1)
    train(source, optimizer)
    live, other = make(2)
    bring_back(store(model=source, optimizer=optimizer), {"model": live, "optimizer": other})
    assert same_state(other.state_dict(), optimizer.state_dict())


def test_frozen_parameters_and_tied_ones_come_back() -> None:
    def make(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        net[1].weight = net[0].weight
        net[2].bias.requires_grad_(False)
        return net, torch.optim.Adam(net.parameters())

    source, optimizer = make(1)
    train(source, optimizer)
    live, other = make(2)
    bring_back(store(model=source, optimizer=optimizer), {"model": live, "optimizer": other})
    assert same_state(other.state_dict(), optimizer.state_dict())
    assert not live[2].bias.requires_grad
    assert live[2].bias not in other.state


def test_state_keeps_its_type_with_parameters_of_another() -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model(seed).to(torch.bfloat16)
        return net, torch.optim.Adam(net.parameters())

    source, optimizer = make(1)
    train(source, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
        state["note"] = "kept in float32"
        state["parts"] = [torch.full((2,), 1 + 1e-6), None, (torch.ones(1),)]
    stored = store(model=source, optimizer=optimizer)
    live, other = make(2)
    for _ in range(2):
        bring_back(stored, {"model": live, "optimizer": other})
        assert same_state(other.state_dict(), optimizer.state_dict())
    kept = [state["exp_avg"] for state in other.state.values()]
    bring_back(stored, {"model": live, "optimizer": other})
    assert all(left is state["exp_avg"] for left, state in zip(kept, other.state.values(), strict=True))


def test_state_that_is_there_is_filled_where_it_is() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1), foreach=False)
    train(net, optimizer)
    stored = store(model=net, optimizer=optimizer)
    train(net, optimizer)
    averages = [state["exp_avg"] for state in optimizer.state.values()]
    rate = optimizer.param_groups[0]["lr"]
    with torch.no_grad():
        rate.fill_(0.7)
    bring_back(stored, {"model": net, "optimizer": optimizer})
    assert all(left is state["exp_avg"] for left, state in zip(averages, optimizer.state.values(), strict=True))
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == pytest.approx(0.1)


def test_an_optimizer_goes_back_to_before_its_first_step() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    stored = store(model=net, optimizer=optimizer)
    train(net, optimizer)
    bring_back(stored, {"model": net, "optimizer": optimizer})
    assert not optimizer.state_dict()["state"]


def test_an_optimizer_goes_back_to_state_of_other_kinds() -> None:
    class Changing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            state = self.state[self.param_groups[0]["params"][0]]
            state["scale"] = torch.ones(2)
            state["parts"] = {"a": torch.ones(2)}
            return super().step(closure)

    net = model()
    optimizer = Changing(net.parameters(), 0.1)
    first = net[0].weight
    optimizer.state[first] |= {"scale": 1, "parts": [2, torch.full((3,), 3.0)]}
    stored = store(model=net, optimizer=optimizer)
    train(net, optimizer)
    bring_back(stored, {"model": net, "optimizer": optimizer})
    assert optimizer.state[first]["scale"] == 1
    assert same_state(optimizer.state[first]["parts"], [2, torch.full((3,), 3.0)])


@pytest.mark.parametrize("steps", [1, 2])
def test_lbfgs_goes_back_to_an_older_state(steps: int) -> None:
    def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        net = model(seed)
        return net, torch.optim.LBFGS(net.parameters(), max_iter=1, history_size=3, line_search_fn="strong_wolfe")

    source, optimizer = make(1)
    train(source, optimizer, steps=steps)
    stored = store(model=source, optimizer=optimizer)
    live, other = make(2)
    train(live, other, steps=6, seed=3)
    bring_back(stored, {"model": live, "optimizer": other})
    assert same_state(other.state_dict(), optimizer.state_dict())
    for net, own in ((source, optimizer), (live, other)):
        train(net, own, seed=10)
    assert same_state(live.state_dict(), source.state_dict())


def test_matching_leaves_an_optimizer_alone() -> None:
    source, live = model(1), model(2)
    optimizer, other = torch.optim.Adam(source.parameters()), torch.optim.Adam(live.parameters(), lr=0.7)
    train(source, optimizer)
    train(live, other)
    before = copy.deepcopy(other.state_dict())
    match(store(model=source, optimizer=optimizer), {"model": live, "optimizer": other})
    assert same_state(other.state_dict(), before)


def test_state_of_one_parameter_alone_is_restored() -> None:
    source, live = model(1), model(2)
    optimizer, other = torch.optim.Adam(source.parameters()), torch.optim.Adam(live.parameters(), lr=0.7)
    train(source, optimizer)
    train(live, other)
    before = copy.deepcopy(other.state_dict())
    stored = store(model=source, optimizer=optimizer)
    bring_back(stored, {"model": live, "optimizer": other}, lambda path: path == "optimizer/state/model.0.bias")
    after = other.state_dict()
    assert same_state(after["state"][1], optimizer.state_dict()["state"][1])
    assert same_state(after["state"][0], before["state"][0])
    assert other.param_groups[0]["lr"] == 0.7


def test_an_optimizer_with_a_form_of_its_own_comes_back() -> None:
    class Own(torch.optim.SGD):
        rounds = 0

        def state_dict(self) -> dict[str, Any]:
            return {"rounds": self.rounds, "inner": super().state_dict()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.rounds = state_dict["rounds"]
            super().load_state_dict(state_dict["inner"])

    class Richer(torch.optim.SGD):
        rounds = 0

        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"rounds": self.rounds}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.rounds = state_dict.pop("rounds")
            super().load_state_dict(state_dict)

    for cls in (Own, Richer):
        source, live = model(1), model(2)
        optimizer, other = cls(source.parameters(), 0.1, momentum=0.9), cls(live.parameters(), 0.2)
        optimizer.rounds = 4
        train(source, optimizer)
        bring_back(store(model=source, optimizer=optimizer), {"model": live, "optimizer": other})
        assert other.rounds == 4
        assert same_state(other.state_dict(), optimizer.state_dict())


def _wide(features: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, features), nn.Linear(features, 2))


def _without(stored: Stored, *entries: str) -> Stored:
    """What a checkpoint from before these entries holds."""
    objects = stored.objects
    for entry in entries:
        del objects["optimizer"]["v"][entry]
    return dataclasses.replace(stored, text=json.dumps(objects))


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("SGD", "LBFGS")])
def test_state_of_a_parameter_of_another_shape_does_not_fit(name: str, stepped: bool) -> None:
    source, live = _wide(16, 1), _wide(32, 2)
    optimizer, other = OPTIMIZERS[name](source.parameters()), OPTIMIZERS[name](live.parameters())
    train(source, optimizer)
    if stepped:
        train(live, other, steps=5)
    before = copy.deepcopy(other.state.get(live[0].weight))
    stored = store(model=source, optimizer=optimizer)
    objects = {"model": live, "optimizer": other}
    for select in (None, lambda path: path == "optimizer"):
        shapes = match(stored, objects, select).differences.wrong_shape
        assert [line for line in shapes if line.startswith("optimizer")] == [
            "optimizer/state/model.0.weight: stored for a parameter of [16, 4], live [32, 4]",
            "optimizer/state/model.0.bias: stored for a parameter of [16], live [32]",
            "optimizer/state/model.1.weight: stored for a parameter of [2, 16], live [2, 32]",
        ]
    bring_back(stored, objects, strict=False)
    assert same_state(other.state.get(live[0].weight), before)
    assert same_state(other.state[live[1].bias], optimizer.state[source[1].bias])
    train(live, other)


def test_part_of_state_that_does_not_fit_is_a_difference_if_wanted() -> None:
    source, live = _wide(16), _wide(32)
    optimizer, other = torch.optim.AdamW(source.parameters()), torch.optim.AdamW(live.parameters())
    train(source, optimizer)
    stored, objects = store(model=source, optimizer=optimizer), {"model": live, "optimizer": other}
    shapes = match(stored, objects, lambda path: path == "optimizer/state/model.0.bias/exp_avg").differences.wrong_shape
    assert shapes == ["optimizer/state/model.0.bias: stored for a parameter of [16], live [32]"]
    assert not match(stored, objects, lambda path: path == "optimizer/state/model.1.bias").differences


@pytest.mark.parametrize("stepped", [False, True])
def test_lbfgs_keeps_its_state_where_any_parameter_differs(stepped: bool) -> None:
    source, live = _wide(16, 1), _wide(16, 2)
    live.append(nn.Linear(2, 2))
    live[1] = nn.Linear(16, 2, bias=False)
    cut = _wide(16, 3)
    cut[1] = nn.Linear(16, 3)
    optimizer = torch.optim.LBFGS(source.parameters(), max_iter=2)
    train(source, optimizer)
    stored = store(model=source, optimizer=optimizer)
    for net in (live, cut):
        other = torch.optim.LBFGS(net.parameters(), max_iter=2)
        if stepped:
            train(net, other)
        before = copy.deepcopy(other.state_dict()["state"])
        assert bring_back(stored, {"model": net, "optimizer": other}, strict=False)
        assert same_state(other.state_dict()["state"], before)
        train(net, other)


def test_parameters_without_state_may_change_their_shape() -> None:
    source, live = _wide(16), _wide(32)
    optimizer, other = torch.optim.SGD(source.parameters(), 0.1), torch.optim.SGD(live.parameters(), 0.2)
    train(source, optimizer)
    bring_back(
        store(model=source, optimizer=optimizer), {"model": live, "optimizer": other}, lambda p: p == "optimizer"
    )
    assert other.param_groups[0]["lr"] == 0.1


def test_parameters_that_have_no_shape_yet_are_taken_as_they_come() -> None:
    source, live = nn.LazyLinear(2), nn.LazyLinear(2)
    optimizer, other = torch.optim.Adam(source.parameters()), torch.optim.Adam(live.parameters())
    before = store(optimizer=optimizer)
    train(source, optimizer)
    bring_back(store(optimizer=optimizer), {"optimizer": other})
    train(live, other)
    bring_back(before, {"optimizer": other})
    assert not other.state


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.RMSprop, torch.optim.Adam]
)
def test_another_optimizer_is_a_difference(make: Callable[..., torch.optim.Optimizer]) -> None:
    source, live = model(1), model(2)
    optimizer, other = torch.optim.AdamW(source.parameters()), make(live.parameters())
    train(source, optimizer)
    train(live, other)
    before = copy.deepcopy(other.state_dict())
    stored, objects = store(model=source, optimizer=optimizer), {"model": live, "optimizer": other}
    now = f"{type(other).__module__}.{type(other).__qualname__}"
    for select in (None, lambda path: path == "optimizer/state/model.0.bias/step"):
        kinds = match(stored, objects, select).differences.wrong_kind
        assert kinds == [f"optimizer: stored from torch.optim.adamw.AdamW, live {now}"]
    assert not match(stored, objects, lambda path: path == "model").differences
    bring_back(stored, objects, strict=False)
    assert same_state(other.state_dict(), before)
    assert same_state(live.state_dict(), source.state_dict())
    train(live, other)


def test_a_class_that_moved_to_another_module_is_the_same() -> None:
    moved = type("Adam", (torch.optim.Adam,), {"__module__": "elsewhere", "__qualname__": "Adam"})
    source, live = model(1), model(2)
    optimizer, other = torch.optim.Adam(source.parameters()), moved(live.parameters())
    train(source, optimizer)
    bring_back(store(model=source, optimizer=optimizer), {"model": live, "optimizer": other})
    assert same_state(other.state_dict(), optimizer.state_dict())


def test_checkpoints_without_classes_and_shapes_are_read() -> None:
    source, live = model(1), model(2)
    optimizer, other = torch.optim.Adam(source.parameters()), torch.optim.AdamW(live.parameters())
    train(source, optimizer)
    stored = _without(store(model=source, optimizer=optimizer), "class", "shapes")
    bring_back(stored, {"model": live, "optimizer": other})
    assert same_state(other.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize(
    ("entry", "content"), [("class", 3), ("shapes", []), ("shapes", {"model.0.weight": 3}), ("shapes", {"x": ["y"]})]
)
def test_malformed_classes_and_shapes_are_refused(entry: str, content: Any) -> None:
    net = model()
    stored = store(optimizer=torch.optim.Adam(net.parameters()))
    objects = stored.objects
    objects["optimizer"]["v"][entry] = content
    with pytest.raises(FormatError, match=f"optimizer/{entry}"):
        match(dataclasses.replace(stored, text=json.dumps(objects)), {"optimizer": torch.optim.Adam(net.parameters())})


# Schedulers, scalers, averages, generators

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 2, 5]),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=30),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=3), schedulers.CosineAnnealingLR(o, 9)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)]
    ),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 9),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_go_on(name: str) -> None:
    if name == "SWALR":
        old_versions.skip_if_it_holds_a_function(SCHEDULERS[name](torch.optim.SGD(model().parameters())))

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        return net, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[Any]:
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return seen

    net, optimizer, scheduler = make()
    rates(optimizer, scheduler, 4)
    stored = store(net=net, optimizer=optimizer, scheduler=scheduler)
    expected = rates(optimizer, scheduler, 6)
    live, other, another = make()
    bring_back(stored, {"net": live, "optimizer": other, "scheduler": another})
    assert rates(other, another, 6) == expected
    assert another.state_dict().keys() == scheduler.state_dict().keys()


def test_a_plateau_is_remembered() -> None:
    def make() -> tuple[torch.optim.Optimizer, schedulers.ReduceLROnPlateau]:
        optimizer = torch.optim.SGD(model().parameters(), 0.1)
        return optimizer, schedulers.ReduceLROnPlateau(optimizer, patience=2)

    optimizer, scheduler = make()
    for _ in range(2):
        scheduler.step(1.0)
    other, another = make()
    bring_back(store(o=optimizer, s=scheduler), {"o": other, "s": another})
    assert another.state_dict() == scheduler.state_dict()
    for _ in range(2):
        another.step(1.0)
    assert other.param_groups[0]["lr"] == pytest.approx(0.01)


def test_averaged_models_and_grad_scalers_come_back() -> None:
    def make(seed: int) -> dict[str, Any]:
        return {
            "average": torch.optim.swa_utils.AveragedModel(model(seed)),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + seed)),
            "off": torch.amp.GradScaler("cpu", enabled=False),
        }

    source, live = make(1), make(2)
    source["average"].update_parameters(model(5))
    bring_back(store(**source), live)
    assert same_state(live["average"].state_dict(), source["average"].state_dict())
    assert live["average"].n_averaged == 1
    assert live["scaler"].state_dict() == source["scaler"].state_dict()


def test_torch_generators_come_back() -> None:
    objects: dict[str, Any] = {"rng": RNG(), "own": torch.Generator().manual_seed(3)}
    torch.rand(3)
    torch.rand(3, generator=objects["own"])
    stored = store(**objects)
    expected = (torch.rand(3), torch.rand(3, generator=objects["own"]))
    live = torch.Generator()
    torch.manual_seed(77)
    bring_back(stored, {"rng": RNG(), "own": live})
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(torch.rand(3, generator=live), expected[1])


def test_parameters_in_a_named_dict_have_its_names() -> None:
    def fresh(order: str) -> tuple[dict[str, Any], torch.optim.Optimizer]:
        params: dict[str, Any] = {name: nn.Parameter(torch.zeros(2)) for name in order}
        return params, torch.optim.Adam([*params.values(), extra], lr=0.1)

    extra = nn.Parameter(torch.ones(1))  # In no dict: it has a position.
    params, optimizer = fresh("abc")
    for number, one in enumerate((*params.values(), extra)):
        one.grad = torch.full_like(one, 10.0**number)
    optimizer.step()
    for deep in (False, True):
        stored = store(params={"deep": [params]} if deep else params, optimizer=optimizer)
        live, other = fresh("cab")
        bring_back(stored, {"params": {"deep": [live]} if deep else live, "optimizer": other})
        for name in params:
            assert same_state(other.state[live[name]], optimizer.state[params[name]])
        assert same_state(other.state[extra], optimizer.state[extra])
    # A checkpoint from before that has positions.
    old = store(optimizer=optimizer)
    live, other = fresh("abc")
    bring_back(Stored(old.text[:-1] + ', "params": {}}', old.specs, old.data), {"params": live, "optimizer": other})
    for mine, its in zip(other.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
        assert same_state(other.state[mine], optimizer.state[its])


def test_loading_a_state_dict_gets_tensors_of_its_own() -> None:
    class Average:
        def __init__(self, net: nn.Module) -> None:
            self.shadow = {name: p.detach() for name, p in net.named_parameters()}

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow, "decay": 0.9}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    source, live = model(1), model(2)
    average = Average(model(3))
    other = Average(live)
    bring_back(store(model=source, average=average), {"model": live, "average": other})
    assert same_state(other.shadow, average.shadow)
    assert same_state(live.state_dict(), source.state_dict())
    # What it makes of another state is for it to judge.
    bring_back(store(average=average), {"average": (other := Average(nn.Linear(4, 3)))})
    assert same_state(other.shadow, average.shadow)


def test_a_part_of_the_state_may_be_asked_for_where_there_is_none_yet(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint = hf.Checkpoint(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with hf.CheckpointManager(tmp_path, checkpoint) as manager:
        manager.save(1).wait_committed()
        weight = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        assert manager.restore(only=["model", "optimizer/state/*"]) is not None
    assert torch.equal(model.weight, weight)


class Projector:
    """As in GaLore: an object in the state of an optimizer, with a matrix and what follows from it."""

    def __init__(self, matrix: torch.Tensor, steps: int) -> None:
        self.matrix, self.steps = matrix, steps
        self.norm = float(matrix.norm())

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps % 2:
            self.matrix = torch.linalg.qr(gradient)[0].clone()
            self.norm = float(self.matrix.norm()) + self.steps
        return self.matrix @ (self.matrix.T @ gradient) * self.norm


class Projected(torch.optim.Optimizer):
    """Has an object in its state, and a list of such, as Shampoo has for its blocks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.reshape(len(parameter), -1)
            state = self.state[parameter]
            if not state:
                state["projector"] = Projector(torch.eye(len(gradient)), 0)
                state["blocks"] = [Projector(torch.eye(len(gradient)), n) for n in (0, 1)]
            for projector in (state["projector"], *state["blocks"]):
                parameter.sub_(0.01 * projector.project(gradient).reshape(parameter.shape))


@pytest.mark.parametrize("stepped", [False, True])
def test_objects_in_the_state_of_an_optimizer_come_back_by_a_codec(tmp_path: Path, stepped: bool) -> None:
    def fresh() -> tuple[Any, Projected]:
        net = model(1)
        return net, Projected(net.parameters())

    def make(parts: dict[str, Any]) -> Projector:
        made = Projector(parts["matrix"], parts["steps"])
        # Only where the values are there already does something follow from them.
        made.norm = float(made.matrix.norm()) + parts["more"]
        return made

    net, optimizer = fresh()
    train(net, optimizer)
    if not stepped:
        codecs._codecs_by_type.pop(Projector, None)
        with pytest.raises(UnsupportedValueError, match="register_codec"):
            capture_objects({"optimizer": optimizer})
    hf.register_codec(
        Projector,
        tag="tests.Projector",
        encode=lambda one: {
            "matrix": one.matrix,
            "steps": one.steps,
            "more": one.norm - float(one.matrix.norm()),
        },
        decode=make,
    )
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=net, optimizer=optimizer)) as manager:
        manager.save(3)
    live, other = fresh()
    if stepped:
        train(live, other, steps=2, seed=11)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=live, optimizer=other)) as manager:
        manager.restore()
    for one, own in zip(other.state.values(), optimizer.state.values(), strict=True):
        for left, right in zip((one["projector"], *one["blocks"]), (own["projector"], *own["blocks"]), strict=True):
            assert type(left) is Projector
            assert left is not right
            assert same_state(vars(left), vars(right))
    train(net, optimizer, seed=10)
    train(live, other, seed=10)
    assert same_state(live.state_dict(), net.state_dict())


def test_an_optimizer_that_steps_where_no_step_is_counted_is_warned_of(tmp_path: Path) -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    loader = hf.ResumableDataLoader(range(40), batch_size=4)
    events: list[Event] = []

    def train_step() -> None:
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    def warned() -> list[tuple[str, bool]]:
        found = [(event.text.partition(": ")[0], event.is_error) for event in events if isinstance(event, Warned)]
        events.clear()
        return found

    def enter(**objects: Any) -> Any:
        return hf.resumable(tmp_path / "run", model=net, rng=hf.RNG(), sinks=[events.append], **objects)

    uncounted = "but no step was counted, so"
    with enter(optimizer=optimizer):
        for _ in range(9):
            train_step()
    assert warned() == [
        (f"optimizer has stepped 8 times, {uncounted} nothing was saved yet", False),
        (f"optimizer has stepped 9 times, {uncounted} nothing was saved", True),
    ]
    with enter(optimizer=optimizer, loader=loader):
        for _ in loader:
            pass
        assert not warned(), "an evaluation takes batches, and changes nothing"
        for _ in loader:
            train_step()
    assert [is_error for _, is_error in warned()] == [False, True]
    with enter(optimizer=optimizer, loader=loader) as run:
        for number, _ in enumerate(loader):
            train_step()
            if number % 5 == 4:
                run.finish_step()
        for _ in range(9):
            train_step()
    assert not warned(), "a step is counted: it takes five batches"
    assert not optimizer._optimizer_step_pre_hooks
    checkpoint = hf.Checkpoint(model=net, optimizer=optimizer, rng=hf.RNG())
    with hf.CheckpointManager(tmp_path / "handler", checkpoint, sinks=[events.append]) as manager:
        with hf.PreemptionCheckpointHandler(manager):
            train_step()
        assert warned() == [
            (f"optimizer has stepped once, {uncounted} notices were ignored, and nothing was saved", True)
        ]
        with hf.PreemptionCheckpointHandler(manager) as handler:
            handler.run(train_step)
        with hf.PreemptionCheckpointHandler(manager) as handler:
            handler.save_checkpoint_if_preempted()
            train_step()
        with hf.PreemptionCheckpointHandler(manager) as handler:
            assert len(handler.steps(4)) == 2
            for _ in handler.steps(4):
                train_step()
        assert not warned()


def accumulate(a: Any, b: Any, step: int) -> None:
    a.backward()
    if step % 4 == 0:
        a.optimizer.step()
        a.optimizer.zero_grad()


def zero_first(a: Any, b: Any, step: int) -> None:
    a.optimizer.zero_grad()
    a.backward()
    a.optimizer.step()


def zero_last(a: Any, b: Any, step: int) -> None:
    a.backward()
    a.optimizer.step()
    a.optimizer.zero_grad(set_to_none=step % 2 == 0)


def in_turn(a: Any, b: Any, step: int) -> None:
    """As a generator and a discriminator: what is left over in one is set to zero before it is used."""
    for own, other in ((a, b), (b, a)):
        own.optimizer.zero_grad()
        own.backward()
        other.backward()
        own.optimizer.step()


def scaled(a: Any, b: Any, step: int) -> None:
    """The gradients overflow at first, and no step is made."""
    if step == 1:
        b.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    a.optimizer.zero_grad()
    b.scaler.scale(1e3 * a.loss()).backward()
    b.scaler.step(a.optimizer)
    b.scaler.update()
    assert step > 1 or not a.optimizer.state


class Trained:
    def __init__(self) -> None:
        self.net = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def loss(self) -> torch.Tensor:
        return torch.Tensor(self.net(torch.ones(4, 3)).square().mean())

    def backward(self) -> None:
        self.loss().backward()


@pytest.mark.parametrize(
    ("turn", "every", "warned"),
    [
        (accumulate, 3, True),
        (accumulate, 4, False),
        (zero_first, 1, False),
        (zero_last, 1, False),
        (in_turn, 1, False),
        (scaled, 1, False),
    ],
)
def test_gradients_that_wait_for_a_step_at_a_save_are_warned_of_once(turn: Any, every: int, warned: bool) -> None:
    a, b = Trained(), Trained()
    events: list[Event] = []
    checkpoint = hf.Checkpoint(a=a.net, b=b.net, optimizer=a.optimizer, other=b.optimizer)
    with hf.CheckpointManager(MemoryStorage(), checkpoint, sinks=[events.append]) as manager:
        manager.restore()
        for step in range(1, 9):
            turn(a, b, step)
            if step % every == 0:
                manager.save(step)
    told = [event.text for event in events if isinstance(event, Warned)]
    assert len(told) == warned
    assert all(text.startswith("optimizer: saved between backward() and optimizer.step();") for text in told)


class WatchedParameter(nn.Parameter):
    """Notes which threads read its gradient."""

    readers: set[int]

    @property
    def grad(self) -> torch.Tensor | None:
        self.readers.add(threading.get_ident())
        return super().grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        cast("Any", torch.Tensor.grad).__set__(self, gradient)


def test_no_other_thread_reads_the_gradients_of_a_thread(tmp_path: Path) -> None:
    parameter = WatchedParameter(torch.zeros(3))
    parameter.readers = set()
    optimizer = torch.optim.SGD([parameter], 0.1)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(optimizer=optimizer)) as manager:
        manager.save(1)
        another = model(1)
        with ThreadPoolExecutor(1) as executor:
            executor.submit(train, another, torch.optim.SGD(another.parameters(), 0.1)).result()
        manager.save(2)
    assert parameter.readers == {threading.get_ident()}


def test_an_optimizer_of_another_model_is_warned_of(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    loose = [nn.Parameter(torch.zeros(2))]

    def warned(**objects: Any) -> list[str]:
        events: list[Event] = []
        with hf.resumable(tmp_path / "_".join(objects), sinks=[events.append], rng=hf.RNG(), **objects) as run:
            list(run.steps(1))
        return [
            event.text.partition(" ")[0] for event in events if isinstance(event, Warned) and "none of" in event.text
        ]

    assert warned(model=model, optimizer=torch.optim.SGD(other.parameters())) == ["optimizer"]
    assert warned(model=model, opt=torch.optim.SGD(model.parameters())) == []
    assert warned(net=torch.compile(model), opt=torch.optim.SGD(model.parameters())) == []
    assert warned(model=model, loose=loose, opt=torch.optim.SGD(loose)) == []
    assert warned(opt_alone=torch.optim.SGD(other.parameters())) == []


@pytest.mark.parametrize("way", ["resumable", "own loop", "handler"])
def test_a_kept_optimizer_that_does_not_step_is_warned_of(tmp_path: Path, way: str) -> None:
    model = nn.Linear(4, 1)
    kept, other = (torch.optim.SGD(model.parameters()) for _ in range(2))

    def warned(steps: int, trainer: torch.optim.Optimizer) -> list[str]:
        events: list[Event] = []
        options: dict[str, Any] = {"sinks": [events.append], "save_every": hf.Steps(100)}
        objects: dict[str, Any] = {"model": model, "optimizer": kept, "rng": hf.RNG()}
        if way == "handler":
            with (
                hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(**objects), begin_anew=True, **options) as manager,
                hf.PreemptionCheckpointHandler(manager) as handler,
            ):
                for _ in handler.steps(steps):
                    trainer.step()
        else:
            with hf.resumable(tmp_path / "run", begin_anew=True, **objects, **options) as run:
                for _ in run.steps(steps) if way == "resumable" else range(steps):
                    trainer.step()
                    if way == "own loop":
                        run.finish_step()
        return [event.text.partition(".")[0] for event in events if isinstance(event, Warned)]

    assert warned(3, kept) == []
    assert warned(1, other) == [], "an evaluation, perhaps, or a step that accumulates"
    assert warned(3, other) == ["3 steps were counted, but optimizer has not stepped"]
    assert warned(70, other) == ["65 steps were counted, but optimizer has not stepped"], "it is said once"
    assert not kept._optimizer_step_pre_hooks
