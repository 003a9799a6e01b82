"""The generated pages of the documentation, written anew where they no longer say what the code does.

    python tests/support/pages.py

`docs/config.md` has all keys, `docs/presets.md` all presets. The tables of the migration pages are made from
`aiorl/config/other_names.yaml`; each stands behind a comment that names it.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from aiorl.config.key import all_keys, by_group, default_text, fact_of, kind_text, meanings
from aiorl.config.layers import named_preset, preset_names
from aiorl.config.rllib_file import NONE, other_names
from aiorl.config.schema import CommonConfig

DOCS = Path(__file__).parents[2] / "docs"
_PLACE = re.compile(r"(<!-- (keys|python) (\w+) -->\n)(?:\|.*\n)*")
_CONFIG = """# Config reference

The keys that all algorithms share. An algorithm has other defaults and more keys of its own; see all of
them with `python -m aiorl.learner --algo NAME --help-config`. A key is set in a YAML file (`--config FILE`),
or on the command line as `--key-name VALUE` or `--set key=VALUE`; the command line wins. Written with a dot,
`model.use_lstm` is the key `use_lstm` inside `model`.

Where: L is the learner, W the workers, B both; workers get their part from the learner.
"""
_PRESETS = """# Presets

Settings for one algorithm in one environment, or in several alike. `--preset NAME` takes one,
`--preset auto` the one for the algorithm and the environment, if there is one; likewise `preset: NAME` in a
config file and `PPOConfig(preset="auto")`. Default < preset < config file < option or argument: what is set
otherwise wins. `--show-config` shows each value and where it comes from. The files are in `aiorl/presets/`.

| Preset | Environments | Result | Settings from |
|---|---|---|---|
"""


def config_page() -> str:
    """Return docs/config.md: one table for each group of keys."""
    text, said = _CONFIG, meanings(CommonConfig)
    for group, keys in groupby(by_group(all_keys(CommonConfig)), key=lambda named: fact_of(named[1], "group")):
        text += f"\n## {group}\n\n| Key | Default | Type | Where | Meaning |\n|---|---|---|---|---|\n"
        for name, field in keys:
            where, meaning = fact_of(field, "where")[0].upper(), said[name].replace("|", "\\|")
            text += f"| `{name}` | `{default_text(field)}` | {kind_text(field)} | {where} | {meaning} |\n"
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
    """Return the rows of a Markdown table of the keys, or the names in Python code, of another library."""
    if kind == "python":
        text = "| Name | Here |\n|---|---|\n"
        for of, names in other_names()[kind][library].items():
            text += "".join(f"| `{of}.{name}` | {here} |\n" for name, here in names.items())
        return text
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
    """Return a page with its tables made again."""
    return _PLACE.sub(lambda found: found[1] + _table(found[2], found[3]), page)


def pages() -> dict[Path, str]:
    """Return path -> text of each page."""
    migration = {path: with_tables(path.read_text(encoding="utf-8")) for path in sorted(DOCS.glob("migration_*.md"))}
    return {DOCS / "config.md": config_page(), DOCS / "presets.md": presets_page(), **migration}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
