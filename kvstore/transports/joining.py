"""A worker's place in a job with servers, whichever way its messages take (`pslite`, `sockets`)."""
import collections
import functools
import os
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple, Type

import numpy as np

from kvstore.errors import ConfigError, ProtocolError
from kvstore.job import agreement, ending, environment
from kvstore.job.deadlines import CALLS, deadlines
from kvstore.job.report import report
from kvstore.messages.buckets import Keys
from kvstore.messages.seam import Export, State
from kvstore.state.npz import from_bytes
from kvstore.tracing import recorder
from kvstore.transports.outbox import Outbox
from kvstore.transports.sizing import measured_pace


class Answers(Export):
    """What the servers answer to a command. A `fetch` that was interrupted can be called again."""

    def __init__(self) -> None:
        self._answers: List[bytearray] = []
        self.left = 1

    def texts(self) -> List[bytes]:
        """Each server's whole answer; waits."""
        while self.left:
            self.fetch()
        return [bytes(answer) for answer in self._answers]

    def state(self) -> State:
        return {key: saved for answer in self._answers for key, saved in from_bytes(answer).items()}


class Joined:
    """This process's place in the job, which all of its stores share. A subclass joins the job in its constructor.

    Each wait has the timeout of the store that asks for it. `timeout_s`: the longest of all stores so far, for joining
    and leaving the job.
    """

    worker_rank: int
    keys: Keys
    piece_floats: int  # of a sum, at most
    pieces_at_once: int  # on their way

    def __init__(self, timeout_s: float, synchronous: bool) -> None:
        agreement.check_launcher()
        self.timeout_s, self.synchronous = timeout_s, synchronous
        self.num_workers, self.num_servers = _counts()
        self.outbox: Optional[Outbox] = None  # direct connections to the servers
        self._pace: Optional[float] = None
        ending.end_well(disconnect)

    def command(self, name: str, payload: Dict[str, Any], timeout_s: float) -> None:
        """Have every server carry out a command; returns when all have."""
        raise NotImplementedError

    def answers(self, name: str, timeout_s: float) -> Answers:
        """What each server answers to a command, as it is now."""
        raise NotImplementedError

    def total(self, array: np.ndarray, timeout_s: Optional[float] = None) -> np.ndarray:
        """The sum over workers, piece by piece; waits."""
        flat = np.ascontiguousarray(array, np.float32).reshape(-1)
        result = np.empty_like(flat)
        under_way: Deque[Tuple[np.ndarray, Callable[[], np.ndarray]]] = collections.deque()

        def take(out: np.ndarray, answer: Callable[[], np.ndarray]) -> None:
            with deadlines.waiting_for("a sum over the workers", self.timeout_s if timeout_s is None else timeout_s,
                                       f"another worker or a server is late, stopped or unreachable, or one {CALLS}"):
                out[:] = answer()[:out.size]

        for start in range(0, flat.size, self.piece_floats):
            if len(under_way) == self.pieces_at_once:
                take(*under_way.popleft())
            piece = slice(start, start + self.piece_floats)
            under_way.append((result[piece], self._ask_sum(flat[piece])))
        for one in under_way:
            take(*one)
        return result.reshape(np.shape(array))

    def _ask_sum(self, part: np.ndarray) -> Callable[[], np.ndarray]:
        """Send what this worker adds to a sum; the result waits for the sum, which may be followed by other floats."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the job."""
        raise NotImplementedError

    def pace(self, timeout_s: float) -> float:
        """As `sizing.measured_pace`, once in a process; collective, waits."""
        if self._pace is None:
            self._pace = measured_pace(functools.partial(self.total, timeout_s=timeout_s), self.num_workers)
        return self._pace

    def _hello(self, **more: Any) -> None:
        """Worker 0's first command: it tells the servers about the job."""
        trace_folder = recorder.folder and os.path.abspath(recorder.folder)  # servers work elsewhere
        self.command("hello", {"num_workers": self.num_workers, "synchronous": self.synchronous,
                               "timeout_s": self.timeout_s, "trace_folder": trace_folder, **more}, self.timeout_s)

    def _check_others(self) -> None:
        """Every rank is here once, and all run the same version. Collective; waits."""
        mine = np.zeros(self.num_workers, np.float32)
        mine[self.worker_rank] = 1
        present = self.total(mine)
        absent = environment.lost_workers()
        if any(count != 1 for rank, count in enumerate(present) if count or rank not in absent):
            raise ProtocolError(f"worker ranks are not 0 … {self.num_workers - 1}, each once (seen so often: "
                                f"{present.astype(int).tolist()}); ODSGD_WORKER_RANK must be set for all workers or "
                                "none")
        answers = self.answers("software", self.timeout_s).texts() if self.worker_rank == 0 else []
        agreement.compare_versions(self, [answer.decode() for answer in answers])
        report("met")

    def _given_rank(self) -> Optional[int]:
        """The launcher's rank, the same from run to run, which ps-lite's own is not; None without one."""
        text = os.environ.get("ODSGD_WORKER_RANK") or os.environ.get("DMLC_WORKER_ID")
        if text is None:
            return None
        if not text.isdigit() or int(text) >= self.num_workers:
            raise ConfigError(f"this worker's rank is {text!r} (ODSGD_WORKER_RANK or DMLC_WORKER_ID), expected a "
                              f"number from 0 to {self.num_workers - 1}")
        return int(text)


_shared: Optional[Joined] = None


def shared(kind: Type[Joined], timeout_s: float, synchronous: bool) -> Joined:
    """The place of this process, made on first use; the process leaves it in good order at its end."""
    global _shared
    if _shared is None:
        _shared = kind(timeout_s, synchronous)
    _shared.timeout_s = max(_shared.timeout_s, timeout_s)
    if _shared.synchronous != synchronous:
        kinds = ("asynchronous", "synchronous")
        raise ConfigError(f"this job is {kinds[_shared.synchronous]} and the new store {kinds[synchronous]}; "
                          "each kind needs a job of its own")
    return _shared


def disconnect() -> None:
    global _shared
    if _shared is not None:
        _shared.close()
    _shared = None


def _counts() -> Tuple[int, int]:
    """Numbers of workers and servers, from the environment."""
    if os.environ.get("DMLC_ROLE", "worker") != "worker":
        raise ConfigError(f"DMLC_ROLE is {os.environ['DMLC_ROLE']}: this process is not a worker; `import odsgd` "
                          "before anything that imports mxnet makes it what it should be")
    missing = [name for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
               if not os.environ.get(name)]
    if missing:
        raise ConfigError("this store needs a job of several processes and this is one alone "
                          f"({missing[0]} is not set); start the script with `odsgd launch -n 2 -s 1 python script.py` "
                          "(with PyTorch, and a store that can do without servers, also by torchrun), or make the "
                          "store `local` in one process")
    os.environ.setdefault("DMLC_ROLE", "worker")
    return int(os.environ["DMLC_NUM_WORKER"]), int(os.environ["DMLC_NUM_SERVER"])
