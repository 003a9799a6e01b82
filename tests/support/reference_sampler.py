"""A plain sampler of dicts and lists, written from SPEC sections 3 to 5 and 8 and from R58 to R134:
the tests' oracle.

It is slow and simple, and shares no code with `aiorl.sampling`. Rows are dicts, one at a time;
environments are those of `plain_envs`. Policies, preprocessors, filters, postprocessing and
callbacks are the product's or the test's own.

Decisions where SPEC is open:

- O1. If several environments are ready at the same time, all are taken in first (length, rewards,
  new episodes, ``observation_fn``). Then each policy's observations are filtered as one batch. Then
  rows, hooks, cuts and ends follow, environment by environment. The first observations of an
  immediate reset are filtered when it happens.
- O2. A new episode continues the builder that became free last.
- O3. An agent's own flags are its row's flags; without own flags, those of all agents (or the
  horizon, a truncation) are.
- O4. If rewards are clipped, policies see clipped previous rewards, too, and rows contain them.
- O5. Rows before and after an unrecorded one are separate trajectories. All of them are
  postprocessed with the whole raw batches of the other agents.
- O6. After a soft reset, agents not observed in that poll count as never observed; a reward that
  waited for the next row of such an agent is dropped.
- O7. A broken environment is handled before everything else in the same poll. Its rows stay if
  batches are packed, postprocessed as a trajectory that was cut; otherwise they are dropped. There
  are no metrics and no ``on_episode_end``, but exploration is notified of the end.
- O8. The end of all without a final observation of a live agent is an error if any of that agent's
  steps made a row in this episode, even if that row is no longer in the builder.
- O9. A reward of None is 0.0 in rows and totals, and not an entry of ``agent_rewards``.
- O10. With a policy in addition to the default one, or without the default one, batches are
  multi-agent ones, regardless of the policies that have rows.
- O11. ``on_episode_step`` is called for steps only, so as often in each episode as it is long.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiorl.data.actions import ActionLayout
from aiorl.data.metrics import RolloutMetrics
from aiorl.data.obs_layout import layout_of
from aiorl.data.sample_batch import SampleBatch
from aiorl.sampling.callbacks import DefaultCallbacks

ALL = "__all__"
DEFAULT_POLICY = "default_policy"
LATER = "later"
"""Result of `reset` of a plain environment if the first observation comes in a later poll."""

DTYPES = {
    "t": np.int32,
    "eps_id": np.int64,
    "agent_index": np.int32,
    "rewards": np.float32,
    "prev_rewards": np.float32,
    "terminateds": np.bool_,
    "truncateds": np.bool_,
    "dones": np.bool_,
}


class ContractBroken(ValueError):
    """An environment broke its contract, or a setting is impossible."""


class NothingToChoose(ContractBroken):
    """An agent that must act has an action mask that forbids every action."""


class NothingComes(Exception):
    """No batch after many iterations: no rows are made."""


@dataclass
class Report:
    """Report of one environment in one poll; of a broken one, only its id.

    Rewards are None if the report opens an episode.
    """

    env_id: Any
    obs: dict[Any, Any]
    rewards: dict[Any, Any] | None
    terminateds: dict[Any, bool]
    truncateds: dict[Any, bool]
    infos: dict[Any, dict[str, Any]]
    off_policy: dict[Any, Any] | None = None
    is_broken: bool = False


@dataclass
class Settings:
    """Settings of the sampler; names as in SPEC 2.1."""

    fragment_length: float = math.inf
    pack: bool = False
    horizon: int | None = None
    soft_horizon: bool = False
    no_done_at_end: bool = False
    clip_rewards: float = 0.0
    clip_actions: bool = True
    observation_fn: Any = None
    worker: Any = None
    num_envs: int = 1
    target: int = 0  # T


@dataclass
class Batch:
    """Rows by policy, as columns, and the environment steps that they came from."""

    env_steps: int
    by_policy: dict[str, dict[str, np.ndarray]]


class Agent:
    """Memory of one agent in one episode."""

    def __init__(
        self,
        agent_id: Any,
        index: int,
        policy_id: str,
        zero_action: np.ndarray,
        state: list[np.ndarray],
    ):
        self.agent_id, self.index, self.policy_id = agent_id, index, policy_id
        self.obs = self.raw_obs = self.info = None
        self.done = self.has_row = self.is_observed = False
        self.times_observed = 0
        self.owed = 0.0  # rewards since its last observation
        self.last_reward = self.prev_reward = 0.0
        self.zero_action = self.action = self.prev_action = zero_action
        self.next_prev_action = zero_action  # the previous action for its next evaluation
        self.fed_action, self.fed_reward = zero_action, 0.0  # inputs of its last evaluation
        self.state = state
        self.extras: dict[str, Any] = {}


class Builder:
    """Rows of one environment."""

    def __init__(self) -> None:
        self.count = 0
        self.rows: dict[Any, list[dict[str, Any]]] = {}  # agent id -> rows not yet postprocessed
        self.batches: dict[str, list[SampleBatch]] = {}

    def total(self) -> int:
        finished = sum(batch.count for batches in self.batches.values() for batch in batches)
        return finished + sum(len(rows) for rows in self.rows.values())

    def has_pending_agent_data(self) -> bool:
        return bool(self.rows)


class Episode:
    """Interface for callbacks; see SPEC 4.9."""

    def __init__(self, sampler: ReferenceSampler, env_id: Any, builder: Builder) -> None:
        self.sampler, self.env_id, self.batch_builder = sampler, env_id, builder
        self.policy_of: dict[Any, str] = {}
        self.agents: dict[Any, Agent] = {}
        self.user_data: dict[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Reset the part that restarts with a soft reset, too."""
        self.episode_id = self.sampler.next_episode_id()
        self.length, self.total_reward = 0, 0.0
        self.agent_rewards: dict[Any, float] = defaultdict(float)
        self.custom_metrics: dict[str, Any] = {}
        self.hist_data: dict[str, Any] = {}

    def policy_for(self, agent_id: Any) -> str:
        if agent_id not in self.policy_of:
            policy_id = self.sampler.mapping(agent_id)
            if policy_id not in self.sampler.policies:
                raise ContractBroken(f"unknown policy {policy_id!r}")
            self.policy_of[agent_id] = policy_id
        return self.policy_of[agent_id]

    def agent(self, agent_id: Any) -> Agent:
        if agent_id not in self.agents:
            policy_id = self.policy_for(agent_id)
            policy = self.sampler.policies[policy_id]
            zero = self.sampler.layouts[policy_id].zeros()
            self.agents[agent_id] = Agent(
                agent_id,
                len(self.agents),
                policy_id,
                zero,
                [np.asarray(part) for part in policy.get_initial_state()],
            )
        return self.agents[agent_id]

    def get_agents(self) -> list[Any]:
        return list(self.agents)

    def last_observation_for(self, agent_id: Any) -> Any:
        return self.agents[agent_id].obs if agent_id in self.agents else None

    def last_raw_obs_for(self, agent_id: Any) -> Any:
        return self.agents[agent_id].raw_obs if agent_id in self.agents else None

    def last_info_for(self, agent_id: Any) -> Any:
        return self.agents[agent_id].info if agent_id in self.agents else None

    def last_action_for(self, agent_id: Any) -> Any:
        return self.agents[agent_id].action

    def prev_action_for(self, agent_id: Any) -> Any:
        return self.agents[agent_id].prev_action

    def prev_reward_for(self, agent_id: Any) -> float:
        return self.agents[agent_id].prev_reward

    def rnn_state_for(self, agent_id: Any) -> list[np.ndarray]:
        return self.agents[agent_id].state

    def last_pi_info_for(self, agent_id: Any) -> dict[str, Any]:
        return self.agents[agent_id].extras


