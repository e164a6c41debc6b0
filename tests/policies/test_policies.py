from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import OutOfRangeError, UsageError
from holdfast.policies import (
    All,
    Auto,
    Best,
    Epochs,
    EveryHours,
    EveryN,
    KeptCandidate,
    Latest,
    Newer,
    Referrer,
    RetentionPolicy,
    SaveDecision,
    SaveMoment,
    SavePolicy,
    Seconds,
    Steps,
    plan_retention,
    read_keep,
    read_save_every,
    spare_referred,
)
from holdfast.policies.saving import PROBE_STEPS, daly_interval_seconds
from holdfast.save.lineage import StepTimer, usual_stall_seconds

HOUR = 3600.0


def run_steps(policy: SavePolicy, first: int, last: int, restored: int | None = None) -> list[int]:
    """The steps at which a job that takes one second a step saves."""
    saved: list[int] = []
    saved_at = float(first)
    last_saved = restored
    for step in range(first + 1, last + 1):
        moment = SaveMoment(
            step=step, last_saved_step=last_saved, first_step=first, seconds_since_last_save=step - saved_at
        )
        if policy.decide_save(moment).save:
            saved.append(step)
            last_saved, saved_at = step, float(step)
    return saved


class TestSteps:
    def test_saves_at_multiples(self) -> None:
        assert run_steps(Steps(5), 0, 17) == [5, 10, 15]

    def test_saves_at_multiples_after_resuming_between_two(self) -> None:
        assert run_steps(Steps(5), 7, 17, restored=7) == [10, 15]

    def test_does_not_save_again_the_step_that_was_restored(self) -> None:
        assert run_steps(Steps(5), 10, 15, restored=10) == [15]

    def test_a_number_that_jumps_over_a_multiple_saves(self) -> None:
        assert Steps(5).decide_save(SaveMoment(step=11, last_saved_step=8)).save
        assert not Steps(5).decide_save(SaveMoment(step=14, last_saved_step=11)).save

    def test_another_policy_does_not_shift_the_multiples(self) -> None:
        assert run_steps(Steps(5) | Seconds(3), 0, 12) == [3, 5, 8, 10]

    def test_steps_counts_from_the_step_that_a_run_went_back_to(self) -> None:
        assert Steps(5).decide_save(SaveMoment(step=305, last_saved_step=900, first_step=300)).save

    def test_the_reason_names_the_next_save(self) -> None:
        assert "20" in Steps(10).decide_save(SaveMoment(step=12, last_saved_step=10)).reason

    @given(st.integers(1, 50), st.integers(0, 200), st.integers(1, 200))
    def test_every_multiple_once(self, n: int, first: int, count: int) -> None:
        expected = [step for step in range(first + 1, first + count + 1) if step % n == 0]
        assert run_steps(Steps(n), first, first + count) == expected


class TestSeconds:
    def test_saves_when_the_time_has_passed(self) -> None:
        assert run_steps(Seconds(4), 0, 13) == [4, 8, 12]

    def test_not_without_training_in_between(self) -> None:
        moment = SaveMoment(step=7, last_saved_step=7, first_step=3, seconds_since_last_save=1e9)
        assert not Seconds(1).decide_save(moment).save

    def test_not_before_the_first_step(self) -> None:
        assert not Seconds(1).decide_save(SaveMoment(step=0, seconds_since_last_save=1e9)).save


def measured(blocked: float, durable: float = 0.0, since: float = 0.0) -> SaveMoment:
    return SaveMoment(
        step=1000,
        last_saved_step=500,
        seconds_since_last_save=since,
        step_seconds=0.5,
        save_blocked_seconds=blocked,
        save_durable_seconds=durable,
    )


