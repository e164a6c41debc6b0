"""Records of old generations that are removed: the living line is what it was, now and whatever comes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.names import StepName
from holdfast.format.records import KEPT_GENERATIONS, Base, choose_living, make_base, plan_forgetting


class Life:
    """A run that is used in all ways: jobs go on, go back, begin anew, replace steps, and steps are removed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.steps: set[StepName] = set()
        self.bases: dict[int, Base] = {}
        self.opened: set[int] = set()
        self.newest = 0
        # Few people prune what is off the line; and then after each restart.
        self.prunes = self.random.choice([0, 0, 0.01, 0.5])
        self.retains = self.random.choice([0, 0.02, 0.5])

    def line(self, bases: dict[int, Base] | None = None) -> tuple[StepName, ...]:
        return choose_living(self.steps, self.bases if bases is None else bases)

    def live(self, *, restarts: int, wild: float) -> None:
        """So many restarts, of which that share does something else than to go on from the newest step."""
        choose = self.random
        for _ in range(restarts):
            living = self.line()
            self.newest += 1
            generation = self.newest
            self.opened.add(generation)
            if choose.random() < 0.1:
                continue  # It died before it recorded a base.
            base = living[-1] if living else None
            if living and choose.random() < wild:
                base = choose.choice([None, choose.choice(living), *sorted(self.steps)])
            self.bases[generation] = make_base(generation, base)
            step = 0 if base is None else base.step
            for _ in range(choose.randint(0, 4)):
                step += choose.randint(1, 30)
                self.steps.add(StepName(step, generation))
            if base is not None and choose.random() < wild / 3:
                again = choose.choice([name for name in self.line() if name.step <= base.step] or [base])
                self.steps.add(StepName(again.step, generation))
            self.remove(choose.random())

    def remove(self, share: float) -> None:
        """As retention does, and a person who prunes: any but the newest of the line."""
        living = self.line()
        for name in sorted(self.steps):
            chance = share * (self.retains if name in living else self.prunes)
            if name not in living[-1:] and self.random.random() < chance:
                self.steps.discard(name)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.3, 0.8]))
def test_the_line_stays_the_same_while_and_after_records_go(seed: int, wild: float) -> None:
    life = Life(seed)
    life.live(restarts=life.random.randint(0, 30), wild=wild)
    life.live(restarts=life.random.randint(0, 40), wild=0)
    living = life.line()
    others = life.steps - set(living)
    first, then = plan_forgetting(living, others, life.bases, life.opened)
    assert not {*first, *then} & set(sorted(life.opened)[-KEPT_GENERATIONS:])
    kept = dict(life.bases)
    # A crash, or a power cut, leaves any of a group, but no group is begun before the one before is gone.
    for group in (first, then):
        for generation in life.random.sample(group, len(group)):
            kept.pop(generation, None)
            assert life.line(kept) == living
    forgotten = life.bases.keys() - kept.keys()
    # What comes later changes nothing about that: steps go, and jobs begin from wherever there is one.
    for _ in range(20):
        life.live(restarts=1, wild=wild)
        life.remove(life.random.random())
        assert life.line({g: base for g, base in life.bases.items() if g not in forgotten}) == life.line()


def test_of_a_run_that_only_goes_on_all_old_records_go() -> None:
    bases = {
        number: make_base(number, StepName(10 * number - 10, number - 1) if number > 1 else None)
        for number in range(1, 101)
    }
    living = tuple(StepName(10 * number, number) for number in range(1, 101))
    first, then = plan_forgetting(living, (), bases, bases)
    assert (first, then) == ((), tuple(range(1, 101 - KEPT_GENERATIONS)))
    # With `Latest(3)` the steps of most are gone.
    assert plan_forgetting(living[-3:], (), bases, bases) == (first, then)


@pytest.mark.parametrize("off_line", [5, 60])
def test_what_keeps_a_step_off_the_line_stays(off_line: int) -> None:
    bases = {
        number: make_base(number, StepName(10 * number - 10, number - 1) if number > 1 else None)
        for number in range(1, 101)
    }
    living = tuple(StepName(10 * number, number) for number in range(1, 101))
    first, then = plan_forgetting(living, [StepName(10 * off_line + 5, off_line)], bases, bases)
    assert (first, then) == ((), tuple(range(off_line + 2, 101 - KEPT_GENERATIONS)))
