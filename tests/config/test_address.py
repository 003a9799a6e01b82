from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorl.config.address import MAX_PORT, is_loopback, is_open_bind, split_address
from aiorl.errors import ConfigError, SecurityError


@pytest.mark.parametrize(
    ("address", "host", "port", "loopback"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1", 0, True),
        ("tcp://127.9.9.9:1", "127.9.9.9", 1, True),
        ("tcp://localhost:5557", "localhost", 5557, True),
        ("tcp://[::1]:5557", "::1", 5557, True),
        ("tcp://[::ffff:127.0.0.1]:5557", "::ffff:127.0.0.1", 5557, True),
        ("tcp://[::ffff:10.0.0.1]:5557", "::ffff:10.0.0.1", 5557, False),
        ("tcp://[fe80::1%eth0]:5557", "fe80::1%eth0", 5557, False),
        ("tcp://0.0.0.0:5557", "0.0.0.0", 5557, False),
        ("tcp://*:5557", "*", 5557, False),
        ("tcp://[::]:5557", "::", 5557, False),
        ("tcp://learner-host:65534", "learner-host", 65534, False),
        ("tcp://128.0.0.1:1", "128.0.0.1", 1, False),
        # look like loopback, but are names, or read in other ways by other programs
        ("tcp://127.0.0.1.example.org:1", "127.0.0.1.example.org", 1, False),
        ("tcp://127.000.0.1:1", "127.000.0.1", 1, False),
        ("tcp://127.1:1", "127.1", 1, False),
        ("tcp://0177.0.0.1:1", "0177.0.0.1", 1, False),
        ("tcp://2130706433:1", "2130706433", 1, False),
    ],
)
def test_host_port_and_reach_of_an_address(address: str, host: str, port: int, loopback: bool) -> None:
    assert split_address(address) == (host, port)
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("", "65534"),
        ("host:5557", "65534"),
        ("tcp://host", "65534"),
        ("tcp://host:", "65534"),
        ("tcp://host:65535", "65534"),
        ("tcp://host:" + "9" * 5000, "65534"),
        ("tcp://h:1x", "65534"),
        ("tcp://h:\N{ARABIC-INDIC DIGIT FIVE}", "65534"),
        ("udp://h:1", "65534"),
        ("tcp://::1:5557", "brackets"),
        ("tcp://[learner]:5557", "Brackets are for IPv6"),
        ("tcp://[127.0.0.1]:5557", "Brackets are for IPv6"),
        ("tcp://:1", ""),
        ("tcp://a:b:1", ""),
        ("tcp://[::1:1", ""),
        ("tcp://a/b:1", ""),
        ("tcp://a b:1", ""),
        ("tcp://host\n:1", ""),
    ],
)
def test_any_other_form_is_refused_with_an_example(address: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=r"connect must look like .*tcp://127\.0\.0\.1:5557") as caught:
        split_address(address, key="connect")
    assert (caught.value.key, caught.value.value) == ("connect", address)
    assert hint in caught.value.hint
    assert len(str(caught.value)) < 500


@given(host=st.ip_addresses(), port=st.integers(0, MAX_PORT))
def test_every_ip_address_comes_back(host: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> None:
    written = f"[{host}]" if host.version == 6 else str(host)
    assert split_address(f"tcp://{written}:{port}") == (str(host), port)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.1.2.3:1", "tcp://[::]:1"])
def test_a_bind_open_to_the_network_needs_keys_or_that_it_is_said_aloud(address: str) -> None:
    with pytest.raises(SecurityError, match=r"needs keys.*python -m aiorl\.keys DIR.*--insecure") as caught:
        is_open_bind(address, has_keys=False, insecure=False)
    assert caught.value.key == "bind"
    assert is_open_bind(address, has_keys=False, insecure=True)
    assert not is_open_bind(address, has_keys=True, insecure=False)
    assert not is_open_bind("tcp://127.0.0.1:5557", has_keys=False, insecure=False)
    with pytest.raises(ConfigError, match="bind must look like"):
        is_open_bind("127.0.0.1", has_keys=True, insecure=True)
