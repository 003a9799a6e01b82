"""Recorder: episodes of sessions, written as stored experience."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import quote

import numpy as np
from prometheus_client import Counter

from aiorl.acting.actor import Actor
from aiorl.data import columns as c
from aiorl.data.columns import Array
from aiorl.errors import ConfigError
from aiorl.offline.writers import FileWriter
from aiorl.serving.batching import FAULTS, Answer, Job
from aiorl.serving.episode import Episode
from aiorl.serving.sessions import Session
from aiorl.web.app import Refusal

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
MAX_EPISODE_BYTES = 64 << 20
"""Memory of all episodes that are not written yet, and of one of them."""
_PAUSE_S = 30.0


class Recorder:
    """Writer of whole episodes in a directory for each policy, by a thread of its own.

    A row has the policy's input, the action before it is clipped, and the reward. Episodes whose
    actions were all drawn also have log-probabilities; they are in files of their own, those of
    worker 0.

    Attributes:
        episodes: counts episodes, for Prometheus, by policy and by what became of them: "written",
            "dropped" because their end or memory was missing, or "failed" because of the disk.
        num_bytes: memory of the episodes that are not written yet.
    """

    def __init__(self, directory: Path) -> None:
        """Create the directory if it is missing.

        Raises:
            ConfigError: it can't be created or written in.
        """
        self._directory = directory.expanduser()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=self._directory).close()
        except OSError as error:
            raise ConfigError(
                f"--record {directory} can't be written in: {error.strerror}.", key="record"
            ) from error
        self.episodes = Counter(
            "aiorl_recorded_episodes", "Episodes of sessions.", ["policy", "fate"], registry=None
        )
        self.num_bytes = 0
        self._paused_until = 0.0
        self._writers: dict[tuple[str, bool], FileWriter] = {}
        # random, so that files of several servers can be read together
        self._ids = itertools.count(secrets.randbits(48))
        self._thread = ThreadPoolExecutor(1, "record")

    def step(self, actor: Actor, job: Job, finish: Callable[[Answer], Any], answer: Answer) -> Any:
        """Add an answered step to its session's episode, and return the client's answer, made by
        `finish`.
        """
        session: Any = job.session
        if session.steps == 1:
            session.episode = Episode(self, session.model)
        if session.episode is not None:
            logp = np.nan
            if job.action is not None:
                row = actor.layout.to_row(job.action)
            else:
                row = answer.columns[c.ACTIONS][answer.rows][0]
                if job.explore:
                    logp = answer.output("logp")[0]
            obs = answer.columns[c.OBS][answer.rows][0]  # as the policy got it
            session.episode.add(np.array(obs), np.array(row), job.reward, logp)
            if session.episode.num_bytes > MAX_EPISODE_BYTES or self.num_bytes > MAX_BYTES:
                session.drop_episode()
        return finish(answer)

    def end(
        self, actor: Actor, session: Session, obs: Any, reward: float, *, is_truncated: bool
    ) -> None:
        """Write a session's episode.

        Args:
            actor: the session's policy.
            session: the session.
            obs: the last observation, as the environment gives it.
            reward: the last reward.
            is_truncated: True if the episode could have gone further.

        Raises:
            Refusal: the observation can't be used.
        """
        episode = session.episode
        if episode is None:
            return
        try:
            last = actor.observe([obs], update=False)[0]
        except FAULTS as fault:
            raise Refusal(400, f"The observation can't be used: {fault}") from None
        session.episode = None
        write = partial(self._write, episode, last, reward, is_truncated)
        fate = asyncio.get_running_loop().run_in_executor(self._thread, write)
        fate.add_done_callback(lambda future: episode.end(future.result()))

    def close(self) -> None:
        """Write the episodes that have ended."""
        self._thread.shutdown()
        for writer in self._writers.values():
            writer.close()

    def _write(self, episode: Episode, last: Array, reward: float, is_truncated: bool) -> str:
        if time.monotonic() < self._paused_until:
            return "failed"
        try:
            batch = episode.batch(next(self._ids), last, reward, is_truncated)
            has_logp = c.ACTION_LOGP in batch
            key = episode.policy, has_logp
            if key in self._writers and self._writers[key].is_lost():
                with contextlib.suppress(OSError):
                    self._writers.pop(key).close()
                raise FileNotFoundError("the files of the episodes so far were removed")
            if key not in self._writers:
                directory = self._directory / quote(episode.policy, safe="").replace("..", "%2E%2E")
                self._writers[key] = FileWriter(str(directory), worker_index=int(not has_logp))
            self._writers[key].write(batch)
        except Exception:  # serving has to continue
            logger.exception(
                "writing an episode in %s failed; the next ones are dropped for 30 s",
                self._directory,
            )
            self._paused_until = time.monotonic() + _PAUSE_S
            return "failed"
        return "written"
