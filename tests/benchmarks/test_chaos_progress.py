from __future__ import annotations

import json

import pytest

from benchmarks.chaos.progress import Progress, Span, longest_standstill, standstill, time_dead
from benchmarks.ledger import ledger_gap


def result(at: float, trained: int, *, updates: int = 1, lost: int = 0, sampled: int | None = None):
    ledger = {
        "sampled": trained + lost + 30 if sampled is None else sampled,
        "trained": trained,
        "queued": 10,
        "in_flight": 20,
        "discarded": {},
        "lost": {"its process ended": lost},
    }
    return {
        "timestamp": at,
        "training_iteration": int(at),
        "env_steps_trained_total": trained,
        "timesteps_total": trained + 10,
        "updates_this_iter": updates,
        "num_healthy_workers": 6,
        "ledger": ledger,
    }


def test_a_ledger_balances_if_every_step_is_somewhere_and_nowhere_less_than_none():
    assert ledger_gap(result(1.0, 100, lost=5)["ledger"]) == ""
    assert ledger_gap(result(1.0, 100, sampled=131)["ledger"]).startswith("+1 env steps are nowhere")
    below = {"sampled": 0, "trained": 5, "queued": -5, "in_flight": 0, "discarded": {}, "lost": {}}
    assert ledger_gap(below).startswith("queued negative")


def test_results_are_read_as_they_come_and_half_lines_when_they_are_whole(tmp_path):
    path = tmp_path / "result.jsonl"
    progress = Progress(path)
    progress.births.append(0.0)
    progress.read()
    assert progress.rows == []
    line = json.dumps(result(2.0, 20)) + "\n"
    path.write_text(json.dumps(result(1.0, 10)) + "\n" + line[:30])
    progress.read()
    assert [row.trained for row in progress.rows] == [10]
    with path.open("a") as file:
        file.write(line[30:])
    progress.read()
    progress.read()
    assert [row.trained for row in progress.rows] == [10, 20]
    assert progress.rises == [1.0, 2.0]


def test_a_resumed_run_takes_results_off_and_goes_on_below_what_was_trained_before(tmp_path):
    path = tmp_path / "result.jsonl"
    progress = Progress(path)
    progress.births.append(0.0)
    path.write_text("".join(json.dumps(result(at, int(10 * at))) + "\n" for at in (1.0, 2.0, 3.0)))
    progress.read()
    progress.births.append(4.0)
    kept = tmp_path / "kept"
    kept.write_text("".join(json.dumps(r) + "\n" for r in (result(1.0, 10), result(9.0, 15), result(10.0, 15))))
    kept.replace(path)
    progress.read()
    assert [(row.at, row.life, row.trained) for row in progress.rows[-2:]] == [(9.0, 1, 15), (10.0, 1, 15)]
    assert len(progress.rows) == 5
    assert progress.rises == [1.0, 2.0, 3.0, 9.0]


def test_a_result_whose_ledger_does_not_balance_is_a_gap(tmp_path):
    progress = Progress(tmp_path / "result.jsonl")
    progress.add(result(1.0, 10))
    progress.add(result(2.0, 20, sampled=49))
    assert len(progress.gaps) == 1
    assert progress.gaps[0].startswith("result 2: -1 env steps")


@pytest.mark.parametrize(
    ("rises", "fault", "seconds"),
    [
        ([9.5, 10.2, 10.4, 12.0], Span(10.0, 10.0), 1.6),  # the standstill begins soon after the fault
        ([9.5, 10.2, 11.1, 17.0], Span(10.0, 10.0), 0.9),  # this one later: it is not the fault's
        ([9.5, 18.0], Span(10.0, 12.0), 8.0),  # nothing rises while it lasts
        ([5.0, 18.0], Span(10.0, 10.0), 8.0),  # what came before is not its own
        ([10.5, 11.0, 11.5, 14.0, 14.5, 15.5], Span(10.0, 14.0), 2.5),  # in the middle of it
        ([9.5, 10.5, 11.0], Span(10.0, 10.0), None),  # nobody knows yet how long the last one is
        ([], Span(10.0, 10.0), None),
    ],
)
def test_the_longest_standstill_that_begins_with_a_fault_is_how_long_it_took_to_recover(rises, fault, seconds):
    found = standstill(rises, fault)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_standstills_in_which_the_learner_was_dead_are_left_out_of_the_longest():
    rises = [1.0, 2.0, 12.0, 13.0, 16.0]
    assert longest_standstill(rises, Span(0.0, 20.0), []) == 10.0
    assert longest_standstill(rises, Span(0.0, 20.0), [Span(3.0, 12.0)]) == 3.0
    assert longest_standstill(rises, Span(0.0, 13.0), [Span(3.0, 12.0)]) == 1.0
    assert longest_standstill([], Span(0.0, 20.0), []) == 0.0


@pytest.mark.parametrize(("begin", "seconds"), [(10.0, 8.0), (14.0, 6.0), (21.0, None)])
def test_a_learner_that_is_killed_again_before_it_trains_is_dead_until_it_trains(begin, seconds):
    assert time_dead([Span(2.0, 5.0), Span(12.0, 20.0)], Span(begin, begin)) == seconds
