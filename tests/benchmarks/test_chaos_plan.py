from __future__ import annotations

import itertools

import pytest

from benchmarks.chaos.faults import KINDS
from benchmarks.chaos.plan import Effect, Planner

EFFECTS = {name: kind.effect for name, kind in KINDS.items()}


def test_a_seed_gives_the_same_faults_and_another_one_others():
    first, again, other = (Planner(EFFECTS, seed).part(200.0, learner_ends=True) for seed in (1, 1, 2))
    assert first == again
    assert [each.kind for each in first] != [each.kind for each in other]


def test_faults_come_every_one_to_four_seconds_and_are_numbered_over_all_parts():
    planner = Planner(EFFECTS, 3)
    parts = [planner.part(100.0, learner_ends=True), planner.part(100.0, learner_ends=False)]
    assert [each.number for part in parts for each in part] == list(range(1, 1 + sum(map(len, parts))))
    for part in parts:
        assert all(1.0 <= each.pause_s <= 4.0 for each in part)
        assert 90.0 < sum(each.pause_s for each in part) <= 100.0


def test_all_kinds_come_and_about_as_often_as_others_with_the_same_effect():
    planned = Planner(EFFECTS, 4).part(840.0, learner_ends=True)
    for effect in Effect:
        kinds = [name for name in EFFECTS if EFFECTS[name] is effect]
        counts = [sum(each.kind == kind for each in planned) for kind in kinds]
        assert min(counts) > 0
        assert max(counts) - min(counts) <= 1
    assert len({each.kind for each in planned}) >= 10


@pytest.mark.parametrize(("effect", "apart_s"), [(Effect.SILENCES, 18.0), (Effect.ENDS_LEARNER, 12.0)])
def test_kinds_whose_standstills_would_add_up_keep_a_distance(effect, apart_s):
    at, times = 0.0, []
    for each in Planner(EFFECTS, 5).part(600.0, learner_ends=True):
        at += each.pause_s
        if EFFECTS[each.kind] is effect:
            times.append(at)
    assert len(times) > 15
    assert all(later - earlier >= apart_s for earlier, later in itertools.pairwise(times))


def test_a_part_without_ends_of_the_learner_has_none():
    planned = Planner(EFFECTS, 6).part(300.0, learner_ends=False)
    assert planned
    assert not any(EFFECTS[each.kind] is Effect.ENDS_LEARNER for each in planned)


def test_kinds_of_one_effect_alone_make_a_plan_too():
    effects = {"learner-killed": Effect.ENDS_LEARNER}
    assert {each.kind for each in Planner(effects, 7).part(20.0, learner_ends=True)} == {"learner-killed"}
    assert Planner(effects, 7).part(20.0, learner_ends=False) == []
