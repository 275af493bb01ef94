"""What an exchange of floats costs over ZeroMQ, plain sockets and gloo's point-to-point: one pair, loopback.

    python -m scripts.maintain.bench_transport [FLOATS ...]

Each exchange sends FLOATS in pieces of 1 MiB (gloo: 4 MiB, too) and receives as many back in place. By turns over the
kinds; medians. Then one end is killed in the middle of an exchange, and a stranger calls. The machine should be quiet:
see the `load` in the first line. docs/results/benchmarks/own_connections.md has a run. It needs pyzmq and PyTorch.
"""
import argparse
import importlib
import os
import queue
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

SIZES = (270_000, 4_200_000, 25_000_000)
ROUNDS, WARM = 7, 2
WAIT_S = 20.0
STRANGE_NBYTES = 1024


class Sockets:
    """`recv_into` where the floats belong, `sendall` from where they are."""

    piece_nbytes = 1 << 20

    def __init__(self, first: bool, ports: Sequence[int]) -> None:
        if first:
            with socket.create_server(("127.0.0.1", ports[0])) as listener:
                self._connection, _ = listener.accept()
        else:
            self._connection = _called(ports[0])
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, piece: np.ndarray) -> None:
        self._connection.sendall(piece.data)

    def receive(self, piece: np.ndarray) -> None:
        if self._connection.recv_into(piece.data.cast("B"), 0, socket.MSG_WAITALL) < piece.nbytes:
            raise ConnectionError("end of the stream")


class ZeroMQ:
    """A socket for each way, since one belongs to one thread; frames without a copy, then one into place."""

    piece_nbytes = 1 << 20

    def __init__(self, first: bool, ports: Sequence[int]) -> None:
        zmq = importlib.import_module("zmq")
        context = zmq.Context(2)
        self._out, self._in = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for one in (self._out, self._in):
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.SNDHWM, 0)
            one.setsockopt(zmq.RCVHWM, 0)
        self._in.bind(f"tcp://127.0.0.1:{ports[not first]}")
        self._out.connect(f"tcp://127.0.0.1:{ports[first]}")

    def send(self, piece: np.ndarray) -> None:
        self._out.send(piece, copy=False)

    def receive(self, piece: np.ndarray) -> None:
        frame = self._in.recv(copy=False)
        piece[:] = np.frombuffer(frame.buffer, piece.dtype)


class Gloo:
    """torch.distributed's send and recv, a group for each way."""

    piece_nbytes = 1 << 20

    def __init__(self, first: bool, ports: Sequence[int]) -> None:
        import torch
        import torch.distributed as dist
        torch.set_num_threads(1)
        self._torch, self._dist, self._peer = torch, dist, int(first)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{ports[0]}", rank=int(not first), world_size=2)
        groups = [dist.new_group(), dist.new_group()]
        self._out, self._in = groups if first else groups[::-1]

    def send(self, piece: np.ndarray) -> None:
        self._dist.send(self._torch.from_numpy(piece), self._peer, group=self._out)

    def receive(self, piece: np.ndarray) -> None:
        self._dist.recv(self._torch.from_numpy(piece), self._peer, group=self._in)


class GlooIn4MiB(Gloo):
    piece_nbytes = 4 << 20


KINDS: Dict[str, Any] = {"sockets": Sockets, "zmq": ZeroMQ, "gloo": Gloo, "gloo 4 MiB": GlooIn4MiB}


