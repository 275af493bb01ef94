"""The parameter server as a transport: buckets on MXNet's ps-lite.

One `Connection` per process carries every store: MXNet gives a process one place in the job, and numbers in messages
must not meet. A `ParameterServer` is one store's use of it.
"""
import base64
import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import time
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from kvstore import methods
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError, ProtocolError
from kvstore.job import agreement, commands, ending, environment, software
from kvstore.job.deadlines import deadlines
from kvstore.job.pulse import connecting, pulse
from kvstore.job.report import report
from kvstore.messages.buckets import DEFAULT_NBYTES, WIRE_DTYPE, Bucket, Keys, Parameter, plan
from kvstore.messages.header import BEGIN, FETCH, HEADER, MAILBOX_FLOATS, SUM_SIZES, pieces, read_letter, sum_message
from kvstore.messages.seam import Export, Pending, Setup, State, Traffic
from kvstore.options import DEFAULT_TIMEOUT_S
from kvstore.state.npz import by_bucket, npz, un_npz
from kvstore.tracing import recorder
from kvstore.transports.buffers import FETCH_TAG, BucketBuffers, Buffer, Buffered, Taken, Window
from kvstore.transports.outbox import Outbox

WINDOW_NBYTES = 1024 * 1024
"""How much a worker has in flight to one server; an eighth of a small model where it waits for the answers. Less does
not fill the link; with much more the workers' streams drift apart, and the way back stands idle. The bound is safe only
because all workers send their buckets in one order, which the store sees to."""
BUCKET_S = 3e-3
"""A round of a bucket takes about so long, within these bounds: a message costs processor time, whatever its size."""
OF_A_MODEL, LARGEST_NBYTES = (1 / 64, 1 / 4), (1024 * 1024, 2 * 1024 * 1024)
"""Of a bucket on slow links and on fast ones; DEFAULT_NBYTES is the least."""
MANY, SMALL_NBYTES = 16, 128 * 1024
"""Where servers are fewer than workers so many buckets are worth smaller ones: some hide what is done to others."""
LEAST_NBYTES = 64 * 1024
"""Of two buckets that hide each other's way in a method that keeps a push in flight."""
SUM_KEYS = 2
"""Of each length, so that one sum is on its way while another is added up. With more than 256 KiB in flight TCP's
windows grow so far that buckets later leave in bursts, and workers' streams drift apart (docs/benchmarks/tried.md)."""
Asked = Tuple[int, int, NDArray]
"""A sum that has been asked for: its key, its length, and where it arrives."""
PROBES, PROBING_S = 5, 0.1  # of each length; how long a worker goes on
COMMAND_NBYTES = 3 * 256 * 1024  # of a saved state per command


