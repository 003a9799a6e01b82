"""A trained policy out of a checkpoint, to act with: NumPy and ONNX Runtime, no TensorFlow, no environment.

policy = aiorl.load_policy("runs/ppo_CartPole-v1_...")
action = policy.compute_single_action(obs)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.acting_state import SavedRun
from aiorl.acting.actor import Actor
from aiorl.acting.policy import Policy

Array = NDArray[Any]


def load_policy(
    path: str | Path, policy_id: str | None = None, *, threads: int = 1, seed: int | None = None
) -> LoadedPolicy:
    """Load a policy from a checkpoint; code of the reader's own, such as a custom preprocessor, must be importable.

    Args:
        path: a checkpoint, a run directory, or a directory of checkpoints; of several the newest that is whole.
        policy_id: which of several policies; None is the only one, or ``default_policy``.
        threads: threads that an evaluation of the network may use.
        seed: of actions that are drawn (``explore=True``).

    Raises:
        CheckpointError: there is none, or it can't be used.
        UnknownPolicyError: there is no such policy (also a ValueError).
        PolicyError: it is of a class of the user's own, which a checkpoint doesn't hold (also a ValueError).
        ImportError: its network can only be run in TensorFlow, which is not installed.
    """
    run = SavedRun.open(path)
    return LoadedPolicy(run, run.actor(policy_id, threads=threads, seed=seed))


class LoadedPolicy:
    """Acts on observations as its environment gives them: preprocessor, filter and clipping are part of it.

    Filter statistics stay those of the checkpoint. One thread at a time may call it.

    Attributes:
        policy_id: its id.
        path: the checkpoint.
        env: name of the environment that it was trained on.
        env_steps: env steps that were trained on.
        gamma: discount that it was trained with.
        policy: the network behind preprocessor and filter; rows that aiorl stores hold what it takes and gives.
        observation_space: of the observations that it takes, as the environment's wrappers give them.
        action_space: of its actions.
    """

    def __init__(self, run: SavedRun, actor: Actor) -> None:
        """See `load_policy`."""
        self._actor = actor
        self.policy_id = actor.policy_id
        self.path = run.checkpoint.path
        self.env: str = run.acting.part.env
        self.env_steps = run.env_steps
        self.gamma = float(run.acting.config.get("gamma", 0.99))
        self.policy: Policy = actor.policy
        self.observation_space: spaces.Space[Any] = actor.observation_space
        self.action_space: spaces.Space[Any] = actor.policy.action_space

    @property
    def is_recurrent(self) -> bool:
        """Whether it has a state, which goes from step to step."""
        return bool(self._actor.initial_state)

    @property
    def is_filtered(self) -> bool:
        """Whether what it takes is filtered: equal observations may come out differently as statistics change."""
        return self._actor.is_filtered and not getattr(self.policy, "takes_raw", False)

    def observe(self, observations: Sequence[Any]) -> Array:
        """What the network takes [N, ...] for N observations, as environments give them.

        Raises:
            BatchError: one does not fit the space (also a ValueError).
            ValueError: one is not finite.
        """
        return self._actor.observe(observations, update=False)

    def get_initial_state(self) -> list[Array]:
        """Recurrent state at an episode's start, one array of each component; empty for a policy without."""
        return [component.copy() for component in self._actor.initial_state]

    def compute_single_action(
        self,
        obs: Any,
        state: Sequence[Array] | None = None,
        prev_action: Any = None,
        prev_reward: float | None = None,
        *,
        explore: bool = False,
        full_fetch: bool = False,
    ) -> Any:
        """The action for one observation.

        Args:
            obs: the observation, as the environment gives it.
            state: recurrent state; None or empty is that of an episode's start.
            prev_action: action before this one, for a policy that looks back; None at an episode's start.
            prev_reward: reward before this one.
            explore: True draws from the action distribution, False takes its most likely action.
            full_fetch: also without a state, return all three.
        Returns: the action, as the environment takes it; with a state given, or ``full_fetch``, that, the state after
            the step, and a dict of what was computed beside: ``action_logp``, ``action_dist_inputs``, ``vf_preds``.

        Raises:
            BatchError: the observation does not fit the space (also a ValueError).
            PolicyError: its action mask forbids every action, or the state does not fit (also a ValueError).
        """
        given = () if state is None else state
        result = self._actor.compute_single_action(obs, given, prev_action, prev_reward, explore=explore)
        return result if len(given) or full_fetch else result[0]

    def compute_actions(
        self,
        observations: Sequence[Any],
        states: Sequence[Array] | None = None,
        prev_actions: Sequence[Any] | None = None,
        prev_rewards: Sequence[float] | None = None,
        *,
        explore: bool = False,
    ) -> tuple[list[Any], list[Array], dict[str, Array]]:
        """Actions for N observations, in one evaluation.

        Args:
            observations: N observations, as environments give them.
            states: recurrent state, [N, ...] of each component; None or empty is that of an episode's start.
            prev_actions: N actions before, as environments take them; None = none yet.
            prev_rewards: N rewards before.
            explore: see `compute_single_action`.
        Returns: N actions, states after the step [N, ...], and what was computed beside [N, ...].

        Raises: as `compute_single_action`.
        """
        given = () if states is None else states
        return self._actor.compute_actions(observations, given, prev_actions, prev_rewards, explore=explore)

    def __repr__(self) -> str:
        return f"<LoadedPolicy {self.policy_id!r} of {self.path}, {self.env_steps:,} env steps>"
