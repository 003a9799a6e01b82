"""Exceptions that aiorl raises on purpose, grouped by cause.

    AiorlError
    ├── ConfigError(ValueError)             a setting that is wrong or cannot be applied
    │   ├── UnknownEnvError                 no environment of that name
    │   ├── UnknownAlgorithmError           no algorithm of that name
    │   └── SecurityError                   keys missing, unreadable or open; an open bind
    ├── UnsupportedEnvError(ValueError)     an object that does not work as an environment
    │   └── UnsupportedSpaceError           a space without a preprocessor or an action distribution
    ├── UnknownPolicyError(KeyError, ValueError)
    ├── BatchError(ValueError)              columns that do not match
    ├── DataError(ValueError)               stored experience that cannot be read or written
    ├── EndOfData(EOFError)                 all passes over stored experience have been read
    ├── PolicyError(ValueError)             weights or a graph that do not fit the policy
    │   └── ExportError                     a model without an acting graph
    ├── EnvError(RuntimeError)              failure in an environment's own code
    │   ├── BadObservationError(ValueError)
    │   ├── BadRewardError(ValueError)
    │   └── EnvContractError(ValueError)    a broken rule, such as a missing '__all__' flag
    ├── ClosedEpisodeError(ValueError)      an external episode that is unknown, still running or over
    ├── EpisodeTimeout(TimeoutError, Empty) an external episode without an action or a client
    ├── SamplerDied(RuntimeError)
    ├── SampleTimeout(TimeoutError, Empty)
    ├── CheckpointError                     a checkpoint that cannot be written, read or used here
    ├── EvaluationError(RuntimeError)       an evaluation during training failed
    ├── TrainingDiverged(RuntimeError)      updates stay non-finite
    ├── MemoryQuotaError(MemoryError)       a process that takes more memory than a setting allows
    ├── ProtocolError
    │   ├── LocalProtocolError              broken on our side
    │   └── RemoteProtocolError             broken by the peer
    │       ├── MessageTooBig
    │       ├── BadFrame
    │       └── VersionMismatch
    ├── EndpointClosed                      closed on our side
    ├── WorkerError(RuntimeError)           a worker failed; carries its traceback
    ├── ActorError(RuntimeError)            a call of an actor's method has no result
    │   ├── RemoteError                     the method raised an exception; carries its traceback
    │   └── ActorLost                       the actor ended before it answered
    ├── UnsendableError(TypeError)          a value that is not data which messages can contain
    └── InternalError                       a bug in aiorl

The facts are attributes, and ``__str__`` makes the sentence. Most classes also derive from a
built-in exception, so that code that does not know aiorl can catch the type it expects.
"""

from __future__ import annotations

import contextlib
import difflib
import queue
import traceback
from collections.abc import Iterable, Sequence

_LEAST_LIKENESS = 0.75  # less similar names usually mean something else


def nearest(name: str, valid: Iterable[str], *, count: int = 3) -> str:
    """Return a hint such as ``" Did you mean 'lr'?"``, or ``""`` if no valid name is similar
    enough.

    The dashes in front of options are ignored. A name with the same letters in another order is
    always similar enough.
    """
    by_bare_name = {option.lstrip("-"): option for option in valid}
    bare_name = name.lstrip("-")
    matches = difflib.get_close_matches(
        bare_name, list(by_bare_name), n=count, cutoff=_LEAST_LIKENESS
    )
    if not matches:
        letters = sorted(bare_name)
        matches = [option for option in by_bare_name if sorted(option) == letters][:count]
    if not matches:
        return ""
    return f" Did you mean {either([repr(by_bare_name[match]) for match in matches])}?"