class Connection:
    """This worker's place in the job. `timeout_s`: of its next wait; each store sets its own."""

    def __init__(self, timeout_s: float, synchronous: bool) -> None:
        self.timeout_s, self.synchronous = timeout_s, synchronous
        self.num_workers, self.num_servers = _counts()
        rank = _given_rank(self.num_workers)
        ending.end_well(disconnect)
        engine.wait_before_forks()
        self.native = self._connect()
        self.worker_rank = self.native.rank if rank is None else rank
        self._signer = commands.Signer(self.worker_rank, commands.job_key())
        self.keys = Keys(self.num_servers)
        self._rounds: Dict[int, int] = collections.defaultdict(int)  # sums asked for, by key
        self._sums = {size: collections.deque(self.keys.take(0) for _ in range(SUM_KEYS)) for size in SUM_SIZES}
        self._mailboxes = [self.keys.take(server) for server in range(self.num_servers)]
        self.outbox: Optional[Outbox] = None  # where a store has a codec
        self._greet()

    def _connect(self) -> mx.kvstore.KVStore:
        # Arrays above the bound would be cut up behind our back; buckets are cut already.
        os.environ["MXNET_KVSTORE_BIGARRAY_BOUND"] = str(2 ** 31 - 1)
        connecting()
        where = "{DMLC_PS_ROOT_URI}:{DMLC_PS_ROOT_PORT}".format(**os.environ)
        late = (f"the job did not come up within {self.timeout_s:g} s: scheduler at {where}, {self.num_workers} "
                f"workers and {self.num_servers} servers expected; check that each was started and can reach it")
        with deadlines.within(self.timeout_s, late), environment.alone():
            # Of the module below: `mx.kvstore.create` may have been taught that these names mean us.
            return mx.kvstore.base.create("dist_sync" if self.synchronous else "dist_async")

    def _greet(self) -> None:
        """Make the servers ours, and check that every rank is here once."""
        if self.worker_rank == 0:
            trace_folder = recorder.folder and os.path.abspath(recorder.folder)  # servers work elsewhere
            self.command("hello", {"num_workers": self.num_workers, "synchronous": self.synchronous,
                                   "timeout_s": self.timeout_s,
                                   "sums": [key for keys in self._sums.values() for key in keys],
                                   "mailboxes": self._mailboxes, "trace_folder": trace_folder})
        with self._waiting("the first round with the servers"):
            sizes = {key: size + HEADER for size, keys in self._sums.items() for key in keys}
            sizes.update(dict.fromkeys(self._mailboxes, MAILBOX_FLOATS))
            self.native.init(list(sizes), [mx.nd.zeros(size) for size in sizes.values()])
            for key in self._mailboxes:  # a server knows its mailbox from the first round on it
                empty = mx.nd.zeros(MAILBOX_FLOATS)
                self.native.pushpull(key, empty, out=empty)
                empty.wait_to_read()
        mine = np.zeros(self.num_workers, np.float32)
        mine[self.worker_rank] = 1
        present = self.total(mine)
        if not np.all(present == 1):
            raise ProtocolError(f"worker ranks are not 0 … {self.num_workers - 1}, each once (seen so often: "
                                f"{present.astype(int).tolist()}); ODSGD_WORKER_RANK must be set for all workers or "
                                "none")
        answers = self.read_mail("software") if self.worker_rank == 0 else []
        software.compare(self, [answer.decode() for answer in answers])

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        message = (f"{what} was not over within {self.timeout_s:g} s: another worker or a server is late, stopped or "
                   "unreachable. Check that all are alive, or raise `timeout_s`")
        with deadlines.within(self.timeout_s, message):
            yield

    def command(self, name: str, payload: Dict[str, Any]) -> None:
        """Have every server carry out a command; returns when all have."""
        with self._waiting(f"command `{name}` to the servers"):
            self.native._send_command_to_servers(0, self._signer.sign(name, payload))

    def total(self, array: np.ndarray) -> np.ndarray:
        """The sum over workers, through keys whose answer is the sum; waits."""
        flat = np.ascontiguousarray(array, np.float32).reshape(-1)
        result = np.empty_like(flat)
        largest = max(self._sums)
        under_way: Deque[Tuple[np.ndarray, Asked]] = collections.deque()
        for start in range(0, flat.size, largest):
            if len(under_way) == (SUM_KEYS if self.synchronous else 1):
                self._take(*under_way.popleft())
            part = slice(start, start + largest)
            under_way.append((result[part], self._ask_sum(flat[part])))
        for one in under_way:
            self._take(*one)
        return result.reshape(np.shape(array))

    def _ask_sum(self, part: np.ndarray) -> Asked:
        """Push what this worker adds; the key's last sum has been taken."""
        size = min(size for size in self._sums if size >= part.size)
        self._sums[size].rotate()  # the keys of a size are used in turn
        key = self._sums[size][0]
        self._rounds[key] += 1
        return key, size, self._push_sum(key, sum_message(part, size, self._rounds[key], self.worker_rank))

    def _take(self, out: np.ndarray, asked: Asked) -> None:
        """Wait for a sum."""
        key, size, message = asked
        with self._waiting("a sum over the workers"):
            answer = message.asnumpy()
            pause_s = 0.0
            while not self.synchronous and answer[-HEADER] != self._rounds[key]:
                pause_s = min(pause_s + 0.001, 0.02)
                time.sleep(pause_s)
                answer = self._push_sum(key, sum_message(out[:0], size, self._rounds[key], FETCH)).asnumpy()
        out[:] = answer[:out.size]

    @functools.cached_property
    def pace(self) -> float:
        """Seconds that a round takes for each byte of a worker's message. The same on all workers; collective, waits.

        The fastest rounds count, since those that a busy machine holds up say nothing of links and servers.
        """
        times: Dict[int, List[float]] = {size: [] for size in SUM_SIZES}
        spent = 0.0
        self.total(np.zeros(1))  # all are here, and begin together
        for probe in range(PROBES):
            for size, took in times.items():
                begin = time.perf_counter()
                self.total(np.zeros(size))
                took.append(time.perf_counter() - begin)
                spent += took[-1]
            if self.total(np.array([spent]))[0] > self.num_workers * PROBING_S and probe:
                break
        (small, fast), (large, slow) = ((size, min(took)) for size, took in sorted(times.items()))
        mine = max(slow - fast, 0.0) / (WIRE_DTYPE.itemsize * (large - small))
        return float(self.total(np.array([mine]))[0]) / self.num_workers

    def _push_sum(self, key: int, pushed: np.ndarray) -> NDArray:
        message = mx.nd.array(pushed)
        self.native.pushpull(key, message, out=message)
        return message

    def read_mail(self, name: str) -> List[bytes]:
        """What each server answers to command `name`."""
        return Mail(self, name).read()

    def ask(self, name: str, chunk: int) -> List[Tuple[int, int, int, bytes]]:
        """One letter from each server; once more, if another worker's question came between."""
        with self._waiting(f"the servers' answer to `{name}`"):
            while True:
                self.command(name, {"chunk": chunk})
                letters = [read_letter(mail) for mail in self._pull(self._mailboxes, MAILBOX_FLOATS)]
                if all(letter[:2] == (self.worker_rank, chunk) for letter in letters):
                    return letters
                time.sleep(random.uniform(0, 0.01))  # another worker's question came between

    def _pull(self, keys: Sequence[int], size: int) -> List[np.ndarray]:
        arrays = [mx.nd.zeros(size) for _ in keys]
        with self._waiting("an answer of a server"):
            for key, array in zip(keys, arrays):
                self.native.pull(key, out=array)
            return [array.asnumpy() for array in arrays]

    def close(self) -> None:
        """Leave the job.

        In a job of our launcher nobody waits: it ends the servers when all workers have left and ended, and what a
        worker ends with is seen at once. A foreign tracker waits for the scheduler, which ends as MXNet has it: all
        workers leave together, and the first of them stops the servers.
        """
        with self._waiting("the end of the job"):
            mx.nd.waitall()
            if environment.launched():
                self.command("leave", {})
                mx.base.check_call(mx.base._LIB.MXKVStoreSetBarrierBeforeExit(self.native.handle, 0))
            handle, self.native.handle = self.native.handle, None
            mx.base.check_call(mx.base._LIB.MXKVStoreFree(handle))
        report("done")


