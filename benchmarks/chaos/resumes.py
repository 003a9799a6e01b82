"""Check of resumes: the newest whole checkpoint, read without aiorl, against the next learner's
results.

A learner that has forgotten everything trains as well as any other, so survival alone proves
nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

__all__ = ["Resumes", "Saved"]

_RESTARTED = "learner restarted"
_MAX_META_BYTES = 1 << 26
_NEAR_UPDATES = 100
"""Weights are compared with those of a checkpoint of the next life that is at most this many
updates later."""
_NEAR = 0.7
"""Largest change of the weights in that time, as a share of their size; it is 1.4 between two
independent networks."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Content of a checkpoint.

    Attributes:
        number: number of the checkpoint, which is that of its updates.
        iteration: last finished iteration.
        counters: totals by name.
        ledger: ledger as in results.
        weights: weights of all policies, one after the other.
    """

    number: int
    iteration: int
    counters: Mapping[str, int]
    ledger: Mapping[str, Any]
    weights: NDArray[np.float64]

    @classmethod
    def newest_of(cls, run_dir: Path) -> Self | None:
        """Return the newest checkpoint of a run whose digests hold; None if there is none."""
        for path in sorted((run_dir / "checkpoints").glob("checkpoint-*"), reverse=True):
            try:
                return cls._read(path)
            except (OSError, ValueError, RecursionError, KeyError, TypeError):
                continue
        return None

    @classmethod
    def _read(cls, path: Path) -> Self:
        meta_file, tensors_file = path / "meta.json", path / "tensors.safetensors"
        if not meta_file.is_file() or meta_file.stat().st_size > _MAX_META_BYTES:
            raise ValueError("not a file of this kind")
        header = json.loads(meta_file.read_bytes())
        if tensors_file.stat().st_size != header["tensors_bytes"]:
            raise ValueError("its size is wrong")
        payload = tensors_file.read_bytes()
        if hashlib.sha256(payload).hexdigest() != header["tensors_sha256"]:
            raise ValueError("its digest is wrong")
        meta, tensors = header["meta"], load(payload)
        weights = [
            tensors[name].ravel().astype(np.float64)
            for name in sorted(tensors)
            if "/weights/" in name
        ]
        return cls(
            number=int(header["number"]),
            iteration=int(meta["results"]["training_iteration"]),
            counters=meta["counters"],
            ledger=meta["ledger"],
            weights=np.concatenate([np.zeros(0), *weights]),
        )

    def missing_in(self, result: Mapping[str, Any]) -> list[str]:
        """Return the counts of this checkpoint that the first result of a resumed learner lacks."""
        ledger, own = result["ledger"], self.ledger
        left_over = int(own["queued"]) + int(own["in_flight"])
        is_same = {
            "iteration": (int(result["training_iteration"]) - 1, self.iteration),
            "updates": (
                int(result["updates_total"]) - int(result["updates_this_iter"]),
                self.counters["updates"],
            ),
            "env steps sampled": (
                int(result["timesteps_total"]) - int(result["timesteps_this_iter"]),
                self.counters["env_steps_sampled"],
            ),
            "ledger: lost with the learner": (
                int(ledger["lost"].get(_RESTARTED, 0)),
                int(own["lost"].get(_RESTARTED, 0)) + left_over,
            ),
        }
        is_kept = {
            "env steps trained": (
                int(result["env_steps_trained_total"]),
                self.counters["env_steps_trained"],
            ),
            "ledger: sampled": (int(ledger["sampled"]), int(own["sampled"])),
            "ledger: trained": (int(ledger["trained"]), int(own["trained"])),
        }
        for kind in ("discarded", "lost"):
            for reason, steps in own[kind].items():
                is_kept[f"ledger: {kind}: {reason}"] = (
                    int(ledger[kind].get(reason, 0)),
                    int(steps),
                )
        return [
            f"{name}: {found:,} where {saved:,} were saved"
            for pairs, holds in ((is_same, int.__eq__), (is_kept, int.__ge__))
            for name, (found, saved) in pairs.items()
            if not holds(found, saved)
        ]

    def change_of_weights(self, later: Saved) -> float:
        """Return the change of the weights as a share of their size; infinite for another
        network.
        """
        if later.weights.shape != self.weights.shape:
            return float("inf")
        size = float(np.linalg.norm(self.weights))
        return float(np.linalg.norm(later.weights - self.weights)) / size if size else 0.0


class Resumes:
    """Comparison of each resumed learner with the state its predecessor had saved.

    Attributes:
        compared: number of resumes with a compared first result.
        weights_compared: number of resumes with compared weights.
        missing: state that did not come back.
    """

    def __init__(self, run_dir: Path) -> None:
        """Take the run's directory."""
        self.compared = self.weights_compared = 0
        self.missing: list[str] = []
        self._run_dir = run_dir
        self._saved: Saved | None = None
        self._life = 0
        self._is_due = self._are_weights_due = False

    def expect(self, life: int) -> None:
        """Note the state to be restored; call this after a learner has ended and before the next
        one starts.

        Args:
            life: number of the next life.
        """
        self._saved, self._life = Saved.newest_of(self._run_dir), life
        self._is_due = self._are_weights_due = self._saved is not None

    def look(self, firsts: Mapping[int, Mapping[str, Any]]) -> None:
        """Compare the results since the last call.

        Args:
            firsts: life -> its first result.
        """
        saved, first = self._saved, firsts.get(self._life)
        if saved is None or first is None:
            return
        if self._is_due:
            self._is_due = False
            self.compared += 1
            self.missing += [
                f"resume {self._life} of checkpoint {saved.number}: {e}"
                for e in saved.missing_in(first)
            ]
        if self._are_weights_due:
            later = Saved.newest_of(self._run_dir)
            if later is None or later.number == saved.number:
                return
            self._are_weights_due = False
            if 0 < later.number - saved.number <= _NEAR_UPDATES:
                self.weights_compared += 1
                change = saved.change_of_weights(later)
                if change > _NEAR:
                    said = (
                        f"weights changed by {change:.2f} of their size in"
                        f" {later.number - saved.number} updates"
                    )
                    self.missing.append(f"resume {self._life} of checkpoint {saved.number}: {said}")
