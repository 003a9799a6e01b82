from __future__ import annotations

import json
import os
import warnings

import gymnasium as gym
import numpy as np
import pytest
from stored_rows import assert_equal_batches, cartpole_rows, read as read_all, write

from aiorl.config.files import open_regular
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import DataError
from aiorl.offline.formats import WHOLE, Share, Stored
from aiorl.offline.readers import FileReader, ReaderOptions
from aiorl.offline.registry import format_of

minari = pytest.importorskip("minari")
h5py = pytest.importorskip("h5py")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def read(name, share=WHOLE):
    return read_all(name, share)[0]


def test_a_written_dataset_reads_back_with_its_episodes():
    batch = cartpole_rows(3, 5)
    write("minari:cartpole/mine-v0", batch.slice(0, 7), batch.slice(7, 15))
    loaded = read("minari:cartpole/mine-v0")
    assert [rows.count for rows in loaded] == [5, 5, 5]
    joined = SampleBatch.concat(loaded)
    for name in ("obs", "actions", "rewards", "terminateds", "truncateds", "dones", "t"):
        np.testing.assert_array_equal(joined[name], batch[name], err_msg=name)
    assert loaded[0]["new_obs"][-1].tolist() == [9.0] * 4
    dataset = minari.load_dataset("cartpole/mine-v0")
    assert isinstance(dataset.action_space, gym.spaces.Discrete)
    assert dataset.observation_space.shape == (4,)


def test_the_file_that_was_checked_is_read(monkeypatch):
    """Another file can have its name by then."""
    write("minari:mine-v0", cartpole_rows(1, 5))

    def open_and_remove(path, **options):
        file = open_regular(path, **options)
        os.remove(path)
        return file

    monkeypatch.setattr("aiorl.offline.minari_data.open_regular", open_and_remove)
    assert len(read("minari:mine-v0")) == 1


def test_an_open_episode_is_truncated_at_the_end_and_no_dataset_is_overwritten():
    batch = cartpole_rows(2, 5)
    write("minari:a-v0", batch.slice(0, 8))
    first, second = read("minari:a-v0")
    assert first["terminateds"][-1]
    assert (second.count, bool(second["truncateds"][-1])) == (3, True)
    with pytest.raises(FileExistsError, match="minari delete"):
        write("minari:a-v0", batch)


def test_a_dataset_of_an_environment_has_its_spaces():
    pytest.importorskip("pygame")
    batch = cartpole_rows(1, 3)
    batch["actions"] = np.zeros(3, np.int64)
    write("minari:a-v0", batch, env="CartPole-v1")
    dataset = minari.load_dataset("a-v0")
    assert dataset.env_spec.id == "CartPole-v1"
    assert dataset.action_space == gym.spaces.Discrete(2)


@pytest.mark.parametrize(("env", "action"), [(None, 1), ("CartPole-v1", 2), ("CartPole-v1", -1)])
def test_actions_outside_of_the_space_of_a_dataset_are_refused(root, monkeypatch, env, action):
    """Without an environment, the space is that of the actions that are written first."""
    monkeypatch.setattr("aiorl.offline.minari_data._FLUSH_BYTES", 1)
    batch = cartpole_rows(2, 3)
    batch["actions"] = np.repeat([0, action], 3)
    with pytest.raises(DataError, match=rf"action {action} is not in Discrete\(.*--env"):
        write("minari:a-v0", batch.slice(0, 3), batch.slice(3, 6), env=env)
    assert not (root / "a-v0").exists()


def test_actions_below_zero_are_in_the_space_of_their_dataset():
    batch = cartpole_rows(1, 3)
    batch["actions"] = np.array([-2, 1, 0])
    write("minari:a-v0", batch)
    assert minari.load_dataset("a-v0").action_space == gym.spaces.Discrete(4, start=-2)


PARTS = gym.spaces.Dict({"place": gym.spaces.Box(-1, 1, (2,)), "kind": gym.spaces.Discrete(3)})


