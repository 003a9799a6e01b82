"""Training from clients: games ask the run for actions over HTTP or a WebSocket, and learn.

    aiorl train --config examples/external_http.yaml --algo ppo --num-workers 2 --stop-return 150
    python -m examples.external_http  # in a second terminal: plays CartPole until the run is over

docs/clients.md has clients in other languages.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

import gymnasium

import aiorl
from aiorl.client import RequestRefused


def play(client: aiorl.PolicyClient) -> None:
    """Play games of CartPole until the run is over."""
    env = gymnasium.make("CartPole-v1")
    with suppress(ConnectionError, RequestRefused), client.session() as game:
        while True:
            (observation, _), reward, over = env.reset(), 0.0, False
            while not over:
                action = game.act(observation, reward=reward)
                observation, reward, terminated, truncated, _ = env.step(action)
                over = terminated or truncated
            game.end(observation, reward=reward, truncated=truncated)


if __name__ == "__main__":
    client = aiorl.PolicyClient("http://localhost:9900")
    for _ in range(8):  # the policy answers all waiting games together
        Thread(target=play, args=(client,)).start()
