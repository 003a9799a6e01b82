"""Optuna sweep over settings of PPO that stops trials early if most earlier trials did better.

    python -m examples.optuna_sweep
    python -m examples.optuna_sweep --trials 50 --study sweep.db    # the same again adds 50 trials

It needs `pip install '.[sweeps]'`. Trials train one after the other in this process. Each reports
its mean return to Optuna after every iteration. It is pruned once its best return is below the
median of the earlier trials at the same iteration. With `--study` the trials are stored in an
SQLite file, so that a stopped sweep can continue.

Each trial leaves a run directory, so `aiorl plot runs/ppo_*` draws them all. All have the same
seed: try the best settings with other seeds before you trust them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import optuna

from aiorl import PPOConfig

FIXED = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 16,
    "rollout_fragment_length": 32,
    "train_batch_size": 512,
    "xla": "off",  # compiling takes longer than a trial
}


def sampled(trial: optuna.Trial) -> dict[str, Any]:
    """Return the settings for a trial."""
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        "entropy_coeff": trial.suggest_float("entropy_coeff", 1e-4, 0.1, log=True),
        "clip_param": trial.suggest_float("clip_param", 0.1, 0.4),
        "lambda_": trial.suggest_float("lambda_", 0.8, 1.0),
        "num_sgd_iter": trial.suggest_int("num_sgd_iter", 1, 20, log=True),
    }


def objective(trial: optuna.Trial, iterations: int, seed: int) -> float:
    """Return the mean return of the last 100 episodes after the given number of iterations."""
    mean = float("nan")
    with PPOConfig(**FIXED, **sampled(trial), seed=seed).build() as trainer:
        trial.set_user_attr("run", trainer.logdir)
        for result in trainer.iterate(stop_iterations=iterations):
            mean = result["episode_reward_mean"]
            trial.report(mean, step=result["training_iteration"])
            if trial.should_prune():
                raise optuna.TrialPruned
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.optuna_sweep")
    parser.add_argument("--trials", type=int, default=20, help="number of trials (%(default)s)")
    parser.add_argument(
        "--iterations", type=int, default=100, help="iterations of a full trial (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the trials and of their settings (%(default)s)"
    )
    parser.add_argument(
        "--study",
        type=Path,
        metavar="FILE",
        help="SQLite file to store trials in and continue from",
    )
    args = parser.parse_args()
    study = optuna.create_study(
        study_name="ppo-cartpole",
        storage=None if args.study is None else f"sqlite:///{args.study}",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=5, n_warmup_steps=args.iterations // 10
        ),
    )
    # A continued sweep must not repeat its first settings.
    study.sampler = optuna.samplers.TPESampler(seed=args.seed + len(study.trials))
    study.optimize(lambda trial: objective(trial, args.iterations, args.seed), n_trials=args.trials)
    pruned = study.get_trials(states=[optuna.trial.TrialState.PRUNED])
    best = study.best_trial
    print(
        f"Best of {len(study.trials)} trials, {len(pruned)} of them pruned: a mean return of"
        f" {best.value:.1f} with"
    )
    for name, value in best.params.items():
        print(f"  {name}: {value:.4g}")
    print(f"See {best.user_attrs['run']}")


if __name__ == "__main__":
    main()