def either(names: Sequence[str]) -> str:
    """Return names as alternatives in a sentence: ``"a, b or c"``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def described(error: BaseException) -> str:
    """Return an exception's class and text, or the line of code that raised it if it has no text.

    Args:
        error: the exception, as it was caught.
    """
    kind = type(error).__name__
    text = ""
    with contextlib.suppress(Exception):  # a class of users may fail here
        text = str(error)
    if text.strip():
        return f"{kind}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return kind
    last = frames[-1]
    place = f"{kind} at {last.filename}:{last.lineno}, in {last.name}"
    return f"{place}: {last.line}" if last.line else place


class AiorlError(Exception):
    """Base of every error that aiorl raises on purpose."""


class ConfigError(AiorlError, ValueError):
    """A setting that is wrong or cannot be applied.

    Attributes:
        message: the fault, as a sentence.
        key: dotted name of the setting, or "" if no single setting is at fault.
        value: the value given.
        hint: advice on how to correct it, or "".
    """

    def __init__(
        self, message: str, *, key: str = "", value: object = None, hint: str = ""
    ) -> None:
        super().__init__(message, key, value, hint)
        self.message = message
        self.key = key
        self.value = value
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UnknownEnvError(ConfigError):
    """No environment of that name is registered or importable."""


class UnknownAlgorithmError(ConfigError):
    """No algorithm of that name exists."""


class SecurityError(ConfigError):
    """Keys are missing, unreadable or readable by others, or an address would be open to the
    network without keys.
    """


class UnsupportedEnvError(AiorlError, ValueError):
    """An object that aiorl cannot use as an environment."""


class UnsupportedSpaceError(UnsupportedEnvError):
    """A space that has no preprocessor or no action distribution.

    Attributes:
        what: use of the space, such as "the observation space".
        space: text form of the space.
        supported: names of the kinds of spaces that work here.
        hint: advice on how to correct it, or "".
    """

    def __init__(self, what: str, space: object, supported: Iterable[str], hint: str = "") -> None:
        super().__init__(what, str(space))
        self.what = what
        self.space = str(space)
        self.supported = tuple(supported)
        self.hint = hint

    def __str__(self) -> str:
        return (
            f"{self.what} {self.space} is not supported; supported here:"
            f" {', '.join(self.supported)}. {self.hint}"
        ).rstrip()


class UnknownPolicyError(AiorlError, KeyError, ValueError):
    """A policy id that does not exist.

    Attributes:
        policy_id: the id given.
        known: the ids that exist, sorted.
    """

    def __init__(self, policy_id: object, policy_ids: Iterable[str]) -> None:
        """Take the id given, and `policy_ids`, those that exist."""
        super().__init__(policy_id)
        self.policy_id = policy_id
        self.known = tuple(sorted(policy_ids))

    def __str__(self) -> str:
        return (
            f"unknown policy id {self.policy_id!r}; known ids:"
            f" {', '.join(map(repr, self.known)) or 'none'}"
        )


class BatchError(AiorlError, ValueError):
    """A column with the wrong shape, dtype, length or values.

    Attributes:
        column: name of the column at fault.
        expected: the shape, dtype or value expected.
        got: the shape, dtype or value given.
    """

    def __init__(self, column: str, expected: object, got: object) -> None:
        super().__init__(column, expected, got)
        self.column = column
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return f"column {self.column!r}: expected {self.expected}, got {self.got}"


class DataError(AiorlError, ValueError):
    """Stored experience that cannot be read or written.

    Attributes:
        path: the file, or "" if there is none or it is not known yet.
        place: position in the file, such as "line 3"; "" for the whole file.
        reason: the fault and, if known, how to correct it.
    """

    def __init__(self, reason: str, *, path: object = "", place: str = "") -> None:
        super().__init__(reason, str(path), place)
        self.reason = reason
        self.path = str(path)
        self.place = place

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.path, self.place) if part)
        if not where:
            return self.reason
        return f"{where}: {self.reason}"


class EndOfData(AiorlError, EOFError):
    """All the passes over stored experience that the config asks for have been read."""


class PolicyError(AiorlError, ValueError):
    """Weights, states or a graph that do not fit the policy."""


class ExportError(PolicyError):
    """A model whose acting graph cannot be exported; the message says why."""


class EnvError(AiorlError, RuntimeError):
    """An environment's own code failed.

    Attributes:
        env_id: the environment's name.
        message: the failure.
        vector_index: index of the copy that failed, from 0.
        step: step in that copy's episode (0 = reset, -1 = constructor).
        traceback_text: the environment's traceback, or "" if there is none.
    """

    def __init__(
        self,
        env_id: str,
        message: str,
        *,
        vector_index: int = 0,
        step: int = 0,
        traceback_text: str = "",
    ) -> None:
        super().__init__(env_id, message, vector_index, step)
        self.env_id = env_id
        self.message = message
        self.vector_index = vector_index
        self.step = step
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        if self.step < 0:  # the message names the constructor
            return f"environment {self.env_id!r}, copy {self.vector_index}: {self.message}"
        where = "at reset" if self.step == 0 else f"at step {self.step} of its episode"
        return f"environment {self.env_id!r}, copy {self.vector_index}, {where}: {self.message}"


class BadObservationError(EnvError, ValueError):
    """An environment returned an observation that is not finite or does not fit its space."""


class BadRewardError(EnvError, ValueError):
    """An environment returned a reward that is not a finite number."""


class EnvContractError(EnvError, ValueError):
    """An environment broke a rule of its interface; the message says which."""


class ClosedEpisodeError(AiorlError, ValueError):
    """An external environment's episode that is in the wrong state for this call.

    Attributes:
        episode_id: the id given.
        state: the episode's state, such as "unknown".
    """

    def __init__(self, episode_id: object, state: str) -> None:
        super().__init__(episode_id, state)
        self.episode_id = episode_id
        self.state = state

    def __str__(self) -> str:
        return f"episode {self.episode_id!r} is {self.state}"


class EpisodeTimeout(AiorlError, TimeoutError, queue.Empty):
    """No action came in time, or the episode was closed because its client was silent.

    Attributes:
        episode_id: id of the episode.
        waited_s: seconds spent waiting for the action; None if the client was silent.
    """

    def __init__(self, episode_id: object, waited_s: float | None) -> None:
        super().__init__(episode_id, waited_s)
        self.episode_id = episode_id
        self.waited_s = waited_s

    def __str__(self) -> str:
        if self.waited_s is None:
            return f"episode {self.episode_id!r} was closed: its client was silent for too long"
        return (
            f"episode {self.episode_id!r}: no action within {self.waited_s:g} s; is the sampler"
            " running?"
        )


class SamplerDied(AiorlError, RuntimeError):
    """A background sampler has ended; its error is the ``__cause__``."""


class SampleTimeout(AiorlError, TimeoutError, queue.Empty):
    """No batch came in time.

    Attributes:
        waited_s: seconds spent waiting.
    """

    def __init__(self, waited_s: float) -> None:
        super().__init__(waited_s)
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"no batch within {self.waited_s:g} s"


class CheckpointError(AiorlError):
    """A checkpoint that cannot be written, read or used here.

    Attributes:
        path: file or directory at fault.
        reason: the fault and how to correct it.
    """

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(str(path), reason)
        self.path = str(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.reason}"


class EvaluationError(AiorlError, RuntimeError):
    """An evaluation during training failed."""


class TrainingDiverged(AiorlError, RuntimeError):
    """Too many updates in a row were non-finite; the weights are those of the last good update."""


class MemoryQuotaError(AiorlError, MemoryError):
    """A process has taken more memory than a setting allows.

    Attributes:
        key: name of the setting.
        max_bytes: value of the setting, bytes.
        taken_bytes: memory of the process, bytes.
    """

    def __init__(self, key: str, max_bytes: int, taken_bytes: int) -> None:
        """Take the setting's name, its value and the memory taken, both in bytes."""
        self.key = key
        self.max_bytes = max_bytes
        self.taken_bytes = taken_bytes
        super().__init__(key, max_bytes, taken_bytes)

    def __str__(self) -> str:
        return (
            f"{self.key} is {self.max_bytes:,} bytes, but the process has taken"
            f" {self.taken_bytes:,}. Raise the limit, or make environments, networks or batches"
            " smaller."
        )