class TestAuto:
    def test_saves_once_early_to_measure(self) -> None:
        assert run_steps(Auto(), 0, PROBE_STEPS + 20) == [PROBE_STEPS]

    def test_measures_early_after_a_resume_too(self) -> None:
        assert run_steps(Auto(), 100, 120, restored=100) == [100 + PROBE_STEPS]

    def test_goes_on_when_the_first_save_was_never_measured(self) -> None:
        saved = run_steps(Auto(), 0, 1000)
        assert len(saved) > 3

    def test_the_optimum_is_near_youngs(self) -> None:
        chosen = Auto(mtbf_seconds=6 * HOUR).chosen(measured(blocked=0.1))
        assert chosen.bound == "optimum"
        assert chosen.seconds == pytest.approx(math.sqrt(2 * 0.1 * 6 * HOUR), rel=0.01)
        assert chosen.steps == math.ceil(chosen.seconds / 0.5)

    def test_a_dear_save_is_held_to_its_share_of_the_time(self) -> None:
        chosen = Auto(overhead=0.01).chosen(measured(blocked=30.0))
        assert chosen.bound == "overhead"
        assert 30.0 / (chosen.seconds + 30.0) == pytest.approx(0.01)

    def test_no_save_begins_before_the_last_is_durable(self) -> None:
        chosen = Auto().chosen(measured(blocked=0.001, durable=500.0))
        assert (chosen.bound, chosen.seconds) == ("durable", 500.0)

    def test_decides_by_what_it_chose(self) -> None:
        policy = Auto()
        due = policy.chosen(measured(0.1)).seconds
        assert not policy.decide_save(measured(0.1, since=due - 0.01)).save
        assert policy.decide_save(measured(0.1, since=due)).save

    def test_says_what_it_chose(self) -> None:
        line = Auto().describe(measured(blocked=0.1))
        assert "every" in line
        assert "0.1 s" in line
        assert "steps" in line

    @given(
        st.floats(0, 1e6),
        st.floats(0, 1e6),
        st.floats(1e-4, 0.9),
        st.floats(1, 1e9),
    )
    def test_the_bounds_hold_for_every_measurement(
        self, blocked: float, durable: float, overhead: float, mtbf: float
    ) -> None:
        chosen = Auto(overhead, mtbf).chosen(measured(blocked, durable))
        assert chosen.seconds >= durable
        assert blocked <= overhead * (chosen.seconds + blocked) * (1 + 1e-9)
        assert math.isfinite(chosen.seconds)

    def test_daly_minimizes_the_expected_time(self) -> None:
        """Against the exact expectation for exponential failures, whose optimum the estimate is to approach."""
        mtbf = HOUR
        for cost in (1.0, 10.0, 60.0, 300.0):

            def waste(interval: float, cost: float = cost) -> float:
                return mtbf * (math.exp((interval + cost) / mtbf) - 1) / interval

            best = min(waste(interval) for interval in range(10, 4000, 2))
            assert waste(daly_interval_seconds(cost, mtbf)) <= best * 1.002

    def test_daly_ends_at_the_time_between_failures(self) -> None:
        assert daly_interval_seconds(10 * HOUR, HOUR) == HOUR


