"""Environments of the old gym package, and what comes of them; ``python -m
tests.support.old_gym_cases`` prints it.

Everything here works with gym 0.21 and with gym 0.26, in which classes of the older form are still
common.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import warnings
from collections import OrderedDict
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.wrappers import TransformReward

with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
    warnings.simplefilter("ignore")
    import gym

import aiorl
from aiorl.data.actions import ActionLayout
from aiorl.data.spaces import space_to_dict
from aiorl.env.env_maker import EnvMaker
from aiorl.env.kinds import facts_of
from aiorl.env.wrapping import STATS_FILE, EnvPlan, Wrapping
from aiorl.errors import AiorlError
from aiorl.run.policy_plan import plan_policies
from aiorl.sampling.policies import ENV_SPACE
from aiorl.serving.external import ClientEnv

HERE = "tests.support.old_gym_cases"


class Zeros(aiorl.Policy):
    """Takes the first action of any space."""

    def compute_actions(self, obs, state_batches=(), *args, **kwargs):
        return ActionLayout(self.action_space).zeros(len(obs)), [], {}


class Count(gym.Env):
    """Counts its steps in the form of gym 0.21; the reward is the action plus the seed."""

    metadata = {"render.modes": ["human", "rgb_array"], "video.frames_per_second": 5}
    render_mode = None

    def __init__(self, ends_at=3):
        self.observation_space = gym.spaces.Box(0, 100, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self.ends_at = ends_at
        self.seeded = 0
        self.steps = 0

    def seed(self, seed=None):
        self.seeded = seed
        return [seed]

    def _obs(self):
        return np.full(2, self.steps, np.float32)

    def reset(self):
        self.steps = 0
        return self._obs()

    def step(self, action):
        assert self.action_space.n > action >= 0
        self.steps += 1
        return (
            self._obs(),
            float(action + self.seeded),
            self.steps >= self.ends_at,
            {"steps": self.steps},
        )

    def render(self, mode="human"):
        assert mode == "rgb_array", "a window"
        return np.zeros((16, 16, 3), np.uint8)


class Current(Count):
    """Count in the form of the gym that is installed, as its own wrappers want it."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seeded = seed
        return super().reset(), {}

    def step(self, action):
        obs, reward, done, info = super().step(action)
        return obs, reward, done, False, info


if gym.__version__ < "0.26":
    Current = Count


class Parts(Count):
    """Its observations and actions have parts, and their keys are not in alphabetical order."""

    def __init__(self):
        super().__init__()
        parts = OrderedDict(
            where=gym.spaces.Box(-1, 1, (2,), np.float32),
            kind=gym.spaces.Discrete(3),
            flags=gym.spaces.MultiBinary(2),
        )
        self.observation_space = gym.spaces.Dict(parts)
        self.action_space = gym.spaces.Tuple(
            [gym.spaces.Discrete(2), gym.spaces.MultiDiscrete([2, 3])]
        )

    def _obs(self):
        return {
            "kind": self.steps % 3,
            "flags": np.array([0, 1], np.int8),
            "where": np.full(2, 0.5, np.float32),
        }

    def step(self, action):
        self.steps += 1
        return self._obs(), float(action[0]), self.steps >= self.ends_at, {}


class Pair(Count):
    """Its observation is a pair whose second part is a dict, as the result of a new reset is."""

    def __init__(self):
        super().__init__()
        inner = gym.spaces.Dict({"x": gym.spaces.Discrete(2)})
        self.observation_space = gym.spaces.Tuple([gym.spaces.Discrete(3), inner])

    def _obs(self):
        return (1, {"x": 1})


class Unseeded(gym.Env):
    """Has no seed method of its own."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def reset(self):
        return 0

    def step(self, action):
        return 0, 0.0, True, {}


class Odd(gym.spaces.Space):
    """Kind of space that only this module has."""

    def __repr__(self):
        return "Odd(7)"


class Wordy(Unseeded):
    """Has an observation space that no network can take."""

    observation_space = Odd()


class Crafted:
    """Has spaces of gym, but is of no class of it."""

    def __init__(self):
        self._env = Count()
        self.reset = self._env.reset
        self.step = self._env.step

    @property
    def observation_space(self):
        return self._env.observation_space

    @property
    def action_space(self):
        return self._env.action_space


class Modern(gymnasium.Env):
    """Of Gymnasium, but for its spaces."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, True, False, {}


