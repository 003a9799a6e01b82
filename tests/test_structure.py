"""Structure of the package as documented: public names, no import cycles, few files to change for a
new part.
"""

from __future__ import annotations

import ast
import graphlib
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import numpy as np
import pytest
from reworded import reworded

import aiorl
from aiorl import errors
from aiorl.acting.policy import Policy
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.config.built_trainer import BuiltTrainer
from aiorl.data.columns import ColumnSpec
from aiorl.errors import AiorlError
from aiorl.learning.algorithms.registry import ALGORITHMS, config_class
from aiorl.learning.batch_buffers import BatchBuffers
from aiorl.run.trainer import AlgorithmTrainer
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.testing.envs import CountingEnv

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "aiorl").rglob("*.py"))
TEXTS = {
    path.relative_to(ROOT / "aiorl").as_posix(): path.read_text(encoding="utf-8") for path in FILES
}
HOOKS = [name for name in vars(DefaultCallbacks) if name.startswith("on_")]


MAX_PRIVATE = 120
"""Private names of other objects that the tests use or replace; this limit may only fall."""
_OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of other objects that a file reads, or replaces by their name."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        name = ""
        match node:
            case ast.Attribute(ast.Name("self" | "cls") | ast.Call(ast.Name("super"))):
                continue
            case ast.Attribute(ast.Name("os"), "_exit"):
                continue
            case ast.Attribute(attr=name):
                pass
            case ast.Call(ast.Attribute(attr="setattr"), [ast.Constant(str(dotted)), *_]):
                name = dotted.rpartition(".")[2]
            case ast.Call(ast.Attribute(attr="setattr" | "object"), [_, ast.Constant(name), *_]):
                pass
        if re.match("_[^_]", name) and name not in _OF_NAMED_TUPLES:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {name}"


def test_tests_use_few_private_names_of_other_objects() -> None:
    places = [place for path in ROOT.glob("tests/**/*.py") for place in private_names(path)]
    assert len(places) <= MAX_PRIVATE, "\n".join(places)


def knowing(name: str) -> set[str]:
    """Return the files of the package that contain a name."""
    pattern = re.compile(rf"\b{name}\b")
    return {path for path, text in TEXTS.items() if name in text and pattern.search(text)}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports, also within functions, but not for types
    only.
    """
    graph = grimp.build_graph("aiorl", exclude_type_checking_imports=True, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


@pytest.mark.parametrize("name", [*aiorl.__all__, "TFPolicy"])
def test_every_public_name_can_be_imported_and_is_listed(name: str) -> None:
    assert getattr(aiorl, name) is not None
    assert name in dir(aiorl)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = aiorl.nonsense


def test_everything_can_be_imported_at_once_without_tensorflow() -> None:
    """R1: this works even if TensorFlow is not installed."""
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None; from aiorl import *;"
        " RolloutWorker"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_import_aiorl_loads_few_modules() -> None:
    code = (
        "import sys, aiorl; print([m for m in ('numpy', 'gymnasium', 'zmq', 'tensorflow') if m in"
        " sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert result.stdout.strip() == "[]"


def test_configs_are_made_without_tensorflow() -> None:
    code = (
        "import sys; sys.modules['tensorflow'] = None; from aiorl import IMPALAConfig, PPOConfig;"
        " PPOConfig(env='E')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_import_aiorl_silences_tensorflow_unless_the_user_configures_it() -> None:
    code = "import os, aiorl; print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    for setting, effective in ((None, "3"), ("0", "0")):
        env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
        env |= {} if setting is None else {"TF_CPP_MIN_LOG_LEVEL": setting}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        )
        assert result.stdout.strip() == effective


def test_the_type_of_a_built_trainer_has_all_that_trainers_do() -> None:
    trainers = {name for name in dir(AlgorithmTrainer) if not name.startswith("_")}
    of_classes = {"default_resource_request", "resource_help", "with_common_config"}
    assert trainers - of_classes <= set(dir(BuiltTrainer))


def test_there_are_no_import_cycles(imports: dict[str, set[str]]) -> None:
    assert sum(map(len, imports.values())) > 500
    graphlib.TopologicalSorter(imports).prepare()


@pytest.mark.parametrize(("algo", "most"), [("ppo", 23), ("dqn", 26), ("sac", 25)])
def test_an_algorithm_uses_few_files_of_learning(
    imports: dict[str, set[str]], algo: str, most: int
) -> None:
    """All imports count, also indirect ones and those within functions.

    A limit rises only for a file that makes an algorithm easier to read.
    """
    behind, todo = set[str](), [f"aiorl.learning.algorithms.{algo}"]
    while todo:
        behind.add(module := todo.pop())
        imported = imports[module] - behind
        todo += [name for name in imported if name.startswith("aiorl.learning.")]
    assert len(behind) <= most, sorted(behind)


SEE_THE_WHOLE_CONFIG = (
    "__init__.py",
    "acting/acting_state.py",
    "acting/run_dir.py",
    "config/",
    "learner.py",
    "learning/algorithm.py",
    "learning/algorithms/",
    "learning/compiled.py",
    "learning/experience.py",
    "learning/joint.py",
    "learning/keys/",
    "learning/learner.py",
    "learning/policy_learning.py",
    "learning/rows.py",
    "run/build.py",
    "run/policy_plan.py",
    "run/run.py",
    "run/trainer/",
)
"""Files, and folders of files, that import `CommonConfig`: they declare keys, write or read files of
them, put a run together, or serve algorithms, which may be users'."""


def test_parts_of_a_run_do_not_see_the_whole_config() -> None:
    importing = re.compile(r"from aiorl\.config\.schema import .*\bCommonConfig\b")
    importers = {path for path, text in TEXTS.items() if importing.search(text)}
    assert {path for path in importers if not path.startswith(SEE_THE_WHOLE_CONFIG)} == set()


