"""Readers of stored experience."""

from __future__ import annotations

import itertools
import os
import re
import threading

import numpy as np
import pytest
from stored_rows import cartpole_rows, write

from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import BatchError, ConfigError, DataError, EndOfData
from aiorl.offline.formats import Share
from aiorl.offline.readers import (
    EpisodeAssembler,
    FileReader,
    HoldOut,
    PreparedReader,
    ReaderOptions,
)
from aiorl.offline.registry import find_sources

pytest.importorskip("pyarrow")


def episodes(*numbers, length=5):
    return [cartpole_rows(1, length, first=number) for number in numbers]


def ids(batches):
    return sorted({int(number) for batch in batches for number in batch["eps_id"]})


@pytest.fixture
def folder(tmp_path):
    """Return a folder with six files in three formats, with three episodes each, numbered
    consecutively.
    """
    for number, suffix in enumerate([".json", ".json.gz", ".parquet"] * 2):
        write(tmp_path / f"{number}{suffix}", *episodes(*range(3 * number, 3 * number + 3)))
    (tmp_path / "notes.txt").write_text("no experience")
    (tmp_path / ".9.json.part").write_text("half of one")
    return tmp_path


def test_a_directory_and_patterns_name_their_files(folder):
    """R187; a name with brackets is a file first."""
    with pytest.raises(DataError, match=r"'\.txt'"):
        FileReader(f"{folder}/*")
    (folder / "notes.txt").unlink()
    for source in ("", "/*", "/[0-9].*"):
        assert len(find_sources(f"{folder}{source}")) == 6
    path = str(write(folder / "run[1].json", *episodes(1)))
    assert find_sources(path) == [path]


def test_a_list_of_sources_names_each_file_once(folder):
    """R187."""
    loaded = find_sources([f"{folder}/*.json", str(folder / "2.parquet"), str(folder)])
    assert len(loaded) == 6
    assert [os.path.basename(path) for path in loaded[:3]] == ["0.json", "3.json", "2.parquet"]


def test_a_file_with_several_names_is_read_once(folder, monkeypatch):
    path = str(folder / "0.json")
    link = folder / "link.json"
    link.symlink_to(path)
    monkeypatch.chdir(folder)
    other_names = [str(link), f"{folder}/../{folder.name}/0.json", "0.json"]
    assert find_sources([path, *other_names]) == [path]
    assert find_sources([*other_names, path]) == [str(link)]
    counts = [
        sum(batch.count for batch in FileReader(source, ReaderOptions(epochs=1)))
        for source in (path, [path, *other_names])
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["nothing", "*.json", "a.json"])
def test_a_source_without_files_is_refused(tmp_path, name):
    """R187: ValueError."""
    with pytest.raises(ValueError, match=re.escape(name)):
        FileReader(str(tmp_path / name))
    with pytest.raises(ConfigError):
        FileReader([str(tmp_path)])


@pytest.mark.parametrize(
    "uri",
    [
        "zip://a.json::TMP/bad.zip",
        "zip://TMP/bad.zip",
        "reference://a.json",
        "nonsense://a",
        "raises://a.json",
    ],
)
def test_any_error_of_a_protocols_package_is_an_input_error(tmp_path, uri):
    fsspec = pytest.importorskip("fsspec")

    class Raises(fsspec.AbstractFileSystem):
        protocol = "raises"

        def info(self, path, **arguments):
            raise AttributeError("\x1b[2J no token")

    fsspec.register_implementation("raises", Raises, clobber=True)
    (tmp_path / "bad.zip").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError) as caught:
        FileReader(uri.replace("TMP", str(tmp_path)))
    assert caught.value.key == "input"
    assert str(caught.value).isprintable()


def test_a_uri_of_a_pipe_does_not_block(tmp_path):
    pytest.importorskip("fsspec")
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(DataError, match=r"a\.json"):
        FileReader(f"file://{tmp_path}/a.json", ReaderOptions(epochs=1)).next()


