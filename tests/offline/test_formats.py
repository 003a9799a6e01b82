from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
import tracemalloc
from base64 import b64encode

import lz4.frame
import numpy as np
import orjson
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from stored_rows import assert_equal_batches, cartpole_rows, read, write

from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import ConfigError, DataError
from aiorl.offline import json_lines, stored_columns
from aiorl.offline.commands import main
from aiorl.offline.files import open_plain
from aiorl.offline.formats import WriteOptions
from aiorl.offline.registry import SUFFIXES, format_named, format_of, stored_batches
from aiorl.offline.stored_columns import episode_numbers
from aiorl.process.log_once import LogOnce

pa = pytest.importorskip("pyarrow")
NESTED = {"a": [1, 2.5], "b": {"c": "text", "d": None}}


DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
]
DTYPES += ["float64"]


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_batches_from_files_can_be_changed_in_place(tmp_path, suffix):
    """Callbacks and postprocessing do so, as with batches of a sampler."""
    batch = SampleBatch(
        cartpole_rows(),
        frames=np.zeros((15, 9, 9), np.uint8),
        new_obs=np.zeros((15, 4), np.float32),
    )
    write(tmp_path / f"a{suffix}", batch, compress_columns=frozenset({"obs"}))
    (loaded,), _ = read(tmp_path / f"a{suffix}")
    for name in loaded:
        loaded[name][0] = loaded[name][1]


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_nan_infinities_objects_and_views_read_back_equal(tmp_path, suffix):
    """R190."""
    infos = np.empty(4, object)
    infos[:] = [{}, NESTED, {"x": 1}, {"y": [True]}]
    batch = SampleBatch(
        obs=np.array([[np.nan, 1], [np.inf, 2], [-np.inf, 3], [-0.0, 4]], np.float32),
        rewards=np.arange(8, dtype=np.float32)[::2],
        big=np.arange(4, dtype=">i4"),
        infos=infos,
    )
    write(tmp_path / f"a{suffix}", batch)
    (loaded,), _ = read(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(loaded["obs"], batch["obs"])
    assert loaded["rewards"].tolist() == [0, 2, 4, 6]
    assert loaded["big"].tolist() == [0, 1, 2, 3]
    assert loaded["infos"].tolist() == infos.tolist()


def test_infos_that_are_not_json_are_left_out_but_numpy_is_written(tmp_path, caplog):
    infos = np.empty(1, object)
    infos[:] = [{"array": np.arange(2)[::-1], "number": np.float32(1.5)}]
    worse = infos.copy()
    worse[0] = {"lock": object()}
    write(
        tmp_path / "a.json", SampleBatch(rewards=np.ones(1, np.float32), infos=infos, others=worse)
    )
    (loaded,), _ = read(tmp_path / "a.json")
    assert loaded["infos"][0] == {"array": [1, 0], "number": 1.5}
    assert "others" not in loaded


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
@pytest.mark.parametrize(
    ("info", "stored", "is_logged"),
    [
        ({"x": [np.nan, (1, np.inf)]}, {"x": [None, [1, None]]}, True),
        ({"x": np.array([1.5, -np.inf])}, {"x": [1.5, None]}, True),
        ({"x": np.float32(np.nan)}, {"x": None}, True),
        ({"x": None, "text": "nan"}, {"x": None, "text": "nan"}, False),
    ],
)
def test_numbers_in_infos_that_json_does_not_have_are_null_which_is_logged_once(
    tmp_path, caplog, monkeypatch, suffix, info, stored, is_logged
):
    monkeypatch.setattr(json_lines, "log_once", LogOnce())
    batch = SampleBatch(rewards=np.ones(1), infos=np.array([info], object))
    for number in range(2):
        (loaded,), _ = read(write(tmp_path / f"{number}{suffix}", batch))
        assert loaded["infos"].tolist() == [stored]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == is_logged
    assert all("'infos'" in message and "null" in message for message in messages)


SHAPES = hnp.array_shapes(min_dims=0, max_dims=2).map(lambda shape: (3, *shape))


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=9),
        st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
