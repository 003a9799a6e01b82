"""Addresses of a learner: ``tcp://HOST:PORT``, where workers look them up, and those that other
hosts can dial.

The module imports almost nothing, because workers are started often.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiorl.errors import ConfigError, SecurityError

RUN_FILE = "run.json"
"""File of a run directory that holds the addresses of its learner."""
MAX_PORT = 65_534
"""Largest port of a learner, which also uses the next one for broadcasts."""
_ADDRESS = re.compile(r"tcp://(?:\[([^\]]+)\]|([^\[\]:/;@?#\s]+)):(\d{1,5})", re.ASCII)
_WILDCARDS = ("*", "0.0.0.0", "::")
_MAX_BYTES = 1 << 16
_MAX_ADDRESSES = 32
_OF_CONTAINERS = (
    "docker",
    "br-",
    "virbr",
    "veth",
    "cni",
    "flannel",
    "cali",
    "podman",
    "lxc",
    "lxd",
)
"""Beginnings of the names of interfaces that only this host's containers can reach."""


def split_address(address: str, *, key: str = "address") -> tuple[str, int]:
    """Return host and port of "tcp://HOST:PORT".

    Args:
        address: text of the user. HOST is a name, an IPv4 address, an IPv6 address in brackets, or
            *.
        key: name of the setting, for the error.

    Returns:
        The host without brackets, and the port, at most MAX_PORT.

    Raises:
        ConfigError: the address has another form (also a ValueError).
    """
    match = _ADDRESS.fullmatch(address)
    if match is not None:
        in_brackets, name, port = match.groups()
        is_host = in_brackets is None or _is_ipv6(in_brackets)
        if is_host and int(port) <= MAX_PORT:
            return in_brackets or name, int(port)
    raise ConfigError(
        f"{key} must look like tcp://HOST:PORT, such as tcp://127.0.0.1:5557, not {address!r:.200}.",
        key=key,
        value=address,
        hint=(
            f"PORT goes up to {MAX_PORT}, because the next one is used as well. An IPv6 address"
            " needs brackets: tcp://[::1]:5557."
        ),
    )


def host_and_port(value: int | str, *, key: str) -> tuple[str, int]:
    """Return host and port of PORT or HOST:PORT; an IPv6 address has brackets, and no host is
    127.0.0.1.

    Raises:
        ConfigError: the value has another form; the error names the key.
    """
    host, _, port = str(value).rpartition(":")
    if not port.isdecimal() or int(port) > MAX_PORT + 1:
        raise ConfigError(
            f"{key} must be PORT or HOST:PORT, such as 8265 or 0.0.0.0:8265, not {value!r:.200}.",
            key=key,
            value=value,
        )
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def url(host: str, port: int) -> str:
    """Return "tcp://HOST:PORT", with an IPv6 address in brackets."""
    if ":" in host:
        return f"tcp://[{host}]:{port}"
    return f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a socket bound to `host`.

    Addresses that are not canonical (127.000.0.1, 127.1) don't count, because programs read them
    differently.
    """
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def is_open_bind(address: str, *, has_keys: bool, insecure: bool) -> bool:
    """Return whether anyone on the network can reach a learner that binds `address`, which the user
    must have allowed.

    Args:
        address: address that the learner listens on.
        has_keys: True if connections are authenticated.
        insecure: True if the user allows everyone to connect.

    Raises:
        SecurityError: anyone can, and the user has not allowed it.
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
            hint=(
                "Make them with `aiorl keys DIR` and give --keys DIR, or give --insecure if you"
                " trust everyone who can reach that address."
            ),
        )
    return True


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


# Of a learner
# --------------------------------------------------------------------------------------------------


def reachable_from_here(address: str) -> str:
    """Return the address at which processes of this host reach a bound address: loopback if bound
    to all interfaces.
    """
    host, port = split_address(address)
    if host not in _WILDCARDS:
        return address
    return url("::1" if host == "::" else "127.0.0.1", port)


def dialable(address: str, advertise: str | None = None) -> list[str]:
    """Return the addresses at which other hosts reach a learner, best first.

    Args:
        address: address that it is bound to.
        advertise: addresses that the user gives instead, each HOST or tcp://HOST:PORT, separated by
            commas.

    Raises:
        ConfigError: an address of the user's is malformed, or stands for all interfaces.
    """
    host, port = split_address(address)
    if advertise is None and host not in _WILDCARDS:
        return [address]
    if advertise is None:
        return [url(local_host, port) for local_host in _hosts_here(host)]
    addresses = []
    for text in filter(None, map(str.strip, advertise.split(","))):
        has_port = "://" in text
        host, advertised_port = split_address(
            text if has_port else f"tcp://{text}:{port}", key="advertise"
        )
        if host in _WILDCARDS or (has_port and advertised_port == 0):
            raise ConfigError(
                f"advertise {text!r:.200} can't be dialled: give a host that others can reach, and"
                " its port.",
                key="advertise",
                value=advertise,
            )
        addresses.append(url(host, advertised_port))
    if not addresses:
        raise ConfigError(
            "advertise names no address: leave it out, or give HOST.",
            key="advertise",
            value=advertise,
        )
    return addresses


def join_command(addresses: Sequence[str], keys: str | Path | None, *, are_advertised: bool) -> str:
    """Return the command with which processes of another host join.

    Args:
        addresses: result of `dialable`.
        keys: directory of CURVE keys, or None.
        are_advertised: True if the user has given the addresses, which are then all tried;
            otherwise the best one is enough.
    """
    connect = ",".join(addresses) if are_advertised else addresses[0]
    command = f"aiorl worker --connect {connect}"
    if keys is not None:
        command += f" --keys {shlex.quote(os.path.abspath(keys))}"
    return command