def test_uris_are_read_and_written_through_fsspec():
    """R187."""
    fsspec = pytest.importorskip("fsspec")
    write("memory://there/a.json.gz", *episodes(1, 2))
    write("memory://there/b.parquet", *episodes(3))
    fsspec.filesystem("memory").pipe("/there/c.txt", b"")
    try:
        for source in (
            "memory://there",
            "memory://there/[ab].*",
            ["memory://there/a.json.gz", "memory://there/b.parquet"],
        ):
            assert ids(FileReader(source, ReaderOptions(epochs=1))) == [1, 2, 3]
        with pytest.raises(ConfigError, match="elsewhere"):
            FileReader("memory://elsewhere/a.json")
        with pytest.raises(FileExistsError):
            write("memory://there/a.json.gz", *episodes(1))
        with pytest.raises(ConfigError, match="nosuch"):
            FileReader("nosuch://there/a.json")
    finally:
        fsspec.filesystem("memory").rm("/there", recursive=True)


def test_a_pass_returns_every_row_once_and_then_ends(folder):
    reader = FileReader(str(folder), ReaderOptions(epochs=2))
    numbers = [int(number) for batch in reader for number in batch["eps_id"]]
    assert sorted(numbers) == sorted(list(range(18)) * 10)
    assert (reader.num_passes, reader.num_rows, reader.unreadable) == (2, 180, {})
    with pytest.raises(EndOfData):
        reader.next()


def test_training_reads_without_end_in_another_order_each_pass(folder):
    """R187."""
    reader = FileReader(str(folder), ReaderOptions(seed=3))
    firsts = [[int(batch["eps_id"][0]) for batch in itertools.islice(reader, 14)] for _ in range(5)]
    assert all(set(order) == set(firsts[0]) for order in firsts)
    assert len({tuple(order) for order in firsts}) > 1
    again = FileReader(str(folder), ReaderOptions(seed=3))
    assert [int(batch["eps_id"][0]) for batch in itertools.islice(again, 14)] == firsts[0]
    reader.close()
    with pytest.raises(EndOfData):
        reader.next()


@pytest.mark.parametrize("of", [1, 2, 3, 6, 7])
def test_workers_together_read_each_row_once_in_each_pass(folder, of):
    readers = [
        FileReader(str(folder), ReaderOptions(share=Share(index, of), epochs=1))
        for index in range(of)
    ]
    numbers = [int(number) for reader in readers for batch in reader for number in batch["eps_id"]]
    assert sorted(numbers) == sorted(list(range(18)) * 5)
    if of <= 6:
        assert sorted(path for reader in readers for path in reader.files) == find_sources(
            str(folder)
        )


def test_an_endless_reader_with_an_empty_share_reads_everything(tmp_path, caplog):
    write(tmp_path / "a.json", *episodes(1, 2))
    reader = FileReader(str(tmp_path), ReaderOptions(share=Share(3, 4)))
    assert ids(itertools.islice(reader, 4)) == [1, 2]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert list(FileReader(str(tmp_path), ReaderOptions(share=Share(3, 4), epochs=1))) == []


def test_the_held_out_episodes_are_the_others_complete_and_the_same_each_time(tmp_path):
    for name in ("a.json", "b.parquet"):
        batch = cartpole_rows(200, 3)
        write(tmp_path / name, *[batch.slice(at, at + 50) for at in range(0, 600, 50)])
    parts = {}
    for part in ("train", "held_out"):
        options = ReaderOptions(epochs=1, hold_out=HoldOut(0.25, part), batch_rows=7)
        parts[part] = [batch for batch in FileReader(str(tmp_path / "a.json"), options)]
        again = [batch for batch in FileReader(str(tmp_path / "a.json"), options)]
        assert ids(again) == ids(parts[part])
    held_out, train = ids(parts["held_out"]), ids(parts["train"])
    assert sorted(held_out + train) == list(range(200))
    assert 25 < len(held_out) < 80
    assert sum(batch.count for batch in parts["held_out"]) == 3 * len(held_out)
    other = FileReader(
        str(tmp_path / "b.parquet"), ReaderOptions(epochs=1, hold_out=HoldOut(0.25, "held_out"))
    )
    assert ids(other) != held_out


