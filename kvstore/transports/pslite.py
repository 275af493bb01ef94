"""Parameter servers on MXNet's ps-lite: the greeting, commands, sums over the workers, and servers' answers.

One `Connection` per process carries every store: MXNet gives a process one place in the job, and numbers in messages
must not meet.
"""
import collections
import itertools
import os
import random
import time
from functools import partial
from typing import Any, Callable, Dict, List, Tuple

import numpy as np

from kvstore.engine import on_mxnet
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ProtocolError
from kvstore.job import commands, environment
from kvstore.job.deadlines import deadlines
from kvstore.job.pulse import connecting, pulse
from kvstore.job.report import report
from kvstore.messages.buckets import Keys
from kvstore.messages.header import ANSWER_FLOATS, FETCH, HEADER, SUM_SIZES, number_of, pieces, read_piece, sum_message
from kvstore.transports.joining import Answers, Joined
from kvstore.transports.servers import ParameterServers

SUM_KEYS = 2
"""Keys for sums of each length: one sum is on its way while another is added up. With more than 256 KiB in flight TCP's
windows grow so far that buckets later leave in bursts, and workers' streams drift apart
(docs/results/benchmarks/tried.md)."""


class Connection(Joined):
    """This worker's place in the job."""

    def __init__(self, timeout_s: float, synchronous: bool) -> None:
        super().__init__(timeout_s, synchronous)
        rank = self._given_rank()
        on_mxnet.prepare()
        self.native = self._connect()
        self.worker_rank = self.native.rank if rank is None else rank
        self._signer = commands.Signer(self.worker_rank, commands.job_key())
        self.keys = Keys(self.num_servers, Keys.LIMIT)
        self._rounds: Dict[int, int] = collections.defaultdict(int)  # sums asked for, by key
        self._sums = {size: collections.deque(self.keys.take(0) for _ in range(SUM_KEYS)) for size in SUM_SIZES}
        self.piece_floats, self.pieces_at_once = max(SUM_SIZES), SUM_KEYS if synchronous else 1
        self._answer_keys = [self.keys.take(server) for server in range(self.num_servers)]
        self._greet()

    def _connect(self) -> mx.kvstore.KVStore:
        # Arrays above the bound would be cut up behind our back; buckets are cut already.
        os.environ["MXNET_KVSTORE_BIGARRAY_BOUND"] = str(2 ** 31 - 1)
        connecting()
        where = "{DMLC_PS_ROOT_URI}:{DMLC_PS_ROOT_PORT}".format(**os.environ)
        late = (f"the job did not come up within {self.timeout_s:g} s: scheduler at {where}, {self.num_workers} "
                f"workers and {self.num_servers} servers expected; check that each was started, and that all reach it "
                "and the servers' hosts")
        with deadlines.within(self.timeout_s, late), environment.private_files():
            # Of the module below: `mx.kvstore.create` may have been taught that these names mean us.
            return mx.kvstore.base.create("dist_sync" if self.synchronous else "dist_async")

    def _greet(self) -> None:
        """Tell the servers about the job, and check that every rank is here once."""
        if self.worker_rank == 0:
            self._hello(sums=[key for keys in self._sums.values() for key in keys], answer_keys=self._answer_keys)
        with deadlines.waiting_for("the first round with the servers", self.timeout_s):
            sizes = {key: size + HEADER for size, keys in self._sums.items() for key in keys}
            sizes.update(dict.fromkeys(self._answer_keys, ANSWER_FLOATS))
            self.native.init(list(sizes), [mx.nd.zeros(size) for size in sizes.values()])
            for key in self._answer_keys:  # a server knows its answer array from the first round on it
                empty = mx.nd.zeros(ANSWER_FLOATS)
                self.native.pushpull(key, empty, out=empty)
                empty.wait_to_read()
        self._check_others()

    def command(self, name: str, payload: Dict[str, Any], timeout_s: float) -> None:
        with deadlines.waiting_for(f"command `{name}` to the servers", timeout_s):
            self.native._send_command_to_servers(0, self._signer.sign(name, payload))

    def _ask_sum(self, part: np.ndarray) -> Callable[[], np.ndarray]:
        """By a key whose answer is the sum; the key's last sum has been taken."""
        size = min(size for size in self._sums if size >= part.size)
        self._sums[size].rotate()  # the keys of a size are used in turn
        key = self._sums[size][0]
        self._rounds[key] += 1
        number = part.size if self.synchronous else self._rounds[key]
        pushed = self._push_sum(key, sum_message(part, size, number, self.worker_rank))
        return partial(self._take_sum, key, size, part.size, pushed)

    def _take_sum(self, key: int, size: int, length: int, pushed: NDArray) -> np.ndarray:
        answer: np.ndarray = pushed.asnumpy()
        lengths = number_of(answer[-HEADER:])
        if self.synchronous and lengths != self.num_workers * length:  # MXNet adds up whatever comes
            raise ProtocolError(f"worker {self.worker_rank} adds up {length} numbers, and all {self.num_workers} "
                                f"workers together {lengths}; all make the same collective calls, in the same order")
        pause_s = 0.0
        while not self.synchronous and number_of(answer[-HEADER:]) != self._rounds[key]:
            pause_s = min(pause_s + 0.001, 0.02)
            time.sleep(pause_s)
            answer = self._push_sum(key, sum_message(answer[:0], size, self._rounds[key], FETCH)).asnumpy()
        return answer

    def _push_sum(self, key: int, pushed: np.ndarray) -> NDArray:
        message = mx.nd.array(pushed)
        self.native.pushpull(key, message, out=message)
        return message

    def answers(self, name: str, timeout_s: float) -> Answers:
        answers = _Answers(self, name, timeout_s)
        answers.fetch()
        return answers

    def ask_piece(self, name: str, number: int, chunk: int, timeout_s: float) -> List[Tuple[int, int, int, bytes]]:
        """One piece from each server; once more, if another worker's question came between."""
        with deadlines.waiting_for(f"the servers' answer to `{name}`", timeout_s):
            while True:
                self.command(name, {"number": number, "chunk": chunk}, timeout_s)
                found = [read_piece(array) for array in self._pull_answers()]
                if all(piece[:2] == (self.worker_rank, chunk) for piece in found):
                    return found
                time.sleep(random.uniform(0, 0.01))  # another worker's question came between

    def _pull_answers(self) -> List[np.ndarray]:
        arrays = [mx.nd.zeros(ANSWER_FLOATS) for _ in self._answer_keys]
        self.native.pull(self._answer_keys, out=arrays)
        return [array.asnumpy() for array in arrays]

    def close(self) -> None:
        """Leave the job.

        In a job of our launcher nobody waits: it ends the servers when all workers have left and ended, and what a
        worker ends with is seen at once. A foreign tracker waits for the scheduler, which ends as MXNet has it: all
        workers leave together, and the first of them stops the servers.
        """
        with deadlines.waiting_for("the end of the job", self.timeout_s):
            mx.nd.waitall()
            if environment.launched():
                self.command("leave", {}, self.timeout_s)
                mx.base.check_call(mx.base._LIB.MXKVStoreSetBarrierBeforeExit(self.native.handle, 0))
            handle, self.native.handle = self.native.handle, None
            mx.base.check_call(mx.base._LIB.MXKVStoreFree(handle))
        report("done", at=pulse.at)


class _Answers(Answers):
    """Each answer is as it was when its first piece was asked for."""

    _numbers = itertools.count()  # several may be under way

    def __init__(self, connection: Connection, name: str, timeout_s: float) -> None:
        super().__init__()
        self._connection, self._name, self._timeout_s = connection, name, timeout_s
        self._number, self._chunk = next(self._numbers), 0

    def fetch(self) -> None:
        if not self.left:
            return
        found = self._connection.ask_piece(self._name, self._number, self._chunk, self._timeout_s)
        self._answers = self._answers or [bytearray() for _ in found]
        self._chunk += 1
        for answer, (_, _, length, piece) in zip(self._answers, found):
            answer += piece[:length - len(answer)]
        self.left = max(pieces(length) for _, _, length, _ in found) - self._chunk
        if not self.left:
            self._connection.command("taken", {"number": self._number}, self._timeout_s)


class ParameterServer(ParameterServers):
    """One store on the connection of this process."""

    context = mx.cpu()
    place = Connection
