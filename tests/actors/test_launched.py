"""Hubs that a launcher has given their place, by environment variables."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from actor_things import Counter

from aiorl.actors.hub import Actors
from aiorl.actors.launched import Launched
from aiorl.config.addresses import split_address
from aiorl.errors import ConfigError
from aiorl.keys import make_keys
from aiorl.process.machine import usable_cores
from aiorl.process.tasks import new_event_loop


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put settings as a launcher's into the environment, and return the directory of the run."""
    make_keys(tmp_path / "keys")
    settings = Launched(
        bind="tcp://127.0.0.1:0",
        keys=str(tmp_path / "keys"),
        run_dir=str(tmp_path),
        num_joining=1,
        num_here=1,
    )
    for name, value in settings.variables().items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_a_launched_hub_is_found_by_its_directory_and_waits_for_all_of_its_processes(
    launch: Path,
) -> None:
    worker = [sys.executable, "-m", "aiorl.worker", "--connect", f"run:{launch}"]
    folder = os.path.dirname(sys.modules["actor_things"].__file__ or "")
    variables = {name: text for name, text in os.environ.items() if not name.startswith("AIORL_")}
    with subprocess.Popen(
        [*worker, "--keys", str(launch / "keys")], env={**variables, "PYTHONPATH": folder}
    ) as process:

        async def main() -> None:
            async with asyncio.timeout(60), Actors() as actors:
                count = await actors.wait_for_processes()
                assert (count, actors.num_free) == (2, 1)
                counters = await actors.start(Counter, 5, count=count)
                assert await actors.broadcast(counters, "add", 1) == [6, 6]
                variables = [await one.variable("AIORL_BIND") for one in counters]
                assert variables == [None, None]  # or actors would listen there, too

        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(main())
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_arguments_of_a_program_win_over_its_launcher(
    launch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = launch / "other"
    make_keys(other)

    async def main() -> None:
        async with Actors(bind="tcp://127.0.0.2:0", keys=other) as actors:
            assert actors.address.startswith("tcp://127.0.0.2:")
            facts = json.loads((launch / "run.json").read_text())
            assert facts["addresses"] == [actors.address]

    asyncio.run(main())
    assert str(other) in caplog.text
    assert "can't join" in caplog.text


def test_a_hub_that_waits_says_how_processes_of_other_hosts_join(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "my keys"
    make_keys(keys)

    async def main() -> None:
        async with Actors(bind="tcp://0.0.0.0:0", keys=keys) as actors:
            waiting = asyncio.create_task(actors.wait_for_processes(1))
            await asyncio.sleep(0)  # it has begun
            waiting.cancel()

    asyncio.run(main())
    (record,) = caplog.records
    command = shlex.split(record.getMessage().partition(": ")[2])
    address = command[command.index("--connect") + 1]
    assert split_address(address)[0] != "0.0.0.0", "another host can't dial it"
    assert command[command.index("--keys") + 1] == str(keys)


def test_one_hub_of_a_program_gets_the_launchers_processes_and_the_next_one_is_warned_of(
    launch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Actors():
            pass
        assert not caplog.records
        async with Actors() as second:
            assert await second.wait_for_processes() == usable_cores()

    caplog.set_level(logging.WARNING)
    asyncio.run(main())
    assert "first Actors()" in caplog.text


def test_without_a_launcher_there_is_room_for_as_many_actors_as_cores() -> None:
    async def main() -> None:
        async with Actors() as actors:
            assert await actors.wait_for_processes() == usable_cores()
        async with Actors(bind="tcp://127.0.0.1:0") as actors:
            with pytest.raises(ConfigError, match="how many"):
                await actors.wait_for_processes()
            assert await actors.wait_for_processes(0) == 0

    asyncio.run(main())


def test_a_variable_that_holds_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORL_NUM_JOINING", "-3")
    with pytest.raises(ConfigError, match=r"AIORL_NUM_JOINING.*'-3'"):
        Actors()


def test_only_1_in_the_variable_lets_everyone_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORL_BIND", "tcp://127.0.0.1:0")
    monkeypatch.setenv("AIORL_INSECURE", "0")
    with pytest.raises(ConfigError, match="AIORL_INSECURE") as error:
        Actors()
    assert error.value.value == "0"
