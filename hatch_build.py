"""The parts of the metadata that depend on where the sources are kept: URLs, and the links of the
README.

The address is that of the clone's remote ``origin``, or what a source distribution was given. Where
there is none, there are no URLs, and links stay as they are.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["AddressHook", "address_of", "with_absolute_links"]

_RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
_PICTURE = re.compile(r'(<img [^>]*src=")(?![a-z]+:)([^"]+)"')


class AddressHook(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill them in."""
        root = Path(self.root)
        text, address = (root / "README.md").read_text(encoding="utf-8"), _address(root)
        metadata["urls"] = {}
        if address:
            text = with_absolute_links(text, address)
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/tree/HEAD/docs",
                "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{address}/issues",
                "Security": f"{address}/security/advisories/new",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def address_of(remote: str) -> str:
    """Return the web address of a remote such as ``git@host:owner/name.git``, without credentials;
    "" for none.
    """
    ssh = re.fullmatch(r"(?:ssh://)?[\w.-]+@([\w.-]+)[:/](.+)", remote)
    host, path = (ssh[1], ssh[2]) if ssh else (urlsplit(remote).hostname, urlsplit(remote).path)
    if not host or not (ssh or remote.startswith(("https://", "http://"))):
        return ""
    return f"https://{host}/{path.strip('/').removesuffix('.git')}"


def with_absolute_links(text: str, address: str) -> str:
    """Return Markdown whose relative links lead into a repository; pictures to their files."""
    text = _PICTURE.sub(rf'\g<1>{address}/raw/HEAD/\g<2>"', text)
    return _RELATIVE.sub(
        lambda found: (
            f"{found[1]}[{found[2]}]({address}/{'raw' if found[1] else 'blob'}/HEAD/{found[3]})"
        ),
        text,
    )


def _address(root: Path) -> str:
    information = root / "PKG-INFO"  # of a source distribution
    if information.is_file():
        found = re.search(
            r"^Project-URL: Repository, (\S+)$",
            information.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        return found[1] if found else ""
    command = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    try:
        return address_of(
            subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        )
    except OSError:  # there is no git
        return ""
