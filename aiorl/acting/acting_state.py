"""Acting part of a checkpoint: everything that workers receive for their policies; and policies
made from it.

Acting with them needs neither TensorFlow nor the environment. `SavedRun` finds a checkpoint by any
path into a run.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces

from aiorl.acting.actor import Actor
from aiorl.acting.checkpoint import Checkpoint, find_checkpoint
from aiorl.acting.filters import ObservationFilter, make_filter
from aiorl.acting.graph_policy import GraphPolicy, install_filter, learned_policy_class
from aiorl.acting.older_order import KEEPS_ORDER, sampled_action_space, sampled_observation_space
from aiorl.acting.policy import Policy
from aiorl.acting.preprocessors import Preprocessor, make_preprocessor
from aiorl.config import with_former_defaults
from aiorl.config.code import foreign_code, left_out_text
from aiorl.config.files import check_depth, other_users, strangers
from aiorl.config.layers import without_place, without_secrets
from aiorl.config.schema import CommonConfig
from aiorl.config.worker import WorkerPart
from aiorl.data import columns as c
from aiorl.data.columns import Array
from aiorl.data.fragment import PolicyGraph
from aiorl.data.nested_codec import pack, unpack
from aiorl.data.spaces import space_from_dict
from aiorl.errors import (
    BadFrame,
    BatchError,
    CheckpointError,
    ConfigError,
    PolicyError,
    UnknownPolicyError,
)

logger = logging.getLogger(__name__)

_NAME = "acting"
_FORMAT = 1
_MAX_DEPTH = 64
_Plain = TypeVar("_Plain", str, bytes)


class PolicyParts(NamedTuple):
    """Parts that a policy needs to act.

    Attributes:
        policy_id: its id.
        policy: the network and its choice of actions.
        preprocessor: preprocessor of its observations.
        filter: observation filter after the preprocessor.
    """

    policy_id: str
    policy: GraphPolicy
    preprocessor: Preprocessor
    filter: ObservationFilter


@dataclass(frozen=True, slots=True)
class ActingState:
    """The learner's configuration, and the data for workers made from it; equal in all checkpoints
    of a run.

    Attributes:
        config: the effective configuration, as returned by `CommonConfig.to_dict`.
        part: the workers' part of it.
        graphs: policy id -> acting graph, for the learner's networks.
        spaces: policy id -> spaces of its agents, "observation" and "action", as plain data.
    """

    config: Mapping[str, Any]
    part: WorkerPart
    graphs: Mapping[str, PolicyGraph]
    spaces: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        part: WorkerPart,
        graphs: Mapping[str, PolicyGraph],
        spaces: Mapping[str, Mapping[str, Any]],
    ) -> Self:
        """Make the state without secrets, and without settings that belong to a run rather than to
        its policies.
        """
        settings = without_secrets({**config, "resume": None, "run_dir": None})
        environs = "extra_python_environs_for_worker"
        changes = {
            "log_dir": None,
            "life": 0,
            # the two settings of workers that can contain secrets
            "env_config": settings["env_config"],
            environs: settings[environs],
        }
        return cls(settings, part.model_copy(update=changes), graphs, spaces)

    def with_network(self, policy_id: str | None, where: str | Path) -> str:
        """Return a policy's id, after checking that the policy is one of the learner's networks.

        Args:
            policy_id: id of the policy; None stands for the only one, or for the default one of
                several.
            where: source of this state, for messages.

        Raises:
            UnknownPolicyError: when there is no such policy, or several and no default one (also a
                ValueError).
            PolicyError: when the policy is not one of the networks (also a ValueError).
        """
        policies = self.part.policies
        if policy_id is None:
            policy_id = c.DEFAULT_POLICY_ID if len(policies) > 1 else next(iter(policies))
        if policy_id not in policies:
            raise UnknownPolicyError(policy_id, policies)
        if policy_id not in self.graphs:
            raise PolicyError(
                f"policy {policy_id!r} of {where} is of a class of your own,"
                f" {policies[policy_id].policy_class}, which a checkpoint does not contain; create the"
                " policy yourself"
            )
        return policy_id

    def parts_of(self, policy_id: str, *, threads: int = 1, seed: int | None = None) -> PolicyParts:
        """Return the parts of a network, still without weights and statistics.

        Args:
            policy_id: id of the policy, see `with_network`.
            threads: threads that an evaluation of the network can use.
            seed: seed of its exploration.

        Raises:
            PolicyError: when the stored graph or weights are invalid.
            ConfigError: when the stored configuration is invalid.
            ImportError: when its network can only be run in TensorFlow, which is not installed.
        """
        graph = self.graphs[policy_id]
        policy_part = self.part.policies[policy_id]
        config = {**policy_part.config, "raw_obs": policy_part.sample_plan.raw_obs, "seed": seed}
        preprocessor, obs_filter = self.preprocessing_of(policy_id)
        # Any: unlike GraphPolicy, the class is called with the arguments of a Policy
        policy_class: Any = learned_policy_class(graph["graph"], graph["spec"], threads=threads)
        observation_space = obs_filter.output_space(preprocessor.observation_space)
        action_space = self._space(policy_id, "action")
        policy: GraphPolicy = policy_class(observation_space, action_space, config)
        return PolicyParts(policy_id, policy, preprocessor, obs_filter)

    def preprocessing_of(self, policy_id: str) -> tuple[Preprocessor, ObservationFilter]:
        """Return the preprocessor of a policy, and its filter, still without statistics.

        Raises:
            PolicyError: when the stored settings of its model are invalid.
            ConfigError: when the stored configuration is invalid.
        """
        model = self.part.policies[policy_id].config.get("model") or {}
        if not isinstance(model, Mapping):
            raise PolicyError(
                f"the model of policy {policy_id!r} is a {type(model).__name__}, expected a mapping"
            )
        preprocessor = make_preprocessor(
            self._space(policy_id, "observation"),
            action_space=self._space(policy_id, "action"),
            custom_preprocessor=model.get("custom_preprocessor"),
        )
        return preprocessor, make_filter(
            self.part.observation_filter, preprocessor.shape, preprocessor.layout.num_mask
        )

    def actor(self, parts: PolicyParts) -> Actor:
        """Return the actor made of the parts of a policy."""
        parts = parts._replace(filter=install_filter(parts.policy, parts.filter))
        return Actor(*parts, clip_actions=self.part.clip_actions)

    def _space(self, policy_id: str, name: str) -> gymnasium.Space[Any]:
        return space_from_dict(self.spaces[policy_id][name])

    def _in_sampled_order(self) -> Self:
        """Return the state with the parts of Dicts in the order that samplers had; see
        `older_order`.
        """
        is_remote = self.part.remote_worker_envs or self.part.vectorize == "remote"
        policies = dict(self.part.policies)
        spaces: dict[str, Mapping[str, Any]] = {}
        for policy_id, stored in self.spaces.items():
            policy_part = policies.get(policy_id)
            was_rebuilt = is_remote or (
                policy_part is not None and policy_part.observation_space is not None
            )
            observation_space = sampled_observation_space(
                stored["observation"], was_rebuilt=was_rebuilt
            )
            action_space = sampled_action_space(stored["action"])
            spaces[policy_id] = {"observation": observation_space, "action": action_space}
            if policy_part is not None and spaces[policy_id] != stored:
                # without them, evaluations would take the order of the environment
                update = {"observation_space": observation_space, "action_space": action_space}
                policies[policy_id] = policy_part.model_copy(update=update)
        graphs: dict[str, PolicyGraph] = {}
        for policy_id, graph in self.graphs.items():
            spec = {
                **graph["spec"],
                "action_space": sampled_action_space(graph["spec"]["action_space"]),
            }
            graphs[policy_id] = PolicyGraph(graph=graph["graph"], spec=spec)
        part = self.part.model_copy(update={"policies": policies})
        return dataclasses.replace(self, part=part, graphs=graphs, spaces=spaces)

    def to_tensors(self) -> dict[str, Array]:
        """Return the state as one array of bytes, for a checkpoint.

        Raises:
            TypeError: when the configuration contains values that are not plain data.
        """
        content = {
            "format": _FORMAT,
            KEEPS_ORDER: True,
            "config": dict(self.config),
            "part": self.part.to_dict(),
            "graphs": {policy_id: dict(graph) for policy_id, graph in self.graphs.items()},
            "spaces": {policy_id: dict(described) for policy_id, described in self.spaces.items()},
        }
        return {_NAME: np.frombuffer(pack(content), np.uint8)}

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Self:
        """Return the acting state of a checkpoint, to act or train with.

        If another user wrote it, a warning first lists all code and environment variables that it
        names. Where it listens, whom it admits, and what it opens and writes is left out then, and
        shown, unless the user is root.

        Raises:
            CheckpointError: see `from_checkpoint`.
        """
        state = cls.from_checkpoint(checkpoint)
        models = {policy_id: graph["spec"] for policy_id, graph in state.graphs.items()}
        left_out: dict[str, Any] = {}
        foreign_owners = strangers(checkpoint.owners)
        if foreign_owners:
            config, left_out = without_place(state.config, CommonConfig)
            part, _ = without_place(state.part.to_dict(), CommonConfig)
            state = dataclasses.replace(
                state, config=config, part=WorkerPart.from_dict({**part, "log_dir": None})
            )
        code = foreign_code(
            other_users(checkpoint.owners), state.config, state.part.to_dict(), {"graphs": models}
        )
        warning = "\n".join(filter(None, [code, left_out_text(foreign_owners, left_out)]))
        if warning:
            logger.warning("%s", warning)
        return state

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Return the acting state of a checkpoint, checked as far as possible without making a
        policy.

        Raises:
            CheckpointError: when there is none, or it is invalid.
        """
        packed = checkpoint.tensors.get(_NAME)
        if packed is None:
            raise CheckpointError(
                checkpoint.path,
                "it was written by an aiorl version that kept no acting graphs; resume its run"
                " once, and the next checkpoint will contain them",
            )
        try:
            content = unpack(packed.tobytes())
            check_depth(content, _MAX_DEPTH)
            if content["format"] != _FORMAT:
                raise CheckpointError(
                    checkpoint.path,
                    f"its acting graphs have format {content['format']!r:.50}, but this aiorl reads"
                    f" {_FORMAT}; use the version that wrote it",
                )
            graphs = {
                _checked(policy_id, str, "name"): PolicyGraph(
                    # bytes(n) of a number would make n zero bytes
                    graph=_checked(graph["graph"], bytes, "graph"),
                    spec=dict(graph["spec"]),
                )
                for policy_id, graph in content["graphs"].items()
            }
            spaces = {
                _checked(policy_id, str, "name"): {
                    "observation": dict(described["observation"]),
                    "action": dict(described["action"]),
                }
                for policy_id, described in content["spaces"].items()
            }
            part = WorkerPart.from_dict(content["part"])
            missing = part.policies.keys() - spaces.keys()
            if missing:
                raise ValueError(f"no spaces of {sorted(missing)}")
            state = cls(with_former_defaults(content["config"]), part, graphs, spaces)
            if content.get(KEEPS_ORDER) is not True:
                state = state._in_sampled_order()
            return state
        except (BadFrame, ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                checkpoint.path, f"its data for acting makes no sense: {error!r:.300}"
            ) from error


