"""The limit of an iteration: no schedule of a system's traffic pattern beats it.

max(T_cop, T_wire), T_wire being the time that the busiest link needs for one direction; docs/how-to/benchmark.md has
it for each pattern. A method that communicates every T iterations needs T_wire / T on average.
"""
from __future__ import annotations

from kvstore.messages.codecs import codec
from odsgd.lab.bench.systems import AUTO, System


def wire_nbytes(system: System, workers: int, nbytes: int) -> float:
    """Bytes over the busiest link in one direction per iteration, of `nbytes` of parameters."""
    there, back = (codec(name).nbytes(nbytes // 4) / interval
                   for name, interval in zip(system.codecs(workers), system.intervals(workers)))
    if system.servers is None or system.servers == AUTO:
        return (workers - 1) / workers * (there + back)
    return max(workers / int(system.servers), 1) * max(there, back)


def bound_ms(compute_ms: float, nbytes: float, goodput: float) -> float:
    """max(T_cop, T_wire); `goodput` in bytes per second, infinite where links are not shaped."""
    return max(compute_ms, 1000 * nbytes / goodput)