def _called(port: int) -> socket.socket:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _pieces(array: np.ndarray, nbytes: int) -> List[np.ndarray]:
    return np.split(array, range(nbytes // 4, array.size, nbytes // 4))


def echo(kind: str, ports: Sequence[int], floats: int) -> None:
    """Send back what comes, for ever; a thread each way."""
    end = KINDS[kind](True, ports)
    room = _pieces(np.zeros(floats, np.float32), end.piece_nbytes)
    back: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    def send() -> None:
        while True:
            end.send(back.get())

    threading.Thread(target=send, daemon=True).start()
    while True:
        for piece in room:
            end.receive(piece)
            back.put(piece)


def ask(kind: str, ports: Sequence[int], floats: int, rounds: int) -> None:
    """Exchange, a line with seconds and seconds of the processor for each."""
    end = KINDS[kind](False, ports)
    out, into = (_pieces(np.zeros(floats, np.float32), end.piece_nbytes) for _ in range(2))

    def receive() -> None:
        for piece in into:
            end.receive(piece)

    for _ in range(rounds):
        began, worked = time.perf_counter(), time.process_time()
        answers = threading.Thread(target=receive)
        answers.start()
        for piece in out:
            end.send(piece)
        answers.join()
        print(time.perf_counter() - began, time.process_time() - worked, flush=True)


def pair(kind: str, floats: int, rounds: int) -> Tuple["subprocess.Popen[str]", "subprocess.Popen[str]", List[int]]:
    """An end that sends back, and one that asks."""
    ports = _free_ports()
    arguments = [sys.executable, "-m", "scripts.maintain.bench_transport", "--end", kind, *map(str, ports)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    first, second = (subprocess.Popen([*arguments, str(number), str(floats)], stdout=subprocess.PIPE, text=True,
                                      stderr=subprocess.DEVNULL, env=env) for number in (0, rounds))
    return first, second, ports


def _free_ports() -> List[int]:
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def measured(kind: str, floats: int) -> np.ndarray:
    """Milliseconds, and milliseconds of the processor, of an exchange: the medians of one pair's."""
    first, second, _ = pair(kind, floats, WARM + ROUNDS)
    with first, second:
        out, _ = second.communicate()
        first.kill()
    rows = np.array([line.split() for line in out.splitlines()[WARM:]], float)
    return 1e3 * np.median(rows, axis=0)


def after(happening: Callable[["subprocess.Popen[str]", List[int]], None], kind: str) -> str:
    """What becomes of exchanges in the middle of which something happens."""
    first, second, ports = pair(kind, SIZES[1], 10 ** 6)
    with first, second:
        assert second.stdout is not None
        for _ in range(3):
            second.stdout.readline()
        happening(first, ports)
        began = time.monotonic()
        reader = threading.Thread(target=second.stdout.read, daemon=True)
        reader.start()
        reader.join(5.0)
        lasts = second.poll() is None
        waits = first.poll() is not None
        for one in (second, first):
            one.kill()
    return ("waits for ever" if waits else "goes on") if lasts else f"ends after {time.monotonic() - began:.1f} s"


def killed(first: "subprocess.Popen[str]", _: List[int]) -> None:
    first.kill()
    first.wait()


def stranger(_: "subprocess.Popen[str]", ports: List[int]) -> None:
    for port in ports:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                connection.sendall(secrets.token_bytes(STRANGE_NBYTES))
        except OSError:
            pass  # nobody listens any more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("floats", nargs="*", type=int, default=SIZES)
    parser.add_argument("--end", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    if given.end:
        kind, one, other, rounds, floats = given.end
        ports = [int(one), int(other)]
        if int(rounds):
            ask(kind, ports, int(floats), int(rounds))
        else:
            echo(kind, ports, int(floats))
        return
    print(f"load {os.getloadavg()[0]:.1f}; ms (ms of the processor at one end), there and back")
    for floats in given.floats:
        found: Dict[str, List[np.ndarray]] = {kind: [] for kind in KINDS}
        for _ in range(given.turns):
            for kind, rows in found.items():
                rows.append(measured(kind, floats))
        medians = {kind: [statistics.median(column) for column in zip(*rows)] for kind, rows in found.items()}
        print(floats, *(f"| {kind} {ms:.1f} ({cpu:.1f})" for kind, (ms, cpu) in medians.items()), flush=True)
    for happening in (killed, stranger):
        print(happening.__name__, *(f"| {kind}: {after(happening, kind)}" for kind in list(KINDS)[:3]), flush=True)


if __name__ == "__main__":
    main()
