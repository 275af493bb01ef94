"""Bytes of TCP per second: run on two hosts, ``goodput.py SECONDS`` and ``goodput.py SECONDS ADDRESS PORT``.

The first prints its port, and in the end each prints the bytes per second that it has received. Both send all the
while, each on a connection of its own, as ps-lite does. It imports only the standard library, not even this package,
so that it starts fast.
"""
import contextlib
import socket
import statistics
import sys
import threading
import time
from typing import Optional, Tuple

WARM_UP_S = 0.3
SLICES = 5
"""How many slices the median is of. Behind a lost packet TCP holds back up to a port's buffer, half a megabyte, then
hands all of it over at once; on a slow link a mean with one end in between is 8 % too high or too low."""
CHUNK = 1 << 18


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


def both_ways(listener: Optional[socket.socket], address: Tuple[str, int], seconds: float) -> float:
    """Bytes per second received while sending, with whoever calls the `listener`, or without one with `address`."""
    if listener:
        listener.settimeout(30)
        sending = listener.accept()[0]
        receiving = listener.accept()[0]
    else:
        receiving, sending = (socket.create_connection(address, timeout=30) for _ in range(2))
    for connection in (receiving, sending):
        connection.settimeout(30)
    sender = threading.Thread(target=send, args=(sending,), daemon=True)
    sender.start()
    with receiving:
        rate = received(receiving, seconds)
    sender.join()
    return rate


def main(seconds: float, host: str = "", port: str = "0") -> None:
    with contextlib.nullcontext() if host else socket.create_server(("", 0)) as listener:
        if listener:
            print(listener.getsockname()[1], flush=True)
        print(f"{both_ways(listener, (host, int(port)), seconds):.0f}", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
