"""The server role in a job on ps-lite (`__main__` starts it), and what it has in common with that on sockets.

On import MXNet would enter its own server loop, unpickle every command, and print and ignore exceptions of updates. So
the role is entered here, with a controller that acts on signed commands only (`commands`) and an updater whose
exceptions end the process.

The loop stays MXNet's: its one thread receives, sums the workers' pushes of a key, calls `_update` when all are there,
and answers. Where a store has a codec, the threads of its connections call `_update`, too (`hub`). One lock lets
commands and updates take place one at a time.
"""
import collections
import contextlib
import ctypes
import math
import threading
import traceback
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from kvstore._version import running_versions
from kvstore.engine.engine import NDArray
from kvstore.errors import EXIT_FAILURE, ConfigError, DivergedError, ProtocolError
from kvstore.job import commands, ending, environment
from kvstore.job.deadlines import deadlines
from kvstore.job.pulse import connecting, pulse
from kvstore.job.report import report
from kvstore.messages.buckets import WIRE_DTYPE
from kvstore.messages.header import pack_piece
from kvstore.messages.seam import TrafficSettings
from kvstore.options import DEFAULT_TIMEOUT_S
from kvstore.tracing import recorder, wraps
from kvstore.weights.servers.hub import Hub
from kvstore.weights.servers.shard import Shard
from kvstore.weights.servers.sums import OrderedSums

_PICKLED_OPTIMIZER = b"ccopy_reg\n"  # so begins what `set_optimizer` of MXNet's own stores sends
_MALLOC = {-1: 2 ** 30, -3: 32 * 2 ** 20}  # glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


