"""The timeline of a virtual run: the files of a real job's processes, in virtual seconds.

docs/how-to/timelines.md says when each bar begins and ends. What a real timeline reads from arrays is known here. One
difference: a server has a bar of `merge` for each message, since it is known when each was added.
"""
import collections
import secrets
import time
from pathlib import Path
from typing import Any, Deque, Dict, Tuple

from kvstore.messages.buckets import WIRE_DTYPE
from kvstore.tracing.trace import Trace
from odsgd.virtual.costs import NS
from odsgd.virtual.description import VirtualCluster
from odsgd.virtual.programs import Op
from odsgd.virtual.simulation import LaneTimes, Simulation, WorkerTimes


class TracedSimulation(Simulation):
    """The same simulation, step by step, with a trace of every worker and every server in `folder`."""

    def __init__(self, folder: Path, cluster: VirtualCluster, *job: Any) -> None:
        super().__init__(cluster, *job)
        names, job_id = cluster.host_names(), secrets.token_hex(6)

        def trace(role: str, rank: int, host: int) -> Trace:
            return Trace(folder, {"role": role, "rank": rank, "host": names[host], "boot": "virtual", "job": job_id,
                                  "wall_s": time.time(), "monotonic_s": 0.0})

        self._traces = [trace("worker", m, m) for m in range(cluster.workers)]
        serving = range(0 if self._ring else cluster.servers)
        self._serving = [trace("server", rank, cluster.host_of_server(rank)) for rank in serving]
        self._first: Dict[int, int] = {}  # each worker's first iteration here; in a resumed run it is not 1
        # By worker and bucket, for questions on their way: when each was asked, and in which iteration.
        self._asked_at: Dict[Tuple[int, int], Deque[int]] = collections.defaultdict(collections.deque)
        self._asked_in: Dict[Tuple[int, int], Deque[int]] = collections.defaultdict(collections.deque)

    def _bar(self, trace: Trace, stage: str, b: int, began: int, ended: int, **more: int) -> None:
        bucket = self.buckets[b]
        trace.add(stage, stage, began / NS, ended / NS, bucket=bucket.id, bytes=bucket.size * WIRE_DTYPE.itemsize,
                  round=trace.round(stage, bucket.id), **more)

    def _start(self, time: int, m: int, b: int, number: int, end: int) -> None:
        worker = self._workers[m]
        t = worker.begun[0]
        began, turned, _, over = self.passes.times(m, t, worker.computed, worker.weights)
        super()._start(time, m, b, number, end)
        counted = t - self._first.setdefault(m, t)
        self._traces[m].add("compute", "forward", began / NS, turned / NS, iteration=counted)
        self._traces[m].add("compute", "backward", turned / NS, over / NS, iteration=counted)
        for b, ops in enumerate(worker.program):
            self._asked_in[m, b].extend(counted for op in ops if op.what not in ("step", "await"))

    def _arrays(self, worker: WorkerTimes, stage: str, b: int, time: int, cost: int) -> int:
        over = super()._arrays(worker, stage, b, time, cost)
        self._bar(self._traces[worker.rank], stage, b, time, over)
        return over

    def _send(self, worker: WorkerTimes, lane: LaneTimes, time: int, op: Op) -> None:
        self._asked_at[worker.rank, lane.b].append(time)
        super()._send(worker, lane, time, op)

    def _answered(self, time: int, m: int, b: int, number: int, update: int) -> None:
        there = max(time, self._workers[m].messages_free) + self.costs.message
        self._bar(self._traces[m], "exchange", b, self._asked_at[m, b].popleft(), there,
                  iteration=self._asked_in[m, b].popleft())
        super()._answered(time, m, b, number, update)

    def _handle(self, time: int, m: int, b: int, number: int, end: int) -> None:
        server = self.buckets[b].server_rank
        began = max(time, self._server_free[server])
        merged = began + self.costs.receive[b]
        super()._handle(time, m, b, number, end)
        self._bar(self._serving[server], "merge", b, began, merged)
        if self._server_free[server] > merged:
            self._bar(self._serving[server], "update", b, merged, self._server_free[server])

    def close(self) -> None:
        """Finish the files: nothing more will happen."""
        for trace in (*self._traces, *self._serving):
            trace.close()
