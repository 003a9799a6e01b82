"""ScriptedEnv: a BaseEnv that plays what it is told, and RecordingPolicy: a policy whose every number is known.

Both write what happens to them on a *tape*, a list that a test may share between all its fakes, so that the
order of events can be compared as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.policy import Policy
from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.env.base_env import ALL_AGENTS, ASYNC_RESET_RETURN, BaseEnv, FinishedGame, Poll
from aiorl.errors import EnvError

__all__ = ["RecordingPolicy", "Scene", "ScriptedEnv", "scenes"]

Tape = list[Any]


@dataclass(frozen=True)
class Scene:
    """What one environment shows at once; the first scene of an episode is its reset.

    Attributes:
        obs: agent id -> observation.
        rewards: agent id -> reward.
        terminateds: agent id or ``"__all__"`` -> flag; missing ones are False.
        truncateds: likewise.
        infos: agent id -> info.
        off_policy_actions: agent id -> action taken instead of the policy's.
        fault: the environment broke down instead of showing anything.
    """

    obs: Mapping[Any, Any]
    rewards: Mapping[Any, Any] = field(default_factory=dict)
    terminateds: Mapping[Any, bool] = field(default_factory=dict)
    truncateds: Mapping[Any, bool] = field(default_factory=dict)
    infos: Mapping[Any, Any] = field(default_factory=dict)
    off_policy_actions: Mapping[Any, Any] = field(default_factory=dict)
    fault: EnvError | None = None


def scenes(length: int, *, episode: int = 0, end: str = "terminate", agents: Sequence[Any] = ()) -> list[Scene]:
    """An episode of ``length`` steps in which every agent is always observed.

    The observation is [episode, step, number of the agent], the reward of a step its number (1, 2, ...) plus a
    hundred for each agent before.

    Args:
        length: steps.
        episode: first entry of all observations.
        end: ``"terminate"``, ``"truncate"`` or ``"never"``: then the last scene is no end.
        agents: agent ids; none = the one agent of a single-agent environment.
    """
    agents = agents or (DEFAULT_AGENT_ID,)
    shown = []
    for step in range(length + 1):
        over = step == length and end != "never"
        flags = {ALL_AGENTS: True} if over else {}
        shown.append(
            Scene(
                {agent: np.array([episode, step, number], np.float32) for number, agent in enumerate(agents)},
                {agent: step + 100.0 * number for number, agent in enumerate(agents)} if step else {},
                flags if end == "terminate" else {},
                flags if end == "truncate" else {},
            )
        )
    return shown


class ScriptedEnv(BaseEnv):
    """Plays episodes scene by scene, whatever the actions are.

    Attributes:
        tape: what happened: ``("poll",)``, ``("send", actions)``, ``("reset", env_id)``.
        unwrapped: what ``get_unwrapped`` gives.
        games: what ``take_finished_games`` gives next, None = no environment counts games.
        sent: every action dict received.
    """

    def __init__(
        self,
        episodes: Mapping[Any, Sequence[Sequence[Scene]]],
        *,
        reset: str = "inline",
        tape: Tape | None = None,
        ready: Callable[[int, Any], bool] = lambda poll, env_id: True,
        unwrapped: Sequence[Any] = (),
    ) -> None:
        """Take the scripts.

        Args:
            episodes: environment id -> its episodes, each a list of scenes. After the last one it begins anew.
            reset: ``"inline"``: try_reset gives observations; ``"async"``: they come by the next poll;
                ``"unsupported"``: the next episode shows up under the id with ``"+"`` appended, if there is one.
            tape: where to write.
            ready: poll number and environment id -> whether it is in that poll.
            unwrapped: what ``get_unwrapped`` gives.
        """
        self.tape: Tape = tape if tape is not None else []
        self.unwrapped = list(unwrapped)
        self.games: list[FinishedGame] | None = None
        self.sent: list[dict[Any, dict[Any, Any]]] = []
        self.stopped = False
        self._scripts = {env_id: [list(episode) for episode in script] for env_id, script in episodes.items()}
        self._reset = reset
        self._ready = ready
        self._polls = 0
        self._at = dict.fromkeys(self._scripts, (0, 0))
        self._waiting = set(self._scripts)

    def poll(self) -> Poll:
        """The scenes of all environments that were sent actions and are ready."""
        self.tape.append(("poll",))
        number, self._polls = self._polls, self._polls + 1
        poll = Poll({}, {}, {}, {}, {}, {}, {})
        for env_id in sorted(self._waiting, key=str):
            if not self._ready(number, env_id):
                continue
            self._waiting.discard(env_id)
            self._show(env_id, poll)
        return poll

    def _show(self, env_id: Any, poll: Poll) -> None:
        episode, step = self._at[env_id]
        scene = self._scripts[env_id][episode % len(self._scripts[env_id])][step]
        if scene.fault is not None:
            poll.faults[env_id] = scene.fault  # type: ignore[index]  # made by poll() above
            self._at[env_id] = (episode + 1, 0)
            self._waiting.add(env_id)
            return
        poll.obs[env_id] = dict(scene.obs)
        poll.rewards[env_id] = dict(scene.rewards) if step else dict.fromkeys(scene.obs)
        for flags, shown in ((poll.terminateds, scene.terminateds), (poll.truncateds, scene.truncateds)):
            flags[env_id] = {**dict.fromkeys(scene.obs, False), ALL_AGENTS: False, **shown}
        poll.infos[env_id] = {agent: dict(info) for agent, info in scene.infos.items()}
        if scene.off_policy_actions:
            poll.off_policy_actions[env_id] = dict(scene.off_policy_actions)
        self._at[env_id] = (episode, step + 1)

    def send_actions(self, action_dict: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Write the actions down; these environments go on."""
        actions = {env_id: dict(by_agent) for env_id, by_agent in action_dict.items()}
        self.tape.append(("send", actions))
        self.sent.append(actions)
        self._waiting |= actions.keys() & self._scripts.keys()

    def try_reset(self, env_id: Any) -> dict[Any, Any] | str | None:
        """Begin the next episode in the way asked for."""
        self.tape.append(("reset", env_id))
        episode = self._at[env_id][0] + 1
        script = self._scripts[env_id]
        if self._reset == "unsupported":
            if episode < len(script):
                following = f"{env_id}+"
                self._scripts[following], self._at[following] = script[episode:], (0, 0)
                self._waiting.add(following)
            return None
        if self._reset == "async":
            self._at[env_id] = (episode, 0)
            self._waiting.add(env_id)
            return ASYNC_RESET_RETURN
        self._at[env_id] = (episode, 1)
        return dict(script[episode % len(script)][0].obs)

    def get_unwrapped(self) -> Sequence[Any]:
        """What was given at construction."""
        return self.unwrapped

    def take_finished_games(self) -> list[FinishedGame] | None:
        """What ``games`` holds."""
        games = self.games
        self.games = None if games is None else []
        return games

    def stop(self) -> None:
        """Note it."""
        self.stopped = True


