r"""Results in MLflow or Weights & Biases, through a logger of your own.

    python -m aiorl.learner --env CartPole-v1 --stop-timesteps 20000 \
        --loggers "[examples.experiment_tracking:MLflow]"
    WANDB_MODE=offline python -m aiorl.learner --env CartPole-v1 --stop-timesteps 20000 \
        --loggers "[examples.experiment_tracking:WeightsAndBiases]"

They need `pip install '.[tracking]'`. A logger is made with the run directory and the config, and gets every result.
What goes wrong in it is said once, and training goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiorl.report.loggers import flatten


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a result, nested names joined by a slash."""
    return {name: float(value) for name, value in flatten(result) if type(value) in (int, float)}


class MLflow:
    """A run in MLflow: parameters are the config, metrics the results, over env steps."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        """Begin the run; MLFLOW_TRACKING_URI says where, else files beside the run's."""
        import mlflow

        if not mlflow.is_tracking_uri_set():
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow.set_tracking_uri((run_dir / "mlflow").as_uri())
        mlflow.set_experiment(f"{config['algo']} on {config['env']}")
        self._mlflow = mlflow
        mlflow.start_run(run_name=run_dir.name)
        mlflow.log_params({name: str(value)[:500] for name, value in flatten(config)})

    def write(self, result: Mapping[str, Any]) -> None:
        """Log a result."""
        self._mlflow.log_metrics(numbers(result), step=result["timesteps_total"])

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class WeightsAndBiases:
    """A run in Weights & Biases."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        """Begin the run; WANDB_MODE=offline keeps it in files beside the run's."""
        import wandb

        project = re.sub(r"[/\\#?%:]", "-", f"{config['algo']}-{config['env']}")  # which names there may not hold
        self._run = wandb.init(project=project[:128], name=run_dir.name, dir=run_dir, config=config)

    def write(self, result: Mapping[str, Any]) -> None:
        """Log a result."""
        self._run.log(numbers(result), step=result["timesteps_total"])

    def close(self) -> None:
        """End the run."""
        self._run.finish()
