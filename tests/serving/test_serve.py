"""`aiorl serve`: answers equal `load_policy`'s, for policies of every kind, by /act and by clients
of Triton.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hypothesis
import msgpack
import numpy as np
import orjson
import psutil
import pytest
from gymnasium import spaces
from hypothesis import strategies as st

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from export_worlds import observations_of, save_world
from websockets.sync.client import connect

import aiorl
from aiorl.client import RequestRefused
from aiorl.errors import CheckpointError, ConfigError
from aiorl.process.imports import python_path
from aiorl.process.tasks import new_event_loop
from aiorl.serving import tensors
from aiorl.serving.models import Models
from aiorl.serving.service import Service
from aiorl.serving.sessions import Sessions
from aiorl.serving.tensors import tensors_of
from aiorl.serving.values import check_keys, number, parse_value
from aiorl.web.access import WebOptions
from aiorl.web.app import Refusal
from aiorl.web.server import WebServer

KINDS = [
    "box",
    "filtered",
    "filtered frames",
    "parts",
    "memory",
    "looks back",
    "masked dict",
    "values",
    "squashed",
]


class Served:
    """Service on a port, in a thread."""

    def __init__(
        self, *targets: str, seed: int | None = None, port: int = 0, **settings: Any
    ) -> None:
        self.service = Service(Models(targets, seed=seed), **settings)
        self.server = WebServer(self.service.app, WebOptions(port=port))
        self.loop = new_event_loop()
        self._started, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: self.loop.run_until_complete(self._run()), daemon=True
        )
        self._thread.start()
        assert self._started.wait(10)

    async def _run(self) -> None:
        async with self.server.running():
            self._started.set()
            await self._stop.wait()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self.loop.close()

    def ask(self, path: str, said: Any = None, method: str = "", expected: int = 200) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        try:
            body = (
                said
                if isinstance(said, bytes) or said is None
                else orjson.dumps(said, option=orjson.OPT_SERIALIZE_NUMPY)
            )
            connection.request(method or ("GET" if said is None else "POST"), path, body)
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == expected, content[:500]
            return (
                json.loads(content)
                if answer.headers["content-type"] == "application/json"
                else content.decode()
            )
        finally:
            connection.close()

    def refused(self, said: Any, fact: str, path: str = "/act", status: int = 400) -> None:
        error = self.ask(path, said, "POST", status)["error"]
        assert fact in error
        assert "\n" not in error


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of runs of all kinds."""
    found = {}
    for kind in KINDS:
        found[kind] = tmp_path_factory.mktemp("world")
        save_world(kind, found[kind])
    return found


@pytest.fixture(scope="module")
def served(saved: dict[str, Path]) -> Iterator[Served]:
    """One server with all kinds, by names without spaces."""
    found = Served(*(f"{kind.replace(' ', '-')}={path}" for kind, path in saved.items()), seed=3)
    yield found
    found.end()


def plain(value: Any) -> Any:
    """Return a value as JSON would return it."""
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


@pytest.mark.rest_slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_load_policy_bit_for_bit(
    served: Served, saved: dict[str, Path], kind: str
) -> None:
    name = kind.replace(" ", "-")
    policy = aiorl.load_policy(saved[kind])
    session = served.ask("/sessions", {"policy": name}, expected=201)["session"]
    state, action, reward = policy.get_initial_state(), None, None
    client = aiorl.PolicyClient(served.server.url)
    game = client.session(name)
    for step, obs in enumerate(observations_of(policy.observation_space, 5)):
        wanted, state, columns = policy.compute_single_action(
            obs, state, action, reward, full_fetch=True
        )
        said = {"observation": obs, "logp": True, "value": True, "policy": name}
        answer = served.ask("/act", {**said, "session": session, "reward": reward or 0.0})
        if not step:
            assert served.ask("/act", said) == answer
        assert answer == {
            "action": plain(wanted),
            "logp": plain(columns["action_logp"]),
            "value": plain(columns["vf_preds"]),
            "version": "7",
        }
        np.testing.assert_equal(game.act(obs, reward or 0.0), wanted)
        action, reward = wanted, 0.5 * step
    assert game.end(obs, 1.0) == {"id": 7, "steps": 5, "reward": pytest.approx(4.0)}
    client.close()
    closed = served.ask(f"/sessions/{session}", method="DELETE")
    assert closed == {"steps": 5, "reward": pytest.approx(3.0)}