class TestUsualStall:
    @pytest.mark.parametrize(
        ("stalls", "usual"),
        [
            ((6.0,), 6.0),
            ((6.0, 1.0), 1.0),
            ((6.0, 60.0), 6.0),  # The second was the slow one.
            ((0.5, 1.0, 60.0), 1.0),
            ((0.5, 60.0, 1.0), 1.0),
            ((6.0, 1.0, 60.0, 1.1), 1.1),
            ((6.0, 1.0, 1.1, 1.2, 60.0), 1.1),
            ((6.0, 1.0, 1.1, 1.2, 1.3, 60.0), 1.2),
            ((6.0, 3.0, 1.0, 1.0, 1.0, 3.0, 3.0), 1.0),  # Never more than five.
        ],
    )
    def test_of_the_last_few(self, stalls: tuple[float, ...], usual: float) -> None:
        assert usual_stall_seconds(stalls) == usual

    def test_a_pace_forgets_no_first_one_and_takes_each_save_in_once(self) -> None:
        pace, told = StepTimer(), []
        # What a save has cost is told again after each step until the next one is durable.
        for step, blocked in enumerate((None, None, 6.0, 6.0, 6.0, 1.0, 1.0, 60.0, 60.0, 60.0, 60.0, 1.1, 1.2)):
            told.append(pace.moment(step, blocked, 2.0).save_blocked_seconds)
        assert told == [None, None, 6.0, 6.0, 6.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.1, 1.1]
        for step, blocked in enumerate((3.0, 3.1, 3.2, 3.3)):
            usual = pace.moment(100 + step, blocked, 2.0).save_blocked_seconds
        assert usual == 3.1

    def test_one_slow_save_makes_saves_no_rarer(self) -> None:
        pace = StepTimer()
        moments = [pace.moment(step, blocked, 0.5) for step, blocked in enumerate((0.6, 0.1, 0.11, 60.0), start=1)]
        assert Auto().chosen(moments[-1]).seconds < 100
        assert Auto().chosen(measured(60.0)).seconds > 5000


class TestCombinedSaves:
    def test_any_yes_is_yes_with_its_reason(self) -> None:
        decision = (Steps(5) | Seconds(100)).decide_save(SaveMoment(step=5, seconds_since_last_save=1))
        assert decision == SaveDecision(True, "5 steps are a multiple of 5")

    def test_a_policy_of_the_user(self) -> None:
        class OnTheHour:
            def decide_save(self, moment: SaveMoment) -> SaveDecision:
                return SaveDecision(moment.step == 7, "seven")

        for policy in (Steps(5) | OnTheHour(), OnTheHour() | Steps(5), Steps(5) | Seconds(1e9) | OnTheHour()):
            assert run_steps(policy, 0, 10) == [5, 7, 10]

    def test_reprs_are_what_was_written(self) -> None:
        assert repr(Steps(500) | Seconds(60)) == "Steps(500) | Seconds(60)"
        assert repr(Seconds(60) | (Steps(1) | Auto())) == "Seconds(60) | Steps(1) | " + repr(Auto())
        assert eval(repr(Auto(0.02, 99)), {"Auto": Auto}) == Auto(0.02, 99)

    def test_the_two_families_do_not_mix(self) -> None:
        with pytest.raises(UsageError, match="save policy"):
            Steps(5) | Latest(3)  # type: ignore[operator]
        with pytest.raises(UsageError, match="retention policy"):
            Latest(3) | Steps(5)  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3", None])
def test_counts_are_whole_numbers_from_one_on(wrong: Any) -> None:
    for make in (Steps, Latest, EveryN, lambda n: Best("loss", n=n)):
        with pytest.raises(UsageError):
            make(wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, True, "3", None, 10**400])
def test_times_are_finite_numbers_above_zero(wrong: Any) -> None:
    makers: list[Callable[[Any], object]] = [Seconds, Newer]
    if wrong is not None:
        makers.append(lambda seconds: Auto(mtbf_seconds=seconds))
    for make in makers:
        with pytest.raises(UsageError):
            make(wrong)


@pytest.mark.parametrize("wrong", [0, 1, -0.1, math.nan, "1%"])
def test_overhead_outside_zero_to_one_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        Auto(overhead=wrong)


def test_best_needs_a_metric_and_a_mode() -> None:
    with pytest.raises(UsageError):
        Best("")
    with pytest.raises(UsageError):
        Best("loss", mode="least")  # type: ignore[arg-type]


def steps_with(**metrics: list[float | None]) -> list[KeptCandidate[int]]:
    """Steps 100, 200, ... committed an hour after each other, with these metrics."""
    length = max(map(len, metrics.values()), default=0)
    return [
        KeptCandidate(
            key=100 * (place + 1),
            step=100 * (place + 1),
            committed_at_seconds=place * HOUR,
            metrics={name: value for name, values in metrics.items() if (value := values[place]) is not None},
        )
        for place in range(length)
    ]


