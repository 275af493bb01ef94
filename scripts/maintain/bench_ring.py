#!/usr/bin/env python3
"""The time of an allreduce on the ring, per codec, beside MPI's own and a plain ring of Sendrecv, in one run.

    bench_ring.py [-n RANKS] [--rate 1gbit] [--floats N …] [--repeat N]

Without --rate all ranks are on this machine's loopback. With it (as root) each has a host of an emulated cluster, whose
links carry so much each way (docs/how-to/emulated-cluster.md). The ways take turns, --repeat times; the time of one
allreduce is that of its slowest rank. A ring cannot be faster than 2 (p - 1)/p · N/B, with B what TCP carries on the
same links, measured in the same run. MPI's own Allreduce spins while it waits, which costs where ranks share cores.
"""
import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvstore.messages.codecs import WITHOUT_RESIDUAL, codec
from kvstore.transports.rounds import Round, Rounds, blocks, bucket_nbytes

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
MPI_WAYS = {"mpi": "MPI's own Allreduce", "sendrecv": "a ring of Sendrecv, NumPy"}
WAYS = {**{name: f"our ring, codec {name}" for name in WITHOUT_RESIDUAL}, **MPI_WAYS}


def work(options: argparse.Namespace) -> None:
    """One rank: time every way in turn. Rank 0 prints the times of the slowest rank."""
    from kvstore.transports.mpi import World
    connection = World(TIMEOUT_S)
    rounds = Rounds(connection.comm, connection.mpi, TIMEOUT_S)
    times: dict = {}
    for size in options.floats:
        own = np.random.default_rng(rounds.worker_rank).standard_normal(size, np.float32)
        total = np.empty_like(own)
        calls: Dict[str, Callable[[], None]] = {
            **{name: bucketed(rounds, name, own, total) for name in WITHOUT_RESIDUAL},
            "mpi": functools.partial(connection.comm.Allreduce, own, total),
            "sendrecv": functools.partial(sendrecv_ring, connection.comm, own, total)}
        for repetition in range(-1, options.repeat):  # the first is not counted: connections are made
            for way, call in calls.items():
                elapsed_ms = timed(rounds, call)
                if repetition >= 0:
                    times.setdefault(str(size), {}).setdefault(way, []).append(elapsed_ms)
    if rounds.worker_rank == 0:
        print(json.dumps(times))
    connection.close()


def timed(rounds: Rounds, call: Callable[[], None]) -> float:
    """Milliseconds on the slowest rank."""
    rounds.total(np.zeros(1))
    start = time.perf_counter()
    call()
    elapsed = np.zeros(rounds.num_workers)
    elapsed[rounds.worker_rank] = time.perf_counter() - start
    return 1000 * float(rounds.total(elapsed).max())


def bucketed(rounds: Rounds, name: str, own: np.ndarray, total: np.ndarray) -> Callable[[], None]:
    """What a store does: a round for each bucket, all asked for at once."""
    one = codec(name)
    step = bucket_nbytes(one, rounds.num_workers, own.size, waits=True) // 4
    buckets = [slice(start, start + step) for start in range(0, own.size, step)]

    def call() -> None:
        over = threading.Semaphore(0)
        for bucket in buckets:
            rounds.begin(rounds.ask(Round("a bucket", one)), own[bucket], total[bucket], over.release)
        for _ in buckets:
            over.acquire()
    return call


def sendrecv_ring(comm: Any, own: np.ndarray, total: np.ndarray) -> None:
    """The textbook's ring: a step at a time, no overlap."""
    rank, p = comm.Get_rank(), comm.Get_size()
    total[:] = own
    parts = blocks(total, p)
    room = np.empty(max(part.size for part in parts), np.float32)
    for step in range(2 * (p - 1)):
        send, receive = (rank - step) % p, (rank - step - 1) % p
        if step >= p - 1:
            send, receive = (rank + p - step) % p, (rank + p - 1 - step) % p
        arrived = room[:parts[receive].size]
        comm.Sendrecv(parts[send], (rank + 1) % p, recvbuf=arrived, source=(rank - 1) % p)
        if step < p - 1:
            parts[receive] += arrived
        else:
            parts[receive][:] = arrived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("--rate", help="of every link, each way, e.g. 1gbit; root only (default: loopback)")
    parser.add_argument("--floats", type=int, nargs="+", default=[4_200_000, 270_000], help="sizes of the array")
    parser.add_argument("--repeat", type=int, default=10, help="of every way, interleaved")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options)
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if mpiexec is None:
        sys.exit("bench_ring: no mpiexec here; pip install '.[mpi]'")
    command = ["-n", str(options.ranks), sys.executable, str(Path(__file__).resolve()), "--work", "--repeat",
               str(options.repeat), "--floats", *map(str, options.floats)]
    goodput, times = on_cluster(mpiexec, command, options) if options.rate else on_loopback(mpiexec, command)
    show(goodput, times, options)


def on_cluster(mpiexec: str, command: list, options: argparse.Namespace) -> tuple:
    from odsgd.lab.cluster import Cluster
    with Cluster.up(hosts=options.ranks, rate=options.rate) as cluster:
        goodput = min(cluster.goodput(2.0))
        done = cluster.run([mpiexec, "-f", "@hosts", *command], env={"OMP_NUM_THREADS": "1"}, timeout=600)
    return goodput, result(done)


def on_loopback(mpiexec: str, command: list) -> tuple:
    probe = [sys.executable, "-I", str(ROOT / "odsgd" / "lab" / "cluster" / "goodput.py"), "2"]
    with subprocess.Popen(probe, stdout=subprocess.PIPE, text=True) as back:
        assert back.stdout is not None
        port = back.stdout.readline().strip()
        there = subprocess.run([*probe, "127.0.0.1", port], stdout=subprocess.PIPE, text=True, timeout=60)
        goodput = min(float(there.stdout), float(back.stdout.readline()))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self"}  # not shared memory
    return goodput, result(subprocess.run([mpiexec, *command], env=env, capture_output=True, text=True, timeout=600))


def result(done: subprocess.CompletedProcess) -> dict:
    if done.returncode:
        sys.exit(f"bench_ring: the job ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def show(goodput: float, times: dict, options: argparse.Namespace) -> None:
    where = f"links of {options.rate}" if options.rate else "loopback"
    p = options.ranks
    print(f"allreduce on {p} ranks, one machine ({os.cpu_count()} cores), {where}; TCP carries "
          f"{goodput / 1e6:.1f} MB/s each way; ms: median (lowest – "
          f"highest) of {options.repeat}")
    for size, ways in times.items():
        limit = 2000 * (p - 1) / p * 4 * int(size) / goodput
        base = statistics.median(ways["none"])
        print(f"\n{size} floats, {4 * int(size) / 1e6:.1f} MB: a ring's limit is {limit:.1f} ms")
        for way, values in ways.items():
            median = statistics.median(values)
            print(f"  {WAYS[way]:28} {median:8.1f}  ({min(values):.1f} – {max(values):.1f})   "
                  f"{median / limit:5.2f} x limit   {median / base:5.2f} x uncompressed")


if __name__ == "__main__":
    main()
