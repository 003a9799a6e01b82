from __future__ import annotations

import pytest

from aiorl.config.address import host_and_port, is_loopback


@pytest.mark.parametrize(
    ("address", "host", "port", "loopback"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1", 0, True),
        ("tcp://127.9.9.9:1", "127.9.9.9", 1, True),
        ("tcp://localhost:5557", "localhost", 5557, True),
        ("tcp://[::1]:5557", "::1", 5557, True),
        ("tcp://0.0.0.0:5557", "0.0.0.0", 5557, False),
        ("tcp://*:5557", "*", 5557, False),
        ("tcp://[::]:5557", "::", 5557, False),
        ("tcp://learner-host:65535", "learner-host", 65535, False),
        ("tcp://192.168.0.1:1", "192.168.0.1", 1, False),
    ],
)
def test_host_port_and_reach_of_an_address(address: str, host: str, port: int, loopback: bool) -> None:
    assert host_and_port(address) == (host, port)
    assert is_loopback(address) is loopback


@pytest.mark.parametrize("address", ["", "5557", "tcp://", "tcp://host", "tcp://host:", "tcp://:1", "tcp://h:65536",
                                     "udp://h:1", "tcp://h:-1", "tcp://h:1x"])  # fmt: skip
def test_any_other_form_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://127\.0\.0\.1:5557"):
        host_and_port(address)
