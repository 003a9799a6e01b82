"""Random worlds with their sampler settings, and comparison of the two samplers' results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from random_worlds import (
    ONLY,
    BaseStages,
    ExternalMultiStages,
    ExternalStages,
    GymStage,
    MultiStage,
    NativeStages,
    VectorStages,
)
from traced_parts import EpisodeId, by_number, doubled, shadowed, some_default, thinned

from aiorl.data.sample_batch import MultiAgentBatch

KINDS = {
    "gym": GymStage,
    "multi": MultiStage,
    "vector": VectorStages,
    "native": NativeStages,
    "base": BaseStages,
    "base_multi": BaseStages,
    "external": ExternalStages,
    "external_multi": ExternalMultiStages,
}
POLICIES = {
    "one": (("default_policy",), None),
    "two": (("blue", "red"), by_number),
    "default_and_other": (("default_policy", "other"), some_default),
}
OBSERVATION_FNS = {"doubled": doubled, "shadowed": shadowed, "thinned": thinned}


@dataclass(repr=False)
class Case:
    """A world and its sampler settings, as plain data, so that a failing case can be read and
    stored.
    """

    kind: str
    config: dict[str, Any]
    policies: str = "one"
    recurrent: bool = False
    explores: bool = False
    fragment: int = 4
    complete: bool = False
    horizon: int | None = None
    soft: bool = False
    no_done: bool = False
    clip_rewards: Any = None
    clip_actions: bool = True
    observation_fn: str | None = None
    filter: str = "NoFilter"
    samples: int = 4
    more: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Show only differences from the defaults, with a line for each scene."""
        plays = [
            f"    copy {copy}, episode {number}, scene {at}:"
            f" { {key: value for key, value in shown.items() if value} }"
            for copy, play in enumerate(self.config["plays"])
            for number, episode in enumerate(play)
            for at, shown in enumerate(episode)
        ]
        others = {name: value for name, value in self.config.items() if name != "plays"}
        own = {name: value for name, value in vars(self).items() if name != "config"}
        return "\n".join([f"Case({own}", f"    {others}", *plays, ")"])

    @property
    def num_envs(self) -> int:
        return 1 if self.kind.startswith("external") else len(self.config["plays"])


# --- worlds
# --------------------------------------------------------------------------------------------------


def scene(**parts: Any) -> dict[str, Any]:
    return {
        "obs": [],
        "rewards": {},
        "term": [],
        "trunc": [],
        "end": "",
        "infos": {},
        "taken": {},
        "stuck": [],
        "broken": False,
        **parts,
    }


def random_infos(rnd: Any, observed: list[str]) -> dict[str, Any]:
    infos: dict[str, Any] = {}
    for agent in observed:
        if rnd.random() < 0.3:
            infos[agent] = {"hint": rnd.randrange(4)}
        if rnd.random() < 0.12:
            infos.setdefault(agent, {})["training_enabled"] = False
    return infos


def random_episode(
    rnd: Any,
    agents: list[str],
    *,
    may_take: bool,
    may_break: bool,
    may_be_none: bool,
    lenient: bool,
) -> Any:
    """Draw an episode of one to seven steps; with several agents, they come, leave and end at any
    time.
    """
    length = 1 + rnd.randrange(7)
    seen: set[str] = set()
    dead: set[str] = set()
    episode = []
    is_single = agents == [ONLY]
    for step in range(length + 1):
        is_last = step == length
        live = [agent for agent in agents if agent not in dead]
        observed = [agent for agent in live if is_single or rnd.random() < 0.7]
        if is_last and not (lenient and rnd.random() < 0.5):
            observed = [agent for agent in live if agent in observed or agent in seen]
        if not step and not observed:
            observed = live[:1]
        earning = agents if not is_single else [ONLY]
        rewards = {
            agent: rnd.choice([-2.5, -1.0, 0.25, 0.5, 1.0, 3.0])
            for agent in earning
            if is_single or rnd.random() < 0.6
        }
        if may_be_none and rewards and rnd.random() < 0.1:
            rewards[next(iter(rewards))] = None
        own_flags = {kind: [] for kind in ("term", "trunc")}
        if not is_single and step:
            for agent in observed:
                if rnd.random() < 0.12:
                    own_flags[rnd.choice(["term", "trunc"])].append(agent)
        episode.append(
            scene(
                obs=observed,
                rewards=rewards if step else {},
                **own_flags,
                end=rnd.choice(["terminate", "truncate", "both"]) if is_last else "",
                infos=random_infos(rnd, observed) if step else {},
                taken={
                    agent: rnd.randrange(20)
                    for agent in observed
                    if may_take and rnd.random() < 0.2
                },
                broken=bool(may_break and step and rnd.random() < 0.06),
            )
        )
        seen |= set(observed)
        dead |= {agent for flagged in own_flags.values() for agent in flagged}
    return episode


