"""ScriptedEnv, a BaseEnv that plays a script, and RecordingPolicy, a policy with known actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.policy import Policy
from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.env.base_env import ALL_AGENTS, BaseEnv, FinishedGame, Poll
from aiorl.errors import EnvError


@dataclass(frozen=True)
class Scene:
    """Report of one environment in one poll, by agent id; the first scene of an episode is its
    reset.

    A missing flag is False. With a `fault` the environment breaks down instead of reporting.
    """

    obs: Mapping[Any, Any]
    rewards: Mapping[Any, Any] = field(default_factory=dict)
    terminateds: Mapping[Any, bool] = field(default_factory=dict)
    infos: Mapping[Any, Any] = field(default_factory=dict)
    off_policy_actions: Mapping[Any, Any] = field(default_factory=dict)
    fault: EnvError | None = None


def scenes(
    length: int, *, episode: int = 0, ends: bool = True, agents: Sequence[Any] = ()
) -> list[Scene]:
    """Return an episode of `length` steps in which every agent is always observed.

    The observation is [episode, step, number of the agent]; the reward of a step is its number (1,
    2, ...) plus a hundred per preceding agent. If it `ends`, the last step is terminal.
    """
    agents = agents or (DEFAULT_AGENT_ID,)
    return [
        Scene(
            {
                agent: np.array([episode, step, number], np.float32)
                for number, agent in enumerate(agents)
            },
            {agent: step + 100.0 * number for number, agent in enumerate(agents)} if step else {},
            {ALL_AGENTS: True} if ends and step == length else {},
        )
        for step in range(length + 1)
    ]


class ScriptedEnv(BaseEnv):
    """Environment that plays episodes scene by scene, for any actions.

    Attributes:
        tape: events: ``("poll",)``, ``("send", actions)``, ``("reset", env_id)``.
        games: next result of ``take_finished_games``; None = no environment counts games.
        sent: every action dict received.
        stopped: True after it was stopped.
    """

    def __init__(
        self,
        episodes: Mapping[Any, Sequence[Sequence[Scene]]],
        *,
        can_be_reset: bool = True,
        unwrapped: Sequence[Any] = (),
    ) -> None:
        """Take the scripts.

        Args:
            episodes: environment id -> its episodes, each a list of scenes. After the last one it
                starts again.
            can_be_reset: False: the next episode appears under the id with ``"+"`` appended, if
                there is one.
            unwrapped: result of ``get_unwrapped``.
        """
        self.tape: list[Any] = []
        self.games: list[FinishedGame] | None = None
        self.sent: list[dict[Any, dict[Any, Any]]] = []
        self.stopped = False
        self._unwrapped = list(unwrapped)
        self._scripts = {
            env_id: [list(episode) for episode in script] for env_id, script in episodes.items()
        }
        self._can_be_reset = can_be_reset
        self._at = dict.fromkeys(self._scripts, (0, 0))
        self._waiting = set(self._scripts)

    def poll(self) -> Poll:
        """Return the scenes of all environments that received actions."""
        self.tape.append(("poll",))
        poll = Poll({}, {}, {}, {}, {}, {}, {})
        waiting, self._waiting = self._waiting, set()
        for env_id in sorted(waiting, key=str):
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
        flags = {**dict.fromkeys(scene.obs, False), ALL_AGENTS: False}
        poll.terminateds[env_id], poll.truncateds[env_id] = {**flags, **scene.terminateds}, flags
        poll.infos[env_id] = {agent: dict(info) for agent, info in scene.infos.items()}
        if scene.off_policy_actions:
            poll.off_policy_actions[env_id] = dict(scene.off_policy_actions)
        self._at[env_id] = (episode, step + 1)

    def send_actions(self, action_dict: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Record the actions; these environments continue."""
        actions = {env_id: dict(by_agent) for env_id, by_agent in action_dict.items()}
        self.tape.append(("send", actions))
        self.sent.append(actions)
        self._waiting |= actions.keys() & self._scripts.keys()

    def try_reset(self, env_id: Any) -> dict[Any, Any] | None:
        """Begin the next episode, or refuse."""
        self.tape.append(("reset", env_id))
        episode, script = self._at[env_id][0] + 1, self._scripts[env_id]
        if self._can_be_reset:
            self._at[env_id] = (episode, 1)
            return dict(script[episode % len(script)][0].obs)
        if episode < len(script):
            following = f"{env_id}+"
            self._scripts[following], self._at[following] = script[episode:], (0, 0)
            self._waiting.add(following)
        return None

    def get_unwrapped(self) -> Sequence[Any]:
        """Return the objects given at construction."""
        return self._unwrapped

    def take_finished_games(self) -> list[FinishedGame] | None:
        """Return ``games``."""
        games = self.games
        self.games = None if games is None else []
        return games

    def stop(self) -> None:
        """Record the call."""
        self.stopped = True


class RecordingPolicy(Policy):
    """Policy with counting actions: 0, 1, 2, ... over all its rows, modulo 1000.

    It also gives a column ``score``, the sum of the observation. The state of a recurrent one
    counts steps, from -1.

    Attributes:
        calls: observations of every ``compute_actions``, and the weights at that time.
        postprocessed: trajectories that it postprocessed.
    """

    def __init__(
        self,
        action_space: spaces.Space[Any] | None = None,
        *,
        recurrent: bool = False,
        act: Callable[[NDArray[Any]], Any] | None = None,
    ) -> None:
        """Make a policy; ``act`` replaces the counting actions by a function of observations [N,
        ...].
        """
        super().__init__(
            spaces.Box(-np.inf, np.inf, (3,), np.float32), action_space or spaces.Discrete(1000), {}
        )
        self.calls: list[tuple[NDArray[Any], float]] = []
        self.postprocessed = 0
        self.weights = 0.0
        self._recurrent = recurrent
        self._act = act
        self._next = 0

    def get_initial_state(self) -> list[NDArray[np.float32]]:
        return [np.full(1, -1.0, np.float32)] if self._recurrent else []

    def compute_actions(
        self, obs: NDArray[Any], state_batches: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        self.calls.append((obs.copy(), self.weights))
        if self._act is not None:
            actions = self._act(obs)
        else:
            actions = (self._next + np.arange(len(obs))) % 1000
            self._next += len(obs)
        score = obs.reshape(len(obs), -1).sum(axis=1, dtype=np.float32)
        return actions, [state + np.float32(1.0) for state in state_batches], {"score": score}

    def postprocess_trajectory(
        self, batch: Any, other_agent_batches: Any = None, episode: Any = None
    ) -> Any:
        self.postprocessed += 1
        return batch
