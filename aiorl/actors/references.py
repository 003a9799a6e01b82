"""References to the results of calls, in the shape of Ray's: `get`, `wait`, and ``.remote()``.

They work in every thread, with an event loop or without one. Where a call goes is up to the
`Submit` of its handle.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Final, Protocol, TypeVar

from aiorl.actors.values import PackedValue
from aiorl.errors import ActorError, RemoteError, UnsendableError

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

TERMINATE: Final = "__ray_terminate__"
"""The only method with a private name: it ends the actor after its earlier calls."""
_NUM_RETURNS = "__num_returns__"


class Submit(Protocol):
    """Function that begins a call, from any thread."""

    def __call__(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], /
    ) -> Future[Any]:
        """Begin a call, and return the future of its result at once; it can't be cancelled.

        Raises:
            UnsendableError: an argument can't be sent.
        """


class ObjectRef:
    """Result of a call that may not have ended: `get` returns it, and so does ``await``.

    An argument of a call can be a reference; the method gets the result. Each reader gets a
    copy, apart from arrays, so that changes of it don't reach later readers and calls. If the call
    of a reference that no one reads fails, its error is logged.
    """

    __slots__ = ("__weakref__", "_future", "_is_read", "_pid")

    def __init__(self, future: Future[Any]) -> None:
        """Refer to the result of ``future``."""
        self._future = future
        self._is_read = False
        self._pid = os.getpid()

    @property
    def future(self) -> Future[Any]:
        """The future of the result, which can be a `PackedValue`.

        Raises:
            ActorError: the call has not ended, and this is a fork of the process that made it.
        """
        self._is_read = True
        self.refuse_wait_in_fork()
        return self._future

    def refuse_wait_in_fork(self) -> None:
        """Raise ActorError if the call has not ended, in a fork of its process."""
        if not self.is_ready():
            refuse_in_fork(self._pid)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result, and return it; see `get`.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: time is up; the call continues.
        """
        return _result_in_time(self.future, timeout)

    def is_ready(self) -> bool:
        """Return whether the call has ended."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Any]:
        """Return the result; cancelling the task that waits does not cancel the call."""
        result = yield from asyncio.shield(asyncio.wrap_future(self.future)).__await__()
        return _unpacked(result)

    def __del__(self) -> None:
        """Let an error be logged that no one reads."""
        if not self._is_read:
            self._future.add_done_callback(_report_error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {id(self):#x}, {'ready' if self.is_ready() else 'pending'}>"


def refuse_in_fork(pid: int) -> None:
    """Raise ActorError in a fork of a process that has calls: the answers go to that process alone.

    Args:
        pid: the process.
    """
    if os.getpid() != pid:
        raise ActorError(
            f"this process is a fork of process {pid}, whose actors it can't call: start new actors"
            " here, or call those of the other process before the fork"
        )


def _unpacked(result: Any) -> Any:
    return result.unpack() if isinstance(result, PackedValue) else result


def _result_in_time(future: Future[Any], timeout: float | None) -> Any:
    try:
        return _unpacked(future.result(timeout))
    except TimeoutError:
        if future.done():  # it is the error of the call
            raise
        raise TimeoutError(
            "time is up, and the call has not ended; it continues, so get its result later"
        ) from None


def settle(future: Future[Any], ended: asyncio.Future[Any]) -> None:
    """End a future like another one, which has ended."""
    if ended.cancelled():
        future.set_exception(ActorError("the call was cancelled"))
        return
    error = ended.exception()
    if error is None:
        future.set_result(ended.result())
    else:
        future.set_exception(error)


def _report_error(future: Future[Any]) -> None:
    error = future.exception()
    # a lost actor is an error of its later calls, too
    if isinstance(error, RemoteError | UnsendableError):
        logger.error("a call whose result no one has read failed: %s", error)


def get(refs: ObjectRef | Sequence[ObjectRef], timeout: float | None = None) -> Any:
    """Wait for the result of a call, or of several.

    Args:
        refs: a reference, or a list of references.
        timeout: seconds for all of them; None waits as long as it takes.

    Returns:
        The result; for a list, the list of the results. Each `get` returns new objects, apart from
        arrays, which can't be written to.

    Raises:
        RemoteError: the method of an actor raised an exception.
        ActorLost: an actor ended before it answered.
        ActorError: a call was cancelled, or made before the fork of this process.
        TimeoutError: time is up; the calls continue.
        TypeError: ``refs`` is something else.
    """
    if isinstance(refs, ObjectRef):
        return refs.result(timeout)
    all_futures = [ref.future for ref in _checked(refs, "get")]
    end = None if timeout is None else time.monotonic() + timeout
    return [_result_in_time(future, _seconds_until(end)) for future in all_futures]


def with_results(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with results in place of references; wait for calls that have
    not ended.

    As in Ray, only an argument itself can be a reference, not a part of one.

    Raises:
        Exception: the call of a reference raised it.
    """
    positional = tuple(_result_of(value) for value in args)
    return positional, {name: _result_of(value) for name, value in kwargs.items()}