def random_play(rnd: Any, agents: list[str], **what: bool) -> list[Any]:
    return [random_episode(rnd, agents, **what) for _ in range(1 + rnd.randrange(3))]


@st.composite
def cases(
    draw: Any, kind: str, *, remote: bool = False, may_break: bool = False, stuck: bool = False
) -> Case:
    """Draw a world of a kind.

    Args:
        draw: Hypothesis's.
        kind: one of KINDS.
        remote: True for one copy in its own process.
        may_break: True if copies can break down.
        stuck: True if a mask forbids every action early in the first episode.
    """
    rnd = draw(st.randoms(use_true_random=False))
    is_multi = "multi" in kind
    agents = [f"a{number}" for number in range(1 + rnd.randrange(4))] if is_multi else [ONLY]
    is_base, is_external = kind.startswith("base"), kind.startswith("external")
    no_done = rnd.random() < 0.25
    what = {
        "may_take": is_base or is_external,
        "may_break": is_base or may_break,
        "may_be_none": kind not in ("gym", "vector", "native"),
        "lenient": is_multi and no_done and not is_external,
    }
    copies = 1 if remote else 1 + rnd.randrange(3)
    config: dict[str, Any] = {
        "plays": [random_play(rnd, agents, **what) for _ in range(copies)],
        "obs": (
            "masked"
            if stuck
            else rnd.choice(["box", "box", "matrix", "discrete", "bytes", "dict", "masked"])
        ),
        "action": rnd.choice(["discrete", "box", "tuple"]),
        "resets": ("replaced" if may_break else "later") if remote else "inline",
        "none_is_zero": kind == "multi",
    }
    if config["obs"] == "masked":
        config["action"] = "discrete"  # of the choices that are masked
        if stuck:
            shown = config["plays"][0][0][rnd.randrange(2)]
            shown["stuck"] = shown["obs"]
    case = Case(
        kind,
        config,
        recurrent=rnd.random() < 0.5,
        explores=rnd.random() < 0.5,
        fragment=1 + rnd.randrange(7),
        complete=rnd.random() < 0.4,
        no_done=no_done,
        clip_rewards=rnd.choice([None, False, True, 0.4]),
        clip_actions=rnd.random() < 0.7,
        filter=rnd.choice(["NoFilter", "MeanStdFilter"]),
    )
    if is_multi:
        case.policies = rnd.choice(list(POLICIES))
        if not is_external and rnd.random() < 0.4:
            case.observation_fn = rnd.choice(["shadowed", "thinned"])
    if config["obs"] in ("box", "matrix") and rnd.random() < 0.2:
        case.observation_fn = "doubled"
    if rnd.random() < 0.6:
        case.horizon, case.soft = 1 + rnd.randrange(6), rnd.random() < 0.5
    add_what_its_kind_asks_for(rnd, case)
    if case.observation_fn == "doubled" and config["obs"] not in ("box", "matrix"):
        case.observation_fn = None
    if remote:
        case.more = {"remote_worker_envs": True, "remote_env_batch_wait_ms": 60_000.0}
        case.samples = 2
    return case


