"""Every exception that aiorl raises on purpose, named by whose fault it is.

    AiorlError
    ├── ConfigError(ValueError)                what was asked for cannot be
    │   ├── UnknownEnvError                    no environment of that name
    │   ├── UnknownAlgorithmError              no algorithm of that name
    │   └── SecurityError                      keys missing, unreadable or readable by others; an open bind
    ├── UnsupportedEnvError(ValueError)        an object that is no environment we can drive
    │   └── UnsupportedSpaceError              a space that has no preprocessor or distribution
    ├── UnknownPolicyError(KeyError, ValueError)
    ├── BatchError(ValueError)                 columns that do not fit each other
    ├── DataError(ValueError)                  stored experience that cannot be read or written
    ├── EndOfData(EOFError)                    every pass over stored experience has been read
    ├── PolicyError(ValueError)                weights or a graph that do not fit the policy
    │   └── ExportError                        a model that has no acting graph
    ├── EnvError(RuntimeError)                 an environment's own code failed
    │   ├── BadObservationError(ValueError)
    │   ├── BadRewardError(ValueError)
    │   └── EnvContractError(ValueError)       a rule of the interface broken, such as no '__all__' flag
    ├── ClosedEpisodeError(ValueError)         an external episode that is unknown, going on or over
    ├── EpisodeTimeout(TimeoutError)           an external episode whose action or client did not come
    ├── SamplerDied(RuntimeError)
    ├── SampleTimeout(TimeoutError, queue.Empty)
    ├── CheckpointError                        a checkpoint that cannot be written, read or used here
    ├── TrainingDiverged(RuntimeError)         updates stay non-finite
    ├── MemoryQuotaError(MemoryError)          a process takes more memory than a setting allows it
    ├── ProtocolError
    │   ├── LocalProtocolError                 we broke the protocol
    │   └── RemoteProtocolError                the peer did
    │       ├── MessageTooBig
    │       ├── BadFrame
    │       └── VersionMismatch
    ├── EvaluationError(RuntimeError)          an evaluation beside training failed
    ├── EndpointClosed                         we closed it
    ├── WorkerError(RuntimeError)              a worker failed; carries its traceback
    └── InternalError                          never expected: a bug of ours

Facts are attributes; the sentence is made in ``__str__``. The built-in kind mixed in lets callers that
know nothing of aiorl catch what they would expect.
"""

from __future__ import annotations

import difflib
import queue
from collections.abc import Iterable

_LEAST_LIKENESS = 0.75  # names that are less alike mean something else more often than not


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> str:
    """Return a hint such as ``" Did you mean 'lr'?"``, or ``""`` if no name is alike enough.

    Dashes in front of options don't count as alike.
    """
    bare = {option.lstrip("-"): option for option in known}
    matches = difflib.get_close_matches(name.lstrip("-"), list(bare), n=count, cutoff=_LEAST_LIKENESS)
    if not matches:
        return ""
    return " Did you mean " + " or ".join(repr(bare[match]) for match in matches) + "?"


class AiorlError(Exception):
    """Base of every error aiorl raises on purpose."""


class ConfigError(AiorlError, ValueError):
    """A setting that cannot be honoured.

    Attributes:
        key: dotted name of the setting, or "" when no single one is at fault.
        value: what was given.
        hint: what to do about it.
    """

    def __init__(self, message: str, *, key: str = "", value: object = None, hint: str = "") -> None:
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
    """Keys are missing, unreadable or readable by others, or a bind would be open to the network."""


class UnsupportedEnvError(AiorlError, ValueError):
    """An object that is no environment aiorl can drive."""


class UnsupportedSpaceError(UnsupportedEnvError):
    """A space for which there is no preprocessor or no action distribution.

    Attributes:
        space: text form of the space.
        supported: names of the kinds that work here.
    """

    def __init__(self, what: str, space: object, supported: Iterable[str], hint: str = "") -> None:
        super().__init__(what, str(space))
        self.what = what
        self.space = str(space)
        self.supported = tuple(supported)
        self.hint = hint

    def __str__(self) -> str:
        return (
            f"{self.what} {self.space} is not supported; supported here: {', '.join(self.supported)}. {self.hint}"
        ).rstrip()


class UnknownPolicyError(AiorlError, KeyError, ValueError):
    """A policy id nobody defined.

    Attributes:
        policy_id: the id asked for.
        known: the ids that exist.
    """

    def __init__(self, policy_id: object, known: Iterable[str]) -> None:
        super().__init__(policy_id)
        self.policy_id = policy_id
        self.known = tuple(sorted(known))

    def __str__(self) -> str:
        return f"unknown policy id {self.policy_id!r}; known ids: {', '.join(map(repr, self.known)) or 'none'}"


