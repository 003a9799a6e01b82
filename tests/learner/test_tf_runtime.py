from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiorl.config.schema import CommonConfig
from aiorl.learner.tf_runtime import num_threads, prepare_environment


def test_threads_are_as_configured_but_no_more_than_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert num_threads(CommonConfig(threads=1)) == 1
    assert num_threads(CommonConfig(threads=4096)) == cores
    assert num_threads(CommonConfig()) == min(8, cores)


def test_r184_num_gpus_0_hides_gpus_and_asking_for_some_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    prepare_environment(CommonConfig(num_gpus=1))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    prepare_environment(CommonConfig())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_tensorflow_greets_in_the_log_and_r33_missing_gpus_are_an_error(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from aiorl.config.schema import CommonConfig\n"
        "from aiorl.learner.tf_runtime import configure_tensorflow\n"
        f"log = Path({str(tmp_path / 'log.txt')!r})\n"
        "configure_tensorflow(CommonConfig(threads=1), log)\n"
        "import tensorflow as tf\n"
        "assert tf.config.threading.get_intra_op_parallelism_threads() == 1\n"
        "try:\n"
        "    configure_tensorflow(CommonConfig(num_gpus=1))\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "TensorFlow sees no GPU" in done.stdout
    assert "oneDNN" not in done.stderr
