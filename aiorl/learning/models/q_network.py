"""QNetwork: the value of each action, or a distribution of returns for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from aiorl.acting.distributions import Greedy
from aiorl.config.schema import ModelConfig
from aiorl.data.obs_layout import ObsLayout
from aiorl.learning.losses.q_learning import dueling, expected_q, support
from aiorl.learning.models.actor_critic import ActorCritic, Outputs, Parts
from aiorl.learning.models.branch import choose_layers, make_branch
from aiorl.learning.models.distributions import Categorical
from aiorl.learning.models.networks import dense, layer_variables, make_stack

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
        if config.lstm_use_prev_action_reward:
            self._looks_at = Categorical(distribution)
        num_previous = 0 if self._looks_at is None else self._looks_at.num_features + 1
        branch = make_branch("q", layout, obs_dtype, config, rng, num_previous)
        self._branches = [branch]
        outputs = {"advantage": distribution.num_inputs, "value": 1} if is_dueling else {"q": distribution.num_inputs}
        named = branch.named_variables()
        self._streams = {}
        _, _, activation = choose_layers(layout.shape, obs_dtype, config)
        for name, width in outputs.items():
            hiddens = dueling_hiddens if is_dueling else ()
            stack = make_stack(rng, (branch.num_outputs,), (), hiddens, activation)
            head = dense(rng, stack.num_outputs, width * self._num_atoms, gain=_GAIN)
            self._streams[name] = (stack, head)
            named |= {f"{name}/{inner}": item for inner, item in stack.named_variables().items()}
            named |= layer_variables(f"{name}/head", head)
        self._take_variables(named)

    def q(self, obs: Any, *, weights: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Values [B, A] of observations [B, *obs_shape], or with atoms logits [B, A, Z]; and the mask [B, A] or None.

        Args:
            obs: the observations; their mask forbids nothing in what comes out. The network has no recurrence.
            weights: tensors by name to be used in place of all variables.
        """
        obs, mask = self._without_mask(obs)
        with self._using(weights):
            features, _ = self._branches[0].step(obs, None, [])
            return self._q(features, mask), mask

    def q_sequence(
        self,
        obs: Any,
        state: Sequence[Any],
        previous: Sequence[Any] = (),
        *,
        burn_in: int = 0,
        weights: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Any]:
        """Those of the steps of sequences, by a network with recurrence: [T * B, A], or with atoms [T * B, A, Z].

        Args:
            obs: [T, B, *obs_shape]; no episode ends within a sequence.
            state: recurrent state before the first step, [B, H] for each component.
            previous: actions [T, B] and rewards [T, B] of the steps before, if the network looks back.
            burn_in: steps behind which no gradient flows back through the state.
            weights: tensors by name to be used in place of all variables.
        """
        steps, rows = obs.shape[:2]
        own_obs, mask = self._without_mask(tf.reshape(obs, [-1, *self.obs_shape]))
        resets = tf.zeros([steps, rows], tf.bool)
        looked_at = self._previous(*(previous or (None, None)))
        with self._using(weights):
            features = self._branches[0].sequence(own_obs, looked_at, state, resets, steps, burn_in=burn_in)
            return self._q(features, mask), mask

    def _q(self, features: Any, mask: Any) -> Any:
        given = {name: self._shaped(head(stack(features))) for name, (stack, head) in self._streams.items()}
        if not self._is_dueling:
            return given["q"]
        return dueling(given["value"], given["advantage"], mask, axis=-1 if self.atoms is None else -2)

    def _step(self, obs: Any, mask: Any, previous: Any, parts: Parts) -> Outputs:
        ((branch, state),) = parts
        features, state_out = branch.step(obs, previous, state)
        values = self._q(features, mask)
        if self.atoms is not None:
            values = expected_q(values, self.atoms)
        values = self._masked(values, mask)
        return Outputs(values, tf.reduce_max(values, axis=-1), state_out)

    def _shaped(self, outputs: Any) -> Any:
        return (
            outputs
            if self.atoms is None
            else tf.reshape(outputs, [-1, outputs.shape[-1] // self._num_atoms, self._num_atoms])
        )
