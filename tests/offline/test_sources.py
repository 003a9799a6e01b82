from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
from plain_policies import PlainPolicy, RandomPolicy
from rollout_workers import fresh_logging
from stored_rows import assert_equal_batches, cartpole_rows, write

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.config.worker import WorkerConfig
from aiorl.data.metrics import RolloutMetrics
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import ConfigError, EndOfData
from aiorl.offline.formats import Share
from aiorl.offline.io import InputReader, IOContext, NoopWriter, OutputWriter, SamplerInput
from aiorl.offline.readers import FileReader
from aiorl.offline.sources import (
    InputSettings,
    configured_input,
    configured_output,
    input_creator,
    output_creator,
)
from aiorl.testing.envs import CountingEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv

__all__ = ["fresh_logging"]


@pytest.fixture
def make_worker():
    with contextlib.ExitStack() as stack:

        def make(policy=RandomPolicy, **options):
            options = {"rollout_fragment_length": 10, "policy_config": {"seed": 0}} | options
            return stack.enter_context(
                RolloutWorker(lambda context: CountingEnv(), policy, **options)
            )

        yield make


def counting_rows(num_episodes=3, length=5, *, first=0):
    """Return rows with observations of CountingEnv's shape, and a column that samples lack."""
    rows = cartpole_rows(num_episodes, length, first=first)
    for name in ("obs", "new_obs"):
        rows[name] = rows[name][:, :3]
    return rows


class Ours(InputReader):
    def __init__(self, context):
        self.context = context

    def next(self):
        return counting_rows(1, 5)


class OurWriter(OutputWriter):
    def __init__(self, context):
        self.batches = []

    def write(self, batch):
        self.batches.append(batch)


def test_all_forms_of_input_create_their_reader(tmp_path, make_worker):
    """R187: sampler, a path, a list, a mixture, a function."""
    path = write(str(tmp_path / "a.json"), counting_rows())
    worker = make_worker()
    context = worker.io_context
    assert isinstance(input_creator("sampler")(context), SamplerInput)
    assert isinstance(input_creator(path)(context), FileReader)
    assert isinstance(input_creator([path])(context), FileReader)
    mixed = input_creator({"sampler": 0.5, str(tmp_path): 0.5}, InputSettings(seed=0))(context)
    are_stored = ["action_logp" in mixed.next() for _ in range(400)]
    assert 120 < are_stored.count(False) < 280, "batches of the sampler"
    assert input_creator(Ours) is Ours


@pytest.mark.parametrize(
    "source",
    [
        7,
        None,
        [],
        ["a", 1],
        b"a",
        {},
        {"a": 0.4},
        {"a": 0.5, "b": 0.6},
        {"a": -0.5, "b": 1.5},
        {"a": "1"},
        {"a": float("nan")},
    ],
)
def test_an_invalid_input_is_refused(source):
    """R187."""
    with pytest.raises(ValueError, match="input"):
        input_creator(source)


def test_a_mixture_has_no_end():
    with pytest.raises(ConfigError):
        input_creator({"a": 0.5, "b": 0.5}, InputSettings(epochs=1))


def test_all_forms_of_output_create_their_writer(tmp_path):
    """R190: none, the run's directory, a directory, a function."""
    context = IOContext(str(tmp_path / "run"), worker_index=2)
    assert isinstance(output_creator(None)(context), NoopWriter)
    assert output_creator(OurWriter) is OurWriter
    for output, directory in (
        ("logdir", tmp_path / "run"),
        (str(tmp_path / "there"), tmp_path / "there"),
    ):
        writer = output_creator(output, compress_columns=["obs"])(context)
        writer.write(counting_rows())
        writer.close()
        (path,) = directory.iterdir()
        assert "_worker-2_0.json" in path.name
        assert path.read_text().count("lz4") == 1
    with pytest.raises(ConfigError, match="'logdir'"):
        output_creator("logdir")(IOContext())
    for output in (7, "", ["a"]):
        with pytest.raises(ConfigError, match="output"):
            output_creator(output)


def test_a_worker_reads_the_batches_that_another_wrote(tmp_path, make_worker):
    """R187, R190: the batches are equal."""
    writer = make_worker(output_creator=output_creator(str(tmp_path)), num_envs=2)
    written = [writer.sample() for _ in range(4)]
    writer.stop()
    settings = InputSettings(epochs=1)
    reader = make_worker(
        input_creator=input_creator(str(tmp_path), settings), rollout_fragment_length=20
    )
    read = []
    with contextlib.suppress(EndOfData):
        while True:
            read.append(reader.sample())
    for loaded, batch in zip(read, written, strict=True):
        assert_equal_batches(loaded, batch)


