"""Experience that is kept in a replay and drawn many times."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aiorl.acting.exploration import Schedule
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.algorithm import Feed, LeasePlan, Update, want_stored_experience
from aiorl.learning.drawn_batches import ReplayFeed
from aiorl.learning.keys.replay import ReplayKeys
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.spec import ReplaySpec, check_fits
from aiorl.learning.rows import model_columns

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_log = logging.getLogger(__name__)

_MANY = 0.75
"""Share of rows with all n steps below which a warning is logged."""


class MakeReplay(Protocol):
    """Creates a replay."""

    def __call__(self, spec: ReplaySpec, *, seed: int) -> Replay:
        """Create a replay.

        Args:
            spec: size and columns of the replay.
            seed: seed of the random draws.

        Raises:
            ConfigError: there is not enough room.
        """


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Experience in a replay; see `aiorl.learning.algorithm.Experience`.

    Attributes:
        config: sizes of the replay and its minibatches.
        sample_plan: columns of a fragment.
        make_replay: creates the replay.
    """

    config: ReplayKeys
    sample_plan: SamplePlan
    make_replay: MakeReplay = Replay
    sends_gradients: bool = False

    def lease_plan(self) -> LeasePlan:
        """Return a plan with leases that are kept topped up, up to a limit; experience of any age
        is used.

        Raises:
            ConfigError: there is no stored experience and the algorithm learns from nothing else.
        """
        config = self.config
        if config.is_offline:
            want_stored_experience(config)
        return LeasePlan(
            "streaming",
            config.fragments_per_update,
            outstanding_per_worker=config.outstanding_fragments_per_worker,
            max_under_way=config.max_fragments_under_way(),
            publish_every=config.broadcast_updates,
            publish_interval_s=config.broadcast_interval_ms / 1000,
        )

    def feed(self, model: ActorCritic, update: Update, rng: np.random.Generator) -> Feed:
        """See `Experience`."""
        spec = replay_spec(self.config, model)
        replay = self.make_replay(spec, seed=int(rng.integers(1 << 62)))
        return ReplayFeed(
            self.config, self.sample_plan, model, replay=replay, loop=update.loop, rng=rng
        )

    @staticmethod
    def check_room(policies: Sequence[tuple[Any, ActorCritic]]) -> None:
        """Check that there is room for the replays of all policies together, and log how much they
        take; see `Experience`.
        """
        replays = [
            (experience.config, model, replay_spec(experience.config, model))
            for experience, model in policies
            if isinstance(experience, Replayed)
        ]
        check_fits([spec for *_, spec in replays])
        for config, model, spec in replays:
            _log_size(config, spec)
            _warn_of_short_fragments(config, model)
        if replays:  # the run has one lease plan, with the tightest limit
            configs = [config for config, *_ in replays]
            tightest = min(configs, key=lambda config: config.max_fragments_under_way())
            _warn_of_waiting_workers(tightest)


def replayed(
    config: ReplayKeys,
    *,
    columns: Sequence[str] = (),
    postprocess: str = "n_step",
    make_replay: MakeReplay = Replay,
) -> Replayed:
    """Return experience in a replay, as rows with the discounted sum of up to n rewards and the
    observation that followed.

    Columns of a minibatch are `obs`, `actions`, `n_step_returns`, `discounts`, `new_obs` (the
    observation after the steps whose rewards are summed) and the importance `weights`.

    Args:
        config: config of the algorithm, which sets n.
        columns: further columns that workers send.
        postprocess: what makes the n-step returns, see `aiorl.acting.postprocess`.
        make_replay: creates the replay, for example of a subclass that stores or draws differently.
    """
    names = [c.OBS, c.ACTIONS, c.NEW_OBS, c.N_STEP_RETURNS, c.DISCOUNTS]
    if config.n_step > 1:
        names.append(c.N_STEPS)
    if config.reads_only_stored:
        names.append(c.PIECE)
    plan = SamplePlan(
        postprocess,
        {"gamma": config.gamma, "n": config.n_step},
        (*names, *columns),
        raw_obs=config.is_filtered,
    )
    return Replayed(config, plan, make_replay)


def replay_knobs(config: ReplayKeys) -> dict[str, Schedule]:
    """Return the knob "lr" of a `config`."""
    return {"lr": Schedule.of(config.lr, config.lr_schedule, key="lr_schedule")}


def replay_spec(config: ReplayKeys, model: ActorCritic) -> ReplaySpec:
    """Return the layout of a policy's replay; a whole image is kept once for the rows before and
    after it.

    Sequences are kept with the observations that they share.
    """
    sequences = config.sequences(model)
    priorities = None
    made_with = ["gamma", "n_step", "clip_rewards"]
    if config.prioritized_replay:
        priorities = Prioritised(config.prioritized_replay_alpha, config.prioritized_replay_eps)
        made_with += ["prioritized_replay_alpha", "prioritized_replay_eps"]
    stack = 0
    if sequences is not None:
        columns = sequences.columns
        unit = f"sequences ({config.entry_steps} trained steps each)"
    else:
        names = (c.OBS, c.NEW_OBS, c.ACTIONS, c.N_STEP_RETURNS, c.DISCOUNTS)
        columns = tuple(model_columns(model, names))
        unit = "rows"
        if model.obs_dtype == "uint8" and len(model.obs_shape) == 3:
            stack = model.layout.num_frames
    return ReplaySpec(
        columns,
        capacity=max(1, config.replay_capacity // config.entry_steps),
        priorities=priorities,
        stack=stack,
        spill_dir=config.replay_spill_dir,
        unit=unit,
        made_with={name: getattr(config, name) for name in made_with},
    )


def _log_size(config: ReplayKeys, spec: ReplaySpec) -> None:
    saved = 0
    if config.checkpoint_replay:
        saved = spec.saved_bytes * (config.checkpoint_keep + 1)
    _log.info(
        "the replay has %(spec)s, %(size).3g MB in all; checkpoints take up to %(saved).3g MB of"
        " disk for it, with the %(keep)d that are kept (see checkpoint_replay and checkpoint_keep)",
        {
            "spec": spec,
            "size": spec.bytes_needed / 1e6,
            "saved": saved / 1e6,
            "keep": config.checkpoint_keep,
        },
    )


def _warn_of_short_fragments(config: ReplayKeys, model: ActorCritic) -> None:
    share = 1 - (config.n_step - 1) / config.cut_length
    if share < _MANY and config.sequences(model) is None:
        _log.warning(
            "n_step is %(n_step)d, but fragments end after %(length)d steps, so only %(percent).0f"
            " %% of the rows have all n steps. Set rollout_fragment_length to %(enough)d or more",
            {
                "n_step": config.n_step,
                "length": config.rollout_fragment_length,
                "percent": 100 * share,
                "enough": 4 * config.n_step,
            },
        )


def _warn_of_waiting_workers(config: ReplayKeys) -> None:
    most_at_once = config.max_fragments_under_way()
    if config.num_workers > most_at_once:
        _log.warning(
            "no more than %(most)d fragments are under way at a time, because max_env_steps_ahead"
            " is %(steps_ahead)d and a fragment has %(steps)d env steps: some of the %(workers)d"
            " workers will wait. Raise it, or set fewer workers",
            {
                "most": most_at_once,
                "steps_ahead": config.max_env_steps_ahead,
                "steps": config.fragment_steps,
                "workers": config.num_workers,
            },
        )
