"""Bytes of TCP per second: run on two hosts, ``goodput.py SECONDS`` and ``goodput.py SECONDS ADDRESS PORT``.

The first prints its port, and in the end each prints the bytes per second that it has received. Both send all the
while, each on a connection of its own, as ps-lite does. On its own feet, so that it starts fast: only the standard
library, not even this package.
"""
import contextlib
import socket
import statistics
import sys
import threading
import time
from typing import Tuple

WARM_UP_S = 0.3
SLICES = 5
"""How many slices the median is of. Behind a lost packet TCP holds back up to a port's buffer, half a megabyte, then
hands all of it over at once; on a slow link a mean with one end in between is 8 % too high or too low."""
CHUNK = 1 << 18


def meet(address: Tuple[str, ...]) -> Tuple[socket.socket, socket.socket]:
    """The connection to receive from and the one to send on."""
    if address:
        place = (address[0], int(address[1]))
        return socket.create_connection(place, timeout=10), socket.create_connection(place, timeout=10)
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(30)
        print(listener.getsockname()[1], flush=True)
        sending = listener.accept()[0]
        return listener.accept()[0], sending


def send(connection: socket.socket) -> None:
    """Send as much as goes through, until the other end has closed the connection."""
    chunk = bytes(CHUNK)
    with contextlib.suppress(OSError), connection:
        while True:
            connection.sendall(chunk)


def received(connection: socket.socket, seconds: float) -> float:
    """Bytes per second, once the connection has found its speed."""
    buffer = memoryview(bytearray(CHUNK))

    def take(seconds: float) -> float:
        start, count = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            got = connection.recv_into(buffer)
            if not got:
                raise ConnectionError("the other host has ended")
            count += got
        return count / (time.monotonic() - start)

    take(WARM_UP_S)
    return statistics.median([take(seconds / SLICES) for _ in range(SLICES)])


def main(seconds: float, *address: str) -> None:
    receiving, sending = meet(address)
    for connection in (receiving, sending):
        connection.settimeout(30)
    sender = threading.Thread(target=send, args=(sending,), daemon=True)
    sender.start()
    with receiving:
        print(f"{received(receiving, seconds):.0f}", flush=True)
    sender.join()


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