@settings(max_examples=20)
def test_any_columns_read_back_equal(tmp_path_factory, columns, is_compressed):
    """R190."""
    batch = SampleBatch({f"x{name}": column for name, column in columns.items()})
    for suffix in (".json", ".parquet"):
        path = tmp_path_factory.mktemp("any") / f"a{suffix}"
        write(path, batch, compress_columns=frozenset(batch if is_compressed else ()))
        (loaded,), _ = read(path)
        assert_equal_batches(loaded, batch)


def test_batches_of_several_policies_read_back_equal(tmp_path):
    """R190."""
    batch, plain = (
        MultiAgentBatch({"left": cartpole_rows(), "right": cartpole_rows(1, 2)}, 20),
        cartpole_rows(),
    )
    plain.env_steps = 99
    write(tmp_path / "a.json", batch, plain)
    (loaded, other), _ = read(tmp_path / "a.json")
    assert_equal_batches(loaded, batch)
    assert other.env_steps == 99, "whatever the number of rows"
    with pytest.raises(DataError):
        write(tmp_path / "a.parquet", batch)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


BAD_NAMES = ["", "a\nb", "a\0b", "x" * 257, "\ud83d"]


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_names_that_no_reader_accepts_are_not_written(tmp_path, suffix, name):
    rows = cartpole_rows()
    batches = [SampleBatch({**rows, name: rows["t"]})]
    if suffix == ".json":
        batches += [MultiAgentBatch({"a": batches[0]}, 15), MultiAgentBatch({name: rows}, 15)]
    for number, batch in enumerate(batches):
        path = tmp_path / f"{number}{suffix}"
        with pytest.raises(DataError, match=r"is called .* 1 to 256 printable") as caught:
            write(path, batch)
        assert caught.value.path == str(path)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_long_names_read_back_equal(tmp_path, suffix):
    numbers = np.arange(3)
    objects = np.array([{}, {"a": 1}, {}], object)
    batch = SampleBatch({"x" * 255 + "y": numbers, "x" * 256: objects})
    (loaded,), _ = read(write(tmp_path / f"a{suffix}", batch))
    assert_equal_batches(loaded, batch)


def test_only_listed_columns_are_compressed(tmp_path):
    """R190."""
    write(tmp_path / "a.json", cartpole_rows(), compress_columns=frozenset({"obs"}))
    columns = orjson.loads((tmp_path / "a.json").read_bytes())["columns"]
    assert {name for name, column in columns.items() if "lz4" in column} == {"obs"}
    assert columns["rewards"] == {"dtype": "float32", "rows": [1.0] * 15}


# --- RLlib ---

ROW = {
    "t": 0,
    "eps_id": 7,
    "agent_index": 0,
    "actions": 1,
    "rewards": 1.0,
    "action_prob": 0.5,
    "dones": False,
}


def rllib_line(count=3, **extra_columns):
    columns = {name: [value] * count for name, value in ROW.items()}
    columns |= {
        "obs": [[0.5] * 4] * count,
        "new_obs": [[0.25] * 4] * count,
        "q_values": [[1.0, 2.0]] * count,
    }
    columns["dones"] = [False] * (count - 1) + [True]
    return {
        "type": "SampleBatch",
        "weights": [1.0] * count,
        "infos": [{}] * count,
        **columns,
        **extra_columns,
    }


def packed(array, protocol=5):
    return b64encode(lz4.frame.compress(pickle.dumps(array, protocol))).decode()


def lines(path, *objects):
    path.write_text("".join(json.dumps(item) + "\n" for item in objects))
    return path


