"""`python tests/support/pictures.py RUN`: write docs/watch.png and docs/browser.png again.

They show the page of a run of CartPole, and the page of the example, which its policy plays.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from browser import Page, browsing, serving_files
from policy_server import serving
from processes import Started

ROOT = Path(__file__).parents[2]


def main(run_dir: Path) -> None:
    """Photograph both pages for a run of CartPole."""
    with tempfile.TemporaryDirectory() as folder:
        picture_watch(run_dir, Path(folder) / "home of watch")
        picture_example(run_dir, Path(folder) / "home of example")


def picture_watch(run_dir: Path, profile: Path) -> None:
    """Write docs/watch.png."""
    server = Started([sys.executable, "-m", "aiorl.watch", str(run_dir), "--port=0"])
    try:
        number = server.wait_for(r"http:\S+")
        url = next(word for word in server.lines[number - 1].split() if word.startswith("http"))
        with browsing(profile, "") as page:
            page.resize(1280, height=820)
            page.do("Page.navigate", url=url)
            page.wait("document.querySelectorAll('canvas').length > 1")
            # without the temporary directory
            page.get("document.getElementById('where').textContent = 'runs/cartpole'")
            save(page, "watch")
    finally:
        server.end()


def picture_example(run_dir: Path, profile: Path) -> None:
    """Write docs/browser.png, of a game by `aiorl serve`."""
    folder = profile.with_name("page")
    shutil.copytree(ROOT / "examples/browser", folder)
    with serving_files(folder) as files:
        home = f"http://127.0.0.1:{files}"
        with serving(run_dir, allow_origins=(home,)) as port, browsing(profile, "") as page:
            page.resize(1000, height=640)
            page.do("Page.navigate", url=home)
            page.wait("document.readyState === 'complete' && document.querySelector('form')")
            page.get("document.querySelector('form').elements.kind.value = 'socket'")
            server = f"http://127.0.0.1:{port}"
            page.get(f"document.querySelector('form').elements.server.value = '{server}'")
            page.get("document.querySelector('form').elements.fast.checked = true")
            page.get("document.querySelector('button').click()")
            page.wait("document.getElementById('returns').textContent.split(',').length > 2")
            page.get("document.querySelector('form').elements.fast.checked = false")
            page.wait(
                "[100, 200].includes(50 * Math.floor(document.querySelector('#steps').textContent / 50))"
            )
            save(page, "browser")


def save(page: Page, name: str) -> None:
    """Write a picture of a page to docs/, with few colours, which takes a third of the bytes."""
    from PIL import Image

    page.do("Emulation.setScrollbarsHidden", hidden=True)
    file = ROOT / f"docs/{name}.png"
    page.picture(file)
    Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
