"""A complete checkpoint with valid digests and made-up contents: a policy acts, or the checkpoint
is refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces
from plain_graph import make_graph
from safetensors.numpy import save as save_tensors

from aiorl.acting.acting_state import ActingState, SavedRun
from aiorl.config.worker import PolicyPart, WorkerPart
from aiorl.data.nested_codec import pack, unpack
from aiorl.data.spaces import space_to_dict
from aiorl.errors import CheckpointError, PolicyError
from aiorl.learning.algorithms.registry import config_class
from fuzz_targets.checkpoint import header_of
from fuzz_targets.folder import Rewritten, make_folder
from fuzz_targets.source import Source, edit

FOLDER = make_folder() / "checkpoint-000002"
FOLDER.mkdir()
META_FILE, TENSORS_FILE = Rewritten(FOLDER / "meta.json"), Rewritten(FOLDER / "tensors.safetensors")
POLICY = "default_policy"
CONFIG = config_class("ppo").from_mapping({"env": "CartPole-v1"})
GRAPH, SPEC, WEIGHTS = make_graph(
    (4,), spaces.Discrete(2), recurrent=False, uses_previous_step=False
)
STATE = (
    ActingState.of(
        CONFIG.to_dict(),
        WorkerPart.of(CONFIG, policies={POLICY: PolicyPart(config={"model": {}})}),
        {POLICY: {"graph": GRAPH, "spec": SPEC.to_dict()}},
        {
            POLICY: {
                "observation": space_to_dict(spaces.Box(-1, 1, (4,))),
                "action": space_to_dict(spaces.Discrete(2)),
            }
        },
    )
    .to_tensors()["acting"]
    .tobytes()
)
TENSORS = {f"algorithm/{POLICY}/weights/{name}": weight for name, weight in WEIGHTS.items()}


def seeds() -> Iterable[bytes]:
    yield b"\0" + STATE
    yield b"\1"
    for number in range(24):
        yield bytes([1, number % 5, number, 1, number, 3, number, 2, 5, 5])


def run(data: bytes) -> None:
    source = Source(data)
    if source.below(2) == 0:
        packed = source.rest()
    else:
        content = copy.deepcopy(unpack(STATE))
        while not source.is_empty:
            edit(content, source)
        try:
            packed = pack(content)
        except (TypeError, ValueError, OverflowError):
            return
    tensors = save_tensors({**TENSORS, "acting": np.frombuffer(packed, np.uint8)})
    TENSORS_FILE.write(tensors)
    META_FILE.write(json.dumps(header_of({}, tensors)).encode())
    try:
        found = SavedRun.open(FOLDER)
        if any(_names_code(graph["spec"]) for graph in found.acting.graphs.values()):
            return
        actor = found.actor()
    except (CheckpointError, PolicyError):
        return
    actor.observation_space.sample()


def _names_code(spec: Any) -> bool:
    """Return whether acting would load TensorFlow, which is not fuzzed."""
    return "tf_model" in spec