def test_rows_without_episodes_are_held_out_by_batch(tmp_path):
    write(tmp_path / "a.json", *[SampleBatch(rewards=np.full(3, n, np.float32)) for n in range(40)])
    sizes = {}
    for part in ("train", "held_out"):
        reader = FileReader(str(tmp_path), ReaderOptions(epochs=1, hold_out=HoldOut(0.5, part)))
        sizes[part] = [batch.count for batch in reader]
    assert set(sizes["train"] + sizes["held_out"]) == {3}
    assert len(sizes["train"]) + len(sizes["held_out"]) == 40
    assert min(len(sizes["train"]), len(sizes["held_out"])) > 5


def test_several_policies_are_also_held_out_by_episode(tmp_path):
    batch = MultiAgentBatch({"a": cartpole_rows(30, 2), "b": cartpole_rows(30, 2)}, 60)
    write(tmp_path / "a.json", batch)
    (train,) = FileReader(str(tmp_path), ReaderOptions(epochs=1, hold_out=HoldOut(0.5)))
    (held_out,) = FileReader(
        str(tmp_path), ReaderOptions(epochs=1, hold_out=HoldOut(0.5, "held_out"))
    )
    assert train.count + held_out.count == 60
    assert ids([train.policy_batches["a"]]) == ids([train.policy_batches["b"]])


def test_an_input_without_rows_of_the_part_ends_and_does_not_spin(tmp_path):
    write(tmp_path / "a.json", *episodes(1))
    parts = [ReaderOptions(hold_out=HoldOut(0.5, part)) for part in ("train", "held_out")]
    readers = [FileReader(str(tmp_path), options) for options in parts]
    with pytest.raises(DataError):
        [reader.next() for reader in readers]


@pytest.mark.parametrize(
    ("whole", "sizes"), [(True, [10, 10, 100, 5]), (False, [10, 10, 7, 7, 7, 7, 7])]
)
def test_large_stored_batches_are_cut_between_episodes_or_in_long_ones(tmp_path, whole, sizes):
    batch = SampleBatch.concat([*episodes(1, 2, 3, 4), *episodes(5, length=100), *episodes(6)])
    write(tmp_path / "a.parquet", batch)
    reader = FileReader(str(tmp_path), ReaderOptions(epochs=1, batch_rows=7, whole_episodes=whole))
    loaded = list(reader)
    assert [part.count for part in loaded][: len(sizes)] == sizes
    np.testing.assert_array_equal(SampleBatch.concat(loaded)["obs"], batch["obs"])


def corrupt(path, *places):
    lines = path.read_bytes().splitlines(keepends=True)
    for place in places:
        lines[place] = b"garbage\n"
    path.write_bytes(b"".join(lines))


def test_corrupt_lines_are_counted_named_and_skipped(tmp_path, caplog):
    path = write(tmp_path / "a.json", *episodes(*range(10)))
    corrupt(path, 2, 7)
    reader = FileReader(str(tmp_path), ReaderOptions(epochs=1))
    assert ids(reader) == [0, 1, 3, 4, 5, 6, 8, 9]
    assert [place for _, place in reader.unreadable] == ["line 3", "line 8"]
    assert f"{path}, line 3: " in caplog.text


def test_more_corrupt_lines_than_allowed_end_the_reading(tmp_path):
    path = write(tmp_path / "a.json", *episodes(*range(10)))
    corrupt(path, 2, 5, 7)
    reader = FileReader(str(tmp_path), ReaderOptions(max_corrupt=2))
    with pytest.raises(DataError, match=r"3 .* 2.*line 3"):
        list(itertools.islice(reader, 100))
    with pytest.raises(DataError, match=r"3 .* 2.*line 3"):
        reader.next()