class Team(aiorl.MultiAgentEnv):
    """Two agents with a space of gym each."""

    observation_spaces = {"a": gym.spaces.Discrete(2), "b": gym.spaces.Box(0, 1, (3,))}
    action_spaces = {"a": gym.spaces.Discrete(2), "b": gym.spaces.Discrete(2)}

    @property
    def action_space(self):
        return gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"a": 1, "b": np.zeros(3, np.float32)}

    def step(self, action_dict):
        obs = {"a": 1, "b": np.zeros(3, np.float32)}
        return obs, {"a": 1.0, "b": 2.0}, {"__all__": True}, {"__all__": False}, {}


class Driven(aiorl.ExternalEnv):
    """Drives two episodes."""

    def __init__(self, context=None):
        super().__init__(gym.spaces.Discrete(2), gym.spaces.Box(0, 1, (2,), np.float32))

    def run(self):
        for _ in range(2):
            episode = self.start_episode()
            assert self.get_action(episode, np.zeros(2, np.float32)) == 0
            self.log_returns(episode, 1.0)
            self.end_episode(episode, np.ones(2, np.float32))


class Rows(aiorl.VectorEnv):
    """Two copies that step together."""

    num_envs = 2
    observation_space = gym.spaces.Discrete(5)
    action_space = gym.spaces.Discrete(2)

    def vector_reset(self):
        return [0, 0]

    def reset_at(self, index):
        return 0

    def vector_step(self, actions):
        return [1, 1], [1.0, 1.0], [True, True], [{}, {}]


class Doubled(gym.RewardWrapper):
    """Wrapper of gym."""

    def reward(self, reward):
        return 2 * reward


def halved(env):
    """Return an environment in a wrapper of Gymnasium."""
    return TransformReward(env, lambda reward: reward / 2)


if "CountOfTest-v0" not in getattr(gym.envs.registry, "env_specs", gym.envs.registry):
    gym.register(id="CountOfTest-v0", entry_point=f"{HERE}:Current", max_episode_steps=2)


def _sampled(env, policy=Zeros, *, steps=6, **settings):
    worker = aiorl.RolloutWorker(
        env_creator=env, policy=policy, rollout_fragment_length=steps, **settings
    )
    try:
        return worker.sample()
    finally:
        worker.stop()


def _rows(batch):
    names = ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds")
    return {name: np.asarray(batch[name], np.float64).tolist() for name in names}


def _kinds(env):
    facts = facts_of(env, "env")
    return [
        type(space).__module__.partition(".")[0]
        for space in (facts.observation_space, facts.action_space)
    ]


def _refused(call):
    try:
        call()
    except AiorlError as error:
        return [type(error).__name__, str(error)]
    return None


def spaces():
    return {
        "parts": [space_to_dict(Parts().observation_space), space_to_dict(Parts().action_space)],
    }


def an_environment_with_a_time_limit():
    return _rows(
        _sampled(lambda context: gym.wrappers.TimeLimit(Current(), max_episode_steps=2), seed=5)
    )


def by_name():
    names = ["gym:CountOfTest-v0", f"gym:{HERE}:CountOfTest-v0", f"{HERE}:Count"]
    aiorl.register_env("old-count", lambda context: Count(**context))
    envs = [*names, "old-count", lambda context: gym.make("CountOfTest-v0")]
    unknown = _refused(lambda: _sampled("gym:CountOfTst-v0"))
    return {
        "truncateds": [_rows(_sampled(env, seed=1))["truncateds"] for env in envs],
        "unknown": unknown,
    }


def in_processes_of_their_own():
    return _rows(_sampled(f"gym:{HERE}:CountOfTest-v0", steps=2, seed=3, remote_worker_envs=True))


def made_with_a_config():
    return _rows(_sampled(Count, env_config={"ends_at": 1}, seed=0))


def parts():
    return {
        "parts": np.asarray(_sampled(lambda context: Parts())["obs"])[:3].tolist(),
        "pair": np.asarray(_sampled(lambda context: Pair())["obs"])[:2].tolist(),
    }


