"""The same environments under gym 0.26, which is installed, and under the classes and rules of gym
0.21.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_children import start_program

from tests.support.gym_021 import write_gym

pytest.importorskip("gym")

ROOT = Path(__file__).parents[2]
GYMNASIUM = ["gymnasium", "gymnasium"]


def _of_a_process(folder: Path | None = None) -> dict[str, object]:
    """Return the results of all cases in a new process, with a package in front of the installed
    ones.
    """
    path = os.pathsep.join(str(place) for place in (folder, ROOT) if place is not None)
    process = start_program(
        [sys.executable, "-P", "-m", "tests.support.old_gym_cases"],
        {**os.environ, "PYTHONPATH": path},
    )
    with process.stdout:
        printed = process.stdout.read()
    assert process.wait() == 0, printed
    results: dict[str, object] = json.loads(printed.splitlines()[-1])
    return results


@pytest.fixture(scope="module", params=["0.26", "0.21"])
def results(request, tmp_path_factory):
    """Results of `tests.support.old_gym_cases` by the name of the case."""
    if request.param == "0.26":
        return _of_a_process()
    folder = tmp_path_factory.mktemp("gym021")
    write_gym(folder)
    return _of_a_process(folder)


@pytest.fixture
def version(results):
    return tuple(map(int, results["version"].split(".")[:2]))


@pytest.mark.slow
def test_spaces_keep_bounds_dtypes_and_the_order_of_their_parts(results):
    observation, action = results["spaces"]["parts"]
    assert [name for name, _ in observation["spaces"]] == ["where", "kind", "flags"]
    (_, where), (_, kind), (_, flags) = observation["spaces"]
    assert where == {"kind": "Box", "shape": [2], "dtype": "float32", "low": -1.0, "high": 1.0}
    assert kind == {"kind": "Discrete", "n": 3, "start": 0, "dtype": "int64"}
    assert flags == {"kind": "MultiBinary", "n": 2}
    assert [part["kind"] for part in action["spaces"]] == ["Discrete", "MultiDiscrete"]


def test_a_discrete_space_keeps_its_first_value(version):
    if version < (0, 26):
        pytest.skip("it always begins at 0")
    code = (
        "import gym; from aiorl.data.gym_spaces import *;"
        " print(gymnasium_space(gym.spaces.Discrete(3, start=5)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout.strip() == "Discrete(3, start=5)"


def test_a_time_limit_truncates_and_the_seed_reaches_the_environment(results):
    rows = results["an_environment_with_a_time_limit"]
    assert rows["truncateds"] == [0, 1] * 3
    assert rows["terminateds"] == [0] * 6
    assert rows["rewards"] == [5] * 6
    assert [obs[0] for obs in rows["new_obs"]] == [1, 2] * 3


def test_environments_are_found_by_each_form_of_name(results):
    cut, never_cut = [0, 1] * 3, [0] * 6
    assert results["by_name"]["truncateds"] == [cut, cut, never_cut, never_cut, cut]
    kind, message = results["by_name"]["unknown"]
    assert kind == "UnknownEnvError"
    assert "'CountOfTest-v0'" in message


def test_an_environment_in_a_process_of_its_own_is_seeded_and_truncated(results):
    rows = results["in_processes_of_their_own"]
    assert (rows["rewards"], rows["truncateds"]) == ([3, 3], [0, 1])


def test_a_class_takes_the_settings_of_the_environment(results):
    assert results["made_with_a_config"]["terminateds"] == [1] * 6


def test_observations_and_actions_with_parts_are_laid_out_in_the_order_of_the_space(results):
    assert [row[2:5] for row in results["parts"]["parts"]] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert results["parts"]["pair"] == [[0, 1, 0, 0, 1]] * 2, (
        "a pair is an observation, not an observation and an info"
    )


def test_all_kinds_of_environments_may_have_spaces_of_gym(results):
    other = results["other_objects"]
    assert other["kinds"] == [GYMNASIUM] * 5
    assert other["rewards"] == [[0], [1], [1], [1], [0]]
    assert other["team"] == GYMNASIUM
    assert other["team_rewards"] == {"p": [1], "q": [2]}


def test_a_config_may_have_spaces_of_gym(results):
    run = results["policies_of_a_run"]
    assert run["spaces"] == [
        ["Tuple(Box(0.0, 1.0, (2,), float32), Discrete(3))", "Discrete(2)"],
        ["Box(0.0, 1.0, (3,), float32)", "Discrete(2)"],
    ]
    assert run["clients"] == "Box(0.0, 1.0, (2,), float32)"


def test_an_environment_whose_seed_method_does_nothing_cannot_be_seeded(results):
    for name in ("unseeded", "wrapped"):
        assert results["seeds"][name][0] == "ConfigError"


def test_refusals_name_the_value_at_fault(results):
    refused = results["refusals"]
    assert refused["odd"][0] == "UnsupportedSpaceError"
    assert "Odd(7)" in refused["odd"][1]
    assert refused["same"][0] == "ConfigError"
    assert refused["horizon"][0] == "ConfigError"
    assert "9" in refused["horizon"][1]


def test_wrappers_of_gym_and_of_gymnasium_and_the_monitor_surround_an_environment(results):
    wrapped = results["wrappers"]
    assert wrapped["rewards"] == [5, 5, 5], "(2 + 8) * 2 / 2 / 2"
    assert wrapped["stats"] == 15
    assert wrapped["picture"] == [16, 16, 3]
    assert wrapped["kinds"] == GYMNASIUM


def test_a_vector_environment_keeps_the_last_observations_of_its_copies(results, version):
    if version < (0, 26):
        pytest.skip("those of gym 0.21 drop them")
    rows = results["vector"]
    assert rows["rewards"] == [7, 7, 7, 8, 8, 8]
    assert rows["terminateds"] == [0, 1, 0, 0, 0, 0]
    assert rows["truncateds"] == [0, 0, 0, 0, 0, 1]
    assert [obs[0] for obs in rows["new_obs"]] == [1, 2, 1, 1, 2, 3]
