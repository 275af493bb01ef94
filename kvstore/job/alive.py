"""Connections on which nothing may be sent for long: a firewall or a NAT between the hosts forgets them."""
import socket

ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 60}
"""After so many seconds without data the kernel asks the other end, and then again."""


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel send something on a silent connection; it is TCP's."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in ALIVE.items():
        if hasattr(socket, name):  # Linux's
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