def other_objects():
    objects = [Crafted(), Modern(), Rows(), Driven(), Count()]
    by_agent = {
        "p": (Zeros, gym.spaces.Discrete(2), gym.spaces.Discrete(2), {}),
        "q": (Zeros, gym.spaces.Box(0, 1, (3,)), ENV_SPACE, {}),
    }
    mapping = {"a": "p", "b": "q"}.get
    team = facts_of(Team(), "team")
    return {
        "kinds": [_kinds(each) for each in objects],
        "rewards": [
            np.asarray(_sampled(lambda _, env=env: env, steps=1)["rewards"]).tolist()
            for env in objects
        ],
        "team": [f"{type(space).__module__}"[:9] for space in team.observation_spaces.values()],
        "team_rewards": {
            policy_id: batch["rewards"].tolist()
            for policy_id, batch in _sampled(
                lambda context: Team(), by_agent, policy_mapping_fn=mapping, steps=1
            ).policy_batches.items()
        },
    }


def policies_of_a_run():
    pair = gym.spaces.Tuple([gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.Discrete(3)])
    multiagent = {
        "policies": {"p": (None, pair, gym.spaces.Discrete(2), {}), "q": None},
        "policy_mapping_fn": {"a": "p", "b": "q"},
    }
    clients = {
        "observation_space": gym.spaces.Box(0, 1, (2,)),
        "action_space": gym.spaces.Discrete(2),
    }
    config = aiorl.PPOConfig(env=f"{HERE}:Team", multiagent=multiagent)
    planned = plan_policies(config, facts_of(Team(), "team"))
    return {
        "spaces": [
            [str(policy.observation_space), str(policy.action_space)] for policy in planned.values()
        ],
        "clients": str(ClientEnv(aiorl.EnvContext(clients)).observation_space),
    }


def seeds():
    def made(env):
        return lambda: _sampled(lambda context: env, seed=4)

    return {"unseeded": _refused(made(Unseeded())), "wrapped": _refused(made(Doubled(Unseeded())))}


def refusals():
    return {
        "odd": _refused(lambda: _sampled(lambda context: Wordy())),
        "same": _refused(lambda: _same_twice()),
        "horizon": _refused(
            lambda: _sampled(
                lambda context: gym.wrappers.TimeLimit(Current(), max_episode_steps=2),
                episode_horizon=9,
            )
        ),
    }


def _same_twice():
    inner = Current()
    _sampled(lambda context: Doubled(inner), num_envs=2)


def wrappers():
    users = (f"{HERE}:Doubled", f"{HERE}:halved", f"{HERE}:halved")
    with tempfile.TemporaryDirectory() as folder:
        wrapping = Wrapping(users=users, monitor_path=folder)
        maker = EnvMaker(EnvPlan(env=f"{HERE}:Current", wrapping=wrapping, seed=8))
        env = maker.make_first()
        base_env = maker.to_base_env(env)
        rewards = []
        base_env.poll()
        for _ in range(3):
            base_env.send_actions({0: {"agent0": 2}})
            rewards.append(base_env.poll().rewards[0]["agent0"])
        picture = env.render()
        base_env.stop()
        (stats,) = Path(folder).glob(f"*/{STATS_FILE}")
        return {
            "rewards": rewards,
            "stats": json.loads(stats.read_text())["reward"],
            "picture": picture.shape,
            "kinds": _kinds(env),
        }


def vector():
    if not hasattr(gym, "vector"):
        return None
    makers = [
        lambda ends=ends: gym.wrappers.TimeLimit(Current(ends), max_episode_steps=3)
        for ends in (2, 9)
    ]
    made = gym.vector.SyncVectorEnv(makers)

    def sampled():
        return _rows(_sampled(lambda context: made, seed=7, num_envs=2, steps=3))

    return _refused(sampled) if gym.__version__ < "0.22" else sampled()


CASES = [
    spaces,
    an_environment_with_a_time_limit,
    by_name,
    in_processes_of_their_own,
    made_with_a_config,
    parts,
    other_objects,
    policies_of_a_run,
    seeds,
    refusals,
    wrappers,
    vector,
]


def results():
    """Return the result of each case by its name, as JSON has it."""
    return json.loads(json.dumps({case.__name__: case() for case in CASES}))


if __name__ == "__main__":
    sys.modules[HERE] = sys.modules["__main__"]  # so that it is not imported again by this name
    print(json.dumps({"version": gym.__version__, **results()}))