class Mail(Export):
    """What each server answers to a command, as it was at the first piece."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self._name, self._chunk = connection, name, 0
        self._timeout_s = connection.timeout_s
        self._answers = [bytearray() for _ in range(connection.num_servers)]
        self.left = 1
        self.fetch()

    def fetch(self) -> None:
        if not self.left:
            return
        self._connection.timeout_s = self._timeout_s
        letters = self._connection.ask(self._name, self._chunk)
        self._chunk += 1
        for answer, (_, _, length, piece) in zip(self._answers, letters):
            answer += piece[:length - len(answer)]
        self.left = max(map(pieces, (letter[2] for letter in letters))) - self._chunk
        if not self.left and self._chunk > 1:  # what fits into a letter may stay with the servers
            self._connection.command("taken", {"answer": self._name})

    def read(self) -> List[bytes]:
        """All of it; waits."""
        while self.left:
            self.fetch()
        return [bytes(answer) for answer in self._answers]

    def state(self) -> State:
        arrays: Dict[str, np.ndarray] = {}
        for answer in self._answers:
            arrays.update(un_npz(answer))
        return by_bucket(arrays)


_connection: Optional[Connection] = None


def connection(timeout_s: float, synchronous: bool) -> Connection:
    """The connection of this process, made on first use; it is left in good order when the process ends."""
    global _connection
    if _connection is None:
        _connection = Connection(timeout_s, synchronous)
    if _connection.synchronous != synchronous:
        kinds = ("asynchronous", "synchronous")
        raise ConfigError(f"this job is {kinds[_connection.synchronous]} and the new store {kinds[synchronous]}; "
                          "each kind needs a job of its own")
    return _connection


def disconnect() -> None:
    """End the connection, if there is one."""
    global _connection
    if _connection is None:
        return
    _connection.close()
    _connection = None


def _counts() -> Tuple[int, int]:
    """Numbers of workers and servers, from the environment."""
    if os.environ.get("DMLC_ROLE", "worker") != "worker":
        raise ConfigError(f"DMLC_ROLE is {os.environ['DMLC_ROLE']}: this process is not a worker; `import odsgd` "
                          "before anything that imports mxnet makes it what it should be")
    missing = [name for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
               if not os.environ.get(name)]
    if missing:
        raise ConfigError(f"this store needs a job and {missing[0]} is not set; start the script with "
                          "`odsgd launch -n 2 -s 1 python script.py`, or use kvstore.create('local') in one process")
    os.environ.setdefault("DMLC_ROLE", "worker")
    num_workers, num_servers = int(os.environ["DMLC_NUM_WORKER"]), int(os.environ["DMLC_NUM_SERVER"])
    if num_servers < 1:
        raise ConfigError("this store needs a parameter server and the job has none; launch with `-s 1` or more")
    return num_workers, num_servers


def _given_rank(num_workers: int) -> Optional[int]:
    """The launcher's rank, the same from run to run, which ps-lite's own is not; None without one."""
    text = os.environ.get("ODSGD_WORKER_RANK") or os.environ.get("DMLC_WORKER_ID")
    if text is None:
        return None
    if not text.isdigit() or int(text) >= num_workers:
        raise ConfigError(f"this worker's rank is {text!r} (ODSGD_WORKER_RANK or DMLC_WORKER_ID), expected a number "
                          f"from 0 to {num_workers - 1}")
    return int(text)


def even_nbytes(floats: int, num_servers: int, num_workers: int, waits: bool, pace: float) -> int:
    """A size of buckets that gives all servers as many, and enough, where a round takes `pace` seconds per byte.

    Two at least: one is pushed while the other is answered (SSGD, 4 workers with a server beside each, 1 Gbit/s, 0.27 M
    parameters: 33 ms per iteration in place of 41). Where no worker waits for the answers that pays only if both have
    LEAST_NBYTES: with less the messages cost more than they hide.
    """
    nbytes = WIRE_DTYPE.itemsize * floats
    slow, fast = (min(max(DEFAULT_NBYTES, part * nbytes), largest) for part, largest in zip(OF_A_MODEL, LARGEST_NBYTES))
    if num_servers < num_workers:
        slow = min(slow, max(nbytes / (MANY * num_servers), SMALL_NBYTES))
    near = min(max(slow, BUCKET_S / pace if pace else fast), fast)
    two = waits or nbytes >= 2 * LEAST_NBYTES * num_servers
    each = max(round(nbytes / (near * num_servers)), 2 if two else 1)
    return WIRE_DTYPE.itemsize * max(1, -(-floats // (each * num_servers)))


def on_servers(parameters: Sequence[Parameter], traffic: Traffic, keys: Keys, num_workers: int,
               pace: Callable[[], float]) -> List[Bucket]:
    """The buckets of a job; `pace` is asked for only where the bits do not depend on their sizes.

    They may: a rule may look at a bucket as a whole, and a codec have a scale per bucket. In an asynchronous job a
    saved version belongs to a bucket.
    """
    nbytes = traffic.bucket_nbytes
    if nbytes is None and not traffic.asynchronous:
        floats = sum(parameter.size for parameter in parameters)
        nbytes = even_nbytes(floats, keys.num_servers, num_workers, traffic.waits,
                             pace() if traffic.any_cut and not traffic.coded else math.inf)
    return plan(parameters, keys, nbytes, traffic.whole)


def window_nbytes(floats: int, waits: bool) -> float:
    """How much of a model of so many floats may be in flight to one server."""
    return min(WINDOW_NBYTES, WIRE_DTYPE.itemsize * floats / 8) if waits else WINDOW_NBYTES


class ParameterServer(Buffered):
    """One store on the connection of this process."""

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, synchronous: bool = True) -> None:
        self._shared, self._timeout_s = connection(timeout_s, synchronous), timeout_s
        super().__init__(self._connection.worker_rank, synchronous)
        self.num_workers, self.num_servers = self._connection.num_workers, self._connection.num_servers
        self._windows: List[Window] = []  # by server
        self._outbox: Optional[Outbox] = None  # for messages with a codec

    @property
    def _connection(self) -> Connection:
        """This process's. What it waits for next, it waits for as long as this store's `timeout_s` says."""
        self._shared.timeout_s = self._timeout_s
        return self._shared

    def plan(self, parameters: Sequence[Parameter], traffic: Traffic) -> List[Bucket]:
        return on_servers(parameters, traffic, self._connection.keys, self.num_workers, lambda: self._connection.pace)

    def set_up(self, setup: Setup, weights: Callable[[Bucket], NDArray]) -> Dict[int, Pending]:
        if setup.method.startswith("__main__:"):
            raise ConfigError(f"method {setup.method[9:]} is defined in the script itself, which servers cannot "
                              "import; move it to a file of its own")
        methods.load(setup.method, commands.trusted())  # complains here as the servers would
        if self.worker_rank == 0:
            self._connection.command("open", setup.command())
        ids = [bucket.id for bucket in setup.buckets]
        self._buffers = {bucket.id: BucketBuffers(weights(bucket)) for bucket in setup.buckets}
        under_way = window_nbytes(sum(bucket.size for bucket in setup.buckets), setup.traffic.waits)
        self._windows = [Window(under_way) for _ in range(self.num_servers)]
        if setup.traffic.coded:
            self._set_up_coded(setup)
        with self._connection._waiting("the start of the global weights"):
            if self._outbox is None:
                self._connection.native.init(ids, [self._buffers[key].last.whole for key in ids])
        report("joined")  # from here on this worker can be done without
        deadlines.follow(id(self), self._timeout_s, self._under_way, self._overdue)
        return {key: Pending(self._buffers[key].last.payload) for key in ids}

    def _set_up_coded(self, setup: Setup) -> None:
        """Let the servers take messages with codecs; worker 0's weights are the first of them."""
        connection, first = self._connection, self.worker_rank == 0
        if first:
            connection.command("coded", {"traffic": dataclasses.asdict(setup.traffic), "buckets": {
                bucket.id: [bucket.server_rank, bucket.size] for bucket in setup.buckets}})
        if connection.outbox is None:
            addresses = b"\n".join(connection.read_mail("address")) if first else b""
            connection.outbox = Outbox(agreement.from_worker_0(self, addresses).decode().split("\n"),
                                       self.worker_rank, self._timeout_s)
        self._outbox = connection.outbox
        with connection._waiting("the start of the global weights"):
            for bucket in setup.buckets:
                message = self._buffers[bucket.id].last
                w = engine.memory(message.whole)[:-HEADER]
                if setup.traffic.codec_weights != "none":  # both ends begin alike, whatever each resumes from
                    w[:] = self.total(w if first else np.zeros_like(w))
                self._outbox.open(bucket, setup.traffic, w)
                if first:
                    message.floats[-1] = BEGIN
                    self._outbox.send(bucket, message)
            for bucket in setup.buckets:
                header = engine.memory(self._buffers[bucket.id].last.whole)[-HEADER:]
                header[:] = 0
        self.total(np.zeros(1))  # the servers have them

    def use(self, setup: Setup, weights: Callable[[Bucket], NDArray], leads: bool) -> None:
        if leads:
            self._connection.command("use", setup.command())

    def kept(self, bucket: Bucket) -> Dict[str, np.ndarray]:
        return {} if self._outbox is None else self._outbox.residual(bucket)

    def exchange(self, bucket: Bucket, grad: NDArray, lr: float) -> Pending:
        buffers = self._buffers[bucket.id]
        before, tag, check = buffers.last, self._tag(lr), self.finite_check(bucket)
        if not self._synchronous:
            return self._ask(buffers, bucket, before, buffers.compose_async(grad, tag, check))
        window = self._windows[bucket.server_rank]
        behind = window.make_room(bucket.id, before.nbytes)
        send = buffers.compose(grad, tag, behind, check)
        window.add(bucket.id, send)
        self._send(bucket, send)
        return Pending(send.payload, [before.payload, *[message.payload for message in behind]])

    def fetch(self, bucket: Bucket, after: NDArray) -> Pending:
        buffers = self._buffers[bucket.id]
        return self._ask(buffers, bucket, buffers.last, buffers.compose_fetch(after, FETCH_TAG))

    def _ask(self, buffers: BucketBuffers, bucket: Bucket, before: Buffer, send: Buffer) -> Taken:
        self._send(bucket, send)
        buffers.answered(send)
        return Taken(send, buffers, [before.payload])

    def _send(self, bucket: Bucket, send: Buffer) -> None:
        """One message there, one back into the same buffer."""
        if self._outbox is None:
            pulse.nbytes += send.nbytes
            self._connection.native.pushpull(bucket.id, send.whole, out=send.whole)
        else:
            self._outbox.send(bucket, send)

    def total(self, array: np.ndarray) -> np.ndarray:
        return self._connection.total(array)

    def statistics(self) -> Dict[int, Dict[str, Any]]:
        counted: Dict[int, Dict[str, Any]] = {}
        for answer in self._connection.read_mail("statistics"):
            counted.update({int(key): one for key, one in json.loads(answer).items()})
        return counted

    def export_state(self) -> State:
        export = self.exporting()
        while export.left:
            export.fetch()
        return export.state()

    def exporting(self) -> Export:
        return Mail(self._connection, "export")

    def import_state(self, state: Optional[State], buckets: Sequence[Bucket]) -> None:
        if state is None:
            return
        for server_rank in range(self.num_servers):
            mine = {f"{bucket.id}/{part}": array for bucket in buckets if bucket.server_rank == server_rank
                    for part, array in state[bucket.id].items()}
            data = npz(mine)
            for start in range(0, len(data), COMMAND_NBYTES):
                piece = base64.b64encode(data[start:start + COMMAND_NBYTES]).decode()
                self._connection.command("import", {"piece": piece, "last": start + COMMAND_NBYTES >= len(data),
                                                    "server_rank": server_rank})

    def _under_way(self) -> Optional[Tuple[Any, ...]]:
        """The headers of all messages that wait for an answer, or None."""
        headers = [buffers.under_way() for buffers in self._buffers.values()]
        return tuple(headers) if any(headers) else None

    def _overdue(self) -> str:
        waiting = [(min(header[0], header[HEADER]), key) for key, buffers in self._buffers.items()
                   for header in [buffers.under_way()] if header]
        round_id, key = min(waiting, default=(0, 0))
        return (f"round {int(round_id)}, bucket {key}: nothing has come from the servers for {self._timeout_s:g} s; "
                "another worker or a server is late, stopped or unreachable, or a worker has taken fewer steps and "
                "left. Check that all are alive, or raise `timeout_s`")

    def close(self) -> None:
        """Forget what belongs to the buckets, here and on the servers. The connection stays until the process ends."""
        deadlines.end(id(self))
        if self._buffers:
            self._connection.command("close", {"buckets": list(self._buffers)})
        if self._outbox is not None:
            self._outbox.forget(self._buffers)
        self._buffers.clear()
        self._windows.clear()
