"""The workers of a trainer, and calls of their methods."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiorl.acting.policy import Policy
from aiorl.actors.calls import packed_arguments
from aiorl.actors.references import RefHandle, with_results
from aiorl.config import registry
from aiorl.config.rllib_file import no_attribute
from aiorl.errors import CallTimeout, ConfigError
from aiorl.net.protocol.roster import Worker as RegisteredWorker
from aiorl.run.sampler_calls import SamplerPlace
from aiorl.run.threads import LoopThread
from aiorl.run.training import Training
from aiorl.sampling.worker import Worker

R = TypeVar("R")

TIMEOUT_S: Final = 300.0
"""Time for the answers of all workers, seconds."""


class RemoteWorker(RefHandle):
    """A sampler of a registered worker process, which samples for the run; its methods are those of
    a RolloutWorker.

    ``worker.sample.remote()`` calls a method and returns a reference, for `aiorl.get`. The method
    runs between two fragments, or while the worker waits. References can be arguments, as those of
    `aiorl.put`; the call waits for their results. A batch that it samples is not part of
    the run's experience and account. The worker of one registration is meant: once it is lost, its
    calls raise ActorLost, and ``remote_workers`` returns the worker that has taken its place.

    Attributes:
        index: its slot, from 1.
        incarnation: id of its registration; a worker that registers again gets a new one.
        state: the state that it had reported when ``remote_workers`` returned it.
        in_env_s: seconds since its environment's step had begun then.
    """

    def __init__(
        self,
        submit: Callable[..., Future[Any]],
        place: SamplerPlace,
        worker: RegisteredWorker,
    ) -> None:
        """Prepare a handle; ``remote_workers`` returns them.

        Args:
            submit: begins its calls.
            place: the sampler.
            worker: its worker as the learner sees it.
        """
        super().__init__(submit, registry.worker_class())
        self._place = place
        self.index = place.slot
        self.incarnation = place.incarnation
        self.state = worker.state
        self.in_env_s = worker.in_env_s

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteWorker) and other._place == self._place

    def __hash__(self) -> int:
        return hash(self._place)

    def __repr__(self) -> str:
        return f"<worker {self.index}: {self.state}>"


class WorkerSet:
    """The workers of a trainer: one in this process, and worker processes on this or other
    hosts.

    Functions for worker processes are sent by name: define them at the top level of a module, or of
    the script that you run, and give them their arguments with `functools.partial`. An import path,
    ``package.module:name``, is possible, too. Without worker processes, any function will do. A
    worker that registers later has not seen earlier calls.

    `aiorl.WorkerSet` is another class: its workers belong to no run, and sample only when they are
    called. `reset` here makes the others leave the run, there it ends none.
    """

    def __init__(
        self,
        loop: LoopThread,
        training: Callable[[], Training],
        local_worker: Callable[[], Worker],
        stop: Callable[[], None],
    ) -> None:
        """Take what a trainer knows of its workers.

        Args:
            loop: the event loop of the training.
            training: returns the training.
            local_worker: returns the worker of this process.
            stop: ends the trainer.
        """
        self._loop = loop
        self._training = training
        self._local_worker = local_worker
        self._stop = stop

    if not TYPE_CHECKING:  # type checkers should know the real attributes only

        def __getattr__(self, name: str) -> Any:
            """Refuse an unknown attribute, with a hint if other libraries have it."""
            raise no_attribute("workers", self, name)

    # The workers
    # ----------------------------------------------------------------------------------------------

    def local_worker(self) -> Any:
        """Return the RolloutWorker of this process, index 0, with the newest weights and filter
        statistics.

        In a run without worker processes, this is the worker that samples. Otherwise the first call
        makes it.
        """
        return self._local_worker().rollout_worker()

    def remote_workers(self) -> list[RemoteWorker]:
        """Return handles of the worker processes that sample for the run now, ordered by index; one
        for each of ``samplers_per_worker``.
        """
        return self._loop.do(self._registered)

    def add_workers(self, num_workers: int) -> None:
        """Start more worker processes on this host, and wait until they have joined the run.

        They belong to this trainer's life: a restored one starts ``num_workers`` again.

        Args:
            num_workers: number of processes.

        Raises:
            ConfigError: the number is below 0, the run samples in this process, or it has no room
                for them (also a ValueError).
            WorkerError: a process failed again and again (also a RuntimeError).
            OSError: a process could not be started.
        """
        if num_workers < 0:
            raise ConfigError(
                f"{num_workers} workers can't be added.", key="num_workers", value=num_workers
            )
        self._loop.ask(self._training().source.add_workers(num_workers))

    def reset(self, healthy: Iterable[RemoteWorker]) -> None:
        """Continue with these workers only; the others must leave, and their fragments in flight
        count as lost.

        Args:
            healthy: the workers to keep, as ``remote_workers`` returns them.
        """
        incarnations = {worker.incarnation for worker in healthy}
        session = self._training().core.session

        def lose_others() -> None:
            for worker in self._training().source.workers():
                if worker.incarnation not in incarnations:
                    session.mark_lost(
                        worker.slot, "the trainer continues without it", time.monotonic()
                    )

        self._loop.do(lose_others)

    def stop(self) -> None:
        """End all workers, and the trainer with them."""
        self._stop()

    # Calls of all workers
    # ----------------------------------------------------------------------------------------------

    def foreach_worker(
        self, function: Callable[[Any], R] | str, *, timeout_s: float | None = TIMEOUT_S
    ) -> list[R]:
        """Call a function with each worker: with the one of this process first, then, at the same
        time, with those of the worker processes, each between two fragments.

        Args:
            function: function of a RolloutWorker; see the class.
            timeout_s: longest wait for the worker processes, seconds; None waits as long as it
                takes.

        Returns:
            The results, ordered by index.

        Raises:
            UnsendableError: worker processes can't import the function; it has not been called
                (also a TypeError).
            RemoteError: the function raised an exception in a worker process.
            ActorLost: a worker was lost before it answered; all others have answered.
            CallTimeout: a worker has not answered in time (also a TimeoutError).
        """
        return self._call_all("apply", lambda index: (function,), timeout_s)

    def foreach_worker_with_index(
        self, function: Callable[[Any, int], R] | str, *, timeout_s: float | None = TIMEOUT_S
    ) -> list[R]:
        """Call a function with each worker and its index; see `foreach_worker`.

        Args:
            function: function of a RolloutWorker and its index, 0 in this process.
            timeout_s: longest wait for the worker processes, seconds; None for no limit.

        Returns:
            The results, ordered by index.

        Raises:
            Exception: see `foreach_worker`.
        """
        return self._call_all("apply", lambda index: (function, index), timeout_s)

    def foreach_policy(
        self, function: Callable[[Policy, str], R] | str, *, timeout_s: float | None = TIMEOUT_S
    ) -> list[R]:
        """Call a function with each policy of each worker, and its id; see `foreach_worker`.

        Args:
            function: function of a policy and its id.
            timeout_s: longest wait for the worker processes, seconds; None for no limit.

        Returns:
            The results, ordered by the index of the worker.

        Raises:
            Exception: see `foreach_worker`.
        """
        return list(
            itertools.chain(*self._call_all("foreach_policy", lambda index: (function,), timeout_s))
        )

    def foreach_trainable_policy(
        self, function: Callable[[Policy, str], R] | str, *, timeout_s: float | None = TIMEOUT_S
    ) -> list[R]:
        """Call a function with each policy that learns, of each worker; see `foreach_policy`.

        Args:
            function: function of a policy and its id.
            timeout_s: longest wait for the worker processes, seconds; None for no limit.

        Returns:
            The results, ordered by the index of the worker.

        Raises:
            Exception: see `foreach_worker`.
        """
        return list(
            itertools.chain(
                *self._call_all("foreach_trainable_policy", lambda index: (function,), timeout_s)
            )
        )

    def _call_all(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]], timeout_s: float | None
    ) -> list[Any]:
        """Call a method of all workers with arguments that depend on the index."""
        workers = self.remote_workers()
        if workers:  # refused before it has an effect anywhere
            packed_arguments(arguments(0), {})
        results = [getattr(self.local_worker(), method)(*arguments(0))]
        calls = [
            getattr(worker, method).remote(*arguments(worker.index)).future for worker in workers
        ]
        futures.wait(calls, timeout_s)
        for worker, call in zip(workers, calls, strict=True):
            if not call.done():
                raise CallTimeout(
                    f"worker {worker.index} has not answered the call of {method} in"
                    f" {timeout_s:g} s, but may still do what it asks for. Its environments may"
                    " hang, or a fragment may take long: give more timeout_s, or replace it with"
                    " trainer.workers.reset(others)"
                )
        return results + [call.result() for call in calls]

    def _registered(self) -> list[RemoteWorker]:
        source = self._training().source
        samplers = range(self._training().learning.worker_part.samplers_per_worker)
        return [
            self._handle(SamplerPlace(worker.slot, worker.incarnation, sampler), worker)
            for worker in source.workers()
            for sampler in samplers
        ]

    def _handle(self, place: SamplerPlace, worker: RegisteredWorker) -> RemoteWorker:
        def submit(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Future[Any]:
            packed = packed_arguments(*with_results(args, kwargs))
            calls = self._training().source.calls
            assert calls is not None, "this worker is a process"
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()  # a method that runs can't be cancelled
            self._loop.soon(lambda: calls.begin(place, method, packed, future))
            return future

        return RemoteWorker(submit, place, worker)