class ProtocolError(AiorlError):
    """The wire protocol was broken."""


class LocalProtocolError(ProtocolError):
    """Our own side tried an action that the protocol forbids at this point."""


class RemoteProtocolError(ProtocolError):
    """The peer sent a message that the protocol forbids.

    Attributes:
        message: the fault.
        field: name of the frame or field at fault, or "".
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        if not self.field:
            return self.message
        return f"{self.field}: {self.message}"


class MessageTooBig(RemoteProtocolError):
    """A message above its size limit, refused before any memory was allocated."""


class BadFrame(RemoteProtocolError):
    """A frame that cannot be decoded as the type it claims."""


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another version of the protocol."""


class EndpointClosed(AiorlError):
    """The endpoint was closed on our side."""


class WorkerError(AiorlError, RuntimeError):
    """A worker failed.

    Attributes:
        worker_index: slot of the worker, or 0 if unknown.
        message: the failure.
        remote_traceback: the worker's traceback, or "" if there is none.
    """

    def __init__(self, worker_index: int, message: str, remote_traceback: str = "") -> None:
        super().__init__(worker_index, message)
        self.worker_index = worker_index
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"worker {self.worker_index}: {self.message}"


class InternalError(AiorlError):
    """A bug in aiorl; please report it with the log file."""


class ActorError(AiorlError, RuntimeError):
    """A call of an actor's method has no result."""


class RemoteError(ActorError):
    """A method of an actor raised an exception there.

    Attributes:
        method: name of the class and the method.
        kind: name of the exception's class, such as ``ValueError``.
        message: text of the exception.
        remote_traceback: traceback on the actor's side, as text.
    """

    def __init__(self, method: str, kind: str, message: str, remote_traceback: str = "") -> None:
        super().__init__(method, kind, message)
        self.method = method
        self.kind = kind
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        """Return one sentence, and the traceback below it."""
        sentence = f"{self.method} raised {self.kind}: {self.message}"
        if not self.remote_traceback:
            return sentence
        return f"{sentence}\n\n{self.remote_traceback.rstrip()}"


class ActorLost(ActorError):
    """An actor or a worker ended before it answered; whether it ran the method is unknown.

    Attributes:
        actor: name of the actor, or "worker 3" for a worker of a run; "the answer of worker 3" if
            only that is lost.
        reason: why it is lost, one plain sentence.
        is_restarting: True if the actor starts again, with the arguments of its first start.
    """

    def __init__(self, actor: str, reason: str, *, is_restarting: bool = False) -> None:
        super().__init__(actor, reason)
        self.actor = actor
        self.reason = reason
        self.is_restarting = is_restarting

    def __str__(self) -> str:
        """Return one sentence."""
        end = "; it starts again" if self.is_restarting else ""
        return f"{self.actor} is lost: {self.reason}{end}"


class CallTimeout(ActorError, TimeoutError):
    """An actor or a worker has not answered in time; it may still run the method."""


class UnsendableError(AiorlError, TypeError):
    """A value can't be sent to or from an actor: messages contain data, never code or objects."""