def kept(policy: RetentionPolicy, committed: list[KeptCandidate[int]], now: float = 0.0) -> set[int]:
    return set(policy.choose_kept(committed, now))


class TestRetention:
    def test_latest(self) -> None:
        assert kept(Latest(2), steps_with(x=[1, 2, 3, 4])) == {300, 400}
        assert kept(Latest(9), steps_with(x=[1, 2])) == {100, 200}

    def test_every_n(self) -> None:
        assert kept(EveryN(200), steps_with(x=[0] * 5)) == {200, 400}

    def test_one_for_each_hours(self) -> None:
        committed = [KeptCandidate(step, step, 0.4 * HOUR * step) for step in range(12)]
        assert kept(EveryHours(1), committed) == {0, 3, 6, 9}
        # After each save, as in a run: what is kept once stays, and costs no other its place.
        present: list[KeptCandidate[int]] = []
        for candidate in committed:
            present.append(candidate)
            keep = plan_retention(Latest(2) | EveryHours(1), present, {}, 0.0).keep
            present = [one for one in present if one.key in keep]
        assert [one.key for one in present] == [0, 3, 6, 9, 10, 11]
        # A clock that went back: one is kept at once, and then one for each hour again.
        back = [*committed, *(KeptCandidate(step, step, 0.4 * HOUR * (step - 12)) for step in range(12, 18))]
        assert kept(EveryHours(1), back) == {0, 3, 6, 9, 12, 15}

    def test_best(self) -> None:
        committed = steps_with(loss=[3.0, 1.0, 2.0, 4.0])
        assert kept(Best("loss"), committed) == {200}
        assert kept(Best("loss", n=2), committed) == {200, 300}
        assert kept(Best("loss", mode="max"), committed) == {400}

    def test_best_of_equals_is_the_newer(self) -> None:
        assert kept(Best("loss"), steps_with(loss=[1.0, 1.0, 2.0])) == {200}

    def test_nan_never_wins_and_a_missing_metric_does_not_take_part(self) -> None:
        committed = steps_with(loss=[math.nan, None, 5.0, math.inf])
        assert kept(Best("loss", n=9), committed) == {300, 400}
        assert kept(Best("loss", mode="max"), steps_with(loss=[1.0, math.nan])) == {100}
        assert kept(Best("accuracy"), committed) == set()

    def test_newer(self) -> None:
        committed = steps_with(x=[0] * 4)
        assert kept(Newer(1.5 * HOUR), committed, now=3 * HOUR) == {300, 400}

    def test_a_clock_that_went_back_keeps(self) -> None:
        committed = steps_with(x=[0] * 4)
        assert kept(Newer(60), committed, now=1.5 * HOUR) == {300, 400}
        assert kept(Newer(60), committed, now=-1e9) == {100, 200, 300, 400}

    def test_all(self) -> None:
        assert kept(All(), steps_with(x=[0] * 3)) == {100, 200, 300}

    def test_union_with_reasons(self) -> None:
        committed = steps_with(loss=[1.0, 3.0, 2.0])
        chosen = (Latest(1) | Best("loss") | EveryN(300)).choose_kept(committed, 0.0)
        assert set(chosen) == {100, 300}
        assert "minimum" in chosen[100]
        assert "latest" in chosen[300]
        assert "multiple" in chosen[300]

    def test_reprs_are_what_was_written(self) -> None:
        policy = Latest(3) | Best("val_loss") | Best("acc", mode="max", n=2) | EveryN(10) | Newer(60) | All()
        expected = "Latest(3) | Best('val_loss') | Best('acc', mode='max', n=2) | EveryN(10) | Newer(60) | All()"
        assert repr(policy) == expected


