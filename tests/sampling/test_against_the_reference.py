"""Rows, episodes, metrics and hooks equal those of the plain sampler in `reference_sampler`, for
all environments.

Hypothesis draws worlds. Each is played twice: by a RolloutWorker or a worker process's sampler, and
by the reference.

Each ``sample()`` is compared: type, environment steps and every column of the batch, and metrics
with custom metrics and history. In the end, the events of each environment are compared one by one:
the arguments of environments, policies, exploration and callbacks, the environments of each
evaluation, and the filters' statistics. Within one turn, environments can come in any order, but
outputs cannot.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from random_cases import KINDS, OBSERVATION_FNS, POLICIES, Case, Comparison, cases
from random_worlds import ACTION_SPACES, OBS_SPACES, TAPES, BaseStages, ExternalWorld, Tape, World
from reference_sampler import (
    ContractBroken,
    NothingComes,
    NothingToChoose,
    ReferenceSampler,
    Settings,
)
from traced_parts import TracedPolicy, traced_callbacks

from aiorl.acting.filters import make_filter
from aiorl.acting.policy_map import PolicyMap
from aiorl.acting.preprocessors import make_preprocessor
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.config.worker import WorkerConfig
from aiorl.env.registry import EnvContext
from aiorl.errors import BadObservationError, EnvContractError
from aiorl.sampling.sampler import SyncSampler
from aiorl.sampling.settings import SamplerSetup


def tape_of(case: Case, side: str) -> tuple[Tape, dict[str, Any]]:
    tape = TAPES[side] = Tape()
    return tape, {**case.config, "tape": side}


def policy_specs(case: Case, side: str) -> dict[str, Any]:
    ids, _ = POLICIES[case.policies]
    spaces = OBS_SPACES[case.config["obs"]], ACTION_SPACES[case.config["action"]]
    config = {
        "tape": side,
        "action": case.config["action"],
        "recurrent": case.recurrent,
        "explores": case.explores,
    }
    return {policy_id: (TracedPolicy, *spaces, {**config, "name": policy_id}) for policy_id in ids}


def mapping_of(case: Case, tape: Tape) -> Any:
    _, mapping = POLICIES[case.policies]

    def ask(agent_id):
        tape.asked.append(agent_id)
        return "default_policy" if mapping is None else mapping(agent_id)

    return ask


def make_worker(case: Case, tape: Tape, config: dict[str, Any]) -> RolloutWorker:
    return RolloutWorker(
        env_creator=KINDS[case.kind],
        policy=policy_specs(case, "product"),
        policy_mapping_fn=mapping_of(case, tape),
        rollout_fragment_length=case.fragment,
        batch_mode="complete_episodes" if case.complete else "truncate_episodes",
        episode_horizon=case.horizon,
        num_envs=case.num_envs,
        observation_fn=OBSERVATION_FNS.get(case.observation_fn),
        observation_filter=case.filter,
        clip_rewards=case.clip_rewards,
        clip_actions=case.clip_actions,
        env_config=config,
        callbacks=traced_callbacks(tape),
        soft_horizon=case.soft,
        no_done_at_end=case.no_done,
        **case.more,
    )


def make_reference(
    case: Case, tape: Tape, config: dict[str, Any], side: str = "reference"
) -> ReferenceSampler:
    spaces = OBS_SPACES[case.config["obs"]], ACTION_SPACES[case.config["action"]]
    preprocessor = make_preprocessor(spaces[0], action_space=spaces[1])
    specs = policy_specs(case, side)
    policies = {
        policy_id: kind(preprocessor.observation_space, action_space, policy_config)
        for policy_id, (kind, _, action_space, policy_config) in specs.items()
    }
    if case.kind.startswith("external"):
        env = ExternalWorld(config)
    else:
        env = World(config, config["resets"], config.get("ready"))
    return ReferenceSampler(
        env,
        policies,
        mapping_of(case, tape),
        dict.fromkeys(policies, preprocessor),
        {
            policy_id: make_filter(case.filter, preprocessor.shape, preprocessor.layout.num_mask)
            for policy_id in policies
        },
        Settings(
            fragment_length=math.inf if case.complete else case.fragment,
            pack=not case.complete,
            horizon=case.horizon,
            soft_horizon=case.soft,
            no_done_at_end=case.no_done,
            clip_rewards=float(case.clip_rewards or 0.0),
            clip_actions=case.clip_actions,
            observation_fn=OBSERVATION_FNS.get(case.observation_fn),
            num_envs=case.num_envs,
            target=case.fragment * case.num_envs,
        ),
        traced_callbacks(tape)(),
    )


def run(case: Case) -> None:
    """Play a case with a worker and compare; events of environments in other processes are not
    seen.
    """
    got, config = tape_of(case, "product")
    expected, reference_config = tape_of(case, "reference")
    if "remote_worker_envs" in case.more:
        config = reference_config = case.config
    reference = make_reference(case, expected, reference_config)
    with make_worker(case, got, config) as worker:
        compare(case, worker, reference, reference.sample, (got, expected))


class LoneSampler:
    """SyncSampler with the attributes of a worker that the comparison needs."""

    def __init__(self, setup: SamplerSetup) -> None:
        self.sampler, self.policies, self.filters = (
            SyncSampler(setup),
            setup.policy_map,
            setup.filters,
        )

    def sample(self) -> Any:
        return self.sampler.get_data()

    def get_metrics(self) -> Any:
        return self.sampler.get_metrics()

    def set_weights(self, weights: Any, global_vars: Any) -> None:
        for policy_id, policy in self.policies.items():
            policy.set_weights(weights[policy_id])
            policy.on_global_var_update(global_vars)


def run_sampler(drawn: tuple[Case, int, bool]) -> None:
    """Play a case with a separate sampler and compare."""
    case, length, pack = drawn
    got, config = tape_of(case, "product")
    expected, reference_config = tape_of(case, "reference")
    reference = make_reference(case, expected, reference_config)
    reference.settings.fragment_length, reference.settings.pack = length if pack else math.inf, pack
    of_product = make_reference(case, got, config, "product")  # for its parts
    sampler = LoneSampler(
        SamplerSetup(
            worker=None,
            base_env=BaseStages(EnvContext(config)),
            policy_map=PolicyMap(of_product.policies, of_product.mapping),
            preprocessors=of_product.preprocessors,
            filters=of_product.filters,
            callbacks=of_product.callbacks,
            settings=WorkerConfig(
                rollout_fragment_length=length,
                batch_mode="truncate_episodes" if pack else "complete_episodes",
                clip_rewards=case.clip_rewards,
                horizon=case.horizon,
                clip_actions=case.clip_actions,
                soft_horizon=case.soft,
                no_done_at_end=case.no_done,
            ),
            observation_fn=OBSERVATION_FNS.get(case.observation_fn),
        )
    )
    compare(case, sampler, reference, reference.get_data, (got, expected))


def run_ahead(case: Case) -> None:
    """Play a case with a sampler in its own thread, with fixed weights, and compare its outputs."""
    case.more = {"sample_async": True}
    case.filter = "ConcurrentMeanStdFilter" if case.filter == "MeanStdFilter" else case.filter
    got, config = tape_of(case, "product")
    expected, reference_config = tape_of(case, "reference")
    reference = make_reference(case, expected, reference_config)
    same = Comparison()
    with make_worker(case, got, config) as worker:
        for number in range(case.samples):
            try:
                batch = reference.sample()
            except NothingComes:
                return
            except ContractBroken as error:
                kind = (
                    BadObservationError if isinstance(error, NothingToChoose) else EnvContractError
                )
                with pytest.raises(kind):
                    worker.sample()
                return
            same.batches(worker.sample(), batch, reference.is_multi_agent, f"sample {number}")
        metrics = [
            [[*found[:4], found.hist_data] for found in side.get_metrics()]
            for side in (worker, reference)
        ]
    same.check(metrics[0][: len(metrics[1])], metrics[1], "metrics")
    del got.asked[len(expected.asked) :]
    for policy_id, calls in got.calls.items():
        del calls[len(expected.calls[policy_id]) :]
    compare_tapes(same, got, expected, goes_on=True)


def compare(
    case: Case,
    product: Any,
    reference: ReferenceSampler,
    expected_batch: Any,
    tapes: tuple[Tape, Tape],
) -> None:
    same = Comparison()
    for number in range(case.samples):
        where = f"sample {number}"
        try:
            batch = expected_batch()
        except NothingComes:
            return
        except NothingToChoose:
            with pytest.raises(BadObservationError):
                product.sample()
            return
        except ContractBroken:
            with pytest.raises(EnvContractError):
                product.sample()
            return
        same.batches(product.sample(), batch, reference.is_multi_agent, where)
        metrics = [
            [[*found[:4], found.hist_data] for found in side.get_metrics()]
            for side in (product, reference)
        ]
        same.check(*metrics, f"{where}, metrics")
        weights = {
            policy_id: {"w": np.full(1, number + 1.0, np.float32)}
            for policy_id in reference.policies
        }
        product.set_weights(weights, {"timestep": 10 * number})
        for policy_id, policy in reference.policies.items():
            policy.set_weights(weights[policy_id])
            policy.on_global_var_update({"timestep": 10 * number})
    # clients play in their own threads
    compare_tapes(same, *tapes, goes_on=case.kind.startswith("external"))
    for policy_id, found in product.filters.items():
        same.check(
            dict(found.state()), reference.filters[policy_id].state(), f"filter of {policy_id}"
        )


def compare_tapes(same: Comparison, got: Tape, expected: Tape, *, goes_on: bool) -> None:
    """Compare events; ``goes_on``: one side can be ahead of the sampled steps."""
    for env_id in {**expected.events, **got.events}:
        mine, theirs = by_turn(got.events[env_id]), by_turn(expected.events[env_id])
        if goes_on:
            mine = mine[: len(theirs)]
        for number, pair in enumerate(itertools.zip_longest(mine, theirs)):
            if not same.same(*pair):
                where = (
                    f"event {number} of environment {env_id}, after"
                    f" {mine[max(0, number - 6) : number]}"
                )
                raise AssertionError(f"{where}:\n     got {pair[0]}\nexpected {pair[1]}")
    same.check(got.asked, expected.asked, "agents that the mapping function was asked about")
    same.check(dict(got.calls), dict(expected.calls), "environments of each evaluation")


def by_turn(events: list[Any]) -> list[Any]:
    """Return events without the order of evaluations of several policies in one turn."""
    result: list[Any] = []
    for is_act, turn in itertools.groupby(events, key=lambda event: event[0] == "act"):
        group = list(turn)
        result += sorted(group) if is_act else group
    return result


PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
FAST = settings(max_examples=7, phases=PHASES, suppress_health_check=list(HealthCheck))


def play(strategy: Any, function: Any, profile: settings = FAST) -> None:
    profile(given(strategy)(function))()


@pytest.mark.rest_slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_samples_like_the_reference(kind: str) -> None:
    """R84, R85, R86, R87, R88, R89, R90, R91, R92, R95, R96, R97, R98, R99, R100, R101, R103, R104,
    R105, R107, R108, R110, R111, R112, R114, R117, R118, R119, R120, R121, R122, R126, R127, R129,
    R130, R131, R132, R133, R134.
    """
    play(cases(kind), run)


@pytest.mark.parametrize("kind", ["base", "base_multi"])
def test_a_separate_sampler_packs_and_cuts_like_the_reference(kind: str) -> None:
    play(st.tuples(cases(kind), st.sampled_from([1, 3, 5]), st.booleans()), run_sampler)


@pytest.mark.parametrize("kind", ["gym", "multi"])
def test_environments_in_other_processes_are_sampled_like_the_reference(kind: str) -> None:
    play(cases(kind, remote=True), run, settings(FAST, max_examples=2, phases=[Phase.generate]))


@pytest.mark.rest_slow
@pytest.mark.parametrize("kind", ["gym", "multi", "vector", "base_multi"])
def test_a_mask_without_any_action_ends_sampling_where_the_reference_does(kind: str) -> None:
    play(cases(kind, stuck=True), run, settings(FAST, max_examples=6))


# of worlds that end by an error
@pytest.mark.rest_slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["gym", "multi", "base_multi"])
def test_an_asynchronous_sampler_samples_like_the_reference(kind: str) -> None:
    play(cases(kind), run_ahead, settings(FAST, max_examples=3))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("function", "kind", "is_remote"),
    [
        *((run, kind, False) for kind in KINDS),
        *((run_ahead, kind, False) for kind in KINDS if not kind.startswith("external")),
        (run, "gym", True),
        (run, "multi", True),
    ],
)
def test_all_sample_like_the_reference_in_very_many_worlds(
    function: Any, kind: str, is_remote: bool
) -> None:
    profile = (
        settings(FAST, max_examples=12, phases=[Phase.generate])
        if is_remote
        else settings(FAST, max_examples=60)
    )
    play(cases(kind, remote=is_remote), function, profile)
