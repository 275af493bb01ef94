"""A stranger at the ports of a job: programs that connect without knowing its secret, in ZeroMQ's and ps-lite's words.

``python -m tests.stranger ADDRESS PORT DEED`` does one of `DEEDS`. docs/results/reliability.md says what comes of each.
"""
import socket
import struct
import sys
import time
from typing import Callable, Dict, List, Tuple, Union

TERMINATE, PROFILER, SERVERS = 1, 5, 0
"""ps-lite's control command, and MXNet's command to a server, as numbers; and the application that servers are."""
SET_CONFIG, STATE, DUMP = "0", "1", "3"  # commands to the profiler: the last letter of the text

Field = Tuple[int, Union[int, bytes]]


def http_get(address: Tuple[str, int]) -> None:
    """As a browser or a monitoring probe would."""
    _throw(address, b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\n"
                    b"Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8\r\n"
                    b"Accept-Language: en\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n\r\n")


def garbage(address: Tuple[str, int]) -> None:
    """A message in ZeroMQ's form with no sense in it."""
    _send(address, [b"\xff" * 200])


def scan(address: Tuple[str, int]) -> None:
    """A connection without a word."""
    _throw(address, b"")


def terminate(address: Tuple[str, int]) -> None:
    """ps-lite's own message that a process is to end."""
    _send(address, [_message([(3, _message([(1, TERMINATE)]))])])


def profiler(address: Tuple[str, int]) -> None:
    """MXNet's commands to a server that make its profiler write a file."""
    for text in ("filename:profile.json,profile_all:1" + SET_CONFIG, "1" + STATE, "0" + STATE, "1" + DUMP):
        _send(address, [_message([(1, PROFILER), (2, text.encode()), (4, 1), (7, SERVERS), (8, 1), (10, 0), (6, 1)])])


DEEDS: Dict[str, Callable[[Tuple[str, int]], None]] = {
    deed.__name__: deed for deed in (http_get, garbage, scan, terminate, profiler)}


def _throw(address: Tuple[str, int], data: bytes) -> None:
    with socket.create_connection(address, timeout=5) as link:
        link.sendall(data)
        time.sleep(0.5)


def _send(address: Tuple[str, int], parts: List[bytes]) -> None:
    """One message of several parts, by ZMTP 3.0 without security."""
    with socket.create_connection(address, timeout=5) as link:
        link.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        _receive(link, 64)
        ready = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"ps09")
        link.sendall(bytes([4, len(ready)]) + ready)
        link.recv(256)
        for number, part in enumerate(parts):
            link.sendall(bytes([2 | (number + 1 < len(parts))]) + struct.pack(">Q", len(part)) + part)
        time.sleep(0.5)


def _receive(link: socket.socket, count: int) -> None:
    while count:
        piece = link.recv(count)
        if not piece:
            raise ConnectionResetError("turned away")
        count -= len(piece)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _message(fields: List[Field]) -> bytes:
    """A message of Protocol Buffers with these fields, by number."""
    return b"".join(_varint(number << 3) + _varint(value) if isinstance(value, int) else
                    _varint(number << 3 | 2) + _varint(len(value)) + value for number, value in fields)


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


if __name__ == "__main__":
    DEEDS[sys.argv[3]]((sys.argv[1], int(sys.argv[2])))