def test_a_place_counts_only_once_in_several_passes(tmp_path, caplog):
    path = write(tmp_path / "a.json", *episodes(*range(10)))
    corrupt(path, 2)
    path.write_bytes(path.read_bytes()[:-30])
    reader = FileReader(str(tmp_path), ReaderOptions(max_corrupt=2))
    assert len(list(itertools.islice(reader, 1000))) == 1000
    assert (reader.num_passes, len(reader.unreadable)) == (124, 2)
    assert caplog.text.count("line 3") == caplog.text.count("line 10") == 1


def test_input_without_readable_rows_is_an_error_and_no_endless_loop(tmp_path):
    corrupt(write(tmp_path / "a.json", *episodes(1)), 0)
    for epochs in (None, 1):
        with pytest.raises(DataError, match="line 1"):
            FileReader(str(tmp_path), ReaderOptions(epochs=epochs)).next()
    (tmp_path / "a.json").write_bytes(b"")
    with pytest.raises(DataError):
        FileReader(str(tmp_path)).next()


def test_a_file_that_vanishes_costs_only_its_own_rows(folder, caplog):
    """O6 of offline data."""
    reader = FileReader(str(folder), ReaderOptions(epochs=2, seed=0))
    first = reader.next()
    gone = next(
        path
        for path in reader.files
        if int(first["eps_id"][0]) // 3 != int(os.path.basename(path)[0])
    )
    os.unlink(gone)
    rest = ids(reader)
    lost = int(os.path.basename(gone)[0])
    assert set(range(18)) - set(rest) <= {3 * lost, 3 * lost + 1, 3 * lost + 2} | set(ids([first]))
    assert list(reader.unreadable) == [(gone, "")]
    assert gone in caplog.text


def test_a_reader_can_be_closed_while_another_thread_reads(tmp_path):
    write(tmp_path / "a.json", *episodes(*range(50)))
    reader = FileReader(str(tmp_path))
    is_reading = threading.Event()
    ended: list[BaseException] = []

    def read() -> None:
        try:
            for _ in reader:
                is_reading.set()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert is_reading.wait(10)
    reader.close()
    thread.join(10)
    assert not thread.is_alive()
    assert ended == []


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ReaderOptions, {"epochs": 0}),
        (ReaderOptions, {"batch_rows": 0}),
        (ReaderOptions, {"max_corrupt": -1}),
        (ReaderOptions, {"share": Share(2, 2)}),
        (ReaderOptions, {"share": Share(-1, 2)}),
        *((HoldOut, {"fraction": fraction}) for fraction in (0.0, 1.0, -0.5, float("nan"))),
    ],
)
def test_invalid_options_are_refused(kind, values):
    with pytest.raises(ConfigError):
        kind(**values)


class Counting:
    """Reader of batches numbered from 0, up to a limit."""

    def __init__(self, limit=None, name=0):
        self.given, self.limit, self.name, self.is_closed = 0, limit, name, False

    def next(self):
        if self.given == self.limit:
            raise EndOfData("all")
        self.given += 1
        return SampleBatch(number=np.array([self.given - 1]), name=np.array([self.name]))

    def close(self):
        self.is_closed = True


def number(batch):
    return int(batch["number"][0])


def test_the_shuffle_buffer_is_filled_first_and_returns_random_batches():
    """R188."""
    source = Counting()
    reader = PreparedReader([source], buffer_size=50, seed=[0])
    assert source.given == 0
    first = number(reader.next())
    assert source.given == 50
    drawn_numbers = [first] + [number(reader.next()) for _ in range(449)]
    assert source.given == 499
    assert len(set(drawn_numbers)) == 450
    assert drawn_numbers != sorted(drawn_numbers)
    assert all(value <= index + 50 for index, value in enumerate(drawn_numbers))
    assert max(abs(value - index) for index, value in enumerate(drawn_numbers)) > 50


def test_at_the_end_of_a_finite_input_the_shuffle_buffer_is_emptied():
    """R188."""
    reader = PreparedReader([Counting(limit=12)], buffer_size=5, seed=[0])
    assert sorted(number(reader.next()) for _ in range(12)) == list(range(12))
    with pytest.raises(EndOfData):
        reader.next()


