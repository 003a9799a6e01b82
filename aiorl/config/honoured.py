"""Keys that are known but not heeded at every value yet: refused rather than ignored."""

from __future__ import annotations

from pydantic import BaseModel

from aiorl.errors import ConfigError

__all__ = ["NOT_YET_HONOURED", "check_honoured"]

NOT_YET_HONOURED: dict[str, str] = {
    "monitor": "recording of episodes is not there yet",
    "callbacks": "callbacks are not there yet",
    "eager": "updates always run compiled; eager updates are not there yet",
    "no_eager_on_workers": "it goes with eager, which is not there yet",
    "eager_tracing": "it goes with eager, which is not there yet",
    "optimizer": "the algorithm's own keys (lr, grad_clip, ...) set up its optimizer",
    "soft_horizon": "only a hard horizon is there yet; set horizon alone",
    "no_done_at_end": "it goes with soft_horizon, which is not there yet",
    "preprocessor_pref": "Atari preprocessing is not there yet",
    "evaluation_interval": "evaluation workers are not there yet",
    "evaluation_num_episodes": "evaluation workers are not there yet",
    "evaluation_config": "evaluation workers are not there yet",
    "num_gpus": "training on GPUs is not there yet",
    "num_gpus_per_worker": "workers act on CPUs only",
    "num_cpus_for_driver": "only a launcher can honour it; set threads to bound the learner's TensorFlow threads",
    "memory": "memory quotas are not there yet; bound the process with your service manager (ulimit, cgroups)",
    "memory_per_worker": "memory quotas are not there yet; bound the process with ulimit or cgroups",
    "object_store_memory_per_worker": "leases bound what a worker holds already",
    "sample_async": "a worker overlaps its samplers instead: set samplers_per_worker",
    "compress_observations": "columns are compressed on the wire where it pays: see transport.compression",
    "collect_metrics_timeout": "metrics come with the fragments, so nothing is waited for",
    "remote_worker_envs": "use vectorize: remote for one process per environment",
    "remote_env_batch_wait_ms": "environments with vectorize: remote are stepped in lockstep",
    "fake_sampler": "the fake sampler is not there yet",
    "input": "offline data is not there yet; only sampler is read",
    "input_evaluation": "it goes with offline input, which is not there yet",
    "postprocess_inputs": "it goes with offline input, which is not there yet",
    "shuffle_buffer_size": "it goes with offline input, which is not there yet",
    "output": "writing of sample batches is not there yet",
    "output_compress_columns": "it goes with output, which is not there yet",
    "output_max_file_size": "it goes with output, which is not there yet",
    "multiagent.policies": "several policies in one run are not there yet",
    "multiagent.policy_mapping_fn": "several policies in one run are not there yet",
    "multiagent.policies_to_train": "several policies in one run are not there yet",
    "multiagent.observation_fn": "several policies in one run are not there yet",
    "model.dim": "Atari preprocessing is not there yet",
    "model.framestack": "Atari preprocessing is not there yet",
    "model.custom_preprocessor": "custom preprocessors are not there yet",
}
"""Keys that are known but whose other values nothing heeds yet: refused at any value but the default."""


def check_honoured(config: BaseModel) -> None:
    """Refuses values that nothing heeds yet.

    Raises: ConfigError naming the key and what is not there yet.
    """
    defaults = type(config)()
    for dotted, reason in NOT_YET_HONOURED.items():
        value, default = _at(config, dotted), _at(defaults, dotted)
        if value != default:
            raise ConfigError(
                f"{dotted} can only be {default!r} for now, not {value!r}: {reason}.", key=dotted, value=value
            )


def _at(config: BaseModel, dotted: str) -> object:
    value: object = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value
