"""Parameter servers on sockets of our own, one connection between each worker and server (`courier`): no MXNet in it.

Gradients leave from the array that the front end wrote them to, and the answer is received where it is read: no copy
on either side. Server 0 makes sums over the workers.
"""
import threading
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from kvstore.engine import engine
from kvstore.errors import ConfigError
from kvstore.job import commands, environment
from kvstore.job.deadlines import deadlines
from kvstore.job.pulse import connecting, pulse
from kvstore.job.report import report
from kvstore.messages.buckets import Keys
from kvstore.messages.header import COMMAND, SUM
from kvstore.transports.joining import Answers, Joined
from kvstore.transports.outbox import Outbox
from kvstore.transports.servers import ParameterServers
from kvstore.weights.servers import sockets


class SocketsJoined(Joined):
    """This worker's connections to all servers."""

    outbox: Outbox
    piece_floats, pieces_at_once = 256 * 1024, 2

    def __init__(self, timeout_s: float, synchronous: bool) -> None:
        super().__init__(timeout_s, synchronous)
        rank = self._given_rank()
        if rank is None:
            raise ConfigError("this worker has no rank: neither ODSGD_WORKER_RANK nor DMLC_WORKER_ID is set; start the "
                              "job with `odsgd launch`")
        self.worker_rank, self.keys = rank, Keys(self.num_servers)
        self._asking = threading.Lock()
        # Numbers of a rank's commands only grow, also when another worker joins in its place.
        self._signer = commands.Signer(rank, commands.job_key(), after=environment.joined() << 32)
        connecting()
        self.outbox = Outbox(sockets.addresses(rank, timeout_s), rank, timeout_s)
        if rank == 0:
            self._hello()
        if not environment.joined():
            self._check_others()

    def _ask(self, name: str, payload: Dict[str, Any]) -> List[Callable[[], np.ndarray]]:
        with self._asking:  # servers take commands in the order of their numbers
            text = self._signer.sign(name, payload).encode()
            return self.outbox.ask(COMMAND, np.frombuffer(text, np.uint8), range(self.num_servers))

    def command(self, name: str, payload: Dict[str, Any], timeout_s: float) -> None:
        with deadlines.waiting_for(f"command `{name}` to the servers", timeout_s):
            for answer in self._ask(name, payload):
                answer()

    def answers(self, name: str, timeout_s: float) -> Answers:
        return _Answers(self._ask(name, {}), f"the servers' answer to `{name}`", timeout_s)

    def total(self, array: np.ndarray, timeout_s: Optional[float] = None) -> np.ndarray:
        if environment.joined():  # the others do not wait for this worker
            return np.array(array, np.float32)
        return super().total(array, timeout_s)

    def _ask_sum(self, part: np.ndarray) -> Callable[[], np.ndarray]:
        answer, = self.outbox.ask(SUM, part.view(np.uint8), [0])
        return lambda: answer().view(np.float32)

    def close(self) -> None:
        engine.wait_all()
        self.command("leave", {}, self.timeout_s)
        report("done", at=pulse.at)


class _Answers(Answers):
    """Answers that arrive while other things go on, each as it was when the server was asked."""

    def __init__(self, waits: List[Callable[[], np.ndarray]], what: str, timeout_s: float) -> None:
        super().__init__()
        self._waits, self._what, self._timeout_s = waits, what, timeout_s

    def fetch(self) -> None:
        with deadlines.waiting_for(self._what, self._timeout_s):
            for wait in self._waits[len(self._answers):]:
                self._answers.append(bytearray(wait()))
        self.left = 0

    settle = fetch  # no later push is in what a server has sent


class SocketServers(ParameterServers):
    """One store on the sockets of this process."""

    place = SocketsJoined
    _always_direct = True