class BatchError(AiorlError, ValueError):
    """Columns that do not fit each other or what is expected of them.

    Attributes:
        column: name of the column at fault.
        expected: what it should have been.
        got: what it was.
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
        path: the file, or "" where there is none or it is not known yet.
        place: where in it, such as "line 3"; "" for the file as a whole.
        reason: what is wrong and, where it can be told, how to mend it.
    """

    def __init__(self, reason: str, *, path: object = "", place: str = "") -> None:
        super().__init__(reason, str(path), place)
        self.reason = reason
        self.path = str(path)
        self.place = place

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.path, self.place) if part)
        return f"{where}: {self.reason}" if where else self.reason


class EndOfData(AiorlError, EOFError):
    """Every pass over stored experience that was asked for has been read."""


class PolicyError(AiorlError, ValueError):
    """Weights, states or a graph that do not fit the policy."""


class ExportError(PolicyError):
    """A model whose acting graph cannot be exported; the message says why."""


class EnvError(AiorlError, RuntimeError):
    """An environment's own code failed.

    Attributes:
        env_id: the environment's name.
        vector_index: which copy of it, from 0.
        step: environment step of that copy in its episode (0 = reset, -1 = its constructor).
        message: what went wrong.
        traceback_text: the environment's traceback, "" when there is none.
    """

    def __init__(
        self, env_id: str, message: str, *, vector_index: int = 0, step: int = 0, traceback_text: str = ""
    ) -> None:
        super().__init__(env_id, message, vector_index, step)
        self.env_id = env_id
        self.message = message
        self.vector_index = vector_index
        self.step = step
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        if self.step < 0:  # the message tells that it was its constructor
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
    """An episode of an external environment that cannot be used so.

    Attributes:
        episode_id: the id given.
        state: what is wrong with it.
    """

    def __init__(self, episode_id: object, state: str) -> None:
        super().__init__(episode_id, state)
        self.episode_id = episode_id
        self.state = state

    def __str__(self) -> str:
        return f"episode {self.episode_id!r} is {self.state}"


class EpisodeTimeout(AiorlError, TimeoutError):
    """No action came in time, or the episode was closed because its client was silent.

    Attributes:
        episode_id: the episode.
        waited_s: how long was waited for the action, seconds; None if the client was silent.
    """

    def __init__(self, episode_id: object, waited_s: float | None) -> None:
        super().__init__(episode_id, waited_s)
        self.episode_id = episode_id
        self.waited_s = waited_s

    def __str__(self) -> str:
        if self.waited_s is None:
            return f"episode {self.episode_id!r} was closed: nothing had been heard of its client for too long"
        return f"episode {self.episode_id!r}: no action within {self.waited_s:g} s; is the sampler running?"


class SamplerDied(AiorlError, RuntimeError):
    """A background sampler has ended; the cause is chained."""


class SampleTimeout(AiorlError, TimeoutError, queue.Empty):
    """No batch came in time.

    Attributes:
        waited_s: how long was waited, seconds.
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
        reason: what is wrong with it and how to mend it.
    """

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(str(path), reason)
        self.path = str(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.reason}"


class EvaluationError(AiorlError, RuntimeError):
    """An evaluation beside training failed."""


class TrainingDiverged(AiorlError, RuntimeError):
    """Too many updates in a row were non-finite; the weights are those of the last good one."""


class MemoryQuotaError(AiorlError, MemoryError):
    """A process has taken more memory than a setting allows it.

    Attributes:
        key: the setting.
        max_bytes: its value.
        taken_bytes: what the process has taken.
    """

    def __init__(self, key: str, max_bytes: int, taken_bytes: int) -> None:
        """Take which setting, its value, and what was taken."""
        self.key, self.max_bytes, self.taken_bytes = key, max_bytes, taken_bytes
        super().__init__(key, max_bytes, taken_bytes)

    def __str__(self) -> str:
        return (
            f"{self.key} is {self.max_bytes:,} bytes, but the process has taken {self.taken_bytes:,}. "
            "Set more, or make environments, networks or batches smaller."
        )


class ProtocolError(AiorlError):
    """The wire protocol was broken."""


class LocalProtocolError(ProtocolError):
    """Our own side tried what the protocol forbids now."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids.

    Attributes:
        field: name of the frame or field at fault, or "".
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class MessageTooBig(RemoteProtocolError):
    """A size beyond its limit, refused before memory was taken."""


class BadFrame(RemoteProtocolError):
    """A frame that does not decode to what it claims."""


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another version of the protocol."""


class EndpointClosed(AiorlError):
    """The endpoint was closed on our side."""


class WorkerError(AiorlError, RuntimeError):
    """A worker failed.

    Attributes:
        worker_index: slot of the worker, 0 when unknown.
        message: what went wrong.
        remote_traceback: the worker's traceback, "" when there is none.
    """

    def __init__(self, worker_index: int, message: str, remote_traceback: str = "") -> None:
        super().__init__(worker_index, message)
        self.worker_index = worker_index
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"worker {self.worker_index}: {self.message}"


class InternalError(AiorlError):
    """A bug of aiorl's own; please report it with the log file."""
