"""Config keys of RLlib and of older versions: renamed, ignored, or refused with what to use instead.

`OLD_KEYS` is the one list of them; none of them is a key of a config class. The config room gets `translate_old_keys`
from the top of the package.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiorl.errors import ConfigError

_log = logging.getLogger(__name__)


class OldKey(NamedTuple):
    """Fate of an old key.

    Attributes:
        new: its name now; "" drops it.
        only: the values that are accepted; None accepts all.
        refusal: message for other values, with ``{value!r}`` for the value; "" says that the key is gone.
        hint: what to do instead.
        warning: what is logged when the key is set; "" logs nothing.
        quiet: a value that is set without a warning.
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
    "lambda": OldKey("lambda_"),  # Python keeps the name for itself
    "gpu": OldKey(only=(), hint="Use num_gpus, the number of GPUs."),
    "gpu_fraction": OldKey(only=(), hint="Use num_gpus with a fraction, such as num_gpus: 0.5."),
    "use_gpu_for_workers": OldKey(
        only=(), hint="RLlib calls it num_gpus_per_worker now. Here networks act on CPUs in workers. Leave it out."
    ),
    "tf_session_creator": OldKey(
        only=(), hint="TensorFlow 2 has no sessions; tf_session_args sets thread pools and memory growth."
    ),
    "num_gpus_per_worker": OldKey(
        only=(0,),
        refusal="num_gpus_per_worker can only be 0, not {value!r:.80}: networks act with ONNX Runtime on CPUs there.",
    ),
    "custom_resources_per_worker": OldKey(
        only=({},),
        refusal="custom_resources_per_worker must be empty: aiorl schedules no machines.",
        hint="Start workers where the resources are: python -m aiorl.worker --connect tcp://HOST:PORT",
    ),
    "collect_metrics_timeout": OldKey(),  # metrics come with the fragments
    "sampling": OldKey(
        warning="sampling has no effect any more: environments are stepped in lockstep wherever that can be",
        quiet="auto",
    ),
    "model.max_seq_len": OldKey(  # it had no effect, and its default is in the config.yaml of older runs
        only=(20,), hint="Recurrent models train through whole fragments: set rollout_fragment_length."
    ),
    "transport.receive_queue_length": OldKey(
        warning="transport.receive_queue_length has no effect any more: leases bound what waits to be read"
    ),
    "transport.resend_after_s": OldKey(
        warning="transport.resend_after_s has no effect any more: fragments are sent again after a reconnect", quiet=5.0
    ),
}
"""Dotted name of an old key -> what becomes of it."""


def translate_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without old keys: their values are under the new names, or dropped.

    Raises:
        ConfigError: a key is gone, has a value that is not accepted, or contradicts the new name's value.
    """
    made = dict(values)
    for dotted, old in OLD_KEYS.items():
        group, _, name = dotted.rpartition(".")
        inner = made.get(group) if group else made
        if not isinstance(inner, Mapping) or name not in inner:
            continue
        if group == "model" and inner.get("custom_model") is not None:
            continue  # a model of the user's own may have keys of any name
        rest = dict(inner)
        value = rest.pop(name)
        if old.only is not None and value not in old.only:
            message = old.refusal.format(value=value) or f"There is no key {dotted} any more."
            raise ConfigError(message, key=dotted, value=value, hint=old.hint)
        if old.new:
            new = old.new.rpartition(".")[2]
            if rest.setdefault(new, value) != value:
                raise ConfigError(
                    f"{dotted} is the old name of {old.new}, and the two are set to {value!r} and {rest[new]!r}.",
                    key=dotted, value=value, hint=f"Set {old.new} only.",
                )  # fmt: skip
        if old.warning and value != old.quiet:
            _log.warning(old.warning)
        made = {**made, group: rest} if group else rest
    return made
