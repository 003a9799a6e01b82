"""WorkerPolicies: what a RolloutWorker does with its policies and filters: learning, weights, state, access by id."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from aiorl.acting.observation.filters import ObservationFilter
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import PolicyMap
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.concat import Batch
from aiorl.sampling import learning, rendezvous
from aiorl.sampling.interface import EvaluatorInterface
from aiorl.sampling.saved_state import SavedState, change_all, check_filter_states, dump_state, load_state

__all__ = ["WorkerPolicies"]

R = TypeVar("R")


class WorkerPolicies(EvaluatorInterface):
    """The policies of a worker, and the filters before them; nothing here knows of environments.

    Attributes:
        policy_map: policy id -> policy.
        policies_to_train: ids of the policies that learn, in order.
        filters: policy id -> observation filter.
        global_vars: the last global variables set, or None.
    """

    policy_map: PolicyMap
    policies_to_train: list[str]
    filters: dict[str, ObservationFilter]
    global_vars: dict[str, Any] | None = None

    @abstractmethod
    def _paused(self) -> contextlib.AbstractContextManager[None]:
        """Neither observations are processed nor policies evaluated, but by the thread that calls this."""

    # --- learning ---

    def compute_gradients(self, samples: Batch) -> tuple[Any, dict[str, Any]]:
        """Gradients and figures; see ``rollout.learning``."""
        with self._paused():
            return learning.compute_gradients(self.policy_map, samples)

    def apply_gradients(self, gradients: Any) -> dict[str, Any]:
        """Apply gradients, the default policy's or by policy id; see ``rollout.learning``."""
        with self._paused():
            return learning.apply_gradients(self.policy_map, gradients)

    def learn_on_batch(self, samples: Batch) -> dict[str, Any]:
        """Update policies, the default one or those that learn by id; see ``rollout.learning``."""
        with self._paused():
            return learning.learn_on_batch(self.policy_map, samples)

    def setup_torch_data_parallel(self, url: str, world_rank: int, world_size: int, backend: str) -> None:
        """Let every policy take part in data-parallel learning; the name is that of the reference.

        Raises:
            ConfigError: a policy that cannot; none has joined then (also a ValueError).
        """
        rendezvous.join_data_parallel(self.policy_map, url, world_rank, world_size, backend)

    # --- weights, state, global variables ---

    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, Any]:
        """Weights of the policies named, None = all; names of no policy are passed over. A string is one name."""
        names = [policies] if isinstance(policies, str) else policies
        with self._paused():
            return {
                policy_id: policy.get_weights()
                for policy_id, policy in self.policy_map.items()
                if names is None or policy_id in names
            }

    def set_weights(self, weights: Mapping[str, Any], global_vars: Mapping[str, Any] | None = None) -> None:
        """Take up weights of the policies given, then global variables if there are any; between two turns.

        Raises:
            UnknownPolicyError: no policy has that id; nothing is changed then (a KeyError).
            PolicyError: weights that do not fit their policy; all policies keep theirs then (a ValueError).
        """
        policies = {policy_id: self.policy_map[policy_id] for policy_id in weights}
        with self._paused():
            change_all(
                policies, weights, lambda policy: policy.get_weights(), lambda policy, new: policy.set_weights(new)
            )
            if global_vars:
                self.set_global_vars(global_vars)

    def get_filters(self, flush_after: bool = False) -> dict[str, ObservationFilter]:
        """Copies of the filters by policy id; with the flag their deltas are forgotten here afterwards."""
        with self._paused():
            copies = {policy_id: found.as_serializable() for policy_id, found in self.filters.items()}
            if flush_after:
                for found in self.filters.values():
                    found.clear_buffer()
            return copies

    def sync_filters(self, new_filters: Mapping[str, ObservationFilter]) -> None:
        """Adopt the statistics given, with the own unsent deltas on top.

        Raises:
            AssertionError: a policy's filter is missing; nothing is changed then.
            ValueError: a filter of another kind or shape; nothing is changed then.
        """
        self._check_filters(new_filters)
        with self._paused():
            for policy_id, found in self.filters.items():
                found.copy().sync(new_filters[policy_id])
            for policy_id, found in self.filters.items():
                found.sync(new_filters[policy_id])

    def save(self) -> bytes:
        """Filters and states of the policies; deltas not sent yet stay pending.

        Raises:
            CheckpointError: a policy's state cannot be saved.
        """
        with self._paused():
            return dump_state(
                SavedState(
                    {policy_id: found.state() for policy_id, found in self.filters.items()},
                    {policy_id: policy.get_state() for policy_id, policy in self.policy_map.items()},
                )
            )

    def restore(self, data: bytes) -> None:
        """Go on from what ``save`` gave; deltas pending or in flight are forgotten. If it raises, nothing is changed.

        Raises:
            CheckpointError: bytes that ``save`` did not give, or another kind of filter.
            AssertionError: a policy's filter is missing.
            UnknownPolicyError: no policy has that id (a KeyError).
            PolicyError: a state that does not fit its policy (a ValueError).
        """
        saved = load_state(data)
        self._check_filters(saved.filters)
        policies = {policy_id: self.policy_map[policy_id] for policy_id in saved.policies}
        with self._paused():
            check_filter_states(self.filters, saved.filters)
            change_all(
                policies, saved.policies, lambda policy: policy.get_state(), lambda policy, new: policy.set_state(new)
            )
            for policy_id, found in self.filters.items():
                found.restore(saved.filters[policy_id])

    def set_global_vars(self, global_vars: Mapping[str, Any]) -> None:
        """Tell every policy of new global variables, and keep them."""
        with self._paused():
            for policy in self.policy_map.values():
                policy.on_global_var_update(global_vars)
            self.global_vars = dict(global_vars)

    def get_global_vars(self) -> dict[str, Any] | None:
        """The global variables set last, None before."""
        return self.global_vars

    # --- access by id ---

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy | None:
        """The policy of that id, or None."""
        return self.policy_map.get(policy_id)

    def for_policy(self, function: Callable[[Policy], R], policy_id: str = DEFAULT_POLICY_ID) -> R:
        """What the function gives for a policy.

        Raises:
            UnknownPolicyError: no policy has that id (a KeyError).
        """
        return function(self.policy_map[policy_id])

    def foreach_policy(self, function: Callable[[Policy, str], R]) -> list[R]:
        """What the function gives for each policy and its id."""
        return [function(policy, policy_id) for policy_id, policy in self.policy_map.items()]

    def foreach_trainable_policy(self, function: Callable[[Policy, str], R]) -> list[R]:
        """The same for the policies that learn."""
        return [function(self.policy_map[policy_id], policy_id) for policy_id in self.policies_to_train]

    def export_policy_model(self, export_dir: str, policy_id: str = DEFAULT_POLICY_ID) -> None:
        """Write a policy's model for use elsewhere."""
        self.policy_map[policy_id].export_model(export_dir)

    def import_policy_model_from_h5(self, import_file: str, policy_id: str = DEFAULT_POLICY_ID) -> None:
        """Read a policy's weights from a Keras h5 file."""
        self.policy_map[policy_id].import_model_from_h5(import_file)

    def export_policy_checkpoint(
        self, export_dir: str, filename_prefix: str = "model", policy_id: str = DEFAULT_POLICY_ID
    ) -> None:
        """Write a policy's weights for use elsewhere."""
        self.policy_map[policy_id].export_checkpoint(export_dir, filename_prefix)

    def _check_filters(self, given: Mapping[str, Any]) -> None:
        missing = sorted(self.filters.keys() - given.keys())
        if missing:
            raise AssertionError(f"no filters are given for {', '.join(missing)}; given are {sorted(given)}")
