"""Environments that play a script, in every form that aiorl supports, and the same script for the
reference sampler.

A *play* is plain data (environments in other processes get it as JSON): episodes, each a list of
scenes. The first scene of an episode is its reset. A scene:

    obs: agents observed                     rewards: agent -> reward term, trunc: agents with their
    own flag   end: "", "terminate", "truncate" or "both": the episode ends for all infos: agent ->
    info                      taken: agent -> number of the action that was taken instead stuck:
    agents with an action mask that forbids every action, if there are masks broken: the environment
    breaks down instead of showing the scene
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from reference_sampler import ALL, LATER, Report

from aiorl.env.base_env import ASYNC_RESET_RETURN, BaseEnv, Poll
from aiorl.env.external_env import ExternalEnv, ExternalMultiAgentEnv
from aiorl.env.multi_agent_env import MultiAgentEnv
from aiorl.env.registry import EnvContext
from aiorl.env.vector_env import VectorEnv
from aiorl.errors import EnvError

ONLY = "agent0"
EXIT_STATUS = 3
NATIVE_ID = "OracleStage-v0"

OBS_SPACES = {
    "box": spaces.Box(-np.inf, np.inf, (6,), np.float32),
    "matrix": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
    "discrete": spaces.Discrete(11, start=-2),
    "bytes": spaces.Box(0, 255, (6,), np.uint8),
    "dict": spaces.Dict(
        {
            "number": spaces.Discrete(11, start=-2),
            "rest": spaces.Box(-np.inf, np.inf, (6,), np.float32),
        }
    ),
    "masked": spaces.Dict(
        {
            "action_mask": spaces.Box(0, 1, (5,), np.int8),
            "observation": spaces.Box(-np.inf, np.inf, (6,), np.float32),
        }
    ),
}
ACTION_SPACES = {
    "discrete": spaces.Discrete(5, start=-1),
    "box": spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32)),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)]),
}

TAPES: dict[str, Tape] = {}


class Tape:
    """Record of events, by environment.

    Attributes:
        events: environment -> events in order.
        calls: policy id -> environments of each evaluation.
        asked: agents that the mapping function was asked about.
        ended: environments with an ended episode.
    """

    def __init__(self) -> None:
        self.events: dict[Any, list[Any]] = defaultdict(list)
        self.calls: dict[str, list[list[str]]] = defaultdict(list)
        self.asked: list[Any] = []
        self.ended: set[Any] = set()
        self.changed = threading.Condition()

    def end(self, env_id: Any) -> None:
        with self.changed:
            self.ended.add(env_id)
            self.changed.notify_all()

    def wait_for_end(self, env_id: Any, give_up: threading.Event) -> None:
        with self.changed:
            self.changed.wait_for(lambda: env_id in self.ended or give_up.is_set())


def plain(action: Any) -> Any:
    """Convert an action to numbers and lists, for comparison and transport."""
    if isinstance(action, list | tuple):
        return [plain(part) for part in action]
    return action.tolist() if isinstance(action, np.ndarray | np.generic) else action


def number_of(action: Any) -> float:
    """Return one number that depends on every part of an action."""
    is_nested = isinstance(action, list | tuple)
    parts = np.concatenate([np.ravel(part) for part in action]) if is_nested else np.ravel(action)
    return float(np.dot(parts.astype(np.float64), np.arange(1, len(parts) + 1)))


def action_of(kind: str, number: int) -> Any:
    """Return action ``number`` of a kind of space in the environment's form; Boxes' can be out of
    bounds.
    """
    if kind == "discrete":
        return number % 5 - 1
    pair = np.array([number % 9 / 2.0 - 2.0, number % 7 / 2.0 - 1.5], np.float32)
    return pair if kind == "box" else [number % 3, pair]


class Stage:
    """One copy of an environment: plays its episodes, and shows its last actions in the next
    observations.
    """

    def __init__(self, copy: int, play: list[Any], obs_kind: str, tape: Tape | None = None) -> None:
        self.copy, self.play, self.obs_kind = copy, play, obs_kind
        self.tape = [] if tape is None else tape.events[copy]
        self.episode, self.at = -1, 0

    @property
    def scene(self) -> dict[str, Any]:
        return self.play[self.episode % len(self.play)][self.at]

    def reset(self) -> dict[Any, Any]:
        self.tape.append(("reset",))
        self.episode, self.at = self.episode + 1, 0
        self.echo: dict[Any, float] = {}
        return self.obs()

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        self.tape.append(("step", {agent: plain(action) for agent, action in actions.items()}))
        if self.obs_kind == "masked":
            shown = {
                agent: obs for agent, obs in self.obs().items() if agent not in self.scene["taken"]
            }
            assert all(
                shown[agent]["action_mask"][action + 1]
                for agent, action in actions.items()
                if agent in shown
            )
        self.echo.update({agent: number_of(action) for agent, action in actions.items()})
        self.at += 1
        scene = self.scene
        flags = [
            {
                **dict.fromkeys(scene["obs"], False),
                **dict.fromkeys(scene[own], True),
                ALL: scene["end"] in (whole, "both"),
            }
            for own, whole in (("term", "terminate"), ("trunc", "truncate"))
        ]
        infos = {agent: dict(info) for agent, info in scene["infos"].items()}
        return self.obs(), dict(scene["rewards"]), *flags, infos

    def obs(self) -> dict[Any, Any]:
        return {agent: self.obs_of(agent) for agent in self.scene["obs"]}

    def obs_of(self, agent: str) -> Any:
        number = int(agent[-1])
        noise = (self.copy * 7 + self.episode * 13 + self.at * 29 + number * 5) % 17
        whole = (noise + round(self.echo.get(agent, 0.0))) % 11 - 2
        rest = np.array(
            [self.copy, self.episode, self.at, number, self.echo.get(agent, 0.0), noise / 4],
            np.float32,
        )
        match self.obs_kind:
            case "matrix":
                return rest.reshape(2, 3)
            case "discrete":
                return whole
            case "bytes":
                return (rest * 3).astype(np.int64).astype(np.uint8)
            case "dict":
                return {"number": whole, "rest": rest}
            case "masked":
                mask = np.array([1, *(noise >> bit & 1 for bit in range(4))], np.int8)
                # nothing is chosen at the end
                is_legal = not self.scene["end"] and agent not in self.scene["stuck"]
                return {"action_mask": mask * is_legal, "observation": rest}
        return rest


def stages_of(config: dict[str, Any]) -> list[Stage]:
    """Return all copies; their events go to the tape of that name, if this process has one."""
    tape = TAPES.get(config.get("tape", ""))
    return [Stage(copy, play, config["obs"], tape) for copy, play in enumerate(config["plays"])]


# --- the product's side
# --------------------------------------------------------------------------------------------------


class GymStage(gymnasium.Env):
    """One copy for a single agent."""

    def __init__(self, context: Any) -> None:
        self.stage = stages_of(context)[context.vector_index]
        self.observation_space, self.action_space = (
            OBS_SPACES[context["obs"]],
            ACTION_SPACES[context["action"]],
        )
        self.spec = EnvSpec("Stage-v0", max_episode_steps=context.get("limit"))

    def reset(self, *, seed=None, options=None):
        return self.stage.reset()[ONLY], {"reset": True}

    def step(self, action):
        results = self.stage.step({ONLY: action})
        if self.stage.scene["broken"]:
            os._exit(EXIT_STATUS)
        obs, reward, terminateds, truncateds, infos = results
        return obs[ONLY], reward.get(ONLY), terminateds[ALL], truncateds[ALL], infos.get(ONLY, {})


class MultiStage(MultiAgentEnv):
    """One copy for several agents."""

    def __init__(self, context: Any) -> None:
        self.stage = stages_of(context)[context.vector_index]
        self.observation_space, self.action_space = (
            OBS_SPACES[context["obs"]],
            ACTION_SPACES[context["action"]],
        )
        self.spec = SimpleNamespace(max_episode_steps=context.get("limit"))

    def reset(self, *, seed=None, options=None):
        return self.stage.reset(), {}

    def step(self, action_dict):
        results = self.stage.step(action_dict)
        if self.stage.scene["broken"]:
            os._exit(EXIT_STATUS)
        return results


class VectorStages(VectorEnv):
    """All copies in an aiorl VectorEnv."""

    def __init__(self, context: Any) -> None:
        self.stages = stages_of(context)
        self.num_envs = len(self.stages)
        self.observation_space, self.action_space = (
            OBS_SPACES[context["obs"]],
            ACTION_SPACES[context["action"]],
        )

    def seed(self, seed=None):
        """Do nothing: there is no randomness."""

    def vector_reset(self):
        return [self.reset_at(index) for index in range(self.num_envs)]

    def reset_at(self, index):
        return self.stages[index].reset()[ONLY]

    def vector_step(self, actions):
        results = [
            stage.step({ONLY: action}) for stage, action in zip(self.stages, actions, strict=True)
        ]
        obs, rewards, terminateds, truncateds, infos = zip(*results, strict=True)
        return (
            [values[ONLY] for values in obs],
            [values.get(ONLY, 0.0) for values in rewards],
            [flags[ALL] for flags in terminateds],
            [flags[ALL] for flags in truncateds],
            [values.get(ONLY, {}) for values in infos],
        )


class NativeStages(gymnasium.vector.VectorEnv):
    """All copies in a vector environment of Gymnasium, in any autoreset mode."""

    def __init__(self, context: Any) -> None:
        self.stages = stages_of(context)
        self.num_envs = len(self.stages)
        self.mode = gymnasium.vector.AutoresetMode(context["autoreset"])
        self.metadata = {"autoreset_mode": self.mode}
        self.single_observation_space = OBS_SPACES[context["obs"]]
        self.single_action_space = ACTION_SPACES[context["action"]]
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, self.num_envs
        )
        self.action_space = gymnasium.vector.utils.batch_space(
            self.single_action_space, self.num_envs
        )
        self.ended = np.zeros(self.num_envs, np.bool_)
        self.last: list[Any] = [None] * self.num_envs

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        for index in np.flatnonzero(mask):
            self.last[index] = self.stages[index].reset()[ONLY]
            self.ended[index] = False
        return np.stack(self.last), {}

    def step(self, actions):
        rewards = np.zeros(self.num_envs)
        flags = np.zeros((2, self.num_envs), np.bool_)
        finals = np.full(self.num_envs, None, object)
        infos: dict[str, Any] = {}
        for index, stage in enumerate(self.stages):
            if self.ended[index]:  # next-step mode only
                self.last[index] = stage.reset()[ONLY]
                self.ended[index] = False
                continue
            obs, reward, terminateds, truncateds, info = stage.step(
                {ONLY: as_action(actions[index])}
            )
            self.last[index], rewards[index] = obs[ONLY], reward.get(ONLY, 0.0)
            flags[:, index] = terminateds[ALL], truncateds[ALL]
            for name, value in info.get(ONLY, {}).items():
                column = infos.setdefault(name, np.zeros(self.num_envs, np.asarray(value).dtype))
                column[index] = value
                infos.setdefault(f"_{name}", np.zeros(self.num_envs, np.bool_))[index] = True
            if flags[:, index].any():
                self.ended[index] = True
                finals[index] = obs[ONLY]
                if self.mode is gymnasium.vector.AutoresetMode.SAME_STEP:
                    self.last[index] = stage.reset()[ONLY]
                    self.ended[index] = False
        over = flags.any(0)
        if self.mode is gymnasium.vector.AutoresetMode.SAME_STEP and over.any():
            final_info = {name: column for name, column in infos.items()}
            infos = {"final_obs": finals, "_final_obs": over, "final_info": final_info, **infos}
        return np.stack(self.last), rewards, flags[0], flags[1], infos


def as_action(action: Any) -> Any:
    return action.item() if np.ndim(action) == 0 else np.asarray(action)


class World:
    """Copies that are polled; their kind decides how ended ones continue.

    Args:
        resets: "inline"; "later": by a later poll; "same": the copy has reset itself in the step
            that ended its episode; "never": its next episode appears as another environment;
            "replaced": later, and a copy that broke down is replaced by a new one.
        ready: the copies that each poll can report, repeated; None = all.
        is_single: rewards and infos of other agents than the only one do not exist.
    """

    def __init__(
        self, config: dict[str, Any], resets: str, ready: list[list[int]] | None = None
    ) -> None:
        self.config, self.resets, self.ready = config, resets, ready or []
        self.limit = config.get("limit")
        self.stages: dict[Any, Stage] = dict(enumerate(stages_of(config)))
        self.due: dict[Any, Report | None] = {}  # None: it is reset as soon as it is polled
        self.polls = 0
        self.fresh: dict[Any, Any] = {}

    def poll(self) -> list[Report]:
        if not self.polls:
            self.due = dict.fromkeys(self.stages)
        self.polls += 1
        allowed = self.ready[self.polls % len(self.ready)] if self.ready else list(self.stages)
        chosen = [env_id for env_id in self.due if env_id % 100 in allowed] or list(self.due)
        reports = [
            self.due.pop(env_id) or opening(env_id, self.stages[env_id].reset())
            for env_id in chosen
        ]
        self.due.update({report.env_id: None for report in reports if report.is_broken})
        # reports that open an episode come first, as far as it matters: see O2 of the reference
        # sampler
        return sorted(reports, key=lambda report: (report.rewards is not None, report.env_id))

    def send(self, actions: dict[Any, dict[Any, Any]]) -> None:
        for env_id, by_agent in actions.items():
            stage = self.stages[env_id]
            obs, rewards, terminateds, truncateds, infos = stage.step(by_agent)
            if stage.scene["broken"]:
                self.due[env_id] = Report(env_id, {}, {}, {}, {}, {}, is_broken=True)
                if self.resets == "replaced":
                    fresh = stages_of(self.config)[env_id]
                    self.stages[env_id] = fresh
                continue
            # also an entry in the totals: see O9 of the reference sampler
            if self.config.get("none_is_zero"):
                rewards = {agent: reward or 0.0 for agent, reward in rewards.items()}
            report = self.due[env_id] = Report(env_id, obs, rewards, terminateds, truncateds, infos)
            report.off_policy = taken_in(stage.scene, self.config["action"])
            if self.resets == "same" and (terminateds[ALL] or truncateds[ALL]):
                self.fresh[env_id] = stage.reset()

    def reset(self, env_id: Any) -> Any:
        if self.resets == "inline":
            return self.stages[env_id].reset()
        if self.resets == "same":
            return self.fresh.pop(env_id)
        if self.resets == "never":
            stage = self.stages.pop(env_id)
            self.stages[env_id + 100] = stage
            self.due[env_id + 100] = None
            return None
        self.due[env_id] = None
        return LATER


def opening(env_id: Any, obs: dict[Any, Any]) -> Report:
    return Report(env_id, obs, None, {ALL: False}, {ALL: False}, {})


def taken_in(scene: dict[str, Any], action_kind: str) -> dict[Any, Any] | None:
    return {
        agent: action_of(action_kind, number) for agent, number in scene["taken"].items()
    } or None


class BaseStages(BaseEnv):
    """A World as a user's own BaseEnv."""

    def __init__(self, context: Any) -> None:
        self.world = World(context, context["resets"], context["ready"])
        self.observation_space, self.action_space = (
            OBS_SPACES[context["obs"]],
            ACTION_SPACES[context["action"]],
        )

    def seed(self, seed=None):
        """Do nothing: there is no randomness."""

    def poll(self):
        poll = Poll({}, {}, {}, {}, {}, {}, {})
        for report in self.world.poll():
            if report.is_broken:
                poll.faults[report.env_id] = EnvError("stage", "broken on purpose")
                continue
            poll.obs[report.env_id] = report.obs
            poll.rewards[report.env_id] = (
                dict.fromkeys(report.obs) if report.rewards is None else report.rewards
            )
            poll.terminateds[report.env_id] = report.terminateds
            poll.truncateds[report.env_id] = report.truncateds
            poll.infos[report.env_id] = report.infos
            if report.off_policy:
                poll.off_policy_actions[report.env_id] = report.off_policy
        return poll

    def send_actions(self, action_dict):
        self.world.send({env_id: dict(by_agent) for env_id, by_agent in action_dict.items()})

    def try_reset(self, env_id):
        obs = self.world.reset(env_id)
        return ASYNC_RESET_RETURN if obs is LATER else obs

    def get_unwrapped(self):
        return [SimpleNamespace(spec=SimpleNamespace(max_episode_steps=self.world.limit))]