def _hosts_here(wildcard: str) -> list[str]:
    """Return this host's addresses, that of the default route first, then its name."""
    import socket

    import psutil

    # addresses that documentation uses: nothing is sent to them, but the kernel chooses a route
    far_hosts = {socket.AF_INET: "192.0.2.1"}
    if wildcard == "::":
        far_hosts[socket.AF_INET6] = "2001:db8::1"
    hosts = []
    for family, far_host in far_hosts.items():
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            if probe.connect_ex((far_host, 9)) == 0:
                hosts.append(probe.getsockname()[0])
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in stats and stats[name].isup and not name.startswith(_OF_CONTAINERS):
            hosts += [address.address for address in addresses if address.family in far_hosts]
    reachable = [host for host in dict.fromkeys(hosts) if "%" not in host and not _is_of_link(host)]
    return [*reachable, socket.gethostname()]


def _is_of_link(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return address.is_loopback or address.is_link_local


# Where workers look
# --------------------------------------------------------------------------------------------------


def places_of(text: str) -> list[str]:
    """Return the places in a comma list, each tcp://HOST:PORT, run:DIR, @FILE or ipc://PATH, with
    absolute paths.

    Raises:
        ConfigError: a place has another form.
    """
    return [_place(place) for place in re.split(r",\s*(?=tcp:|run:|@|ipc:)", text.strip(", "))]


def _place(text: str) -> str:
    for kind in ("run:", "@"):
        if text.startswith(kind) and text != kind:
            return f"{kind}{Path(text.removeprefix(kind)).expanduser().absolute()}"
    if text.startswith("ipc://"):
        return text
    _, port = split_address(text, key="--connect")
    if port == 0:
        raise ConfigError(
            f"--connect needs the learner's port, not 0, in {text!r:.200}.", key="--connect"
        )
    return text


def run_facts(directory: Path) -> dict[str, Any]:
    """Return the content of ``run.json``: ``run_id``, ``addresses`` for workers, the bound ``port``
    and ``seed``.

    Raises:
        OSError: the file is missing or can't be read.
        ValueError: it holds something else.
    """
    facts, _ = run_facts_and_owners(directory)
    return facts


def run_facts_and_owners(directory: Path) -> tuple[dict[str, Any], dict[int, Path]]:
    """Return the content of ``run.json``, and to whom it and the directory belong, as id -> path.

    Raises:
        OSError: see `run_facts`.
        ValueError: see `run_facts`.
    """
    from aiorl.config.files import parse_json, read_with_owners

    content, owners = read_with_owners(directory / RUN_FILE, max_bytes=_MAX_BYTES)
    facts = parse_json(content)
    if not isinstance(facts, dict):
        raise ValueError("it contains no run id and address")
    run_id = facts.get("run_id")
    first = facts.get("address")
    if not isinstance(run_id, str) or not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", run_id):
        raise ValueError(f"{run_id!r:.100} is not a run id")
    addresses = facts.get("addresses", [first])
    if not isinstance(addresses, list):
        addresses = [addresses]
    for address in [first, *addresses]:
        if not isinstance(address, str) or not address.isprintable():
            raise ValueError(f"{address!r:.100} is not an address")
        split_address(address)
    port = facts.get("port", split_address(str(first))[1])
    if type(port) is not int or not 0 <= port <= MAX_PORT:
        raise ValueError(f"{port!r:.100} is not a port")
    return {**facts, "addresses": addresses[:_MAX_ADDRESSES], "port": port}, owners


def _addresses_in(place: str) -> list[str]:
    """Return the addresses at a place now.

    Raises:
        OSError: its file is missing or can't be read.
        ValueError: it holds something else.
    """
    from aiorl.config.files import read_regular

    if place.startswith("run:"):
        addresses = run_facts(Path(place.removeprefix("run:")))["addresses"]
    elif place.startswith("@"):
        file = Path(place.removeprefix("@"))
        text = read_regular(file, max_bytes=_MAX_BYTES, follow=True).decode()
        addresses = text.replace(",", " ").split()[:_MAX_ADDRESSES]
    else:
        return [place]
    parts = {address: split_address(address) for address in addresses}
    return [address for address, (host, port) in parts.items() if port and host not in _WILDCARDS]


class Addresses:
    """Addresses of one learner in turn, looked up again at each try.

    Args:
        places: as `places_of` returns them.

    Attributes:
        current: the address tried last; the first place before that.
        problem: why a place gives no address, "" if each does.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self.current = places[0]
        self.problem = ""
        self._places = places
        self._tried = ""
        self._is_good = False

    def next(self) -> str:
        """Return the address to try: the one that worked last if it is still valid, else the next;
        "" for none yet.
        """
        addresses = self._look() or [self._tried]
        if self._tried not in addresses:
            self._tried = addresses[0]
        elif not self._is_good:
            next_index = addresses.index(self._tried) + 1
            self._tried = addresses[next_index % len(addresses)]
        self._is_good = False
        self.current = self._tried or self.current
        return self._tried

    def confirm(self) -> None:
        """Note that the address tried last works."""
        self._is_good = True

    def has_others(self) -> bool:
        """Return whether there is another address to try than the one tried last."""
        return any(address != self._tried for address in self._look())

    def _look(self) -> list[str]:
        addresses = []
        problems = []
        for place in self._places:
            try:
                addresses += _addresses_in(place)
            except (FileNotFoundError, NotADirectoryError):
                problems.append(f"{place} does not exist yet")
            except (OSError, ValueError) as error:
                reason = str(getattr(error, "strerror", None) or error)
                problems.append(f"{place} can't be used: {reason.removesuffix('.')}")
        self.problem = "; ".join(problems)
        return list(dict.fromkeys(addresses))