def test_the_last_rows_of_a_pass_are_a_shorter_batch(tmp_path, make_worker):
    path = write(
        str(tmp_path / "a.json"), *[counting_rows(1, 4, first=number) for number in range(3)]
    )
    worker = make_worker(
        input_creator=input_creator(path, InputSettings(epochs=1)),
        rollout_fragment_length=8,
        batch_mode="complete_episodes",
    )
    assert [worker.sample().count, worker.sample().count] == [8, 4]
    with pytest.raises(EndOfData):
        worker.sample()


def test_batches_of_several_policies_are_written_and_read(tmp_path):
    """R187, R190."""
    probe = CountingMultiAgentEnv()
    policies = {
        name: (RandomPolicy, probe.observation_space, probe.action_space, {"seed": 0})
        for name in ("a0", "a1")
    }
    make = functools.partial(
        RolloutWorker,
        lambda context: CountingMultiAgentEnv(),
        policies,
        str,
        rollout_fragment_length=10,
    )
    with make(output_creator=output_creator(str(tmp_path))) as writer:
        batch = writer.sample()
    assert isinstance(batch, MultiAgentBatch)
    with make(input_creator=input_creator(str(tmp_path))) as reader:
        assert_equal_batches(reader.sample(), batch)


def test_workers_share_the_files_by_their_slots(tmp_path, make_worker):
    for number in range(6):
        write(tmp_path / f"{number}.json", counting_rows(1, 5, first=number))
    settings = InputSettings(epochs=1)
    values = []
    for index in (1, 2, 3):
        worker = make_worker(
            worker_index=index, num_workers=3, input_creator=input_creator(str(tmp_path), settings)
        )
        assert len(worker.input_reader.files) == 2
        values += [int(batch["eps_id"][0]) for batch in worker.input_reader]
    assert sorted(values) == list(range(6))
    local = make_worker(
        worker_index=0, num_workers=3, input_creator=input_creator(str(tmp_path), settings)
    )
    assert len(local.input_reader.files) == 6
    assert len(list(local.input_reader)) == 6


def test_a_worker_reads_fragments_of_its_length_from_large_stored_batches(tmp_path, make_worker):
    write(tmp_path / "a.json", counting_rows(100, 7))
    worker = make_worker(input_creator=input_creator(str(tmp_path)), rollout_fragment_length=50)
    batch = worker.sample()
    assert batch.count == 56
    assert batch["dones"][-1]


class Postprocessing(PlainPolicy):
    def postprocess_trajectory(self, batch, other_agent_batches=None, episode=None):
        batch["advantages"] = np.full(batch.count, self.weight[0], np.float32)
        batch["length"] = np.full(batch.count, batch.count)
        return batch


def test_rows_are_postprocessed_on_request_by_episode_and_with_the_current_policy(
    tmp_path, make_worker
):
    """R189."""
    path = write(str(tmp_path / "a.json"), counting_rows(4, 5))
    plain = make_worker(Postprocessing, input_creator=input_creator(path))
    assert "advantages" not in plain.sample()
    settings = InputSettings(postprocess_inputs=True, shuffle_buffer_size=3)
    worker = make_worker(Postprocessing, input_creator=input_creator(path, settings))
    for weight in (1.0, 2.0):
        worker.set_weights({"default_policy": {"w": np.array([weight])}})
        batch = worker.sample()
        assert set(batch["advantages"].tolist()) == {weight}, (
            "although batches were already in the buffer"
        )
        assert set(batch["length"].tolist()) == {5}


def test_only_stored_rows_of_a_mixture_are_postprocessed(tmp_path, make_worker):
    """R189."""
    path = write(str(tmp_path / "a.json"), counting_rows(4, 5))
    worker = make_worker(Postprocessing)
    settings = InputSettings(postprocess_inputs=True, seed=0)
    mixed = input_creator({"sampler": 0.5, path: 0.5}, settings)(worker.io_context)
    values = {
        ("action_logp" in batch, tuple(batch["advantages"])[:1])
        for batch in (mixed.next() for _ in range(40))
    }
    assert values == {(False, (0.0,)), (True, (0.0,))}


class TakesRaw(RandomPolicy):
    takes_raw = True

    def filter_inputs(self, filtered):
        """Do nothing; a real policy would apply its network."""


