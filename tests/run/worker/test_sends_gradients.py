"""Samplers that send gradients instead of rows: the learner's own algorithm on the rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from algorithm_cases import gradients_of
from general_parts import NoTensorFlow
from units import sent

from aiorl.data.columns import DEFAULT_POLICY_ID, GRADIENT_OF, NUM_ROWS
from aiorl.errors import BatchError, ConfigError
from aiorl.learning.algorithms.a3c import A3CConfig
from aiorl.net.wire.messages import Snapshot
from aiorl.run.build import Learning, build_learning
from aiorl.run.ingest import check_samples
from aiorl.run.worker.sampler_unit import SamplerUnit, UnitPlace

POLES: dict[str, Any] = {
    "env": "general_runs:Poles",
    "multiagent": {
        "policies": {"left": None, "right": {"config": {"gamma": 0.5}}},
        "policy_mapping_fn": "general_runs:side",
        "policies_to_train": ["right"],
    },
}
SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 16,
    "train_batch_size": 32,
    "seed": 3,
    "model": {"fcnet_hiddens": [8]},
    "eager": True,
    "compilation_cache": "off",
    "observation_filter": "MeanStdFilter",
    "entropy_coeff_schedule": [[0, 0.0], [1000, 1.0]],
}


class Units:
    """Samplers of one run, and the learner's side."""

    def __init__(self, **settings: Any) -> None:
        self.learning: Learning = build_learning(A3CConfig(**{**SMALL, **settings}))
        self.made: list[SamplerUnit] = []

    def unit(self, *, timestep: int = 0, sends: str = "gradients") -> SamplerUnit:
        part = self.learning.worker_part
        policies = {
            name: policy.model_copy(update={"sends": sends})
            for name, policy in part.policies.items()
        }
        snapshot = Snapshot(0, self.learning.group.get_weights(), {}, {}, {"timestep": timestep})
        place = UnitPlace(1, "ab12", num_workers=1)
        part = part.model_copy(update={"policies": policies})
        self.made.append(SamplerUnit(part, self.learning.graphs, snapshot, place))
        return self.made[-1]


@pytest.fixture(scope="module")
def units() -> Iterator[Units]:
    found = Units()
    yield found
    for unit in found.made:
        unit.close()


@pytest.fixture(scope="module")
def polled() -> Iterator[Units]:
    found = Units(**POLES)
    yield found
    for unit in found.made:
        unit.close()


@pytest.mark.parametrize(("kind", "policy_id"), [("units", DEFAULT_POLICY_ID), ("polled", "right")])
def test_a_gradient_equals_that_of_the_rows_it_replaces(
    request: Any, kind: str, policy_id: str
) -> None:
    """With the weights and the timestep of the snapshot; the rest of the fragment is the same."""
    units = request.getfixturevalue(kind)
    sent, rows = (units.unit(timestep=500, sends=sends).sample() for sends in ("gradients", "rows"))
    # the other policy does not learn
    assert sent.batches.keys() == rows.batches.keys() == {policy_id}
    gradients = gradients_of(units.learning.group.learners[policy_id])
    expected = gradients.compute(rows.batches[policy_id], 500)
    found = sent.batches[policy_id]
    assert found.keys() == expected.keys()
    assert any(
        np.abs(array).max() > 0 for name, array in found.items() if name.startswith(GRADIENT_OF)
    )
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    later = gradients.compute(rows.batches[policy_id], 0)
    assert not np.allclose(
        later[GRADIENT_OF + "policy/head/kernel"], found[GRADIENT_OF + "policy/head/kernel"]
    )
    assert (sent.env_steps, sent.agent_steps, sent.length, sent.num_envs) == (
        rows.env_steps,
        rows.agent_steps,
        rows.length,
        rows.num_envs,
    )
    for name, array in rows.episodes.items():
        np.testing.assert_array_equal(sent.episodes[name], array)


def test_gradients_pass_the_wire_and_the_learners_checks(units: Units) -> None:
    unit = units.unit()
    for number in (1, 2):
        message = sent(unit, number)
        units.learning.group.check_fragment(message.batches)
        check_samples(message)
        columns = message.batches[DEFAULT_POLICY_ID]
        assert columns[NUM_ROWS].tolist() == [message.env_steps]
        assert message.filter_deltas[DEFAULT_POLICY_ID]["n"] > 0
        batch = units.learning.group.make_batch([message.batches])
        assert not units.learning.group.update(batch, 0).skipped
    # it would count more rows than were sampled
    boastful = {
        **columns,
        NUM_ROWS: columns[NUM_ROWS] + 1,
    }
    with pytest.raises(BatchError, match="agent_steps"):
        check_samples(message._replace(batches={DEFAULT_POLICY_ID: boastful}))


def test_without_tensorflow_a_worker_names_the_missing_package(
    units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.setattr(sys, "meta_path", [NoTensorFlow(), *sys.meta_path])
    with pytest.raises(ConfigError) as caught:
        units.unit()
    assert "No module named 'tensorflow'" in str(caught.value)
    assert "[learner]" in str(caught.value)
    assert "\n" not in str(caught.value)
    units.unit(sends="rows").sample()
