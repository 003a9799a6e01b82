from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiorl.config.parts import RunParts, RuntimePart
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.learning import tf_runtime
from aiorl.learning.tf_runtime import num_threads, prepare_environment


def test_threads_are_as_configured_but_at_most_the_number_of_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert num_threads(RuntimePart(threads=1)) == 1
    assert num_threads(RuntimePart(threads=4096)) == cores
    assert num_threads(RunParts.of(CommonConfig()).runtime) == min(8, cores)


def test_r184_num_gpus_0_hides_gpus_and_other_values_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    prepare_environment(RuntimePart(num_gpus=1))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    prepare_environment(RuntimePart())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("flags", "setting", "expected"),
    [
        ("", "auto", "--tf_xla_persistent_cache_directory={auto}/tf*"),
        (
            "--tf_xla_auto_jit=0",
            "{tmp}/own",
            "--tf_xla_auto_jit=0 --tf_xla_persistent_cache_directory={tmp}/own/tf*",
        ),
        ("", "off", ""),
        (
            "--tf_xla_persistent_cache_directory=/own",
            "auto",
            "--tf_xla_persistent_cache_directory=/own",
        ),
        ("/file/of/flags", "auto", "/file/of/flags"),
        ("", "{tmp}/in two words", ""),
    ],
)
def test_tensorflow_keeps_compiled_code_in_our_cache_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    flags: str,
    setting: str,
    expected: str,
) -> None:
    monkeypatch.setenv("TF_XLA_FLAGS", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tf_runtime, "_cache", None)
    prepare_environment(RuntimePart(compilation_cache=setting.format(tmp=tmp_path)))
    told = os.environ["TF_XLA_FLAGS"].partition(" --tf_xla_persistent_cache_device_types=CPU")[0]
    assert fnmatch(told, expected.format(tmp=tmp_path, auto=tmp_path / "home" / "aiorl" / "xla"))
    prepare_environment(RuntimePart(compilation_cache=setting.format(tmp=tmp_path)))
    assert os.environ["TF_XLA_FLAGS"].count("persistent_cache_directory") == expected.count(
        "persistent"
    )
    assert ("in two words" in caplog.text) == ("two words" in setting)


def test_r186_options_of_index_0_override_the_common_ones() -> None:
    config = CommonConfig(
        tf_session_args={"intra_op_parallelism_threads": 3, "inter_op_parallelism_threads": 5},
        local_tf_session_args={"intra_op_parallelism_threads": 1},
    )
    own = config.session_args()
    assert (own["intra_op_parallelism_threads"], own["inter_op_parallelism_threads"]) == (1, 8)
    assert own["gpu_options"] == {"allow_growth": True}
    assert num_threads(RunParts.of(config).runtime) == 1


class FakeTensorFlow:
    """Two GPUs, with a record of requests."""

    def __init__(self, gpus: Sequence[str] = ("gpu0", "gpu1")) -> None:
        self.visible: list[str] = []
        self.growth: dict[str, bool] = {}
        self.limits: dict[str, list[float]] = {}
        experimental = SimpleNamespace(set_memory_growth=self.growth.__setitem__)
        self.config = SimpleNamespace(
            list_physical_devices=lambda kind: list(gpus),
            set_visible_devices=lambda devices, kind: self.visible.extend(devices),
            set_logical_device_configuration=self.limits.__setitem__,
            LogicalDeviceConfiguration=lambda memory_limit: memory_limit,
            experimental=experimental,
        )


def test_r184_num_gpus_is_a_number_of_gpus_or_a_share_of_one_gpus_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tf = FakeTensorFlow()
    tf_runtime._use_gpus(tf, 1, may_grow=True)
    assert (tf.visible, tf.growth, tf.limits) == (["gpu0"], {"gpu0": True}, {})
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 16000\necho 8000\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    tf = FakeTensorFlow()
    tf_runtime._use_gpus(tf, 0.25, may_grow=True)
    assert (tf.visible, tf.growth, tf.limits) == (["gpu0"], {}, {"gpu0": [2000.0]})
    with pytest.raises(ConfigError, match=r"num_gpus.* 3.* 2"):
        tf_runtime._check_gpus(tf, 3)
    with pytest.raises(ConfigError, match=r"num_gpus.* 1\.5"):
        CommonConfig(num_gpus=1.5)
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="nvidia-smi"):
        tf_runtime._use_gpus(tf, 0.5, may_grow=True)


def test_tensorflow_prints_no_greeting_and_r33_missing_gpus_are_an_error() -> None:
    """Its libraries are loaded before it is imported (on Linux)."""
    code = """
import sys, threading
from aiorl.config.parts import RunParts, RuntimePart
from aiorl.config.schema import CommonConfig
from aiorl.learning.tf_runtime import begin_loading, configure_tensorflow

begin_loading()
[thread.join() for thread in threading.enumerate() if thread.name == "tensorflow"]
if sys.platform.startswith("linux"):
    assert "libtensorflow_cc" in open("/proc/self/maps").read()
assert "tensorflow" not in sys.modules
options = {
    "intra_op_parallelism_threads": 7,
    "allow_soft_placement": False,
    "device_count": {"CPU": 2},
}
own = {"intra_op_parallelism_threads": 1}
config = CommonConfig(tf_session_args=options, local_tf_session_args=own)
configure_tensorflow(RunParts.of(config).runtime)
import tensorflow as tf
assert tf.config.threading.get_intra_op_parallelism_threads() == 1
assert not tf.config.get_soft_device_placement()
assert len(tf.config.list_logical_devices("CPU")) == 2
try:
    configure_tensorflow(RuntimePart(num_gpus=1))
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "num_gpus" in done.stdout
    assert "oneDNN" not in done.stderr


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="greetings are dropped on Linux only"
)
def test_standard_error_still_works_while_several_threads_load_tensorflow(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program, turns = ctypes.CDLL(None), iter(range(2))
    both_load, first_has_left = threading.Barrier(2, timeout=10), threading.Event()

    def print_in_c(text: bytes) -> None:
        program.fputs(text, ctypes.c_void_p.in_dll(program, "stderr"))

    def load() -> None:
        is_last = bool(next(turns))
        both_load.wait()
        if is_last:
            first_has_left.wait(10)
        os.write(2, b"the program's own\n")
        print_in_c(b"a greeting\n")

    def import_it() -> None:
        tf_runtime.import_tensorflow(RuntimePart())
        first_has_left.set()

    monkeypatch.setattr(tf_runtime, "load_tensorflow", load)
    monkeypatch.setattr(tf_runtime, "prepare_environment", lambda runtime: None)
    threads = [threading.Thread(target=import_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print_in_c(b"after it\n")
    assert capfd.readouterr().err == "the program's own\nthe program's own\nafter it\n"
