"""Iteration: one turn of the general sampler, from a poll to the actions that follow it.

``observe`` takes the result of a poll and returns the outputs that are ready, in order. ``act``
then evaluates the policies and returns the actions to send. An Iteration neither loops nor waits:
its caller polls, hands out the outputs and sends the actions. It only asks the environment for
resets, because an environment that resets immediately takes part in the same turn.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

from aiorl.acting.actor import Actor
from aiorl.data.metrics import RolloutMetrics
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.env.base_env import ALL_AGENTS, BaseEnv, Poll, SteppedBaseEnv, checked_horizon
from aiorl.env.gym_like import copied, episode_limit
from aiorl.errors import EnvContractError, UnknownPolicyError
from aiorl.process.log_once import report, warn_of_long_episode
from aiorl.sampling.builder import BatchBuilder, Cut, build_batches
from aiorl.sampling.episode import MultiAgentEpisode
from aiorl.sampling.hooks import EpisodeHooks
from aiorl.sampling.seats import Lane, Seat
from aiorl.sampling.settings import SamplerSetup

Output = RolloutMetrics | SampleBatch | MultiAgentBatch
Outputs = MutableSequence[Output]

_LARGE_BATCH_ROWS = 5000
_TO_COME = SampleBatch()
"""Placeholder for a batch among the outputs of a turn, until all batches of the turn are built."""


_Ready = tuple[MultiAgentEpisode, list[Seat], bool, bool]
"""Environment of this turn, between the intake of its observations and their settlement: its
episode; the agents that wait for an action; True if it has ended; True if it has reached the
horizon. A plain tuple, since many are made."""


class Iteration:
    """Turns of the general sampler, with the live episodes; see the module.

    Attributes:
        base_env: the environments.
        extra_batches: batches that episodes added themselves and that have not been taken.
        inferred_s: seconds that the policies took in the last ``act``.
    """

    def __init__(self, setup: SamplerSetup) -> None:
        """Prepare for the first turn without calling the environment.

        Raises:
            UnknownPolicyError: a policy has no preprocessor or filter (also a ValueError).
        """
        self._setup = setup
        self.base_env: BaseEnv = setup.base_env
        self._hooks = EpisodeHooks(setup)
        policies = setup.policy_map
        settings = setup.settings
        for parts in (setup.preprocessors, setup.filters):
            for policy_id in policies:
                if policy_id not in parts:
                    raise UnknownPolicyError(policy_id, parts)
        actors = [self._actor(policy_id) for policy_id in policies]
        # True if an episode is accessible from outside: to user functions, or to explorations or
        # policies of users.
        self._is_shown = (
            self._hooks.see_episodes
            or setup.observation_fn is not None
            or policies.maps_by_episode
            or not all(actor.is_plain for actor in actors)
        )
        self._lanes = {actor.policy_id: self._lane(actor) for actor in actors}
        self._cuts: list[tuple[int, Cut]] = []
        self.extra_batches: deque[SampleBatch | MultiAgentBatch] = deque()
        self.inferred_s = 0.0
        self._episodes: dict[Any, MultiAgentEpisode] = {}
        self._free_builders: list[BatchBuilder] = []
        self._ids = random.Random(random.getrandbits(64))
        self._horizon: float | None = None
        self._turn = 0
        self._actions: dict[Any, dict[Any, Any]] = {}
        self._off_policy_actions: Mapping[Any, Mapping[Any, Any]] = {}
        self._many_rows = _LARGE_BATCH_ROWS
        if settings.is_truncating:
            self._many_rows = max(1000, 10 * settings.rollout_fragment_length)

    def _actor(self, policy_id: str) -> Actor:
        setup = self._setup
        return Actor(
            policy_id,
            setup.policy_map[policy_id],
            setup.preprocessors[policy_id],
            setup.filters[policy_id],
            clip_actions=setup.settings.clip_actions,
        )

    def _lane(self, actor: Actor) -> Lane:
        return Lane(
            actor,
            clip_rewards=self._setup.settings.reward_limit,
            is_shown=self._is_shown,
            shows_trajectories=self._hooks.on_postprocessed is not None,
            is_on_policy=isinstance(self.base_env, SteppedBaseEnv),
        )

    def take_up_policies(self) -> None:
        """Act with policies that were added to the policy map; forget those that were removed, as
        soon as no episode has one and none of its rows waits.

        Call this between two turns.
        """
        policies = self._setup.policy_map
        lanes = self._lanes
        for policy_id in sorted(policies.keys() - lanes.keys()):
            lanes[policy_id] = self._lane(self._actor(policy_id))
        removed = lanes.keys() - policies.keys()
        builders = list(self._free_builders)
        for episode in self._episodes.values():
            removed -= episode.policy_ids
            builders.append(episode.batch_builder)
        for builder in builders:
            removed -= builder.policy_ids
        for policy_id in removed:
            del lanes[policy_id]
        for policy_id in policies.leaving.keys() - lanes.keys():
            del policies.leaving[policy_id]

    def observe(self, poll: Poll, outputs: Outputs | None = None) -> Outputs:
        """Take in the result of a poll.

        Args:
            poll: the result.
            outputs: list to append to; None = a new list.

        Returns:
            Metrics of finished episodes and full batches, in the order in which they arose; those
            from before an error are appended, too.

        Raises:
            ValueError: an environment broke its contract, or the horizon cannot be enforced.
            EnvError: an environment failed at a reset.
        """
        if self._setup.policy_map.leaving:
            self.take_up_policies()
        if self._horizon is None:
            self._horizon = _effective_horizon(self.base_env, self._setup.settings.horizon)
        self._hooks.worker = self._setup.get_worker()
        self._turn += 1
        self._actions = {}
        self._off_policy_actions = poll.off_policy_actions
        for lane in self._lanes.values():
            lane.begin_turn(self._turn)
        report("raw_obs", poll.obs)
        report("infos", poll.infos)
        for env_id in poll.faults:
            self._abandon(env_id)
        if outputs is None:
            outputs = []
        try:
            ready = self._take_in(poll)
            for lane in self._lanes.values():
                lane.take_in()
            self._settle(ready, outputs)
            for lane in self._lanes.values():
                lane.take_in()  # first observations of environments that were reset immediately
        finally:
            self._hooks.worker = None
            self._build_batches(outputs)
        return outputs

    def act(self) -> dict[Any, dict[Any, Any]]:
        """Evaluate every policy once; return actions by environment id and agent id.

        Raises:
            ValueError: a policy's results do not fit.
        """
        self.inferred_s = 0.0
        for lane in self._lanes.values():
            self.inferred_s += lane.evaluate(self._off_policy_actions, self._actions)
        return self._actions

    # --- observations ---

    def _take_in(self, poll: Poll) -> list[_Ready]:
        """Count the steps, and pass the observations and the results of previous actions to their
        policies.
        """
        assert self._horizon is not None, "the horizon is known once a turn has begun"
        # local names, because most of the sampler's own time is spent in this loop
        horizon = self._horizon
        turn = self._turn
        ready = []
        no_done_at_end = self._setup.settings.no_done_at_end
        soft_horizon = self._setup.settings.soft_horizon
        get_episode = self._episodes.get
        is_rewritten = self._setup.observation_fn is not None
        all_obs, all_rewards, all_terminateds, all_truncateds, all_infos, _ = poll[:6]
        for env_id, agent_obs in all_obs.items():
            episode = get_episode(env_id)
            try:
                terminateds = all_terminateds[env_id]
                truncateds = all_truncateds[env_id]
                all_terminated = terminateds[ALL_AGENTS]
                all_truncated = truncateds.get(ALL_AGENTS, False)
                has_ended = all_terminated or all_truncated
            except (KeyError, TypeError, AttributeError) as error:
                raise self._bad_flags(env_id, poll) from error
            if episode is None:
                episode = self._open_episode(env_id)
                builder = episode.batch_builder
            else:
                builder = episode.batch_builder
                episode.length += 1
                builder.count += 1
                rewards = all_rewards.get(env_id)
                if rewards:
                    episode.add_rewards(rewards)
            length = episode.length
            hit_horizon = length >= horizon and not has_ended
            over = has_ended or hit_horizon
            if is_rewritten:
                agent_obs = self._rewritten(episode, agent_obs)
            infos = all_infos.get(env_id)
            seats = episode.seats
            t = length - 1
            waiting: list[Seat] = []
            for agent_id, obs in agent_obs.items():
                seat = seats.get(agent_id)
                if seat is None:
                    seat = episode.seat_for(agent_id)
                elif seat.is_done:
                    raise episode.observed_again(agent_id)
                arrivals = seat.lane.arrivals
                info = infos.get(agent_id) if infos else None
                if info:
                    info = _copied_info(seat, info)
                elif info is None:
                    info = {}
                terminated = terminateds.get(agent_id, False)
                truncated = truncateds.get(agent_id, False)
                if terminated or truncated:
                    seat.is_done = True
                elif over:
                    terminated = all_terminated
                    truncated = all_truncated or hit_horizon
                else:
                    waiting.append(seat)
                if seat.is_observed:
                    if info:
                        arrivals.infos.append((len(arrivals.agents), info))
                    if (terminated or truncated) and not (
                        no_done_at_end or (hit_horizon and soft_horizon)
                    ):
                        arrivals.ends.append((len(arrivals.agents), terminated, truncated))
                    if not info or info.get("training_enabled", True):
                        builder.held += 1
                        if seat.waits_from < 0:
                            builder.expect_rows(seat)
                    else:
                        arrivals.skipped.append(len(arrivals.agents))
                else:
                    # earlier rewards belong to no row
                    seat.is_observed = True
                    seat.reward = 0.0
                arrivals.agents.append((seat, obs, seat.reward, t))
                seat.reward = 0.0
                seat.seen_at = turn
                seat.raw_obs = obs
                seat.info = info
            ready.append((episode, waiting, has_ended, hit_horizon))
        return ready

    def _bad_flags(self, env_id: Any, poll: Poll) -> EnvContractError:
        """Return the error for flags that do not say if the episode has ended."""
        name, copy = self.base_env.place_of(env_id)
        episode = self._episodes.get(env_id)
        step = 0 if episode is None else episode.length + 1
        message = (
            f"poll returned an observation of environment {env_id!r} with the flags"
            f" {poll.terminateds.get(env_id)!r} and {poll.truncateds.get(env_id)!r}, expected two"
            f" dicts by agent, with {ALL_AGENTS!r} in the first"
        )
        return EnvContractError(name, message, vector_index=copy, step=step)

    def _rewritten(
        self, episode: MultiAgentEpisode, agent_obs: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        assert self._setup.observation_fn is not None, "there is no observation_fn"
        rewritten = self._setup.observation_fn(
            agent_obs=agent_obs,
            worker=self._hooks.worker,
            base_env=self.base_env,
            policies=self._setup.policy_map,
            episode=episode,
        )
        if not isinstance(rewritten, dict):
            raise ValueError(
                f"observation_fn returned {type(rewritten).__name__}, expected a dict: agent id ->"
                " observation"
            )
        return rewritten

    # --- settlement ---

    def _settle(self, ready: Sequence[_Ready], outputs: Outputs) -> None:
        """Queue agents for actions, call hooks, cut and reset, after all results of a poll are in
        the tables.
        """
        on_step = self._hooks.on_step
        worker = self._hooks.worker
        settings = self._setup.settings
        actions = self._actions
        many_rows = self._many_rows
        cut_length = settings.cut_length
        for episode, waiting, has_ended, hit_horizon in ready:
            builder = episode.batch_builder
            if builder.held > many_rows:
                warn_of_long_episode(many_rows, episode.env_id, builder.count)
            over = has_ended or hit_horizon
            if over:
                self._report(episode, outputs)
            else:
                actions[episode.env_id] = {}
                for seat in waiting:
                    seat.lane.queue.append(seat)
            if on_step is not None and episode.length:
                on_step(worker=worker, base_env=self.base_env, episode=episode)
            if has_ended and not settings.no_done_at_end:
                self._check_final_observations(episode)
            is_long_enough = builder.count >= cut_length
            if (over or is_long_enough) and builder.has_pending_agent_data():
                if is_long_enough or not settings.is_truncating:
                    self._cuts.append((len(outputs), builder.cut(episode, is_over=over)))
                    outputs.append(_TO_COME)
                else:
                    builder.postprocess(episode)
            if over:
                self._end_episode(episode, keep_env=hit_horizon and settings.soft_horizon)

    def _build_batches(self, outputs: Outputs) -> None:
        """Put the batches into their reserved places."""
        if not self._cuts:
            return
        places, cuts = zip(*self._cuts, strict=True)
        self._cuts = []
        is_multi_agent = self._setup.policy_map.is_multi_agent
        batches = build_batches(cuts, self._lanes, is_multi_agent=is_multi_agent)
        for place, batch in zip(places, batches, strict=True):
            outputs[place] = batch

    def _check_final_observations(self, episode: MultiAgentEpisode) -> None:
        for seat in episode.seats.values():
            if seat.has_rows and not seat.is_done and seat.seen_at != self._turn:
                raise episode.fault(
                    EnvContractError,
                    f"the episode has ended for all agents, but agent {seat.agent_id!r} (policy"
                    f" {seat.lane.policy_id!r}) has no final observation. Return the last"
                    " observations of all live agents together with '__all__', or set"
                    " no_done_at_end",
                )

    def _report(self, episode: MultiAgentEpisode, outputs: Outputs) -> None:
        games = self.base_env.take_finished_games()
        metrics = episode.custom_metrics
        history = episode.hist_data
        if games is None:
            outputs.append(
                RolloutMetrics(
                    episode.length,
                    episode.total_reward,
                    episode.agent_rewards,
                    metrics,
                    hist_data=history,
                )
            )
            return
        outputs.extend(
            RolloutMetrics(game.length, game.reward, custom_metrics=metrics, hist_data=history)
            for game in games
        )

    # --- episodes ---

    def _open_episode(self, env_id: Any) -> MultiAgentEpisode:
        if not self._free_builders:
            self._free_builders.append(BatchBuilder(self._hooks.on_postprocessed))
        episode = self._episodes[env_id] = MultiAgentEpisode(
            env_id=env_id,
            episode_id=self._ids.getrandbits(62),
            lanes=self._lanes,
            binding=self._setup.policy_map.binding(self._setup.get_worker),
            batch_builder=self._free_builders.pop(),
            add_extra_batch=self.extra_batches.append,
        )
        episode.place = self.base_env.place_of(env_id)
        self._hooks.episode_starts(episode)
        return episode

    def _end_episode(self, episode: MultiAgentEpisode, *, keep_env: bool) -> None:
        self._hooks.episode_ends(episode)
        if keep_env:
            self._soft_reset(episode)
        else:
            del self._episodes[episode.env_id]
            episode.close()
            self._free_builders.append(episode.batch_builder)
            self._reset(episode.env_id)

    def _soft_reset(self, episode: MultiAgentEpisode) -> None:
        """Continue with the current observations as the first ones of a new episode."""
        episode.soft_reset(self._ids.getrandbits(62))
        self._actions[episode.env_id] = {}
        for seat in episode.seats.values():
            if seat.seen_at == self._turn and not seat.is_done:
                seat.lane.queue.append(seat)

    def _reset(self, env_id: Any) -> None:
        """Request a new episode; one that starts immediately takes part in this turn's
        evaluation.
        """
        obs = self.base_env.try_reset(env_id)
        if obs is None:
            if self._horizon is not None and math.isfinite(self._horizon):
                raise ValueError(
                    f"environment {env_id!r} cannot be reset, which a horizon of {self._horizon:g}"
                    " steps requires; set the horizon to None"
                )
            return
        if isinstance(obs, str):  # ASYNC_RESET_RETURN
            return
        episode = self._open_episode(env_id)
        self._actions[env_id] = {}
        if self._setup.observation_fn is not None:
            obs = self._rewritten(episode, obs)
        for agent_id, raw_obs in obs.items():
            seat = episode.seat_for(agent_id)
            seat.is_observed = True
            seat.seen_at = self._turn
            seat.raw_obs = raw_obs
            seat.lane.arrivals.agents.append((seat, raw_obs, 0.0, -1))
            seat.lane.queue.append(seat)
        for lane in self._lanes.values():
            # each reset enters the filter separately, regardless of other resets
            if lane.actor.is_filtered:
                lane.take_in()

    def _abandon(self, env_id: Any) -> None:
        """End the episode of an environment that failed, unreported and without a last
        observation.
        """
        episode = self._episodes.pop(env_id, None)
        if episode is None:
            return
        builder = episode.batch_builder
        is_truncating = self._setup.settings.is_truncating
        if is_truncating:
            builder.postprocess(episode)
        self._hooks.episode_breaks_off(episode)
        episode.close()
        if not is_truncating:
            builder.discard()
        self._free_builders.append(builder)


def _copied_info(seat: Seat, info: Any) -> Any:
    """Return a copy of an info, since the environment may reuse the original."""
    if isinstance(info, Mapping):
        return copied(info)
    fault: EnvContractError = seat.episode.fault(
        EnvContractError, f"info of agent {seat.agent_id!r} is {info!r:.200}, expected a dict"
    )
    raise fault


def _effective_horizon(base_env: BaseEnv, horizon: int | float | None) -> float:
    """Return the maximum episode length: the horizon if given, else the environment's limit, else
    infinity.

    Raises:
        ConfigError: the horizon is above the environment's limit (also a ValueError).
    """
    limit = getattr(base_env, "max_episode_steps", None) or None
    envs = base_env.get_unwrapped()
    if not limit and envs:
        limit = episode_limit(envs[0])
    steps = None
    if horizon is not None and math.isfinite(horizon):
        steps = int(horizon)
    length = checked_horizon(steps, limit)
    return math.inf if length is None else length