def test_rllibs_plain_columns_are_read(tmp_path):
    """R187, and O3 of offline data."""
    (loaded,), errors = read(lines(tmp_path / "a.json", rllib_line()))
    assert errors == []
    assert loaded["obs"].dtype == np.float32
    assert loaded["obs"].shape == (3, 4)
    assert loaded["actions"].tolist() == [1, 1, 1]
    assert loaded["dones"].tolist() == loaded["terminateds"].tolist() == [False, False, True]
    assert not loaded["truncateds"].any()
    assert loaded["infos"].tolist() == [{}, {}, {}]
    assert loaded["action_prob"].tolist() == [0.5] * 3


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_rllibs_compressed_columns_are_read(tmp_path, protocol):
    """R187, and O3 of offline data."""
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype("f4")
    rows = [packed(row, protocol) for row in obs]
    (loaded,), errors = read(
        lines(tmp_path / "a.json", rllib_line(obs=packed(obs, protocol), new_obs=rows))
    )
    assert errors == []
    np.testing.assert_array_equal(loaded["obs"], obs)
    np.testing.assert_array_equal(loaded["new_obs"], obs)
    old = b64encode(lz4.frame.compress(b"\xff\xff\xff\xffarrow")).decode()
    _, (error,) = read(lines(tmp_path / "b.json", rllib_line(obs=old)))
    assert "output_compress_columns: []" in str(error), "the remedy for an old form"


def test_rllibs_other_lines_are_read(tmp_path):
    """R187: several policies, wrapped rows, newer flags, NaN."""
    several = {
        "type": "MultiAgentBatch",
        "count": 5,
        "policy_batches": {"a": rllib_line(2), "b": rllib_line(4)},
    }
    newer = rllib_line(terminateds=[False, True, False], truncateds=[False, False, True])
    del newer["dones"]
    nan = rllib_line(rewards=[1.0, float("nan"), None])
    loaded, errors = read(lines(tmp_path / "a.json", several, {"value": rllib_line()}, newer, nan))
    assert errors == []
    assert loaded[0].count == 5
    assert {name: rows.count for name, rows in loaded[0].policy_batches.items()} == {"a": 2, "b": 4}
    assert loaded[1].count == 3
    assert loaded[2]["dones"].tolist() == [False, True, True]
    assert np.isnan(loaded[3]["rewards"]).tolist() == [False, True, True]


@pytest.mark.parametrize("name", ["dones", "terminateds", "truncateds"])
def test_flags_can_be_0_and_1_but_no_other_numbers(tmp_path, name):
    right = [rllib_line(**{name: values}) for values in ([0, 0, 1], [0.0, 0.0, 1.0])]
    wrong = [rllib_line(**{name: values}) for values in ([0, 0, 2], [0, -1, 1], [0, 255, None])]
    loaded, errors = read(lines(tmp_path / "a.json", *right, *wrong))
    assert [batch[name].tolist() for batch in loaded] == [[False, False, True]] * 2
    assert [error.place for error in errors] == ["line 3", "line 4", "line 5"]
    assert {error.reason for error in errors} == {
        f"column {name!r} does not hold flags, 0 or 1 for each row"
    }


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([476287523, 476287523, None, 476287524], [476287523, 476287523, 476287524]),
        ([476287523.0, 476287523.0, 476287524.0], [476287523, 476287523, 476287524]),
        (["a", "a", None], episode_numbers(["a", "a"])),
    ],
)
def test_large_numbers_of_episodes_are_read_as_floats_and_next_to_null(tmp_path, names, expected):
    """Found in RLlib's files, whose numbers are random and have up to ten digits."""
    path = lines(tmp_path / "a.json", rllib_line(len(names), eps_id=names))
    stored = list(stored_batches(str(path)))
    places = [error.place for error in stored if isinstance(error, DataError)]
    assert places == [f"line 1, row {row + 1}" for row, name in enumerate(names) if name is None]
    eps_id = stored[-1].batch["eps_id"]
    assert (eps_id.dtype, eps_id.tolist()) == (np.int64, [*expected])


def test_numbers_of_episodes_that_floats_cannot_hold_are_refused_with_the_limit(tmp_path):
    path = lines(tmp_path / "a.json", rllib_line(2, eps_id=[2**53 + 1, None]))
    _, (error,) = read(path)
    assert error.reason.startswith("column 'eps_id'")
    assert f"less than {2**53:,}" in error.reason


