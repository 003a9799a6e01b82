"""Addresses of the form tcp://HOST:PORT."""

from __future__ import annotations

import ipaddress

__all__ = ["host_and_port", "is_loopback"]


def host_and_port(address: str) -> tuple[str, int]:
    """Host (a name, an IPv4 or IPv6 address, or *) and port of `address`.

    Raises: ValueError when `address` has another form.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must look like tcp://HOST:PORT, such as tcp://127.0.0.1:5557")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether only processes of this host can reach `address` (tcp://HOST:PORT).

    Raises: ValueError when `address` has another form.
    """
    host, _ = host_and_port(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
