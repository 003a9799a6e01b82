"""Service: models behind an app's routes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any

from aiorl.data import columns as c
from aiorl.data.spaces import space_to_dict
from aiorl.process.versions import versions
from aiorl.serving.batching import MAX_ROWS, OUTPUTS, Answer, Job
from aiorl.serving.models import Model, Models
from aiorl.serving.request_metrics import RequestMetrics
from aiorl.serving.sessions import Session, Sessions
from aiorl.serving.tensors import BINARY_HEADER, Call
from aiorl.serving.values import check_keys, flag, number, parse_value
from aiorl.web.app import (
    App,
    JsonHandler,
    Refusal,
    Reply,
    Request,
    Response,
    always,
    json_response,
    parse_json,
)
from aiorl.web.messages import add_message_routes

if TYPE_CHECKING:
    from aiorl.serving.record import Recorder

_KEYS = {
    "policy",
    "observation",
    "observations",
    "session",
    "start",
    "reward",
    "action",
    "explore",
    *OUTPUTS,
}


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
        recorder: Recorder | None = None,
        max_sessions: int = 10_000,
        session_ttl_s: float = 600.0,
    ) -> None:
        """Serve models.

        Args:
            models: models by name.
            recorder: writer of the episodes of sessions.
            max_sessions: number of open sessions.
            session_ttl_s: seconds that a session is kept after its last request.
        """
        self.models = models
        self._recorder = recorder
        metrics = RequestMetrics()
        metrics.registry.register(models.rows)
        metrics.registry.register(models.swaps)
        if recorder is not None:
            metrics.registry.register(recorder.episodes)
        self.sessions = Sessions(max_sessions, session_ttl_s, metrics.note_expiry)
        metrics.count_sessions(self.sessions)
        app = self.app = App()
        app.on_answer.append(metrics.note)
        app.add("GET", "/", self._index)
        openapi = (files("aiorl.serving") / "openapi.json").read_bytes()
        app.add("GET", "/openapi.json", always(parse_json(openapi)))
        app.add("GET", "/metrics", metrics.answer)
        handlers: dict[str, JsonHandler] = {
            "act": self.act,
            "open": self.open,
            "end": self.end,
            "close": self.close,
        }
        add_message_routes(app, handlers, metrics.note_message)
        about = {
            "name": "aiorl",
            "version": versions()["aiorl"],
            "extensions": ["binary_tensor_data", "sequence"],
        }
        app.add("GET", "/v2", always(about))
        app.add("GET", "/v2/health/live", always({"live": True}), is_open=True)
        app.add("GET", "/v2/health/ready", self._are_ready, is_open=True)
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            app.add("GET", path, self._metadata)
            app.add("GET", f"{path}/ready", self._ready)
            app.add("POST", f"{path}/infer", self._infer)

    # /act
    # ----------------------------------------------------------------------------------------------

    def act(self, body: Mapping[str, Any]) -> Reply:
        """Return the answer to a request to /act.

        Raises:
            Refusal: it can't be answered.
        """
        check_keys(body, _KEYS)
        session = None if body.get("session") is None else self.sessions.find(body["session"])
        model = self._model_of(body.get("policy") if session is None else session.model)
        if body.get("policy") not in (None, model.name):
            raise Refusal(
                400,
                f"The session is one of policy {model.name!r}, not of"
                f" {short_repr(body['policy'])}.",
            )
        is_single = "observation" in body
        if is_single == ("observations" in body):
            raise Refusal(400, "Send either 'observation', or 'observations', a list of them.")
        observations = [body["observation"]] if is_single else body["observations"]
        job = _job_of(model, observations, body, session)
        outputs = [name for name in OUTPUTS if name in body and flag(body, name)]
        job.with_logp = "logp" in outputs

        def client_answer(answer: Answer) -> dict[str, Any]:
            fields: dict[str, Any] = {}
            if is_single:
                fields["action"] = answer.actions[0]
            else:
                fields["actions"] = answer.actions
            for name in outputs:
                values = answer.output(name)
                fields[name] = values[0] if is_single else values
            fields["version"] = answer.version
            return fields

        job.finish = client_answer
        return self._submit(model, job)

    def _submit(self, model: Model, job: Job, arm: int | None = None) -> Reply:
        if arm is None:
            arm = model.pick() if job.session is None else job.session.arm
        version = model.arms[arm]
        if self._recorder is not None and job.session is not None and job.session.train:
            job.with_logp |= job.explore
            job.finish = partial(self._recorder.step, version.actor, job, job.finish)
        return version.submit(job)

    def _model_of(self, name: Any) -> Model:
        if name is None:
            if len(self.models) == 1 and self.models.waiting is None:
                return next(iter(self.models.values()))
            name = c.DEFAULT_POLICY_ID
        if not isinstance(name, str) or name not in self.models:
            if self.models.waiting is not None:
                raise Refusal(503, f"{self.models.waiting} has no checkpoint yet. Try again later.")
            names = ", ".join(self.models)
            raise Refusal(404, f"There is no policy {short_repr(name)}; there are {names:.300}.")
        return self.models[name]

    # Sessions
    # ----------------------------------------------------------------------------------------------

    def open(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Open a session, and return its description.

        Raises:
            Refusal: there is no such policy, or there are too many sessions.
        """
        check_keys(body, {"policy", "train"})
        model = self._model_of(body.get("policy"))
        session = self.sessions.open(model.name, model.pick(), train=flag(body, "train", True))
        return {"session": session.id, "policy": model.name, "ttl_s": self.sessions.ttl_s}

    def end(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """End the episode of a session, and return its steps and the sum of its rewards.

        Raises:
            Refusal: there is no such session, its policy is not served any more, or a value can't
                be used.
        """
        check_keys(body, {"session", "reward", "observation", "truncated", "info"})
        session = self.sessions.find(body.get("session"))
        version = self._model_of(session.model).arms[session.arm]
        version.finish()  # the session's requests so far
        reward = number(body.get("reward", 0.0), "reward")
        is_truncated = flag(body, "truncated")
        if self._recorder is not None and body.get("observation") is not None:
            obs = parse_value(version.actor.observation_space, body["observation"], "observation")
            self._recorder.end(version.actor, session, obs, reward, is_truncated=is_truncated)
        totals = {"steps": session.steps, "reward": session.total + reward}
        session.restart()
        return totals

    def close(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Close a session, and return the steps and the rewards of its open episode.

        Raises:
            Refusal: there is no such session.
        """
        check_keys(body, {"session"})
        totals = self.end(body)
        self.sessions.close(body["session"])
        return totals

    # Open Inference Protocol
    # ----------------------------------------------------------------------------------------------

    async def _metadata(self, request: Request) -> Response:
        model, _ = self._version_of(request)
        return json_response(
            {
                "name": model.name,
                "versions": [version.name for version in model.arms],
                "platform": "onnxruntime_onnx",
                "inputs": [tensor.described() for tensor in model.inputs.values()],
                "outputs": [tensor.described() for tensor in model.outputs.values()],
            }
        )

    async def _are_ready(self, request: Request) -> Response:
        is_ready = self.models.waiting is None
        return json_response({"ready": is_ready}, status=200 if is_ready else 503)

    async def _ready(self, request: Request) -> Response:
        model, _ = self._version_of(request)
        return json_response({"name": model.name, "ready": True})

    async def _infer(self, request: Request) -> Response:
        model, arm = self._version_of(request)
        if request.header(b"content-encoding") not in ("", "identity"):
            raise Refusal(415, "The body has a Content-Encoding; send it as it is.")
        call = Call(model, await request.body(), request.header(BINARY_HEADER))
        parameters = call.parameters
        session = self._session_of_sequence(model, parameters)
        body = {"explore": parameters.get("explore", False)}
        if session is not None:
            body["reward"] = parameters.get("reward", 0.0)
            body["start"] = parameters.get("sequence_start", False)
        job = _job_of(model, call.observations, body, session)
        job.finish = call.response
        is_end = flag(parameters, "sequence_end")
        response: Response = await self._submit(model, job, arm)
        if session is not None and is_end:
            self.sessions.close(session.id)
        return response

    def _session_of_sequence(self, model: Model, parameters: Mapping[str, Any]) -> Session | None:
        """Return the session of Triton's sequence that a request belongs to."""
        sequence = parameters.get("sequence_id", 0)
        if sequence in (0, "", None):
            return None
        if not isinstance(sequence, str | int):
            raise Refusal(400, "The parameter 'sequence_id' must be a number or a text.")
        id = f"sequence {model.name} {sequence!r:.200}"
        if flag(parameters, "sequence_start") and not self.sessions.is_open(id):
            return self.sessions.open(model.name, model.pick(), id=id)
        return self.sessions.find(id)

    def _version_of(self, request: Request) -> tuple[Model, int | None]:
        """Return the model that a path names, and the index of the version, if it names one."""
        model = self._model_of(request.names["model"])
        version = request.names.get("version")
        if version is None:
            return model, None
        names = [arm.name for arm in model.arms]
        if version not in names:
            raise Refusal(
                404,
                f"Model {model.name!r} has no version {version!r:.50}; it has {', '.join(names)}.",
            )
        return model, names.index(version)

    # About
    # ----------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        policies = [
            {
                "policy": model.name,
                "versions": [version.name for version in model.arms],
                "env": model.env,
                "env_steps": model.arms[0].env_steps,
                "recurrent": bool(model.state_shapes),
                "observation_space": space_to_dict(model.observation_space),
                "action_space": space_to_dict(model.action_space),
            }
            for model in self.models.values()
        ]
        return json_response(
            {
                "name": "aiorl",
                "version": versions()["aiorl"],
                "policies": policies,
                "links": {
                    "api": "/openapi.json",
                    "act": "/act",
                    "v2": "/v2",
                    "metrics": "/metrics",
                },
            }
        )


def _job_of(model: Model, rows: Any, body: Mapping[str, Any], session: Session | None) -> Job:
    """Return the job for observations as a client writes them, and the keys of its request."""
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_ROWS:
        raise Refusal(400, f"'observations' must be a list of 1 to {MAX_ROWS} observations.")
    observations = [parse_value(model.observation_space, obs, "observation") for obs in rows]
    job = Job(observations, flag(body, "explore"), session)
    if session is None:
        if not body.keys().isdisjoint(("reward", "start", "action")):
            raise Refusal(
                400, "'reward', 'start' and 'action' need a 'session'; POST /sessions opens one."
            )
        return job
    if len(rows) > 1:
        raise Refusal(400, "A session takes one observation at a time.")
    job.reward = number(body.get("reward", 0.0), "reward")
    job.is_start = flag(body, "start")
    if body.get("action") is not None:
        layout = model.arms[session.arm].actor.layout
        try:
            row = layout.to_row(parse_value(model.action_space, body["action"], "action"))
        except ValueError as error:
            raise Refusal(400, f"'action' can't be used: {error}") from None
        job.action = layout.to_env(row[None])[0]
        if not model.action_space.contains(job.action):
            raise Refusal(400, f"'action' is not in {model.action_space}.")
    return job
