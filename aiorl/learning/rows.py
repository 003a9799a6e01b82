"""Columns of the rows and sequences that updates train on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec, Dtype
from aiorl.learning.lazy import tf

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic


def model_columns(model: ActorCritic, names: Iterable[str]) -> list[ColumnSpec]:
    """Return specs of the named columns; the model determines some of their shapes and dtypes."""
    distribution = model.distribution
    obs_dtype: Dtype = "uint8" if model.obs_dtype == "uint8" else "float32"
    action_dtype: Dtype = "int32" if distribution.action_dtype.kind in "iu" else "float32"
    action_shape = distribution.action_shape
    specs = [
        ColumnSpec(c.OBS, model.obs_shape, obs_dtype),
        ColumnSpec(c.NEW_OBS, model.obs_shape, obs_dtype),
        ColumnSpec(c.LAST_OBS, model.obs_shape, obs_dtype),
        ColumnSpec(c.ACTIONS, action_shape, action_dtype),
        ColumnSpec(c.PREV_ACTIONS, action_shape, action_dtype),
        ColumnSpec(c.ACTION_DIST_INPUTS, (distribution.num_inputs,)),
        *(ColumnSpec(c.state_in(index), shape) for index, shape in enumerate(model.state_shapes)),
    ]
    by_name = {spec.name: spec for spec in specs}
    return [by_name.get(name, ColumnSpec(name)) for name in names]


def sequence_columns(config: CommonConfig) -> tuple[str, ...]:
    """Return the names of further columns that a recurrent network needs to run over sequences.

    Args:
        config: config with the kind of network; without recurrence, there are no further columns.
    """
    if not config.model.is_recurrent:
        return ()
    return (c.TERMINATEDS, c.TRUNCATEDS, *previous_columns(config), *state_columns(config))


def previous_columns(config: CommonConfig) -> tuple[str, ...]:
    """Return the further columns that a network needs to see previous actions and rewards."""
    return (c.PREV_ACTIONS, c.PREV_REWARDS) if config.model.lstm_use_prev_action_reward else ()


def state_columns(config: CommonConfig, *, cells: int | None = None) -> tuple[str, ...]:
    """Return the names of the recurrent states that a fragment must carry; works without the model.

    Args:
        config: config with the kind of cell.
        cells: number of the network's cells; None = one for policy and value together if they share
            layers, else one each.
    """
    if config.model.custom_state:
        return tuple(c.state_in(index) for index in range(len(config.model.custom_state)))
    if cells is None:
        cells = 1 if config.model.vf_share_layers else 2
    per_cell = 2 * config.model.use_lstm + config.model.use_gru
    return tuple(c.state_in(index) for index in range(cells * per_cell))


def flattened(x: tf.Tensor) -> tf.Tensor:
    """Return a column `x` [T, M, ...] as rows [T * M, ...]."""
    return tf.reshape(x, [x.shape[0] * x.shape[1], *x.shape[2:]])


def by_time(x: tf.Tensor) -> tf.Tensor:
    """Return sequences `x` [M, T, ...] in the order of time, [T, M, ...]."""
    return tf.transpose(x, [1, 0, *range(2, len(x.shape))])