def _checked(value: Any, kind: type[_Plain], what: str) -> _Plain:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.50} is not a {what}")
    return value


@dataclass(frozen=True, slots=True)
class SavedRun:
    """Policies of a checkpoint.

    Attributes:
        checkpoint: the checkpoint read.
        acting: the data that workers received for the policies.
    """

    checkpoint: Checkpoint
    acting: ActingState

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read a checkpoint, or the newest undamaged one of a run or of a directory of checkpoints.

        If another user wrote it, a warning lists the code that it names before any of it is
        imported.

        Raises:
            CheckpointError: when there is none, or it can't be used.
        """
        checkpoint = find_checkpoint(path, ActingState.from_checkpoint)
        return cls(checkpoint, ActingState.load(checkpoint))

    @property
    def env_steps(self) -> int:
        """Env steps that were trained on; 0 if the checkpoint doesn't say."""
        counters = self.checkpoint.meta.get("counters")
        if not isinstance(counters, Mapping):
            return 0
        steps = counters.get("env_steps_trained")
        return steps if isinstance(steps, int) else 0

    def weights(self, policy_id: str) -> dict[str, Array]:
        """Return the weights of a policy, by their names in its acting graph."""
        return self.checkpoint.under(f"algorithm/{policy_id}/weights/")

    def restore_filter(self, policy_id: str, obs_filter: ObservationFilter) -> None:
        """Restore the statistics that the policy was trained with in a filter.

        Raises:
            CheckpointError: when they don't fit.
        """
        try:
            obs_filter.restore(self.checkpoint.filter_state(policy_id))
        except BatchError as error:
            raise CheckpointError(
                self.checkpoint.path,
                f"the filter statistics of policy {policy_id!r} don't fit it: {error}",
            ) from error

    def actor(
        self, policy_id: str | None = None, *, threads: int = 1, seed: int | None = None
    ) -> Actor:
        """Return a policy with its preprocessor and filter, ready to act.

        Args:
            policy_id: id of the policy; None stands for the only one, or for the default one of
                several.
            threads: threads that an evaluation of the network can use.
            seed: seed of its exploration.

        Errors are those of `parts`.
        """
        return self.acting.actor(self.parts(policy_id, threads=threads, seed=seed))

    def parts(
        self, policy_id: str | None = None, *, threads: int = 1, seed: int | None = None
    ) -> PolicyParts:
        """Return the parts of a policy, with the weights and statistics of the checkpoint.

        Args:
            policy_id: id of the policy; None stands for the only one, or for the default one of
                several.
            threads: threads that an evaluation of the network can use.
            seed: seed of its exploration.

        Raises:
            UnknownPolicyError: when there is no such policy, or several and no default one (also a
                ValueError).
            PolicyError: when it is not one of the learner's networks (also a ValueError).
            CheckpointError: when the checkpoint's data is invalid.
            ImportError: when its network can only be run in TensorFlow, which is not installed.
        """
        policy_id = self.acting.with_network(policy_id, self.checkpoint.path)
        try:
            parts = self.acting.parts_of(policy_id, threads=threads, seed=seed)
            self.restore_filter(policy_id, parts.filter)
            parts.policy.set_weights(self.weights(policy_id))
            # schedules of exploration use the timestep
            parts.policy.on_global_var_update({"timestep": self.env_steps})
        except (PolicyError, ConfigError) as error:
            raise CheckpointError(
                self.checkpoint.path, f"can't make policy {policy_id!r} from it: {error}"
            ) from error
        return parts