class RecordingPolicy(Policy):
    """Its actions count up: 0, 1, 2, ... over all rows it ever acted for, modulo the number of actions.

    It also gives a column ``score``, the sum of the observation. The state of a recurrent one counts steps.

    Attributes:
        calls: arguments of every ``compute_actions``, as a dict.
        postprocessed: arguments of every ``postprocess_trajectory``.
    """

    def __init__(
        self,
        action_space: spaces.Space[Any] | None = None,
        *,
        recurrent: bool = False,
        tape: Tape | None = None,
        name: str = "policy",
        act: Callable[[NDArray[Any]], Any] | None = None,
    ) -> None:
        """Make a policy.

        Args:
            action_space: Discrete(1000) by default.
            recurrent: it has state.
            tape: where ``("act", name, rows)`` is written.
            name: what it is called there.
            act: observations [N, ...] -> actions; None = count up.
        """
        super().__init__(
            spaces.Box(-np.inf, np.inf, (3,), np.float32), action_space or spaces.Discrete(1000), {"name": name}
        )
        self.calls: list[dict[str, Any]] = []
        self.postprocessed: list[tuple[Any, Mapping[Any, Any], Any]] = []
        self.weights = 0.0
        self._tape: Tape = tape if tape is not None else []
        self._name = name
        self._recurrent = recurrent
        self._act = act
        self._next = 0

    def get_initial_state(self) -> list[NDArray[np.float32]]:
        """Minus one, so that it can be told from zero."""
        return [np.full(1, -1.0, np.float32)] if self._recurrent else []

    def compute_actions(
        self,
        obs: NDArray[Any],
        state_batches: Sequence[NDArray[Any]] = (),
        prev_action_batch: NDArray[Any] | None = None,
        prev_reward_batch: NDArray[Any] | None = None,
        info_batch: Sequence[Mapping[str, Any]] | None = None,
        episodes: Sequence[Any] | None = None,
        timestep: int | None = None,
        *,
        explore: bool = True,
    ) -> tuple[Any, list[NDArray[Any]], dict[str, NDArray[Any]]]:
        """Count on."""
        self._tape.append(("act", self._name, len(obs)))
        self.calls.append(
            {
                "obs": obs.copy(),
                "states": [state.copy() for state in state_batches],
                "prev_actions": prev_action_batch,
                "prev_rewards": prev_reward_batch,
                "infos": info_batch,
                "episodes": episodes,
                "timestep": timestep,
                "weights": self.weights,
            }
        )
        if self._act is not None:
            actions = self._act(obs)
        else:
            actions = (self._next + np.arange(len(obs))) % 1000
            self._next += len(obs)
        score = obs.reshape(len(obs), -1).sum(axis=1, dtype=np.float32)
        return actions, [state + np.float32(1.0) for state in state_batches], {"score": score}

    def postprocess_trajectory(
        self, batch: Any, other_agent_batches: Mapping[Any, Any] | None = None, episode: Any = None
    ) -> Any:
        """Write it down."""
        self.postprocessed.append((batch.copy(), other_agent_batches or {}, episode))
        return batch