def create(name, observations, actions, observation_space, action_space):
    """Create a dataset of three steps with Minari itself."""
    buffer = minari.data_collector.EpisodeBuffer(
        observations=observations,
        actions=actions,
        rewards=[1.0, 2.0, 3.0],
        terminations=[False] * 3,
        truncations=[False, False, True],
        infos={},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        minari.create_dataset_from_buffers(
            name, [buffer], observation_space=observation_space, action_space=action_space
        )


def test_observations_of_other_spaces_are_read_in_the_form_of_policies():
    obs = {"place": np.full((4, 2), 0.5, np.float32), "kind": np.array([0, 1, 2, 1])}
    create("parts-v0", obs, np.zeros((3, 2), np.float32), PARTS, gym.spaces.Box(-1, 1, (2,)))
    (rows,) = read("minari:parts-v0")
    assert rows["obs"].shape == (3, 5)
    assert sorted(rows["obs"][1]) == sorted([0.5, 0.5, 0, 1, 0])
    assert rows["rewards"].tolist() == [1, 2, 3]
    assert rows["truncateds"].tolist() == [False, False, True]


def test_readers_share_a_dataset_by_episode():
    write("minari:a-v0", cartpole_rows(7, 3))
    parts = [read("minari:a-v0", Share(index, 3)) for index in range(3)]
    assert sorted(int(rows["eps_id"][0]) for part in parts for rows in part) == list(range(7))
    whole = FileReader("minari:a-v0", ReaderOptions(epochs=1))
    assert whole.files == ["minari:a-v0"]
    assert sum(batch.count for batch in whole) == 21


def test_a_missing_dataset_is_reported_with_the_command_to_get_it():
    with pytest.raises(FileNotFoundError, match="minari download nothing-v0"):
        read("minari:nothing-v0")


def test_a_damaged_dataset_is_reported_and_a_pipe_does_not_block(root):
    write("minari:a-v0", cartpole_rows())
    for text in ("{}", "[]", "{", ""):
        (root / "a-v0/data/metadata.json").write_text(text)
        with pytest.raises(DataError, match="minari:a-v0"):
            read("minari:a-v0")
    for name in ("metadata.json", "main_data.hdf5"):
        write(f"minari:{name[:4]}-v0", cartpole_rows())
        path = root / f"{name[:4]}-v0/data" / name
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(DataError, match=f"minari:{name[:4]}-v0"):
            read(f"minari:{name[:4]}-v0")


def in_another_file(episode, root):
    (root / "secret").write_bytes(bytes(20))
    episode.create_dataset("rewards", (5,), np.float32, external=[(str(root / "secret"), 0, 20)])


def seen_through_another_file(episode, root):
    layout = h5py.VirtualLayout((5,), np.float32)
    layout[:] = h5py.VirtualSource(str(root / "other.hdf5"), "rewards", (5,))
    episode.create_virtual_dataset("rewards", layout)


def a_link_to_another_file(episode, root):
    with h5py.File(root / "other.hdf5", "w") as other:
        other["rewards"] = np.zeros(5, np.float32)
    episode["rewards"] = h5py.ExternalLink(str(root / "other.hdf5"), "rewards")


@pytest.mark.parametrize(
    "instead",
    [
        in_another_file,
        seen_through_another_file,
        a_link_to_another_file,
        lambda episode, root: episode.create_dataset(
            "rewards", (10**10,), np.float32, chunks=(1000,)
        ),
        lambda episode, root: episode.create_dataset(
            "rewards", (5,), np.float64, chunks=(1 << 28,), maxshape=(None,)
        ),
        lambda episode, root: episode.__setitem__(
            "rewards", h5py.SoftLink("/episode_0/terminations")
        ),
        lambda episode, root: episode.create_dataset("rewards", data=["a"] * 5),
        lambda episode, root: episode.create_group("rewards"),
        lambda episode, root: None,
    ],
    ids=range(9),
)
def test_forbidden_contents_of_an_episode_are_refused_before_they_are_read(root, instead):
    write("minari:a-v0", cartpole_rows(2, 5))
    with h5py.File(root / "a-v0/data/main_data.hdf5", "a") as file:
        del file["episode_0/rewards"]
        instead(file["episode_0"], root)
    bad, good = format_of("minari:a-v0").read("minari:a-v0")
    assert isinstance(bad, DataError)
    assert bad.place == "episode 0"
    assert isinstance(good, Stored)


def nested(kind):
    part = {"type": "Discrete", "n": 2, "start": 0}
    for _ in range(40):
        part = {"type": kind, "subspaces": [part] if kind == "Tuple" else {"a": part}}
    return json.dumps(part)


@pytest.mark.parametrize(
    "space",
    [
        nested("Tuple"),
        nested("Dict"),
        "[" * 100_000,
        "null",
        '{"type": "Box"}',
        '{"type": "Text", "max_length": 3}',
        '{"type": "Box", "shape": [10000000000], "dtype": "float32", "low": 0, "high": 1}',
        '{"type": "MultiBinary", "n": 10000000000}',
    ],
    ids=lambda space: space[:20],
)
def test_an_invalid_space_is_refused(root, space):
    write("minari:a-v0", cartpole_rows())
    path = root / "a-v0/data/metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"observation_space": space}))
    with pytest.raises(DataError, match="minari:a-v0"):
        read("minari:a-v0")


def test_frames_that_minari_stored_as_jpeg_are_read(root):
    frames = np.full((4, 40, 40, 3), 128, np.uint8)
    frames[2, ::2] = 130  # so that their files have different lengths
    space = gym.spaces.Box(0, 255, (40, 40, 3), np.uint8)
    create("frames-v0", frames, np.zeros(3, np.int64), space, gym.spaces.Discrete(2))
    (rows,) = read("minari:frames-v0")
    assert rows["obs"].shape == (3, 40, 40, 3)
    assert abs(rows["obs"].astype(int) - 128).max() < 4
    path = root / "frames-v0/data/main_data.hdf5"
    with h5py.File(path) as file:
        length = len(file["episode_0/observations"][2])
        assert h5py.check_vlen_dtype(file["episode_0/observations"].dtype) == np.uint8
    content = path.read_bytes()
    path.write_bytes(content.replace(length.to_bytes(4, "little"), b"\xff\xff\xff\x7f"))
    (bad,) = format_of("minari:frames-v0").read("minari:frames-v0")
    assert isinstance(bad, DataError)
    path.write_bytes(content)
    path = root / "frames-v0/data/metadata.json"
    larger = {"type": "Box", "shape": [80, 80, 3], "dtype": "uint8", "low": 0, "high": 255}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"observation_space": json.dumps(larger)})
    )
    (bad,) = format_of("minari:frames-v0").read("minari:frames-v0")
    assert isinstance(bad, DataError)


