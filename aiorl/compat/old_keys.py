"""Config keys of RLlib and of older versions: renamed, ignored, or refused with advice.

`OLD_KEYS` lists all of them; none is a key of a config class. `aiorl/__init__.py` registers
`translate_old_keys` for `aiorl.config`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiorl.errors import ConfigError

_log = logging.getLogger(__name__)


class OldKey(NamedTuple):
    """Treatment of an old key.

    Attributes:
        new: the new name; "" drops the key.
        only: the accepted values; None accepts all.
        refusal: message for other values, with ``{value!r}`` for the value; "" reports that the key
            is gone.
        hint: advice on what to use instead.
        warning: message logged when the key is set; "" logs nothing.
        quiet: a value that can be set without a warning.
    """

    new: str = ""
    only: tuple[object, ...] | None = None
    refusal: str = ""
    hint: str = ""
    warning: str = ""
    quiet: object = None


OLD_KEYS: dict[str, OldKey] = {
    "sample_batch_size": OldKey(
        "rollout_fragment_length", warning="sample_batch_size is now called rollout_fragment_length"
    ),
    "multiagent.policy_graphs": OldKey(
        "multiagent.policies", warning="multiagent.policy_graphs is now called multiagent.policies"
    ),
    "lambda": OldKey("lambda_"),  # a keyword in Python
    "gpu": OldKey(only=(), hint="Use num_gpus, the number of GPUs."),
    "gpu_fraction": OldKey(only=(), hint="Use num_gpus with a fraction, such as num_gpus: 0.5."),
    "use_gpu_for_workers": OldKey(
        only=(),
        hint="RLlib now calls it num_gpus_per_worker. In aiorl, workers act on CPUs. Leave it out.",
    ),
    "tf_session_creator": OldKey(
        only=(),
        hint="TensorFlow 2 has no sessions; tf_session_args sets thread pools and memory growth.",
    ),
    "num_gpus_per_worker": OldKey(
        only=(0,),
        refusal=(
            "num_gpus_per_worker can only be 0, not {value!r:.80}: workers act with ONNX Runtime on"
            " CPUs."
        ),
    ),
    "custom_resources_per_worker": OldKey(
        only=({},),
        refusal="custom_resources_per_worker must be empty: aiorl schedules no machines.",
        hint="Start workers where the resources are: aiorl worker --connect tcp://HOST:PORT",
    ),
    "collect_metrics_timeout": OldKey(),  # metrics come with the fragments
    "sampling": OldKey(
        warning=(
            "sampling has no effect any more: environments are stepped in lockstep wherever"
            " possible"
        ),
        quiet="auto",
    ),
    # had no effect; the config.yaml of older runs contains its default
    "model.max_seq_len": OldKey(
        only=(20,),
        hint="Recurrent models train through whole fragments: set rollout_fragment_length.",
    ),
    "transport.receive_queue_length": OldKey(
        warning=(
            "transport.receive_queue_length has no effect any more: leases limit the fragments that"
            " wait"
        )
    ),
    "transport.resend_after_s": OldKey(
        warning=(
            "transport.resend_after_s has no effect any more: fragments are resent after a"
            " reconnect"
        ),
        quiet=5.0,
    ),
}
"""Treatment of old keys by dotted name."""


def translate_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without old keys: values move to the new names or are dropped.

    Raises:
        ConfigError: a key is gone, has a value that is not accepted, or contradicts the value of
            its new name.
    """
    translated = dict(values)
    for dotted, old in OLD_KEYS.items():
        group, _, name = dotted.rpartition(".")
        inner = translated.get(group) if group else translated
        if not isinstance(inner, Mapping) or name not in inner:
            continue
        if group == "model" and inner.get("custom_model") is not None:
            continue  # a user's own model can have keys of any name
        rest = dict(inner)
        value = rest.pop(name)
        if old.only is not None and value not in old.only:
            message = old.refusal.format(value=value) or f"There is no key {dotted} any more."
            raise ConfigError(message, key=dotted, value=value, hint=old.hint)
        if old.new:
            new = old.new.rpartition(".")[2]
            if rest.setdefault(new, value) != value:
                raise ConfigError(
                    f"{dotted} is the old name of {old.new}, but the two are set to {value!r} and"
                    f" {rest[new]!r}.",
                    key=dotted,
                    value=value,
                    hint=f"Set {old.new} only.",
                )
        if old.warning and value != old.quiet:
            _log.warning(old.warning)
        translated = {**translated, group: rest} if group else rest
    return translated
