"""Addresses of the form tcp://HOST:PORT, and which of them a learner may open without keys."""

from __future__ import annotations

import ipaddress

from aiorl.errors import ConfigError, SecurityError

MAX_PORT = 65_534
"""A learner uses the next port as well, for what it sends to all."""


def split_address(address: str, *, key: str = "address") -> tuple[str, int]:
    """Return host and port of "tcp://HOST:PORT".

    Args:
        address: what a user wrote. HOST is a name, an IPv4 address, an IPv6 address in brackets, or *.
        key: name of the setting it came from, for the error.

    Returns: the host without brackets, and the port, at most MAX_PORT.

    Raises:
        ConfigError: it has another form (also a ValueError).
    """
    rest = address.removeprefix("tcp://")
    host, _, port = rest.rpartition(":")
    if rest == address or not _is_port(port):
        raise _malformed(address, key, f"PORT goes up to {MAX_PORT}, since the next one is used as well.")
    if host[:1] == "[" and host[-1:] == "]":
        host = host[1:-1]
        if not _is_ipv6(host):
            raise _malformed(address, key, "Brackets are for IPv6 addresses, as in tcp://[::1]:5557.")
    elif _is_ipv6(host):
        raise _malformed(address, key, "Put an IPv6 address in brackets: tcp://[::1]:5557.")
    elif not host or not set(host).isdisjoint("[]:/;@?# \t\r\n"):
        raise _malformed(address, key)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a socket bound to `host`.

    Addresses that are not canonical (127.000.0.1, 127.1) don't count: programs differ in how they read them.
    """
    if host.lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def is_open_bind(address: str, *, has_keys: bool, insecure: bool) -> bool:
    """Return whether anyone on the network could speak to a learner that binds `address`; the user must have said so.

    Args:
        address: where the learner listens.
        has_keys: connections are authenticated.
        insecure: the user has said that everyone may connect.

    Raises:
        SecurityError: anyone could, and the user has not said so.
        ConfigError: the address is malformed.
    """
    host, _ = split_address(address, key="bind")
    if has_keys or is_loopback(host):
        return False
    if not insecure:
        raise SecurityError(
            f"bind {address} can be reached from other hosts, so it needs keys.",
            key="bind",
            value=address,
            hint="Make them with `python -m aiorl.keys DIR` and give --keys DIR, or say --insecure if you trust all "
            "who can reach that address.",
        )
    return True


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= MAX_PORT


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _malformed(address: str, key: str, hint: str = "") -> ConfigError:
    return ConfigError(
        f"{key} must look like tcp://HOST:PORT, such as tcp://127.0.0.1:5557, not {address!r:.200}.",
        key=key,
        value=address,
        hint=hint,
    )