class Client:
    """Driver of the copies as episodes of an external environment, in the order of a repeated
    pattern.

    It is a generator of calls, so that the reference sampler can answer them itself: it yields
    ``(name of the method, arguments)`` and receives the method's result.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.stages = stages_of(config)
        self.sessions: dict[
            int, tuple[str, dict[Any, Any]]
        ] = {}  # copy -> episode id and remaining actions

    def calls(self):
        names = itertools.count()
        for copy in itertools.cycle(self.config["pattern"]):
            stage = self.stages[copy]
            if copy not in self.sessions:
                number = next(names)
                episode_id = yield "start_episode", (f"e{number}", number % 4 != 3)
                obs = stage.reset()
                if number % 3 == 2:
                    yield "log_returns", (episode_id, {agent: 7.0 for agent in obs}, {}, {})
            else:
                episode_id, actions = self.sessions.pop(copy)
                obs, rewards, terminateds, _, infos = stage.step(actions)
                flags = {
                    agent: True for agent, flag in terminateds.items() if flag and agent != ALL
                }
                yield "log_returns", (episode_id, rewards, infos, flags)
                if terminateds[ALL]:
                    yield "end_episode", (episode_id, obs)
                    continue
            taken = taken_in(stage.scene, self.config["action"])
            if taken:
                yield "log_action", (episode_id, obs, taken)
                self.sessions[copy] = episode_id, taken
            else:
                self.sessions[copy] = episode_id, dict((yield "get_action", (episode_id, obs)))


class _Driven:
    """Implementation of run() for both external environments.

    After the end of an episode, the client waits until the sampler knows of it, so that each poll
    always has the same content.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(ACTION_SPACES[context["action"]], OBS_SPACES[context["obs"]])
        self.client, self.tape, self.closed = (
            Client(context),
            TAPES[context["tape"]],
            threading.Event(),
        )

    def seed(self, seed=None):
        """Do nothing: there is no randomness."""

    def run(self):
        calls = self.client.calls()
        answer = None
        while True:
            name, arguments = calls.send(answer)
            answer = self.call(name, *arguments)
            if name == "end_episode":
                self.tape.wait_for_end(arguments[0], self.closed)

    def close(self):
        with self.tape.changed:
            self.closed.set()
            self.tape.changed.notify_all()
        super().close()


