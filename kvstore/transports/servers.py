"""Parameter servers as a transport: one store's buckets, on this process's place in the job.

There are two kinds of place: MXNet's ps-lite (`pslite`), and sockets of our own (`sockets`). Messages with a codec, or
of a method with a quorum, go over sockets in both.
"""
import base64
import dataclasses
import json
from typing import Any, Callable, ClassVar, Dict, List, Optional, Sequence, Tuple, Type

import numpy as np

from kvstore import methods
from kvstore.engine.engine import NDArray
from kvstore.errors import ConfigError, shown
from kvstore.job import agreement, commands, environment
from kvstore.job.deadlines import deadlines
from kvstore.job.pulse import pulse
from kvstore.job.report import report
from kvstore.messages.buckets import Bucket, Parameter
from kvstore.messages.header import BEGIN, HEADER
from kvstore.messages.seam import Export, Pending, Setup, State, TrafficSettings
from kvstore.options import DEFAULT_TIMEOUT_S
from kvstore.state.npz import to_bytes
from kvstore.transports import joining
from kvstore.transports.buffers import BucketBuffers, Buffer, Buffered, VersionedAnswer, Window
from kvstore.transports.joining import Joined
from kvstore.transports.outbox import Outbox
from kvstore.transports.sizing import on_servers, window_nbytes

COMMAND_NBYTES = 3 * 256 * 1024  # bytes of a saved state that one command carries