TO_KNOW = {
    "ppo": ("algorithms/surrogate.py", "losses/policy_gradient.py", "steps.py"),
    "dqn": ("losses/q_learning.py", "replayed.py", "steps.py"),
    "sac": ("algorithms/critic_update.py", "losses/off_policy_actor_critic.py", "steps.py"),
    "impala": ("algorithms/streaming.py", "losses/vtrace.py", "steps.py"),
}
"""Files of learning to read in order to know an algorithm, besides its own."""


@pytest.mark.parametrize("algo", TO_KNOW)
def test_an_algorithm_can_be_known_from_four_files(algo: str) -> None:
    """What a step does to the networks is on these pages; all others serve every algorithm."""
    names = [f"algorithms/{algo}.py", *TO_KNOW[algo]]
    paths = [ROOT / "aiorl" / "learning" / name for name in names]
    assert len(paths) <= 4
    assert sum(map(code_lines, paths)) <= 900


def code_lines(path: Path) -> int:
    """Return the lines of a file with code on them, without blanks, comments and docstrings."""
    source = path.read_text("utf-8")
    no_code = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_no_config_is_more_than_four_classes_deep() -> None:
    for algo in ALGORITHMS:
        kind = config_class(algo)
        ours = [base for base in kind.__mro__ if base.__module__.startswith("aiorl.")]
        assert depth_of(kind) <= 4, ours


def depth_of(kind: type) -> int:
    """Return the depth of a class below the first class of the package."""
    if not kind.__module__.startswith("aiorl."):
        return 0
    return 1 + max(map(depth_of, kind.__bases__))


def test_the_architecture_page_has_the_layers_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    assert "".join(f"    {layer.replace(' | ', ', ')}\n" for layer in layers) in page


LOCKSTEP = {"sampling/fragments.py", "sampling/table.py"}
"""Files of lockstep sampling, which name columns because they fill in tables of all of them."""


@pytest.mark.parametrize(
    ("column", "algorithms"),
    [("ADVANTAGES", ("a2c", "pg", "ppo")), ("VALUE_TARGETS", ("a2c", "marwil", "ppo"))],
)
def test_few_files_name_a_column(column: str, algorithms: tuple[str, ...]) -> None:
    wanted_by = {f"learning/algorithms/{algo}.py" for algo in algorithms}
    wanted_by.add("learning/algorithms/appo.py")  # checks each batch itself
    assert knowing(column) - LOCKSTEP == {"data/columns.py", "acting/postprocess.py"} | wanted_by
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert "`aiorl/data/columns.py`" in page
    assert "`aiorl/acting/postprocess.py`" in page


class Novel(Policy):
    """Policy that returns a column unknown to the package."""

    def compute_actions(self, obs: Any, *args: Any, **kwargs: Any) -> Any:
        return np.zeros(len(obs), np.int64), [], {"novelty": obs[:, 1] / 2}


def test_a_new_column_reaches_rows_and_train_batches_without_other_changes() -> None:
    worker = RolloutWorker(lambda context: CountingEnv(length=3), Novel, rollout_fragment_length=6)
    rows = worker.sample()
    worker.stop()
    assert rows["novelty"].tolist() == [0.0, 0.5, 1.0] * 2
    buffers = BatchBuffers([ColumnSpec("novelty")])
    batch = buffers.rows([{"novelty": rows["novelty"].astype(np.float32)[:, None]}], 6)
    assert buffers.column(batch, "novelty").tolist() == [0.0, 0.5, 1.0] * 2


def test_every_error_class_is_raised_or_has_subclasses() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, AiorlError)
    ]
    leaves = [
        kind.__name__ for kind in kinds if not any(kind in other.__bases__ for other in kinds)
    ]
    assert len(leaves) > 15
    assert [name for name in leaves if knowing(name) == {"errors.py"}] == []


def test_each_stage_of_the_data_flow_is_logged_by_one_text() -> None:
    """R31."""
    texts = re.findall(r'": "(.*?)%s', TEXTS["process/log_once.py"])
    assert len(texts) > 10
    for text in texts:
        assert [name for name, source in TEXTS.items() if f'"{text}%' in source] == [
            "process/log_once.py"
        ], text


@pytest.mark.parametrize("hook", HOOKS)
def test_two_files_name_each_hook(hook: str) -> None:
    """Exploration has methods of the same names, and an evaluation that records a video has its own
    hooks.
    """
    files = knowing(hook) - {
        "acting/exploration.py",
        "run/evaluation.py",
    }
    assert len(files) == 2
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert all(f"`aiorl/{name}`" in page for name in files), files


def test_the_plugin_that_changes_messages_keeps_values() -> None:
    source = (
        '"""No sentence of a docstring changes."""\nTABLE = {"a key of words": "two words", "b":'
        ' "These are four plain words."}\ndef check(lr, name):\n    if lr == "some words in a'
        ' comparison": raise ConfigError(f"lr is {lr}, too \'large\' for {name}.", key="my key",'
        ' hint="Use `aiorl keys`, --lr or a/b.c with Box.")\n'
    )
    assert ast.unparse(reworded(source)) == ast.unparse(
        ast.parse(
            source.replace("These are four plain words", "heseT rea ourf lainp ordsw")
            .replace("lr is {lr}, too 'large' for", "lr si {lr}, oot 'large' orf")
            .replace("Use `aiorl keys`, --lr or", "seU `aiorl keys`, --lr ro")
            .replace("with Box", "ithw Box")
        )
    )


@pytest.mark.slow
def test_one_iteration_of_training_runs_through_few_files() -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "iteration_files.py")],
        check=True,
        timeout=280,
    )