def fatal(function: Callable[..., Any]) -> Callable[..., Any]:
    """MXNet ignores exceptions from `function`; make them end the process, and with it the job."""
    def guarded(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (ConfigError, DivergedError) as error:
            ending.die(str(error), EXIT_FAILURE)
        except BaseException:  # nothing may pass through C++
            ending.die(traceback.format_exc(), EXIT_FAILURE)
    return guarded


class Server:
    """One server process: routes pushes and commands to the shard.

    Beside the keys of buckets there are two other kinds. The answer to a key of sums is the sum of what all workers
    pushed. The last kind is one key per server, its answer array: ps-lite commands cannot carry an answer, so the
    server writes the answer to a command that asks for something (`export`, `statistics` …) into the array stored under
    this key, piece by piece, and the worker pulls the array.
    """

    def __init__(self, store: Any) -> None:
        self._store = store  # knows its rank once its loop runs
        self._verifier = commands.Verifier(commands.job_key())
        self._shard: Shard  # from `hello` on
        self._sums: Dict[int, OrderedSums] = {}
        self._synchronous = True
        self._all_workers: Set[int] = set()
        self._finished_workers: Set[int] = set()
        self._closed: Dict[Tuple[int, ...], Set[int]] = collections.defaultdict(set)  # by buckets: who closed them
        self._lock = threading.RLock()
        self._timeout_s = DEFAULT_TIMEOUT_S
        self._answer_key = -1
        self._answer_array: NDArray  # from its first push on
        self._outgoing: Dict[Tuple[int, int], bytes] = {}  # by the worker that asked, and the number of its question
        self._hub: Optional[Hub] = None  # where a store takes direct connections

    def run(self) -> None:
        """Serve until the workers have finished."""
        from kvstore.engine._mxnet import mx
        signature = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        controller = signature(fatal(lambda head, body, _: self._command(body)))
        mx.base.check_call(mx.base._LIB.MXKVStoreRunServer(self._store.handle, controller, None))

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        """Do one thing at a time; the pulse counts its time as work."""
        with self._lock, pulse.doing("serving"):
            yield
            pulse.moved(pulse.at + 1)

    def _command(self, body: bytes) -> bytes:
        with self._serving():
            return self._carry_out(body)

    def _carry_out(self, body: bytes) -> bytes:
        """Carry out a command. Its answer is empty for most of them."""
        if body.startswith(_PICKLED_OPTIMIZER):
            raise ProtocolError("a worker's script uses a store of MXNet's own (`dist_sync` or the like) in a job of "
                                "odsgd; put `import odsgd` before `import mxnet` in it and ask for a store of odsgd's: "
                                "`ssgd` in place of `dist_sync`, `asgd` in place of `dist_async`")
        sender, name, payload = self._verifier.verify(body.decode("ascii", "replace"))
        self._heard()
        if name == "hello":
            self._hello(**payload)
        elif name == "leave":
            self._leave(sender)
        elif name == "open_direct":
            self._open_direct(**payload)
        elif name in ("export", "statistics", "address", "software", "opened"):
            if name == "opened":
                self._taken_up(sender)
            return self._answer(sender, name, **payload)
        elif name == "taken":
            del self._outgoing[sender, payload["number"]]
        elif name == "close":
            self._close(sender, payload["buckets"])
        else:
            self._tell_shard(name, payload)
        return b""

    def _tell_shard(self, name: str, payload: Dict[str, Any]) -> None:
        if name == "open":
            self._extend_silence_timeout(payload["options"]["timeout_s"])
        self._shard.command(name, payload)
        if name == "rest" and self._hub is not None:
            self._hub.answer_waiting()

    def _extend_silence_timeout(self, timeout_s: float) -> None:
        """A worker waits `timeout_s`. A server waits longer: the worker knows what it waited for, and speaks first."""
        self._timeout_s = max(self._timeout_s, 1.5 * timeout_s + 5)
        self._heard()

    def _heard(self) -> None:
        """A worker is alive. A server that hears nothing for longer than workers wait has no use and ends; not under
        our launcher, which knows who is alive: workers may compute for long between two rounds.
        """
        patience_s = math.inf if environment.launched() else self._timeout_s
        deadlines.begin("silence", patience_s, f"no worker has said anything for {self._timeout_s:g} s; they have "
                        "ended without leaving, or `timeout_s` is shorter than an evaluation or the steps of a round")

    def _hello(self, num_workers: int, synchronous: bool, timeout_s: float, trace_folder: Optional[str],
               **special_keys: List[int]) -> None:
        """The first command of a job."""
        rank = self._store.rank
        self._shard = Shard(rank, num_workers, commands.trusted())
        pulse.more["stale"] = self._shard.stale
        self._synchronous = synchronous
        self._all_workers = set(range(num_workers))
        self._begin(**special_keys)
        self._timeout_s = 0.0
        self._extend_silence_timeout(timeout_s)
        self._handle_push = self._shard.handle_push
        if commands.trusted():  # else anyone could say where to write
            recorder.folder = trace_folder
        on = recorder.begin("server", rank, num_workers)
        if on is not None:
            self._handle_push = wraps.server_update(on, self._handle_push, synchronous)
        report("joined")

    def _begin(self, **special_keys: List[int]) -> None:
        """Take pushes: MXNet lets an updater be installed only inside a command."""
        self._sums = {key: OrderedSums(len(self._all_workers)) for key in special_keys["sums"]}
        self._answer_key = special_keys["answer_keys"][self._store.rank]
        self._store._set_updater(fatal(self._update))

    def _open_direct(self, traffic: Dict[str, Any], buckets: Dict[str, List[int]]) -> None:
        """Take the messages of a store's buckets on direct connections, beside MXNet's loop."""
        if self._hub is None:
            self._hub = Hub(len(self._all_workers), self._timeout_s, fatal(self._update),
                            fatal(self._shard.may_answer_fetch), self._lock)
        mine = {int(key): size for key, (rank, size) in buckets.items() if rank == self._shard.server_rank}
        weights = self._hub.open(mine, TrafficSettings(**traffic), self._shard.context(mine))
        if traffic["codec_weights"] != "none":
            self._shard.add_to_export(weights)

    def _close(self, sender: int, buckets: List[int]) -> None:
        """A worker has closed a store. After the last worker this server forgets its buckets; MXNet keeps its arrays.

        If a worker is lost, the buckets stay: a worker that has been given up may still push.
        """
        store = tuple(buckets)
        self._closed[store].add(sender)
        if self._closed[store] == self._all_workers:
            del self._closed[store]
            self._shard.forget(buckets)
            if self._hub is not None:
                self._hub.forget(buckets)

    def _taken_up(self, sender: int) -> None:
        """A worker joins at this rank: stores that the worker before it has closed are open again."""
        self._finished_workers.discard(sender)
        for closed in self._closed.values():
            closed.discard(sender)

    def _leave(self, sender: int) -> None:
        """One worker has finished. When every worker that is not lost has finished, this server reports `done`.

        It keeps running, because MXNet must still answer this command. The launcher ends it after the workers.
        """
        self._finished_workers.add(sender)
        self._tell_shard("rest", {"worker_rank": sender, "buckets": self._shard.buckets()})
        if self._finished_workers >= self._all_workers - environment.lost_workers():
            recorder.end()
            deadlines.end("silence")
            report("done")

    def _update(self, key: int, pushed: NDArray, stored: NDArray) -> None:
        with self._serving():
            self._heard()
            if key in self._sums:
                self._sum(key, pushed, stored)
            elif key == self._answer_key:
                self._answer_array = stored
            else:
                self._handle_push(key, pushed, stored)
                if self._hub is None:  # with a hub, its connections count the bytes
                    pulse.nbytes += WIRE_DTYPE.itemsize * stored.size * (
                        len(self._all_workers) if self._synchronous else 1)

    def _sum(self, key: int, pushed: NDArray, stored: NDArray) -> None:
        if recorder.on is not None:
            recorder.on.flush()  # the workers may be about to read its file
        if self._synchronous:
            pushed.copyto(stored)  # MXNet has added up
        else:
            self._sums[key].receive(pushed, stored)

    def _answer_to(self, name: str) -> bytes:
        if name == "software":
            return running_versions().encode()
        if name == "address" and self._hub:
            return self._hub.address.encode()
        return getattr(self._shard, name)()

    def _answer(self, sender: int, name: str, number: int, chunk: int) -> bytes:
        """Write piece number `chunk` of the answer to command `name` into the answer array.

        The answer is the one of piece 0. It stays here until the worker has `taken` it.
        """
        if chunk == 0:
            self._outgoing[sender, number] = self._answer_to(name)
        self._answer_array[:] = pack_piece(sender, chunk, self._outgoing[sender, number])
        self._answer_array.wait_to_read()
        return b""


def begin() -> None:
    """What every server does first.

    Let glibc keep the memory of past messages. It would give large blocks back to the kernel, which clears the next
    block page by page: a quarter of a server's time with buckets of 2 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: None)
    for parameter, value in _MALLOC.items():
        mallopt(parameter, value)
    connecting()
    deadlines.begin("silence", DEFAULT_TIMEOUT_S, "no worker has asked this server to begin")


def serve() -> None:
    """Be a server, until the job is over."""
    from kvstore.engine._mxnet import mx
    begin()
    Server(mx.kvstore.create("dist_async")).run()