class ParameterServers(Buffered):
    """One store on the place of this process. A subclass says how the process joins."""

    place: ClassVar[Type[Joined]]
    _always_direct = False  # whether messages without a codec go over our own connections, too

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, synchronous: bool = True) -> None:
        self._connection: Any = joining.shared(self.place, timeout_s, synchronous)
        self._timeout_s, self.joins = timeout_s, environment.joined() > 0
        super().__init__(self._connection.worker_rank, synchronous)
        self.num_workers, self.num_servers = self._connection.num_workers, self._connection.num_servers
        self._windows: List[Window] = []  # by server
        self._outbox: Optional[Outbox] = None  # for messages that go over our own connections
        self._quorum = 0

    def _command(self, name: str, payload: Dict[str, Any]) -> None:
        self._connection.command(name, payload, self._timeout_s)

    def _read_answers(self, name: str) -> List[bytes]:
        return self._connection.answers(name, self._timeout_s).texts()

    def plan(self, parameters: Sequence[Parameter], traffic: TrafficSettings) -> List[Bucket]:
        return on_servers(parameters, traffic, self._connection.keys, self.num_workers,
                          lambda: self._connection.pace(self._timeout_s))

    def set_up(self, setup: Setup, weights: Callable[[Bucket], NDArray]) -> Dict[int, Pending]:
        if setup.method.startswith("__main__:"):
            raise ConfigError(f"method {setup.method[9:]} is defined in the script itself, which servers cannot "
                              "import; move it to a file of its own")
        methods.load(setup.method, commands.trusted())  # complains here as the servers would
        if self.worker_rank == 0:
            self._command("open", setup.command())
        self._quorum = setup.traffic.quorum
        self._buffers = {bucket.id: BucketBuffers(weights(bucket)) for bucket in setup.buckets}
        under_way = window_nbytes(sum(bucket.size for bucket in setup.buckets), setup.traffic.waits)
        self._windows = [Window(under_way) for _ in range(self.num_servers)]
        if self.joins:
            self._take_up(setup)
        elif setup.traffic.own_connections or self._always_direct:
            self._set_up_direct(setup)
        else:
            with deadlines.waiting_for("the start of the global weights", self._timeout_s):
                messages = [buffers.last.whole for buffers in self._buffers.values()]
                self._connection.native.init(list(self._buffers), messages)
        report("joined")  # from here on the job can go on without this worker
        deadlines.follow(id(self), self._timeout_s, self._under_way, self._overdue)
        return {key: Pending(buffers.last.payload) for key, buffers in self._buffers.items()}

    def _set_up_direct(self, setup: Setup) -> None:
        """Let the servers take messages on connections of our own. The first of them are worker 0's weights."""
        shared, first = self._connection, self.worker_rank == 0
        if first:
            self._command("open_direct", {"traffic": dataclasses.asdict(setup.traffic), "buckets": {
                bucket.id: [bucket.server_rank, bucket.size] for bucket in setup.buckets}})
        if shared.outbox is None:
            addresses = b"\n".join(self._read_answers("address")) if first else b""
            shared.outbox = Outbox(agreement.from_worker_0(self, addresses).decode().split("\n"),
                                   self.worker_rank, self._timeout_s)
        self._outbox = shared.outbox
        with deadlines.waiting_for("the start of the global weights", self._timeout_s):
            for bucket in setup.buckets:
                message = self._buffers[bucket.id].last
                w = message.there()[:-HEADER]
                if setup.traffic.codec_weights != "none":  # both ends begin alike, whatever each resumes from
                    w[:] = self.total(w if first else np.zeros_like(w))
                self._outbox.open(bucket, setup.traffic, w)
                if first:
                    message.floats[-1] = BEGIN
                    self._outbox.send(bucket, message)
            for bucket in setup.buckets:
                self._buffers[bucket.id].last.there()[-HEADER:] = 0
        self.total(np.zeros(1))  # the servers have them

    def _take_up(self, setup: Setup) -> None:
        """Join a running job: it must have this setup, and its weights become this worker's."""
        mine = json.loads(json.dumps(setup.command()))
        theirs = [next((one for one in json.loads(answer) if one["buckets"].keys() & mine["buckets"].keys()), None)
                  for answer in self._read_answers("opened")]
        differs = _difference(theirs[0], mine) if all(theirs) else (
            "it has no store of these buckets, or is done with it")
        if differs:
            raise ConfigError(f"this worker cannot join, since the job trains otherwise: {differs}; a worker that "
                              "joins runs the same script with the same settings")
        self._outbox = self._connection.outbox
        for bucket in setup.buckets:
            buffers = self._buffers[bucket.id]
            self._outbox.open(bucket, setup.traffic, buffers.last.there()[:-HEADER])
            self.fetch(bucket, buffers.last.payload).result().copyto(buffers.last.payload)

    def use(self, setup: Setup, weights: Callable[[Bucket], NDArray], leads: bool) -> None:
        if leads:
            self._command("use", setup.command())

    def codec_state(self, bucket: Bucket) -> Dict[str, np.ndarray]:
        return {} if self._outbox is None else self._outbox.codec_state(bucket)

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

    def fetch(self, bucket: Bucket, after: NDArray, end_round: bool = False, looks: bool = False) -> Pending:
        buffers = self._buffers[bucket.id]
        send = buffers.compose_fetch(after, self._fetch_tag(end_round, looks))
        return self._ask(buffers, bucket, buffers.last, send)

    def _ask(self, buffers: BucketBuffers, bucket: Bucket, before: Buffer, send: Buffer) -> VersionedAnswer:
        self._send(bucket, send)
        send.version.copyto(buffers.latest)  # messages that are composed from here on leave after this answer
        return VersionedAnswer(Pending(send.payload, [before.payload]), send, buffers)

    def _send(self, bucket: Bucket, send: Buffer) -> None:
        """One message there, one back into the same buffer; by MXNet's own store, if there is no outbox."""
        if self._outbox is None:
            pulse.nbytes += send.nbytes
            self._connection.native.pushpull(bucket.id, send.whole, out=send.whole)
        else:
            self._outbox.send(bucket, send)

    def rest(self) -> None:
        if self._quorum > 1 and self._buffers and not self.joins:  # a joiner meets nobody
            self._command("rest", {"worker_rank": self.worker_rank, "buckets": list(self._buffers)})

    def total(self, array: np.ndarray) -> np.ndarray:
        return self._connection.total(array, self._timeout_s)

    def statistics(self) -> Dict[int, Dict[str, Any]]:
        return {int(key): one for answer in self._read_answers("statistics") for key, one in json.loads(answer).items()}

    def exporting(self) -> Export:
        return self._connection.answers("export", self._timeout_s)

    def import_state(self, state: Optional[State], buckets: Sequence[Bucket]) -> None:
        if state is None:
            return
        for server_rank in range(self.num_servers):
            data = to_bytes({bucket.id: state[bucket.id] for bucket in buckets if bucket.server_rank == server_rank})
            for start in range(0, len(data), COMMAND_NBYTES):
                piece = base64.b64encode(data[start:start + COMMAND_NBYTES]).decode()
                self._command("import", {"piece": piece, "last": start + COMMAND_NBYTES >= len(data),
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
            self._command("close", {"buckets": list(self._buffers)})
        if self._outbox is not None:
            self._outbox.forget(self._buffers)
        self._buffers.clear()
        self._windows.clear()


def _difference(there: Any, here: Any, where: str = "") -> str:
    """Where two JSON values first differ, in words; empty if nowhere."""
    if isinstance(there, dict) and isinstance(here, dict):
        names = sorted({*there, *here})
        return next(filter(None, (_difference(there.get(name), here.get(name), f"{where} {name}".strip())
                                  for name in names)), "")
    return "" if there == here else f"{where} is {shown(there)} there and {shown(here)} here"
