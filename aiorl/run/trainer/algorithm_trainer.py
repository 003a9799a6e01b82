"""Trainer that works with every algorithm."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import tempfile
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from aiorl.acting.acting_state import ActingState
from aiorl.acting.actor import Actor
from aiorl.acting.checkpoint import Checkpoint
from aiorl.acting.filters import ObservationFilter, check_states
from aiorl.acting.policy import Policy
from aiorl.config.parts import RunParts, RuntimePart
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.env.registry import EnvCreator
from aiorl.errors import (
    AiorlError,
    CheckpointError,
    ConfigError,
    EndOfData,
    UnknownPolicyError,
)
from aiorl.learning.algorithm import AlgorithmState
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.registry import algorithm_class
from aiorl.learning.tf_runtime import prepare_environment
from aiorl.net.wire.messages import Snapshot
from aiorl.process.replaced_file import replaced
from aiorl.process.tasks import report_stray_errors
from aiorl.run.build import Learning, plan_learning
from aiorl.run.end import Ended
from aiorl.run.evaluation import Evaluation, evaluate
from aiorl.run.evaluations import Evaluations, evaluate_arguments
from aiorl.run.export.writing import export_policy
from aiorl.run.observers import Checkpoints
from aiorl.run.policy_changes import plan_addition, plan_removal, policy_ids_of
from aiorl.run.report.results import Result
from aiorl.run.restoring import is_scaled
from aiorl.run.run import build_or_restore, source_for
from aiorl.run.threads import BrokenOff, LoopThread
from aiorl.run.trainer.trainer import Trainer
from aiorl.run.trainer.worker_set import WorkerSet
from aiorl.run.training import Training
from aiorl.run.worker.sampler_unit import SamplerUnit, UnitPlace
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.worker import Worker

_JOIN_S = 10.0
_OF_EPISODES = ("episode", "policy_reward", "custom_metrics", "hist_stats", "sampler_perf")

T = TypeVar("T")
Weights = Mapping[str, Mapping[str, NDArray[Any]]]


def _refuse_unknown(policy_ids: Iterable[str], existing: Collection[str]) -> None:
    """Raise an error if an id is none of the existing ones.

    Raises:
        UnknownPolicyError: no policy has that id.
    """
    unknown = set(policy_ids).difference(existing)
    if unknown:
        raise UnknownPolicyError(min(unknown), existing)


def _of_policies(policy_ids: Collection[str], weights: Weights) -> dict[str, dict[str, Any]]:
    return {
        policy_id: dict(arrays) for policy_id, arrays in weights.items() if policy_id in policy_ids
    }


def _acting_state(config: CommonConfig, learning: Learning) -> ActingState:
    return ActingState.of(config.to_dict(), learning.worker_part, learning.graphs, learning.spaces)


class AlgorithmTrainer(Trainer):
    """Trainer for any of aiorl's algorithms.

    Without local workers (``num_workers=0``) and without an address to listen on (``bind``),
    everything happens in the caller's thread. Otherwise worker processes sample, as they do for
    ``aiorl train``. Between two calls of ``train``, workers of an on-policy algorithm pause, and
    workers of a streaming algorithm use up their leases. A subclass names the config of its
    algorithm.
    """

    _has_warned_of_filters = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        default_config = vars(cls).get("_default_config")
        if default_config is not None and "_name" not in vars(cls):
            cls._name = default_config.model_fields["algo"].default

    @classmethod
    def _named(cls, algo: str) -> type[Trainer] | None:
        if cls is AlgorithmTrainer and algo in ALGORITHMS:
            return trainer_class(algo)
        return super()._named(algo)

    @classmethod
    def _made_for(cls, algo: str) -> type[AlgorithmTrainer]:
        return trainer_class(algo)

    @property
    def workers(self) -> WorkerSet:
        """Set of workers that sample."""
        self._check_running()
        return WorkerSet(self._loop, lambda: self._training, self._local_worker, self.stop)

    @property
    def policy_ids(self) -> list[str]:
        """Ids of the policies, in order."""
        return policy_ids_of(self._settled().learning)

    def collect_metrics(self, selected_workers: None = None) -> dict[str, Any]:
        """Return the episode metrics of the newest result: averages over all workers, smoothed as
        configured.

        Args:
            selected_workers: must be None: metrics are not kept per worker.

        Raises:
            NotImplementedError: some workers are selected.
        """
        if selected_workers is not None:
            raise NotImplementedError("metrics cover all workers: they are not kept per worker")
        return {
            name: value for name, value in self._result.items() if name.startswith(_OF_EPISODES)
        }

    # Acting
    # ----------------------------------------------------------------------------------------------

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
        """Return the action for one observation, in the environment's form; filter statistics do
        not change.

        Args:
            observation: the observation, in the environment's form.
            state: recurrent state, an array [...] per component; None or empty starts an episode.
            prev_action: the previous action, for a policy that takes it as input.
            prev_reward: the previous reward, for a policy that takes it as input.
            info: the info that came with the observation, for a policy whose class is your own.
            policy_id: id of the policy.
            full_fetch: return all three values even if no state is given.
            explore: True draws from the action distribution, False takes its most likely action.

        Returns:
            The action. With a state or ``full_fetch``: the action, the state after the step, and a
                dict of the policy's other outputs.

        Raises:
            BatchError: the observation does not fit the space (also a ValueError).
            UnknownPolicyError: no policy has that id (also a KeyError).
            PolicyError: the state does not fit the policy (also a ValueError).
        """
        state = [] if state is None else list(state)
        action, state_out, outputs = self._actor(policy_id).compute_single_action(
            observation, state, prev_action, prev_reward, info, explore=explore
        )
        if state or full_fetch:
            return action, state_out, outputs
        return action

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy:
        """Return a policy as workers have it, with the current weights.

        Its `compute_actions` takes observations that are preprocessed and filtered. A policy of
        your own class is the local worker's object.

        Args:
            policy_id: id of the policy.

        Returns:
            The policy.

        Raises:
            UnknownPolicyError: no policy has that id (also a KeyError).
        """
        return self._actor(policy_id).policy

    def get_weights(
        self, policies: Collection[str] | None = None
    ) -> dict[str, dict[str, NDArray[Any]]]:
        """Return copies of the weights: policy id -> name -> array, of any shape.

        Args:
            policies: ids of the policies, or one id; None takes all.

        Returns:
            Weights by policy id and name, each of any shape.

        Raises:
            UnknownPolicyError: no policy has one of these ids (also a KeyError).
        """
        weights = self._settled().learning.group.get_weights()
        if isinstance(policies, str):
            policies = [policies]
        _refuse_unknown(policies or (), weights)
        return weights if policies is None else _of_policies(policies, weights)

    def set_weights(self, weights: Weights) -> None:
        """Set the weights of policies and send them to the workers; the optimisers' state does not
        change.

        The statistics of observation filters do not change either: weights of another run need
        `set_policy_state`.

        Args:
            weights: policy id -> name -> array, in the form that ``get_weights`` returns; all
                weights of each policy.

        Raises:
            UnknownPolicyError: no policy has one of these ids (also a KeyError).
            ConfigError: the weights don't fit the policy, or are not finite (also a ValueError).
        """
        filters = self._training.core.publisher.filters
        for policy_id in filters.keys() & set(weights if isinstance(weights, Mapping) else ()):
            merged = filters[policy_id]
            learns_nothing = merged.is_frozen and not merged.is_identity
            if learns_nothing and not self._loop.do(merged.state).get("n"):
                raise ConfigError(
                    f"weights of {policy_id!r} can't be set without its observation filter, which"
                    " has seen nothing and does not learn here: set_policy_state sets both, from"
                    " get_policy_state"
                )
        self._replace_weights(weights)
        if (
            any(not filters[policy_id].is_identity for policy_id in weights)
            and not self._has_warned_of_filters
        ):
            self._has_warned_of_filters = True
            self._tell(
                "set_weights leaves the statistics of the observation filters as they are: use"
                " get_policy_state and set_policy_state for weights of another run",
                logging.WARNING,
            )
        self._publish(weights)

    def get_policy_state(
        self, policy_id: str = DEFAULT_POLICY_ID
    ) -> dict[str, dict[str, NDArray[Any]]]:
        """Return copies of everything that a policy has learned to act with, for `set_policy_state`
        of any trainer.

        Args:
            policy_id: id of the policy.

        Returns:
            ``weights`` and ``filter``: arrays of any shape by name; the filter of observations is
                empty without one.
            ``units``: ``scaled``, True if actions are in units of `normalize_actions`.

        Raises:
            UnknownPolicyError: no policy has that id (also a KeyError).
        """
        weights = self.get_weights([policy_id])[policy_id]
        merged = self._training.core.publisher.filters[policy_id]
        graphs = self._training.learning.graphs
        return {
            "weights": weights,
            "filter": dict(self._loop.do(merged.state)),
            "units": {"scaled": np.array(is_scaled(graphs.get(policy_id, {})))},
        }

    def set_policy_state(
        self, state: Mapping[str, Any], policy_id: str = DEFAULT_POLICY_ID
    ) -> None:
        """Let a policy act as another one does, with its weights and its observation filter;
        workers get both at once.

        The optimiser's state does not change.

        Args:
            state: result of `get_policy_state`, also of another trainer or of a policy with another
                id.
            policy_id: id of the policy that changes.

        Raises:
            UnknownPolicyError: no policy has that id (also a KeyError).
            ConfigError: the weights or the statistics don't fit the policy; nothing has changed
                (also a ValueError).
        """
        if not isinstance(state, Mapping) or state.keys() != {"weights", "filter", "units"}:
            raise ConfigError(f"state is {state!r:.200}, expected the result of get_policy_state")
        was_scaled = bool(state["units"]["scaled"])
        graphs = self._training.learning.graphs
        if policy_id in graphs and was_scaled != is_scaled(graphs[policy_id]):
            raise ConfigError(
                "this state can't be set: it is of a policy with normalize_actions:"
                f" {str(was_scaled).lower()}, and {policy_id!r} has another one",
                key="normalize_actions",
            )
        merged = self._training.core.publisher.filters.get(policy_id)
        if merged is not None:
            try:
                check_states({policy_id: merged}, {policy_id: state["filter"]}, "state")
            except CheckpointError as error:
                raise ConfigError(f"this state can't be set: {error.reason}") from error
        self._replace_weights({policy_id: state["weights"]})
        assert merged is not None, "its weights were known"
        self._loop.do(lambda: merged.restore(state["filter"]))
        self._publish([policy_id])

    def add_policy(
        self, policy_id: str, *, like: str, weights: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Add a policy that acts and does not learn, such as an opponent in a league; workers get
        its network with the next weights.

        Agents that appear from then on can act with it, if ``multiagent.policy_mapping_fn``, a
        function of agent, episode and worker, chooses it from ``worker.policy_map``. Checkpoints
        contain it.

        Args:
            policy_id: its id, which no policy of the run has or had.
            like: id of a policy. The new one has its network, spaces, settings and statistics of
                observations, and explores as that one does now.
            weights: its weights by name, arrays of any shape, as ``get_weights()[like]``; None
                takes the current ones of the other policy.

        Raises:
            UnknownPolicyError: there is no policy `like` (also a KeyError).
            ConfigError: the id is in use, the weights don't fit the other policy, there is no such
                function, or messages have no room for another policy (also a ValueError).
        """
        plan_addition(self._settled().learning, policy_id, like, weights)
        self._change_policies()

    def remove_policy(self, policy_id: str) -> None:
        """Remove a policy that does not learn; episodes that run keep it to their end.

        Args:
            policy_id: its id.

        Raises:
            UnknownPolicyError: there is no such policy (also a KeyError).
            ConfigError: the policy learns, agents are mapped to it, or its class is your own (also
                a ValueError).
        """
        plan_removal(self._settled().learning, policy_id)
        self._actors.pop(policy_id, None)
        self._change_policies()

    def set_env_config(self, changes: Mapping[str, Any]) -> None:
        """Change settings of the environments, such as the level of a curriculum; all workers get
        them, also those that join later.

        Each environment takes them before its next episode: by its method ``set_env_config``,
        called with the dict of all settings, if it or an environment in its wrappers has one.
        Otherwise it is closed and made again. Checkpoints contain them, and evaluations play with
        them.

        Args:
            changes: the keys of ``env_config`` that change; the others stay as they are.

        Raises:
            ConfigError: these environments can't change, because they are vectorised by themselves,
                or one object without such a method holds all of them (also a ValueError).
        """
        self._training.learning.env_changes.plan(changes)
        self._loop.ask(self._training.change_env_config())

    def _change_policies(self) -> None:
        training = self._training
        self._loop.ask(training.change_policies())
        self._acting = _acting_state(self.config, training.learning)

    def _publish(self, policy_ids: Collection[str]) -> None:
        """Send weights of policies to the workers."""
        training = self._training
        weights = _of_policies(policy_ids, training.learning.group.get_weights())
        self._loop.do(lambda: training.set_weights(weights))

    def _replace_weights(self, weights: Weights) -> None:
        """Set the weights of policies without sending them to the workers.

        Raises:
            UnknownPolicyError: no policy has one of these ids (also a KeyError).
            ConfigError: the weights don't fit the policy, or are not finite (also a ValueError).
        """
        if not isinstance(weights, Mapping) or not all(
            isinstance(arrays, Mapping) for arrays in weights.values()
        ):
            raise ConfigError(
                f"weights are {weights!r:.200}, expected a dict of arrays by name for each policy"
                " id, in the form that get_weights returns"
            )
        group = self._settled().learning.group
        _refuse_unknown(weights, group.policy_ids)
        state = group.get_state()
        tensors = dict(state.tensors)
        for policy_id, arrays in weights.items():
            prefix = f"{policy_id}/weights/"
            new_tensors = {f"{prefix}{name}": np.array(value) for name, value in arrays.items()}
            for name in state.tensors:
                if name.startswith(prefix) and name not in new_tensors:
                    raise ConfigError(f"these weights can't be set: {name!r} is missing")
            for name, tensor in new_tensors.items():
                if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
                    raise ConfigError(
                        f"these weights can't be set: {name!r} contains numbers that are not finite"
                    )
            tensors |= new_tensors
        try:
            group.set_state(AlgorithmState(tensors, state.values))
        except CheckpointError as error:
            raise ConfigError(f"these weights can't be set: {error.reason}") from error
        group.weights_replaced()

    # Saving
    # ----------------------------------------------------------------------------------------------

    def save(self, directory: str | Path | None = None) -> str:
        """Write a checkpoint: policies, optimisers, filters, counters and the config.

        Given the same samples, a restored trainer trains exactly as this one does from here on. The
        samples are identical, too, if everything is sampled in this process by whole episodes and
        the run has a seed: environments start new episodes here as they do after a restore.

        Args:
            directory: directory to write to, made if missing; None is the run's directory of
                checkpoints.

        Returns:
            Path of the checkpoint, for ``restore``, `aiorl.load_policy`, `aiorl.evaluate` and
            ``init_from``.

        Raises:
            CheckpointError: the checkpoint can't be written.
        """
        path = self._write_checkpoint(None if directory is None else Path(directory).expanduser())
        self._loop.ask(self._training.source.begin_episodes_anew())
        return path

    def export_policy_model(
        self,
        export_dir: str | Path,
        policy_id: str = DEFAULT_POLICY_ID,
        *,
        formats: Sequence[str] = ("onnx",),
    ) -> dict[str, str]:
        """Export the current policy to files that run without aiorl; see `aiorl.export_policy`.

        Args:
            export_dir: directory that gets a directory for each format.
            policy_id: id of the policy.
            formats: any of "onnx", "savedmodel", "keras", "tflite".

        Returns:
            Path to open, by format.

        Raises:
            AiorlError: the policy cannot be exported; see `aiorl.export_policy`.
        """
        with tempfile.TemporaryDirectory(prefix="aiorl-") as folder:
            checkpoint = self._write_checkpoint(Path(folder), with_experience=False)
            written = export_policy(checkpoint, export_dir, formats, policy_id=policy_id)
        return {name: str(path) for name, path in written.items()}

    def export_policy_checkpoint(
        self,
        export_dir: str | Path,
        filename_prefix: str = "model",
        policy_id: str = DEFAULT_POLICY_ID,
    ) -> str:
        """Write the current weights of a policy to one safetensors file.

        Args:
            export_dir: directory of the file, made if missing.
            filename_prefix: name of the file without its suffix.
            policy_id: id of the policy.

        Returns:
            Path of the file, ``export_dir/filename_prefix.safetensors``.

        Raises:
            UnknownPolicyError: no policy has that id (also a KeyError).
        """
        path = Path(export_dir) / f"{filename_prefix}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            save_file(self.get_weights([policy_id])[policy_id], temporary)
        return str(path)

    def _export_model(
        self, export_formats: Sequence[str], export_dir: str | Path
    ) -> dict[str, str]:
        """Export into a directory: ``model`` (ONNX), ``checkpoint`` and the formats of
        `export_policy_model`.

        Returns:
            Path by format.
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

    def evaluate(
        self, episodes: int | None = None, *, seed: int | None = None, **how: Any
    ) -> Evaluation:
        """Play whole episodes with the current policies in one environment in this process;
        training is unaffected.

        Args:
            episodes: number of episodes; None takes ``evaluation_num_episodes``.
            seed: seed of the environment and of all random choices; None draws one, which the
                result contains.
            **how: other arguments of `aiorl.evaluate`, such as ``explore``, ``config`` and
                ``video``. The first two default to ``evaluation_config``.

        Returns:
            The episodes played; ``checkpoint`` is "".

        Raises:
            AiorlError: the episodes cannot be played; see `aiorl.evaluate`.
        """
        self._check_running()
        self._before_evaluate()
        count = self.config.evaluation_num_episodes if episodes is None else episodes
        with tempfile.TemporaryDirectory(prefix="aiorl-") as folder:
            checkpoint = self._write_checkpoint(Path(folder), with_experience=False)
            arguments = {**evaluate_arguments(self.config.evaluation_config), **how}
            evaluation = evaluate(checkpoint, episodes=count, seed=seed, **arguments)
        return replace(evaluation, checkpoint="")

    # Trainer
    # ----------------------------------------------------------------------------------------------

    def _planned(self, config: CommonConfig) -> CommonConfig:
        prepare_environment(RuntimePart.of(config))  # a module of the user's may load TensorFlow
        self._plan = plan_learning(config)
        return self._plan.config

    def _init(self, config: CommonConfig, env_creator: EnvCreator) -> None:
        self._loop = LoopThread("aiorl-trainer")
        self._ending.callback(self._loop.close)
        self._samples_itself = config.is_alone
        self._built: Training | None = None
        self._worker: SamplerUnit | None = None
        parts = RunParts.of(config)
        self._evaluations = Evaluations(
            parts.evaluation, self._directory.path, self._tell, can_play_here=config.is_alone
        )
        self._result: dict[str, Any] = {}
        self._actors: dict[str, tuple[tuple[int, int], Actor, ObservationFilter]] = {}
        self._ask(self._begin(parts))
        if not self._directory.is_new:
            self._directory.save_config(config)
        training = self._training
        self.iteration = training.results.training_iteration
        self._acting = _acting_state(config, training.learning)
        self._announce_evaluation()
        self._ask(training.begin())

    async def _begin(self, parts: RunParts) -> None:
        """Build the training, and return when it can begin."""
        restored = self._restored
        training = Training(
            parts,
            self._directory,
            self._tell,
            source_for(parts, self._loop),
            build=lambda: build_or_restore(self.config, self._directory, self._plan, restored),
            resumed=None if restored is None else restored.run,
            observers=[
                Checkpoints(parts.save.interval_s),
                self._output.files,
                self._evaluations,
            ],
            stands_still=True,
        )
        report_stray_errors(training.fail)
        try:
            await training.start()
            await training.ready()
        except Ended:
            raise AiorlError("the trainer was stopped while it started") from None
        except BaseException:
            training.end.set("the trainer could not start")
            await asyncio.shield(training.close("the learner failed", final=False))
            raise
        self._built = training
        self._ending.callback(self._end_training, training)
        self._ending.callback(self._end_evaluations)

    def _ask(self, step: Coroutine[Any, Any, T], *, and_raise: bool = True) -> T:
        """Return a coroutine's result; in a run without workers, sample and learn meanwhile.

        Args:
            step: the coroutine.
            and_raise: raise KeyboardInterrupt also if Ctrl-C came too late to interrupt the
                coroutine.

        Raises:
            KeyboardInterrupt: Ctrl-C interrupted the coroutine.
            Exception: the coroutine raised it.
        """

        def leave_turn() -> None:
            if self._built is not None:
                self._loop.soon(self._built.source.interrupt)

        try:
            result = self._loop.call(step, leave_turn if self._samples_itself else None)
        except BrokenOff as error:
            raise (error.__cause__ or error) from None
        if and_raise:
            self._raise_interrupt()
        return result

    def _raise_interrupt(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C came too late to interrupt the coroutine of `_ask`.

        Raises:
            KeyboardInterrupt: Ctrl-C came.
        """
        if self._loop.was_interrupted:
            self._loop.was_interrupted = False
            raise KeyboardInterrupt

    @property
    def _training(self) -> Training:
        self._check_running()
        assert self._built is not None
        return self._built

    def _settled(self) -> Training:
        """Return the training once nothing else uses its policies."""
        self._loop.ask(self._training.settle())
        return self._training

    def _train(self) -> dict[str, Any]:
        training = self._training
        self.global_vars["timestep"] = training.counters.env_steps_sampled
        result = self._ask(training.train_iteration(), and_raise=False)
        if result is None:
            raise EndOfData(training.end.reason)
        self._result = result
        return Result(result)

    def _evaluate(self, result: dict[str, Any]) -> None:
        self._raise_interrupt()
        if self.config.evaluation_interval:
            self._announce_evaluation()
            self._ask(self._training.after_iteration(result))

    def _announce_evaluation(self) -> None:
        is_last = self._training.end.has_come  # all stored experience was read
        if self._evaluations.is_due(self.iteration) or is_last:
            self._before_evaluate()

    def _save_unsaved(self) -> None:
        saver = self._training.saver
        if saver.has_unsaved:
            try:
                self._loop.ask(saver.save_last())
            except CheckpointError as error:
                self._tell(f"{error}; training continues", logging.ERROR)

    def _check_fits(self, checkpoint: Checkpoint) -> None:
        super()._check_fits(checkpoint)
        learning = self._settled().learning
        for name, tensor in learning.group.get_state().tensors.items():
            if name.partition("/")[0] in learning.changes.added:
                continue
            stored = checkpoint.tensors.get(f"algorithm/{name}")
            if "/weights/" in name and (stored is None or stored.shape != tensor.shape):
                other = "none" if stored is None else f"one of shape {list(stored.shape)}"
                raise CheckpointError(
                    checkpoint.path,
                    f"belongs to another network: {name} has shape {list(tensor.shape)} here, the"
                    f" checkpoint has {other}",
                )

    def _recover(self) -> None:
        if self.workers.remote_workers():
            raise RuntimeError("training has ended with an error")
        raise RuntimeError("no healthy worker is left")

    def _callbacks(self) -> DefaultCallbacks | None:
        return self._training.callbacks

    def _take_result(self, result: Mapping[str, Any]) -> None:
        if not self._why_stopped:  # a hook may have stopped the trainer
            self._training.take_result(result)
            self._loop.ask(self._training.change_env_config())

    def _newest_return(self) -> float:
        return self._training.results.newest_return

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _end_training(self, training: Training) -> None:
        """Save progress since the last checkpoint, and end workers and updates.

        Raises:
            CheckpointError: the checkpoint can't be written; everything else has ended.
            KeyboardInterrupt: Ctrl-C came meanwhile; everything has ended without waiting for a
                running update.
        """
        reason = "the trainer was stopped"

        async def close() -> None:
            training.stop(reason)
            try:
                await training.source.finish_update()
                if training.saver.has_unsaved:
                    await training.saver.save_last()
            finally:
                await training.close(reason, final=self._is_final)

        self._loop.end(close(), training.end.hurry.set)
        training.source.join(_JOIN_S)

    def _end_evaluations(self) -> None:
        async def end() -> None:
            evaluations = self._evaluations
            training = self._built
            if training is not None and not self._is_hurried:
                last = None
                if evaluations.is_owed and self._is_final:
                    last = training.results.training_iteration
                await evaluations.finish(training, evaluations.hurry, last=last)
            await evaluations.close()

        self._loop.end(end(), self._evaluations.hurry.set)

    def _write_checkpoint(self, directory: Path | None, *, with_experience: bool = True) -> str:
        """Write a checkpoint without any effect on training; see ``save``."""
        saver = self._training.saver
        return str(self._loop.ask(saver.save_last(directory, with_experience=with_experience)))

    def _actor(self, policy_id: str) -> Actor:
        """Return an acting policy with the current weights and filter statistics; one of the user's
        class is that of the local worker.
        """
        training = self._training
        acting = self._acting
        if policy_id in acting.part.policies and policy_id not in acting.graphs:
            return self._local_worker().actor(policy_id)
        # both, since not every update is published
        version = (training.core.publisher.version, training.counters.updates)
        if policy_id in self._actors:
            actor_version, actor, actor_filter = self._actors[policy_id]
        else:
            policy_id = self._acting.with_network(policy_id, "this trainer")
            parts = self._acting.parts_of(policy_id, seed=self.config.seed)
            actor_version, actor, actor_filter = (-1, -1), self._acting.actor(parts), parts.filter
        if actor_version != version:
            actor.policy.set_weights(self.get_weights([policy_id])[policy_id])
            merged = training.core.publisher.filters[policy_id]
            if not merged.is_identity:  # on the loop, where workers' statistics are added to it
                actor_filter.restore(self._loop.do(merged.state))
            actor.policy.on_global_var_update({"timestep": training.counters.env_steps_sampled})
            self._actors[policy_id] = (version, actor, actor_filter)
        return actor

    def _local_worker(self) -> Worker:
        training = self._settled()
        unit = self._ask(training.source.sampler_here())
        if unit is None:
            publisher = training.core.publisher
            learning = training.learning
            newest = training.core.session.start_data.snapshot
            assert newest is not None, "training has begun"
            snapshot = Snapshot(
                version=publisher.version,
                weights=learning.group.get_weights(),
                filters=self._loop.do(publisher.filter_states),
                filter_acks={},
                global_vars=dict(self.global_vars),
                policies=newest.policies,
                env_config=newest.env_config,
                env_changes=newest.env_changes,
            )
            if self._worker is None:
                place = UnitPlace(0, secrets.token_hex(8), num_workers=self.config.num_workers)
                self._worker = SamplerUnit(learning.worker_part, learning.graphs, snapshot, place)
                self._ending.callback(self._worker.close)
            unit = self._worker
            unit.offer(snapshot)
        unit.take_up()
        return unit.worker


def trainer_class(algo: str) -> type[AlgorithmTrainer]:
    """Return the trainer class of an algorithm; a user's own algorithm without a trainer gets a new
    class.

    Args:
        algo: name of the algorithm, or import path of a user's own.

    Returns:
        The trainer class.

    Raises:
        ConfigError: no algorithm has that name.
    """
    if algo in ALGORITHMS:
        return _trainer_of(algo)
    for kind in AlgorithmTrainer.__subclasses__():
        if kind._name == algo:
            return kind
    return _new_trainer_class(algo)


@functools.cache
def _trainer_of(algo: str) -> type[AlgorithmTrainer]:
    """Return the trainer class of one of aiorl's algorithms, always the same one."""
    return _new_trainer_class(algo)


def _new_trainer_class(algo: str) -> type[AlgorithmTrainer]:
    kind = algorithm_class(algo)
    return type(
        f"{kind.__name__}Trainer",
        (AlgorithmTrainer,),
        {
            "__doc__": f"Trainer for {kind.__name__}; see `{kind.__module__}`.",
            "__module__": __package__,
            "_default_config": kind.config_class,
        },
    )
