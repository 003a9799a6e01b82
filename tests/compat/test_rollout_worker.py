"""Features of RolloutWorker other than sampling: learning, state, filters, exports, launching."""

from __future__ import annotations

import ipaddress
import socket

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import DEFAULT, VECTOR, PlainPolicy, spec
from rollout_workers import make_refusing

from aiorl.acting.filters import NoFilter
from aiorl.compat.rollout_worker import EvaluatorInterface, RolloutWorker
from aiorl.errors import CheckpointError, ConfigError, PolicyError
from aiorl.testing.envs import CountingEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv

ACTIONS = spaces.Discrete(2)


def make_filtering(make_worker, **more):
    return make_worker(observation_filter="MeanStdFilter", rollout_fragment_length=5, **more)


def test_gradients_of_a_multi_agent_batch_cover_the_policies_that_learn(make_pair):
    """R42, R131."""
    worker = make_pair(policies_to_train=["1"])
    samples = worker.sample()
    gradients, info = worker.compute_gradients(samples)
    assert list(gradients) == ["1"]
    assert info == {"1": {"rows": 3}, "batch_count": 3}
    assert list(make_pair().compute_gradients(samples)[0]) == ["0", "1"]


def test_policies_learn_on_their_own_rows_if_they_are_trainable(make_pair):
    """R44."""
    worker = make_pair()
    samples = worker.sample()
    assert worker.learn_on_batch(samples) == {
        "0": {"rows": 2, "mean_reward": 1.5},
        "1": {"rows": 3, "mean_reward": 2.0},
    }
    restricted = make_pair(policies_to_train=["0"])
    assert list(restricted.learn_on_batch(samples)) == ["0"]
    assert ("learn", 3) not in restricted.policy_map["1"].notes


def test_a_plain_batch_trains_the_default_policy_whatever_the_whitelist_says(make_worker):
    """R45."""
    policies = {name: spec(VECTOR, ACTIONS) for name in (DEFAULT, "other")}
    worker = make_worker(
        lambda context: CountingMultiAgentEnv(),
        policies,
        policies_to_train=["other"],
        rollout_fragment_length=4,
    )
    samples = worker.sample().policy_batches[DEFAULT]
    assert worker.policies_to_train == ["other"]
    info = worker.learn_on_batch(samples)
    assert info == {"rows": samples.count, "mean_reward": float(samples["rewards"].mean())}


def test_r44_a_policy_that_is_not_trainable_does_not_learn_even_if_it_alone_has_rows(make_worker):
    """R44, R131: several policies give multi-agent batches, in environment steps, whichever
    policies have rows.
    """
    policies = {name: spec(VECTOR, ACTIONS) for name in (DEFAULT, "other")}
    worker = make_worker(
        lambda context: CountingMultiAgentEnv((3, 5) if context.vector_index else (6, 2)),
        policies,
        policy_mapping_fn=lambda agent: DEFAULT,
        policies_to_train=["other"],
        rollout_fragment_length=4,
        num_envs=2,
    )
    samples = worker.sample()
    assert (samples.count, samples.total()) == (8, (4 + 2) + (3 + 4))
    assert worker.learn_on_batch(samples) == {}
    assert worker.compute_gradients(samples) == ({}, {"batch_count": 8})
    assert not [note for note in worker.policy_map[DEFAULT].notes if note[0] == "learn"]


def test_sample_and_learn_demands_the_expected_count(make_worker):
    """R46."""
    worker = make_worker(rollout_fragment_length=6)
    with pytest.raises(AssertionError, match=r"6.* 7"):
        worker.sample_and_learn(7, 1, 2, [])
    with pytest.raises(ConfigError, match="sgd_minibatch_size"):
        worker.sample_and_learn(6, 1, -4, [])
    info, count = worker.sample_and_learn(6, 2, 4, ["rewards"])
    assert count == 6
    assert info.keys() == {DEFAULT}
    policy = worker.policy_map[DEFAULT]
    assert [note for note in policy.notes if note[0] == "learn"] == [("learn", 4), ("learn", 2)] * 2


def test_sample_with_count_gives_both(make_worker, make_pair):
    """R47: the count is in environment steps, even if each makes several rows."""
    batch, count = make_worker(rollout_fragment_length=6).sample_with_count()
    assert batch.count == count == 6
    batch, count = make_pair().sample_with_count()
    assert (batch.count, batch.total(), count) == (3, 5, 3)


def test_filters_are_copied_and_their_deltas_flushed_on_request(make_worker):
    """R138."""
    worker = make_filtering(make_worker)
    worker.sample()
    own = worker.filters[DEFAULT]
    seen = own.count
    assert worker.get_filters()[DEFAULT].buffer_count == own.buffer_count == seen
    first = worker.get_filters(flush_after=True)[DEFAULT]
    assert first.buffer_count == first.count == seen
    assert (own.count, own.buffer_count) == (seen, 0)
    assert worker.get_filters()[DEFAULT].buffer_count == 0
    own(np.zeros(3, np.float32))
    assert first.count == seen, "a copy"


