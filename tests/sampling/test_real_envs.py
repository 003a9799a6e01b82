"""The general sampler with every kind of environment, and with realistic policies."""

from __future__ import annotations

import contextlib
import random
import threading

import gymnasium
import numpy as np
from gymnasium import spaces

from aiorl.acting.policy import Policy
from aiorl.env.env_maker import to_base_env
from aiorl.env.external_env import ExternalEnv
from aiorl.errors import SamplerDied

SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)


class SumPolicy(Policy):
    """Policy whose action is the sum of the observation, so clients can check that they get their
    own action.
    """

    def __init__(self):
        super().__init__(SPACE, spaces.Discrete(100_000), {})

    def compute_actions(self, obs, state_batches=(), *args, **kwargs):
        return obs.sum(axis=1).astype(np.int64), [], {}


class Clients(ExternalEnv):
    """Twenty threads, each of which drives several episodes alternately and checks every action."""

    def __init__(self, threads, episodes):
        super().__init__(spaces.Discrete(100_000), SPACE)
        self.threads, self.episodes, self.wrong = threads, episodes, []

    def run(self):
        threads = [threading.Thread(target=self.drive, args=(n,)) for n in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def drive(self, number):
        rng = random.Random(number)
        lengths = {number * 100 + n: rng.randint(1, 6) for n in range(self.episodes)}
        ids = {key: self.start_episode(f"e{key}", training_enabled=key % 7 != 3) for key in lengths}
        at = dict.fromkeys(lengths, 0)
        while at:
            key = rng.choice(sorted(at))
            obs = np.array([key, at[key], 1], np.float32)
            if at[key] == lengths[key]:
                self.end_episode(ids[key], obs)
                del at[key]
                continue
            if (key + at[key]) % 3 == 0:
                self.log_action(ids[key], obs, key % 50)
            else:
                action = self.get_action(ids[key], obs)
                if action != int(obs.sum()):
                    self.wrong.append((key, action))
            self.log_returns(ids[key], 1.0)
            self.log_returns(ids[key], float(at[key]))
            at[key] += 1


def test_interleaved_external_episodes_give_separate_trajectories(make_sampler):
    """R119, R150, R151, R153, R156, R159: 100 episodes, compared with the records of the
    clients.
    """
    threads = 20
    env = Clients(threads, 5)
    base_env = to_base_env(env)
    sampler = make_sampler(base_env, SumPolicy())
    batches = []
    with contextlib.suppress(SamplerDied):
        while True:
            batches.append(sampler.get_data())
    assert env.wrong == []
    keys = [number * 100 + n for number in range(threads) for n in range(env.episodes)]
    rngs = {number: random.Random(number) for number in range(threads)}
    lengths = {key: rngs[key // 100].randint(1, 6) for key in keys}
    trained = {key for key in keys if key % 7 != 3}
    seen = {}
    for batch in batches:
        key = int(batch["obs"][0, 0])
        assert key not in seen
        seen[key] = batch
        length = lengths[key]
        steps = np.arange(length)
        assert batch["obs"].tolist() == [[key, step, 1] for step in steps]
        assert batch["new_obs"].tolist() == [[key, step + 1, 1] for step in steps]
        assert batch["rewards"].tolist() == (1.0 + steps).tolist()
        assert batch["dones"].tolist() == [False] * (length - 1) + [True]
        logged = [(key + step) % 3 == 0 for step in steps]
        assert batch["actions"].tolist() == [
            key % 50 if off else key + step + 1 for step, off in zip(steps, logged, strict=True)
        ]
    assert seen.keys() == trained
    metrics = sampler.get_metrics()
    assert sorted(m.episode_length for m in metrics) == sorted(lengths.values())
    base_env.stop()


class Reusing(gymnasium.Env):
    """Environment that changes the same info, and the same array in it, at every step."""

    observation_space, action_space = SPACE, spaces.Discrete(50)

    def __init__(self):
        self.info = {"where": np.zeros(1), "deep": {"steps": [0]}}

    def reset(self, *, seed=None, options=None):
        self.step_count = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.step_count += 1
        self.info["where"][0] = self.info["deep"]["steps"][0] = self.step_count
        return np.zeros(3, np.float32), 1.0, self.step_count == 4, False, self.info


def test_r96_infos_in_rows_do_not_change_although_the_environment_reuses_them(make_sampler):
    base_env = to_base_env(Reusing())
    batch = make_sampler(base_env, SumPolicy()).get_data()
    assert [info["where"].tolist() for info in batch["infos"]] == [[1.0], [2.0], [3.0], [4.0]]
    assert [info["deep"]["steps"] for info in batch["infos"]] == [[1], [2], [3], [4]]
    base_env.stop()
