from __future__ import annotations

import ipaddress
import socket

import pytest
from gymnasium import spaces
from plain_policies import VECTOR, PlainPolicy

from aiorl.compat import launching
from aiorl.compat.launching import LauncherSpec, find_free_port, join_data_parallel, node_ip


class Joining(PlainPolicy):
    def join_data_parallel(self, *arguments):
        self.notes.append(arguments)


def policy(kind=PlainPolicy):
    return kind(VECTOR, spaces.Discrete(2), {})


def test_a_free_port_can_be_bound():
    """R57."""
    port = find_free_port()
    with socket.socket() as listener:
        listener.bind(("", port))


def test_the_address_is_one_of_this_host():
    """R57: something can be bound to it."""
    address = node_ip()
    assert not ipaddress.ip_address(address).is_unspecified
    with socket.socket() as listener:
        listener.bind((address, 0))


def test_without_routes_the_address_is_loopback(monkeypatch):
    """R57."""
    monkeypatch.setattr(launching, "_ELSEWHERE", ("255.255.255.255", 9))
    assert node_ip() == "127.0.0.1", "a broadcast address needs a permission that the probe has not"


def test_policies_that_can_join_do_so_and_learn_how_many_they_are():
    """R54."""
    policies = {"a": policy(Joining), "b": policy(Joining)}
    join_data_parallel(policies, "tcp://host:1", 1, 4, "ring")
    for one in policies.values():
        assert one.notes == [("tcp://host:1", 1, 4, "ring")]
        assert one.distributed_world_size == 4


def test_one_that_cannot_is_refused_before_any_joins():
    """R54."""
    policies = {"a": policy(Joining), "b": policy()}
    with pytest.raises(ValueError, match="'b' is a PlainPolicy, which cannot learn data-parallel"):
        join_data_parallel(policies, "tcp://host:1", 0, 4, "ring")
    assert policies["a"].notes == []


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_beyond_the_size_are_refused(rank):
    """R54."""
    with pytest.raises(ValueError, match="world_rank"):
        join_data_parallel({}, "tcp://host:1", rank, 4, "ring")


@pytest.mark.parametrize("limits", [{"num_cpus": -1}, {"memory": -5}, {"resources": {"tpu": 1}}])
def test_limits_that_cannot_be_had_are_refused(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        LauncherSpec(object, **limits)


def test_a_launcher_is_told_limits_and_nothing_else():
    assert LauncherSpec(object) == LauncherSpec(object, None, None, None, None, {})
