"""Fuzzing targets: each module here has a function `run`, which takes any bytes and raises only for
a finding.

A target is a quick function of its bytes alone, and imports neither TensorFlow nor the fuzzer, so
that tests can run the corpus through it. `seeds` are inputs to begin with, `WORDS` are building
blocks of inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """Fuzzing target.

    Attributes:
        name: name of its module here, and of its folder in the corpus.
        share: share of the fuzzing time.
        traced: packages and modules of which branches count as coverage; few, because tracing takes
            time.
        max_bytes: limit of an input.
    """

    name: str
    share: float
    traced: tuple[str, ...]
    max_bytes: int

    @property
    def module(self) -> Any:
        """Module of the target, imported at its first use, after the fuzzer has set up tracing."""
        return importlib.import_module(f"fuzz_targets.{self.name}")

    @property
    def run(self) -> Callable[[bytes], None]:
        """Run one input."""
        return self.module.run

    def seeds(self) -> Iterable[bytes]:
        """Return inputs to begin with."""
        return self.module.seeds()


def _protocol(*modules: str) -> tuple[str, ...]:
    return tuple(f"aiorl.net.protocol.{module}" for module in modules)


_LEARNER = _protocol("learner_session", "leases", "ledger", "roster", "rates")
_WORKER = _protocol("worker_session", "leases")
_DECODING = (
    "aiorl.net.wire.decoding",
    "aiorl.net.wire.schema",
    "aiorl.net.wire.compression",
)
_STORED = tuple(
    f"aiorl.offline.{name}"
    for name in ("inspection", "json_lines", "pickled_array", "stored_columns")
)
_ACTING = ("aiorl.acting.acting_state", "aiorl.config.worker", "aiorl.acting.acting_graph")
_CHECKPOINT = ("aiorl.learner", "aiorl.config", "aiorl.net.protocol.ledger", "json")

TARGETS = {
    target.name: target
    for target in (
        Target("decode", 0.27, _DECODING, 1024),
        Target("worker_session", 0.12, _WORKER, 256),
        Target("learner_session", 0.11, _LEARNER, 256),
        Target("hub_session", 0.04, ("aiorl.actors.hub_session",), 256),
        Target("actor_session", 0.03, ("aiorl.actors.actor_session",), 256),
        Target("actor_values", 0.03, ("aiorl.actors.values",), 256),
        Target("crowd", 0.02, _LEARNER, 16),
        Target("graph", 0.07, ("aiorl.acting",), 4096),
        Target("graph_bytes", 0.02, ("aiorl.acting.graph_limits",), 512),
        Target("acting", 0.05, _ACTING, 4096),
        Target("nested", 0.02, ("aiorl.data.nested_codec",), 512),
        Target("spaces", 0.02, ("aiorl.data.spaces", "aiorl.acting.preprocessors"), 512),
        Target("checkpoint", 0.05, _CHECKPOINT, 2048),
        Target("stored", 0.06, _STORED, 1024),
        Target("parquet", 0.03, ("aiorl.offline.parquet",), 512),
        Target("minari_files", 0.03, ("aiorl.offline.minari_data",), 256),
        Target("run_directory", 0.03, ("aiorl.config", "aiorl.acting.run_dir"), 512),
    )
}
