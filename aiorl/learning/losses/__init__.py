"""Losses and returns as pure functions of tensors: no state, no config, no model.

Shapes: B rows; sequences are time-major ``[T, B, ...]``. Every mean is taken over the valid rows only. Each
function works inside one ``tf.function(jit_compile=True)`` with static shapes, and eagerly.
"""
