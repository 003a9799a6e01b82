"""Algorithms, one module each, with its keys, class and loss. Each has a page in docs/algorithms/
that cites its paper.

Importing them doesn't load TensorFlow. `aiorl.learning.algorithms.registry` finds them by name.
"""

ALGORITHMS = {
    "a2c": "A2C",
    "a3c": "A3C",
    "apex": "Apex",
    "appo": "APPO",
    "bc": "BC",
    "cql": "CQL",
    "dqn": "DQN",
    "impala": "IMPALA",
    "iql": "IQL",
    "marwil": "MARWIL",
    "pg": "PG",
    "ppo": "PPO",
    "sac": "SAC",
    "td3": "TD3",
}
"""Class of each algorithm by the name of its module, which is the algorithm's name too.

`aiorl` exports NAMEConfig and NAMETrainer for each class NAME.
"""