def test_numbers_that_float32_cannot_hold_are_infinite(tmp_path):
    """Found by fuzzing: the reader let a warning of NumPy through."""
    loaded, _ = read(
        lines(
            tmp_path / "a.json", rllib_line(rewards=[1e300, -1e300, 1.0]), column(rows=[1e300, 1.0])
        )
    )
    assert loaded[0]["rewards"].tolist() == [np.inf, -np.inf, 1.0]
    assert loaded[1]["x"].tolist() == [np.inf, 1.0]


def test_rllibs_lines_are_written_plain_and_read_back(tmp_path):
    several = MultiAgentBatch({"a": cartpole_rows()}, 15)
    path = write(
        tmp_path / "a.json",
        cartpole_rows(),
        several,
        format_name="rllib",
        compress_columns=frozenset({"obs"}),
    )
    (first, second), _ = read(path)
    assert json.loads((tmp_path / "a.json").read_text().splitlines()[0])["type"] == "SampleBatch"
    np.testing.assert_array_equal(first["obs"], cartpole_rows()["obs"])
    assert second.count == 15


# --- files of others ---

GOOD = {"aiorl": 1, "env_steps": 1, "columns": {"obs": {"dtype": "float32", "rows": [[1.0]]}}}


def column(**entries):
    return {"aiorl": 1, "env_steps": 2, "columns": {"x": {"dtype": "float32", **entries}}}


BAD = [
    [],
    1,
    "x",
    None,
    {},
    {"type": "Other"},
    {"type": "SampleBatch"},
    {"type": "SampleBatch", "obs": 1},
    {"type": "SampleBatch", "obs": []},
    {"type": "SampleBatch", "obs": [[1], [1, 2]]},
    {"type": "SampleBatch", "obs": [1, "a"]},
    {"type": "SampleBatch", "obs": ["a"]},
    {"type": "SampleBatch", "obs": "é"},
    {"type": "SampleBatch", "obs": "!!"},
    {"type": "SampleBatch", "obs": "AAAA"},
    {"type": "SampleBatch", "obs": [1], "": [1]},
    {"type": "SampleBatch", "obs": [1], "\x1b[2J": [1]},
    {"type": "SampleBatch", "obs": [1], "t": [1, 2]},
    {"type": "SampleBatch", "obs": [1], "dones": [[True]]},
    {"type": "SampleBatch", "obs": [1], "dones": [0.5]},
    {"type": "SampleBatch", "obs": [[[[[[[[[[1]]]]]]]]]], "t": [{"a": 1}, 2]},
    {"type": "SampleBatch", "obs": [10**400]},
    {"type": "SampleBatch", "obs": {"a": [1]}},
    {"type": "SampleBatch", "rewards": [{"a": 1}]},
    {"type": "SampleBatch", "rewards": [[1, 2]]},
    {"type": "SampleBatch", "eps_id": [[1]]},
    {"type": "SampleBatch", "eps_id": [0.5]},
    {"type": "SampleBatch", "t": [None]},
    {"type": "SampleBatch", "obs": [{}]},
    {"type": "MultiAgentBatch", "count": 1, "policy_batches": {"\x1b[2J": {"obs": [1]}}},
    {"aiorl": 1, "env_steps": 1, "policies": {"": {"obs": {"dtype": "float32", "rows": [1.0]}}}},
    {"type": "SampleBatch", "agent_index": [{}]},
    {"type": "MultiAgentBatch"},
    {"type": "MultiAgentBatch", "count": -1, "policy_batches": {}},
    {"type": "MultiAgentBatch", "count": 1, "policy_batches": {"a": 1}},
    {"value": 3},
    {"value": {"value": {}}},
    {**GOOD, "aiorl": 2},
    {**GOOD, "env_steps": -1},
    {**GOOD, "env_steps": True},
    {"aiorl": 1, "env_steps": 1},
    {"aiorl": 1, "env_steps": 1, "columns": []},
    {"aiorl": 1, "env_steps": 1, "policies": {}},
    column(),
    column(rows=[1, [2]]),
    column(rows=["1"]),
    column(rows=[None]),
    column(dtype="object", rows=[1]),
    column(dtype="int8", rows=[300]),
    column(dtype="int8", rows=[1.5]),
    column(dtype="bool", rows=[2]),
    column(rows=[{}]),
    column(shape=[2], base64="AAAA"),
    column(shape=[-1], base64="AAAA"),
    column(shape=[2**40], base64=""),
    column(shape=[], base64=""),
    column(shape=[1.5], base64=""),
    column(shape=["1"], base64=""),
    column(shape=[1], lz4="AAAA"),
    column(shape=[1], lz4="é"),
    column(dtype="bool", shape=[3], base64="AAEC"),
    column(shape=[1] * 40, base64="AAAAAA=="),
    column(shape=[1], lz4=b64encode(lz4.frame.compress(b"12345678")).decode()),
    column(
        shape=[1 << 28],
        lz4=b64encode(lz4.frame.compress(bytes(1 << 22), store_size=False)).decode(),
    ),
]


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_line_that_is_not_a_batch_is_named_and_the_next_one_read(tmp_path, line):
    path = lines(tmp_path / "a.json", GOOD, line, GOOD)
    loaded, (error,) = read(path)
    assert len(loaded) == 2
    assert str(error).startswith(f"{path}, line 2: ")
    assert str(error).isprintable()
    assert len(error.reason) < 500


