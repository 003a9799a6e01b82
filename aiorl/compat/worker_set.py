"""Workers that an optimizer drives: one in this process, and actors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from aiorl.actors.references import get
from aiorl.compat.arguments import KEY_OF_ARGUMENT
from aiorl.compat.remote import kill, remote
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.env.registry import EnvSource
from aiorl.errors import ConfigError


class WorkerSet:
    """A local worker, and handles of remote ones in processes of their own::

    workers = WorkerSet(env_creator="CartPole-v1", policy=PGTFPolicy, num_workers=4)
    batches = aiorl.get([worker.sample.remote() for worker in workers.remote_workers()])

    Its workers do only what they are called for. Those of a run, which sample for a trainer, are its
    ``trainer.workers``, another class: `reset` there makes the others leave the run, here it ends
    none.
    """

    def __init__(
        self,
        env_creator: EnvSource,
        policy: Any,
        trainer_config: Mapping[str, Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        """Make RolloutWorkers.

        Args:
            env_creator: see `RolloutWorker`; at the top level of a module, for remote workers.
            policy: see `RolloutWorker`; likewise.
            trainer_config: keys of a config. Those that have an argument of RolloutWorker are that
                argument; all but ``seed`` are the policies' base config. Each worker has a seed of
                its own: ``seed`` plus its index.
            num_workers: number of remote workers.

        Raises:
            ConfigError: an argument is wrong.
        """
        config = dict(trainer_config or {})
        # what samplers read is not evaluated: that is for stored input
        arguments = inspect.signature(RolloutWorker).parameters.keys() - {"input_evaluation"}
        keys = {argument: KEY_OF_ARGUMENT.get(argument, argument) for argument in arguments}
        args = {argument: config[key] for argument, key in keys.items() if key in config}
        # each worker gives its policies a seed of its own, unless their config has one
        policy_config = {key: value for key, value in config.items() if key != "seed"}
        args |= {"env_creator": env_creator, "policy": policy, "policy_config": policy_config}
        self._local_worker, self._remote_workers = make_workers(RolloutWorker, args, num_workers)

    @classmethod
    def of(cls, local_worker: Any, remote_workers: Sequence[Any] = ()) -> WorkerSet:
        """Return the set of workers that exist.

        Args:
            local_worker: worker of this process, which learns.
            remote_workers: handles of others, which sample; without any, the local worker does.
        """
        workers = cls.__new__(cls)
        workers._local_worker = local_worker
        workers._remote_workers = list(remote_workers)
        return workers

    def local_worker(self) -> Any:
        """Return the worker of this process."""
        return self._local_worker

    def remote_workers(self) -> list[Any]:
        """Return the handles of the remote workers."""
        return self._remote_workers

    def reset(self, remote_workers: Sequence[Any]) -> None:
        """Continue with these remote workers; it ends none.

        Args:
            remote_workers: their handles.
        """
        self._remote_workers = list(remote_workers)

    def foreach_worker(self, function: Callable[[Any], Any] | str) -> list[Any]:
        """Call a function with each worker, where it is; return the results, the local one's first.

        Args:
            function: function at the top level of a module, or its import path.

        Raises:
            RemoteError: it raised an exception in another process.
            ActorLost: a worker was lost.
        """
        return self._call_all("apply", lambda index: (function,))

    def foreach_worker_with_index(self, function: Callable[[Any, int], Any] | str) -> list[Any]:
        """Call a function with each worker and its index, which is 0 for the local one.

        Args:
            function: see `foreach_worker`.

        Returns:
            The results by index.
        """
        return self._call_all("apply", lambda index: (function, index))

    def foreach_policy(self, function: Callable[[Any, str], Any] | str) -> list[Any]:
        """Call a function with each policy of each worker, and its id.

        Args:
            function: see `foreach_worker`.

        Returns:
            The results of all workers in one list.
        """
        return list(chain(*self._call_all("foreach_policy", lambda index: (function,))))

    def foreach_trainable_policy(self, function: Callable[[Any, str], Any] | str) -> list[Any]:
        """Call a function with each policy that learns, of each worker; see `foreach_policy`.

        Args:
            function: see `foreach_worker`.

        Returns:
            The results of all workers in one list.
        """
        return list(chain(*self._call_all("foreach_trainable_policy", lambda index: (function,))))

    def _call_all(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Call a method of all workers at the same time, with arguments that depend on the
        index.
        """
        refs = [
            getattr(worker, method).remote(*arguments(index))
            for index, worker in enumerate(self._remote_workers, 1)
        ]
        return [getattr(self._local_worker, method)(*arguments(0)), *get(refs)]

    def stop(self) -> None:
        """End the remote workers and their processes, and stop the local one."""
        for worker in self._remote_workers:
            kill(worker)
        self._local_worker.stop()


def make_workers(
    worker_class: type[Any],
    worker_args: Mapping[str, Any] | Sequence[Any],
    num_workers: int,
    options: Mapping[str, Any] | None = None,
) -> tuple[Any, list[Any]]:
    """Make a worker in this process, and others in processes of their own.

    Args:
        worker_class: class of the workers, a RolloutWorker or one with its interface.
        worker_args: arguments by name, or in order; classes and functions among them must be at the
            top level of a module. By name, a RolloutWorker also gets its ``worker_index``,
            ``num_workers``, and a seed of its own if there is a ``seed``.
        num_workers: number of remote workers.
        options: limits of their processes, see `aiorl.remote`.

    Returns:
        The worker of this process, and the handles of the others.

    Raises:
        ConfigError: an argument or a limit is wrong.
    """
    if num_workers < 0:
        raise ConfigError(
            f"num_workers is {num_workers!r}, expected at least 0.", key="num_workers"
        )
    remote_class = remote(worker_class, **(options or {}))
    # the local worker first: if an argument is wrong, no process is left behind
    if not isinstance(worker_args, Mapping):
        local_worker = worker_class(*worker_args)
        return local_worker, [remote_class.remote(*worker_args) for _ in range(num_workers)]
    by_index = [dict(worker_args) for _ in range(num_workers + 1)]
    if issubclass(worker_class, RolloutWorker):
        for index, args in enumerate(by_index):
            args |= {"worker_index": index, "num_workers": num_workers}
            if args.get("seed") is not None:
                args["seed"] += index
    local_worker = worker_class(**by_index[0])
    return local_worker, [remote_class.remote(**args) for args in by_index[1:]]
