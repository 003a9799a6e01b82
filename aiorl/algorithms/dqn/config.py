"""Settings of DQN; loads no TensorFlow."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from aiorl.algorithms.replay_config import ReplayConfig
from aiorl.config.key import changed, key
from aiorl.errors import ConfigError
from aiorl.policy.schedules import Schedule

__all__ = ["DQNConfig"]

_dqn = partial(key, group="DQN")


class DQNConfig(ReplayConfig):
    """DQN's own settings, and its defaults of the common ones."""

    action_spaces: ClassVar[tuple[str, ...] | None] = ("Discrete",)

    algo: str = changed(ReplayConfig, "algo", "dqn")

    double_q: bool = _dqn(True, "The network that learns chooses the action whose value the target network gives.")
    dueling: bool = _dqn(True, "Streams of the network for the value of a state and for the advantages of actions.")
    dueling_hiddens: tuple[int, ...] = _dqn((), "Width of each hidden layer of both streams, behind the shared ones.")
    num_atoms: int = _dqn(
        1, "Atoms of the distribution of returns (C51); 1 learns expected returns only.", unit="atoms", ge=1
    )
    v_min: float = _dqn(-10.0, "Return of the first atom.", allow_inf_nan=False)
    v_max: float = _dqn(10.0, "Return of the last atom.", allow_inf_nan=False)
    huber_delta: float = _dqn(1.0, "Size of a TD error up to which its loss is square, and linear beyond.", gt=0)
    epsilon_schedule: list[tuple[float, float]] = _dqn(
        [(0, 1.0), (10_000, 0.02)], "Share of random actions over env steps sampled, as [[env step, value], ...]."
    )
    per_worker_epsilon: bool = _dqn(
        False, "Each worker has a share of random actions of its own, 0.4 down to 0.4^8, and epsilon_schedule none."
    )
    worker_priorities: bool = _dqn(
        False, "Workers send the size of each row's TD error by their own values, of returns also with num_atoms; the "
        "replay draws it by that until it is trained on. Else it is first drawn by the largest error so far.",
    )  # fmt: skip

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        Schedule(self.epsilon_schedule, key="epsilon_schedule")
        if not all(0 <= value <= 1 for _, value in self.epsilon_schedule):
            raise ConfigError(
                "epsilon_schedule must have probabilities.", key="epsilon_schedule", value=self.epsilon_schedule
            )
        if self.per_worker_epsilon and self.is_alone:
            raise ConfigError(
                "per_worker_epsilon is for workers: who samples in the learner's process never acts at random by it.",
                key="per_worker_epsilon", value=True,
                hint="Set num_workers, or bind for workers from elsewhere; or turn it off for epsilon_schedule.",
            )  # fmt: skip
        if self.worker_priorities and not self.prioritized_replay:
            raise ConfigError(
                "worker_priorities has workers find by what rows are drawn, and without prioritized_replay all are "
                "drawn alike.",
                key="worker_priorities", value=True, hint="Set prioritized_replay, or leave worker_priorities out.",
            )  # fmt: skip
        if self.num_atoms > 1 and self.v_min >= self.v_max:
            raise ConfigError(
                f"v_min is {self.v_min:g}, which is not below v_max, {self.v_max:g}.", key="v_min", value=self.v_min,
                hint="Returns that are to be told apart lie between them.",
            )  # fmt: skip
