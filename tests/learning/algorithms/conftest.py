"""Fixtures for the algorithms' tests; graphs are not optimised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf


@pytest.fixture(scope="module", autouse=True)
def unoptimised_graphs() -> Iterator[None]:
    """Turn off graph optimisation: here graphs run once or twice, and optimising them takes
    longer.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
