"""Health of policies: whether one has died or is dying, and the likely cause, from the results of a
run.

A discrete policy whose entropy has vanished explores no more. That is how a solved task can end,
and how a learning rate that is too high kills a policy in a few updates. The return shows which it
is: a dead policy has won little over the first episodes, or has lost most of what it had won.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiorl.config.parts import SamplePart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.run.ports import Tell

LEAST_ENTROPY = 1e-3
"""Share of the largest entropy below which a discrete policy explores no more."""
MOST_KL = 1.0
"""Divergence of one update, in nats, above which it counts as destructive."""
_NUM_RESULTS = 3
"""Results in a row after which a policy without entropy or gain counts as dead."""
_LEAST_GAIN = 0.5
"""Share of the largest gain in return below which a policy counts as fallen back."""
_NUM_EPISODES = 20
"""Episodes after which a mean return is judged."""
_SHOWN_AGAIN = 20
"""Results that repeat the warning of a destructive update."""
_MANY_STEPS = 3000
"""Env steps per environment after which a quarter of the environments should have finished an
episode."""


@dataclass(slots=True)
class _Course:
    """Course of a policy.

    Attributes:
        num_without_entropy: results in a row without entropy.
        num_until_calm: results that still repeat the warning of an update.
        newest_kl: divergence of that update.
    """

    num_without_entropy: int = 0
    num_until_calm: int = 0
    newest_kl: float = 0.0


class Health:
    """Looks at each result of a run, and warns the user once of each trouble.

    Attributes:
        knows_start: False if the policies began with weights of another run, or in a session whose
            returns are unknown, so that their success can't be judged.
    """

    def __init__(self, tell: Tell, courses: dict[str, list[float]], sample: SamplePart) -> None:
        """Begin without a result.

        Args:
            tell: called with (text, logging level) of news for the user.
            courses: name of each learner -> its first and best mean return, which are continued
                and saved with the run.
            sample: number of environments, and whether their episodes are sure to end.
        """
        self.knows_start = True
        self._tell = tell
        self._returns = courses
        self._courses: dict[str, _Course] = {}
        self._troubles: set[tuple[str, str]] = set()
        self._num_skipped = 0.0
        self._num_envs = sample.num_envs
        self._may_ask_for_horizon = not sample.has_horizon

    def look(
        self, result: Mapping[str, Any], action_spaces: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """Return the health for a result.

        Args:
            result: the result.
            action_spaces: name of each learner -> the action spaces of its policies, as plain data.

        Returns:
            ``warnings``, sentences; ``num_warnings``; and ``entropy_share``, the entropy of a
            discrete policy as a share of the largest one, by policy if there are several.
        """
        health: dict[str, Any] = {}
        warnings: list[str] = []
        metrics = result["learner"]
        # several policies have their names in front of their metrics, also the default one
        is_single = [*action_spaces] == [DEFAULT_POLICY_ID] and not any(
            name.startswith(f"{DEFAULT_POLICY_ID}/") for name in metrics
        )
        for learner, spaces in action_spaces.items():
            prefix = "" if is_single else f"{learner}/"
            name = "The policy" if is_single else f"Policy {learner!r:.100}"
            course = self._courses.setdefault(learner, _Course())
            lr = metrics.get(f"{prefix}cur_lr", math.nan)
            mean = _mean_return(result, "" if is_single else learner)
            self._note_return(learner, mean)
            most = max_entropy(spaces)
            entropy = metrics.get(f"{prefix}entropy", math.nan)
            share = math.nan
            if most and math.isfinite(entropy):
                share = health[f"{prefix}entropy_share"] = entropy / most
            if self._has_no_entropy(course, share) and self._has_no_success(learner, mean):
                text = (
                    f"{name} has died: its entropy is {entropy:.2g} nats of at most {most:.2g}, so"
                    f" it always takes the same action in a state, and its mean return of {mean:.4g}"
                    f" is no success. The usual cause is a learning rate"
                    f" that is too high: start again with a lower lr (now {lr:.3g}), or a higher"
                    " entropy_coeff"
                )
                warnings.append(text)
                self._warn_once(learner, "entropy", text)
            if self._is_destroyed(course, metrics.get(f"{prefix}kl", math.nan)):
                text = (
                    f"{name} has changed by a KL divergence of {course.newest_kl:.3g} in one update"
                    " (usual: below 0.2), which can destroy it. The usual cause is a learning rate"
                    f" that is too high: lower lr (now {lr:.3g})"
                )
                warnings.append(text)
                self._warn_once(learner, "kl", text)
        warnings += self._skipped_updates(result)
        return {**health, "num_warnings": len(warnings), "warnings": warnings}

    def look_at_episodes(self, env_steps: int, num_episodes: int) -> None:
        """Warn once if hardly any episode ends and no horizon is set.

        Args:
            env_steps: env steps sampled so far.
            num_episodes: episodes that have finished so far.
        """
        if not self._may_ask_for_horizon or env_steps < _MANY_STEPS * self._num_envs:
            return
        self._may_ask_for_horizon = False
        if 4 * num_episodes < self._num_envs:
            self._tell(
                f"only {num_episodes} episodes ended in {env_steps:,} env steps. If episodes may"
                " never end, set horizon, the number of steps after which they are cut:"
                " --horizon 1000",
                logging.WARNING,
            )

    def _has_no_entropy(self, course: _Course, share: float) -> bool:
        """Return whether a policy has had no entropy for some results."""
        course.num_without_entropy += 1
        if not share < LEAST_ENTROPY:
            course.num_without_entropy = 0
        return course.num_without_entropy >= _NUM_RESULTS

    def _has_no_success(self, learner: str, mean: float) -> bool:
        """Return whether a policy has won little over its first episodes, or lost it again."""
        first, best = self._returns.get(learner, (math.nan, math.nan))
        return mean <= first + _LEAST_GAIN * (best - first)

    def _note_return(self, learner: str, mean: float) -> None:
        if not self.knows_start or not math.isfinite(mean):
            return
        returns = self._returns.setdefault(learner, [mean, mean])
        returns[1] = max(returns[1], mean)

    def _is_destroyed(self, course: _Course, kl: float) -> bool:
        """Return whether one of the newest updates has changed a policy too much."""
        course.num_until_calm = max(0, course.num_until_calm - 1)
        if kl > MOST_KL:
            course.newest_kl = kl
            course.num_until_calm = _SHOWN_AGAIN
        return course.num_until_calm > 0

    def _skipped_updates(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence if updates were skipped since the last result; the user has been warned
        of each.
        """
        num_skipped = result["updates_skipped"] - self._num_skipped
        self._num_skipped = result["updates_skipped"]
        if num_skipped > 0:
            yield (
                f"{num_skipped:.0f} of the newest {result['updates_this_iter']} updates were"
                " skipped, because the loss or gradients were not finite. Lower lr, set grad_clip,"
                " or look for rewards and observations without bounds"
            )

    def _warn_once(self, learner: str, trouble: str, text: str) -> None:
        if (learner, trouble) not in self._troubles:
            self._troubles.add((learner, trouble))
            self._tell(text, logging.WARNING)


