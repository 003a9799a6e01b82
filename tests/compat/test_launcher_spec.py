from __future__ import annotations

import pytest

from aiorl.compat.launcher_spec import LauncherSpec
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.errors import ConfigError


def test_a_launcher_gets_possible_limits_only() -> None:
    assert RolloutWorker.as_remote(2, memory=1000) == LauncherSpec(
        RolloutWorker, 2, None, 1000, None, None
    )
    for limits in ({"num_cpus": -1}, {"memory": -5}, {"resources": {"tpu": 1}}):
        with pytest.raises(ConfigError) as caught:
            RolloutWorker.as_remote(**limits)
        assert [caught.value.key] == [*limits]
