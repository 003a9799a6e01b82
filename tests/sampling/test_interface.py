from __future__ import annotations

import socket

import pytest

from aiorl.sampling.interface import EvaluatorInterface


class Half(EvaluatorInterface):
    def sample(self):
        return None


class Whole(Half):
    def learn_on_batch(self, samples):
        return {}

    compute_gradients = apply_gradients = get_weights = set_weights = learn_on_batch


def test_an_evaluator_must_implement_the_whole_interface():
    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_the_host_is_named_and_functions_are_applied():
    """SPEC 2.4: apply."""
    evaluator = Whole()
    assert evaluator.get_host() == socket.gethostname()
    assert evaluator.apply(lambda given, *more, **named: (given, more, named), 1, x=2) == (evaluator, (1,), {"x": 2})
