"""When arrays were written, or had been read, as MXNet's engine sees it."""
import threading
import time
from typing import Sequence

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import KVStoreError

LATE_S = 60.0
"""An iteration that takes longer ends the job."""


class Instant:
    """When all of `reads` had been written, and what reads `writes` was through; seconds of the machine's clock."""

    def __init__(self, reads: Sequence[NDArray], writes: Sequence[NDArray] = ()) -> None:
        self._has_come = threading.Event()
        engine.push(self._now, reads, writes)

    def _now(self) -> None:
        self._at = time.monotonic()
        self._has_come.set()

    def wait(self, timeout_s: float = LATE_S) -> float:
        if not self._has_come.wait(timeout_s):
            raise KVStoreError(f"an iteration has not ended within {timeout_s:g} s")
        return self._at