@pytest.mark.parametrize(
    "text", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":NaN,}', b"nonsense", b'{"a":' * 5000]
)
def test_a_line_that_is_not_json_is_named_and_the_next_one_read(tmp_path, text):
    path = tmp_path / "a.json"
    good = json.dumps(GOOD).encode()
    path.write_bytes(good + b"\n\n" + text + b"\n" + good)
    loaded, (error,) = read(path)
    assert len(loaded) == 2
    assert error.place == "line 3"


def test_compressed_data_with_a_false_or_large_size_are_refused_before_memory_is_allocated(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("aiorl.offline.stored_columns.MAX_BATCH_BYTES", 1 << 16)
    bomb = lz4.frame.compress(bytes(1 << 24))
    unsized = lz4.frame.compress(bytes(1 << 24), store_size=False)
    texts = [b64encode(frame).decode() for frame in (bomb, unsized)]
    bad = [column(shape=[1 << 22], lz4=text) for text in texts] + [
        rllib_line(obs=text) for text in texts
    ]
    loaded, errors = read(lines(tmp_path / "a.json", *bad))
    assert loaded == []
    assert len(errors) == 4


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "line",
    [
        rllib_line(obs=[[1.0], LONG, *[""] * 20_000]),
        rllib_line(obs=[1.0, LONG, *[""] * 20_000]),
        rllib_line(obs=[[1.0, LONG], *[["", ""]] * 10_000]),
        column(rows=[LONG, *[""] * 20_000]),
        column(rows=[[1.0], [LONG], *[[""]] * 20_000]),
    ],
    ids=range(5),
)
def test_text_among_numbers_is_refused_before_rows_are_padded_to_it(tmp_path, line):
    tracemalloc.start()
    try:
        loaded, (_,) = read(lines(tmp_path / "a.json", line))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert loaded == []
    assert most < 50_000_000


@pytest.mark.parametrize("is_rllib", [False, True])
def test_the_policies_of_a_batch_share_its_memory_limit(tmp_path, monkeypatch, is_rllib):
    monkeypatch.setattr(stored_columns, "MAX_BATCH_BYTES", 1000)

    def line(names):
        if is_rllib:
            return {
                "type": "MultiAgentBatch",
                "count": 1,
                "policy_batches": {name: {"x": [1] * 100} for name in names},
            }
        rows = {"x": {"dtype": "int64", "rows": [1] * 100}}
        return {"aiorl": 1, "env_steps": 1, "policies": dict.fromkeys(names, rows)}

    loaded, (error,) = read(lines(tmp_path / "a.json", line("a"), line("ab")))
    assert len(loaded) == 1
    assert "1,000" in str(error)


def test_a_line_with_values_that_take_too_much_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_LARGE_LINE", 1000)
    monkeypatch.setattr(json_lines, "_MAX_PARSED_BYTES", 100_000)
    path = lines(tmp_path / "a.json", column(rows=[[]] * 2000), column(rows=[1.0] * 2000))
    loaded, (error,) = read(path)
    assert len(loaded) == 1
    assert error.place == "line 1"