class TestPlan:
    def test_newest_step_is_kept_under_every_policy(self) -> None:
        plan = plan_retention(Best("loss"), steps_with(loss=[1.0, 2.0, math.nan]), {}, 0.0)
        assert plan.remove == (200,)
        assert plan.keep[300] == "the newest"

    def test_the_protected_stay_with_their_reason(self) -> None:
        plan = plan_retention(Latest(1), steps_with(x=[0] * 4), {200: "restored from", 999: "gone"}, 0.0)
        assert plan.keep == {200: "restored from", 400: "the newest; among the 1 latest"}
        assert plan.remove == (100, 300)

    def test_nothing_to_look_at(self) -> None:
        empty: list[KeptCandidate[int]] = []
        plan = plan_retention(Latest(1), empty, {}, 0.0)
        assert (plan.keep, plan.remove) == ({}, ())

    def test_keys_may_carry_a_generation(self) -> None:
        committed = [KeptCandidate((5, 1), 5, 0.0), KeptCandidate((5, 2), 5, 1.0), KeptCandidate((6, 2), 6, 2.0)]
        plan = plan_retention(Latest(1), committed, {(5, 1): "restored from"}, 0.0)
        assert plan.remove == ((5, 2),)

    def test_two_of_the_same_key(self) -> None:
        with pytest.raises(UsageError):
            plan_retention(Latest(1), [KeptCandidate(1, 1, 0.0), KeptCandidate(1, 1, 1.0)], {}, 0.0)

    def test_a_policy_that_names_what_is_not_there(self) -> None:
        class Odd:
            def choose_kept(self, committed: Any, now_seconds: float) -> Any:
                return {12345: "odd"}

        plan = plan_retention(Odd(), steps_with(x=[0, 0]), {}, 0.0)
        assert (set(plan.keep), plan.remove) == ({200}, (100,))

    @given(
        st.lists(st.one_of(st.none(), st.floats()), max_size=12),
        st.lists(st.sampled_from([Latest(1), Latest(3), EveryN(300), Best("m"), Newer(HOUR)]), min_size=1),
        st.sets(st.integers(1, 12).map(lambda place: place * 100)),
        st.floats(-1e5, 1e5),
    )
    def test_no_policy_can_lose_the_job(
        self, values: list[float | None], policies: list[RetentionPolicy], protected: set[int], now: float
    ) -> None:
        committed = steps_with(m=values)
        policy = policies[0]
        for other in policies[1:]:
            policy = policy | other  # type: ignore[operator]
        plan = plan_retention(policy, committed, dict.fromkeys(protected, "protected"), now)
        keys = [candidate.key for candidate in committed]
        assert sorted([*plan.keep, *plan.remove]) == keys
        assert not protected & set(plan.remove)
        if keys:
            assert keys[-1] in plan.keep
            assert kept(policy, committed, now) <= set(plan.keep)


