"""`aiorl keys`: files, refusals and output."""

from __future__ import annotations

import stat

import pytest

from aiorl.errors import ConfigError, SecurityError
from aiorl.keys import main, make_keys
from aiorl.net.transport.security import load_learner_keys, load_worker_keys, read_public_key


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_it_makes_both_pairs_and_admits_the_worker_with_private_files_at_0600(tmp_path):
    directory = tmp_path / "new" / "keys"
    files = make_keys(directory)
    assert sorted(path.relative_to(directory).as_posix() for path in files) == [
        "admitted/worker.key",
        "learner.key",
        "learner.key_secret",
        "worker.key",
        "worker.key_secret",
    ]
    assert _mode(directory) == 0o700
    for path in files:
        assert _mode(path) == (0o600 if path.suffix == ".key_secret" else 0o644)
    learner, worker = load_learner_keys(directory), load_worker_keys(directory)
    assert worker.learner_key == learner.public_key
    assert read_public_key(learner.admitted / "worker.key") == worker.public_key
    for path in files:
        if path.suffix == ".key":
            assert "secret-key" not in path.read_text()


def test_a_second_run_adds_workers_and_keeps_the_learners_key(tmp_path):
    make_keys(tmp_path)
    before = (tmp_path / "learner.key_secret").read_bytes()
    files = make_keys(tmp_path, ("host1", "host2"))
    assert (tmp_path / "learner.key_secret").read_bytes() == before
    assert {path.name for path in files} == {
        "host1.key",
        "host1.key_secret",
        "host2.key",
        "host2.key_secret",
    }
    assert len({read_public_key(path) for path in (tmp_path / "admitted").iterdir()}) == 3


def test_existing_files_stay_and_no_file_is_left_half_written(tmp_path):
    make_keys(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"worker\.key_secret"):
        make_keys(tmp_path, ("fresh", "worker"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["learner", "../evil", "a/b", "", ".hidden", "x" * 65, "ä"])
def test_an_invalid_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError) as caught:
        make_keys(tmp_path / "keys", (name,))
    assert caught.value.value == name
    assert not (tmp_path / "keys").exists()


def test_a_directory_that_cannot_be_made_takes_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "keys"
    with pytest.raises(SecurityError) as caught:
        make_keys(folder)
    assert caught.value.value == str(folder)
    assert main([str(folder)]) == 1
    error = capsys.readouterr().err
    assert str(folder) in error
    assert error.count("\n") == 1


def test_the_output_says_what_to_copy_and_what_to_type_next(tmp_path, capsys):
    assert main([str(tmp_path / "keys"), "--workers", "host1"]) == 0
    output = capsys.readouterr().out
    for part in ("host1.key_secret", "learner.key", "aiorl train", "aiorl worker", "admitted"):
        assert part in output
    secret = (tmp_path / "keys" / "host1.key_secret").read_text().split('secret-key = "')[1][:40]
    assert secret not in output
