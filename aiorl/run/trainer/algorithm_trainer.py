"""What trains with an algorithm, whichever it is."""

from __future__ import annotations

import contextlib
import logging
import secrets
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from aiorl.acting.acting_state import ActingState
from aiorl.acting.actor import Actor
from aiorl.acting.checkpoint import Checkpoint
from aiorl.acting.observation.filters import ObservationFilter
from aiorl.acting.policy import Policy
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.env.registry import EnvCreator
from aiorl.errors import CheckpointError, ConfigError, PolicyError, UnknownPolicyError
from aiorl.learning.algorithms.algorithm import AlgorithmState
from aiorl.learning.algorithms.registry import algorithm_class, config_class
from aiorl.learning.tf_runtime import prepare_environment
from aiorl.net.wire.messages import Snapshot
from aiorl.process.replaced_file import replaced
from aiorl.process.tasks import Tasks
from aiorl.run.build import plan_learning
from aiorl.run.evaluation import Evaluation, evaluate
from aiorl.run.evaluations import Evaluations, manner_of
from aiorl.run.export.writing import export_policy
from aiorl.run.setup import TrainingSetup
from aiorl.run.trainer.in_process import InProcessTraining
from aiorl.run.trainer.loop_thread import LoopThread
from aiorl.run.trainer.trainer import Trainer
from aiorl.run.trainer.with_workers import TrainingWithWorkers
from aiorl.run.trainer.worker_set import WorkerSet
from aiorl.run.worker.sampler_unit import SamplerUnit, UnitPlace
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.worker import Worker

__all__ = ["AlgorithmTrainer"]

_OF_EPISODES = ("episode", "policy_reward", "custom_metrics", "hist_stats", "sampler_perf")

Weights = Mapping[str, Mapping[str, NDArray[Any]]]


