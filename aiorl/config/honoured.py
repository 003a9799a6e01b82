"""Keys that are known but not heeded at every value yet: refused rather than ignored."""

from __future__ import annotations

from pydantic import BaseModel

from aiorl.errors import ConfigError

__all__ = ["NOT_YET_HONOURED", "check_honoured"]

NOT_YET_HONOURED: dict[str, str] = {
    "eager": "updates always run compiled; eager updates are not there yet",
    "no_eager_on_workers": "it goes with eager, which is not there yet",
    "eager_tracing": "it goes with eager, which is not there yet",
    "optimizer": "the algorithm's own keys (lr, grad_clip, ...) set up its optimizer",
    "evaluation_interval": "evaluation workers are not there yet",
    "evaluation_num_episodes": "evaluation workers are not there yet",
    "evaluation_config": "evaluation workers are not there yet",
    "num_gpus": "training on GPUs is not there yet",
    "num_gpus_per_worker": "workers act on CPUs only",
    "num_cpus_for_driver": "only a launcher can honour it; set threads to bound the learner's TensorFlow threads",
    "memory": "memory quotas are not there yet; bound the process with your service manager (ulimit, cgroups)",
    "memory_per_worker": "memory quotas are not there yet; bound the process with ulimit or cgroups",
    "object_store_memory_per_worker": "leases bound what a worker holds already",
    "compress_observations": "columns are compressed on the wire where it pays: see transport.compression",
    "collect_metrics_timeout": "metrics come with the fragments, so nothing is waited for",
    "fake_sampler": "the fake sampler is not there yet",
    "input": "offline data is not there yet; only sampler is read",
    "input_evaluation": "it goes with offline input, which is not there yet",
    "postprocess_inputs": "it goes with offline input, which is not there yet",
    "shuffle_buffer_size": "it goes with offline input, which is not there yet",
    "output": "writing of sample batches is not there yet",
    "output_compress_columns": "it goes with output, which is not there yet",
    "output_max_file_size": "it goes with output, which is not there yet",
    "model.max_seq_len": "recurrent models train through whole fragments: set rollout_fragment_length",
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