def max_entropy(action_spaces: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the largest entropy in nats that a policy for one of these spaces can have, the mean
    over the spaces; None if one is continuous.

    Args:
        action_spaces: spaces as plain data, from `aiorl.data.spaces.space_to_dict`.
    """
    entropies = [_max_entropy(space) for space in action_spaces]
    if not entropies or None in entropies:
        return None
    return sum(entropy or 0.0 for entropy in entropies) / len(entropies)


def _max_entropy(space: Mapping[str, Any]) -> float | None:
    match space["kind"]:
        case "Discrete":
            return math.log(space["n"])
        case "MultiDiscrete":
            return sum(math.log(n) for n in np.ravel(space["nvec"]).tolist())
        case "MultiBinary":
            return math.log(2) * float(np.prod(space["n"]))
        case "Tuple":
            parts = space["spaces"]
        case "Dict":
            parts = [part for _, part in space["spaces"]]
        case _:
            return None
    entropies = [_max_entropy(part) for part in parts]
    if None in entropies:
        return None
    return sum(entropy or 0.0 for entropy in entropies)


def _mean_return(result: Mapping[str, Any], policy_id: str) -> float:
    """Return the mean return of the last episodes of a policy, or of all; NaN before there are
    enough.
    """
    if result["episodes_total"] < _NUM_EPISODES:
        return math.nan
    if policy_id:
        return float(result["policy_reward_mean"].get(policy_id, math.nan))
    return float(result["episode_reward_mean_last_100"])