def test_r244_shares_of_a_mixture_are_of_env_steps_however_large_batches_are():
    """Also after few reads."""

    class Large(Counting):
        def next(self):
            return SampleBatch.concat([super(Large, self).next() for _ in range(7)])

    mixed = PreparedReader([Counting(name=0), Large(name=1)], [0.4, 0.6])
    counts = np.zeros(2)
    for number_of_read in range(60):
        counts += np.bincount(mixed.next()["name"], minlength=2)
        if number_of_read >= 10:
            assert abs(counts[1] - 0.6 * counts.sum()) <= 7


def test_a_mixture_reads_by_probability():
    """R187."""
    readers = [Counting(name=index) for index in range(3)]
    mixed = PreparedReader(readers, [0.2, 0.5, 0.3], seed=[1])
    drawn_numbers = np.bincount([int(mixed.next()["name"][0]) for _ in range(4000)]) / 4000
    assert np.abs(drawn_numbers - [0.2, 0.5, 0.3]).max() < 0.03
    mixed.close()
    assert all(reader.is_closed for reader in readers)


def part(eps_id, start, end, *, is_done=False):
    steps = np.arange(start, end)
    return SampleBatch(
        obs=100.0 * eps_id + steps,
        t=steps,
        eps_id=np.full(len(steps), eps_id),
        dones=(steps == end - 1) & is_done,
    )


def joined(assembler, *batches):
    return [episode["obs"].tolist() for batch in batches for episode in assembler.add(batch)]


def test_parts_of_interleaved_episodes_are_assembled_when_they_end():
    assembler = EpisodeAssembler()
    first = SampleBatch.concat([part(1, 0, 3), part(2, 0, 2)])
    second = SampleBatch.concat([part(1, 3, 5, is_done=True), part(2, 2, 4)])
    third = SampleBatch.concat(
        [part(3, 0, 2, is_done=True), part(2, 4, 5, is_done=True), part(3, 0, 1, is_done=True)]
    )
    assert joined(assembler, first) == []
    assert joined(assembler, second) == [[100, 101, 102, 103, 104]]
    assert joined(assembler, third) == [[300, 301], [200, 201, 202, 203, 204], [300]]
    assembler.finish()
    assert assembler.num_left_out == 0


def test_episodes_without_beginning_or_end_are_left_out_and_counted():
    assembler = EpisodeAssembler()
    assert joined(assembler, part(1, 2, 5, is_done=True)) == [], "its beginning is missing"
    assert joined(assembler, part(2, 0, 2), part(2, 3, 6, is_done=True)) == [], (
        "a part in between is missing"
    )
    assert joined(assembler, part(4, 0, 2), part(4, 0, 3, is_done=True)) == [[400, 401, 402]], (
        "of another worker"
    )
    assert joined(assembler, part(5, 0, 4)) == []
    assembler.finish()
    assert assembler.num_left_out == 3 + 5 + 2 + 4


def test_several_episodes_with_one_id_are_cut_where_they_end():
    batch = SampleBatch(
        obs=np.arange(5), eps_id=np.zeros(5, int), terminateds=np.array([0, 1, 0, 0, 1], bool)
    )
    assert joined(EpisodeAssembler(), batch) == [[0, 1], [2, 3, 4]]
    del batch["eps_id"]
    assert joined(EpisodeAssembler(), batch) == [[0, 1], [2, 3, 4]]


def test_without_flags_of_an_end_each_part_is_an_episode():
    batch = SampleBatch(obs=np.arange(3), eps_id=np.array([1, 1, 2]))
    assert joined(EpisodeAssembler(), batch) == [[0, 1], [2]]
    assert joined(EpisodeAssembler(), SampleBatch()) == []
    with pytest.raises(BatchError, match="MultiAgentBatch"):
        list(EpisodeAssembler().add(MultiAgentBatch({"a": part(1, 0, 2)}, 2)))
