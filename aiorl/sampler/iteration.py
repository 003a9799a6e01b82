"""Iteration: one turn of the general sampler, between a poll and the actions it leads to.

``observe`` takes what a poll brought and gives the outputs that are ready, in order; ``act`` then evaluates
the policies and gives the actions to send. It neither loops nor waits: whoever drives it polls, hands
outputs out, and sends. Resets are the one thing it asks of the environment itself, since an environment that
can be reset in line takes part in the same turn.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, MutableSequence
from typing import Any, NamedTuple

from aiorl.data.metrics import RolloutMetrics
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.base_env import ALL_AGENTS, ASYNC_RESET_RETURN, BaseEnv, Poll
from aiorl.errors import BadRewardError, EnvContractError, UnknownPolicyError
from aiorl.log_once import log_once, summarize
from aiorl.policy.policy import Policy
from aiorl.sampler.builder import BatchBuilder
from aiorl.sampler.episode import MultiAgentEpisode
from aiorl.sampler.lane import Lane
from aiorl.sampler.setup import SamplerSetup, effective_horizon
from aiorl.sampler.track import AgentTrack

__all__ = ["Iteration", "Output"]

logger = logging.getLogger(__name__)

Output = RolloutMetrics | SampleBatch | MultiAgentBatch
Outputs = MutableSequence[Output]

_LARGE_BATCH_ROWS = 5000


class _Ready(NamedTuple):
    """An environment of this turn, between the intake of its observations and their settlement."""

    episode: MultiAgentEpisode
    tracks: list[AgentTrack]
    all_terminated: bool
    all_truncated: bool
    hit_horizon: bool


class Iteration:
    """Keeps the live episodes; see the module.

    Attributes:
        extra_batches: batches that episodes added on their own, not yet taken.
        inferred_s: seconds that the policies took in the last ``act``.
    """

    def __init__(self, setup: SamplerSetup) -> None:
        """Get ready; the environment is not touched.

        Raises:
            UnknownPolicyError: a policy without preprocessor or filter (also a ValueError).
        """
        self._setup = setup
        self._settings = settings = setup.settings
        self._is_packing, self._cut_length = settings.is_truncating, settings.cut_length
        self._policies = setup.policies
        for known in (setup.preprocessors, setup.filters):
            for policy_id in self._policies:
                if policy_id not in known:
                    raise UnknownPolicyError(policy_id, known)
        self._lanes = {
            policy_id: Lane(
                policy_id,
                policy,
                setup.preprocessors[policy_id],
                setup.filters[policy_id],
                clip_actions=settings.clip_actions,
                clip_rewards=settings.reward_limit,
            )
            for policy_id, policy in self._policies.items()
        }
        self.extra_batches: list[SampleBatch | MultiAgentBatch] = []
        self.inferred_s = 0.0
        self._worker: Any = None
        self._episodes: dict[Any, MultiAgentEpisode] = {}
        self._free_builders: list[BatchBuilder] = []
        self._ids = random.Random(random.getrandbits(64))
        self._horizon: float | None = None
        self._turn = 0
        self._actions: dict[Any, dict[Any, Any]] = {}
        self._off_policy_actions: Mapping[Any, Mapping[Any, Any]] = {}
        length = settings.rollout_fragment_length
        self._many_rows = max(1000, 10 * length) if self._is_packing else _LARGE_BATCH_ROWS

    @property
    def base_env(self) -> BaseEnv:
        """The environments."""
        base_env: BaseEnv = self._setup.base_env
        return base_env

    def observe(self, poll: Poll, outputs: Outputs | None = None) -> Outputs:
        """Take in what a poll brought.

        Args:
            poll: what it brought.
            outputs: where to append; None = a new list.
        Returns: metrics of finished episodes and batches that are full, in the order they came about; what came
            about before an error is appended, too.

        Raises:
            ValueError: an environment broke its contract, or a horizon cannot be honoured.
            EnvError: an environment failed at a reset.
        """
        if self._horizon is None:
            self._horizon = effective_horizon(self.base_env, self._settings.horizon)
        self._worker = self._setup.get_worker()
        self._turn += 1
        self._actions = {}
        self._off_policy_actions = poll.off_policy_actions
        for lane in self._lanes.values():
            lane.begin_turn()
        if log_once("raw_obs"):
            logger.info("Raw observations from the environment: %s", summarize(poll.obs))
            logger.info("Infos from the environment: %s", summarize(poll.infos))
        for env_id in poll.faults:
            self._abandon(env_id)
        if outputs is None:
            outputs = []
        try:
            ready = [self._take_in(env_id, agent_obs, poll) for env_id, agent_obs in poll.obs.items()]
            for lane in self._lanes.values():
                lane.take_in()
            for one in ready:
                self._settle(one, poll, outputs)
        finally:
            self._worker = None  # from one turn to the next it is not kept alive from here
        return outputs

    def act(self) -> dict[Any, dict[Any, Any]]:
        """Evaluate every policy once; actions by environment id and agent id.

        Raises:
            ValueError: a policy's results do not fit.
        """
        self.inferred_s = 0.0
        for lane in self._lanes.values():
            self.inferred_s += lane.evaluate(self._off_policy_actions, self._actions)
        return self._actions

    # --- observations ---

    def _take_in(self, env_id: Any, agent_obs: Mapping[Any, Any], poll: Poll) -> _Ready:
        """Count the step and offer the observations to their policies."""
        episode = self._episodes.get(env_id)
        try:
            all_terminated = bool(poll.terminateds[env_id][ALL_AGENTS])
            all_truncated = bool(poll.truncateds[env_id].get(ALL_AGENTS))
        except (KeyError, TypeError, AttributeError) as error:
            raise self._bad_flags(env_id, poll) from error
        if episode is None:
            episode = self._open_episode(env_id)
        else:
            episode.length += 1
            episode.batch_builder.count += 1
            rewards = poll.rewards.get(env_id)
            if rewards:
                try:
                    episode.add_rewards(rewards)
                except (TypeError, ValueError, AttributeError) as error:
                    if _are_numbers(rewards):  # so it was something else, such as the policy mapping
                        raise
                    message = f"rewards are {rewards!r:.200}, expected a number for each agent"
                    raise episode.fault(BadRewardError, message) from error
                if not math.isfinite(episode.total_reward):
                    raise episode.fault(BadRewardError, f"rewards are {rewards!r}, expected finite numbers")
        assert self._horizon is not None, "the horizon is known once a turn has begun"
        hit_horizon = episode.length >= self._horizon and not (all_terminated or all_truncated)
        tracks = self._offer(episode, agent_obs)
        return _Ready(episode, tracks, all_terminated, all_truncated, hit_horizon)

    def _bad_flags(self, env_id: Any, poll: Poll) -> EnvContractError:
        """The error for flags that do not say whether the episode is over."""
        name, copy = self.base_env.place_of(env_id)
        episode = self._episodes.get(env_id)
        flags = {kind: by_env.get(env_id) for kind, by_env in (("dones", poll.terminateds), ("cuts", poll.truncateds))}
        return EnvContractError(
            name,
            f"poll gave an observation of environment {env_id!r}, but the flags terminated (or done) {flags['dones']!r}"
            f" and truncated {flags['cuts']!r}; expected a dict each, by agent, with {ALL_AGENTS!r} in the first",
            vector_index=copy,
            step=0 if episode is None else episode.length + 1,
        )

    def _offer(self, episode: MultiAgentEpisode, agent_obs: Mapping[Any, Any]) -> list[AgentTrack]:
        if self._setup.observation_fn is not None:
            agent_obs = self._rewritten(episode, agent_obs)
        known, turn = episode.tracks, self._turn
        tracks = []
        for agent_id, raw_obs in agent_obs.items():
            track = known.get(agent_id)
            if track is None:
                track = episode.track_for(agent_id)
            elif track.done:
                raise episode.fault(
                    EnvContractError, f"agent {agent_id!r} was done and is observed again in the same episode"
                )
            track.seen_at = turn
            track.raw_obs = raw_obs
            track.lane.arriving.append(track)
            tracks.append(track)
        return tracks

    def _rewritten(self, episode: MultiAgentEpisode, agent_obs: Mapping[Any, Any]) -> Mapping[Any, Any]:
        assert self._setup.observation_fn is not None, "called without one"
        rewritten = self._setup.observation_fn(
            agent_obs=agent_obs,
            worker=self._worker,
            base_env=self.base_env,
            policies=self._policies,
            episode=episode,
        )
        if not isinstance(rewritten, dict):
            raise ValueError(
                f"observation_fn returned {type(rewritten).__name__}, expected a dict: agent id -> observation"
            )
        return rewritten

    # --- settlement ---

    def _settle(self, ready: _Ready, poll: Poll, outputs: Outputs) -> None:
        """Make rows, queue agents for actions, call back, cut, and reset of what a poll brought."""
        episode, _, all_terminated, all_truncated, hit_horizon = ready
        builder, settings = episode.batch_builder, self._settings
        if builder.held > self._many_rows:
            self._warn_of_many_rows(episode)
        ended = all_terminated or all_truncated
        over = ended or hit_horizon
        if over:
            self._report(episode, outputs)
        else:
            self._actions[episode.env_id] = {}
        self._record(ready, poll, over)
        self._setup.callbacks.on_episode_step(worker=self._worker, base_env=self.base_env, episode=episode)
        if ended and not settings.no_done_at_end:
            self._check_final_observations(episode)
        if builder.has_pending_agent_data():
            if (over and not self._is_packing) or builder.count >= self._cut_length:
                outputs.append(builder.build(episode))
            elif over:
                builder.postprocess(episode)
        if over:
            self._end_episode(episode, keep_env=hit_horizon and settings.soft_horizon)

    def _record(self, ready: _Ready, poll: Poll, over: bool) -> None:
        """One row for every agent observed before; those that go on are queued for an action."""
        episode, tracks, all_terminated, all_truncated, hit_horizon = ready
        env_id, builder = episode.env_id, episode.batch_builder
        never_done = self._settings.no_done_at_end or (hit_horizon and self._settings.soft_horizon)
        terminateds, truncateds = poll.terminateds[env_id], poll.truncateds[env_id]
        infos = poll.infos.get(env_id) or {}
        t = episode.length - 1
        for track in tracks:
            agent_id = track.agent_id
            info = infos.get(agent_id)
            if info is None:
                info = {}
            terminated, truncated = terminateds.get(agent_id, False), truncateds.get(agent_id, False)
            reward, track.reward = track.reward, 0.0
            own_done = terminated or truncated
            if track.slot:
                try:
                    is_trained_on = info.get("training_enabled", True)
                except AttributeError as error:
                    message = f"info of agent {agent_id!r} is {info!r:.200}, expected a dict"
                    raise episode.fault(EnvContractError, message) from error
                if is_trained_on:
                    if never_done:
                        terminated = truncated = False
                    elif over and not own_done:
                        terminated, truncated = all_terminated, all_truncated or hit_horizon
                    if not track.starts:
                        builder.expect_rows(track)
                    builder.held += 1
                    track.add_row(track.incoming, reward, t, terminated, truncated, info)
                track.prev_reward, track.last_reward = track.last_reward, reward
            track.slot = track.incoming
            track.info = info
            if own_done:
                track.done = True
            elif not over:
                track.lane.queue.append(track)

    def _warn_of_many_rows(self, episode: MultiAgentEpisode) -> None:
        if log_once("large_batch_warning"):
            logger.warning(
                "More than %d rows of environment %r wait for their episode's end (%d environment steps). "
                "Give a horizon if its episodes never end.",
                self._many_rows,
                episode.env_id,
                episode.batch_builder.count,
            )

    def _check_final_observations(self, episode: MultiAgentEpisode) -> None:
        for track in episode.tracks.values():
            if track.has_rows and not track.done and track.seen_at != self._turn:
                raise episode.fault(
                    EnvContractError,
                    f"the episode is over for all agents, but agent {track.agent_id!r} (policy {track.policy_id!r}) "
                    "has no final observation. Return the last observations of all live agents together with "
                    "'__all__', or set no_done_at_end",
                )

    def _report(self, episode: MultiAgentEpisode, outputs: Outputs) -> None:
        games = self.base_env.take_finished_games()
        metrics, history = episode.custom_metrics, episode.hist_data
        if games is None:
            outputs.append(
                RolloutMetrics(
                    episode.length, episode.total_reward, dict(episode.agent_rewards), metrics, hist_data=history
                )
            )
            return
        outputs.extend(
            RolloutMetrics(game.length, game.reward, custom_metrics=metrics, hist_data=history) for game in games
        )

    # --- episodes ---

    def _open_episode(self, env_id: Any) -> MultiAgentEpisode:
        setup = self._setup
        builder = self._free_builders.pop() if self._free_builders else self._new_builder()
        episode = self._episodes[env_id] = MultiAgentEpisode(
            env_id, self._new_id(), self._lanes, self._policies.binding(), builder, self.extra_batches.append
        )
        episode.place = self.base_env.place_of(env_id)
        self._tell_exploration("on_episode_start", episode)
        setup.callbacks.on_episode_start(
            worker=self._worker, base_env=self.base_env, policies=self._policies, episode=episode
        )
        return episode

    def _end_episode(self, episode: MultiAgentEpisode, *, keep_env: bool) -> None:
        setup = self._setup
        if not keep_env:
            self._free_builders.append(episode.batch_builder)
        self._tell_exploration("on_episode_end", episode)
        setup.callbacks.on_episode_end(
            worker=self._worker, base_env=self.base_env, policies=self._policies, episode=episode
        )
        if keep_env:
            self._soft_reset(episode)
        else:
            del self._episodes[episode.env_id]
            episode.close()
            self._reset(episode.env_id)

    def _soft_reset(self, episode: MultiAgentEpisode) -> None:
        """Go on with the current observations as if they were a new episode's first."""
        episode.soft_reset(self._new_id())
        self._actions[episode.env_id] = {}
        for track in episode.tracks.values():
            if track.seen_at != self._turn:
                track.slot = 0
            elif not track.done:
                track.lane.queue.append(track)

    def _reset(self, env_id: Any) -> None:
        """Ask for a new episode; one that starts at once takes part in this turn's evaluation."""
        obs = self.base_env.try_reset(env_id)
        if obs is None:
            if self._horizon is not None and math.isfinite(self._horizon):
                raise ValueError(
                    f"environment {env_id!r} cannot be reset, which a horizon of {self._horizon:g} steps requires; "
                    "set the horizon to None"
                )
            return
        if isinstance(obs, str):
            if obs != ASYNC_RESET_RETURN:
                raise EnvContractError(str(env_id), f"try_reset returned {obs!r}")
            return
        episode = self._open_episode(env_id)
        self._actions[env_id] = {}
        tracks = self._offer(episode, obs)
        for lane in {track.policy_id: track.lane for track in tracks}.values():
            lane.take_in()
        for track in tracks:
            track.slot = track.incoming
            track.lane.queue.append(track)

    def _abandon(self, env_id: Any) -> None:
        """An environment broke down: its episode is over, unreported and without a last observation."""
        episode = self._episodes.pop(env_id, None)
        if episode is None:
            return
        builder = episode.batch_builder
        if self._is_packing:
            builder.postprocess(episode)
        else:
            builder.discard()
        self._free_builders.append(builder)
        self._tell_exploration("on_episode_end", episode)
        episode.close()

    def _tell_exploration(self, hook: str, episode: MultiAgentEpisode) -> None:
        for policy in self._policies.values():
            exploration = getattr(policy, "exploration", None)
            if exploration is not None:
                getattr(exploration, hook)(
                    policy=policy,
                    environment=self.base_env,
                    episode=episode,
                    tf_sess=getattr(self._worker, "tf_sess", None),
                )

    def _new_id(self) -> int:
        return self._ids.getrandbits(62)

    def _new_builder(self) -> BatchBuilder:
        return BatchBuilder(
            self._settings.reward_limit, self._on_postprocessed, is_multi_agent=self._policies.is_multi_agent
        )

    def _on_postprocessed(
        self,
        episode: MultiAgentEpisode,
        track: AgentTrack,
        batch: SampleBatch,
        originals: Mapping[Any, tuple[Policy, SampleBatch]],
    ) -> None:
        self._setup.callbacks.on_postprocess_trajectory(
            worker=self._worker,
            episode=episode,
            agent_id=track.agent_id,
            policy_id=track.policy_id,
            policies=self._policies,
            postprocessed_batch=batch,
            original_batches=originals,
        )


def _are_numbers(rewards: Any) -> bool:
    try:
        return all(reward is None or math.isfinite(float(reward)) for reward in rewards.values())
    except (TypeError, ValueError, AttributeError):
        return False
