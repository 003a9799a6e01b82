"""What a learner hands to each worker that it starts, by environment variables: other users can't read those.

A worker takes them out of its environment before anything else runs there, so that nothing it starts inherits them.
"""

from __future__ import annotations

import os

__all__ = ["KEYS_VARIABLE", "LOG_VARIABLE", "WORKER_ID_VARIABLE", "take_handed_over"]

KEYS_VARIABLE = "AIORL_RUN_KEYS"
"""The run's keys, see `aiorl.net.transport.run_keys`."""

WORKER_ID_VARIABLE = "AIORL_WORKER_ID"
"""The name by which the learner will know the worker."""

LOG_VARIABLE = "AIORL_WORKER_LOG"
"""The file that is the worker's standard output and error, by its absolute path."""


def take_handed_over() -> dict[str, str]:
    """Take all of it out of this process's environment; what is not there is ""."""
    return {name: os.environ.pop(name, "") for name in (KEYS_VARIABLE, LOG_VARIABLE, WORKER_ID_VARIABLE)}