def test_a_link_is_followed_and_a_pipe_does_not_block(tmp_path):
    write(tmp_path / "b.json", cartpole_rows())
    (tmp_path / "c.json").symlink_to("b.json")
    assert len(read(tmp_path / "c.json")[0]) == 1
    for name in ("a.json", "a.parquet"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(OSError, match=name):
            read(tmp_path / name)


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 1000)
    (tmp_path / "a.json").write_bytes(b"x" * 5000)
    with pytest.raises(DataError, match=r"line 1: .*1,000"):
        read(tmp_path / "a.json")


def test_a_torn_last_line_is_reported(tmp_path):
    write(tmp_path / "a.json", cartpole_rows(), cartpole_rows())
    whole = (tmp_path / "a.json").read_bytes()
    (tmp_path / "a.json").write_bytes(whole[:-100])
    (loaded,), (error,) = read(tmp_path / "a.json")
    assert loaded.count == 15
    assert error.place == "line 2"
    (tmp_path / "a.json").write_bytes(whole[:-1])
    assert len(read(tmp_path / "a.json")[0]) == 2


@pytest.mark.parametrize(
    ("suffix", "packer"), [(".gz", gzip.compress), (".lz4", lz4.frame.compress)]
)
def test_a_truncated_or_false_compressed_file_is_reported(tmp_path, suffix, packer):
    data = b"".join(
        json.dumps(rllib_line(200, t=list(range(n, n + 200)))).encode() + b"\n" for n in range(60)
    )
    path = tmp_path / f"a.json{suffix}"
    for content in (packer(data)[:-200], b"no such thing", packer(data)[:-200] + b"x" * 200):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.json"):
            read(path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"{}\n"])
def test_a_file_that_is_not_parquet_is_reported(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet"):
        read(tmp_path / "a.parquet")


def parquet_of(path, note=None, **columns):
    import pyarrow.parquet as pq

    arrays = [pa.array(values) for values in columns.values()]
    metadata = None if note is None else {b"aiorl": json.dumps(note).encode()}
    fields = [
        pa.field(name, array.type, metadata=metadata)
        for name, array in zip(columns, arrays, strict=True)
    ]
    pq.write_table(pa.table(arrays, pa.schema(fields)), path)
    return path


def test_parquet_of_other_programs_is_read(tmp_path):
    path = parquet_of(
        tmp_path / "a.parquet",
        obs=[[1.0, 2.0], [3.0, 4.0]],
        fixed=pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)),
        nested=[[[1], [2]], [[3], [4]]],
        actions=[0, 1],
        rewards=pa.array([1.0, None], pa.float32()),
        dones=[False, True],
    )
    (loaded,), errors = read(path)
    assert errors == []
    assert loaded["obs"].tolist() == [[1, 2], [3, 4]]
    assert loaded["fixed"].tolist() == [[1, 2], [3, 4]]
    assert loaded["actions"].tolist() == [0, 1]
    assert np.isnan(loaded["rewards"][1])
    assert loaded["terminateds"].tolist() == [False, True]


FLOAT, TEXT = {"dtype": "float32", "shape": []}, {"dtype": "json", "shape": []}


