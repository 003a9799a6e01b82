"""A function of a batch as XLA, TensorFlow's graphs or nothing compiles it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import ops

from aiorl.errors import ConfigError

__all__ = ["CompiledFunction", "Mode"]

_log = logging.getLogger(__name__)

_ROUND = 100_000  # more than is made before; takes some milliseconds to reach

Mode = Literal["auto", "on", "off", "eager"]


class CompiledFunction:
    """A function of tensors that is compiled at its first call, and once for each size of batches.

    Attributes:
        mode: "xla", "graph" or "eager", as chosen; final after the first call.
    """

    def __init__(self, run: Callable[..., Sequence[Any]], variables: Sequence[Any], xla: Mode, name: str) -> None:
        """Nothing is compiled yet.

        Args:
            run: gives tensors, or None.
            variables: that it is about.
            xla: auto takes XLA unless there are convolutions, which are faster without on a CPU; eager compiles
                nothing, so that a debugger may step through.
            name: what logs call it.
        """
        self._run = run
        self._xla = xla
        self._name = name
        convolutions = any(len(variable.shape) >= 4 for variable in variables)  # kernels [H, W, in, out]
        self.mode: Literal["xla", "graph", "eager"] = "xla"
        if xla == "eager":
            self.mode = "eager"
        elif xla == "off" or (xla == "auto" and convolutions):
            self.mode = "graph"
        self._reason = "as set" if xla != "auto" else "convolutions" if convolutions else "dense layers"
        self._function = self._compiled()
        self._sizes: set[int] = set()

    @property
    def traces(self) -> int:
        """Number of batch shapes compiled so far."""
        return 0 if self.mode == "eager" else int(self._function.experimental_get_tracing_count())

    def __call__(self, size: int, *arguments: Any) -> list[NDArray[Any] | None]:
        """Run it.

        Falls back to a plain graph, with a warning, where XLA was picked by `auto` and can't compile the function, or
        what it compiled can't be kept or taken from where it is kept.

        Args:
            size: of the batch: for another one it is compiled anew.
            arguments: of the function.
        Raises: ConfigError if XLA was asked for and can't compile it.
        """
        is_new = size not in self._sizes
        if is_new and self._sizes:
            _log.info("compiling the %s for batches of %d", self._name, size)
        self._sizes.add(size)
        if is_new and self.mode == "xla":
            _begin_round_number()
        try:
            return self._results(arguments)
        except tf.errors.OpError as error:
            if self.mode != "xla" or not is_new:
                raise
            self._do_without_xla(error)
            return self._results(arguments)

    def warm_up(self, run: Callable[[], Any]) -> float:
        """Compile it by a call that changes nothing.

        Returns: seconds it took.
        """
        started = time.perf_counter()
        run()
        took_s = time.perf_counter() - started
        _log.info("%s compiled as %s (%s) in %.1f s", self._name, self.mode, self._reason, took_s)
        return took_s

    def _results(self, arguments: Sequence[Any]) -> list[NDArray[Any] | None]:
        return [None if result is None else result.numpy() for result in self._function(*arguments)]

    def _do_without_xla(self, error: tf.errors.OpError) -> None:
        sentence = str(error).splitlines()[0]
        if self._xla == "on":
            raise ConfigError(
                f"XLA can't compile this network: {sentence}", key="xla", value="on", hint="Set xla: auto or off."
            ) from error
        _log.warning(
            "XLA can't compile this network (%s); its %s runs as a plain graph, slower", sentence, self._name
        )  # fmt: skip
        self.mode, self._reason = "graph", "XLA can't compile it"
        self._function = self._compiled()

    def _compiled(self) -> Any:  # Any: a tf.function
        if self.mode == "eager":
            return self._run
        return tf.function(self._run, autograph=False, jit_compile=True if self.mode == "xla" else None)


def _begin_round_number() -> None:
    """Let what is traced next have the same names in each run.

    TensorFlow numbers all that it makes in a process, and finds compiled code again by names with such numbers in them
    (`aiorl.learning.compilation_cache`); a resumed run makes more before it compiles than a new one.
    """
    count = getattr(ops, "uid", None)  # no public name: without it, a resumed run may compile once more
    while count is not None and count() % _ROUND:
        pass