def test_many_messages_of_a_socket_are_under_way_at_a_time(served: Served) -> None:
    with aiorl.PolicyClient(served.server.url) as client:
        asked = [
            client.submit("act", policy="box", observation=[0.1, 0.2, index], value=True)
            for index in range(3000)
        ]
        answers = [one.result(20) for one in asked]
        assert [answer["id"] for answer in answers] == list(range(1, 3001))
        (evaluations,) = re.findall(
            r'aiorl_batch_rows_count{policy="box",.*} (.*)', served.ask("/metrics")
        )
        assert float(evaluations) < 2500, "many are of several rows"
        bad = client.submit("act", policy="box", observation=[0.1])
        good = client.submit("act", policy="box", observation=[0.1, 0.2, 0.3])
        with pytest.raises(RequestRefused, match=r"\(3,\)") as caught:
            bad.result(20)
        assert caught.value.status == 400
        assert good.result(20)["version"] == "7"


def test_a_client_waits_for_the_port_of_its_server(saved: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(ConnectionError, match=str(port)):
        aiorl.PolicyClient(url, timeout_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(aiorl.PolicyClient, url, timeout_s=20)
        time.sleep(0.5)
        assert not waiting.done()
        late = Served(str(saved["box"]), port=port)
        with waiting.result(20) as client:
            assert client.ask("act", observation=[0.1, 0.2, 0.3])["version"] == "7"
    late.end()
    with pytest.raises(ConnectionError, match=r"nowhere\.invalid"):
        aiorl.PolicyClient("http://nowhere.invalid:8000")


def test_bad_messages_are_answered_and_cost_the_socket_nothing(served: Served) -> None:
    deep = b"\x91" * 2000 + b"\xc0"
    too_many = 1 + (1 << 20)
    with connect(served.server.url.replace("http", "ws") + "/ws") as socket:
        for said, fact in [
            (b"", "msgpack"),
            (b"\xc1", "msgpack"),
            (b"\x01\x02", "msgpack"),
            (deep, "msgpack"),
            (b"\xdd" + too_many.to_bytes(4, "big") + b"\x90" * too_many, "1,048,576"),
            (f"[{'{},' * too_many}1]", "1,048,576"),
            ("[", "JSON"),
            (f'{{"id": {2**64}}}', "digits"),
            ("[1]", "object"),
            (b"\x81\xa2id\xc7\x00\x05", "extension"),
            ('{"id": {}}', "'id'"),
            ('{"do": 3}', "act, open, end, close"),
            ('{"do": "end"}', "/sessions"),
            ('{"policy": "box"}', "obs"),
            ('{"do": "open", "policies": 1}', "'policy'"),
            ('{"do": "close", "session": "x"}', "not open"),
        ]:
            socket.send(said)
            answer = socket.recv(10)
            found = json.loads(answer) if isinstance(answer, str) else msgpack.unpackb(answer)
            assert isinstance(answer, str) == isinstance(said, str)
            assert found["status"] in (400, 410, 413), said[:100]
            assert fact in found["error"], said[:100]
        socket.send('{"id": "mine", "policy": "box", "observation": [0, 0, 0]}')
        assert json.loads(socket.recv(10)).keys() == {"id", "action", "version"}
    metrics = served.ask("/metrics")
    assert 'aiorl_request_seconds_count{path="/ws/end",status="400"} 1.0' in metrics


def test_a_name_of_megabytes_is_refused_as_quickly_as_others() -> None:
    began = time.process_time()
    with pytest.raises(Refusal, match="no key 'xxx"):
        check_keys({"x" * (12 << 20): 1}, {"observation"})
    assert time.process_time() - began < 1.0


def test_the_client_works_as_a_copy_without_aiorl_and_numpy(served: Served, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_bytes((Path(aiorl.__file__).parent / "client.py").read_bytes())
    program = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}]
sys.modules["numpy"] = sys.modules["aiorl"] = None
from client import PolicyClient, RequestRefused
client = PolicyClient({served.server.url!r})
print(client.act([0.1, 0.2, 0.3], policy="squashed"))
try:
    client.act([], policy="squashed")
except RequestRefused as error:
    print(error.status)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    action, status = found.splitlines()
    wanted = served.ask("/act", {"policy": "squashed", "observation": [0.1, 0.2, 0.3]})["action"]
    np.testing.assert_array_equal(np.float32(json.loads(action)), np.float32(wanted))
    assert status == "400"


def sample(language: str) -> str:
    """Return the first block of the pages about clients in a language."""
    docs = Path(aiorl.__file__).parents[1] / "docs"
    page = "".join((docs / name).read_text("utf-8") for name in ("clients.md", "browsers.md"))
    return page.partition(f"```{language}\n")[2].partition("```")[0]


def test_the_sample_in_python_works(saved: dict[str, Path]) -> None:
    found = Served(str(saved["box"]))
    try:  # whose observations have three numbers
        exec(
            re.sub(r", [-\d.]+\]", "]", sample("python")).replace(
                "http://localhost:8000", found.server.url
            )
        )
    finally:
        found.end()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_sample_in_javascript_works(
    served: Served, saved: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "client.mjs").write_text(sample("javascript"))
    policy = aiorl.load_policy(saved["memory"])
    observations = observations_of(policy.observation_space, 3)
    (tmp_path / "program.mjs").write_text(f"""
import {{ PolicyClient }} from "./client.mjs";
const client = new PolicyClient({served.server.url!r});
const game = await client.session({{ policy: "memory" }});
for (const observation of {plain(observations)}) console.log(JSON.stringify(await game.act(observation, 0.5)));
console.log(JSON.stringify(await game.end([0, 0, 0], 1)), JSON.stringify(await game.close()));
console.log(await client.act([0], {{ policy: "box" }}).catch((error) => error.status));
""")
    found = subprocess.run(
        ["node", tmp_path / "program.mjs"], capture_output=True, text=True, check=True
    ).stdout
    state, wanted = policy.get_initial_state(), []
    for obs in observations:
        action, state, _ = policy.compute_single_action(obs, state)
        wanted.append(json.dumps(plain(action)))
    assert found.splitlines() == [*wanted, '{"steps":3,"reward":2.5} {"steps":0,"reward":0}', "400"]


@pytest.mark.parametrize("kind", ["box", "squashed"])
def test_drawn_actions_are_those_of_load_policy_with_the_same_seed(
    saved: dict[str, Path], kind: str
) -> None:
    policy, found = aiorl.load_policy(saved[kind], seed=3), Served(str(saved[kind]), seed=3)
    try:
        for obs in observations_of(policy.observation_space, 4):
            wanted = policy.compute_single_action(obs, explore=True)
            assert found.ask("/act", {"observation": obs, "explore": True})["action"] == plain(
                wanted
            )
    finally:
        found.end()


@pytest.mark.parametrize("kind", KINDS)
def test_clients_of_triton_get_the_same(served: Served, saved: dict[str, Path], kind: str) -> None:
    client_module = pytest.importorskip("tritonclient.http")
    name = kind.replace(" ", "-")
    policy = aiorl.load_policy(saved[kind])
    observations = observations_of(policy.observation_space, 3)
    with client_module.InferenceServerClient(f"127.0.0.1:{served.server.port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, "7")
        assert not client.is_model_ready("nothing")
        assert client.get_server_metadata()["name"] == "aiorl"
        described = client.get_model_metadata(name, "7")
        assert described["versions"] == ["7"]
        actions, _, columns = policy.compute_actions(observations)
        inputs = {}
        for tensor in described["inputs"]:
            if tensor["name"].startswith("obs"):
                parts = [part_of(obs, tensor["name"]) for obs in observations]
                array = np.array(parts).astype(client_module.triton_to_np_dtype(tensor["datatype"]))
                inputs[tensor["name"]] = client_module.InferInput(
                    tensor["name"], array.shape, tensor["datatype"]
                )
                inputs[tensor["name"]].set_data_from_numpy(array, binary_data=len(inputs) % 2 == 0)
        result = client.infer(name, list(inputs.values()), request_id="mine")
        assert result.get_response()["id"] == "mine"
        assert result.get_response()["model_version"] == "7"
        for tensor in described["outputs"]:
            found = result.as_numpy(tensor["name"])
            assert list(found.shape[1:]) == tensor["shape"][1:]
            if tensor["name"].startswith("action"):
                wanted = np.array([part_of(action, tensor["name"]) for action in actions])
                np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(result.as_numpy("logp"), columns["action_logp"])
        np.testing.assert_array_equal(result.as_numpy("value"), columns["vf_preds"])
        only = client.infer(
            name,
            list(inputs.values()),
            outputs=[client_module.InferRequestedOutput("value", False)],
        )
        np.testing.assert_array_equal(only.as_numpy("value"), columns["vf_preds"])
        assert only.as_numpy("logp") is None
        with pytest.raises(client_module.InferenceServerException, match="datatype"):
            client.infer(name, [wrong(client_module, described["inputs"][0])])


def part_of(value: Any, tensor: str) -> Any:
    """Return the part of an observation or action that is in a tensor."""
    for name in tensor.split(".")[1:]:
        value = value[int(name) if isinstance(value, list | tuple) else name]
    return value


def wrong(module: Any, tensor: Any) -> Any:
    made = module.InferInput(tensor["name"], [1, 1], "UINT64")
    made.set_data_from_numpy(np.zeros((1, 1), np.uint64))
    return made


def test_sequences_of_triton_remember_states(served: Served, saved: dict[str, Path]) -> None:
    module = pytest.importorskip("tritonclient.http")
    policy = aiorl.load_policy(saved["memory"])
    with module.InferenceServerClient(f"127.0.0.1:{served.server.port}") as client:
        for _ in range(2):
            state = policy.get_initial_state()
            for step, obs in enumerate(observations_of(policy.observation_space, 4)):
                wanted, state, columns = policy.compute_single_action(obs, state)
                one = module.InferInput("obs", [1, 3], "FP32")
                one.set_data_from_numpy(obs[None])
                result = client.infer(
                    "memory", [one], sequence_id=5, sequence_start=step == 0, sequence_end=step == 3
                )
                assert result.as_numpy("action").tolist() == [wanted]
                assert result.as_numpy("value").tolist() == [columns["vf_preds"]]
        with pytest.raises(module.InferenceServerException):
            client.infer("memory", [one], sequence_id=5)


def test_images_are_taken_as_png_and_arrays_as_bytes(
    served: Served, saved: dict[str, Path]
) -> None:
    from PIL import Image

    policy = aiorl.load_policy(saved["filtered frames"])
    (obs,) = observations_of(policy.observation_space, 1)

    def png(array: Any) -> str:
        file = io.BytesIO()
        Image.fromarray(array).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    wanted = {"action": policy.compute_single_action(obs), "version": "7"}
    layers = [png(obs[:, :, index]) for index in range(2)]
    packed = {
        "data": base64.b64encode(obs.tobytes()).decode(),
        "dtype": "uint8",
        "shape": [10, 12, 2],
    }
    for given in (obs, {"png": layers}, packed):
        assert served.ask("/act", {"policy": "filtered-frames", "observation": given}) == wanted
    for given, fact in [
        ({"png": layers[:1]}, "shape"),
        ({"png": layers * 20}, "size"),
        ({"png": "AAAA"}, "PNG"),
        ({"png": 3}, "base64"),
        ({"png": png(np.zeros((9999, 9999), np.uint8))}, "(9999, 9999)"),
        ({**packed, "shape": [10, 12, 3]}, "360"),
        ({**packed, "dtype": "O"}, "float32"),
        ({**packed, "dtype": ["O"]}, "float32"),
        ({**packed, "shape": [1 << 60]}, "shape"),
        ({"jpg": ""}, "png"),
        ([], "shape"),
        ("text", "it is a text"),
    ]:
        served.refused({"policy": "filtered-frames", "observation": given}, fact)


def test_no_more_inputs_are_read_than_a_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(wraps=tensors.read_input)
    monkeypatch.setattr(tensors, "read_input", read)
    space = spaces.Box(-1, 1, (3,), np.float32)
    model = Mock(observation_space=space, inputs=tensors_of("observation", space))
    part = {"name": "observation", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    with pytest.raises(Refusal, match="each of them once"):
        tensors.Call(model, json.dumps({"inputs": [part] * 1000}).encode(), "")
    assert read.call_count == 1


def test_an_image_takes_no_time_for_chunks_that_its_pixels_do_not_need() -> None:
    from PIL import Image

    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    head, rest = file.getvalue()[:33], file.getvalue()[33:]

    def with_chunks(kind: bytes, content: bytes, count: int) -> dict[str, bytes]:
        checksum = zlib.crc32(kind + content).to_bytes(4, "big")
        chunk = len(content).to_bytes(4, "big") + kind + content + checksum
        return {"png": head + chunk * count + rest}

    space = spaces.Box(0, 255, (8, 8), np.uint8)
    began = time.process_time()
    profile = b"name\0\0" + zlib.compress(bytes(1 << 20))
    image = with_chunks(b"iCCP", profile, count=1000)
    np.testing.assert_array_equal(parse_value(space, image, "observation"), pixels)
    for kind in (b"teXt", b"IDAT"):
        with pytest.raises(Refusal, match="too many chunks"):
            parse_value(space, with_chunks(kind, b"", count=300_000), "observation")
    assert time.process_time() - began < 1.0


def test_a_bad_request_says_what_is_wrong(served: Served, saved: dict[str, Path]) -> None:
    good, deep = [0.1, 0.2, 0.3], json.loads("[" * 900 + "]" * 900)
    for said, fact in [
        ([], "object"),
        ({}, "observation"),
        ({"observatoin": good}, "Did you mean 'observation'"),
        ({"observation": good, "observations": [good]}, "either"),
        ({"observations": []}, "1 to 1024"),
        ({"observation": [1, 2]}, "(3,)"),
        ({"observation": [[1], [2, 3]]}, "length"),
        ({"observation": None}, "obs"),
        ({"observation": good, "explore": 1}, "'explore'"),
        ({"observation": good, "state": []}, "'state'"),
        ({"observation": good, "reward": 1.0}, "/sessions"),
        ({"observation": [10**400, 1, 2]}, "JSON"),
        ({"observation": [1e300, 1, 2]}, "infinity"),
        ({"observation": good, "session": 3}, "3"),
        ({"observation": good, "explore": deep}, "true"),
        ({"observation": ["0.1", 0.2, 0.3]}, "text"),
        ({"observation": [None, 0.2, 0.3]}, "null"),
        ({"observation": [9007199254740993, 0, 0]}, "9007199254740993"),
        ({"observations": [good, [0.1, "0.2", 0.3]]}, "text"),
    ]:
        if isinstance(said, dict) and "policy" not in said:
            said = {**said, "policy": "box"}
        served.refused(json.dumps(said).encode(), fact)
    served.refused({"observation": good}, "filtered-frames", status=404)
    served.refused({"policy": "none", "observation": good}, "'none'", status=404)
    served.refused({"policy": "box", "observation": good, "session": "gone"}, "600 s", status=410)
    policy = aiorl.load_policy(saved["masked dict"])
    (obs,) = observations_of(policy.observation_space, 1)
    nothing = spaces.unflatten(
        mask := policy.observation_space["action_mask"],
        0 * spaces.flatten(mask, obs["action_mask"]),
    )
    served.refused(
        {"policy": "masked-dict", "observation": {**obs, "action_mask": nothing}},
        "forbids every one",
    )
    served.refused({"policy": "masked-dict", "observation": {**obs, "action_mask": 3}}, "obs")
    texts = ["a" * 10_000_000, *"b" * 10_000]  # of which NumPy would make 400 GB
    served.refused({"policy": "box", "observation": texts}, "numbers")


LARGE = 2**53 + 1
WHOLE, UNSIGNED, REAL = (
    spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    spaces.Box(0, 9, (1,), np.uint64),
    spaces.Box(0, 1),
)


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (WHOLE, [LARGE, -LARGE], [LARGE, -LARGE]),
        (UNSIGNED, [2**64 - 1], [2**64 - 1]),
        (WHOLE, [1.0, 2], [1, 2]),
        (spaces.Discrete(3, start=LARGE), LARGE, LARGE),
        (WHOLE, np.array([LARGE, 1]), [LARGE, 1]),
        (REAL, [2.0**60], [2.0**60]),
        (REAL, [2**60], [2.0**60]),
        (WHOLE, (True, 0), [1, 0]),
        (
            WHOLE,
            {
                "data": base64.b64encode(np.array([LARGE, 3]).tobytes()).decode(),
                "dtype": "int64",
                "shape": [2],
            },
            [LARGE, 3],
        ),
    ],
)
def test_whole_numbers_keep_all_their_digits(
    space: spaces.Space[Any], value: Any, expected: Any
) -> None:
    assert parse_value(space, value, "it").tolist() == expected


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (WHOLE, [float(2**54), 0]),
        (WHOLE, [LARGE, 0.0]),
        (REAL, [LARGE]),
        (REAL, LARGE),
        (REAL, [[0.5, LARGE]]),
        (REAL, np.array([LARGE])),
        (REAL, [float("inf"), LARGE]),
        (WHOLE, [2**63, 0]),
        (UNSIGNED, [-1]),
        (UNSIGNED, [2**64]),
        (WHOLE, np.array([2**64 - 1, 0], np.uint64)),
        (WHOLE, [[1], ["2"]]),
        (REAL, [b"1"]),
        (REAL, [[0.5, None]]),
        (REAL, [{}]),
        (REAL, np.array(["1"])),
        (spaces.MultiDiscrete([3, 3]), ["1", 2]),
    ],
)
def test_numbers_that_would_change_are_refused(space: spaces.Space[Any], value: Any) -> None:
    with pytest.raises(Refusal) as caught:
        parse_value(space, value, "it")
    assert caught.value.status == 400
    with pytest.raises(Refusal, match=str(LARGE)):
        number(LARGE, "reward")


