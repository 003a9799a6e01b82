"""Pages of the site that are made of the code: each algorithm's keys, and the reference of all public names.

MkDocs calls these functions while it builds the site (`make docs`).
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./((?!results|[a-z_]+\.md)[^)\s]+)\)")

API = {
    "Training": ("aiorl", ("train", "Trainer", "AlgorithmTrainer", "DefaultCallbacks", "evaluate", "Evaluation")),
    "Acting": (
        "aiorl",
        (
            "load_policy",
            "LoadedPolicy",
            "export_policy",
            "Policy",
            "PolicyMap",
            "TFPolicy",
            "Preprocessor",
            "Exploration",
        ),
    ),
    "Environments": (
        "aiorl",
        (
            "register_env",
            "EnvContext",
            "MultiAgentEnv",
            "VectorEnv",
            "BaseEnv",
            "ExternalEnv",
            "ExternalMultiAgentEnv",
            "Poll",
            "to_base_env",
        ),
    ),
    "Experience": (
        "aiorl",
        (
            "SampleBatch",
            "MultiAgentBatch",
            "Fragment",
            "MultiAgentEpisode",
            "InputReader",
            "OutputWriter",
            "IOContext",
            "SamplerInput",
            "OffPolicyEstimator",
            "OffPolicyEstimate",
        ),
    ),
    "Sampling": ("aiorl", ("RolloutWorker", "EvaluatorInterface", "SyncSampler", "AsyncSampler", "get_global_worker")),
    "Algorithms of your own": ("aiorl.algorithms", ()),
    "Errors": ("aiorl.errors", ()),
}
"""Title of a page -> module, and its names in order; none stands for all that it has."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated."""
    made = {"algorithms/index.md": _algorithms_page(), "api/index.md": _api_index()}
    for title, (module, names) in API.items():
        made[f"api/{_slug(title)}.md"] = _api_page(title, module, names or _public(module))
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of algorithms and of the reference in the navigation."""
    from aiorl.learning.algorithms import ALGORITHMS

    pages = {
        "algorithms/": ["algorithms/index.md", *(f"algorithms/{name}.md" for name in ALGORITHMS)],
        "api/": ["api/index.md", *(f"api/{_slug(title)}.md" for title in API)],
    }
    config.nav = _expanded(config.nav, pages)
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add an algorithm's keys to its page, and lead links to files outside the site to the repository."""
    path = Path(page.file.src_uri)
    if path.parent.name == "algorithms" and path.stem != "index":
        markdown += _keys(path.stem)
    address = _address()
    return _OUTSIDE.sub(rf"]({address}/blob/HEAD/\1)" if address else r"](index.md)", markdown)


def _expanded(items: Any, pages: dict[str, list[str]]) -> Any:
    if isinstance(items, dict):
        return {title: _expanded(of, pages) for title, of in items.items()}
    if isinstance(items, list):
        return [_expanded(item, pages) for item in items]
    return pages.get(items, items)


def _keys(algo: str) -> str:
    """An algorithm's keys with its own defaults: first those that not all algorithms have."""
    from aiorl.config.key import all_keys, default_text, fact_of, meanings
    from aiorl.config.schema import CommonConfig
    from aiorl.learning.algorithms.registry import config_class

    config = config_class(algo)
    common = {name: default_text(field) for name, field in all_keys(CommonConfig)}
    said, own, other = meanings(config), [], []
    for name, field in sorted(all_keys(config), key=lambda named: fact_of(named[1], "group")):
        unit = fact_of(field, "unit")
        default = f"`{default_text(field)}`" + (f" ({unit})" if unit else "")
        row = f"| `{name}` | {default} | {said[name]} |".replace("\n", " ")
        (other if common.get(name) == default_text(field) else own).append(row)
    head = ["| Key | Default | Meaning |", "|---|---|---|"]
    lines = [
        "",
        "## Keys",
        "",
        "Keys of this algorithm, and shared keys that have another default here:",
        "",
        *head,
        *own,
    ]
    lines += ["", f'??? note "The {len(other)} other keys"', "", *(f"    {line}" for line in [*head, *other])]
    return "\n".join(lines) + "\n"


def _algorithms_page() -> str:
    from aiorl.learning.algorithms import ALGORITHMS

    lines = ["# Algorithms", ""]
    for algo, name in ALGORITHMS.items():
        first = (ROOT / f"docs/algorithms/{algo}.md").read_text("utf-8").split("\n\n")[0].splitlines()[1:]
        said = re.sub(r":? ?\(?https?://\S+", "", " ".join(first)).split(". ")[0].rstrip(".,;: ")
        lines.append(f"- [{name}]({algo}.md): {said}.")
    return "\n".join(lines) + "\n"


def _api_index() -> str:
    lines = ["# Python reference", "", "`import aiorl` is cheap: names are imported when they are first used.", ""]
    lines += [f"- [{title}]({_slug(title)}.md)" for title in API]
    return "\n".join(lines) + "\n"


def _api_page(title: str, module: str, names: Iterable[str]) -> str:
    lines = [f"# {title}", ""]
    for name in names:
        found = getattr(importlib.import_module(module), name)
        home = getattr(found, "__module__", module)
        if inspect.isclass(found) or inspect.isfunction(found):
            lines += [f"::: {home}.{found.__qualname__}", ""]
    return "\n".join(lines) + "\n"


def _public(module: str) -> list[str]:
    found = importlib.import_module(module)
    return list(
        getattr(
            found,
            "__all__",
            [name for name, item in vars(found).items() if inspect.isclass(item) and item.__module__ == module],
        )
    )


def _slug(title: str) -> str:
    return title.lower().replace(" ", "_")


def _address() -> str:
    """The address of the clone's remote, as a browser takes it; "" without one."""
    done = subprocess.run(
        ["git", "-C", ROOT, "remote", "get-url", "origin"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().removesuffix(".git") if done.stdout.startswith("https://") else ""
