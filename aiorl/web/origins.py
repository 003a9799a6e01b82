"""Origins of web pages that may use a server, and the headers by which browsers let them (CORS,
https://fetch.spec.whatwg.org/#http-cors-protocol).

An origin is the beginning of a page's address, such as ``https://game.example`` or
``http://localhost:8080``. A browser sends it with each request of a page to another server. Before
requests that a plain form could not send, it asks the server for permission (preflight).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from aiorl.errors import ConfigError, SecurityError
from aiorl.web.app import Headers

ANY = "*"
"""Stands for all origins, whose pages have to send the token."""
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?/?", re.ASCII)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def read_origins(texts: Iterable[str], *, key: str) -> tuple[str, ...]:
    """Return origins in the form in which browsers send them.

    Args:
        texts: origins as users write them, or `ANY`.
        key: name of the setting, for the error.

    Raises:
        ConfigError: one is no origin.
    """
    origins = []
    for text in texts:
        match = _ORIGIN.fullmatch(text.lower())
        if text == ANY:
            origins.append(ANY)
        elif match is not None and match[1] != "file":
            scheme, host, port = match.groups(default="")
            origins.append(f"{scheme}://{host}{'' if port == _DEFAULT_PORTS.get(scheme) else port}")
        else:
            raise ConfigError(
                f"{key} must be the origin of web pages, such as https://game.example or"
                f" http://localhost:8080, not {text!r:.200}.",
                key=key,
                value=text,
                hint=(
                    "It has a scheme and a host, and no path. Pages that are opened as files have"
                    " no origin: python -m http.server serves those of a folder."
                ),
            )
    return tuple(origins)


def check_token_for_any(origins: Iterable[str], *, has_token: bool) -> None:
    """Refuse to let the pages of all origins in where they don't need a token.

    Args:
        origins: as `read_origins` returns them.
        has_token: True if the server has a token.

    Raises:
        SecurityError: pages of any origin may use it, and it has no token.
    """
    if ANY in origins and not has_token:
        raise SecurityError(
            "--allow-origin '*' without a token would let every page in that someone on this"
            " machine opens.",
            key="allow_origin",
            value=ANY,
            hint="Add --token-file FILE, or name the origins.",
        )


def readable_by(origin: str) -> Headers:
    """Return the headers by which pages of an origin can read an answer."""
    return (
        # answers are never stored, so no one has to hear that they vary with the origin
        (b"access-control-allow-origin", origin.encode()),
        (b"access-control-expose-headers", b"inference-header-content-length, retry-after"),
    )
