"""Algorithms, one module each: its keys, its class, its loss. docs/algorithms/ has a page on each, naming the paper.

None loads TensorFlow when it is imported. `aiorl.learning.algorithms.registry` finds them by name.
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
"""Name of an algorithm and its module -> its class there; `aiorl` has NAMEConfig and NAMETrainer of each."""
