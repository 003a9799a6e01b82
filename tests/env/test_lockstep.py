from __future__ import annotations

import pytest

from aiorl.env.base_env import checked_horizon, env_seeds
from aiorl.errors import ConfigError


def test_each_copy_has_a_seed_of_its_own():
    """SPEC 2.3: env v is seeded with worker_seed + 1000000 * v."""
    assert env_seeds(42, 3) == [42, 1_000_042, 2_000_042]
    assert env_seeds(42, 0) == []


@pytest.mark.parametrize(
    ("horizon", "limit", "length"), [(None, None, None), (None, 7, 7), (0, 7, 7), (5, 7, 5), (7, 7, 7), (5, None, 5)]
)
def test_the_horizon_or_the_limit_is_the_length(horizon, limit, length):
    """R80, R81."""
    assert checked_horizon(horizon, limit) == length


@pytest.mark.parametrize(("horizon", "limit"), [(8, 7), (-1, 7), (-1, None)])
def test_a_horizon_that_cannot_be_is_refused(horizon, limit):
    """R80."""
    with pytest.raises(ConfigError) as caught:
        checked_horizon(horizon, limit)
    assert (caught.value.key, caught.value.value) == ("horizon", horizon)