def add_what_its_kind_asks_for(rnd: Any, case: Case) -> None:
    config, copies = case.config, len(case.config["plays"])
    match case.kind:
        case "native":
            config["autoreset"] = rnd.choice(["NextStep", "SameStep", "Disabled"])
            config["resets"] = "later" if config["autoreset"] == "NextStep" else "same"
            case.soft = True  # it can only be reset at the end of an episode
            config["obs"] = rnd.choice(["box", "matrix", "bytes", "discrete"])
            config["action"] = rnd.choice(["discrete", "box"])
        case "base" | "base_multi":
            config["resets"] = rnd.choice(["inline", "later", "never"])
            if config["resets"] == "never":
                case.horizon = None
            patterns = [[copy for copy in range(copies) if rnd.random() < 0.6] for _ in range(4)]
            config["ready"] = patterns if rnd.random() < 0.7 else []
        case "external" | "external_multi":
            case.horizon = None
            config["pattern"] = [rnd.randrange(copies) for _ in range(6)] + list(range(copies))
            for play in config["plays"]:
                for episode in play:
                    episode[-1]["end"] = "terminate"
                    for (
                        shown
                    ) in episode:  # a client has only one way to report that an agent is done
                        shown["term"], shown["trunc"] = shown["term"] + shown["trunc"], []
        case _:
            # a VectorEnv shows no environments with limits, and neither do other processes
            if rnd.random() < 0.3 and case.kind != "vector" and config["resets"] == "inline":
                config["limit"] = 6
                case.horizon = case.horizon and min(case.horizon, 6)


# --- comparison
# --------------------------------------------------------------------------------------------------


class Comparison:
    """Equality of the two sides' results; each side chooses its own episode ids."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}

    def episode(self, got: int, expected: int) -> bool:
        return self.ids.setdefault(int(got), int(expected)) == int(expected)

    def check(self, got: Any, expected: Any, where: str) -> None:
        if not self.same(got, expected):
            raise AssertionError(f"{where}:\n     got {got}\nexpected {expected}")

    def same(self, got: Any, expected: Any) -> bool:
        if isinstance(expected, EpisodeId):
            return self.episode(got, expected)
        if got is None or expected is None:
            return got is expected
        if isinstance(expected, dict):
            return got.keys() == expected.keys() and all(
                self.same(got[key], expected[key]) for key in expected
            )
        if isinstance(expected, list | tuple):
            return len(got) == len(expected) and all(map(self.same, got, expected))
        if isinstance(expected, np.ndarray | np.generic | float | int):
            got, expected = np.asarray(got), np.asarray(expected)
            if got.shape != expected.shape:
                return False
            return np.array_equal(got, expected) or bool(
                np.allclose(got, expected, rtol=1e-5, atol=1e-5)
            )
        return type(got) is type(expected) and got == expected

    def batches(self, got: Any, expected: Any, is_multi_agent: bool, where: str) -> None:
        assert isinstance(got, MultiAgentBatch) == is_multi_agent, where
        steps = expected.env_steps
        rows = sum(len(columns["t"]) for columns in expected.by_policy.values())
        counts = (got.env_steps, got.total(), got.count)
        self.check(
            counts,
            (steps, rows, steps if is_multi_agent else rows),
            f"{where}, env steps, agent steps, count",
        )
        got = got.policy_batches if is_multi_agent else {"default_policy": got}
        assert got.keys() == expected.by_policy.keys(), where
        for policy_id, columns in expected.by_policy.items():
            assert set(got[policy_id]) == set(columns), where
            for name, column in columns.items():
                self.column(got[policy_id][name], column, name, f"{where}, {policy_id}, {name}")

    def column(self, got: np.ndarray, expected: np.ndarray, name: str, where: str) -> None:
        assert got.dtype == expected.dtype, f"{where}: {got.dtype}, expected {expected.dtype}"
        if name == "eps_id":
            got = got.tolist()
            expected = [EpisodeId(number) for number in expected]
        elif name == "infos":
            got, expected = list(got), list(expected)
        self.check(got, expected, where)
        if name == "eps_id":
            assert len(set(self.ids.values())) == len(self.ids), (
                f"{where}: two episodes have one id"
            )
