"""Answers to browsers, probes and Prometheus: pages, JSON, films, server-sent events and metrics of
runs.
"""

from __future__ import annotations

import asyncio
import json
import mimetypes
import operator
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from aiorl.config.layers import NOTED
from aiorl.run.report.loggers import JSONL_FILE, to_json
from aiorl.status import part_of
from aiorl.text import one_line
from aiorl.watch import reading
from aiorl.watch.metrics import Collector
from aiorl.watch.reading import Run, Runs
from aiorl.web.app import App, Refusal, Request, Response, always, json_response

_PAGE = {file.name: file for file in Path(__file__).with_name("page").glob("**/*.*")}
_SAFE = (
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src"
            b" 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors"
            b" 'none'"
        ),
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_LOG = re.compile(r"log\.txt|logs/[\w.-]+\.txt")
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")
_FILM_BYTES = 64 << 20
_FAR = 1 << 50
_POLL_RUN_S = 0.6
_POLL_RUNS_S = 2.0
_MAX_ROWS = 50
_BEHIND_BYTES = 1 << 20


def make_app(root: Path) -> App:
    """Return the app that shows a run directory, or a directory of runs."""
    app = App()
    pages = _Pages(Runs(root))

    def add(path: str, handle: Callable[[Request], Response], *, is_open: bool = False) -> None:
        lock = asyncio.Lock()

        async def answer(request: Request) -> Response:
            async with lock:  # the next request finds what this one has cached
                return await asyncio.to_thread(handle, request)

        app.add("GET", path, answer, is_open=is_open)

    for name in ("", *_PAGE):
        add(f"/{name}", pages.page)
    for name in ("runs", "run", "curves", "config", "log", "experiments", "film", "events"):
        add(f"/api/{name}", getattr(pages, name))
    app.add("GET", "/live", always({"live": True}), is_open=True)
    add("/ready", pages.ready, is_open=True)
    add("/metrics", pages.metrics)
    return app


