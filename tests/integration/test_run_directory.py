"""A run directory belongs to one learner; a run fails with a clear sentence if its directory is
removed.
"""

from __future__ import annotations

import re
import shutil


def test_a_second_learner_is_refused_and_a_removed_directory_ends_the_run(processes) -> None:
    options = (
        "--seed=1",
        "--num-workers=1",
        "--min-iter-time-s=0.2",
        "--xla=off",
        "--train-batch-size=200",
        "--rollout-fragment-length=50",
        "--num-envs-per-worker=1",
        "--sgd-minibatch-size=50",
    )
    first = processes.learner(*options)
    first.wait_for_result(lambda result: result["updates_total"] >= 2)
    results = (first.run_dir / "result.jsonl").read_text()
    for resume in (False, True):
        second = processes.learner(resume=resume)
        assert second.wait() == 1, second.text
        assert re.search(rf"{first.run_dir} .*\b{first.pid}\b", second.text)
        assert len(second.text.splitlines()) == 1
    assert (first.run_dir / "result.jsonl").read_text().startswith(results)

    shutil.rmtree(first.run_dir)
    assert first.wait() == 1, first.text
    assert str(first.run_dir) in first.text.splitlines()[-1]