def _result_of(value: Any) -> Any:
    return _unpacked(value.future.result()) if isinstance(value, ObjectRef) else value


def wait(
    refs: Sequence[ObjectRef], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """Wait until several of the calls have ended, or time is up.

    Args:
        refs: references, each once.
        num_returns: number of calls to wait for.
        timeout: seconds; 0 looks only, None waits as long as it takes.

    Returns:
        At most ``num_returns`` references whose calls have ended, and all others, both in the order
        of ``refs``. For an empty list, two empty lists.

    Raises:
        TypeError: ``refs`` is not a list of references.
        ActorError: a call was made before the fork of this process, and has not ended.
        ValueError: a reference occurs twice, or ``num_returns`` is not between 1 and their number.
    """
    refs = _checked(refs, "wait")
    if not refs:
        return [], []
    for ref in refs:
        ref.refuse_wait_in_fork()
    if len(set(refs)) < len(refs):
        raise ValueError("wait: a reference occurs twice, expected each once")
    if not 1 <= num_returns <= len(refs):
        raise ValueError(f"wait: num_returns is {num_returns}, expected 1 to {len(refs)}")
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        pending = [ref._future for ref in refs if not ref.is_ready()]
        seconds = _seconds_until(end)
        if len(refs) - len(pending) >= num_returns or seconds == 0.0:
            break
        futures.wait(pending, seconds, futures.FIRST_COMPLETED)
    ready = [ref for ref in refs if ref.is_ready()][:num_returns]
    chosen = set(ready)
    return ready, [ref for ref in refs if ref not in chosen]


def _checked(refs: Any, name: str) -> list[ObjectRef]:
    if isinstance(refs, list | tuple):
        wrong = [ref for ref in refs if not isinstance(ref, ObjectRef)]
        if not wrong:
            return list(refs)
        refs = wrong[0]
    raise TypeError(
        f"{name} takes references, which `.remote()` and `put` return, got a {type(refs).__name__}"
    )


def _seconds_until(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def method(
    *, num_returns: int | None = None, num_return_vals: int | None = None
) -> Callable[[F], F]:
    """Return a decorator for a method whose result is a tuple of several: ``.remote()`` then returns
    a reference to each.

    Args:
        num_returns: number of results.
        num_return_vals: the same, by its name in earlier versions of Ray.

    Raises:
        ValueError: the number is not given, or below 1.
    """
    count = num_return_vals if num_returns is None else num_returns
    if count is None or count < 1:
        raise ValueError(f"method: num_returns is {count}, expected at least 1")

    def mark(function: F) -> F:
        setattr(function, _NUM_RETURNS, count)
        return function

    return mark


class RefMethod:
    """Method whose calls return references."""

    __slots__ = ("_name", "_num_returns", "_submit")

    def __init__(self, submit: Submit, name: str, num_returns: int = 1) -> None:
        """Prepare the method.

        Args:
            submit: begins the calls.
            name: name of the method.
            num_returns: number of results, each of which gets a reference.
        """
        self._submit = submit
        self._name = name
        self._num_returns = num_returns

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a call, with the arguments of the method itself, and return at once.

        Returns:
            The reference to the result; a list of references if the method has several results.

        Raises:
            UnsendableError: an argument can't be sent.
        """
        future = self._submit(self._name, args, kwargs)
        if self._num_returns == 1:
            return ObjectRef(future)
        return _parts(future, self._num_returns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse the call.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self._name} runs in another process: call {self._name}.remote(...) for a reference"
            " to its result"
        )


def _parts(future: Future[Any], count: int) -> list[ObjectRef]:
    """Return references to the parts of a result that is a tuple."""
    parts: list[Future[Any]] = [Future() for _ in range(count)]

    def pass_on(ended: Future[Any]) -> None:
        error = ended.exception()
        values = [] if error else _parts_of(ended.result())
        if error is None and len(values) != count:
            error = ActorError(f"expected a tuple of {count} results, as `num_returns` says")
        for index, part in enumerate(parts):
            if error is None:
                part.set_result(values[index])
            else:
                part.set_exception(error)

    future.add_done_callback(pass_on)
    return [ObjectRef(part) for part in parts]


def _parts_of(result: Any) -> Sequence[Any]:
    if isinstance(result, PackedValue):
        return result.parts()
    return result if isinstance(result, list | tuple) else []


class RefHandle:
    """An object in another process; ``handle.method.remote(...)`` calls one of its methods.

    Whether it has a method with the name shows when it is called.
    """

    def __init__(self, submit: Submit, cls: type[Any] | None = None) -> None:
        """Prepare the handle.

        Args:
            submit: begins the calls.
            cls: class of the object if it is known, for the numbers of results of its methods (see
                `method`).
        """
        self._submit = submit
        self._cls = cls

    def __getattr__(self, name: str) -> RefMethod:
        """Return the method with this name.

        Raises:
            AttributeError: the name is private.
        """
        if name.startswith("_") and name != TERMINATE:
            raise AttributeError(f"{name!r} is private: actors have only public methods")
        function = getattr(self._cls, name, None)
        return RefMethod(self._submit, name, getattr(function, _NUM_RETURNS, 1))