def load_policy(
    path: str | Path, policy_id: str | None = None, *, threads: int = 1, seed: int | None = None
) -> LoadedPolicy:
    """Load a policy from a checkpoint; your own code that it uses, such as a custom preprocessor,
    must be importable.

    Args:
        path: a checkpoint, a run directory, or a directory of checkpoints, of which the newest
            undamaged one is used.
        policy_id: id of one of several policies; None stands for the only one, or for
            ``default_policy``.
        threads: threads that an evaluation of the network can use.
        seed: seed of sampled actions (``explore=True``); None is random.

    Returns:
        The policy, with the weights and filter statistics of the checkpoint.

    Raises:
        CheckpointError: when there is none, or it can't be used.
        UnknownPolicyError: when there is no such policy (also a ValueError).
        PolicyError: when the policy is of the user's own class, which a checkpoint doesn't contain
            (also a ValueError).
        ImportError: when its network can only be run in TensorFlow, which is not installed.
    """
    run = SavedRun.open(path)
    return LoadedPolicy(run, run.actor(policy_id, threads=threads, seed=seed))


class LoadedPolicy:
    """Policy that acts on an environment's own observations: it includes preprocessor, filter and
    clipping.

    Filter statistics stay those of the checkpoint. Only one thread can call it at a time.

    Attributes:
        policy_id: its id.
        path: path of the checkpoint.
        env: name of the environment that it was trained on.
        env_steps: env steps that it was trained on.
        gamma: discount that it was trained with.
        policy: the network after preprocessor and filter; rows stored by aiorl contain its inputs
            and outputs.
        observation_space: space of its observations, as returned by the environment's wrappers.
        action_space: space of its actions.
    """

    def __init__(self, run: SavedRun, actor: Actor) -> None:
        """Take over a policy; `load_policy` makes one from a path.

        Args:
            run: policies of the checkpoint.
            actor: policy with its preprocessor and filter.
        """
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
        """True if it has a state, which is passed from step to step."""
        return bool(self._actor.initial_state)

    @property
    def is_filtered(self) -> bool:
        """True if its inputs are filtered: outputs for equal observations can change with the
        statistics.
        """
        return self._actor.is_filtered and not getattr(self.policy, "takes_raw", False)

    def observe(self, observations: Sequence[Any]) -> Array:
        """Return the network's inputs [N, ...] for N `observations` of environments.

        Raises:
            BatchError: when one does not fit the space (also a ValueError).
            ValueError: when one is not finite.
        """
        return self._actor.observe(observations, update=False)

    def get_initial_state(self) -> list[Array]:
        """Return the state at an episode's start: an array [...] per component; empty without
        recurrence.

        These are the components of the recurrent state. If the policy looks back at actions that
        are clipped for environments, a last one is its previous action before it was clipped.
        """
        return [component.copy() for component in self._actor.initial_memory]

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
        """Return the action for one observation.

        Args:
            obs: the observation, as returned by the environment.
            state: state after the previous step, an array [...] per component; None or empty stands
                for an episode's start.
            prev_action: previous action as the environment got it, for a policy that looks back;
                None at an episode's start.
            prev_reward: previous reward.
            explore: True samples from the action distribution, False uses its most likely action.
            full_fetch: True returns all three results even without a state.

        Returns:
            The action in the environment's form. With a state or ``full_fetch``: the action, the
            state after the step, and a dict of further outputs: ``action_logp`` (a number),
            ``action_dist_inputs`` [P], ``vf_preds`` (a number).

        Raises:
            BatchError: when the observation does not fit the space (also a ValueError).
            PolicyError: when its action mask forbids every action, or the state does not fit (also
                a ValueError).
        """
        state = () if state is None else state
        action, state_out, columns = self._actor.compute_single_action(
            obs, state, prev_action, prev_reward, explore=explore
        )
        if len(state) or full_fetch:
            return action, state_out, columns
        return action

    def compute_actions(
        self,
        observations: Sequence[Any],
        states: Sequence[Array] | None = None,
        prev_actions: Sequence[Any] | None = None,
        prev_rewards: Sequence[float] | None = None,
        *,
        explore: bool = False,
    ) -> tuple[list[Any], list[Array], dict[str, Array]]:
        """Return actions for N observations, in one evaluation.

        Args:
            observations: N observations of environments.
            states: states after the previous step, [N, ...] of each component; None or empty stands
                for an episode's start.
            prev_actions: N previous actions in the environment's form; None = none yet.
            prev_rewards: N previous rewards.
            explore: True samples from the action distribution, False uses its most likely action.

        Returns:
            N actions, states after the step [N, ...], and further outputs [N, ...].

        Raises:
            BatchError: when an observation does not fit the space (also a ValueError).
            PolicyError: when an action mask forbids every action, or the states do not fit (also a
                ValueError).
        """
        return self._actor.compute_actions(
            observations,
            () if states is None else states,
            prev_actions,
            prev_rewards,
            explore=explore,
        )

    def __repr__(self) -> str:
        return f"<LoadedPolicy {self.policy_id!r} of {self.path}, {self.env_steps:,} env steps>"
