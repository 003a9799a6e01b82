"""Keeps what a release writes and sends, for later versions to open and to talk to:
``releases/VERSION``.

    cd tests/frozen && PYTHONPATH=../..:../support python make_release.py

Run it once with the code of each release, and never again for the same one. It writes

- ``run``: a run directory with a checkpoint, and ``answers.json``, what its policy answers;
- ``exported``: an export of its policy;
- ``talk.json``: all messages of a worker and its learner, in order, as `test_releases.py` reads
  them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from in_process import running
from make import CARTPOLE, SEVERAL_PASSES, TINY, answers
from memory_endpoint import Direction, MemoryNetwork

import aiorl

SETTINGS: dict[str, Any] = {
    **TINY,
    **SEVERAL_PASSES,
    "observation_filter": "MeanStdFilter",
    "lr_schedule": [[0, 1e-3], [256, 0.0]],
}
_NOT_KEPT = ("events.*", "learning_curve.png", "log.txt", "lock", "logs/*")


class RecordingNetwork(MemoryNetwork):
    """Network that keeps all messages: direction and frames."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, list[str]]] = []

    def carry(
        self,
        direction: Direction,
        peer: bytes,
        frames: Sequence[Any],
        deliver: Callable[[list[memoryview]], None],
    ) -> None:
        self.messages.append(
            (direction.value, [base64.b64encode(bytes(frame)).decode() for frame in frames])
        )
        super().carry(direction, peer, frames, deliver)


async def talk() -> list[tuple[str, list[str]]]:
    """Return the messages of one worker and its learner from hello to goodbye, with two updates
    between.
    """
    network = RecordingNetwork()
    async with running(1, network=network, observation_filter="MeanStdFilter") as both:
        await both.updates_done(2)
    return network.messages


def main() -> None:
    """Write everything of the version that runs this."""
    release = Path(__file__).parent / "releases" / aiorl.__version__
    release.mkdir(parents=True)
    run = release / "run"
    aiorl.train(CARTPOLE, algo="ppo", config={**SETTINGS, "run_dir": str(run)})
    for pattern in _NOT_KEPT:
        for path in run.glob(pattern):
            path.unlink()
    for name in ("config.yaml", "status.json"):
        text = (run / name).read_text()
        (run / name).write_text(text.replace(str(run), "run"))
    (run / "answers.json").write_text(json.dumps(answers(str(run))) + "\n")
    with tempfile.TemporaryDirectory() as place:
        exported = aiorl.export_policy(run, place, ["onnx"])
        Path(exported["onnx"]).parent.rename(release / "exported")
    lines = [json.dumps(message) for message in asyncio.run(talk())]
    (release / "talk.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
