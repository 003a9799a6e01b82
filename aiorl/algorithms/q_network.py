"""QNetwork: the value of each action, or a distribution of returns for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from aiorl.config.parts import ModelConfig
from aiorl.data.obs_layout import ObsLayout
from aiorl.losses.categorical_q import expected_q, support
from aiorl.losses.q_learning import dueling
from aiorl.models.actor_critic import ActorCritic, Parts
from aiorl.models.branch import make_branch
from aiorl.models.networks import dense, layer_variables, make_stack
from aiorl.policy.distributions import Greedy

__all__ = ["QNetwork"]

_GAIN = 0.1


class QNetwork(ActorCritic):
    """A network whose inputs of the action distribution are action values, and whose value is the largest of them.

    Attributes:
        atoms: [Z] float32, the returns that distributions are over; None without distributions.
    """

    def __init__(
        self,
        layout: ObsLayout,
        obs_dtype: str,
        distribution: Greedy,
        config: ModelConfig,
        rng: np.random.Generator,
        *,
        is_dueling: bool = False,
        dueling_hiddens: Sequence[int] = (),
        atoms: tuple[float, float, int] | None = None,
    ) -> None:
        """Build it.

        Args:
            layout: how an observation lies in its array.
            obs_dtype: "float32" or "uint8".
            distribution: of the actions.
            config: settings of the hidden layers.
            rng: of the initial weights.
            is_dueling: streams for the value and for the advantages.
            dueling_hiddens: widths of the hidden layers of each stream, behind the shared ones.
            atoms: least return, largest return and number of atoms; None = expected returns only.
        """
        self._describe(layout, obs_dtype, distribution, config)
        self._is_dueling = is_dueling
        self._num_atoms = 1 if atoms is None else atoms[2]
        self.atoms = None if atoms is None else support(*atoms).numpy()
        branch = make_branch("q", layout.shape, obs_dtype, config, rng)
        self._branches = [branch]
        outputs = {"advantage": distribution.num_inputs, "value": 1} if is_dueling else {"q": distribution.num_inputs}
        named = branch.named_variables()
        self._streams = {}
        for name, width in outputs.items():
            hiddens = dueling_hiddens if is_dueling else ()
            stack = make_stack(rng, (branch.num_outputs,), (), hiddens, config.fcnet_activation)
            head = dense(rng, stack.num_outputs, width * self._num_atoms, gain=_GAIN)
            self._streams[name] = (stack, head)
            named |= {f"{name}/{inner}": item for inner, item in stack.named_variables().items()}
            named |= layer_variables(f"{name}/head", head)
        self._take_variables(named)

    def q(self, obs: Any, *, weights: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Values [B, A] of observations [B, *obs_shape], or with atoms logits [B, A, Z]; and the mask [B, A] or None.

        Args:
            obs: the observations; their mask forbids nothing in what comes out.
            weights: tensors by name to be used in place of all variables.
        """
        obs, mask = self._without_mask(obs)
        with self._using(weights):
            return self._q(obs, mask), mask

    def _q(self, obs: Any, mask: Any) -> Any:
        features, _ = self._branches[0].step(obs, None, [])
        given = {name: self._shaped(head(stack(features))) for name, (stack, head) in self._streams.items()}
        if not self._is_dueling:
            return given["q"]
        return dueling(given["value"], given["advantage"], mask, axis=-1 if self.atoms is None else -2)

    def _step(self, obs: Any, mask: Any, previous: Any, parts: Parts) -> tuple[Any, Any, list[Any]]:
        values = self._q(obs, mask)
        if self.atoms is not None:
            values = expected_q(values, self.atoms)
        values = self._masked(values, mask)
        return values, tf.reduce_max(values, axis=-1), []

    def _shaped(self, outputs: Any) -> Any:
        return (
            outputs
            if self.atoms is None
            else tf.reshape(outputs, [-1, outputs.shape[-1] // self._num_atoms, self._num_atoms])
        )
