"""Everything that learning needs, built from the configuration: spaces, model, acting graph, algorithm.

Loads TensorFlow, so it runs beside the event loop while workers are starting.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiorl.config.schema import CommonConfig
from aiorl.config.worker import WorkerPart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.spaces import space_to_dict
from aiorl.env.adapt import make_lockstep_env
from aiorl.learner.tf_runtime import configure_tensorflow
from aiorl.observation.filters import ObservationFilter, make_filter
from aiorl.observation.preprocessors import preprocessor_for
from aiorl.policy.distributions import make_distribution
from aiorl.protocol.messages import PolicyGraph

__all__ = ["Learning", "build_learning"]


@dataclass(slots=True)
class Learning:
    """What `build_learning` gives.

    Attributes:
        algorithm: the algorithm with its model.
        worker_part: what workers get of the configuration.
        graphs: policy id -> acting graph, for workers.
        filter: the merged observation filter, empty.
        spaces: observation and action space as plain data, for checkpoints.
        seconds: what took how long.
    """

    algorithm: Any  # aiorl.algorithms.algorithm.Algorithm; named here it would load TensorFlow
    worker_part: WorkerPart
    graphs: dict[str, PolicyGraph]
    filter: ObservationFilter
    spaces: dict[str, Any]
    seconds: dict[str, float]


def build_learning(config: CommonConfig, log: Path | None = None) -> Learning:
    """Build it; takes a few seconds, most of them TensorFlow's import.

    Args:
        config: the effective configuration.
        log: file for what TensorFlow prints at its import; None leaves it on stderr.

    Raises:
        ConfigError: a setting that cannot be honoured.
        UnsupportedSpaceError: a space without preprocessor or distribution.
        EnvError: the environment's constructor failed.
    """
    clock = time.monotonic
    began = clock()
    env = make_lockstep_env(config.env or "", config.env_config, 1, "serial", horizon=config.horizon)
    observation_space, action_space = env.observation_space, env.action_space
    env.close()
    preprocessor = preprocessor_for(observation_space)
    has_env = clock()
    configure_tensorflow(config, log)
    from aiorl.algorithms.registry import algorithm_class
    from aiorl.models.catalog import build_model
    from aiorl.models.export import describe_policy

    has_tensorflow = clock()
    kind = algorithm_class(config.algo)
    model = build_model(
        preprocessor.shape,
        preprocessor.dtype.name,
        make_distribution(action_space),
        config.model.model_dump(),
        seed=config.seed,
    )
    graph, description = describe_policy(model, config.model.model_dump())
    algorithm = kind(config, model)
    return Learning(
        algorithm=algorithm,
        worker_part=WorkerPart.of(config, kind.sample_plan(config)),
        graphs={DEFAULT_POLICY_ID: {"graph": graph, "spec": description}},
        filter=make_filter(config.observation_filter, preprocessor.shape),
        spaces={"observation": space_to_dict(observation_space), "action": space_to_dict(action_space)},
        seconds={
            "environment": has_env - began,
            "TensorFlow": has_tensorflow - has_env,
            "model": clock() - has_tensorflow,
        },
    )
