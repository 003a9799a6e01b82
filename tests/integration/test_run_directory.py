"""A run directory is one learner's; one that is removed under it does not take with it what is learned."""

from __future__ import annotations

import re
import shutil
import signal

from aiorl.acting.checkpoint import load_newest_valid


def test_a_second_learner_is_refused_and_a_removed_directory_is_made_again(processes) -> None:
    options = ("--seed=1", "--num-workers=1", "--min-iter-time-s=0.2", "--xla=off", "--train-batch-size=200",
               "--rollout-fragment-length=50", "--num-envs-per-worker=1", "--sgd-minibatch-size=50")  # fmt: skip
    first = processes.learner(*options)
    first.wait_for_result(lambda result: result["updates_total"] >= 2)
    results = (first.run_dir / "result.jsonl").read_text()
    for resume in (False, True):
        second = processes.learner(resume=resume)
        assert second.wait() == 1, second.text
        assert re.search(rf"aiorl: .* is in use by the learner with pid {first.pid} on this host", second.text)
        assert len(second.text.splitlines()) == 1
    assert (first.run_dir / "result.jsonl").read_text().startswith(results)

    shutil.rmtree(first.run_dir)
    first.wait_for("was removed or renamed; it is made again", 20.0)
    updates = first.wait_for_result(lambda result: True)["updates_total"]
    first.wait_for_result(lambda result: result["updates_total"] > updates)
    first.send(signal.SIGINT)
    assert first.wait() == 0, first.text
    assert len(re.findall("was removed or renamed", first.text)) == 1
    assert "checkpoint" in first.log
    newest = load_newest_valid(first.run_dir / "checkpoints")
    assert {"config.yaml", "run.json", "log.txt"} <= {path.name for path in first.run_dir.iterdir()}
    assert newest.number > updates
