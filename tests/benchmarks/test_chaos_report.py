from __future__ import annotations

import json

from benchmarks.chaos.processes import Ended, aborted, crashes_in, ended_in
from benchmarks.chaos.report import Bars, Report, Struck

ABORT = """\
12:00:00 I registered as worker 3
Assertion failed: !_io_error (src/stream_engine_base.cpp:422)
Fatal Python error: Aborted

Current thread 0x00007f (most recent call first):
"""


def struck(number: int, kind: str, seconds: float | None, **others) -> Struck:
    facts = {"algo": "ppo", "target": "pid 7", "at_s": 3.0, "held_s": 1.0, "ends_learner": False, "beside_death": False}
    return Struck(number=number, kind=kind, recovery_s=seconds, **{**facts, **others})


def failing(report: Report) -> set[str]:
    return {line.name for line in report.lines() if line.ok is False}


def test_a_report_of_which_every_bar_holds_is_ok_and_goes_through_json():
    report = Report(seed=1, bars=Bars(), struck=[struck(1, "garbage", 0.3), struck(2, "blackholed", 9.0)])
    report.deaths_s += [6.0, 9.0, 7.5]
    report.standstills_s["ppo"] = 12.0
    report.memory["ppo, learner"] = (600.0, 612.0)
    assert failing(report) == set()
    assert report.ok
    told = json.loads(json.dumps(report.to_dict()))
    assert told["ok"] is True
    assert told["by_kind"]["blackholed"] == {"faults": 1, "survived": 1, "median_s": 9.0, "worst_s": 9.0}
    assert "NO" not in report.text()


def test_each_bar_that_is_missed_is_named():
    report = Report(seed=1, bars=Bars(), struck=[struck(1, "a", 6.0), struck(2, "b", 16.0), struck(3, "c", None)])
    report.struck.append(struck(4, "learner-killed", 9.0, ends_learner=True))
    report.deaths_s += [9.0]
    report.standstills_s["impala"] = 15.5
    report.gaps.append("result 5: +1 env steps are nowhere")
    report.forgotten.append("resume 1 of checkpoint 7: iteration: 0 where 9 were saved")
    report.left["lost"] = 0
    report.aborted.append("outside-single.txt: Assertion failed")
    report.orphans.append("pid 9")
    report.complaints.append("of 6 workers not all were back")
    report.memory["ppo, learner"] = (600.0, 620.0)
    report.memory["ppo, other workers"] = (50.0, 60.0)  # told only: these are not the same processes
    assert failing(report) == {
        "faults survived",
        "recovery, learner alive, median",
        "recovery, learner alive, worst",
        "recovery, learner dead, median",
        "longest standstill, impala",
        "ledger gaps",
        "resumes compared",
        "forgotten in a resume",
        "env steps lost",
        "aborted processes",
        "orphans",
        "complaints",
        "memory, ppo, learner",
    }
    assert not report.ok
    assert "#3 ppo c (pid 7) at 3 s: trained steps did not rise again" in report.text()


def test_a_run_without_a_fault_shows_nothing():
    assert failing(Report(seed=1, bars=Bars())) == {"faults survived"}


def test_what_fell_into_the_end_of_a_learner_is_survived_but_not_timed():
    report = Report(seed=1, bars=Bars(), resumes=1, weights_compared=1)
    report.struck += [
        struck(1, "a", 1.0),
        struck(2, "a", 40.0, beside_death=True),
        struck(3, "k", 9.0, ends_learner=True),
    ]
    assert report.recoveries_s == [1.0]
    assert report.by_kind()["a"]["survived"] == 2
    assert report.ok


def test_a_fault_after_which_something_does_not_hold_is_not_survived_however_soon_training_goes_on():
    report = Report(seed=1, bars=Bars(), struck=[struck(1, "key-withdrawn", 0.1, misses=("it was not cut",))])
    assert failing(report) == {"faults survived"}
    assert "it was not cut" in report.text()


def test_memory_of_short_runs_is_told_and_not_judged():
    report = Report(seed=1, bars=Bars(memory=None), struck=[struck(1, "garbage", 0.3)])
    report.memory["ppo, learner"] = (100.0, 200.0)
    assert report.ok
    assert "+100.0%" in report.text()


def test_an_abort_is_one_whoever_tells_of_it():
    crashes = crashes_in(ABORT + ABORT + "Fatal Python error: Segmentation fault\n")
    assert len(crashes) == 3
    assert crashes[0].startswith("Assertion failed")
    ended = [Ended("worker", -6, "cpp:422)"), Ended("other", 1, "it failed")]
    assert aborted(crashes[:1], ended) == [crashes[0], "other ended with status 1: it failed"]
    assert len(aborted([], ended)) == 2


def test_only_ends_that_nobody_caused_are_read_from_a_supervisors_log():
    log = """\
12:00:00 W local worker 1 ended with status -9; restart 1 of 3 in 0.2 s
12:00:01 W local worker 2 ended with status -6; restart 1 of 3 in 0.2 s
12:00:02 W worker process 2 ended (-15); restart 1 in 0.5 s
12:00:02 W worker process 1 ended (1); restart 2 in 0.5 s
12:00:03 W local worker 1 ended with status 0; restart 1 of 3 in 0.2 s
"""
    assert [(each.who, each.status) for each in ended_in("log.txt", log)] == [("log.txt", -6), ("log.txt", 1)]