@pytest.mark.parametrize(
    ("note", "values"),
    [
        *(
            (None, values)
            for values in (
                ["a"],
                [{"a": 1}],
                [[1], [1, 2]],
                [1, None],
                [[1], None],
                [[None]],
                [b"1"],
            )
        ),
        (FLOAT, ["1.5"]),
        (FLOAT, [["1.5"]]),
        (TEXT, [["1.5"]]),
        (TEXT, ["{"]),
        (TEXT, [None, "{}"]),
        ({}, [1]),
        ({"dtype": "float32", "shape": [-1]}, [1.5]),
        ({"dtype": "float32", "shape": [2]}, [1.5]),
    ],
)
def test_parquet_without_columns_of_numbers_or_with_false_metadata_is_refused(
    tmp_path, note, values
):
    path = parquet_of(tmp_path / "a.parquet", note, x=values)
    try:
        loaded, errors = read(path)
    except DataError as error:
        loaded, errors = [], [error]
    assert loaded == []
    assert "'x'" in str(errors[0])


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int64", [1.0, 0.5]),
        ("int64", [1.0, np.nan]),
        ("int64", [1.0, 1e30]),
        ("uint8", [1, -1]),
        ("int64", pa.array([1, 2**63], pa.uint64())),
        ("bool", [0, 256]),
    ],
)
def test_numbers_of_another_program_that_the_dtype_of_a_column_does_not_have_are_refused(
    tmp_path, dtype, values
):
    """Programs keep the metadata of a column that they change."""
    path = parquet_of(tmp_path / "a.parquet", {"dtype": dtype, "shape": []}, x=values)
    loaded, (error,) = read(path)
    assert (loaded, error.path, error.place) == ([], str(path), "row group 1")
    assert error.reason.startswith(f"column 'x': numbers that don't fit {dtype}")


def test_numbers_of_another_program_get_the_dtype_of_their_column(tmp_path):
    for dtype, values in (("int64", [1.0, 2.0]), ("float32", [1, 2]), ("bool", [1, 0])):
        path = parquet_of(tmp_path / f"{dtype}.parquet", {"dtype": dtype, "shape": []}, x=values)
        (loaded,), _ = read(path)
        assert (loaded["x"].dtype, loaded["x"].tolist()) == (dtype, values)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["rewards", "rewards"], "2 columns are called 'rewards'; give each its own name"),
        (["a", "a\0b"], "a column is called 'a?b', which is not a valid name"),
        (["a", "x" * 300], "a column is called 'xxx"),
    ],
)
def test_parquet_with_names_that_are_repeated_or_not_valid_is_refused(tmp_path, names, reason):
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1, 2]), pa.array([9, 9])], names), path)
    with pytest.raises(DataError) as caught:
        read(path)
    assert (caught.value.path, caught.value.place) == (str(path), "")
    assert caught.value.reason.startswith(reason)


def test_row_groups_without_rows_are_no_damage(tmp_path, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    names = ("obs", "actions", "rewards", "terminateds", "truncateds")
    table = pa.table({name: cartpole_rows()[name].tolist() for name in names})
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, table.schema) as file:
        for part in (table, table.slice(0, 0), table):
            file.write_table(part)
    pq.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    stored = list(format_of(str(path)).read(str(path)))
    assert [batch.place for batch in stored] == ["row group 1", "row group 3"]
    assert read(tmp_path / "empty.parquet") == ([], [])
    assert main(["validate", str(tmp_path)]) == 0
    assert "2 files checked: all fits" in capsys.readouterr().out


def test_lists_with_repeated_values_count_with_their_decoded_size(tmp_path, monkeypatch):
    path = parquet_of(tmp_path / "a.parquet", x=[np.zeros(100_000, np.int64)] * 5)
    assert path.stat().st_size < 2000
    write(tmp_path / "b.parquet", *[cartpole_rows(first=3 * number) for number in range(200)])
    monkeypatch.setattr("aiorl.offline.parquet.MAX_BATCH_BYTES", 100_000)
    for name in ("a.parquet", "b.parquet"):
        loaded, (error,) = read(tmp_path / name)
        assert (loaded, error.place) == ([], "row group 1")


def test_a_footer_with_too_few_values_is_not_trusted(tmp_path, monkeypatch):
    path = parquet_of(tmp_path / "a.parquet", x=pa.array([[0] * 5000], pa.list_(pa.int64())))
    content = path.read_bytes()
    true, false = b"\x90\x4e", b"\xe4\x00"  # 5,000 and 50 in Thrift
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:start] + content[start:].replace(true, false))
    monkeypatch.setattr("aiorl.offline.parquet.MAX_BATCH_BYTES", 30_000)
    loaded, (error,) = read(path)
    assert (loaded, error.place) == ([], "row group 1")


