#!/usr/bin/env python3
"""The time of one exchange, gradients out and new weights in, beside stock MXNet in the same run.

    scripts/bench_exchange.py [-n WORKERS] [-s SERVERS] [--rounds N] [--repeat N] [--json FILE]

Jobs of real processes on this machine, one after the other and interleaved, `--repeat` times: MXNet's dist_sync with a
push and a pull per parameter, the same with the fused call that gluon.Trainer makes (pushpull), and ssgd's buckets.
Gradients are ready beforehand, nothing is computed; an exchange is over when a worker has all new weights. SGD with
momentum on the servers.
"""
import argparse
import dataclasses
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STOCK_SERVER = (sys.executable, "-c", "import numpy; numpy.bool = bool; import mxnet")
WAYS = {"push+pull": "MXNet dist_sync, a push and a pull per parameter",
        "pushpull": "MXNet dist_sync, one pushpull per parameter",
        "buckets": "odsgd ssgd, one pushpull per bucket"}
WARM_UP_ROUNDS = 3


def shapes(model: str) -> list:
    """The parameters of a model, first layer first."""
    if model == "4.2M":  # five dense layers
        return [(1024, 1024), (1024,)] * 4 + [(10, 1024), (10,)]
    layers = [(16, 3)] + [(16, 16)] * 6 + [(32, 16)] + [(32, 32)] * 5 + [(64, 32)] + [(64, 64)] * 5  # a ResNet-20
    found = []
    for out, into in layers:
        found += [(out, into, 3, 3), (out,), (out,), (out,), (out,)]
    return found + [(10, 64), (10,)]


def work(way: str, rounds: int, file: str) -> None:
    """One worker: time `rounds` exchanges of each model."""
    import odsgd  # noqa: F401
    from kvstore._mxnet import mx
    optimizer = mx.optimizer.SGD(learning_rate=0.01, momentum=0.9)
    stock = None if way == "buckets" else open_stock(mx, optimizer)
    times = {model: exchange_times(mx, stock or open_ours(optimizer), way, model, rounds)
             for model in ("4.2M", "0.27M")}
    Path(file + f"-{os.environ['ODSGD_WORKER_RANK']}.json").write_text(json.dumps(times))


def open_stock(mx: object, optimizer: object) -> object:
    store = mx.kv.create("dist_sync")
    store.set_optimizer(optimizer)
    return store


def open_ours(optimizer: object) -> object:
    import kvstore
    store = kvstore.create("ssgd")
    store.set_optimizer(optimizer)
    return store


def exchange_times(mx: object, store: object, way: str, model: str, rounds: int) -> list:
    weights = [mx.nd.ones(shape) for shape in shapes(model)]
    grads = [mx.nd.ones(shape) * 1e-3 for shape in shapes(model)]
    first_key = 0 if model == "4.2M" else 1000
    keys = list(range(first_key, first_key + len(weights)))
    for key, weight in zip(keys, weights):
        store.broadcast(key, weight, weight)
    times = []
    for _ in range(WARM_UP_ROUNDS + rounds):
        for grad in grads:  # on a CPU the store's buffer is the gradient: what the last answer left there goes
            grad[:] = 1e-3
        mx.nd.waitall()
        start = time.perf_counter()
        for key, grad, weight in reversed(list(zip(keys, grads, weights))):
            if way == "push+pull":
                store.push(key, grad)
                store.pull(key, out=weight)
            else:
                store.pushpull(key, grad, out=weight)
        for weight in weights:
            weight.wait_to_read()
        times.append(1000 * (time.perf_counter() - start))
    return times[WARM_UP_ROUNDS:]


def run(way: str, workers: int, servers: int, rounds: int) -> dict:
    """One job; per model the median over its rounds, of the slowest worker."""
    from odsgd.launch import cli, console, supervise
    with tempfile.TemporaryDirectory() as folder:
        job = cli.parse(["-n", str(workers), "-s", str(servers), __file__, "--work", way, "--rounds", str(rounds),
                         "--file", folder + "/times"])
        if way != "buckets":
            job = dataclasses.replace(job, server_command=STOCK_SERVER)
        said = io.StringIO()
        code = supervise.run(job, console.Console(said, said))
        files = sorted(Path(folder).glob("times-*.json"))
        if code or len(files) != workers:
            sys.exit(f"bench_exchange: the job of `{way}` ended with {code}:\n{said.getvalue()}")
        results = [json.loads(file.read_text()) for file in files]
        return {model: max(statistics.median(result[model]) for result in results) for model in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("-s", "--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20, help="exchanges per job")
    parser.add_argument("--repeat", type=int, default=5, help="jobs per way, interleaved")
    parser.add_argument("--json", type=Path, help="write all medians there")
    parser.add_argument("--work", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.rounds, options.file)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measured: dict = {}
    for repetition in range(options.repeat):
        for way in WAYS:
            print(f"\rrun {repetition + 1} of {options.repeat}: {way:12}", end="", file=sys.stderr, flush=True)
            for model, value in run(way, options.workers, options.servers, options.rounds).items():
                measured.setdefault(model, {}).setdefault(way, []).append(value)
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1))
    show(measured, options)


def show(measured: dict, options: argparse.Namespace) -> None:
    print(f"one exchange, {options.workers} workers, {options.servers} server(s), one machine ({os.cpu_count()} "
          f"cores), loopback; ms: median (lowest – highest) of {options.repeat} jobs")
    for model, ways in measured.items():
        count = sum(1 for _ in shapes(model))
        print(f"\n{model} parameters in {count} tensors")
        base = statistics.median(ways["push+pull"])
        for way, values in ways.items():
            median = statistics.median(values)
            print(f"  {WAYS[way]:50} {median:8.1f}  ({min(values):.1f} – {max(values):.1f})   {base / median:4.1f} x")


if __name__ == "__main__":
    main()
