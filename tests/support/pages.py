"""Write the generated pages of the documentation.

    python tests/support/pages.py

`docs/config.md` has all keys, `docs/presets.md` all presets. The tables of the migration pages are
made from `aiorl/config/other_names.yaml`; each follows a comment with its name.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from aiorl.config.key import all_keys, by_group, default_text, fact_of, kind_text, meanings
from aiorl.config.presets import named_preset, preset_names
from aiorl.config.rllib_file import NONE, other_names
from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.registry import ALGORITHMS, config_class

DOCS = Path(__file__).parents[2] / "docs"
_PLACE = re.compile(r"(<!-- (keys|python|names) (\w+) -->\n)(?:\|.*\n)*")
_CONFIG = """# Common keys

The keys that all algorithms share. Each [algorithm's page](algorithms/index.md) lists its own keys, and its defaults of
these. `aiorl train --algo NAME --help-config` shows the same in a terminal. [Configuration](configuration.md) explains
how to set keys.

If algorithms have different defaults, the column Default gives each value with its algorithms. A dot separates a
group from its key: `model.use_lstm` is `use_lstm` in `model`. Where: L is the learner, W the workers, B both.
"""
_PRESETS = """# Presets

A preset is a set of values for one algorithm and one environment, or several similar ones. `--preset NAME` uses it.
`--preset auto` finds the preset for the algorithm and the environment, if there is one. In files and in Python:
`preset: auto`, `PPOConfig(preset="auto")`.

Configuration files, options and arguments take precedence over a preset. `--show-config` shows each value and its
source. The files are in `aiorl/presets/`. [Results](results.md) has the curves and the spread over seeds.

| Preset | Environments | Result | Settings from |
|---|---|---|---|
"""


def _default(name: str) -> str:
    """Return the default of a common key: one value, or each value with the algorithms that have
    it.
    """
    if name == "algo":
        return "`ppo`"
    by_value: dict[str, list[str]] = {}
    for algo in ALGORITHMS:
        field = all_keys(config_class(algo)).get(name)
        if field is not None:
            by_value.setdefault(default_text(field), []).append(algo)
    if len(by_value) == 1:
        return f"`{next(iter(by_value))}`"
    return "; ".join(f"`{value}` {', '.join(algos)}" for value, algos in by_value.items())


def config_page() -> str:
    """Return docs/config.md: one table for each group of keys."""
    text, said = _CONFIG, meanings(CommonConfig)
    for group, keys in groupby(
        by_group(all_keys(CommonConfig).items()), key=lambda named: fact_of(named[1], "group")
    ):
        text += (
            f"\n## {group}\n\n| Key | Default | Type | Where | Meaning |\n|---|---|---|---|---|\n"
        )
        for name, field in keys:
            where, meaning = fact_of(field, "where")[0].upper(), said[name].replace("|", "\\|")
            text += f"| `{name}` | {_default(name)} | {kind_text(field)} | {where} | {meaning} |\n"
    return text


def presets_page() -> str:
    """Return docs/presets.md: one table, and each preset's settings."""
    presets = list(map(named_preset, preset_names()))
    text = _PRESETS
    for preset in presets:
        envs = ", ".join(f"`{env}`" for env in preset.envs)
        text += f"| `{preset.name}` | {envs} | {preset.result} | {preset.source} |\n"
    for preset in presets:
        text += "\n".join(["", f"## {preset.name}", "", "```yaml", *preset.lines(), "```", ""])
    return text


def _table(kind: str, library: str) -> str:
    """Return the rows of a Markdown table of the keys, or the names in Python code, of another
    library.
    """
    if kind == "python":
        text = "| Name | Here |\n|---|---|\n"
        for of, names in other_names()[kind][library].items():
            text += "".join(f"| `{of}.{name}` | {here} |\n" for name, here in names.items())
        return text
    if kind == "names":
        rows = (f"| `{name}` | {here} |\n" for name, here in other_names()[library].items())
        return "| Name | Here |\n|---|---|\n" + "".join(rows)
    text = "| Name | Here | Difference |\n|---|---|---|\n"
    for name, entry in other_names()[library].items():
        answers = {NONE: entry} if isinstance(entry, str) else entry
        keys = [f"`{key}`" for key in answers if key != NONE]
        notes = list(dict.fromkeys(note for key, note in answers.items() if note and key != NONE))
        if answers.get(NONE):
            notes.append(f"Otherwise: {answers[NONE]}" if keys else answers[NONE])
        text += f"| `{name}` | {', '.join(keys) or 'none'} | {' '.join(notes)} |\n"
    return text


def with_tables(page: str) -> str:
    """Return a page with new tables."""
    return _PLACE.sub(lambda found: found[1] + _table(found[2], found[3]), page)


def pages() -> dict[Path, str]:
    """Return the text of each page by path."""
    migration = {
        path: with_tables(path.read_text(encoding="utf-8"))
        for path in sorted(DOCS.glob("migration_*.md"))
    }
    return {DOCS / "config.md": config_page(), DOCS / "presets.md": presets_page(), **migration}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