class TestReferences:
    def test_what_a_kept_step_refers_to_is_kept_whole(self) -> None:
        referrers = [Referrer(400, 400, (200,)), Referrer(300, 300, (200, 100)), Referrer(200, 200, (100,))]
        plan = plan_retention(Latest(1), steps_with(x=[0] * 4), {}, 0.0, referrers)
        assert plan.keep == {
            100: "step 200 refers to it",
            200: "step 400 refers to it",
            400: "the newest; among the 1 latest",
        }
        assert plan.remove == (300,)

    def test_steps_that_are_not_looked_at_keep_what_they_refer_to(self) -> None:
        plan = plan_retention(Latest(1), steps_with(x=[0] * 3), {}, 0.0, [Referrer(999, 999, (100,))])
        assert plan.keep[100] == "step 999 refers to it"
        assert plan.remove == (200,)

    def test_a_replaced_step_goes_unless_it_is_referred_to(self) -> None:
        committed = steps_with(x=[0] * 2)
        assert plan_retention(Latest(1), committed, {}, 0.0, (), [150]).remove == (100, 150)
        plan = plan_retention(Latest(1), committed, {}, 0.0, [Referrer(200, 200, (150,))], [150])
        assert plan.keep[150] == "step 200 refers to it"
        assert plan.remove == (100,)

    def test_several_referrers_are_counted(self) -> None:
        referrers = [Referrer(step, step, (100,)) for step in (200, 400, 300)]
        assert spare_referred([100], referrers) == {100: "step 400 and 2 more refer to it"}
        assert spare_referred([100, 200, 300, 400], referrers) == {}

    @given(
        st.lists(st.lists(st.integers(0, 11), max_size=3), max_size=12),
        st.sets(st.integers(0, 11)),
        st.sampled_from([Latest(1), Latest(3), EveryN(300)]),
    )
    def test_nothing_that_stays_refers_to_what_goes(
        self, earlier: list[list[int]], replaced_places: set[int], policy: RetentionPolicy
    ) -> None:
        """And nothing stays without a reason."""
        count = len(earlier)
        committed = steps_with(x=[0] * count)
        sources = {
            100 * (place + 1): {100 * (one % place + 1) for one in of} for place, of in enumerate(earlier) if place
        }
        replaced = {100 * (place + 1) + 50 for place in replaced_places if place < count}
        for key in replaced:
            sources.setdefault(key + 50, set()).add(key)
            sources[key] = {key - 50}
        referrers = [Referrer(key, key, tuple(sorted(of))) for key, of in sources.items() if of]
        plan = plan_retention(policy, committed, {}, 0.0, referrers, sorted(replaced))
        everything = {candidate.key for candidate in committed} | replaced
        assert sorted([*plan.keep, *plan.remove]) == sorted(everything)
        staying = set(sources) - set(plan.remove)
        assert not {one for key in staying for one in sources[key]} & set(plan.remove)
        wanted = kept(policy, committed) | {candidate.key for candidate in committed[-1:]}
        needed = {one for key in staying for one in sources[key]}
        assert set(plan.keep) <= wanted | needed


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        (None, None),
        (500, Steps(500)),
        (np.int64(3), Steps(3)),
        ("500 steps", Steps(500)),
        ("1_000 Steps", Steps(1000)),
        ("step", Steps(1)),
        ("epoch", Epochs(1)),
        ("1 epoch", Epochs(1)),
        (" 2epochs ", Epochs(2)),
        ("90 s", Seconds(90)),
        ("10min", Seconds(600)),
        ("1h", Seconds(3600)),
        ("1h30m", Seconds(5400)),
        ("1 hour, 30 minutes", Seconds(5400)),
        ("0.5 days", Seconds(43_200)),
        ("auto", Auto()),
        (Steps(5) | Seconds(9), Steps(5) | Seconds(9)),
    ],
)
def test_plain_value_of_save_every_is_read_as_its_policy(value: Any, policy: SavePolicy | None) -> None:
    assert read_save_every(value) == policy


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        (None, None),
        (3, Latest(3)),
        ("7 days", Newer(604_800)),
        ("all", All()),
        (Best("a"), Best("a")),
    ],
)
def test_plain_value_of_keep_is_read_as_its_policy(value: Any, policy: RetentionPolicy | None) -> None:
    assert read_keep(value) == policy


OUT_OF_RANGE: list[Any] = [0, -1, "0s"]
WRONG: list[Any] = [True, 3.0, math.nan, "", "3", "-5s", "1h30", "10 parsecs", "1 epoch s", "9" * 5000, [], holdfast]


@pytest.mark.parametrize("read", [read_save_every, read_keep])
@pytest.mark.parametrize("value", [*OUT_OF_RANGE, *WRONG])
def test_wrong_plain_value_says_what_to_write(read: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(
        UsageError, match=r"must be a policy such as holdfast\..*, a number of .* text such as"
    ) as caught:
        read(value)
    assert f"got {type(value).__name__}" in str(caught.value)
    assert isinstance(caught.value, OutOfRangeError) == (value in OUT_OF_RANGE)