def test_synchronised_filters_keep_the_unsent_delta_and_every_policy_needs_one(make_worker):
    """R140, R141."""
    worker, other = make_filtering(make_worker), make_filtering(make_worker)
    worker.sample()
    other.sample()
    given, own = other.get_filters(), worker.filters[DEFAULT]
    pending, published = own.buffer_count, given[DEFAULT].count
    worker.sync_filters(given)
    assert (own.count, own.buffer_count) == (published + pending, pending)
    with pytest.raises(AssertionError, match="default_policy"):
        worker.sync_filters({"other": given[DEFAULT]})


def test_saving_and_restoring_keeps_policies_and_filters_but_no_pending_delta(make_worker):
    """R51, R147."""
    worker, other = make_filtering(make_worker), make_filtering(make_worker)
    worker.set_weights({DEFAULT: {"w": [3.0]}}, {"timestep": 70})
    worker.sample()
    pending = worker.filters[DEFAULT].buffer_count
    saved = worker.save()
    assert worker.filters[DEFAULT].buffer_count == pending > 0, "not sent yet"
    other.sample()
    other.restore(saved)
    assert other.get_weights()[DEFAULT]["w"].tolist() == [3.0]
    assert other.policy_map[DEFAULT].global_timestep == 70
    found, expected = other.filters[DEFAULT], worker.filters[DEFAULT].state()
    assert found.buffer_count == 0
    for name, array in found.state().items():
        np.testing.assert_array_equal(array, expected[name])


def test_other_bytes_and_states_of_other_policies_are_refused(make_worker, make_pair):
    """R51."""
    worker = make_worker()
    for data in (b"\xc1", b"\x91" * 400 + b"\xc0"):
        with pytest.raises(CheckpointError):
            worker.restore(data)
    with pytest.raises(AssertionError, match="default_policy"):
        worker.restore(make_pair().save())


def test_a_state_that_one_policy_refuses_changes_neither_policies_nor_filters(make_worker):
    """R51."""
    more = {"observation_filter": "MeanStdFilter", "rollout_fragment_length": 4}
    saving, worker = make_refusing(make_worker, **more), make_refusing(make_worker, **more)
    saving.sample()
    saving.policy_map["1"].weight[:] = 200
    saving.set_global_vars({"timestep": 9})
    with pytest.raises(PolicyError, match="too large"):
        worker.restore(saving.save())
    assert {name: found["w"].tolist() for name, found in worker.get_weights().items()} == {
        "0": [0.0],
        "1": [0.0],
    }
    assert [policy.global_timestep for policy in worker.policy_map.values()] == [0, 0]
    assert [found.count for found in worker.filters.values()] == [0, 0]


def test_a_state_saved_with_another_filter_is_refused(make_worker):
    """R51."""
    plain, filtering = make_worker(), make_filtering(make_worker)
    filtering.sample()
    for worker, other in ((plain, filtering), (filtering, plain)):
        before = worker.save()
        with pytest.raises(CheckpointError, match="observation_filter"):
            worker.restore(other.save())
        assert worker.save() == before


def test_filters_of_another_kind_are_refused_before_any_is_changed(make_worker):
    """R141."""
    more = {"observation_filter": "MeanStdFilter", "rollout_fragment_length": 4}
    giving, worker = make_refusing(make_worker, **more), make_refusing(make_worker, **more)
    giving.sample()
    with pytest.raises(ValueError, match="MeanStdFilter"):
        worker.sync_filters({**giving.get_filters(), "1": NoFilter()})
    assert [found.count for found in worker.filters.values()] == [0, 0]


class Exporting(PlainPolicy):
    def export_model(self, export_dir):
        self.notes.append(("model", export_dir))

    def export_checkpoint(self, export_dir, filename_prefix="model"):
        self.notes.append(("checkpoint", export_dir, filename_prefix))

    def import_model_from_h5(self, import_file):
        self.notes.append(("h5", import_file))


def test_exports_and_imports_reach_the_right_policy(make_worker):
    """R53."""
    policies = {name: spec(VECTOR, ACTIONS, Exporting) for name in (DEFAULT, "b")}
    worker = make_worker(lambda context: CountingMultiAgentEnv(), policies)
    worker.export_policy_model("m")
    worker.export_policy_model("mb", "b")
    worker.import_policy_model_from_h5("f")
    worker.import_policy_model_from_h5("fb", "b")
    worker.export_policy_checkpoint("c")
    worker.export_policy_checkpoint("cb", "weights", "b")
    assert worker.policy_map[DEFAULT].notes == [
        ("model", "m"),
        ("h5", "f"),
        ("checkpoint", "c", "model"),
    ]
    assert worker.policy_map["b"].notes == [
        ("model", "mb"),
        ("h5", "fb"),
        ("checkpoint", "cb", "weights"),
    ]
    with pytest.raises(KeyError, match="absent"):
        worker.export_policy_model("m", "absent")


