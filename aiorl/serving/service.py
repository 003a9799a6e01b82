"""Service: models behind an app's routes."""

from __future__ import annotations

import functools
import importlib.resources
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from aiorl.data import columns as c
from aiorl.data.spaces import space_to_dict
from aiorl.errors import BatchError
from aiorl.serving.batching import MAX_ROWS, OUTPUTS, Answer, Job, Version
from aiorl.serving.models import Model, Models
from aiorl.serving.sessions import Session, Sessions
from aiorl.serving.tensors import BINARY_HEADER, Tensors
from aiorl.serving.values import check_keys, flag, given_array, given_value, number
from aiorl.web.app import App
from aiorl.web.messages import Refusal, Reply, Request, Response, always, json_response, metrics_response, parse_json
from aiorl.web.talk import Handler, over_http, talk

if TYPE_CHECKING:
    from aiorl.serving.record import Recorder

_KEYS = frozenset(
    "policy observation observations session start reward explore action state prev_action prev_reward logp value "  # noqa: SIM905
    "dist_inputs".split()
)
_BOUNDS = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0]
_ROW_BOUNDS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, math.inf]


class Service:
    """Models with their sessions and metrics, and the routes to them.

    Attributes:
        models: models by name.
        sessions: open sessions.
        app: app with the routes.
    """

    def __init__(
        self,
        models: Models,
        *,
        recorder: Recorder | None = None,
        max_sessions: int = 10_000,
        session_ttl_s: float = 600.0,
        program_version: str = "",
    ) -> None:
        """Serve models.

        Args:
            models: models by name.
            recorder: writer of the episodes of sessions.
            max_sessions: number of open sessions.
            session_ttl_s: seconds that a session is kept after its last request.
            program_version: version of aiorl for clients.
        """
        self._program_version = program_version
        self.models, self.sessions = models, Sessions(max_sessions, session_ttl_s)
        self._recorder = recorder
        self._tensors = functools.cache(Tensors)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if recorder is not None:
            self._registry.register(recorder.episodes)
        said = "Time from a request's headers to its answer."
        self._seconds = Histogram("aiorl_request_seconds", said, ["path", "status"], registry=self._registry,
                                  buckets=_BOUNDS)  # fmt: skip
        self._observe: dict[tuple[str, str], Callable[[float], None]] = {}  # the same, for paths without names
        handlers: dict[str, Handler] = {
            "act": self.answer, "open": self.open_session, "end": self.end_episode, "close": self.close_session
        }  # fmt: skip
        app = self.app = App()
        app.on_answer.append(self._note)
        app.get("/", self._index)
        app.get("/openapi.json", self._openapi)
        app.get("/metrics", self._metrics)
        app.post_quick("/act", lambda body: self.answer(parse_json(body)))
        app.post("/sessions", over_http(self.open_session, 201))
        app.post("/sessions/{session}/end", over_http(self.end_episode))
        app.delete("/sessions/{session}", over_http(self.close_session))
        app.websocket("/ws", talk(handlers, lambda do, *rest: self.note(f"/ws/{do}", *rest)))
        extensions = ["binary_tensor_data", "sequence"]
        app.get("/v2", always({"name": "aiorl", "version": program_version, "extensions": extensions}))
        app.get("/v2/health/live", always({"live": True}), is_open=True)
        app.get("/v2/health/ready", self._are_ready, is_open=True)
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            app.get(path, self._metadata)
            app.get(f"{path}/ready", self._ready)
            app.post(f"{path}/infer", self._infer)

    # /act -------------------------------------------------------------------------------------------------------

    def answer(self, said: Any) -> Reply:
        """Return the answer to the content of a request to /act.

        Raises:
            Refusal: it can't be answered.
        """
        if not isinstance(said, dict):
            raise Refusal(400, 'The body must be an object, such as {"observation": [0.1, 0.2]}.')
        check_keys(said, _KEYS)
        session = self.sessions.find(said["session"]) if said.get("session") is not None else None
        model = self._model_of(said.get("policy"), session)
        wanted = [name for name in OUTPUTS if name in said and flag(said, name)]
        job = self._job(model, said, session)
        job.with_logp = "logp" in wanted
        job.finish = partial(_described, wanted, said.get("state") is not None, "observation" in said)
        return self._submit(model, job)

    def _submit(self, model: Model, job: Job, arm: int | None = None) -> Reply:
        if arm is None:
            arm = model.pick() if job.session is None else job.session.arm
        version = model.arms[arm]
        if self._recorder is not None and job.session is not None and job.session.train:
            job.with_logp |= job.explore
            job.finish = partial(self._recorder.step, version.actor, job, job.finish)
        return version.submit(job)

    def _job(self, model: Model, said: Mapping[str, Any], session: Session | None) -> Job:
        is_single = "observation" in said
        if is_single == ("observations" in said):
            raise Refusal(400, "Send either 'observation', or 'observations', a list of them.")
        given = [said["observation"]] if is_single else said["observations"]
        if not isinstance(given, list) or not 1 <= len(given) <= MAX_ROWS:
            raise Refusal(400, f"'observations' must be a list of 1 to {MAX_ROWS} observations.")
        observations = [given_value(model.observation_space, obs, "observation") for obs in given]
        job = Job(observations, explore=flag(said, "explore"), session=session)
        if session is not None:
            if len(given) > 1 or not said.keys().isdisjoint(("state", "prev_action", "prev_reward")):
                raise Refusal(400, "A session takes one observation, and knows state and previous action by itself.")
            job.reward, job.is_start = number(said.get("reward", 0.0), "reward"), flag(said, "start")
            if said.get("action") is not None:
                job.action = _action(model, said["action"], "action")
                if not model.action_space.contains(job.action):
                    raise Refusal(400, f"'action' is not in {model.action_space}.")
            return job
        if not said.keys().isdisjoint(("reward", "start", "action")):
            raise Refusal(400, "'reward', 'start' and 'action' need a 'session'; POST /sessions opens one.")

        def rows_of(name: str) -> list[Any]:
            values = [said[name]] if is_single else said[name]
            if not isinstance(values, list) or len(values) != len(given):
                raise Refusal(400, f"{name!r} must be a list of {len(given)}, one for each observation.")
            return values

        if said.get("state") is not None:
            job.states = _states(model, said["state"], () if is_single else (len(given),))
        if said.get("prev_action") is not None:
            job.prev_actions = [_action(model, action, "prev_action") for action in rows_of("prev_action")]
        if said.get("prev_reward") is not None:
            job.prev_rewards = [number(reward, "prev_reward") for reward in rows_of("prev_reward")]
        return job

    def _model_of(self, name: Any, session: Session | None = None) -> Model:
        if session is not None:
            if name not in (None, session.model):
                raise Refusal(400, f"The session is one of policy {session.model!r}, not of {shown(name)}.")
            name = session.model
        if name is None:
            if len(self.models) == 1 and self.models.waiting is None:
                return next(iter(self.models.values()))
            name = c.DEFAULT_POLICY_ID
        if not isinstance(name, str) or name not in self.models:
            if self.models.waiting is not None:
                raise Refusal(503, f"{self.models.waiting} has no checkpoint yet. Try again later.")
            known = ", ".join(self.models)
            raise Refusal(404, f"There is no policy {shown(name)}; there are {known:.300}.")
        return self.models[name]

    # Sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Open a session, and return its description.

        Raises:
            Refusal: there is no such policy, or there are too many sessions.
        """
        check_keys(said, {"policy", "train"})
        model = self._model_of(said.get("policy"))
        session = self.sessions.open(model.name, model.pick(), train=flag(said, "train", True))
        return {"session": session.id, "policy": model.name, "ttl_s": self.sessions.ttl_s}

    def end_episode(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """End the episode of a session, and return its steps and the sum of its rewards.

        Raises:
            Refusal: there is no such session, or a value can't be used.
        """
        check_keys(said, {"session", "reward", "observation", "truncated", "info"})
        session, version = self._finished(said)
        reward, is_truncated = number(said.get("reward", 0.0), "reward"), flag(said, "truncated")
        if self._recorder is not None and said.get("observation") is not None:
            obs = given_value(version.actor.observation_space, said["observation"], "observation")
            self._recorder.end(version.actor, session, obs, reward, is_truncated=is_truncated)
        found = {"steps": session.steps, "reward": session.total + reward}
        session.restart()
        return found

    def close_session(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Close a session, and return the steps and the rewards of its open episode.

        Raises:
            Refusal: there is no such session.
        """
        check_keys(said, {"session"})
        session, _ = self._finished(said)
        self.sessions.close(session.id)
        return {"steps": session.steps, "reward": session.total}

    def _finished(self, said: Mapping[str, Any]) -> tuple[Session, Version]:
        """Return a session after the answers to its requests so far, and its version."""
        session = self.sessions.find(said.get("session"))
        version = self.models[session.model].arms[session.arm]
        version.finish()
        return session, version

    # Open Inference Protocol ------------------------------------------------------------------------------------

    async def _metadata(self, request: Request) -> Response:
        model, _ = self._version_of(request)
        return json_response(self._tensors(model).metadata())

    async def _are_ready(self, request: Request) -> Response:
        is_ready = self.models.waiting is None
        return json_response({"ready": is_ready}, status=200 if is_ready else 503)

    async def _ready(self, request: Request) -> Response:
        model, _ = self._version_of(request)
        return json_response({"name": model.name, "ready": True})

    async def _infer(self, request: Request) -> Response:
        model, arm = self._version_of(request)
        encoding = request.header(b"content-encoding")
        if encoding not in ("", "identity"):
            raise Refusal(415, f"Content-Encoding is {encoding:.40}; send the body as it is.")
        tensors = self._tensors(model)
        call = tensors.read(await request.body(), request.header(BINARY_HEADER))
        said, given = call.said, call.parameters
        if "explore" in given:
            said["explore"] = given["explore"]
        if (session := self._session_of(model, given)) is not None:
            is_start = flag(given, "sequence_start") or flag(given, "start")
            said = {name: said[name] for name in ("observations", "explore") if name in said}
            said |= {"reward": given.get("reward", 0.0), "start": is_start}
        job = self._job(model, said, session)
        job.finish = partial(tensors.response, call)
        response: Response = await self._submit(model, job, arm)
        if session is not None and flag(given, "sequence_end"):
            self.sessions.close(session.id)
        return response

    def _session_of(self, model: Model, parameters: Mapping[str, Any]) -> Session | None:
        """Return the session that a request names, by our parameter or by Triton's of sequences."""
        if (id := parameters.get("session")) is not None:
            session = self.sessions.find(id)
            self._model_of(model.name, session)
            return session
        sequence = parameters.get("sequence_id")
        if sequence in (None, 0, ""):
            return None
        if not isinstance(sequence, str | int):
            raise Refusal(400, "The parameter 'sequence_id' must be a number or a text.")
        id = f"sequence {model.name} {sequence!r:.200}"
        if flag(parameters, "sequence_start") and not self.sessions.is_open(id):
            return self.sessions.open(model.name, model.pick(), id=id)
        return self.sessions.find(id)

    def _version_of(self, request: Request) -> tuple[Model, int | None]:
        model, version = self._model_of(request.names["model"]), request.names.get("version")
        if version is None:
            return model, None
        for index, known in enumerate(model.arms):
            if known.name == version:
                return model, index
        known_names = ", ".join(one.name for one in model.arms)
        raise Refusal(404, f"Model {model.name!r} has no version {version!r:.50}; it has {known_names}.")

    # About ------------------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        policies = [
            {
                "policy": model.name, "versions": [version.name for version in model.arms], "env": model.env,
                "env_steps": model.arms[0].env_steps, "recurrent": bool(model.actor.initial_state),
                "observation_space": space_to_dict(model.observation_space),
                "action_space": space_to_dict(model.action_space),
            }
            for model in self.models.values()
        ]  # fmt: skip
        links = {"api": "/openapi.json", "act": "/act", "v2": "/v2", "metrics": "/metrics"}
        return json_response({"name": "aiorl", "version": self._program_version, "policies": policies, "links": links})

    async def _openapi(self, request: Request) -> Response:
        return Response(importlib.resources.files("aiorl.serving").joinpath("openapi.json").read_bytes())

    async def _metrics(self, request: Request) -> Response:
        return metrics_response(self._registry)

    def _note(self, request: Request, status: int, seconds: float) -> None:
        self.note(request.path if status != 404 else "", str(status), seconds)

    def note(self, path: str, status: str, seconds: float) -> None:
        """Count an answer for the metrics, by its kind of path."""
        if (known := self._observe.get((path, status))) is not None:
            known(seconds)
            return
        parts = path.split("/")
        if len(parts) > 3 and parts[2] == "models":
            parts = ["", "v2", parts[-1] if parts[-1] in ("infer", "ready") else "metadata"]
        elif len(parts) > 2 and parts[1] == "sessions":
            parts = ["", "sessions", "end" if parts[-1] == "end" else "close"]
        name = "/".join(parts) or "/"
        observe = self._seconds.labels(name, status).observe
        observe(seconds)
        if name == path:
            self._observe[path, status] = observe

    def collect(self) -> Iterable[Any]:
        """Yield the metrics, for Prometheus."""
        rows = CounterMetricFamily("aiorl_rows", "Observations answered.", labels=["policy", "version"])
        sizes = HistogramMetricFamily("aiorl_batch_rows", "Rows of an evaluation.", labels=["policy", "version"])
        swaps = CounterMetricFamily("aiorl_swaps", "Versions that replaced others.", labels=["policy"])
        for model in self.models.values():
            swaps.add_metric([model.name], model.swaps)
            for version in model.arms:
                label = [model.name, version.name]
                rows.add_metric(label, version.num_rows)
                counts = [sum(n for rows, n in version.figures.items() if rows <= bound) for bound in _ROW_BOUNDS]
                names = [*map(str, _ROW_BOUNDS[:-1]), "+Inf"]
                sizes.add_metric(label, list(zip(names, counts, strict=True)), version.num_rows)
        yield from (rows, sizes, swaps)
        yield GaugeMetricFamily("aiorl_sessions", "Open sessions.", value=len(self.sessions))
        yield CounterMetricFamily(
            "aiorl_sessions_expired", "Sessions ended for lack of requests.", value=self.sessions.num_expired
        )


