"""Workers whose data are not of one length, for both front ends: the data, and what NumPy makes of them."""
from typing import List

TARGETS, LENGTHS = (0.0, 2.0, 5.0), (3, 6, 4)
LR_LOCAL, W_0 = 0.25, 4.0


def lr(t: int) -> float:
    """A schedule that a worker follows as long as it has data."""
    return 0.6 / (1 + t)


def by_numpy(sums: bool = False, delay: bool = False, local: bool = True) -> List[List[float]]:
    """What each worker computes on, iteration by iteration, and after the last one W.

    W <- W - lr(t) 1/A sum of the gradients of the A workers that have one; worker m's is w^m - a_m, at w^m = W, or with
    a delay at W of the iteration before less a step along its own gradient.
    """
    W, w = W_0, [W_0] * len(TARGETS)
    paths: List[List[float]] = [[] for _ in TARGETS]
    for t in range(max(LENGTHS)):
        active = [m for m, length in enumerate(LENGTHS) if t < length]
        grads = {m: w[m] - TARGETS[m] for m in active}
        for m in active:
            paths[m].append(w[m])
        before, W = W, W - lr(t) * sum(grads.values()) / (1 if sums else len(active))
        w = [before - LR_LOCAL * grads.get(m, 0.0) * local if delay else W for m in range(len(TARGETS))]
    return [[*path, W] for path in paths]
