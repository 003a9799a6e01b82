r"""Training on experience that comes over HTTP: clients play, ask for actions and report rewards.

    aiorl train --env examples.external_http:HttpEnv --num-workers 1 --num-envs-per-worker 1 \
        --rollout-fragment-length 128 --train-batch-size 1024 --stop-return 150
    python -m examples.external_http       # in a second terminal: plays CartPole until the run is over

A client in any language POSTs JSON: /start {}, /action {"episode_id", "observation"}, /returns {"episode_id",
"reward"}, /end {"episode_id", "observation"}. It gets {"result": ...}. Worker 1 listens on port 9901, worker 2 on 9902;
`--env-config "{port: 8000}"` makes that 8001 and 8002. The example does not authenticate clients.
"""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from aiorl import EnvContext, ExternalEnv

METHODS = {"/start": "start_episode", "/action": "get_action", "/returns": "log_returns", "/end": "end_episode"}


class HttpEnv(ExternalEnv):
    """CartPole's spaces without a CartPole: the clients have that."""

    def __init__(self, config: EnvContext) -> None:
        super().__init__(spaces.Discrete(2), spaces.Box(-np.inf, np.inf, (4,), np.float32))
        self.port = config.get("port", 9900) + config.worker_index
        self.server: ThreadingHTTPServer | None = None

    def run(self) -> None:
        """Serve until the worker ends, with a thread for each connection."""
        with ThreadingHTTPServer(("127.0.0.1", self.port), Handler) as self.server:
            self.server.env = self
            self.server.serve_forever()

    def close(self) -> None:
        """Stop serving, if it has begun: the learner makes the environment only to see its spaces."""
        if self.server is not None:
            self.server.shutdown()


class Handler(BaseHTTPRequestHandler):
    """Calls the environment's method that the path names, with the JSON as arguments."""

    protocol_version = "HTTP/1.1"  # clients keep their connections
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        """Answer a request."""
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = 200, {"result": getattr(self.server.env, METHODS[self.path])(**request)}
        except Exception as error:  # wrong request, no action in time or end of the run: tell the client
            status, reply = 400, {"error": repr(error)}
        body = json.dumps(reply, default=np.ndarray.tolist).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log no requests."""


def play(port: int, lengths: list[int]) -> None:
    """Play games of CartPole as a client until the server is gone; append the length of each."""
    env, connection = gymnasium.make("CartPole-v1"), HTTPConnection("127.0.0.1", port, timeout=90)

    def post(path: str, **request: Any) -> Any:
        connection.request("POST", path, json.dumps(request))
        return json.load(connection.getresponse())["result"]

    while True:
        (observation, _), episode, steps, over = env.reset(), post("/start"), 0, False
        while not over:
            action = post("/action", episode_id=episode, observation=observation.tolist())
            observation, reward, terminated, truncated, _ = env.step(action)
            post("/returns", episode_id=episode, reward=reward)
            steps, over = steps + 1, terminated or truncated
        post("/end", episode_id=episode, observation=observation.tolist())
        lengths.append(steps)


if __name__ == "__main__":
    while socket.socket().connect_ex(("127.0.0.1", 9901)):
        time.sleep(0.5)  # the worker is not ready yet
    lengths: list[int] = []
    with ThreadPoolExecutor(8) as clients:  # the policy evaluates all waiting clients together
        clients.map(play, [9901] * 8, [lengths] * 8)
    print(f"{len(lengths)} games: {np.mean(lengths[:50]):.0f} steps at first, {np.mean(lengths[-50:]):.0f} in the end.")
