"""Answers to browsers, probes and Prometheus: pages, JSON, films, server-sent events and metrics of runs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiorl.config.files import open_regular
from aiorl.config.layers import NOTED
from aiorl.run.report.loggers import JSONL_FILE, to_json
from aiorl.text import one_line
from aiorl.watch import reading
from aiorl.watch.compared import experiments
from aiorl.watch.glance import Run, Runs
from aiorl.web.app import App
from aiorl.web.messages import Refusal, Request, Response, always, json_response, metrics_response

_PAGE = importlib.resources.files("aiorl.watch") / "page"
_TYPES = {
    ".html": b"text/html; charset=utf-8", ".js": b"text/javascript; charset=utf-8", ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml", ".mp4": b"video/mp4", ".webm": b"video/webm", ".gif": b"image/gif",
}  # fmt: skip
_FILES = ("page.js", "parts.js", "page.css", "icon.svg", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css")
_PATHS = {"/": "index.html", **{f"/{Path(name).name}": name for name in _FILES}}
"""Path -> file of the page."""
_SAFE = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_RANGE_BYTES = 4 << 20
_FILM_BYTES = 64 << 20
_LOOK_S, _DETAILS_S, _LOOK_AT_ALL_S, _ALIVE_S = 0.4, 0.6, 2.0, 15.0
_MAX_ROWS, _BEHIND_BYTES = 50, 1 << 20
_MAX_METRIC_RUNS = 500
_METRICS = {
    "env_steps_sampled_total": ("timesteps_total", "Env steps sampled."),
    "env_steps_trained_total": ("env_steps_trained_total", "Env steps trained on."),
    "updates_total": ("updates_total", "Updates of the policies."),
    "episodes_total": ("episodes_total", "Episodes ended."),
    "env_steps_sampled_per_second": ("sampled_steps_per_s", "Env steps sampled per second."),
    "env_steps_trained_per_second": ("trained_steps_per_s", "Env steps trained on per second."),
    "episode_return_mean": ("episode_reward_mean_last_100", "Mean return of the last 100 episodes."),
    "workers": ("num_healthy_workers", "Workers that are connected."),
    "policy_lag_mean": ("policy_lag", "Mean age of samples in policy versions."),
}
"""Metric after ``aiorl_`` -> figure of a run, and its meaning."""


def make_app(root: Path) -> App:
    """Return the app that shows a run directory, or a directory of runs."""
    pages = _Pages(Runs(root))
    app = App()
    for path in _PATHS:
        app.get(path, pages.file)
    for name in ("runs", "run", "curves", "config", "log", "experiments", "film", "events"):
        app.get(f"/api/{name}", getattr(pages, name))
    app.get("/live", always({"live": True}), is_open=True)
    app.get("/ready", pages.ready, is_open=True)
    app.get("/metrics", pages.metrics)
    return app


class _Pages:
    """Handlers. Files are read in threads; one thread at a time touches shared readers."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._lock = asyncio.Lock()

    async def _read(self, do: Callable[..., Any], *args: Any) -> Any:
        async with self._lock:
            return await asyncio.to_thread(do, *args)

    async def _run_of(self, request: Request) -> Run:
        name = request.query.get("run", "")
        run: Run | None = await self._read(self._runs.run, name)
        if run is None:
            raise Refusal(404, f"There is no run {name!r:.100} in {self._runs.root}.")
        return run

    # Pages and probes -------------------------------------------------------------------------------------------

    async def file(self, request: Request) -> Response:
        name = _PATHS[request.path]
        return Response((_PAGE / name).read_bytes(), 200, _TYPES[Path(name).suffix], _SAFE)

    async def ready(self, request: Request) -> Response:
        """Answer 200 if the run trains; for a directory of runs, if it can be read."""
        if not self._runs.is_single:
            return json_response({"ready": True}, status=200 if self._runs.root.is_dir() else 503)
        (glance,) = await self._read(self._runs.glances)
        is_ready = glance["phase"] == "training"
        return json_response({"ready": is_ready, "phase": glance["phase"]}, status=200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        from prometheus_client import CollectorRegistry, Gauge

        registry = CollectorRegistry()
        facts = Gauge("aiorl_run_info", "Facts of a run.", ["run", "algo", "env", "phase"], registry=registry)
        glances = (await self._read(self._runs.glances))[:_MAX_METRIC_RUNS]
        for one in glances:
            facts.labels(one["name"], one["algo"], one["env"], one["phase"]).set(1.0)
        for name, (figure, about) in _METRICS.items():
            gauge = Gauge(f"aiorl_{name}", about, ["run"], registry=registry)
            for one in glances:
                if (value := one["figures"].get(figure)) is not None:
                    gauge.labels(one["name"]).set(value)
        return metrics_response(registry)

    # Data -------------------------------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Response:
        """Answer with the figures of all runs."""
        return Response(await self._read(self._all))

    def _all(self) -> bytes:
        where = {"root": str(self._runs.root.absolute()), "is_single": self._runs.is_single}
        return _json({**where, "runs": self._runs.glances()})

    async def run(self, request: Request) -> Response:
        """Answer with all of a run but its curves, config and logs."""
        run = await self._run_of(request)
        return Response(_json(await self._read(run.details)))

    async def curves(self, request: Request) -> Response:
        """Answer with the numbers of a run's results by name, thinned, and the place in the file where they end."""
        run = await self._run_of(request)
        columns, end = await asyncio.to_thread(reading.curves, run.path)
        exact = (reading.STEPS, reading.SECONDS)  # others are for pictures
        shown = {one_line(name, 300): columns[name].astype("f8" if name in exact else "f4") for name in columns}
        return json_response({"end": end, "columns": shown})

    async def config(self, request: Request) -> Response:
        """Answer with the settings, and the origins that are noted."""
        text = reading.config_text((await self._run_of(request)).path)
        return Response(_json({"values": reading.parsed_config(text), "origins": dict(NOTED.findall(text))}))

    async def log(self, request: Request) -> Response:
        """Answer with the newest entries of a log that have a level and contain a text."""
        run, query = await self._run_of(request), request.query
        name, level = query.get("file", "log.txt"), query.get("level", "DEBUG")
        if level not in reading.LEVELS:
            raise Refusal(400, f"The level is one of {', '.join(reading.LEVELS)}.")
        if name not in reading.log_names(run.path):
            raise Refusal(404, f"This run has no log {name!r:.100}.")
        words = query.get("words", "")[:200]
        entries, is_cut = await asyncio.to_thread(reading.log_entries, run.path / name, words, level)
        return json_response({"entries": entries, "is_cut": is_cut})

    async def experiments(self, request: Request) -> Response:
        """Answer with curves of experiments."""
        metric, by = request.query.get("metric", "episode_reward_mean")[:300], request.query.get("by", "steps")
        if by not in ("steps", "seconds"):
            raise Refusal(400, "Experiments are shown by steps or by seconds.")
        return json_response(await self._read(experiments, [*self._runs.find().values()], metric, by))

    async def film(self, request: Request) -> Response:
        """Answer with a film, or with a part of it, as browsers ask for."""
        run, name = await self._run_of(request), request.query.get("name", "")
        if name not in reading.films(run.path):
            raise Refusal(404, f"This run has no film {name!r:.100}.")
        found = re.fullmatch(r"bytes=(\d{1,15})-(\d{0,15})", request.header(b"range"))
        start = int(found[1]) if found else 0
        most = min(_RANGE_BYTES, int(found[2] or 1 << 50) + 1 - start) if found else _FILM_BYTES

        def read() -> tuple[bytes, int]:
            with open_regular(run.path / name) as file:
                file.seek(start)
                return file.read(max(0, most)), os.fstat(file.fileno()).st_size

        try:
            part, size = await asyncio.to_thread(read)
        except OSError as error:
            raise Refusal(404, f"The film can't be read: {error.strerror}.") from None
        if found and not part:
            raise Refusal(416, f"The film has {size:,} bytes.", ((b"content-range", b"bytes */%d" % size),))
        at = ((b"content-range", b"bytes %d-%d/%d" % (start, start + len(part) - 1, size)),) if found else ()
        headers = (*_SAFE, (b"accept-ranges", b"bytes"), *at)
        return Response(part, 206 if found else 200, _TYPES[Path(name).suffix], headers)

    # Events -----------------------------------------------------------------------------------------------------

    async def events(self, request: Request) -> Response:
        """Answer with a stream of what changes: of a run from a place in its results, or of all runs."""
        if "run" not in request.query:
            stream = self._events_of_all()
        else:
            place = request.header(b"last-event-id") or request.query.get("from", "0")
            if not re.fullmatch(r"\d{1,15}", place):
                raise Refusal(400, "The place in the results is a number of bytes.")
            stream = self._events_of(await self._run_of(request), int(place))
        return Response(b"", 200, b"text/event-stream", stream=_kept_alive(stream))

    async def _events_of_all(self) -> AsyncIterator[bytes]:
        before = b""
        while True:
            now = await self._read(self._all)
            yield _event("runs", now) if now != before else b""
            before = now
            await asyncio.sleep(_LOOK_AT_ALL_S)

    async def _events_of(self, run: Run, place: int) -> AsyncIterator[bytes]:
        loop, before, looked_at = asyncio.get_running_loop(), b"", 0.0
        while True:
            rows, place, is_behind = await asyncio.to_thread(_rows_from, run.path, place)
            if is_behind:
                yield _event("reload", b"{}", place)
            elif rows:
                yield _event("results", _json(rows), place)
            if loop.time() - looked_at > _DETAILS_S:  # they take milliseconds, which a learner on this host may miss
                details, looked_at = _json(await self._read(run.details)), loop.time()
                if details != before:
                    yield _event("run", details)
                before = details
            yield b""
            await asyncio.sleep(_LOOK_S)


def _rows_from(directory: Path, place: int) -> tuple[list[dict[str, float]], int, bool]:
    """Return the numbers of the results from a byte on, the byte after them, and whether they are too many."""
    rows: list[dict[str, float]] = []
    with contextlib.suppress(OSError):
        size = (directory / JSONL_FILE).stat().st_size
        if not place <= size <= place + _BEHIND_BYTES:
            return [], size, True
        for end, row in reading.numbers_from(directory, place):
            place = end
            rows.append(row)
    return rows[-_MAX_ROWS:], place, False


def _json(value: Any) -> bytes:
    """Return any value of a run's files as JSON that every browser takes."""
    return json.dumps(to_json(value)).encode()


def _event(name: str, data: bytes, place: int | None = None) -> bytes:
    at = b"" if place is None else b"id: %d\n" % place
    return b"%sevent: %s\ndata: %s\n\n" % (at, name.encode(), data)


async def _kept_alive(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a stream that are not empty, and a comment if there are none for a while."""
    yield b"retry: 1000\n\n"
    silent_since = asyncio.get_running_loop().time()
    async for part in stream:
        now = asyncio.get_running_loop().time()
        if part or now - silent_since > _ALIVE_S:
            silent_since = now
            yield part or b": still here\n\n"
