"""Compiled code is kept for later runs only where no one else can write, and only if it is
intact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aiorl.learning import compilation_cache as module
from aiorl.learning.compilation_cache import CompilationCache

NAME = "xla_compile_cache__1__2__XLA_CPU_JIT.pb"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "xla"


@pytest.fixture
def kept(root: Path) -> Path:
    """Return a file that TensorFlow wrote and a run sealed."""
    cache = CompilationCache.open(root, 2)
    file = cache.folder / NAME
    file.write_bytes(b"code")
    cache.seal()
    return file


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("xla*")}


def test_sealed_files_are_there_for_the_next_run_and_private(root: Path, kept: Path) -> None:
    again = CompilationCache.open(root, 2)
    assert again.folder == kept.parent
    again.seal()
    assert CompilationCache.open(root, 2).folder == kept.parent
    assert kept.read_bytes() == b"code"
    for place in (root, kept.parent):
        assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"cod"),
        lambda file: file.write_bytes(b"cope"),
        lambda file: file.write_bytes(b""),
        lambda file: file.with_name("sums.json").unlink(),
        *(
            lambda file, text=text: file.with_name("sums.json").write_text(text)
            for text in ("", "3", "[3]", '{"a": 1}')
        ),
        lambda file: (file.unlink(), file.symlink_to("/bin/sh")),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
)
def test_files_changed_since_sealing_are_removed(
    root: Path, kept: Path, damage: Callable[[Path], object]
) -> None:
    damage(kept)
    CompilationCache.open(root, 2)
    assert not files(kept.parent)


def test_unsealed_files_are_removed(root: Path, kept: Path) -> None:
    """Its learner was killed while compiling, or another program put it there."""
    other = kept.with_name(NAME.replace("__1__", "__7__"))
    other.write_bytes(b"half")
    partial = kept.with_name(f"{NAME}_0.tmp")
    partial.write_bytes(b"half")
    CompilationCache.open(root, 2)
    assert files(kept.parent) == {NAME, partial.name}, "it can still be in use"
    os.utime(partial, (time.time() - 3600,) * 2)
    CompilationCache.open(root, 2)
    assert files(kept.parent) == {NAME}


def test_each_tensorflow_processor_and_number_of_threads_has_its_own_directory(
    root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {CompilationCache.open(root, 1).folder, kept.parent}
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.9")
    folders.add(CompilationCache.open(root, 2).folder)
    real = Path.read_text

    def other_processor(self: Path, *arguments: object, **options: object) -> str:
        text = real(self, *arguments, **options)  # type: ignore[arg-type]
        return text.replace("flags\t\t:", "flags\t\t: avx9000") if self.name == "cpuinfo" else text

    monkeypatch.setattr(Path, "read_text", other_processor)
    folders.add(CompilationCache.open(root, 2).folder)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    folders.add(CompilationCache.open(root, 2).folder)
    assert len(folders) == 5
    assert kept.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_directory_is_not_used(root: Path, kept: Path) -> None:
    for place in (kept.parent, root, root.parent):
        os.chown(place, 12345, -1)
        with pytest.raises(OSError, match="12345"):
            CompilationCache.open(root, 2)
        os.chown(place, os.geteuid(), -1)
    CompilationCache.open(root, 2)


def test_a_directory_that_others_can_write_or_replace_is_not_used(root: Path, kept: Path) -> None:
    for place, mode in ((kept.parent, 0o770), (root, 0o755), (root.parent, 0o777)):
        place.chmod(mode)
        with pytest.raises(OSError, match=f"{place} "):
            CompilationCache.open(root, 2)
        place.chmod(0o700)
    root.rename(root.with_name("elsewhere"))
    root.symlink_to(root.with_name("elsewhere"))
    with pytest.raises(OSError, match=str(root)):
        CompilationCache.open(root, 2)


def test_the_newest_files_of_all_kinds_are_kept_within_limits(
    root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_FILES", 3)
    cache = CompilationCache.open(root, 1)
    for age in range(3):
        file = cache.folder / NAME.replace("__1__", f"__{age}__")
        file.write_bytes(b"code")
        cache.seal()
        os.utime(file, (time.time() - age, time.time() - age))
    os.utime(kept, (time.time() - 60, time.time() - 60))
    CompilationCache.open(root, 1)
    assert not files(kept.parent)
    monkeypatch.setattr(module, "_MAX_BYTES", 9)
    CompilationCache.open(root, 1)
    assert sorted(name[19] for name in files(cache.folder)) == ["0", "1"]