class AlgorithmTrainer(Trainer):
    """Trains with one of aiorl's algorithms.

    Without workers of its own (``num_workers=0``) and without an address to listen on (``bind``), all of it happens in
    the caller's thread. Otherwise worker processes sample, as they do for ``python -m aiorl.learner``. Between two
    calls of ``train`` an on-policy algorithm stands still, and workers of a streaming one use up the leases they have.
    A subclass names the config of its algorithm.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("_default_config")
        if own is not None and "_name" not in vars(cls):
            cls._name = own.model_fields["algo"].default

    @classmethod
    def _made_for(cls, algo: str) -> type[AlgorithmTrainer]:
        for kind in AlgorithmTrainer.__subclasses__():
            if kind._name == algo:
                return kind
        own = config_class(algo)
        return type(f"{algorithm_class(algo).__name__}Trainer", (AlgorithmTrainer,), {"_default_config": own})

    @property
    def workers(self) -> WorkerSet:
        """Who samples."""
        training = self._training
        return WorkerSet(
            self._local_worker,
            self._loop.do,
            training.training if isinstance(training, TrainingWithWorkers) else None,
            self.stop,
        )

    def collect_metrics(self, selected_workers: None = None) -> dict[str, Any]:
        """What the newest result tells of episodes: the averages, smoothed as configured, of all workers together.

        Raises:
            NotImplementedError: of some workers only; what comes with their fragments is not kept apart.
        """
        if selected_workers is not None:
            raise NotImplementedError("metrics are of all workers: what comes with fragments is not kept apart")
        return {name: value for name, value in self._result.items() if name.startswith(_OF_EPISODES)}

    # Acting -----------------------------------------------------------------------------------------------------

    def compute_action(
        self,
        observation: Any,
        state: Sequence[NDArray[Any]] | None = None,
        prev_action: Any = None,
        prev_reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        policy_id: str = DEFAULT_POLICY_ID,
        full_fetch: bool = False,
        *,
        explore: bool = False,
    ) -> Any:
        """The action for one observation, as the environment takes it; filter statistics stay as they are.

        Args:
            observation: as the environment gives it.
            state: recurrent state; None or empty is that of an episode's start.
            prev_action: the action before, for a policy that looks back.
            prev_reward: the reward before.
            info: not used by aiorl's networks.
            policy_id: which policy.
            full_fetch: also without a state, return all three.
            explore: True draws from the action distribution, False takes its most likely action.
        Returns: the action; with a state given, or ``full_fetch``, that, the state after the step, and a dict of what
            was computed beside.

        Raises:
            BatchError: the observation does not fit the space (also a ValueError).
            UnknownPolicyError: there is no such policy (also a KeyError).
            PolicyError: it is of a class of your own, and takes observations as `get_policy` of it says.
        """
        if self._is_users(policy_id):
            raise PolicyError(
                f"policy {policy_id!r} is of a class of your own: ask get_policy({policy_id!r}) for actions, with what "
                "the preprocessor makes of observations"
            )
        given = [] if state is None else list(state)
        found = self._actor(policy_id).compute_single_action(
            observation, given, prev_action, prev_reward, explore=explore
        )
        return found if given or full_fetch else found[0]

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy:
        """A policy as workers have it, with the weights of now; one of a class of your own is the local worker's.

        Raises:
            UnknownPolicyError: there is no such policy (also a KeyError).
        """
        if self._is_users(policy_id):
            return self._local_worker().policy_map[policy_id]
        return self._actor(policy_id).policy

    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, dict[str, NDArray[Any]]]:
        """Policy id -> copies of the weights by name; of all policies, or of those named. A string is one name."""
        weights = self._settled().learning.group.get_weights()
        policies = [policies] if isinstance(policies, str) else policies
        if unknown := set(policies or ()) - weights.keys():
            raise UnknownPolicyError(sorted(unknown)[0], weights)
        return {policy_id: own for policy_id, own in weights.items() if policies is None or policy_id in policies}

    def set_weights(self, weights: Weights) -> None:
        """Set weights of policies, all of each, and give them to the workers; optimisers stay as they are.

        Raises:
            UnknownPolicyError: there is no such policy (also a KeyError).
            ConfigError: weights that don't fit (also a ValueError).
        """
        if not isinstance(weights, Mapping) or not all(isinstance(own, Mapping) for own in weights.values()):
            raise ConfigError(
                f"weights are {weights!r:.200}, expected a dict for each policy id, of arrays by name, as get_weights "
                "gives it"
            )
        training = self._settled()
        group = training.learning.group
        state, known = group.get_state(), {*group.algorithms, *group.fixed}
        if unknown := weights.keys() - known:
            raise UnknownPolicyError(sorted(unknown)[0], known)
        tensors = dict(state.tensors)
        for policy_id, own in weights.items():
            prefix = f"{policy_id}/weights/"
            names = [name.removeprefix(prefix) for name in state.tensors if name.startswith(prefix)]
            if missing := [name for name in names if name not in own]:
                raise ConfigError(f"these weights can't be set: {missing[0]!r} of {policy_id!r} is missing")
            for name, value in own.items():
                tensors[f"{policy_id}/weights/{name}"] = array = np.array(value)
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    said = f"these weights can't be set: {name!r} of {policy_id!r} holds numbers that are not finite"
                    raise ConfigError(said)
        try:
            group.set_state(AlgorithmState(tensors, state.values))
        except CheckpointError as error:
            raise ConfigError(f"these weights can't be set: {error.reason}") from error
        group.weights_replaced()
        training.set_weights(group.get_weights())

    # Saving -----------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path | None = None) -> str:
        """Write a checkpoint: policies, optimisers, filters, counters and the config.

        Whoever restores it trains as this trainer does from here on, given the same samples. Where all is sampled in
        this process, by whole episodes, and there is a seed, the samples are the same too, bit by bit: what samples
        begins new episodes here as it does there.

        Args:
            directory: where, made if missing; None is the run's directory of checkpoints.
        Returns: its path, for ``restore``, `aiorl.load_policy`, `aiorl.evaluate` and ``init_from``.

        Raises:
            CheckpointError: it can't be written.
        """
        written = self._write_checkpoint(None if directory is None else Path(directory).expanduser())
        self._training.begin_episodes_anew()
        return written

    def export_policy_model(
        self, export_dir: str | Path, policy_id: str = DEFAULT_POLICY_ID, *, formats: Sequence[str] = ("onnx",)
    ) -> dict[str, str]:
        """Write a policy, as it is now, as files that run without aiorl; see `aiorl.export_policy`.

        Args:
            export_dir: gets a directory for each format.
            policy_id: which policy.
            formats: "onnx", "savedmodel", "keras", "tflite".
        Returns: format -> what one opens.

        Raises: what `aiorl.export_policy` raises.
        """
        with tempfile.TemporaryDirectory(prefix="aiorl-") as folder:
            checkpoint = self._write_checkpoint(Path(folder), with_experience=False)
            written = export_policy(checkpoint, export_dir, formats, policy_id=policy_id)
        return {name: str(path) for name, path in written.items()}

    def export_policy_checkpoint(
        self, export_dir: str | Path, filename_prefix: str = "model", policy_id: str = DEFAULT_POLICY_ID
    ) -> str:
        """Write the weights of a policy, as they are now, as one safetensors file.

        Returns: its path, ``export_dir/filename_prefix.safetensors``.
        """
        path = Path(export_dir) / f"{filename_prefix}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            save_file(self.get_weights([policy_id])[policy_id], temporary)
        return str(path)

    def _export_model(self, export_formats: Sequence[str], export_dir: str | Path) -> dict[str, str]:
        """Export below a directory: ``model`` (ONNX) and ``checkpoint``, and formats of `export_policy_model`.

        Returns: format -> path.
        """
        exported = {}
        for name in export_formats:
            if name == "checkpoint":
                exported[name] = self.export_policy_checkpoint(Path(export_dir) / name)
            elif name == "model":
                exported[name] = self.export_policy_model(Path(export_dir) / name)["onnx"]
            else:
                exported |= self.export_policy_model(export_dir, formats=[name])
        return exported

    def evaluate(self, episodes: int | None = None, *, seed: int | None = None, **how: Any) -> Evaluation:
        """Play whole episodes with the policies of now, one environment, in this process; training does not notice.

        Args:
            episodes: how many; None takes ``evaluation_num_episodes``.
            seed: of the environment and of all that is drawn; None takes a fresh one, which the result names.
            **how: ``explore``, ``config``, ``video`` and others of `aiorl.evaluate`; the first two are as
                ``evaluation_config`` says where they are not given.
        Returns: what was played, of no checkpoint.

        Raises: what `aiorl.evaluate` raises.
        """
        self._check_running()
        self._before_evaluate()
        count = self.config.evaluation_num_episodes if episodes is None else episodes
        with tempfile.TemporaryDirectory(prefix="aiorl-") as folder:
            checkpoint = self._write_checkpoint(Path(folder), with_experience=False)
            found = evaluate(checkpoint, episodes=count, seed=seed, **{**manner_of(self.config), **how})
        return replace(found, checkpoint="")

    # Trainer ------------------------------------------------------------------------------------------------------

    def _planned(self, config: CommonConfig) -> CommonConfig:
        prepare_environment(config)  # a module of the user's may load TensorFlow
        self._plan = plan_learning(config)
        return self._plan.config

    def _init(self, config: CommonConfig, env_creator: EnvCreator) -> None:
        self._loop = LoopThread("aiorl-trainer")
        self._built: InProcessTraining | TrainingWithWorkers | None = None
        self._worker: SamplerUnit | None = None
        self._evaluations: Evaluations | None = None
        self._result: dict[str, Any] = {}
        self._actors: dict[str, tuple[tuple[int, int], Actor, ObservationFilter]] = {}
        setup = TrainingSetup(
            config,
            self._directory,
            self._tell,
            plan=self._plan,
            restored=self._restored,
            before_saving=self._files.before_checkpoint,
        )
        training: InProcessTraining | TrainingWithWorkers
        if config.is_alone:
            training = self._built = InProcessTraining(setup, Tasks(lambda error: None))
            training.begin()
        else:
            training = self._built = TrainingWithWorkers(self._loop, setup)
        self.iteration = training.results.training_iteration
        self._checkpointed = time.monotonic()
        learning = training.learning
        self._acting = ActingState.of(config, learning.worker_part, learning.graphs, learning.spaces)
        training.flow.is_enough = training.iteration.is_due
        if config.evaluation_interval:
            is_beside = False if config.is_alone and not config.evaluation_num_workers else None
            saver, run_dir = training.saver, self._directory.path
            save = partial(saver.save_last, with_experience=False)
            self._evaluations = Evaluations(config, run_dir, save, tell=self._tell, is_beside=is_beside)
            self._evaluate_if_due(self._evaluations)

    @property
    def _training(self) -> InProcessTraining | TrainingWithWorkers:
        self._check_running()
        assert self._built is not None
        return self._built

    def _settled(self) -> InProcessTraining | TrainingWithWorkers:
        """What trains, while nobody else uses its policies."""
        self._training.settle()
        return self._training

    def _train(self) -> dict[str, Any]:
        training = self._training
        self.global_vars["timestep"] = training.counters.env_steps_sampled
        self._result = training.train_iteration()
        return dict(self._result)

    def _save_in_passing(self) -> None:
        """Write a checkpoint if it is time; what goes wrong is told, and training goes on."""
        interval_s, now, training = self.config.checkpoint_interval_s, time.monotonic(), self._training
        if not interval_s or now - self._checkpointed < interval_s:
            return
        if isinstance(training, TrainingWithWorkers):
            self._loop.do(training.saver.save_in_passing)
        else:  # at once: the next iteration would change what is written
            self._save_unsaved()
        self._checkpointed = time.monotonic()  # so that a large replay doesn't take all the time

    def _save_unsaved(self) -> None:
        saver = self._training.saver
        if saver.has_unsaved:
            try:
                self._loop.call(saver.save_last())
            except CheckpointError as error:
                self._tell(f"{error}; training goes on", logging.ERROR)

    def _evaluate(self) -> dict[str, Any]:
        if self._evaluations is None:
            return {}
        self._evaluate_if_due(self._evaluations)
        return self._loop.do(self._evaluations.take)

    def _evaluate_if_due(self, evaluations: Evaluations) -> None:
        iteration = self.iteration
        if not evaluations.is_due(iteration):
            return
        self._before_evaluate()
        is_here = isinstance(self._training, InProcessTraining)
        if evaluations.is_beside and is_here:
            self._loop.call(evaluations.begin_and_write(iteration))
        elif evaluations.is_beside:
            self._loop.do(lambda: evaluations.begin(iteration))
        elif is_here:
            evaluations.run_here(
                iteration,
                lambda: self._loop.call(evaluations.checkpoint()),
                lambda path, request: evaluate(path, **request).to_dict(),
            )
        else:
            self._loop.call(evaluations.run(iteration))

    def _check_fits(self, checkpoint: Checkpoint) -> None:
        super()._check_fits(checkpoint)
        for name, own in self._settled().learning.group.get_state().tensors.items():
            found = checkpoint.tensors.get(f"algorithm/{name}")
            if "/weights/" in name and (found is None or found.shape != own.shape):
                said = "none" if found is None else f"one of shape {list(found.shape)}"
                raise CheckpointError(
                    checkpoint.path,
                    f"belongs to another network: {name} has shape {list(own.shape)} here, and there is {said}",
                )

    def _recover(self) -> None:
        left = len(self.workers.remote_workers())
        raise RuntimeError("training has ended with an error" if left else "no healthy worker is left")

    def _callbacks(self) -> DefaultCallbacks | None:
        return self._training.callbacks

    def _has_reached(self, stop_return: float) -> bool:
        return self._training.results.has_reached(stop_return)

    def _stop(self) -> None:
        with contextlib.ExitStack() as stack:  # from the last to the first, whatever becomes of the others
            stack.callback(self._loop.close)
            training = self._built
            if training is not None:
                stack.callback(training.close, final=self._is_final)
            if isinstance(training, InProcessTraining) and (saver := training.saver).has_unsaved:
                stack.callback(lambda: self._loop.call(saver.save_last()))
            if self._evaluations is not None:
                stack.callback(self._end_evaluations, self._evaluations)
            if self._worker is not None:
                stack.callback(self._worker.close)

    # Inside -----------------------------------------------------------------------------------------------------

    def _end_evaluations(self, evaluations: Evaluations) -> None:
        async def end() -> None:
            if not self._is_hurried:
                await evaluations.finish()
            await evaluations.close()

        self._loop.end(end(), evaluations.hurry)

    def _write_checkpoint(self, directory: Path | None, *, with_experience: bool = True) -> str:
        """Write one that training does not notice; see ``save``."""
        self._check_running()
        return str(self._loop.call(self._training.saver.save_last(directory, with_experience=with_experience)))

    def _is_users(self, policy_id: str) -> bool:
        """Whether a policy is of a user's class, and none of the learner's networks."""
        self._check_running()
        return policy_id in self._acting.part.policies and policy_id not in self._acting.graphs

    def _actor(self, policy_id: str) -> Actor:
        """A policy that acts, with the weights and statistics of now."""
        training = self._training
        version = training.flow.publisher.version, training.counters.updates  # not each update is published
        known = self._actors.get(policy_id)
        if known is None:
            policy_id = self._acting.with_network(policy_id, "this trainer")
            parts = self._acting.parts_of(policy_id, seed=self.config.seed)
            known = ((-1, -1), self._acting.actor(parts), parts.filter)
        had, actor, own = known
        if had != version:
            actor.policy.set_weights(self.get_weights([policy_id])[policy_id])
            self._copy_filter(policy_id, own)
            actor.policy.on_global_var_update({"timestep": training.counters.env_steps_sampled})
            self._actors[policy_id] = (version, actor, own)
        return actor

    def _copy_filter(self, policy_id: str, own: ObservationFilter) -> None:
        merged = self._training.flow.publisher.filters[policy_id]
        if not merged.is_identity:
            own.restore(self._loop.do(merged.state))  # workers may bring more of them now

    def _local_worker(self) -> Worker:
        training = self._settled()
        if isinstance(training, InProcessTraining):
            unit = training.unit()
        else:
            publisher, learning = training.flow.publisher, training.learning
            snapshot = Snapshot(
                publisher.version,
                learning.group.get_weights(),
                self._loop.do(publisher.filter_states),
                {},
                dict(self.global_vars),
            )
            if self._worker is None:
                place = UnitPlace(0, secrets.token_hex(8), num_workers=self.config.num_workers)
                self._worker = SamplerUnit(learning.worker_part, learning.graphs, snapshot, place)
            unit = self._worker
            unit.offer(snapshot)
        unit.take_up()
        return unit.worker