def test_infer_refuses_what_breaks_the_protocol(served: Served) -> None:
    good = {"name": "obs", "shape": [1, 3], "datatype": "FP32", "data": [0.1, 0.2, 0.3]}
    for said, fact in [
        ({}, "inputs"),
        ({"inputs": [good], "id": 3}, "id"),
        ({"inputs": [3]}, "obs"),
        ({"inputs": []}, "once"),
        ({"inputs": [good, good]}, "once"),
        ({"inputs": [{**good, "name": "x"}]}, "obs"),
        ({"inputs": [{**good, "shape": [3]}]}, "-1, 3"),
        ({"inputs": [{**good, "shape": [-1, 3]}]}, "-1, 3"),
        ({"inputs": [{**good, "shape": [0, 3], "data": []}]}, "-1, 3"),
        ({"inputs": [{**good, "data": [1]}]}, "3"),
        ({"inputs": [{**good, "data": ["a", "b", "c"]}]}, "FP32"),
        ({"inputs": [{**good, "data": ["1", 2, 3]}]}, "text"),
        ({"inputs": [{**good, "data": [[1, 2, "3"]]}]}, "text"),
        ({"inputs": [{**good, "data": {}}]}, "FP32"),
        ({"inputs": [good], "outputs": [{"name": "x"}]}, "action"),
        ({"inputs": [good], "outputs": [3]}, "action"),
        ({"inputs": [{**good, "parameters": {"binary_data_size": 12}}]}, "binary_data_size"),
        ({"inputs": [good], "parameters": {"explore": "yes"}}, "explore"),
        ({"inputs": [good], "parameters": 3}, "par"),
        ({"inputs": [{**good, "datatype": "BYTES"}]}, "FP32"),
    ]:
        served.refused(said, fact, "/v2/models/box/infer")
    served.refused({"inputs": [good]}, "7", "/v2/models/box/versions/8/infer", 404)
    rows = served.ask(
        "/v2/models/box/infer",
        {"inputs": [{**good, "data": [[0.1, 0.2, 0.3]]}], "outputs": [{"name": "action"}]},
    )
    assert rows["outputs"][0] | {"data": None} == {
        "name": "action",
        "datatype": "INT64",
        "shape": [1],
        "data": None,
    }


