"""Turns: polls, decides and sends, again and again, and gives out what comes of it one by one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from aiorl.data.metrics import PerfStats
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.base_env import as_poll
from aiorl.errors import SamplerDied
from aiorl.sampler.gate import TurnGate
from aiorl.sampler.iteration import Iteration, Output

__all__ = ["Turns"]


class Turns:
    """Drives an Iteration.

    Outputs are handed out before the policies are evaluated: weights that are set in between govern the
    actions at the observations that led to these outputs.

    Attributes:
        perf: where time went; handing out belongs to none of it.
    """

    def __init__(
        self, iteration: Iteration, *, gate: TurnGate | None = None, on_turn: Callable[[], None] | None = None
    ) -> None:
        """Get ready; the environment is not touched.

        Args:
            iteration: what decides.
            gate: held while observations are processed and policies evaluated, but not while anything waits.
            on_turn: called after the outputs of a turn are handed out and before its policies are evaluated,
                outside the gate; if it raises, nothing is lost.
        """
        self.perf = PerfStats()
        self._iteration = iteration
        self._gate = gate if gate is not None else TurnGate()
        self._on_turn = on_turn
        self._outputs: deque[Output] = deque()
        self._must_act = False
        self._died: Exception | None = None

    def next_output(self) -> Output:
        """The next output; turns are taken until there is one.

        Raises:
            SamplerDied: an earlier call raised in the middle of a turn, which cannot be gone on with.
            Exception: whatever the environment, a policy or a callback raised. After an error of ``poll``, the
                next call polls again.
        """
        while not self._outputs:
            self.advance()
        return self._outputs.popleft()

    def advance(self) -> None:
        """Act on the latest observations, if that is still to be done, and take in the next ones."""
        if self._died is not None:
            raise SamplerDied("the sampler failed in the middle of a turn and cannot go on") from self._died
        if self._on_turn is not None:
            self._on_turn()
        if self._must_act:
            self._act()
        self._observe()

    def take_outputs(self) -> list[Output]:
        """All outputs of the last turn that are not yet handed out."""
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def take_extra_batches(self) -> list[SampleBatch | MultiAgentBatch]:
        """Batches that episodes added on their own since the last call."""
        extra, self._iteration.extra_batches[:] = list(self._iteration.extra_batches), []
        return extra

    def _observe(self) -> None:
        clock, perf = time.perf_counter, self.perf
        perf.iters += 1
        began = clock()
        poll = as_poll(self._iteration.base_env.poll())
        polled = clock()
        perf.env_wait_time += polled - began
        try:
            with self._gate:
                self._outputs.extend(self._iteration.observe(poll))
        except Exception as error:
            self._died = error
            raise
        self._must_act = True
        perf.processing_time += clock() - polled

    def _act(self) -> None:
        clock, perf = time.perf_counter, self.perf
        self._must_act = False
        began = clock()
        try:
            with self._gate:
                actions = self._iteration.act()
            evaluated = clock()
            self._iteration.base_env.send_actions(actions)
        except Exception as error:
            self._died = error
            raise
        perf.inference_time += evaluated - began
        perf.env_wait_time += clock() - evaluated
