"""Trainer as a config's `build` returns it.

The packages that train import this one, so this module says what their trainers can do and imports
none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

if TYPE_CHECKING:
    from aiorl.config.schema import CommonConfig
    from aiorl.data.columns import Array


class BuiltTrainer(Protocol):
    """Trainer of one algorithm; `aiorl.AlgorithmTrainer` describes each method.

    Attributes:
        iteration: number of iterations finished, including those before a restore.
        global_vars: ``timestep``: env steps sampled before the current iteration.
    """

    iteration: int
    global_vars: dict[str, Any]

    @property
    def config(self) -> CommonConfig:
        """The effective configuration."""

    @property
    def raw_user_config(self) -> dict[str, Any]:
        """Keys that the user set."""

    @property
    def logdir(self) -> str:
        """Path of the run directory."""

    @property
    def restore(self) -> Callable[..., Any]:
        """Function that continues in place from the checkpoint at a path."""

    @property
    def workers(self) -> Any:
        """Set of workers that sample."""

    def train(self) -> dict[str, Any]:
        """Train for one iteration, and return its result."""

    def iterate(self, *, progress: bool = False, **stop: float | None) -> Iterator[dict[str, Any]]:
        """Train until a stop criterion is met, and yield the result of each iteration."""

    def stop(self) -> None:
        """Save progress since the last checkpoint, and end workers and threads."""

    def describe(self, file: TextIO | None = None) -> None:
        """Print each effective value and its origin."""

    def collect_metrics(self, selected_workers: None = None) -> dict[str, Any]:
        """Return the episode metrics of the newest result."""

    def compute_action(
        self,
        observation: Any,
        state: Sequence[Array] | None = None,
        prev_action: Any = None,
        prev_reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        policy_id: str = ...,
        full_fetch: bool = False,
        *,
        explore: bool = False,
    ) -> Any:
        """Return the action for one observation, in the environment's form."""

    def get_policy(self, policy_id: str = ...) -> Any:
        """Return a policy as workers have it, an `aiorl.Policy`."""

    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, dict[str, Array]]:
        """Return copies of the weights: policy id -> name -> array, of any shape."""

    def set_weights(self, weights: Mapping[str, Mapping[str, Array]]) -> None:
        """Set the weights of policies, and send them to the workers."""

    def get_policy_state(self, policy_id: str = ...) -> dict[str, dict[str, Array]]:
        """Return copies of everything that a policy has learned to act with."""

    def set_policy_state(self, state: Mapping[str, Any], policy_id: str = ...) -> None:
        """Let a policy act as another one does."""

    @property
    def policy_ids(self) -> list[str]:
        """Ids of the policies, in order."""

    def add_policy(
        self, policy_id: str, *, like: str, weights: Mapping[str, Array] | None = ...
    ) -> None:
        """Add a policy that acts and does not learn."""

    def remove_policy(self, policy_id: str) -> None:
        """Remove a policy that does not learn."""

    def set_env_config(self, changes: Mapping[str, Any]) -> None:
        """Change settings of the environments, each before its next episode."""

    def save(self, directory: str | Path | None = None) -> str:
        """Write a checkpoint, and return its path."""

    def export_policy_model(
        self, export_dir: str | Path, policy_id: str = ..., *, formats: Sequence[str] = ...
    ) -> dict[str, str]:
        """Export the current policy, and return the path to open by format."""

    def export_policy_checkpoint(
        self, export_dir: str | Path, filename_prefix: str = ..., policy_id: str = ...
    ) -> str:
        """Write the weights of a policy to a safetensors file, and return its path."""

    def evaluate(self, episodes: int | None = None, *, seed: int | None = None, **how: Any) -> Any:
        """Play whole episodes with the current policies, and return an `aiorl.Evaluation`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None: ...