def test_a_bad_request_of_a_turn_costs_the_others_nothing(saved: dict[str, Path]) -> None:
    service = Service(Models([str(saved["filtered"])]))
    policy = aiorl.load_policy(saved["filtered"])
    observations = observations_of(policy.observation_space, 6)

    async def all_at_once() -> list[Any]:
        given = [obs.tolist() for obs in observations]
        given[2] = [1.0]
        asked = [
            service.act({"observation": obs, "explore": index == 4})
            for index, obs in enumerate(given)
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(all_at_once())
    assert "(3,)" in answers[2].sentence
    (rows,) = service.models.rows.collect()
    counts = {sample.name: sample.value for sample in rows.samples}
    assert counts["aiorl_batch_rows_sum"] == 5
    for index in (0, 1, 3, 5):
        np.testing.assert_allclose(
            answers[index]["action"], policy.compute_single_action(observations[index]), rtol=1e-5
        )


def test_requests_of_one_session_in_one_turn_follow_each_other(saved: dict[str, Path]) -> None:
    service = Service(Models([str(saved["memory"])]))
    policy = aiorl.load_policy(saved["memory"])
    observations = observations_of(policy.observation_space, 5)

    async def all_at_once() -> list[Any]:
        said = {"session": service.open({})["session"], "value": True}
        return await asyncio.gather(
            *(service.act({**said, "observation": obs.tolist()}) for obs in observations)
        )

    state = policy.get_initial_state()
    for obs, answer in zip(observations, asyncio.run(all_at_once()), strict=True):
        _, state, columns = policy.compute_single_action(obs, state)
        assert answer["value"] == columns["vf_preds"]


def test_the_sessions_of_each_arm_are_counted_as_they_come_and_go() -> None:
    now = [0.0]
    sessions = Sessions(10, 100.0, on_expiry=lambda session: None)
    sessions.clock = lambda: now[0]
    first, *_ = [sessions.open("policy", arm) for arm in (0, 1, 1)]
    assert sessions.num_of_arm == {0: 1, 1: 2}
    sessions.close(first.id)
    assert sessions.num_of_arm == {1: 2}
    now[0] = 101.0
    assert len(sessions) == 0
    assert sessions.num_of_arm == {}


def test_sessions_are_bounded_and_end_after_a_time(saved: dict[str, Path]) -> None:
    found = Served(str(saved["memory"]), max_sessions=2, session_ttl_s=1000.0)
    try:
        now = [0.0]
        found.service.sessions.clock = lambda: now[0]
        first, second = (found.ask("/sessions", b"", expected=201)["session"] for _ in range(2))
        found.refused({}, "2 sessions", "/sessions", 503)
        found.refused({"policy": "x"}, "default_policy", "/sessions", 404)
        found.refused([1], "object", "/sessions")
        now[0] = 999.0
        found.ask("/act", {"session": first, "observation": [0, 0, 0]})
        now[0] = 1001.0
        found.refused({"session": second, "observation": [0, 0, 0]}, "1000 s", status=410)
        found.ask("/act", {"session": first, "observation": [0, 0, 0], "reward": 2})
        assert found.ask(f"/sessions/{first}/end", {"reward": 1}) == {"steps": 2, "reward": 3.0}
        assert found.ask(f"/sessions/{first}", method="DELETE") == {"steps": 0, "reward": 0.0}
        found.ask(f"/sessions/{first}", method="DELETE", expected=410)
        metrics = found.ask("/metrics")
        for line in (
            "aiorl_sessions 0.0",
            "aiorl_sessions_expired_total 1.0",
            'aiorl_batch_rows_sum{policy="default_policy",version="7"} 2.0',
            'aiorl_request_seconds_count{path="/act",status="410"} 1.0',
            'aiorl_request_seconds_count{path="/sessions/*",status="200"} 1.0',
            'aiorl_batch_rows_bucket{le="1.0",policy="default_policy",version="7"} 2.0',
        ):
            assert line in metrics, line
    finally:
        found.end()


def test_the_openapi_page_has_every_route_with_examples_that_work(served: Served) -> None:
    page = served.ask("/openapi.json")
    assert page["openapi"].startswith("3.")
    routes = {
        (path, method.upper()) for path, methods in page["paths"].items() for method in methods
    }
    own = {
        (path, method)
        for path, (_, methods) in served.service.app.routes.items()
        for method in methods
    }
    assert routes == {(path, "GET" if method == "WEBSOCKET" else method) for path, method in own}
    example = page["paths"]["/act"]["post"]["requestBody"]["content"]["application/json"][
        "examples"
    ]
    assert len(example) > 3
    listed = {policy["policy"]: policy for policy in served.ask("/")["policies"]}
    assert listed["memory"]["recurrent"]
    assert listed["box"]["observation_space"]["shape"] == [3]


@pytest.mark.parametrize("kind", ["filtered", "looks back", "parts", "masked dict"])
def test_an_export_answers_like_its_checkpoint(
    saved: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    policy = aiorl.load_policy(saved[kind])
    aiorl.export_policy(saved[kind], tmp_path, ["onnx"])
    models = Models([f"mine={tmp_path}", f"two={tmp_path / 'onnx' / 'policy.onnx'}"], seed=3)
    assert list(models) == ["mine", "two"]
    service = Service(models)

    async def ask(said: Any) -> Any:
        return await service.act({"policy": "mine", **said})

    session = service.open({"policy": "mine"})["session"]
    state, action, reward = policy.get_initial_state(), None, None
    for step, obs in enumerate(observations_of(policy.observation_space, 4)):
        action, state, columns = policy.compute_single_action(
            obs, state, action, reward, full_fetch=True
        )
        found = asyncio.run(
            ask(
                {
                    "observation": obs,
                    "session": session,
                    "reward": reward or 0,
                    "logp": True,
                    "value": True,
                }
            )
        )
        for name in tensors_of("action", models["mine"].action_space):
            np.testing.assert_allclose(
                part_of(found["action"], name), part_of(action, name), rtol=1e-5
            )
        np.testing.assert_allclose(
            [found["logp"], found["value"]],
            [columns["action_logp"], columns["vf_preds"]],
            rtol=1e-4,
        )
        reward = 0.5 * step
    drawn = aiorl.load_policy(saved[kind], seed=3).compute_single_action(obs, explore=True)
    found = asyncio.run(ask({"observation": obs, "explore": True}))
    for name in tensors_of("action", models["mine"].action_space):
        np.testing.assert_allclose(part_of(found["action"], name), part_of(drawn, name), rtol=1e-4)


def test_names_and_paths_that_cannot_be_served_are_refused(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="default_policy"):
        Models([str(saved["box"]), str(saved["values"])])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Models([str(tmp_path)])
    (tmp_path / "policy.json").write_text('{"format": "onnx"}')
    with pytest.raises(CheckpointError, match="policy"):
        Models([str(tmp_path)])
    with pytest.raises(ConfigError, match="a#b"):
        Models([f"a#b={saved['box']}"])


@contextmanager
def command(path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `aiorl serve` for a run, and yield its process and its port."""
    words = [sys.executable, "-m", "aiorl.serve", str(path), "--port=0", *options]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, **python_path()}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "default_policy 7" in line
        yield process, int(line.split("127.0.0.1:")[1].split()[0])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_command_starts_soon_answers_and_ends_gracefully(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    with command(saved["box"], f"--token-file={tmp_path / 't'}") as (process, port):
        modules = Path(f"/proc/{process.pid}/maps").read_text()
        assert "tensorflow" not in modules
        assert psutil.Process(process.pid).memory_info().rss < 120 << 20
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        token = (tmp_path / "t").read_text().strip()
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {token}"}, 200)):
            connection.request("POST", "/act", b'{"observation": [0, 0, 0]}', headers)
            answer = connection.getresponse()
            said = json.loads(answer.read())
            assert answer.status == status
        with pytest.raises(RequestRefused, match="token"):
            aiorl.PolicyClient(f"http://127.0.0.1:{port}", "wrong")
        client = aiorl.PolicyClient(f"ws://127.0.0.1:{port}", token)
        assert client.act([0, 0, 0]) == said["action"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        connection.close()
        with pytest.raises(ConnectionError):
            client.act([0, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [400, pytest.param(800, marks=pytest.mark.nightly)])
def test_malformed_requests_never_fail_the_server_or_make_it_grow(
    saved: dict[str, Path], num_requests: int
) -> None:
    words = """policy observation observations session start reward explore train value id inputs name shape
        datatype data dtype png parameters outputs sequence_id do obs"""
    names = st.sampled_from(words.split())
    plain_values = (
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), 1 << 63)
        | st.floats()
        | st.text(max_size=9)
        | names
    )
    values = st.recursive(
        plain_values | st.sampled_from([[0.1, 0.2, 0.3], [1, 3], "default_policy", "FP32"]),
        lambda part: (
            st.lists(part, max_size=4)
            | st.dictionaries(names | st.text(max_size=3), part, max_size=5)
        ),
        max_leaves=20,
    )
    paths = st.sampled_from(
        ["/act", "/sessions", "/sessions/x/end", "/v2/models/default_policy/infer"]
    )
    sizes: list[int] = []
    with (
        command(saved["box"]) as (process, port),
        connect(f"ws://127.0.0.1:{port}/ws", ping_interval=None) as socket,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

        @hypothesis.settings(
            max_examples=num_requests, database=None, phases=[hypothesis.Phase.generate]
        )
        @hypothesis.given(
            path=paths,
            said=st.binary(max_size=40) | st.dictionaries(names, values, max_size=6) | values,
        )
        def ask(path: str, said: Any) -> None:
            connection.request("POST", path, said if isinstance(said, bytes) else json.dumps(said))
            answer = connection.getresponse()
            answer.read()
            assert answer.status < 500
            socket.send(said if isinstance(said, bytes) else msgpack.packb(said))
            assert msgpack.unpackb(socket.recv(10)).get("status", 200) < 500
            sizes.append(psutil.Process(process.pid).memory_info().rss)

        ask()
        connection.close()
        assert sizes[-1] < sizes[len(sizes) * 3 // 8] + (4 << 20)