class ReferenceSampler:
    """The sampler; see the module."""

    def __init__(
        self, env, policies, mapping, preprocessors, filters, settings, callbacks=None
    ) -> None:
        self.env, self.settings = env, settings
        self.policies = {policy_id: policies[policy_id] for policy_id in sorted(policies)}
        self.mapping = mapping or (lambda agent_id: DEFAULT_POLICY)
        self.preprocessors, self.filters = preprocessors, filters
        self.callbacks = callbacks or DefaultCallbacks()
        self.layouts = {
            policy_id: ActionLayout(policy.action_space)
            for policy_id, policy in self.policies.items()
        }
        self.is_multi_agent = set(self.policies) != {DEFAULT_POLICY}
        self.horizon = settings.horizon or env.limit or math.inf
        self.episodes: dict[Any, Episode] = {}
        self.free_builders: list[Builder] = []
        self.outputs: list[RolloutMetrics | Batch] = []
        self.metrics: list[RolloutMetrics] = []
        self.num_episodes = 0
        self.queue: list[tuple[Episode, Agent, dict[str, Any], float]] = []
        self.actions: dict[Any, dict[Any, Any]] = {}
        self.off_policy: dict[Any, dict[Any, Any]] = {}
        self.must_act = False
        self.patience = 200
        self.error: ContractBroken | None = None

    def next_episode_id(self) -> int:
        self.num_episodes += 1
        return self.num_episodes

    # --- output ---

    def sample(self) -> Batch:
        """Return the result of RolloutWorker.sample: SPEC 3."""
        limit = math.inf if math.isinf(self.settings.fragment_length) else self.settings.num_envs
        batches = [self.get_data()]
        while (
            len(batches) < limit
            and sum(batch.env_steps for batch in batches) < self.settings.target
        ):
            batches.append(self.get_data())
        return concat(batches)

    def get_data(self) -> Batch:
        """Return the next batch, and keep metrics that come before it."""
        for _ in range(self.patience):
            while self.outputs:
                output = self.outputs.pop(0)
                if isinstance(output, Batch):
                    return output
                self.metrics.append(output)
            if self.error is not None:
                raise self.error
            try:
                self.iterate()
            except ContractBroken as error:
                self.error = error  # notified once the earlier outputs are handed out
        raise NothingComes

    def get_metrics(self) -> list[RolloutMetrics]:
        metrics, self.metrics = self.metrics, []
        return metrics

    def iterate(self) -> None:
        """Iterate as in SPEC 4.3; outputs are handed out before inference."""
        if self.must_act:
            self.evaluate()
            self.env.send(self.actions)
        self.must_act = False
        self.process(self.env.poll())
        self.must_act = True

    # --- SPEC 4.5 ---

    def process(self, reports: list[Report]) -> None:
        self.queue, self.actions = [], {}
        self.off_policy = {
            report.env_id: report.off_policy for report in reports if report.off_policy
        }
        for report in reports:
            if report.is_broken:
                self.abandon(report.env_id)
        reports = [report for report in reports if not report.is_broken]
        taken_in = [self.take_in(report) for report in reports]
        arriving = [
            (episode, agent_id, raw) for episode, obs in taken_in for agent_id, raw in obs.items()
        ]
        filtered = self.filtered(arriving)
        for report, (episode, obs) in zip(reports, taken_in, strict=True):
            self.settle(
                report,
                episode,
                {agent: (raw, filtered[id(episode), agent]) for agent, raw in obs.items()},
            )

    def take_in(self, report: Report) -> tuple[Episode, dict[Any, Any]]:
        """Do step 1, and bind agents to policies."""
        episode = self.episodes.get(report.env_id)
        if episode is None:
            episode = self.open_episode(report.env_id)
        else:
            episode.length += 1
            episode.batch_builder.count += 1
            for agent_id, reward in (report.rewards or {}).items():
                if reward is None:
                    continue
                policy_id = episode.policy_for(agent_id)
                episode.total_reward += reward
                episode.agent_rewards[agent_id, policy_id] += reward
                if agent_id in episode.agents:
                    episode.agents[agent_id].owed += reward
        return episode, self.observed(episode, report.obs)

    def observed(self, episode: Episode, obs: dict[Any, Any]) -> dict[Any, Any]:
        if self.settings.observation_fn is not None:
            obs = self.settings.observation_fn(
                agent_obs=obs,
                worker=self.settings.worker,
                base_env=self.env,
                policies=self.policies,
                episode=episode,
            )
            if not isinstance(obs, dict):
                raise ContractBroken("observation_fn returned no dict")
        for agent_id in obs:
            if episode.agent(agent_id).done:
                raise ContractBroken(f"agent {agent_id!r} was done and is observed again")
        return obs

    def filtered(self, arriving: list[tuple[Episode, Any, Any]]) -> dict[Any, np.ndarray]:
        """Return observations by (episode, agent), preprocessed and filtered; one batch for each
        policy.
        """
        result = {}
        for policy_id in self.policies:
            mine = [
                (ep, agent, raw) for ep, agent, raw in arriving if ep.policy_for(agent) == policy_id
            ]
            if mine:
                batch = self.filters[policy_id](
                    self.preprocessors[policy_id].transform_rows([raw for *_, raw in mine])
                )
                result.update(
                    {(id(ep), agent): row for (ep, agent, _), row in zip(mine, batch, strict=True)}
                )
        return result

    def settle(
        self, report: Report, episode: Episode, obs: dict[Any, tuple[Any, np.ndarray]]
    ) -> None:
        """Do steps 3 to 7."""
        settings, builder = self.settings, episode.batch_builder
        all_terminated, all_truncated = report.terminateds[ALL], report.truncateds[ALL]
        ended = all_terminated or all_truncated
        hit_horizon = episode.length >= self.horizon and not ended
        over = ended or hit_horizon
        if over:
            self.outputs.append(
                RolloutMetrics(
                    episode.length,
                    episode.total_reward,
                    dict(episode.agent_rewards),
                    episode.custom_metrics,
                    hist_data=episode.hist_data,
                )
            )
        else:
            self.actions[report.env_id] = {}
        for agent_id, (raw, new_obs) in obs.items():
            agent = episode.agents[agent_id]
            info = report.infos.get(agent_id) or {}
            terminated = report.terminateds.get(agent_id, False)
            truncated = report.truncateds.get(agent_id, False)
            own_done = terminated or truncated
            if over and not own_done:
                terminated, truncated = all_terminated, all_truncated or hit_horizon
            if settings.no_done_at_end or (hit_horizon and settings.soft_horizon):
                terminated = truncated = False
            reward, agent.owed = agent.owed, 0.0
            if agent.is_observed:
                if info.get("training_enabled", True):
                    agent.has_row = True
                    builder.rows.setdefault(agent_id, []).append(
                        {
                            "t": episode.length - 1,
                            "eps_id": episode.episode_id,
                            "agent_index": agent.index,
                            "obs": agent.obs,
                            "actions": agent.action,
                            "rewards": reward,
                            "prev_actions": agent.fed_action,
                            "prev_rewards": agent.fed_reward,
                            "terminateds": terminated,
                            "truncateds": truncated,
                            "dones": terminated or truncated,
                            "infos": info,
                            "new_obs": new_obs,
                            **agent.extras,
                            "_step": agent.times_observed,
                        }
                    )
                agent.prev_reward, agent.last_reward = agent.last_reward, reward
            self.remember(agent, raw, new_obs, info)
            agent.done = agent.done or own_done
            if not over and not own_done:
                self.queue.append((episode, agent, info, agent.last_reward))
        if episode.length:  # O11
            self.callbacks.on_episode_step(
                worker=settings.worker, base_env=self.env, episode=episode
            )
        if ended and not settings.no_done_at_end:
            for agent_id, agent in episode.agents.items():
                if agent.has_row and not agent.done and agent_id not in obs:
                    raise ContractBroken(f"agent {agent_id!r} has no final observation")
        if builder.has_pending_agent_data():
            if (over and not settings.pack) or builder.count >= settings.fragment_length:
                self.outputs.append(self.build(builder, episode))
            elif over:
                self.postprocess(builder, episode)
        if over:
            self.end(episode, set(obs), is_soft=hit_horizon and settings.soft_horizon)

    def remember(self, agent: Agent, raw: Any, obs: np.ndarray, info: dict[str, Any]) -> None:
        agent.raw_obs, agent.obs, agent.info, agent.is_observed = raw, obs, info, True
        agent.times_observed += 1

    # --- SPEC 4.9 and 4.10 ---

    def open_episode(self, env_id: Any) -> Episode:
        builder = self.free_builders.pop() if self.free_builders else Builder()
        episode = self.episodes[env_id] = Episode(self, env_id, builder)
        self.tell_exploration("on_episode_start", episode)
        self.callbacks.on_episode_start(
            worker=self.settings.worker, base_env=self.env, policies=self.policies, episode=episode
        )
        return episode

    def end(self, episode: Episode, observed: set[Any], *, is_soft: bool) -> None:
        if not is_soft:
            self.free_builders.append(episode.batch_builder)
        self.tell_exploration("on_episode_end", episode)
        self.callbacks.on_episode_end(
            worker=self.settings.worker, base_env=self.env, policies=self.policies, episode=episode
        )
        if is_soft:
            self.soft_reset(episode, observed)
        else:
            del self.episodes[episode.env_id]
            self.reset(episode.env_id)

    def soft_reset(self, episode: Episode, observed: set[Any]) -> None:
        episode.begin()
        self.actions[episode.env_id] = {}
        for agent_id, agent in episode.agents.items():
            agent.owed = agent.last_reward = agent.prev_reward = 0.0
            agent.has_row = False
            agent.next_prev_action = agent.zero_action
            if agent_id not in observed:
                agent.obs, agent.is_observed = None, False
            elif not agent.done:
                self.queue.append((episode, agent, agent.info, 0.0))

    def reset(self, env_id: Any) -> None:
        obs = self.env.reset(env_id)
        if obs is None and math.isfinite(self.horizon):
            raise ContractBroken("an environment that cannot be reset has a horizon")
        if obs is None or obs is LATER:
            return
        episode = self.open_episode(env_id)
        self.actions[env_id] = {}
        obs = self.observed(episode, obs)
        filtered = self.filtered([(episode, agent_id, raw) for agent_id, raw in obs.items()])
        for agent_id, raw in obs.items():
            agent = episode.agents[agent_id]
            self.remember(agent, raw, filtered[id(episode), agent_id], {})
            self.queue.append((episode, agent, {}, 0.0))

    def abandon(self, env_id: Any) -> None:
        episode = self.episodes.pop(env_id, None)
        if episode is None:
            return
        builder = episode.batch_builder
        if self.settings.pack:
            self.postprocess(builder, episode)
        else:
            builder.__init__()
        self.free_builders.append(builder)
        self.tell_exploration("on_episode_end", episode)

    def tell_exploration(self, hook: str, episode: Episode) -> None:
        for policy in self.policies.values():
            if policy.exploration is not None:
                getattr(policy.exploration, hook)(
                    policy=policy, environment=self.env, episode=episode, tf_sess=None
                )

    # --- SPEC 4.7 and 4.8 ---

    def evaluate(self) -> None:
        limit = self.settings.clip_rewards
        for policy_id, policy in self.policies.items():
            work = [entry for entry in self.queue if entry[1].policy_id == policy_id]
            if not work:
                continue
            agents = [agent for _, agent, _, _ in work]
            for _, agent, _, reward in work:
                agent.fed_action = agent.next_prev_action
                agent.fed_reward = float(np.clip(reward, -limit, limit)) if limit else reward
            _, masks = layout_of(policy.observation_space).split(
                np.stack([agent.obs for agent in agents])
            )
            if masks is not None and not masks.any(axis=1).all():
                raise NothingToChoose
            states = [
                np.stack(parts) for parts in zip(*(agent.state for agent in agents), strict=True)
            ]
            actions, states_out, extras = policy.compute_actions(
                np.stack([agent.obs for agent in agents]),
                [state.copy() for state in states],
                prev_action_batch=np.stack([agent.fed_action for agent in agents]),
                prev_reward_batch=np.array([agent.fed_reward for agent in agents], np.float32),
                info_batch=[info for _, _, info, _ in work],
                episodes=[episode for episode, *_ in work],
                timestep=policy.global_timestep,
            )
            layout = self.layouts[policy_id]
            column = layout.to_column(actions)
            for_env = layout.to_env(layout.clip(column) if self.settings.clip_actions else column)
            for row, (episode, agent, _, _) in enumerate(work):
                agent.state = [state[row] for state in states_out]
                agent.extras = {
                    **{f"state_in_{number}": state[row] for number, state in enumerate(states)},
                    **{
                        f"state_out_{number}": state[row] for number, state in enumerate(states_out)
                    },
                    **{name: values[row] for name, values in extras.items()},
                }
                agent.prev_action = agent.fed_action
                agent.action = column[row].copy()
                taken = (self.off_policy.get(episode.env_id) or {}).get(agent.agent_id)
                if taken is not None:
                    agent.action = layout.to_row(taken)
                agent.next_prev_action = agent.action
                self.actions[episode.env_id][agent.agent_id] = for_env[row]

    # --- the builder: SPEC 4.9 ---

    def postprocess(self, builder: Builder, episode: Episode) -> None:
        def raw_batches():
            return {
                agent_id: (self.policies[episode.agents[agent_id].policy_id], self.columns(rows))
                for agent_id, rows in builder.rows.items()
            }

        for agent_id, rows in builder.rows.items():
            policy_id = episode.agents[agent_id].policy_id
            for piece in pieces(rows):
                assert not any(row["dones"] for row in piece[:-1])
                others = {other: pair for other, pair in raw_batches().items() if other != agent_id}
                batch = self.policies[policy_id].postprocess_trajectory(
                    self.columns(piece), others, episode
                )
                self.callbacks.on_postprocess_trajectory(
                    worker=self.settings.worker,
                    episode=episode,
                    agent_id=agent_id,
                    policy_id=policy_id,
                    policies=self.policies,
                    postprocessed_batch=batch,
                    original_batches=raw_batches(),
                )
                builder.batches.setdefault(policy_id, []).append(batch)
        builder.rows = {}

    def build(self, builder: Builder, episode: Episode) -> Batch:
        self.postprocess(builder, episode)
        parts = [
            Batch(0, {policy_id: dict(part)})
            for policy_id, of in builder.batches.items()
            for part in of
        ]
        batch = concat(parts)
        batch.env_steps = builder.count
        builder.__init__()
        return batch

    def columns(self, rows: list[dict[str, Any]]) -> SampleBatch:
        """Return rows as a batch, with clipped rewards."""
        limit = self.settings.clip_rewards
        batch = SampleBatch()
        for name in rows[0]:
            if name.startswith("_"):
                continue
            values = [row[name] for row in rows]
            if name == "infos":
                column = np.empty(len(rows), object)
                column[:] = values
            else:
                column = np.array(values, DTYPES.get(name))
            if name == "rewards" and limit:
                column = np.clip(column, -limit, limit)
            batch[name] = column
        return batch


def pieces(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Yield rows, cut at each observation that made no row."""
    cut = [[rows[0]]]
    for before, row in itertools.pairwise(rows):
        if row["_step"] == before["_step"] + 1:
            cut[-1].append(row)
        else:
            cut.append([row])
    return cut


def concat(batches: list[Batch]) -> Batch:
    """Concatenate batches: add counts, and append rows of each policy."""
    by_policy: dict[str, list[dict[str, np.ndarray]]] = {}
    for batch in batches:
        for policy_id, columns in batch.by_policy.items():
            by_policy.setdefault(policy_id, []).append(columns)
    joined = {
        policy_id: {name: np.concatenate([columns[name] for columns in parts]) for name in parts[0]}
        for policy_id, parts in by_policy.items()
    }
    return Batch(sum(batch.env_steps for batch in batches), joined)