def _file(name: str, content: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> Response:
    """Return the answer with a file, or a part of it; its name has the type."""
    # `guess_type` would take a type from names that begin with "data:"
    content_type = mimetypes.types_map[Path(name).suffix].encode()
    return Response(content, status, content_type, (*_SAFE, *headers))


class _Pages:
    """Handlers. They read files, so they are called in threads."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def _run_of(self, request: Request) -> Run:
        name = request.query.get("run", "")
        run = self._runs.find().get(name)
        if run is None:
            raise Refusal(404, f"There is no run {name!r:.100} in {self._runs.root}.")
        return run

    def page(self, request: Request) -> Response:
        """Answer with a file of the page."""
        name = request.path[1:] or "index.html"
        return _file(name, _PAGE[name].read_bytes())

    def ready(self, request: Request) -> Response:
        """Answer 200 if the run trains; for a directory of runs, if it can be read."""
        state: dict[str, Any] = {"ready": self._runs.root.is_dir()}
        if self._runs.is_single:
            (glance,) = self._runs.glances()
            state = {"ready": glance["phase"] == "training", "phase": glance["phase"]}
        return json_response(state, status=200 if state["ready"] else 503)

    def metrics(self, request: Request) -> Response:
        """Answer with the figures of all runs, for Prometheus."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(Collector(self._runs.find().values()))
        return Response(generate_latest(registry), 200, CONTENT_TYPE_LATEST.encode())

    def runs(self, request: Request) -> Response:
        """Answer with the figures of all runs."""
        return Response(
            _json(
                {
                    "root": str(self._runs.root.absolute()),
                    "is_single": self._runs.is_single,
                    "runs": self._runs.glances(),
                }
            )
        )

    def run(self, request: Request) -> Response:
        """Answer with all of a run but its curves, config and logs."""
        return Response(_json(self._run_of(request).details()))

    def curves(self, request: Request) -> Response:
        """Answer with the numbers of a run's results by name, thinned, and the place in the file
        where they end.
        """
        columns, end = reading.curves(self._run_of(request).path)
        printable = {one_line(name, 300): values for name, values in columns.items()}
        return json_response({"end": end, "columns": printable})

    def config(self, request: Request) -> Response:
        """Answer with the settings, and the origins that are noted."""
        text = reading.config_text(self._run_of(request).path)
        return Response(
            _json({"values": reading.all_settings(text), "origins": dict(NOTED.findall(text))})
        )

    def log(self, request: Request) -> Response:
        """Answer with the newest entries of a log that have a level and contain a text."""
        run = self._run_of(request)
        query = request.query
        name = query.get("file", "log.txt")
        level = query.get("level", "DEBUG")
        if level not in reading.LEVELS or not _LOG.fullmatch(name):
            raise Refusal(404, f"There is no log {name!r:.100} with the level {level!r:.100}.")
        entries, is_cut = reading.log_entries(
            run.path / name,
            words=query.get("words", "")[:200],
            level=level,
            inside=run.path,
        )
        return json_response({"entries": entries, "is_cut": is_cut})

    def experiments(self, request: Request) -> Response:
        """Answer with curves of experiments, over time or over env steps."""
        metric = request.query.get("metric", "episode_reward_mean")[:300]
        by = request.query.get("by")
        if by != "seconds":
            by = "steps"
        return json_response(reading.experiments([*self._runs.find().values()], metric, by))

    def film(self, request: Request) -> Response:
        """Answer with a film, or with the part of it that a browser asks for."""
        run = self._run_of(request)
        name = request.query.get("name", "")
        start = 0
        last = _FAR
        status = 200
        requested = _RANGE.fullmatch(request.header(b"range"))
        if requested is not None:
            start = int(requested[1])
            last = int(requested[2] or _FAR)
            status = 206
        num_bytes = max(0, min(_FILM_BYTES, last + 1 - start))
        part = b""
        size = 0
        if name in reading.films(run.path):
            part, size = part_of(run.path, name, start, num_bytes)
        if not part:
            raise Refusal(
                416 if size else 404,
                f"There is no such part of a film {name!r:.100}.",
                ((b"content-range", b"bytes */%d" % size),),
            )
        last = start + len(part) - 1
        return _file(
            name,
            part,
            (b"accept-ranges", b"bytes"),
            (b"content-range", b"bytes %d-%d/%d" % (start, last, size)),
            status=status,
        )

    def events(self, request: Request) -> Response:
        """Answer with a stream of what changes: of a run from a place in its results, or of all
        runs.
        """
        place = request.header(b"last-event-id") or request.query.get("from", "0")
        if not re.fullmatch(r"\d{1,15}", place):
            raise Refusal(400, "The place in the results is a number of bytes.")
        stream = _stream(_changes("runs", lambda: self.runs(request).body), _POLL_RUNS_S)
        if "run" in request.query:
            run = self._run_of(request)
            results = _results(run.path, int(place))
            details = _changes("run", lambda: _json(run.details()))
            stream = _stream(map(operator.add, results, details), _POLL_RUN_S)
        return Response(b"", 200, b"text/event-stream", stream=stream)


# Events
# --------------------------------------------------------------------------------------------------


async def _stream(looks: Iterator[bytes], pause_s: float) -> AsyncIterator[bytes]:
    """Yield the events of each look, or a comment, which shows that the connection is there."""
    yield b"retry: 1000\n\n"
    while True:
        yield await asyncio.to_thread(next, looks) or b":\n\n"
        await asyncio.sleep(pause_s)


def _changes(name: str, look: Callable[[], bytes]) -> Iterator[bytes]:
    """Look without end, and yield an event if something has changed, b"" if not."""
    before = b""
    while True:
        now = look()
        yield b"" if now == before else _event(name, now)
        before = now


def _results(directory: Path, place: int) -> Iterator[bytes]:
    """Look without end, and yield an event with new results from a byte on, or that all are to be
    loaded again.
    """
    while True:
        _, size = part_of(directory, JSONL_FILE, 0, 0)
        if place <= size <= place + _BEHIND_BYTES:
            results = [*reading.numbers_from(directory, place)]
            if not results:
                yield b""
                continue
            place, _ = results[-1]
            yield _event("results", _json([row for _, row in results[-_MAX_ROWS:]]), place)
        else:
            place = size
            yield _event("reload", b"{}", place)


def _event(name: str, data: bytes, place: int | None = None) -> bytes:
    event = b"event: %s\ndata: %s\n\n" % (name.encode(), data)
    if place is None:
        return event
    return b"id: %d\n%s" % (place, event)


def _json(value: Any) -> bytes:
    """Return any value of a run's files as JSON that every browser takes."""
    return json.dumps(to_json(value)).encode()
