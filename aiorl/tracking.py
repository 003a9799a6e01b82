"""Loggers for experiment trackers: Weights & Biases and MLflow.

Choose them with `--loggers "[wandb]"`, `--loggers "[mlflow]"` or both; they need the extra
``tracking``. A logger of your own has the same interface: it is made with the run directory and the
config, and gets every result.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiorl.run.report.loggers import flatten, numbers_of

__all__ = ["MLflow", "WandB"]

# characters
_MAX_PARAMETER = 500
_MAX_PROJECT = 128
# MLflow's limits per call
_PARAMETERS = 100
_METRICS = 1000


class WandB:
    """Run in Weights & Biases, in the project ALGORITHM-ENVIRONMENT; the x-axis of results is env
    steps.

    Args:
        run_dir: the run's directory, which also holds W&B's own files. With ``WANDB_MODE=offline``
            no data is sent.
        config: the effective configuration.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        import wandb

        # W&B refuses these characters
        project = re.sub(r"[/\\#?%:]", "-", f"{config['algo']}-{config['env']}")
        self._run = wandb.init(
            project=project[:_MAX_PROJECT], name=run_dir.name, dir=run_dir, config=config
        )

    def write(self, result: Mapping[str, Any]) -> None:
        """Log a result."""
        self._run.log(numbers_of(result), step=result["timesteps_total"])

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class MLflow:
    """Run in MLflow, in the experiment "ALGORITHM on ENVIRONMENT".

    The config is logged as parameters; the x-axis of results is env steps.

    Args:
        run_dir: the run's directory. Results go to its ``mlflow/`` unless ``MLFLOW_TRACKING_URI``
            is set.
        config: the effective configuration.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        import mlflow

        uri = None
        if not mlflow.is_tracking_uri_set():
            uri = (run_dir / "mlflow").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities = mlflow.entities
        # runs of other trainers in this process have clients of their own
        self._client = client = mlflow.MlflowClient(uri)
        name = f"{config['algo']} on {config['env']}"
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            experiment = client.get_experiment(client.create_experiment(name))
        run = client.create_run(experiment.experiment_id, run_name=run_dir.name)
        self._run_id = run.info.run_id
        params = [
            mlflow.entities.Param(key, str(value)[:_MAX_PARAMETER])
            for key, value in flatten(config)
        ]
        for start in range(0, len(params), _PARAMETERS):
            client.log_batch(self._run_id, params=params[start : start + _PARAMETERS])

    def write(self, result: Mapping[str, Any]) -> None:
        """Log a result."""
        now = int(1000 * time.time())
        step = int(result["timesteps_total"])
        metrics = [
            self._entities.Metric(key, value, now, step)
            for key, value in numbers_of(result).items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics[:_METRICS])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)
