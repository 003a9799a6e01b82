"""Turns: polls, decides and sends, again and again, and gives out what comes of it one by one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from aiorl.data.metrics import PerfStats
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.base_env import as_poll
from aiorl.errors import SamplerDied
from aiorl.sampling.gate import TurnGate
from aiorl.sampling.iteration import Iteration, Output

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
        self._is_stopped = False
        self._died: BaseException | None = None
        self._untold: Exception | None = None

    def next_output(self) -> Output:
        """The next output; turns are taken until there is one.

        Raises:
            SamplerDied: an earlier call raised in the middle of a turn, which cannot be gone on with; or ``stop``
                was called.
            Exception: whatever the environment, a policy or a callback raised, after what the same turn had
                finished before. After an error of ``poll``, the next call polls again.
        """
        while not self._outputs:
            self.advance()
        return self._outputs.popleft()

    def stop(self) -> None:
        """Let the next turn raise SamplerDied. Any thread may call."""
        self._is_stopped = True

    def advance(self) -> None:
        """Act on the latest observations, if that is still to be done, and take in the next ones."""
        if self._is_stopped or self._died is not None:
            self._raise_why_it_ended()
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

    def _raise_why_it_ended(self) -> NoReturn:
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold
        if self._died is not None:
            raise SamplerDied("the sampler failed in the middle of a turn and cannot go on") from self._died
        raise SamplerDied("the sampler was stopped")

    def _observe(self) -> None:
        clock, perf = time.perf_counter, self.perf
        perf.iters += 1
        began = clock()
        poll = as_poll(self._iteration.base_env.poll())
        perf.env_wait_time += clock() - began
        try:
            with self._gate:
                entered = clock()
                self._iteration.observe(poll, self._outputs)
                perf.processing_time += clock() - entered
        except BaseException as error:  # Ctrl-C too leaves a turn half done
            self._died = error
            if self._outputs and isinstance(error, Exception):
                self._untold = error  # raised as soon as what the turn had finished is handed out
                return
            raise
        self._must_act = True

    def _act(self) -> None:
        clock, perf, iteration = time.perf_counter, self.perf, self._iteration
        self._must_act = False
        try:
            with self._gate:
                entered = clock()
                actions = iteration.act()
                evaluated = clock()
            perf.inference_time += iteration.inferred_s
            perf.processing_time += evaluated - entered - iteration.inferred_s
            iteration.base_env.send_actions(actions)
            perf.env_wait_time += clock() - evaluated
        except BaseException as error:
            self._died = error
            raise