class ExternalStages(_Driven, ExternalEnv):
    """The copies as an ExternalEnv."""

    def call(self, name, episode_id, *arguments):
        match name:
            case "log_returns":
                rewards, infos, _ = arguments
                return self.log_returns(episode_id, rewards.get(ONLY, 0.0), infos.get(ONLY))
            case "get_action":
                return {ONLY: self.get_action(episode_id, arguments[0][ONLY])}
            case "start_episode":
                return self.start_episode(episode_id, *arguments)
        return getattr(self, name)(episode_id, *(by_agent[ONLY] for by_agent in arguments))


class ExternalMultiStages(_Driven, ExternalMultiAgentEnv):
    """The copies as an ExternalMultiAgentEnv."""

    def call(self, name, episode_id, *arguments):
        return getattr(self, name)(episode_id, *arguments)


class ExternalWorld:
    """The same client for the reference sampler: SPEC 7.2."""

    limit = None

    def __init__(self, config: dict[str, Any]) -> None:
        self.calls = Client(config).calls()
        self.answer: Any = None
        self.pending: dict[Any, dict[str, Any]] = {}
        self.asked: tuple[str, Any] | None = None

    def poll(self) -> list[Report]:
        """Run the client until it waits."""
        while True:
            name, (episode_id, *arguments) = self.calls.send(self.answer)
            self.answer = None
            if name == "start_episode":
                fresh = {
                    "enabled": arguments[0],
                    "rewards": {},
                    "infos": {},
                    "done": {},
                    "is_new": True,
                }
                self.pending[episode_id] = fresh
                self.answer = episode_id
                continue
            pending = self.pending[episode_id]
            if name == "log_returns":
                rewards, infos, done = arguments
                for agent, reward in rewards.items():
                    pending["rewards"][agent] = pending["rewards"].get(agent, 0.0) + (reward or 0.0)
                pending["infos"].update({agent: info for agent, info in infos.items() if info})
                pending["done"].update(done)
                continue
            obs = arguments[0]
            infos = {agent: dict(pending["infos"].get(agent, {})) for agent in obs}
            if not pending["enabled"]:
                infos = {
                    agent: {**info, "training_enabled": False} for agent, info in infos.items()
                }
            report = Report(
                episode_id,
                obs,
                None if pending["is_new"] else {**dict.fromkeys(obs, 0.0), **pending["rewards"]},
                {
                    **{agent: pending["done"].pop(agent, False) for agent in obs},
                    ALL: name == "end_episode",
                },
                {ALL: False},
                infos,
                arguments[1] if name == "log_action" else None,
            )
            pending.update(rewards={}, is_new=False)
            self.asked = name, episode_id
            return [report]

    def send(self, actions: dict[Any, dict[Any, Any]]) -> None:
        name, episode_id = self.asked
        self.answer = actions[episode_id] if name == "get_action" else None

    def reset(self, env_id: Any) -> None:
        return None


def native_stages(num_envs: int, **config: Any) -> NativeStages:
    """Return the environment for ``vectorize: native``."""
    return NativeStages(config)


def first_stage(**config: Any) -> GymStage:
    return GymStage(EnvContext(config))


gymnasium.register(NATIVE_ID, entry_point=first_stage, vector_entry_point=native_stages)
