"""Loss and accuracy: counted on the devices, read a few iterations late.

Why late. Reading a number waits for the computation that makes it. The loop therefore reads the loss of iteration
t - IN_FLIGHT after it has queued iteration t: by then it is there or about to be. The same read keeps MXNet's queue
(and the batches in it) from growing without bound, and finds a loss that is not finite IN_FLIGHT iterations after it
arose.
"""
import collections
import dataclasses
import math
import time
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

IN_FLIGHT = 4
"""Iterations that may be queued and not yet computed."""


@dataclasses.dataclass
class Sums:
    """Loss, right answers and examples, added up."""

    loss: float = 0.0
    hits: float = 0.0
    examples: float = 0.0

    def add(self, other: "Sums") -> None:
        self.loss += other.loss
        self.hits += other.hits
        self.examples += other.examples

    @property
    def mean_loss(self) -> float:
        """Per example; NaN if there was none."""
        return self.loss / self.examples if self.examples else math.nan

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1; NaN if there was no example."""
        return self.hits / self.examples if self.examples else math.nan

    def named(self, kind: str) -> Dict[str, float]:
        """Both under their names in the metrics, of `train` or `test`."""
        return {f"{kind}_loss": self.mean_loss, f"{kind}_accuracy": self.accuracy}


class Meter:
    """Adds up what iterations counted, IN_FLIGHT iterations late.

    `on_read(iteration, sums)` is called for every iteration as its numbers arrive, in order.
    """

    def __init__(self, on_read: Callable[[int, Sums], None]) -> None:
        self._on_read = on_read
        self._queue: Deque[Tuple[int, List[Any], int]] = collections.deque()

    def add(self, iteration: int, tallies: List[Any], examples: int) -> None:
        """Iteration `iteration` has been queued and will give `tallies`; waits for an earlier one."""
        self._queue.append((iteration, tallies, examples))
        if len(self._queue) > IN_FLIGHT:
            self._read()

    def drain(self) -> None:
        """Wait for all that was added."""
        while self._queue:
            self._read()

    def _read(self) -> None:
        iteration, tallies, examples = self._queue.popleft()
        losses, hits = zip(*(tally.asnumpy().tolist() for tally in tallies))
        self._on_read(iteration, Sums(sum(losses), sum(hits), examples))


class Clock:
    """Seconds spent training: `go_on` starts it; evaluation and checkpoints stop it."""

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._since: Optional[float] = None  # while it is stopped

    def read(self) -> float:
        return self._passed_s + (0.0 if self._since is None else time.perf_counter() - self._since)

    def stop(self) -> None:
        """Stop counting: what follows is not training."""
        self._passed_s, self._since = self.read(), None

    def go_on(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()
