"""What a ring and parts over gloo cost beside gloo's own allreduce, two or more workers:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 scripts/maintain/bench_gloo.py [--floats N ...] [--turns N]

All exchange the same buckets with nothing else to do, by turns in the same processes: an allreduce of each bucket, all
begun at once; our ring's sums; `ssgd` in parts, with its update by plain SGD. Of worker 0: milliseconds, and those of
its processor. Where others use the machine, the lowest quarter and the processor's time say more than the median.
"""
import argparse
import os
import time
from typing import Any, Callable, Dict, List

import numpy as np
import torch
import torch.distributed as dist

from kvstore.engine import engine
from kvstore.messages.buckets import Parameter
from kvstore.messages.seam import Setup, TrafficSettings
from kvstore.optimizers import described, formulas
from kvstore.options import DEFAULT_TIMEOUT_S
from kvstore.transports.gloo import GroupRing, GroupSharded
from kvstore.weights.parts import Parts

WARM = 3


def gloos_own(sizes: List[int]) -> Callable[[], None]:
    arrays = [torch.ones(size) for size in sizes]

    def exchange() -> None:
        for work in [dist.all_reduce(array, async_op=True) for array in arrays]:
            work.wait()

    return exchange


def ring(transport: GroupRing, buckets: List[Any]) -> Callable[[], None]:
    own, sums = ({bucket.id: engine.zeros(bucket.size) for bucket in buckets} for _ in range(2))

    def exchange() -> None:
        for pending in [transport.allreduce(bucket, own[bucket.id], sums[bucket.id]) for bucket in buckets]:
            pending.wait()

    return exchange


def parts(transport: GroupSharded, buckets: List[Any], traffic: TrafficSettings) -> Callable[[], None]:
    own = {bucket.id: engine.zeros(bucket.size) for bucket in buckets}
    holder, sgd = Parts(transport), described.describe(formulas.SGD(learning_rate=0.1))
    holder.set_up(Setup("ssgd", {}, sgd, buckets, traffic), lambda bucket: engine.zeros(bucket.size))

    def exchange() -> None:
        for pending in [holder.exchange(bucket, own[bucket.id], 0.1) for bucket in buckets]:
            pending.wait()

    return exchange


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--floats", nargs="*", type=int, default=[270_000, 4_200_000])
    parser.add_argument("--turns", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    traffic = TrafficSettings(waits=True)
    for floats in given.floats:
        by_ring, by_parts = GroupRing(DEFAULT_TIMEOUT_S), GroupSharded(DEFAULT_TIMEOUT_S)
        whole = [Parameter("w", "w", (floats,), "float32")]
        buckets = by_ring.plan(whole, traffic)
        kinds = {"gloo's allreduce": gloos_own([bucket.size for bucket in buckets]), "ring": ring(by_ring, buckets),
                 "parts": parts(by_parts, by_parts.plan(whole, traffic), traffic)}
        taken: Dict[str, List[Any]] = {kind: [] for kind in kinds}
        for turn in range(WARM + given.turns):
            for kind, exchange in kinds.items():
                dist.barrier()
                began, worked = time.perf_counter(), time.process_time()
                exchange()
                if turn >= WARM:
                    taken[kind].append((time.perf_counter() - began, time.process_time() - worked))
        if by_ring.worker_rank == 0:
            print(f"{floats} floats in {len(buckets)} buckets, load {os.getloadavg()[0]:.1f}")
            for kind, rows in taken.items():
                (low, median, high), cpu = 1e3 * np.quantile([ms for ms, _ in rows], [.25, .5, .75]), np.median(
                    [1e3 * ms for _, ms in rows])
                print(f"  {kind:17} {median:7.1f} ms ({low:.1f} – {high:.1f}), processor {cpu:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