def _described(wanted: list[str], has_state: bool, is_single: bool, answer: Answer) -> dict[str, Any]:
    """Return an answer of /act, with the wanted outputs."""
    found: dict[str, Any] = {"action": answer.actions[0]} if is_single else {"actions": answer.actions}
    for name in wanted:
        column = answer.columns[OUTPUTS[name]]
        found[name] = column[0] if is_single else column
    if has_state:
        found["state"] = [state[0] if is_single else state for state in answer.states]
    found["version"] = answer.version
    return found


def _action(model: Model, given: Any, name: str) -> Any:
    action = given_value(model.action_space, given, name)
    try:
        row = model.actor.layout.to_row(action)
    except (BatchError, ValueError, TypeError) as error:
        raise Refusal(400, f"{name!r} can't be used: {error}") from None
    return model.actor.layout.to_env(row[None])[0]


def _states(model: Model, given: Any, rows: tuple[int, ...]) -> list[Any] | None:
    """Return states [N, ...]; None for an empty list, which is an episode's start."""
    wanted = model.actor.initial_state
    if not isinstance(given, list) or len(given) not in (0, len(wanted)):
        said = f"'state' must be the 'state' of the answer before, a list of {len(wanted)} arrays; [] at the start."
        raise Refusal(400, said)
    pairs = zip(given, [one.shape for one in wanted], strict=False)
    return [given_array(one, rows + shape, "state").reshape(-1, *shape) for one, shape in pairs] or None
