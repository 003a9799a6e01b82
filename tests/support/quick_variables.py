"""Variables of TensorFlow without their names in the runtime, which makes them in a third of the
time.

TensorFlow compiles the operation that makes a variable for each combination of name, shape and
dtype. Names of layers are new in each network, so it would compile one for every variable. Only the
runtime's errors show these names; variables still have them.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Use such variables in this process; loads TensorFlow."""
    from tensorflow.python.ops import gen_resource_variable_ops as operations

    make = operations.var_handle_op

    def make_quickly(**options: Any) -> Any:
        return make(**{**options, "debug_name": ""})

    operations.var_handle_op = make_quickly