def test_a_long_text_in_all_rows_counts_for_each_row(tmp_path, monkeypatch):
    parquet_of(tmp_path / "a.parquet", TEXT, infos=[json.dumps({"note": "x" * 10_000})] * 1000)
    assert len(read(tmp_path / "a.parquet")[0]) == 1
    monkeypatch.setattr(stored_columns, "MAX_BATCH_BYTES", 5_000_000)
    loaded, (error,) = read(tmp_path / "a.parquet")
    assert loaded == []
    assert "5,000,000" in str(error)


def test_row_groups_end_where_episodes_do(tmp_path, monkeypatch):
    monkeypatch.setattr("aiorl.offline.parquet._GROUP_ROWS", 30)
    batch = cartpole_rows(20, 7)
    with format_named("parquet").create(str(tmp_path / "a.parquet"), WriteOptions()) as file:
        for at in range(0, 140, 9):
            file.write(batch.slice(at, at + 9))
        assert not (tmp_path / "a.parquet").exists(), "before it is complete"
    loaded, _ = read(tmp_path / "a.parquet")
    assert len(loaded) > 3
    assert all(rows["dones"][-1] and rows["t"][0] == 0 for rows in loaded)
    assert_equal_batches(SampleBatch.concat(loaded), batch)


def test_parquet_reads_the_file_that_was_checked(tmp_path, monkeypatch):
    """Another file can have its name by then."""
    write(tmp_path / "a.parquet", cartpole_rows())

    def open_and_remove(path):
        file = open_plain(path)
        os.remove(path)
        return file

    monkeypatch.setattr("aiorl.offline.parquet.open_plain", open_and_remove)
    assert len(read(tmp_path / "a.parquet")[0]) == 1


def test_the_name_of_a_file_determines_its_format():
    assert format_of("a.json").name == format_of("s3://x/a.JSONL.gz").name == "json"
    assert format_of("a.parquet").name == "parquet"
    assert format_of("minari:a/b-v0").name == "minari"
    assert ".json" in SUFFIXES
    with pytest.raises(DataError, match=r"'\.csv'.*\.parquet"):
        format_of("a.csv")
    with pytest.raises(DataError, match=r"\.gz"):
        format_of("a.parquet.gz")
    with pytest.raises(ConfigError, match="'parquet'"):
        format_named("parket")


def test_without_the_extra_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "minari", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    for path in (str(tmp_path / "a.parquet"), "minari:a-v0"):
        with pytest.raises(ConfigError, match=r"offline\]"):
            read(path)


def test_empty_lines_are_counted_however_many_there_are(tmp_path):
    """They can be between the blocks in which a file is read, and spaces can be around a line."""
    line = json.dumps({"type": "SampleBatch", "obs": [[1.0]], "rewards": [1.0]})
    path = tmp_path / "a.json"
    path.write_text(
        "\n" * 300_000
        + f"  {line}\n"
        + " \r\n" * 100_000
        + line
        + "\n \nx\n"
        + "\n" * 300_000
        + line
    )
    loaded = list(format_of(str(path)).read(str(path)))
    assert [stored.place for stored in loaded] == [
        "line 300001",
        "line 400002",
        "line 400004",
        "line 700005",
    ]
    assert [isinstance(stored, DataError) for stored in loaded] == [False, False, True, False]


def test_a_file_with_nothing_but_unreadable_places_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("aiorl.offline.registry.MAX_UNREADABLE", 50)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"x\n" * 200))
    loaded = list(stored_batches(str(tmp_path / "a.json.gz")))
    assert len(loaded) == 51
    assert loaded[-1].place == ""


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
def test_episodes_named_by_text_get_numbers(tmp_path, suffix):
    names = ["ab", "ab", "cd", "cd", "ab"]
    columns = {"obs": [[0.0]] * 5, "actions": [0] * 5, "rewards": [1.0] * 5, "eps_id": names}
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pytest.importorskip("pyarrow").table(columns), path)
    else:
        path.write_text(json.dumps({"type": "SampleBatch", **columns}) + "\n")
    (batch,), errors = read(path)
    assert errors == []
    first, second = batch["eps_id"][0], batch["eps_id"][2]
    assert first != second
    assert batch["eps_id"].tolist() == [first, first, second, second, first]
