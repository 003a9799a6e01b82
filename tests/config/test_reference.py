from __future__ import annotations

from pathlib import Path

from aiorl.config.key import key
from aiorl.config.reference import config_page, render_keys
from aiorl.config.schema import CommonConfig

DOCS = Path(__file__).parents[2] / "docs" / "config.md"


class OtherConfig(CommonConfig):
    """An algorithm's config."""

    epochs: int = key(3, "Epochs over one batch.", group="Other", unit="epochs")


def test_the_reference_in_docs_is_what_the_code_says() -> None:
    """Run `python -m aiorl.config.reference > docs/config.md` after a change of keys."""
    assert DOCS.read_text(encoding="utf-8") == config_page()


def test_every_key_is_in_the_reference_once_with_meaning_and_default() -> None:
    text = config_page()
    for name, field in CommonConfig.model_fields.items():
        assert field.description, name
        if name not in ("model", "multiagent", "transport"):
            assert text.count(f"| `{name}` |") == 1, name
    assert "| `model.use_lstm` | `false` | true or false | L |" in text
    assert "| `transport.heartbeat_timeout_s` | `10.0` | a number; s | B |" in text


def test_the_text_form_shows_an_algorithms_own_keys_and_headings_once() -> None:
    text = render_keys(OtherConfig)
    assert "OTHER\n  epochs: 3\n      Epochs over one batch. (a whole number; epochs)\n" in text
    headings = [line for line in text.splitlines() if line.isupper() and not line.startswith(" ")]
    assert len(headings) == len(set(headings))