def test_creation_arguments_are_those_given(make_worker):
    """R55."""
    env_config, policy_config = {"a": [1]}, {"model": {"x": 1}}

    def create(context):
        context["b"] = 2
        return CountingEnv()

    worker = make_worker(create, env_config=env_config, policy_config=policy_config, seed=3)
    arguments = worker.creation_args()
    assert len(arguments) == 36
    assert arguments["env_creator"] is create
    assert arguments["policy"] is PlainPolicy
    assert arguments["env_config"] is env_config
    assert (env_config, policy_config) == ({"a": [1]}, {"model": {"x": 1}})
    assert (arguments["seed"], arguments["num_envs"]) == (3, 1)
    arguments.clear()
    assert len(worker.creation_args()) == 36
    again = make_worker(**worker.creation_args())
    assert again.creation_args() == worker.creation_args()


class Joining(PlainPolicy):
    def join_data_parallel(self, *arguments):
        self.notes.append(arguments)


def test_policies_that_can_join_learn_the_number_of_processes(make_worker):
    """R54: no policy joins if one can't, or if the rank is not below the size."""
    kinds = {"0": Joining, "1": Joining}
    for policy_id, kind in (("1", Joining), ("1", PlainPolicy)):
        policies = {
            name: spec(VECTOR, ACTIONS, found) for name, found in {**kinds, policy_id: kind}.items()
        }
        worker = make_worker(
            lambda context: CountingMultiAgentEnv(), policies, policy_mapping_fn=lambda agent: "0"
        )
        if kind is PlainPolicy:
            with pytest.raises(ConfigError, match=r"'1'.*PlainPolicy"):
                worker.setup_torch_data_parallel("tcp://host:1", 1, 4, "ring")
            assert worker.policy_map["0"].notes == []
            continue
        for rank in (-1, 4):
            with pytest.raises(ConfigError) as caught:
                worker.setup_torch_data_parallel("tcp://host:1", rank, 4, "ring")
            assert caught.value.key == "world_rank"
        worker.setup_torch_data_parallel("tcp://host:1", 1, 4, "ring")
        for policy in worker.policy_map.values():
            assert policy.notes == [("tcp://host:1", 1, 4, "ring")]
            assert policy.distributed_world_size == 4


def test_a_free_port_and_the_address_can_be_bound(make_worker, monkeypatch):
    """R57."""
    worker = make_worker()
    for address in (("", worker.find_free_port()), (worker.get_node_ip(), 0)):
        with socket.socket() as listener:
            listener.bind(address)
    assert not ipaddress.ip_address(worker.get_node_ip()).is_unspecified
    monkeypatch.setattr("aiorl.compat.rollout_worker._ELSEWHERE", ("255.255.255.255", 9))
    assert worker.get_node_ip() == "127.0.0.1", (
        "a broadcast address needs a permission that the probe does not have"
    )


def test_functions_can_be_applied_to_the_worker(make_worker):
    worker = make_worker()
    assert isinstance(worker, EvaluatorInterface)
    assert worker.apply(lambda given, number, more: (given, number, more), 3, more=4) == (
        worker,
        3,
        4,
    )
    assert worker.get_host()


def test_attributes_of_the_worker_inside_can_be_read_set_and_listed(make_worker):
    worker = make_worker(rollout_fragment_length=4)
    assert {"env", "policy_map", "rollout_fragment_length", "sample"} <= set(dir(worker))
    turns = []
    worker.on_turn = lambda: turns.append(len(turns))
    assert worker.sample().count == 4
    assert len(turns) > 3
    worker.notes = ["of the user"]
    assert worker.notes == ["of the user"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("policy_graph", "policy"),
        ("batch_steps", "rollout_fragment_length"),
        ("sample_batch_size", "rollout_fragment_length"),
        ("input_evaluation_method", "input_evaluation"),
    ],
)
def test_arguments_of_earlier_workers_are_refused_with_their_new_names(old, new):
    with pytest.raises(TypeError, match=f"'{old}'.* {new}"):
        RolloutWorker(env_creator=CountingEnv, **{old: None})
    with pytest.raises(TypeError, match="nonsense"):
        RolloutWorker(env_creator=CountingEnv, policy=PlainPolicy, nonsense=1)


def test_methods_of_earlier_workers_name_their_successors(make_worker):
    worker = make_worker()
    with pytest.raises(AttributeError, match="learn_on_batch"):
        worker.compute_apply  # noqa: B018
    assert getattr(worker, "nonsense", None) is None
    assert worker.get_policy("absent") is None
