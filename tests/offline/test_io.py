from __future__ import annotations

import numpy as np
import pytest

from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError
from aiorl.offline.io import IOContext, SamplerInput, sampler_input


def rows(*numbers):
    return SampleBatch(rewards=np.array(numbers, np.float32))


class FakeSampler:
    def __init__(self, data, extra=()):
        self.data, self.extra = list(data), list(extra)

    def get_data(self):
        return self.data.pop(0)

    def get_extra_batches(self):
        extra, self.extra = self.extra, []
        return extra


def test_sampler_input_returns_the_samplers_batches_with_the_extra_ones_at_the_end():
    """R67."""
    reader = SamplerInput(FakeSampler([rows(1, 2), rows(5)], [rows(3), rows(4)]))
    first = reader.next()
    assert first["rewards"].tolist() == [1, 2, 3, 4]
    assert first.count == 4
    assert reader.next()["rewards"].tolist() == [5]


def test_the_context_has_its_place_and_the_workers_sampler():
    class Worker:
        sampler = FakeSampler([rows(7)])

    worker = Worker()
    context = IOContext("/tmp/run", {"gamma": 0.5}, 3, worker)
    assert (context.log_dir, context.config, context.worker_index) == (
        "/tmp/run",
        {"gamma": 0.5},
        3,
    )
    assert sampler_input(context).next()["rewards"].tolist() == [7]
    assert context.worker is worker
    del worker
    assert context.worker is None


def test_sampler_input_without_a_worker_is_refused():
    with pytest.raises(ConfigError):
        IOContext().default_sampler_input()
