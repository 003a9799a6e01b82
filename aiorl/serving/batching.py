"""Versions of a policy, and their batches: all requests of a turn of the event loop are answered by one evaluation."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.actor import Actor
from aiorl.data import columns as c
from aiorl.errors import AiorlError
from aiorl.serving.exported import ExportedActor
from aiorl.serving.sessions import Session
from aiorl.web.messages import Refusal, Reply

logger = logging.getLogger(__name__)

Array = NDArray[Any]

MAX_ROWS = 1024
"""Rows of one request, and of one evaluation."""
FAULTS = (AiorlError, ValueError, TypeError, OverflowError, KeyError)
"""Errors of values that a client sent."""

Acting: TypeAlias = Actor | ExportedActor
"""Policy that is served."""
OUTPUTS = {"logp": c.ACTION_LOGP, "value": c.VF_PREDS, "dist_inputs": c.ACTION_DIST_INPUTS}
"""Further outputs by the names that clients use, and their columns."""


class Answer(NamedTuple):
    """Answer to the N rows of a request.

    Attributes:
        actions: N actions in the environment's form.
        states: recurrent state after the step, [N, ...] of each component.
        columns: further outputs, [N, ...].
        version: the version that answered.
    """

    actions: list[Any]
    states: list[Array]
    columns: dict[str, Array]
    version: str


@dataclass(slots=True, eq=False)
class Job:
    """Rows of one request.

    Attributes:
        observations: N observations of environments.
        explore: True draws actions.
        states: recurrent state, [N, ...] of each component; None = an episode's start.
        prev_actions: N previous actions in the environment's form; None = none yet.
        prev_rewards: N previous rewards; None = none yet.
        session: session that remembers state and action of its only row instead.
        reward: reward of the session's last step.
        is_start: True begins a new episode of the session.
        action: action that the client of a session took by itself, in the environment's form; None = it asks for one.
        with_logp: True if the client's answer needs log-probabilities.
        finish: makes the client's answer of the rows'.
        answer: the client's answer.
    """

    observations: Sequence[Any]
    explore: bool = False
    states: Sequence[Array] | None = None
    prev_actions: Sequence[Any] | None = None
    prev_rewards: Sequence[float] | None = None
    session: Session | None = None
    reward: float = 0.0
    is_start: bool = False
    action: Any = None
    with_logp: bool = True
    finish: Callable[[Answer], Any] = lambda answer: answer
    answer: Reply = field(default_factory=Reply)

    def remember(self) -> None:
        """Take state, previous action and reward from the session."""
        if self.session is not None and not (self.is_start or self.session.is_at_start):
            self.states = [state[None] for state in self.session.state]
            self.prev_actions, self.prev_rewards = [self.session.prev_action], [self.reward]


class Version:
    """One version of a policy, which answers jobs.

    Attributes:
        name: its number, as text.
        actor: the policy.
        env: name of the environment that it was trained on.
        env_steps: env steps that it was trained on.
        figures: number of evaluations by their rows, for metrics.
        num_rows: rows answered.
    """

    def __init__(self, name: str, actor: Acting, env: str, env_steps: int) -> None:
        """Wrap a policy; see the class."""
        self.name, self.actor, self.env, self.env_steps = name, actor, env, env_steps
        self.figures: dict[int, int] = {}
        self.num_rows = 0
        self._pending: list[Job] = []
        self._context = contextvars.copy_context()  # numbers too large for float32 become infinite, which is refused
        self._context.run(np.seterr, over="ignore")
        self._looks_back = actor.looks_back
        self._blank = actor.layout.to_env(actor.layout.zeros(1))[0]

    def submit(self, job: Job) -> Reply:
        """Answer a job in this turn of the event loop, together with all others of the turn."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush, context=self._context)
        self._pending.append(job)
        return job.answer

    def finish(self) -> None:
        """Answer all jobs now."""
        while self._pending:
            self._context.run(self._flush)

    def _flush(self) -> None:
        if len(self._pending) == 1:
            (job,), self._pending = self._pending, []
            self._answer([job], job.explore)
            return
        now: dict[bool, list[Job]] = {}
        later: list[Job] = []
        busy: set[Session] = set()
        rows = 0
        for job in self._pending:
            rows += len(job.observations)
            # the second request of a session needs the state after the first one
            if job.session in busy or (rows > MAX_ROWS and now):
                later.append(job)
                busy |= {job.session} if job.session else set()
                continue
            if job.session is not None:
                busy.add(job.session)
            now.setdefault(job.explore, []).append(job)
        self._pending = later
        if later:
            asyncio.get_running_loop().call_soon(self._flush, context=self._context)
        for explore, jobs in now.items():
            self._answer(jobs, explore)

    def _answer(self, jobs: list[Job], explore: bool) -> None:
        try:
            self._run(jobs, explore)
        except Exception as error:
            sound = [job for job in jobs if not self._refuse(job, error, is_only=len(jobs) == 1)]
            if sound and len(sound) < len(jobs):
                self._answer(sound, explore)
                return
            for job in sound:  # the fault is not in one of the requests
                job.answer.set_exception(error)

    def _refuse(self, job: Job, error: Exception, *, is_only: bool) -> bool:
        """Refuse a job if the failure is its own."""
        try:
            rows = self.actor.observe(job.observations, update=False)
            if len(stuck := self.actor.rows_without_action(rows)):
                raise ValueError(f"the action mask of observation {stuck[0]} forbids every action")
            if is_only and isinstance(error, FAULTS):
                raise error
        except FAULTS as fault:
            job.answer.set_exception(Refusal(400, f"The observation can't be used: {fault}"))
            return True
        except Exception:  # a preprocessor of the user's own failed
            return False
        return False

    def _run(self, jobs: list[Job], explore: bool) -> None:
        actor = self.actor
        one = len(jobs) == 1
        observations = jobs[0].observations if one else [obs for job in jobs for obs in job.observations]
        states: list[Array] = []
        actions, rewards = None, None
        if actor.initial_state or self._looks_back:
            for job in jobs:
                job.remember()
            states = [
                np.concatenate([np.broadcast_to(initial, (len(job.observations), *initial.shape))
                                if job.states is None else job.states[index] for job in jobs])
                for index, initial in enumerate(actor.initial_state)
            ]  # fmt: skip
        if self._looks_back:
            actions = [one for job in jobs for one in job.prev_actions or [self._blank] * len(job.observations)]
            rewards = [one for job in jobs for one in job.prev_rewards or [0.0] * len(job.observations)]
        found, states_out, columns = actor.compute_actions(
            observations, states, actions, rewards, explore=explore, with_logp=any(job.with_logp for job in jobs)
        )
        self.num_rows += len(found)
        self.figures[len(found)] = self.figures.get(len(found), 0) + 1
        start = 0
        for job in jobs:
            own = slice(start, start := start + len(job.observations))
            answer = Answer(found, states_out, columns, self.name) if one else Answer(
                found[own], [state[own] for state in states_out],
                {name: column[own] for name, column in columns.items()}, self.name,
            )  # fmt: skip
            if job.action is not None:
                answer = answer._replace(actions=[job.action])
            if job.session is not None:
                job.session.note(answer, job.reward, is_start=job.is_start)
            job.answer.set_result(job.finish(answer))