def test_the_environment_that_a_dataset_names_is_not_run(root, tmp_path):
    write("minari:a-v0", cartpole_rows())
    path = root / "a-v0/data/metadata.json"
    metadata = json.loads(path.read_text())
    spec = {
        "id": "X-v0",
        "entry_point": "pathlib:Path.touch",
        "kwargs": {"self": str(tmp_path / "touched")},
    }
    del metadata["action_space"]
    path.write_text(json.dumps(metadata | {"env_spec": json.dumps(spec)}))
    with pytest.raises(DataError, match="minari:a-v0"):
        read("minari:a-v0")


@pytest.mark.parametrize("name", ["new_obs", "dones", "eps_id"])
def test_a_missing_column_is_named(root, name):
    batch = cartpole_rows()
    del batch[name]
    with pytest.raises(DataError, match=name):
        write("minari:a-v0", batch)
    assert not (root / "a-v0").exists()


def test_observations_that_minari_could_not_hold_are_refused(root):
    """Each has another row after it, whose obs is not its new_obs."""
    batch = cartpole_rows(2, 5, first=7)
    batch["new_obs"][6] += 1
    with pytest.raises(DataError, match=r"eps_id 8, obs .* new_obs .*`aiorl data validate`"):
        write("minari:a-v0", batch)
    assert not (root / "a-v0").exists()


def test_episodes_of_two_agents_with_one_number_stay_apart():
    first, second = cartpole_rows(1, 4), cartpole_rows(1, 4, seed=1)
    for agent, rows in enumerate((first, second)):
        rows["agent_index"] = np.full(4, agent)
    turns = [rows.slice(at, at + 2) for at in (0, 2) for rows in (first, second)]
    write("minari:a-v0", SampleBatch.concat(turns))
    loaded = read("minari:a-v0")
    for rows, expected in zip(loaded, (first, second), strict=True):
        np.testing.assert_array_equal(rows["obs"], expected["obs"])
        np.testing.assert_array_equal(rows["new_obs"], expected["new_obs"])


def test_pixels_survive_the_round_trip():
    obs = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
    batch = cartpole_rows(1, 5)
    batch["obs"], batch["new_obs"] = obs[:-1], obs[1:]
    write("minari:a-v0", batch)
    (loaded,) = read("minari:a-v0")
    batch["eps_id"] = np.zeros(5, np.int64)
    del batch["action_logp"]
    assert_equal_batches(loaded, batch)
