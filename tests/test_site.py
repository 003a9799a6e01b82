"""The site of `make docs`: that it is built without a warning, and that its links have targets."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


class _Page(HTMLParser):
    """A page: its anchors, its links, and the text outside of code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.texts: list[str] = []
        self._code_depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        self.links += [values[name] for name in ("href", "src") if name in values]
        self._code_depth += tag in {"code", "script"}

    def handle_endtag(self, tag: str) -> None:
        self._code_depth -= tag in {"code", "script"}

    def handle_data(self, data: str) -> None:
        if not self._code_depth:
            self.texts.append(data)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, _Page]:
    """Return the pages of a new site by path."""
    pytest.importorskip("mkdocs", reason="make setup-docs installs it")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    # the page of an index.html among the examples is a directory of that name
    files = [path for path in site.rglob("*.html") if path.is_file()]
    return {path: _Page(path.read_text("utf-8")) for path in files}


def test_every_link_and_anchor_of_the_site_has_a_target(pages: dict[Path, _Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":  # that one has full paths
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            has_anchor = not anchor or target not in pages or anchor in pages[target].anchors
            if not target.exists() or not has_anchor:
                broken.append((str(path), link))

    assert not broken


def test_no_block_of_code_is_shown_as_text(pages: dict[Path, _Page]) -> None:
    fenced = [str(path) for path, page in pages.items() if any("```" in t for t in page.texts)]

    assert not fenced
