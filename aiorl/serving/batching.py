"""Versions of a policy, and their batches: all requests of a turn of the event loop are answered by
one evaluation.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from aiorl.acting.actor import Actor
from aiorl.data import columns as c
from aiorl.data.columns import Array
from aiorl.errors import AiorlError
from aiorl.serving.sessions import Memory, Session
from aiorl.web.app import Refusal, Reply

MAX_ROWS = 1024
"""Rows of one request, and of one evaluation."""
FAULTS = (AiorlError, ValueError, TypeError, OverflowError, KeyError)
"""Errors of values that a client sent."""
OUTPUTS = {"logp": c.ACTION_LOGP, "value": c.VF_PREDS}
"""Further outputs by the names that clients use, and their columns."""


class Answer(NamedTuple):
    """Answer to the N rows of a request.

    Attributes:
        actions: N actions in the environment's form.
        version: the version that answered.
        columns: further outputs of all rows of the evaluation, and OBS, the inputs of the policy.
        rows: the request's own rows in these.
    """

    actions: Sequence[Any]
    version: str
    columns: Mapping[str, Array]
    rows: slice

    def output(self, name: str) -> Array:
        """Return one of `OUTPUTS`, [N]."""
        return self.columns[OUTPUTS[name]][self.rows]


@dataclass(slots=True, eq=False)
class Job:
    """Rows of one request.

    Attributes:
        observations: N observations of environments.
        explore: True draws actions.
        session: session of the only row; None = each row is an episode's first one.
        reward: reward of the session's last step.
        is_start: True begins a new episode of the session.
        action: action that the client of a session took by itself, in the environment's form; None
            = it asks for one.
        with_logp: True if the client's answer needs log-probabilities.
        finish: makes the client's answer from the `Answer` to the rows.
        answer: the client's answer.
    """

    observations: Sequence[Any]
    explore: bool = False
    session: Session | None = None
    reward: float = 0.0
    is_start: bool = False
    action: Any = None
    with_logp: bool = True
    finish: Callable[[Answer], Any] = lambda answer: answer
    answer: Reply = field(default_factory=Reply)

    def memory(self, blank: Memory) -> Memory:
        """Return the policy's memory before the rows; `blank` is that at an episode's start."""
        if self.session is None or self.is_start or self.session.memory is None:
            return blank
        return self.session.memory._replace(reward=self.reward)


class Version:
    """One version of a policy, which answers jobs.

    Attributes:
        name: its number, as text.
        actor: the policy.
        env: name of the environment that it was trained on.
        env_steps: env steps that it was trained on.
        count_rows: called with the number of rows of each evaluation, for metrics.
    """

    def __init__(self, number: int, actor: Actor, env: str, env_steps: int) -> None:
        """Wrap a policy; see the class."""
        self.name = str(number)
        self.actor = actor
        self.env = env
        self.env_steps = env_steps
        self.count_rows: Callable[[int], object] = lambda rows: None
        self._pending: list[Job] = []
        self._context = contextvars.copy_context()
        # numbers too large for float32 become infinite, which is refused
        self._context.run(np.seterr, over="ignore")
        self._has_memory = bool(actor.initial_state) or actor.uses_previous_step
        self._blank = Memory(actor.initial_memory, actor.layout.to_env(actor.layout.zeros(1))[0])

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
        pending = self._pending
        self._pending = []
        if len(pending) == 1:
            self._answer(pending, pending[0].explore)
            return
        batches: dict[bool, list[Job]] = {}
        busy: set[Session | None] = set()
        rows = 0
        for job in pending:
            rows += len(job.observations)
            # the second request of a session needs the memory after the first one
            if job.session in busy or (rows > MAX_ROWS and batches):
                self.submit(job)
            else:
                batches.setdefault(job.explore, []).append(job)
            if job.session is not None:
                busy.add(job.session)
        for explore, jobs in batches.items():
            self._answer(jobs, explore)

    def _answer(self, jobs: Sequence[Job], explore: bool) -> None:
        """Answer jobs by one evaluation; if that fails, look for the fault in either half."""
        try:
            actions, states, columns = self._evaluate(jobs, explore)
        except Exception as error:
            middle = len(jobs) // 2
            if middle > 0:
                self._answer(jobs[:middle], explore)
                self._answer(jobs[middle:], explore)
                return
            if isinstance(error, FAULTS):
                error = Refusal(400, f"The observation can't be used: {error}")
            jobs[0].answer.set_result(error)
            return
        asyncio.get_running_loop().call_soon(self.count_rows, len(actions))  # after the answers
        start = 0
        for job in jobs:
            stop = start + len(job.observations)
            rows = slice(start, stop)
            start = stop
            job_actions = actions[rows] if job.action is None else [job.action]
            session = job.session
            if session is not None:
                if job.is_start:
                    session.restart()
                memory = [state[rows.start].copy() for state in states]
                if job.action is not None:
                    memory = self.actor.memory_with_action(memory, job.action)
                session.memory = Memory(memory, job_actions[0])
                session.steps += 1
                session.total += job.reward
            try:
                answer = job.finish(Answer(job_actions, self.name, columns, rows))
            except Exception as error:
                answer = error
            job.answer.set_result(answer)

    def _evaluate(
        self, jobs: Sequence[Job], explore: bool
    ) -> tuple[list[Any], list[Array], dict[str, Array]]:
        """Return actions, recurrent states and further outputs of all rows of jobs."""
        inputs = self.actor.observe([obs for job in jobs for obs in job.observations], update=False)
        with_logp = any([job.with_logp for job in jobs])
        if not self._has_memory:
            actions, states, columns = self.actor.act_on(
                inputs, explore=explore, with_logp=with_logp
            )
            return actions, states, {**columns, c.OBS: inputs}
        memories = [job.memory(self._blank) for job in jobs for _ in job.observations]
        last_states, last_actions, rewards = zip(*memories, strict=True)
        state = [np.stack(parts) for parts in zip(*last_states, strict=True)]
        actions, states, columns = self.actor.act_on(
            inputs, state, last_actions, rewards, explore=explore, with_logp=with_logp
        )
        return actions, states, {**columns, c.OBS: inputs}
