"""A process's pulse: every second it says that it runs, how far it is, and how long it has waited for others.

A thread of its own sends the beats to the launcher (`odsgd/launch/policy/liveness.py` judges them). So a process whose
script computes or waits differs from a stopped one. docs/results/reliability.md has the cost.
"""
import contextlib
import faulthandler
import json
import signal
import threading
import time
from typing import Any, Callable, Dict, Iterator, Optional

from kvstore.job.aside import BackgroundThread, guarded
from kvstore.job.deadlines import deadlines
from kvstore.job.environment import launched
from kvstore.job.report import report

STACKS = signal.SIGUSR2
"""At this signal a process with a pulse prints the stacks of its threads, even if it hangs."""


class Pulse:
    """`tell(event, **fields)` takes the beats, `waiting()` says for how many seconds others are waited for, or None.

    The work tells it of `activity` and of every step; the pulse only reads them.
    """

    EVERY_S, LOOKED_WITHIN_S = 1.0, 0.5

    def __init__(self, tell: Callable[..., None], waiting: Callable[[], Optional[float]]) -> None:
        self.at = 0
        """Iterations begun by a worker, messages and commands carried out by a server."""
        self.moves = 0
        """How often `at` has changed."""
        self.substep = 0
        """What moves on while `at` stands: batches of an evaluation."""
        self.asynchronous = False
        """Whether the workers may be at different iterations."""
        self.activity = ""
        """`training`, `evaluation`, `checkpoint`, `serving`; empty: nothing that must move on."""
        self.nbytes = 0
        """Bytes of data that were sent to other processes of the job."""
        self.more: Dict[str, Callable[[], Any]] = {}
        """Other entries of a beat, by name: functions that only look. A beat leaves out one that fails."""
        self._tell, self._waiting = tell, waiting
        self._thread: Optional[threading.Thread] = None
        self._aside, self._found = BackgroundThread("a look of the pulse"), {}  # type: BackgroundThread, Dict[str, Any]

    def start(self) -> None:
        if self._thread is None:
            if signal.getsignal(STACKS) == signal.SIG_DFL:
                faulthandler.register(STACKS, file=2, all_threads=True)
            self._thread = threading.Thread(target=self._beat, name="kvstore-pulse", daemon=True)
            self._thread.start()

    def moved(self, at: int) -> None:
        self.at = at
        self.moves += 1

    @contextlib.contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Be at `activity`, and afterwards at what was before."""
        self.activity, before = activity, self.activity
        try:
            yield
        finally:
            self.activity = before

    def state(self) -> Dict[str, Any]:
        """One beat. Serving is not waiting, whatever a server waits for otherwise."""
        waits_s = None if self.activity == "serving" else self._waiting()
        return {"at": self.at, "moves": self.moves, "substep": self.substep, "activity": self.activity,
                "asynchronous": self.asynchronous, "waits_s": None if waits_s is None else round(waits_s, 1),
                "nbytes": self.nbytes, **self._more()}

    def _more(self) -> Dict[str, Any]:
        """What the functions in `more` gave last. They run on another thread: one that hangs holds up no beat."""
        if self.more and self._aside.empty:
            with contextlib.suppress(TimeoutError):
                self._aside.finish(self._look, self.LOOKED_WITHIN_S)
        return self._found

    def _look(self) -> None:
        found: Dict[str, Any] = {}
        for name, look in list(self.more.items()):
            with guarded(f"`{name}` of the pulse"):
                value = look()
                json.dumps(value)
                found[name] = value
        self._found = found

    def _beat(self) -> None:
        while True:
            with guarded("a beat of the pulse"):
                self._tell("beat", **self.state())
            time.sleep(self.EVERY_S)


pulse = Pulse(report, deadlines.waiting)

SAMPLED_S = 0.05
"""Waits for weights are known by samples, one each so many seconds (`fronts.gluon.waits`). One costs 20 to 30
microseconds, so less than a thousandth of the time."""


def beyond(waited_s: float, lasted_s: float) -> float:
    """Seconds by which the waiting in an interval exceeds its length, a sample at most; they count in the next one."""
    return max(0.0, min(waited_s - lasted_s, SAMPLED_S))


def connecting() -> None:
    """Tell the launcher, if there is one, that this process looks for its job; the beats begin."""
    if launched():
        pulse.start()
        report("connecting")
