"""Checkpoints: round trips, detection of damage, and complete writes only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from aiorl.acting import checkpoint as module
from aiorl.acting.checkpoint import (
    Checkpoint,
    check_compatible,
    clear_partial,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_newest_valid,
    save_checkpoint,
)
from aiorl.errors import CheckpointError

TENSORS = {
    "weights/a": np.arange(12, dtype=np.float32).reshape(3, 4).T[::2],
    "n": np.array(7, np.int64),
}
META: dict[str, Any] = {"env": "CartPole-v1", "algo": "ppo", "spaces": {"obs": [4]}, "rng": 2**100}


def test_a_saved_checkpoint_is_loaded(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", 12, TENSORS, META)
    assert path.name == "checkpoint-000012"
    checkpoint = load_newest_valid(tmp_path / "checkpoints")
    assert (checkpoint.path, checkpoint.number, checkpoint.meta) == (path, 12, META)
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(checkpoint.tensors[name], tensor)
        assert checkpoint.tensors[name].dtype == tensor.dtype


def pieces() -> dict[str, Any]:
    return {
        "one": iter([("rows", 0, np.arange(4)), ("rows", 4, np.ones((2, 3)))]),
        "two": [("b", 0, np.zeros(0))],
    }


def test_pieces_are_written_and_read_one_at_a_time_by_owner(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, TENSORS, META, pieces=pieces())
    checkpoint = load_checkpoint(path)
    got = [(name, first, rows.tolist()) for name, first, rows in checkpoint.pieces_of("one")]
    assert got == [("rows", 0, [0, 1, 2, 3]), ("rows", 4, np.ones((2, 3)).tolist())]
    assert [name for name, _, _ in checkpoint.pieces_of("two")] == ["b"]
    assert not list(checkpoint.pieces_of("three"))


def test_a_damaged_or_missing_piece_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, TENSORS, META, pieces=pieces())
    checkpoint = load_checkpoint(path)
    file = path / "pieces" / "000001.safetensors"
    payload = bytearray(file.read_bytes())
    payload[-1] ^= 1
    file.write_bytes(payload)
    read = checkpoint.pieces_of("one")
    next(read)
    with pytest.raises(CheckpointError, match=r"000001\.safetensors"):
        next(read)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"000001\.safetensors"):
        list(checkpoint.pieces_of("one"))


@pytest.mark.parametrize("size", [None, 0, 3])
def test_a_checkpoint_with_a_missing_or_truncated_piece_is_skipped(
    tmp_path: Path, size: int | None
) -> None:
    for number in (1, 2):
        path = save_checkpoint(tmp_path, number, TENSORS, META, pieces=pieces())
    file = path / "pieces" / "000001.safetensors"
    if size is None:
        file.unlink()
    else:
        os.truncate(file, size)
    with pytest.raises(CheckpointError, match=r"000001\.safetensors"):
        load_checkpoint(path)
    assert load_newest_valid(tmp_path).number == 1


def test_a_piece_of_holes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, TENSORS, META, pieces=pieces())
    header = json.loads((path / "meta.json").read_text())
    header["pieces"][0][4] = 40 << 30
    del header["pieces_sha256"]
    (path / "meta.json").write_text(json.dumps(header))
    os.truncate(path / "pieces" / "000000.safetensors", 40 << 30)
    with pytest.raises(CheckpointError, match=r"000000\.safetensors"):
        load_checkpoint(path).check_pieces()


@pytest.mark.parametrize(
    "change",
    [
        lambda pieces: [["one"]],
        lambda pieces: 7,
        lambda pieces: [["one", "rows", 0, "../../x.safetensors", 3, "a"]],
        lambda pieces: [["one", "rows", "0", "000000.safetensors", 3, "a"]],
        lambda pieces: pieces[:1] * 1000,
    ],
)
def test_impossible_descriptions_of_pieces_are_refused(tmp_path: Path, change: Any) -> None:
    path = save_checkpoint(tmp_path, 1, TENSORS, META, pieces=pieces())
    header = json.loads((path / "meta.json").read_text())
    edit_meta(path / "meta.json", pieces=change(header["pieces"]), pieces_sha256=None)
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        load_checkpoint(path)
    header["pieces"][1][2] = 5  # the row where it begins
    edit_meta(path / "meta.json", **header)
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        load_checkpoint(path)


def test_older_checkpoints_without_a_digest_of_pieces_or_a_size_are_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, TENSORS, META, pieces=pieces())
    edit_meta(path / "meta.json", pieces_sha256=None, tensors_bytes=None)
    checkpoint = load_checkpoint(path)
    checkpoint.check_pieces()
    assert len(list(checkpoint.pieces_of("one"))) == 2


@pytest.mark.parametrize("part", ["weights", "critics", "target/critics"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, part: str) -> None:
    array = np.array([1, np.nan], np.float32)
    path = save_checkpoint(tmp_path, 1, {f"algorithm/default_policy/{part}/w": array}, META)
    with pytest.raises(CheckpointError, match=f"{part}/w"):
        load_checkpoint(path)


DTYPES = st.sampled_from([np.dtype(name) for name in ("f4", "f8", "i4", "i8", "u1", "?", "f2")])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1).filter(
            lambda name: name != "__metadata__"
        ),
        DTYPES.flatmap(
            lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
        ),
        max_size=4,
    ),
    meta=st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=4
    ),
)
def test_anything_that_fits_comes_back_bit_by_bit(
    tmp_path: Path, tensors: dict[str, Any], meta: dict[str, Any]
) -> None:
    save_checkpoint(tmp_path, 1, tensors, meta)
    checkpoint = load_newest_valid(tmp_path)
    assert checkpoint.meta == meta
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        assert checkpoint.tensors[name].shape == tensor.shape
        assert checkpoint.tensors[name].tobytes() == tensor.tobytes()


def test_only_the_newest_are_kept_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for number in (1, 2, 9, 10, 1_000_000):
        save_checkpoint(tmp_path, number, TENSORS, META, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "checkpoint-000010",
        "checkpoint-1000000",
    ]
    assert (tmp_path / "notes").is_dir()


def test_the_same_number_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, META)
    save_checkpoint(tmp_path, 1, {"x": np.ones(1)}, {})
    assert load_newest_valid(tmp_path).tensors.keys() == {"x"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


def flip_a_byte(path: Path) -> None:
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(payload)


def edit_meta(path: Path, **changes: Any) -> None:
    header = json.loads(path.read_bytes())
    path.write_text(
        json.dumps(
            {name: value for name, value in {**header, **changes}.items() if value is not None}
        )
    )


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def link_to_itself_elsewhere(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DEEP = "[" * 100_000 + "]" * 100_000
META_FILE, TENSORS_FILE = "meta.json", "tensors.safetensors"
DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "meta nested deeply": (META_FILE, lambda file: file.write_text(DEEP)),
    "meta nested a little too deeply": (
        META_FILE,
        lambda file: file.write_text("[" * 200 + "]" * 200),
    ),
    "NaN in meta": (META_FILE, lambda file: rewrite(file, '"rng": 1267', '"rng": NaN, "x": 1267')),
    "an infinite number in meta": (
        META_FILE,
        lambda file: rewrite(file, '"rng": 1267', '"rng": 1e999, "x": 1267'),
    ),
    "a name twice in meta": (
        META_FILE,
        lambda file: rewrite(file, '"rng": 1267', '"rng": 1, "rng": 1267'),
    ),
    "meta in another encoding": (
        META_FILE,
        lambda file: file.write_bytes(file.read_text().encode("utf-16")),
    ),
    "a huge meta": (META_FILE, lambda file: os.truncate(file, 1 << 40)),
    "a pipe for meta": (META_FILE, lambda file: replace(file, os.mkfifo)),
    "a pipe for tensors": (TENSORS_FILE, lambda file: replace(file, os.mkfifo)),
    "a directory for tensors": (TENSORS_FILE, lambda file: replace(file, os.mkdir)),
    "a device for meta": (
        META_FILE,
        lambda file: replace(file, lambda path: path.symlink_to("/dev/zero")),
    ),
    "a link for tensors": (TENSORS_FILE, link_to_itself_elsewhere),
    "sparse tensors of 20 GB": (TENSORS_FILE, lambda file: os.truncate(file, 20 << 30)),
    "another number than its own": (META_FILE, lambda file: edit_meta(file, number=3)),
    "a number that is none": (META_FILE, lambda file: edit_meta(file, number=True)),
    "a size that is none": (META_FILE, lambda file: edit_meta(file, tensors_bytes="200")),
    "a byte of the tensors": (TENSORS_FILE, flip_a_byte),
    "tensors cut short": (TENSORS_FILE, lambda file: os.truncate(file, 20)),
    "tensors of holes, as large as meta.json says": (
        TENSORS_FILE,
        lambda file: (
            edit_meta(file.with_name(META_FILE), tensors_bytes=1 << 40),
            os.truncate(file, 1 << 40),
        ),
    ),
    "no tensors": (TENSORS_FILE, Path.unlink),
    "no meta": (META_FILE, Path.unlink),
    "meta cut short": (META_FILE, lambda file: os.truncate(file, 30)),
    "meta that is no object": (META_FILE, lambda file: file.write_text("[]")),
    "meta without digest": (META_FILE, lambda file: edit_meta(file, tensors_sha256=None)),
    "meta of a wrong kind": (META_FILE, lambda file: edit_meta(file, meta=5)),
    "a number in meta": (META_FILE, lambda file: edit_meta(file, meta={**META, "rng": 1})),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_is_named_and_the_previous_one_used(
    tmp_path: Path, kind: str, caplog: Any
) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, META)
    newest = save_checkpoint(tmp_path, 2, TENSORS, META)
    name, damage = DAMAGE[kind]
    damage(newest / name)
    checkpoint = load_newest_valid(tmp_path)
    assert checkpoint.number == 1
    assert "checkpoint-000002" in caplog.text
    assert name in caplog.text
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_checkpoint(newest)


def test_a_link_to_a_checkpoint_can_have_any_name_and_a_renamed_one_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    path = save_checkpoint(tmp_path, 2, TENSORS, META)
    link = tmp_path / "latest"
    link.symlink_to(path.name)
    assert find_checkpoint(link).number == 2
    renamed = path.rename(tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"mine: .* unless .* called checkpoint-000002\. If"):
        find_checkpoint(renamed)


def test_another_format_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, TENSORS, META)
    edit_meta(path / "meta.json", format_version=99)
    with pytest.raises(CheckpointError, match="99"):
        load_checkpoint(path)


def test_an_invalid_checkpoint_is_skipped_like_a_damaged_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, META)
    save_checkpoint(tmp_path, 2, TENSORS, META)

    def check(checkpoint: Checkpoint) -> None:
        if checkpoint.number == 2:
            raise CheckpointError(checkpoint.path, "it makes no sense")

    checkpoint = load_newest_valid(tmp_path, check)
    assert checkpoint.number == 1


def test_a_damaged_one_with_a_higher_number_does_not_count_as_kept(tmp_path: Path) -> None:
    flip_a_byte(save_checkpoint(tmp_path, 500, TENSORS, META) / "tensors.safetensors")
    for number in (401, 402):
        save_checkpoint(tmp_path, number, TENSORS, META, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-000402"]
    assert [path.name for path in list_checkpoints(tmp_path / "superseded")] == [
        "checkpoint-000500"
    ]
    assert load_newest_valid(tmp_path).number == 402
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors"):
        find_checkpoint(tmp_path / "checkpoint-000500")


def test_invalid_tensors_are_damage_even_with_a_correct_digest(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "save_tensors", lambda tensors: b"no safetensors")
    path = save_checkpoint(tmp_path, 1, TENSORS, META)
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors"):
        load_checkpoint(path)


def test_the_error_says_if_no_checkpoint_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        load_newest_valid(tmp_path / "missing")
    path = save_checkpoint(tmp_path, 1, TENSORS, META)
    flip_a_byte(path / "tensors.safetensors")
    with pytest.raises(CheckpointError, match="checkpoint-000001"):
        load_newest_valid(tmp_path)


def test_the_error_tells_a_run_without_a_checkpoint_from_another_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint-\*"):
        find_checkpoint(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(CheckpointError, match="checkpoint_interval_s"):
        find_checkpoint(tmp_path)


def test_a_checkpoint_of_another_run_is_refused_with_all_differences(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, META)
    checkpoint = load_newest_valid(tmp_path)
    check_compatible(checkpoint, {"env": "CartPole-v1", "algo": "ppo", "spaces": {"obs": (4,)}})
    with pytest.raises(CheckpointError) as caught:
        check_compatible(
            checkpoint, {"env": "Pendulum-v1", "algo": "impala", "spaces": {"obs": [4]}}
        )
    for word in ("env", "'CartPole-v1'", "'Pendulum-v1'", "algo", "'ppo'", "'impala'"):
        assert word in str(caught.value)
    assert "spaces" not in str(caught.value)
    with pytest.raises(CheckpointError, match="spaces") as caught:
        check_compatible(checkpoint, {"spaces": {"obs": [4], "large": "x" * 10_000}})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("stored", "current", "fits"),
    [
        ("this-program:Own", "this-program:Own#2", True),
        ("Own", "this-program:Own", True),
        ("Mine-v0", "my_training:Mine-v0", True),
        ("a:Own", "b:Own", False),
        ("this-program:Own", "this-program:Other", False),
    ],
)
def test_an_environment_may_be_redefined_or_named_with_its_module(
    tmp_path: Path, stored: str, current: str, fits: bool
) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, {**META, "env": stored})
    with (
        contextlib.nullcontext()
        if fits
        else pytest.raises(CheckpointError, match=f"env .*{stored}.*{current}")
    ):
        check_compatible(load_newest_valid(tmp_path), {"env": current})


@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_the_older_ones_intact_and_nothing_behind(
    tmp_path: Path, monkeypatch: Any, step: str
) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, META)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "write":
        monkeypatch.setattr(module, "_write", full)
    elif step == "fsync":
        monkeypatch.setattr(module.os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
        save_checkpoint(tmp_path, 2, TENSORS, META)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
    assert load_newest_valid(tmp_path).number == 1


def test_an_unwritable_or_unreadable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        save_checkpoint(tmp_path / "file", 1, TENSORS, META)
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        list_checkpoints(tmp_path / "file")


@pytest.mark.parametrize(
    ("tensors", "meta"),
    [({"x": np.array([object()])}, {}), ({}, {"x": object()}), ({}, {"x": float("nan")})],
)
def test_values_that_cannot_be_stored_are_refused_before_anything_is_written(
    tmp_path: Path, tensors: dict[str, Any], meta: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError):
        save_checkpoint(tmp_path / "new", 1, tensors, meta)
    assert not (tmp_path / "new").exists()


def test_remains_of_a_killed_writer_are_removed_and_a_replaced_checkpoint_is_restored(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, META)
    (tmp_path / ".partial-checkpoint-000002").mkdir()
    (tmp_path / ".partial-checkpoint-000002" / "meta.json").write_text("{")
    (tmp_path / ".partial-old-checkpoint-000001").mkdir()  # its successor is in place
    shutil.move(
        save_checkpoint(tmp_path, 3, TENSORS, META), tmp_path / ".partial-old-checkpoint-000003"
    )
    clear_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-000001",
        "checkpoint-000003",
    ]
    assert load_newest_valid(tmp_path).number == 3


def test_a_process_that_is_killed_while_it_removes_leaves_only_whole_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed_in_part(path: Path, *args: object, **kwargs: object) -> None:
        (path / "tensors.safetensors").unlink(missing_ok=True)

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", removed_in_part)
        for number in (1, 2, 3, 9):
            save_checkpoint(tmp_path, number, {}, {}, keep=1)
        save_checkpoint(tmp_path, 4, {}, {}, keep=1)  # the ninth becomes superseded
        save_checkpoint(tmp_path, 9, {}, {}, keep=1)
        save_checkpoint(tmp_path, 5, {}, {}, keep=1)
    for directory in (tmp_path, tmp_path / "superseded"):
        for path in list_checkpoints(directory):
            assert load_checkpoint(path).path == path
    save_checkpoint(tmp_path, 6, {}, {}, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-000006", "superseded"}


def test_one_that_could_not_be_replaced_stays(tmp_path: Path, monkeypatch: Any) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, META)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == ".partial-checkpoint-000001":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match=os.strerror(errno.EIO)):
        save_checkpoint(tmp_path, 1, {"x": np.ones(1)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
    assert load_newest_valid(tmp_path).meta == META


def test_a_meta_file_too_large_to_read_back_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, META)
    monkeypatch.setattr(module, "_MAX_META_BYTES", 2000)
    save_checkpoint(tmp_path, 2, TENSORS, META)
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        save_checkpoint(tmp_path, 3, TENSORS, {"x": "y" * 2000})
    many = {"one": [("rows", number, np.zeros(1)) for number in range(30)]}
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        save_checkpoint(tmp_path, 3, TENSORS, META, pieces=many)
    assert load_newest_valid(tmp_path).number == 2


def test_a_file_in_place_of_a_run_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(path)
    assert caught.value.path == str(path)
    assert "not a directory" in str(caught.value)
    assert "run directory" in str(caught.value)
