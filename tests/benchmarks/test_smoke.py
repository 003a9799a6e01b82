"""Each benchmark can be imported, and its measurement runs once at its smallest size."""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from benchmarks import (
    __main__ as program,
    actors,
    actors_aiorl,
    actors_bare,
    atari,
    general,
    off_policy,
    replay,
    sampler,
    wire,
)
from benchmarks.actor_work import AsyncWorker, Worker, measure
from benchmarks.attacker import ATTACKS, Attacker
from benchmarks.result import Figure


@pytest.mark.parametrize("name", program.MODULES)
def test_a_benchmark_is_a_module_that_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("module", "arguments", "sizes"),
    [
        (sampler, ["serial", "2"], {}),
        (sampler, ["native", "3"], {}),
        (general, ["multi", "2"], {}),
        (general, ["single", "2"], {}),
        (replay, ["prioritised"], {"ROWS": 500, "TURNS": 2, "BATCH": 8}),
        (replay, ["uniform"], {"ROWS": 500, "TURNS": 2, "BATCH": 8}),
        (replay, ["frames"], {"STACKS": 100, "TURNS": 2, "BATCH": 8}),
        *(
            pytest.param(
                off_policy,
                [algo],
                {"STORED": 500, "HIDDEN": 8, "MINIBATCHES": 4},
                marks=pytest.mark.nightly,
            )
            for algo in ("dqn", "sac", "td3")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_subject_and_baseline_are_measured(
    module: Any,
    arguments: list[str],
    sizes: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"ROUND_S": 0.01, "ROUNDS": 1, **sizes}.items():
        monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(module, "pin_to_one_core", lambda: None)
    monkeypatch.setattr("sys.argv", [module.__name__, *arguments])
    module.main(*(arguments if module in (replay, off_policy) else ()))
    figures = np.array(json.loads(capsys.readouterr().out))
    assert figures.shape[-1] == 2
    assert (figures > 0).all()


@pytest.mark.slow
def test_fragments_are_measured_between_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROUNDS": 1, "BURSTS": 1, "SMALL_BURST": 1000}.items():
        monkeypatch.setattr(wire, name, value)
    (figure,) = wire.wire_small_fragments()
    assert figure.value > 100


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("module", "kind"), [(actors_aiorl, Worker), (actors_aiorl, AsyncWorker), (actors_bare, Worker)]
)
def test_actors_of_aiorl_and_of_the_bare_pair_do_the_same_work(
    module: Any, kind: type[Worker]
) -> None:
    async def work() -> tuple[dict[str, float], Any]:
        async with module.started(kind) as system:
            return await measure(system, 0.05), await system.sample()

    figures, batch = asyncio.run(work())
    assert figures.keys() == {"round_trip_ms", "batch_ms", "batches_per_s", "broadcast_ms"}
    assert min(figures.values()) > 0
    sent = Worker().sample()
    assert batch.keys() == sent.keys()
    for name, column in sent.items():
        np.testing.assert_array_equal(batch[name], column)


def test_fragments_of_an_actor_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SAMPLING_S": 0.1, "WARM_S": 0.0}.items():
        monkeypatch.setattr(actors, name, value)
    assert asyncio.run(actors.sampled_by_handle("native")) > 1000


@pytest.mark.slow
def test_pong_is_played_by_subject_and_baseline_and_sent(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    atari.export_nature_cnn(tmp_path)
    policy = atari.load_policy(tmp_path)
    assert [make(policy, 2, 5)() for make in (atari.make_subject, atari.make_baseline)] == [10, 10]
    ratio, *_ = atari.measure_wire(atari.make_fragment(2, 12, 40), rounds=2)
    assert ratio < atari.TARGET_WIRE / 4


@pytest.mark.rest_slow
@pytest.mark.parametrize("what", sorted(ATTACKS.keys() - {"metrics"}))  # this one needs leases
def test_every_attacker_reaches_the_learner_and_ends_in_time(what: str) -> None:
    async def attack() -> int:
        endpoint, seen = ZmqLearnerEndpoint("tcp://127.0.0.1:0", insecure=True), asyncio.Event()
        endpoint.on_event = endpoint.on_message = lambda *_: seen.set()
        endpoint.start()
        attacker = Attacker(
            int(endpoint.address.rpartition(":")[2]), None, False, time.monotonic() + 0.3
        )
        count = await asyncio.wait_for(asyncio.to_thread(ATTACKS[what], attacker), 10)
        await asyncio.wait_for(seen.wait(), 10)
        await endpoint.close()
        return count

    assert asyncio.run(attack()) > 0


def test_a_failed_measurement_is_a_row_and_ctrl_c_shows_the_finished_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> list[Figure]:
        raise RuntimeError("3 results in the last 4 s")

    def interrupted() -> list[Figure]:
        raise KeyboardInterrupt

    def one() -> list[Figure]:
        return [Figure("tiny/one", 2.0, "steps/s", 1.0, target_ratio=1.5)]

    monkeypatch.setattr(program, "_functions", lambda: {"broken": fails, "tiny": one})
    assert program.main(["--json", str(tmp_path / "bench.json")]) == 1
    broken, tiny = json.loads((tmp_path / "bench.json").read_text())
    assert (broken["name"], broken["ok"], broken["problem"]) == (
        "broken",
        False,
        "RuntimeError: 3 results in the last 4 s",
    )
    assert (tiny["name"], tiny["ok"]) == ("tiny/one", True)
    capsys.readouterr()
    monkeypatch.setattr(
        program, "_functions", lambda: {"tiny": one, "slow": interrupted, "never": fails}
    )
    assert program.main([]) == 130
    assert "tiny/one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "baseline", "smaller", "ok"),
    [
        (10.0, 15.0, False, True),
        (9.0, 9.0, False, False),
        (10.0, 20.0, False, False),
        (9.0, 20.0, True, True),
    ],
)
def test_both_bounds_of_a_figure_must_hold(
    value: float, baseline: float, smaller: bool, ok: bool
) -> None:
    figure = Figure("x", value, "steps/s", baseline, 10.0, 0.6, smaller)
    assert (figure.ok, figure.ratio) == (ok, value / baseline)
