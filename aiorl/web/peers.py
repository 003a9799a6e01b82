"""Users of connections on this machine: whose process is at the other end of a TCP connection over
loopback.

The kernel knows who made a socket. So a port of this user can be closed to other users without a
token.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil

Address = tuple[str, int]

OVERFLOW_FILE = Path("/proc/sys/kernel/overflowuid")
"""File of the kernel with the number that stands for all other users."""
MAP_FILE = Path("/proc/self/uid_map")
"""File of the kernel that says which users this process's namespace knows."""
_MAP_OF_ALL = ["0", "0", "4294967295"]
"""Map of a namespace of users that knows all of them, such as the first one."""
# of <linux/sock_diag.h>, <linux/inet_diag.h> and <linux/netlink.h>
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH")
_INTERFACE_AND_COOKIE = struct.Struct("=III")
_ANSWER = struct.Struct("=BBBB48sIIIII")
_CONNECTED = (1, 4, 5, 8)
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2 and CLOSE_WAIT of <linux/tcp_states.h>."""
_ANY = 0xFFFFFFFF


def is_own_connection(client: Address, server: Address) -> bool:
    """Return whether a process of this user holds the other end of a connection over loopback.

    Args:
        client: host and port of the other end.
        server: host and port of the end of this process.

    Returns:
        False also if that can't be found out, as without free descriptors.
    """
    if os.geteuid() == uid_of_strangers():
        return False
    if sys.platform == "linux":
        # some sandboxes have no netlink
        with contextlib.suppress(OSError, ValueError, struct.error):
            if kernel_reports_users():
                return uid_of(client, server) == os.geteuid()
    with contextlib.suppress(OSError, psutil.Error):
        return _has_own_process(client, server)
    return False


@lru_cache(maxsize=1)
def kernel_reports_users() -> bool:
    """Return whether the kernel reports who made a socket, by a connection of this process.

    A kernel without the module for that gives the same answer as for a connection that doesn't
    exist.

    Raises:
        OSError: it can't be asked now.
        struct.error: its answer is none.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = listener.getsockname()
        with socket.create_connection(server, timeout=1.0) as client:
            return uid_of(client.getsockname(), server) == os.geteuid()


@lru_cache(maxsize=1)
def uid_of_strangers() -> int:
    """Return the number that stands for all users whom a namespace of users doesn't know, -1 if it
    knows all.
    """
    with contextlib.suppress(OSError, ValueError):
        if MAP_FILE.exists() and MAP_FILE.read_text().split() != _MAP_OF_ALL:
            return int(OVERFLOW_FILE.read_text())
    return -1


def uid_of(client: Address, server: Address) -> int:
    """Return the user who made the socket at the other end, -1 if that is closed.

    Raises:
        OSError: the kernel can't be asked.
        struct.error: its answer is none.
    """
    client_host = _plain(client[0])
    server_host = _plain(server[0])
    family = socket.AF_INET6 if client_host.version == 6 else socket.AF_INET
    ends = _PORTS.pack(client[1], server[1])
    ends += client_host.packed.ljust(16, b"\0") + server_host.packed.ljust(16, b"\0")
    question = (
        _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY)
        + ends
        + _INTERFACE_AND_COOKIE.pack(0, _ANY, _ANY)
    )
    header = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + question)
        answer = kernel.recv(4096)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY:
        return -1
    _, state, _, _, answer_ends, _, _, _, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # without the connection, the kernel reports a socket that listens there; and one that its
    # process has closed has no inode, and 0 as its user
    if answer_ends.startswith(ends) and state in _CONNECTED and inode != 0:
        return int(uid)
    return -1


def _plain(host: str) -> IPv4Address | IPv6Address:
    """Return an address, that of IPv4 for one that IPv6 maps."""
    address = ip_address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _has_own_process(client: Address, server: Address) -> bool:
    """Look for the other end among the connections of this user's processes, where the kernel can't
    be asked.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().effective != os.geteuid():
                continue
            # the name of psutil 5
            connections = getattr(process, "net_connections", None) or process.connections
            for connection in connections("tcp"):
                if (connection.laddr, connection.raddr) == (client, server):
                    return True
    return False
