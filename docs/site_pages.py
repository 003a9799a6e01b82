"""Parts of the site that are made from the code: keys, presets and results of algorithms, the API
reference, examples.

MkDocs calls `on_config`, `on_files` and `on_page_markdown` while it builds the site (`make docs`).
"""

from __future__ import annotations

import importlib
import os
import re
import types
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_API = re.compile(r"<!-- api ([\w.]+): ([\w\s]+) -->")
_NAME_IN_TABLE = re.compile(r"(?<=<td><code>)[^<\s]{33,}(?=</code>)")
_RELATED = {"c51": "dqn", "rainbow": "dqn"}
_FILE_OF_BLOCK = re.compile(r"(?<=^```python )file=(\S+)$", re.MULTILINE)
_LANGUAGES = {
    ".py": "python",
    ".sh": "sh",
    ".sbatch": "sh",
    ".yaml": "yaml",
    ".json": "json",
    ".service": "ini",
    ".html": "html",
    ".js": "javascript",
    ".css": "css",
    ".cs": "csharp",
    ".gd": "gdscript",
}
_LEFT_OUT = {"Deviation", "IQM", "Bar", "Holds", "Wall time"}
"""Columns of results that an algorithm's page leaves out."""
_BOOSTS = {
    "Get started": 2.0,
    "Guides": 2.0,
    "Reference": 0.2,
    "Python API": 0.3,
    "Algorithms": 1.0,
    "Inside": 0.5,
    "Maintainers": 0.2,
}
"""Part of the navigation -> weight of its pages in the search, which lists a guide before a table
with the same words."""
_BOOST_ELSEWHERE = 0.3
"""Weight of pages that are not in the navigation, such as those of examples; home is one of the
first."""
_COPIED = {
    ROOT / "CONTRIBUTING.md": "maintainers/contributing.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "LICENSE": "maintainers/license.md",
    ROOT / "aiorl/offline/other_columns.yaml": "offline/other_columns.yaml.md",
}
"""Files outside of docs/ and examples/ that are pages of the site too, and where."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the algorithms in the navigation."""
    from aiorl.learning.algorithms import ALGORITHMS

    pages = [f"algorithms/{algo}.md" for algo in ALGORITHMS]
    config.nav = _expanded(config.nav, {"algorithms/": ["algorithms/index.md", *pages]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are copied from outside of docs/."""
    for source, path in _site_paths().items():
        if source.suffix == ".ipynb":
            files.append(File.generated(config, path, abs_src_path=str(source)))
        else:
            files.append(File.generated(config, path, content=_copied(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is made from the code, and point links to files outside of docs/ to their
    pages.
    """
    path = Path(page.file.src_uri)
    if not page.is_homepage:
        page.meta.setdefault("search", {"boost": _boost(page)})
    if path.parent.name == "algorithms" and path.stem != "index":
        markdown = (
            markdown.rstrip() + "\n" + _presets(path.stem) + _results(path.stem) + _keys(path.stem)
        )
    markdown = _API.sub(
        lambda found: "\n\n".join(_directives(found[1], found[2].split())), markdown
    )
    return _linked(_with_titles(markdown), path)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long names in tables break behind a dot, slash or underscore, and nowhere else."""
    return _NAME_IN_TABLE.sub(lambda name: re.sub(r"([./_])(?=\w)", r"\1<wbr>", name[0]), html)


def _boost(page: Page) -> float:
    parts = [part.title for part in page.ancestors]  # the innermost first
    return next((_BOOSTS[part] for part in parts if part in _BOOSTS), _BOOST_ELSEWHERE)


def _with_titles(markdown: str) -> str:
    """Show the file name of a block above it; the site's Markdown reads no block with `file=`."""
    return _FILE_OF_BLOCK.sub(r'title="\1"', markdown)


def _site_paths() -> dict[Path, str]:
    """Files outside of docs/ that are shown on the site -> their path there."""
    shown = EXAMPLES.rglob("*.*")
    # an index.md would be the page of its section in the navigation
    paths = {EXAMPLES / "README.md": "examples.md"}
    for source in sorted(shown):
        name = source.relative_to(EXAMPLES).as_posix()
        if source.suffix == ".ipynb":
            paths[source] = f"examples/{name}"
        elif source.suffix in _LANGUAGES:
            paths[source] = f"examples/{name}.md"
    return paths | _COPIED


def _copied(source: Path) -> str:
    text = source.read_text("utf-8")
    if source.suffix == ".md":
        return text
    language = _LANGUAGES.get(source.suffix, "text")
    return f"# {source.name}\n\n`{source.relative_to(ROOT)}`\n\n```{language}\n{text}```\n"


def _linked(markdown: str, path: Path) -> str:
    """Rewrite the links of a page.

    Args:
        markdown: its text.
        path: its path on the site.
    """
    paths = _site_paths()
    origins = {where: source for source, where in paths.items()}
    folder = origins.get(path.as_posix(), DOCS / path).parent

    def target(found: re.Match[str]) -> str:
        source, anchor = Path(os.path.normpath(folder / found[1])), found[2] or ""
        if source in paths:
            return f"]({_relative(paths[source], path)}{anchor})"
        if source.is_relative_to(DOCS):
            return f"]({_relative(source.relative_to(DOCS).as_posix(), path)}{anchor})"
        if source == ROOT / "README.md":
            return f"]({_relative('index.md', path)})"
        return found[0]

    return _LINK.sub(target, markdown)


def _relative(target: str, page: Path) -> str:
    return Path(os.path.relpath(target, page.parent)).as_posix()


def _expanded(items: Any, pages: dict[str, list[Any]]) -> Any:
    if isinstance(items, dict):
        return {title: _expanded(of, pages) for title, of in items.items()}
    if isinstance(items, list):
        return [_expanded(item, pages) for item in items]
    return pages.get(items, items)


def _keys(algo: str) -> str:
    """Return the table of an algorithm's keys with its own defaults: first those that not all
    algorithms have.
    """
    from aiorl.config.key import all_keys, default_text, fact_of, meanings
    from aiorl.config.schema import CommonConfig
    from aiorl.learning.algorithms.registry import config_class

    config = config_class(algo)
    common = {name: default_text(field) for name, field in all_keys(CommonConfig).items()}
    meaning, own, other = meanings(config), [], []
    for name, field in sorted(
        all_keys(config).items(), key=lambda named: fact_of(named[1], "group")
    ):
        unit = fact_of(field, "unit")
        default = f"`{default_text(field)}`" + (f" {unit}" if unit else "")
        row = f"| `{name}` | {default} | {meaning[name]} |".replace("\n", " ")
        (other if common.get(name) == default_text(field) else own).append(row)
    head = ["| Key | Default | Meaning |", "|---|---|---|"]
    lines = [
        "",
        "## Keys",
        "",
        "Its own keys, and common keys with another default here:",
        "",
        *head,
        *own,
        "",
    ]
    lines += [
        f'??? note "The {len(other)} other keys"',
        "",
        *(f"    {line}" for line in [*head, *other]),
    ]
    return "\n".join(lines) + "\n"


def _presets(algo: str) -> str:
    """Return the list of an algorithm's presets."""
    from aiorl.config.presets import named_preset, preset_names

    presets = [
        preset for preset in map(named_preset, preset_names()) if preset.settings["algo"] == algo
    ]
    if not presets:
        return ""
    lines = ["", "## Presets", "", "| Preset | Environments | Settings from |", "|---|---|---|"]
    for preset in presets:
        envs = ", ".join(f"`{env}`" for env in preset.envs)
        lines.append(
            f"| [`{preset.name}`](../presets.md#{preset.name}) | {envs} | {preset.source} |"
        )
    return "\n".join(lines) + "\n"


def _results(algo: str) -> str:
    """Return the rows of docs/results.md that are about an algorithm, each table with its head."""
    tables = re.findall(
        r"^(\| (?:Task) .*\n\|[-|]+\n)((?:\|.*\n)+)", _read(DOCS / "results.md"), re.MULTILINE
    )
    found = []
    for head, rows in tables:
        own = [row for row in rows.splitlines() if _algorithm_of(row) == algo]
        if own:
            kept = [
                n for n, title in enumerate(_cells(head.splitlines()[0])) if title not in _LEFT_OUT
            ]
            lines = [*head.splitlines(), *own]
            found.append(
                "".join("| " + " | ".join(_cells(line)[n] for n in kept) + " |\n" for line in lines)
            )
    if not found:
        return ""
    text = "\n".join(found).replace("](results/", "](../results/")
    return f"\n## Results\n\nWith presets; [results](../results.md) explains the columns.\n\n{text}"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _algorithm_of(row: str) -> str:
    first = re.match(r"\| \[`(\w+)-", row)
    return _RELATED.get(first[1], first[1]) if first else ""


def _read(path: Path) -> str:
    return path.read_text("utf-8")


def _directives(module: str, names: list[str]) -> list[str]:
    """Return what makes mkdocstrings show public names: the paths of their definitions."""
    found = importlib.import_module(module)
    homes: dict[str, str] = getattr(found, "_HOME", {})
    directives = []
    for name in names:
        item = getattr(found, name)
        home = homes.get(name) or getattr(item, "__module__", module)
        own_name = getattr(item, "__qualname__", name) if callable(item) else name
        if not home.startswith("aiorl"):  # a name for a type of Python's, such as a Callable
            home, own_name = module, name
        directive = f"::: {home}.{own_name}"
        if name.endswith("Config"):  # its keys are on the pages of algorithms
            directive += "\n    options:\n      members: false"
        elif isinstance(item, type) and (inherited := _inherited(item)):
            directive += f"\n    options:\n      inherited_members: [{', '.join(inherited)}]"
        directives.append(directive)
    return directives


def _inherited(item: type) -> list[str]:
    """Return the public methods that a class inherits from classes of aiorl that no page of
    docs/api/ shows.
    """
    shown = {
        name
        for page in (DOCS / "api").glob("*.md")
        for found in _API.findall(_read(page))
        for name in found[1].split()
    }
    bases = [base for base in item.__mro__[1:] if base.__module__.startswith("aiorl.")]
    hidden = [base for base in bases if base.__name__ not in shown]
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    found = {
        name for base in hidden for name, value in vars(base).items() if isinstance(value, kinds)
    }
    return sorted(name for name in found - vars(item).keys() if not name.startswith("_"))