def test_the_filter_of_a_policy_for_raw_rows_learns_from_stored_rows(tmp_path, make_worker):
    obs = np.array([[1, 2, 3], [3, 6, 9]], np.uint8)
    stored = SampleBatch(
        {"obs": obs, "rewards": np.ones(2, np.float32), "eps_id": np.zeros(2, np.int64)}
    )
    path = write(str(tmp_path / "a.json"), stored)
    filtered = {
        "observation_filter": "MeanStdFilter",
        "input_creator": input_creator(path),
        "rollout_fragment_length": 2,
    }
    worker = make_worker(TakesRaw, **filtered)
    batch = worker.sample()
    assert batch["obs"].dtype == np.float32
    np.testing.assert_array_equal(batch["obs"], obs)
    np.testing.assert_array_equal(
        worker.filters["default_policy"].state()["mean"], obs.mean(axis=0)
    )
    other = make_worker(**filtered)
    other.sample()
    assert not other.filters["default_policy"].count


def test_stored_rows_of_a_policy_that_the_worker_lacks_are_refused(tmp_path, make_worker):
    path = write(str(tmp_path / "a.json"), MultiAgentBatch({"c": counting_rows()}, 15))
    worker = make_worker(
        Postprocessing, input_creator=input_creator(path, InputSettings(postprocess_inputs=True))
    )
    with pytest.raises(ConfigError, match="'c'"):
        worker.sample()


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 3.0), (False, 3.0), (True, 1.0), (2.0, 2.0)]
)
def test_rewards_are_clipped_before_stored_rows_are_postprocessed(
    limit, expected, tmp_path, make_worker
):
    """As for rewards of environments."""
    rows = counting_rows(2, 5)
    rows["rewards"] = np.full(rows.count, -3.0, np.float32)
    source = input_creator(
        write(str(tmp_path / "a.json"), rows), InputSettings(postprocess_inputs=True)
    )
    worker = make_worker(Postprocessing, input_creator=source, clip_rewards=limit)
    assert set(worker.sample()["rewards"].tolist()) == {-expected}


def test_only_files_are_shuffled_not_samplers_or_functions(tmp_path, make_worker):
    """R188."""
    path = write(
        str(tmp_path / "a.json"), *[counting_rows(1, 5, first=number) for number in range(60)]
    )
    context = make_worker().io_context
    for size in (0, 20):
        settings = InputSettings(shuffle_buffer_size=size, seed=0)
        reader = input_creator(path, settings)(context)
        order = [int(reader.next()["eps_id"][0]) for _ in range(40)]
        assert (order == list(range(40))) == (size == 0)
        assert isinstance(input_creator("sampler", settings)(context), SamplerInput)
        assert isinstance(input_creator(Ours, settings)(context), Ours)


def test_with_simulation_learning_gets_stored_rows_and_metrics_come_from_the_environment(
    tmp_path, make_worker
):
    """R192."""
    path = write(str(tmp_path / "a.json"), counting_rows(4, 5))
    worker = make_worker(input_creator=input_creator(path), input_evaluation=["simulation"])
    metrics: list[RolloutMetrics] = []
    while len(metrics) < 5:
        assert "action_logp" in worker.sample()
        metrics += worker.get_metrics()
    assert {expected.episode_reward for expected in metrics} == {15.0}
    with pytest.raises(ConfigError, match="simulation"):
        make_worker(input_creator=input_creator("sampler"), input_evaluation=["simulation"])


class FailingStream(InputReader, OutputWriter):
    def next(self):
        raise KeyError("boom")

    def write(self, batch):
        raise KeyError("boom")


@pytest.mark.parametrize("key", ["input", "output"])
@pytest.mark.parametrize(
    "function",
    [
        lambda context: 3,
        lambda context: {}["boom"],
        lambda context: FailingStream(),
        lambda: None,
        3,
    ],
)
def test_errors_of_a_users_reader_or_writer_name_the_setting(function, key, monkeypatch):
    monkeypatch.setattr("math.users", function, raising=False)
    settings = WorkerConfig.model_validate({key: "math:users"})
    use = {
        "input": lambda: configured_input(settings, Share(0, 1))(IOContext()).next(),
        "output": lambda: configured_output(settings)(IOContext()).write(counting_rows(3)),
    }
    with pytest.raises(ConfigError) as caught:
        use[key]()
    assert caught.value.key == key
