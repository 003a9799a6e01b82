"""Interface of all policies, independent of their computation.

A policy in plain Python implements `compute_actions` and, if it has weights, `get_weights` and
`set_weights`. Methods that only learners need (gradients, exports) raise NotImplementedError unless
a policy implements them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from aiorl.data.actions import ActionLayout
from aiorl.data.columns import F32, I64, Array
from aiorl.data.gym_spaces import gymnasium_space
from aiorl.data.obs_layout import MaskLayout, layout_of
from aiorl.data.spaces import SIMPLE_KINDS
from aiorl.errors import PolicyError, UnsupportedSpaceError

if TYPE_CHECKING:
    from aiorl.acting.exploration import Exploration

Space = spaces.Space[Any]


class Policy(ABC):
    """Chooses actions for batches of observations.

    Attributes:
        observation_space: space of its observations (a preprocessor's output).
        action_space: space of its actions.
        config: the policy's own settings.
        global_timestep: env steps sampled by all workers, as last reported.
        exploration: object that replaces sampling, and whose methods run at episodes' starts and
            ends; None for none.
    """

    exploration: Exploration | None = None

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        config: Mapping[str, Any],
    ) -> None:
        """Set spaces and settings.

        Args:
            observation_space: space of one observation, a preprocessor's output.
            action_space: space of one action.
            config: the policy's own settings.

        Raises:
            UnsupportedSpaceError: for a raw Tuple or Dict observation space, because policies take
                a preprocessor's output (also a ValueError).
        """
        observation_space = gymnasium_space(observation_space)
        check_policy_input(observation_space)
        self.observation_space = observation_space
        self.action_space = gymnasium_space(action_space)
        self.config = dict(config)
        self.global_timestep = 0

    @abstractmethod
    def compute_actions(
        self,
        obs: Array,
        state_batches: Sequence[Array] = (),
        prev_action_batch: Any = None,
        prev_reward_batch: Array | None = None,
        info_batch: Sequence[Mapping[str, Any]] | None = None,
        episodes: Sequence[Any] | None = None,
        timestep: int | None = None,
        *,
        explore: bool = True,
    ) -> tuple[Any, list[Array], dict[str, Array]]:
        """Return actions for N observations.

        Args:
            obs: [N, *shape], preprocessed and filtered.
            state_batches: recurrent state, [N, ...] for each component.
            prev_action_batch: [N, ...] previous actions in column form (`aiorl.data.actions`),
                zeros at an episode's start.
            prev_reward_batch: [N] previous rewards, 0 at an episode's start.
            info_batch: N info dicts.
            episodes: N episodes.
            timestep: the global timestep.
            explore: False requests the policy's best action instead of a sample.

        Returns:
            Actions [N, ...], recurrent state after the step, and columns [N, ...] to record. The
            columns must be the same at every evaluation, and their names must differ from the
            standard columns of rows. For a Tuple or Dict action space, actions are one batch per
            component, nested like the space.
        """

    def compute_single_action(
        self,
        obs: Array,
        state: Sequence[Array] = (),
        prev_action: Any = None,
        prev_reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        episode: Any = None,
        timestep: int | None = None,
        *,
        explore: bool = True,
    ) -> tuple[Any, list[Array], dict[str, Any]]:
        """Return one action for one observation; arrays have no leading axis.

        Args:
            obs: [*shape], preprocessed and filtered.
            state: recurrent state, [...] for each component; empty = the initial state.
            prev_action: previous action in the environment's form; None at an episode's start.
            prev_reward: previous reward.
            info: info that came with the observation.
            episode: the episode.
            timestep: the global timestep.
            explore: False requests the policy's best action instead of a sample.

        Returns:
            The action in the environment's form, recurrent state [...] after the step, and the
            values to record.

        Raises:
            PolicyError: when the observation's action mask forbids every action.
        """
        if self.has_action_mask and len(self.rows_without_action(obs[None])):
            raise PolicyError(
                "there is no action to take: the observation's action mask forbids every one"
            )
        layout = ActionLayout(self.action_space)
        # by name, as samplers do it: users' policies may take any of these as **kwargs
        actions, state_out, columns = self.compute_actions(
            obs[None],
            [component[None] for component in state or self.get_initial_state()],
            prev_action_batch=None if prev_action is None else layout.to_row(prev_action)[None],
            prev_reward_batch=None if prev_reward is None else np.array([prev_reward], np.float32),
            info_batch=None if info is None else [info],
            episodes=None if episode is None else [episode],
            timestep=timestep,
            explore=explore,
        )
        return (
            layout.to_env(layout.to_column(actions))[0],
            [component[0] for component in state_out],
            {name: column[0] for name, column in columns.items()},
        )

    @property
    def has_action_mask(self) -> bool:
        """True if observations begin with an action mask (`aiorl.data.obs_layout`)."""
        return layout_of(self.observation_space).num_mask > 0

    def rows_without_action(self, obs: Array) -> I64:
        """Find the observations with an action mask that forbids every action.

        Callers check this before they act. They leave out final observations, which have
        meaningless masks.

        Args:
            obs: [N, *shape], preprocessed and filtered.

        Returns:
            The indices of these observations, [K].
        """
        _, masks = layout_of(self.observation_space).split(obs)
        if masks is None:
            return np.zeros(0, np.int64)
        return self._mask_layout.rows_without_action(masks)

    @functools.cached_property
    def _mask_layout(self) -> MaskLayout:
        return MaskLayout(self.action_space)

    def get_initial_state(self) -> list[F32]:
        """Return the recurrent state of one row at an episode's start: float32 [H] per component;
        may be empty.
        """
        return []

    def postprocess_trajectory(
        self, batch: Any, other_agent_batches: Mapping[Any, Any] | None = None, episode: Any = None
    ) -> Any:
        """Return one agent's rows of one episode with the columns that learning needs.

        If rows in between were not recorded (``training_enabled: False`` in an info), the method is
        called separately for the rows before and after them.

        Args:
            batch: SampleBatch of the rows.
            other_agent_batches: agent id -> (policy, batch) of the other agents in the episode;
                None for none.
            episode: the MultiAgentEpisode.
        """
        return batch

    def get_weights(self) -> dict[str, Array]:
        """Return the weights by name, each of any shape; empty for a policy without any."""
        return {}

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace all weights together.

        Args:
            weights: name -> array of the same shape as in `get_weights`.

        Raises:
            PolicyError: when they don't fit; the old ones then stay in force. This base class has
                no weights and refuses any.
        """
        if weights:
            raise PolicyError(f"{type(self).__name__} has no weights to set")

    def get_state(self) -> dict[str, Any]:
        """Return the state to save: arrays, numbers and strings by name."""
        return {"weights": self.get_weights(), "global_timestep": self.global_timestep}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` that `get_state` returned."""
        self.set_weights(state["weights"])
        self.global_timestep = int(state["global_timestep"])

    def on_global_var_update(self, global_vars: Mapping[str, Any]) -> None:
        """Apply new `global_vars`; the one named ``timestep`` is the global timestep, in env
        steps.
        """
        self.global_timestep = int(global_vars.get("timestep", self.global_timestep))

    def compute_gradients(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the gradients of the loss on a batch, and figures about it.

        Raises:
            NotImplementedError: the policy doesn't implement it.
        """
        raise NotImplementedError(f"{type(self).__name__} computes no gradients")

    def apply_gradients(self, gradients: Any) -> dict[str, Any]:
        """Apply gradients, and return figures about the step.

        Raises:
            NotImplementedError: the policy doesn't implement it.
        """
        raise NotImplementedError(f"{type(self).__name__} applies no gradients")

    def learn_on_batch(self, batch: Any) -> dict[str, Any]:
        """Compute and apply the gradients of a batch, and return figures about the step.

        Raises:
            NotImplementedError: the policy doesn't implement it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not learn")

    def export_model(self, export_dir: str) -> None:
        """Write the model for use elsewhere.

        Args:
            export_dir: directory to write to.

        Raises:
            NotImplementedError: the policy doesn't implement it.
        """
        raise NotImplementedError(f"{type(self).__name__} exports no model")

    def export_checkpoint(self, export_dir: str, filename_prefix: str = "model") -> None:
        """Write the weights for use elsewhere.

        Args:
            export_dir: directory to write to.
            filename_prefix: beginning of the names of the files.

        Raises:
            NotImplementedError: the policy doesn't implement it.
        """
        raise NotImplementedError(f"{type(self).__name__} exports no checkpoint")

    def import_model_from_h5(self, import_file: str) -> None:
        """Read weights from a file that `export_checkpoint` wrote, or from an HDF5 file.

        Args:
            import_file: path of the file.

        Raises:
            NotImplementedError: the policy doesn't implement it.
        """
        raise NotImplementedError(f"{type(self).__name__} imports no h5 file")


def check_policy_input(observation_space: Space | None) -> None:
    """Check that an observation space is not a raw Tuple or Dict, which no policy supports.

    Raises:
        UnsupportedSpaceError: when it is one (also a ValueError).
    """
    if isinstance(observation_space, spaces.Tuple | spaces.Dict):
        raise UnsupportedSpaceError(
            "a policy's observation space",
            observation_space,
            SIMPLE_KINDS,
            "Leave the preprocessor on; it converts the observation to one vector.",
        )
