"""How long a worker waits for weights, by a sample of its iterations.

    from   the gradients of an iteration have been written
    to     the parameters hold the weights of the next one

In between a device is idle: the exposed part of the exchange, and copying. (The first layers of a forward pass
may begin a little earlier, since each needs only its own weights.) Two operations of the engine look at the clock in
one iteration each `SAMPLED_S`, which stands for all iterations since the last sample.
"""
import contextlib
import time
from typing import Iterable, Iterator, List

from kvstore.engine import engine
from kvstore.fronts.gluon.lanes import Keyed
from kvstore.job.pulse import SAMPLED_S

_known: List["Waits"] = []
"""The waits of all stores that this process has had, closed ones too."""


def seconds_waited() -> float:
    """The seconds of all stores together, for a beat of the pulse. On any thread."""
    return round(sum(waits.seconds for waits in _known), 3)


class Waits:
    """The waits of one store. `seconds` may be read on any thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sampled_at, self._since = 0.0, 0
        _known.append(self)

    @contextlib.contextmanager
    def around(self, keyed: Iterable[Keyed]) -> Iterator[None]:
        """Inside, the caller queues the whole way from these gradients to their next weights."""
        self._since += 1
        now = time.monotonic()
        keyed = [] if now - self._sampled_at < SAMPLED_S else list(keyed)
        grads = [grad for one in keyed for grad in one.grads]  # none on a worker that has never had data
        if not grads:
            yield
            return
        self._sampled_at = now
        written: List[float] = []
        engine.push(lambda: written.append(time.monotonic()), grads, [])
        yield
        stands_for, self._since = self._since, 0

        def look() -> None:
            if written:  # else both happened at almost the same time
                self.seconds += stands_for * (time.monotonic() - written[0])
        engine.push(look, [weight for one in keyed for weight in one.weights], [])
