"""Names of other generations and libraries: renamed with a warning, or refused with what to use instead."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from aiorl.errors import ConfigError

__all__ = ["OTHER_ALGORITHMS", "REMOVED_KEYS", "check_removed", "rename_legacy"]

_log = logging.getLogger(__name__)

_OLD_MAX_SEQ_LEN = 20  # its default; it had no effect, and is in the config.yaml of older runs

REMOVED_KEYS: dict[str, str] = {
    "gpu": "Use num_gpus, the number of GPUs.",
    "gpu_fraction": "Use num_gpus with a fraction, such as num_gpus: 0.5.",
    "use_gpu_for_workers": "Use num_gpus_per_worker.",
    "tf_session_creator": "TensorFlow 2 has no sessions; tf_session_args sets thread pools and memory growth.",
}
"""Key -> what to use instead."""

OTHER_ALGORITHMS: dict[str, str] = {
    "c51": "dqn with num_atoms: 51; v_min and v_max bound its returns",
    "ddpg": "td3 with twin_q: false, policy_delay: 1, target_update_freq: 1, smooth_target_policy: false, "
    "noise_type: ornstein_uhlenbeck, exploration_noise: 0.2",
    "r2d2": "dqn with model.use_lstm: true, rollout_fragment_length: 40, replay_sequence_length: 24, burn_in: 8, "
    "train_batch_size: 256, prioritized_replay: true, value_rescaling: true",
    "rainbow": "dqn with double_q: true, dueling: true, n_step: 3, rollout_fragment_length: 16, "
    "prioritized_replay: true, num_atoms: 51; v_min and v_max bound its returns, noisy networks there are none",
    "reinforce": "pg",
}
"""Name in the literature -> the algorithm that it is here, with which settings; more is in its README."""


def check_removed(values: Mapping[str, Any]) -> None:
    """Refuses keys that are gone.

    Raises: ConfigError whose hint names the replacement (R168).
    """
    for name, hint in REMOVED_KEYS.items():
        if name in values:
            raise ConfigError(f"There is no key {name} any more.", key=name, value=values[name], hint=hint)


def rename_legacy(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with old names replaced by new ones, each with a warning in the log (R169); `values` stays as it is.

    Raises: ConfigError when the old and the new name are set to different values.
    """
    renamed = _rename(dict(values), "sample_batch_size", "rollout_fragment_length")
    if "lambda" in renamed and "lambda_" not in renamed:  # the field can't bear the name, which Python keeps
        renamed["lambda_"] = renamed.pop("lambda")
    if renamed.pop("sampling", "auto") != "auto":  # in the config.yaml of older runs, and in users' own
        _log.warning("sampling has no effect any more: environments are stepped in lockstep wherever that can be")
    multiagent = renamed.get("multiagent")
    if isinstance(multiagent, Mapping):
        renamed["multiagent"] = _rename(dict(multiagent), "policy_graphs", "policies", "multiagent.")
    model = renamed.get("model")
    if isinstance(model, Mapping) and "max_seq_len" in model and model.get("custom_model") is None:
        if model["max_seq_len"] != _OLD_MAX_SEQ_LEN:
            raise ConfigError(
                "There is no key model.max_seq_len any more.", key="model.max_seq_len", value=model["max_seq_len"],
                hint="Recurrent models train through whole fragments: set rollout_fragment_length.",
            )  # fmt: skip
        renamed["model"] = {name: model[name] for name in model if name != "max_seq_len"}
    transport = renamed.get("transport")
    if isinstance(transport, Mapping) and "receive_queue_length" in transport:  # in the config.yaml of older runs
        _log.warning("transport.receive_queue_length has no effect any more: leases bound what waits to be read")
        renamed["transport"] = {name: transport[name] for name in transport if name != "receive_queue_length"}
    return renamed


def _rename(values: dict[str, Any], old: str, new: str, prefix: str = "") -> dict[str, Any]:
    if old not in values:
        return values
    value = values.pop(old)
    if new in values and values[new] != value:
        raise ConfigError(
            f"{prefix}{old} is the old name of {prefix}{new}, and the two are set to {value!r} and {values[new]!r}.",
            key=f"{prefix}{old}", value=value, hint=f"Set {prefix}{new} only.",
        )  # fmt: skip
    _log.warning("%s%s is now called %s%s", prefix, old, prefix, new)
    values[new] = value
    return values
