"""A worker never loads a deep-learning framework, and needs no more than the base install."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import venv
from pathlib import Path

import psutil
import pytest
from over_tcp import learner_over_tcp

ROOT = Path(__file__).parents[2]
HEAVY = ("tensorflow", "keras", "onnx", "tf2onnx", "torch", "jax")

REPORT = """
import sys, importlib, pkgutil
for folder in "worker rollout offline sampler env policy transport protocol".split():
    package = f"aiorl.{folder}"
    module = importlib.import_module(package)
    for found in pkgutil.iter_modules(module.__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
import aiorl.keys
print(",".join(name for name in %r if name in sys.modules))
"""


def test_importing_all_that_a_worker_uses_loads_no_framework() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPORT % (HEAVY,)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""


def test_a_running_worker_has_loaded_no_framework() -> None:
    async def main() -> set[str]:
        both = learner_over_tcp()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "aiorl.worker", "--connect", both.service.address, stderr=subprocess.DEVNULL
        )
        await both.updates_done(3, 60)
        (worker,) = psutil.Process(process.pid).children()
        loaded = {part for file in worker.memory_maps() for part in Path(file.path).parts}
        await both.close()
        assert await process.wait() == 0
        return loaded

    loaded = asyncio.run(main())
    assert "onnxruntime" in loaded
    assert not loaded & set(HEAVY)


def test_a_worker_runs_in_an_environment_with_only_the_base_install(processes, tmp_path: Path) -> None:
    venv.create(tmp_path / "base", with_pip=False)
    python = str(tmp_path / "base" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python]
    installed = subprocess.run(
        [*pip, "install", "--quiet", "--no-compile", "-c", str(ROOT / "constraints.txt"), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if installed.returncode != 0 and "No matching distribution" not in installed.stderr:
        pytest.fail(installed.stderr)
    if installed.returncode != 0:
        pytest.skip("no package index to install from")
    listed = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True).stdout
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert "onnxruntime" in names
    assert not names & {*HEAVY, "tensorflow-cpu"}
    learner = processes.learner("--num-workers=0", "--min-iter-time-s=0.2")
    worker = processes.command([python, "-m", "aiorl.worker", f"--connect={learner.address}"])
    learner.wait_for(r"worker 1 joined", 40.0)
    learner.wait_for_result(lambda result: result["updates_total"] >= 2)
    learner.send(2)
    assert learner.wait() == 0
    assert worker.wait(10) == 0, worker.text
