"""Graphs of the algorithms' tests are not optimised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf


@pytest.fixture(scope="module", autouse=True)
def unoptimised_graphs() -> Iterator[None]:
    """Graphs run once or twice here: to optimise them takes longer than they do."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
