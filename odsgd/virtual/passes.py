"""How long the passes of each worker take, and when the gradients of each bucket appear."""
import functools
import math
from typing import List, Sequence, Tuple

import numpy as np

from kvstore.errors import unknown
from kvstore.messages.buckets import Bucket, Parameter
from odsgd.virtual.costs import NS, ns
from odsgd.virtual.description import VirtualCluster


class PassTimes:
    """When the gradients of an iteration appear."""

    def __init__(self, cluster: VirtualCluster, buckets: Sequence[Bucket], parameters: Sequence[Parameter]) -> None:
        self._compute, self._seed, self._workers = cluster.compute, cluster.seed, cluster.workers
        self._slowness = [1 / cluster.compute.speeds.get(m, 1.0) for m in range(cluster.workers)]
        forward, backward = self._by_layer(parameters)
        layer = {parameter.name: number for number, parameter in enumerate(parameters)}
        reads: List[List[int]] = [[] for _ in parameters]  # buckets, by layer
        self._backward = []  # by bucket: from the beginning of the backward pass to its last gradient
        for b, bucket in enumerate(buckets):
            layers = [layer[segment.parameter.name] for segment in bucket.segments]
            self._backward.append(sum(backward[min(layers):]))
            for number in layers:
                reads[number].append(b)
        self._forward: List[Tuple[List[int], float]] = []  # neighbouring layers that read the same buckets are one
        for bs, seconds in zip(reads, forward):
            if self._forward and self._forward[-1][0] == bs:
                bs, seconds = bs, seconds + self._forward.pop()[1]
            self._forward.append((bs, seconds))
        self._whole = sum(backward)

    def mean(self, of_slowest: bool) -> float:
        """Nanoseconds of both passes on average: of the slowest worker, or of all, each as often as it is through."""
        slowness = max(self._slowness) if of_slowest else self._workers / sum(1 / slow for slow in self._slowness)
        draws = self._compute.draws
        pause = ns(draws.values[1]) / draws.values[0] if draws.kind == "pauses" else 0
        passes = slowness * (sum(seconds for _, seconds in self._forward) + self._whole)
        every, away = self._compute.failures or (math.inf, 0.0)
        return passes * (1 + away / every) + pause

    def _by_layer(self, parameters: Sequence[Parameter]) -> Tuple[List[float], List[float]]:
        """Nanoseconds, forward and backward."""
        compute, names = self._compute, [parameter.name for parameter in parameters]
        if compute.layers:
            for label in compute.layers:
                if label not in names:
                    raise unknown("parameter in compute.layers", label, names)
            pairs = [compute.layers.get(label, (0.0, 0.0)) for label in names]
            return [NS * forward for forward, _ in pairs], [NS * backward for _, backward in pairs]
        whole = sum(parameter.size for parameter in parameters)
        shares = [NS * compute.iteration * parameter.size / whole for parameter in parameters]
        return [compute.forward * share for share in shares], [(1 - compute.forward) * share for share in shares]

    def times(self, m: int, t: int, free: int, weights: Sequence[int]) -> Tuple[int, int, List[int], int]:
        """Of a worker that is `free` then: when the forward pass begins, when the backward pass does, when each
        bucket's gradients are there, and when both passes are over.
        """
        factor, pause = self._draws(t)[m]
        factor, time = factor * self._slowness[m], free
        began = max([time, *(weights[b] for b in self._forward[0][0])])
        for bs, seconds in self._forward:
            for b in bs:
                if weights[b] > time:
                    time = weights[b]
            time += int(seconds * factor)
        time += pause + self.away(m, t)
        grads = [time + int(seconds * factor) for seconds in self._backward]
        return began, time, grads, time + int(self._whole * factor)

    def away(self, m: int, t: int) -> int:
        """For how many nanoseconds a worker that fails in iteration `t`, perhaps again and again, is away; else 0."""
        return 0 if self._compute.failures is None else self._failures(t)[m]

    @functools.lru_cache(maxsize=256)  # noqa: B019  as long as a run
    def _failures(self, t: int) -> List[int]:
        assert self._compute.failures is not None
        every, away = self._compute.failures
        random = np.random.RandomState([self._seed, t, 1])
        passes = sum(seconds for _, seconds in self._forward) + self._whole
        lasts = np.array(self._slowness) * passes / (NS * every)  # times until a failure, on average
        first = -np.log1p(-random.random_sample(self._workers))
        lengths = random.exponential(size=self._workers)
        again = random.poisson(np.clip(lasts - first, 0, 1e6))  # no more than can be drawn
        return [ns(away * length) * bool(fails) for length, fails in zip(lengths + random.gamma(again), first < lasts)]

    @functools.lru_cache(maxsize=256)  # noqa: B019  as long as a run
    def _draws(self, t: int) -> List[Tuple[float, int]]:
        """Factor and pause of every worker in iteration `t`."""
        kind, values = self._compute.draws.kind, self._compute.draws.values
        random = np.random.RandomState([self._seed, t])
        workers = self._workers
        if kind == "lognormal":
            sigma = values[0]
            return [(factor, 0) for factor in np.exp(sigma * random.normal(size=workers) - sigma ** 2 / 2).tolist()]
        if kind == "pareto":
            alpha = values[0]
            return [(factor, 0) for factor in ((alpha - 1) / alpha * (1 + random.pareto(alpha, workers))).tolist()]
        if kind == "pauses":
            every, seconds = int(values[0]), values[1]
            return [(1.0, ns(seconds) * ((t + m * every // workers) % every == 0)) for m in range(workers)]
        return [(1.0, 0)] * workers
