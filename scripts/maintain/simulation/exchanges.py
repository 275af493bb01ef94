"""Workers and servers on sockets of our own, as real code: the connections, the server's rounds and its sums.

A push has a 1 in an element of its own, by rank and step, and the server subtracts: so the weights that come back tell
which pushes are in them, and how often. Workers gather texts now and then, by sums over all of them. Of an asynchronous
job a worker may be lost; the servers' hosts hear of that each at a time of its own. Another may join in its place, with
its rank and a row of its own: `worker 1`, and in row 3 `joiner 3`.
"""
import collections
import functools
import random
from typing import Any, Counter, Deque, Dict, List, Optional, Set, Tuple

import numpy as np

from kvstore import methods
from kvstore.errors import ConfigError, KVStoreError
from kvstore.messages.buckets import Parameter, plan
from kvstore.messages.seam import Setup
from kvstore.optimizers import described, formulas
from scripts.maintain.simulation import stdlib
from scripts.maintain.simulation.files import Null, Sink, WayReader, WayWriter
from scripts.maintain.simulation.loader import Changes, Image
from scripts.maintain.simulation.processes import Both
from scripts.maintain.simulation.system import Host, Process, World

COPIED = ("kvstore.job", "kvstore.transports", "kvstore.weights.servers", "kvstore.engine",
          "kvstore.optimizers.apply")
HOSTS, PORT, LOST = ("10.0.0.1", "10.0.0.2", "10.0.0.3"), 4000, "/tmp/lost"
TIMEOUT_S, MOST_JOINERS = 30.0, 2
WORKERS = ("worker", "joiner")
OF_WORKERS = ("kill worker", "give up worker", "kill leaver", "reset")
KINDS = (*["kill worker"] * 3, *OF_WORKERS, "kill server", "lose host", "pause", "cut", "cut one way", "slow", "late",
         "stranger")


class Run:
    """One history. `broken`: what was promised, and did not hold."""

    def __init__(self, seed: int, changes: Optional[Changes] = None) -> None:
        self.seed, self.world, self.draw, self.changes = seed, World(seed), random.Random(seed), changes
        stdlib.use(self.world)
        draw = self.draw
        self.num_workers, self.num_servers = draw.choice((1, 2, 2, 3, 4)), draw.choice((1, 1, 2))
        self.asynchronous = draw.random() < 0.6
        self.steps, self.step_s = draw.randrange(3, 13), draw.choice((0.02, 0.3))
        codec, codec_weights = (draw.choice(("none", "none", "float16")) for _ in range(2))  # exact for small numbers
        self.method = methods.METHODS["asgd" if self.asynchronous else "ssgd"]
        options: Any = self.method.Options
        self.options = options(codec=codec, codec_weights=codec_weights, reduction="sum", timeout_s=TIMEOUT_S)
        self.num_buckets, self.num_hosts = draw.randrange(1, 4), draw.randrange(1, 4)
        self.behind = 0 if self.asynchronous else draw.choice((0, 0, 1))  # exchanges in flight, as of OD-SGD
        self.broken: List[str] = []
        self.faults: List[str] = []
        self.processes: Dict[str, Process] = {}
        self.ranks = [*range(self.num_workers)]  # of all workers by row: of those that joined, too
        self.lost: Dict[int, float] = {}  # when the job was told, by row
        self.known: Dict[Tuple[int, int], bytes] = {}  # weights by bucket and version
        self.taken: Dict[Tuple[int, int], Tuple[int, int]] = {}  # by row and bucket: own steps in it, version
        self.staleness: Dict[Tuple[int, int], Counter[int]] = collections.defaultdict(collections.Counter)
        self.done: Dict[int, int] = {}  # exit codes of workers, by row
        self.ready = 0  # workers that have met
        self.closing: Set[int] = set()  # rows of workers that are done
        self.slowest = draw.randrange(self.num_workers) if self.asynchronous and draw.random() < 0.5 else -1
        self.leavers = 0  # how many of the next ones are killed as they leave
        self.late: Set[int] = set()  # joiners that came when the others were done
        self.sink = Sink(self.world, "said")
        for module in self.changes or ():  # what is no longer there to change is an error here, not a worker's
            Image(self.changes, copied=COPIED, real=()).load(module)
        self._begin()
        self.world.run(600.0, lambda: len(self.done) == len(self.ranks))
        self._judge()
        self.world.close()

    def expect(self, holds: bool, sentence: str) -> None:
        if not holds:
            self.broken.append(sentence)
            self.world.note(f"BROKEN {sentence}")

    # The job

    def _begin(self) -> None:
        kinds = [self.draw.choice(KINDS) for _ in range(self.draw.choice((0, 1, 1, 1, 2, 3)))]
        names = ["scheduler", *(f"server {rank}" for rank in range(self.num_servers)),
                 *(f"worker {rank}" for rank in range(self.num_workers))]
        self.hosts = {name: self.world.host(HOSTS[self.draw.randrange(self.num_hosts)]) for name in names}
        slow = self.draw.choice(names) if "late" in kinds else ""
        for name in names:
            self._start(name, 3.0 if name == slow else 0.5 * self.draw.random())
        about_s = 1.0 + self.steps * self.step_s * 1.5
        for kind in kinds:
            self.world.after(about_s * self.draw.random(), functools.partial(self._hit, kind, self.draw.random()))

    def _start(self, name: str, after_s: float) -> None:
        what, _, number = name.partition(" ")
        role, row, host = what.replace("joiner", "worker"), int(number or 0), self.hosts[name]
        rank = self.ranks[row] if role == "worker" else row
        local = self.num_hosts == 1
        env = {"DMLC_ROLE": role, "DMLC_PS_ROOT_URI": self.hosts["scheduler"].name, "DMLC_PS_ROOT_PORT": str(PORT),
               "DMLC_NUM_WORKER": str(self.num_workers), "DMLC_NUM_SERVER": str(self.num_servers),
               "DMLC_NODE_HOST": host.name, "ODSGD_SECRET": "s", f"ODSGD_{role.upper()}_RANK": str(rank),
               **({"ODSGD_JOINED": str(row - self.num_workers + 1)} if what == "joiner" else {}),
               **({"DMLC_LOCAL": "1", "ODSGD_COURIERS": f"/tmp/{name.replace(' ', '-')}"} if local else {}),
               **({"ODSGD_LOST": LOST} if self.asynchronous else {})}
        process = Process(host, None, [name], functools.partial(self._main, role, row), env,
                          {0: Null(), 1: self.sink, 2: self.sink}, after_s)
        process.label = process.name = name
        self.processes[name] = process
        if role == "worker":
            process.data["on_end"] = [lambda: self._ended(name, row)]

    def _main(self, role: str, row: int, process: Process) -> int:
        image = Image(self.changes, copied=COPIED, real=())
        if role != "worker":
            sockets = image.load("kvstore.weights.servers.sockets")
            (sockets.introduce if role == "scheduler" else sockets.serve)()
            return 0
        try:
            self._work(image, row)
        except (KVStoreError, ConfigError) as error:
            if "has no store of these buckets" in str(error) and self.closing | set(self.lost) >= set(range(
                    self.num_workers)):
                self.late.add(row)
            image.load("kvstore.job.ending").die(str(error), 70)
        return 0

    def _work(self, image: Image, row: int) -> None:
        engine, agreement = image.load("kvstore.engine.engine"), image.load("kvstore.job.agreement")
        store = image.load("kvstore.transports.sockets").SocketServers(TIMEOUT_S, not self.asynchronous)
        size, begins = (self.num_workers + MOST_JOINERS) * self.steps, row < self.num_workers
        parameters = [Parameter(key, f"w{key}", (size,)) for key in range(self.num_buckets)]
        buckets = plan(parameters, store._connection.keys, 4 * size, whole=True)
        setup = Setup(methods.where(self.method), self.options.plain(), described.describe(formulas.SGD(1.0)), buckets,
                      self.method(self.options, self.num_workers).traffic(whole=True))
        first = store.set_up(setup, lambda bucket: engine.zeros(bucket.size))
        self.ready += begins
        for key, one in first.items():
            self._took(row, -1, key, engine.memory(one.result()).copy(), store.versions()[key] if not begins else 0)
        under_way: Deque[Tuple[int, List[Any]]] = collections.deque()
        for step in range(self.steps):
            stdlib.sleep((1.5 if row == self.slowest else self.step_s) * (0.5 + self.world.random.random()))
            grad = np.zeros(size, np.float32)
            grad[row * self.steps + step] = 1
            under_way.append((step, [store.exchange(bucket, engine.array(grad), 1.0) for bucket in buckets]))
            while len(under_way) > (self.behind if step < self.steps - 1 else 0):
                begun, pending = under_way.popleft()
                for bucket, one in zip(buckets, pending):
                    w = engine.memory(one.result()).copy()
                    version = store.versions()[bucket.id] if self.asynchronous else begun + 1
                    self._took(row, begun, bucket.id, w, version)
            if step % 2 and begins:
                self._gathered(row, agreement.gather_texts(store, f"worker {row} at {step}"), step)
        if self.asynchronous and begins:
            self._counted(row, store.statistics())
        self.closing.add(row)
        if self.leavers:
            self.leavers -= 1
            self._kill_soon(self.world.process().label, int(10 ** (1.5 * self.draw.random())))
        store.close()
        stdlib.sleep(self.world.random.choice((0.0, 0.0, 5.0)))  # the script evaluates, say
        image.load("kvstore.transports.joining").disconnect()

    # What must hold

    def _took(self, row: int, step: int, key: int, w: np.ndarray, version: int) -> None:
        """Each push is in the weights once: all of this worker's own, and those of each other one up to some step."""
        where = f"worker {row}, step {step}, bucket {key}, version {version}"
        counts = (-w).reshape(-1, self.steps)
        up_to = counts.sum(axis=1).astype(int)
        whole = np.arange(self.steps) < up_to[:, None]
        self.expect(bool(np.array_equal(counts, whole)), f"each_push_is_in_once: {where}: {counts.tolist()}")
        self.expect(bool(up_to[row] == step + 1), f"own_pushes_are_in: {where}: {up_to.tolist()}")
        self.expect(int(counts.sum()) == version * (1 if self.asynchronous else self.num_workers),
                    f"versions_count_pushes: {where}: {int(counts.sum())} pushes")
        _, before = self.taken.get((row, key), (0, -1))
        self.expect(version > before, f"versions_grow: {where}, after {before}")
        self.taken[row, key] = step + 1, version
        if step >= 0:
            self.staleness[row, key][version - 1 - before] += 1  # what others have pushed since it took its weights
        known = self.known.setdefault((key, version), w.tobytes())
        self.expect(known == w.tobytes(), f"versions_have_one_value: {where}")

    def _gathered(self, rank: int, texts: List[str], step: int) -> None:
        for other, text in enumerate(texts):
            self.expect(text == f"worker {other} at {step}" or (text == "" and other in self.lost),
                        f"texts_are_whole: worker {rank}, step {step}: of worker {other} {text!r}")

    def _counted(self, rank: int, statistics: Dict[int, Dict[str, Any]]) -> None:
        """The staleness that servers count for a worker is that of its gradients, push by push."""
        for key, one in statistics.items():
            counted = {tau: count for worker_rank, tau, count in one["staleness"] if worker_rank == rank}
            self.expect(counted == self.staleness[rank, key], f"staleness_is_counted: worker {rank}, bucket {key}: "
                        f"{counted} in place of {dict(self.staleness[rank, key])}")

    def _ended(self, name: str, row: int) -> None:
        process = self.processes[name]
        self.world.after(0.05, lambda: self.done.__setitem__(row, process.code if process.code is not None else -9))

    def _judge(self) -> None:
        """A worker that was not hit ends with 0, unless a process was killed without which the job cannot go on."""
        killed = [fault.partition(":")[0].split() for fault in self.faults if fault.startswith(("kill", "give up"))]
        hit = {int(words[-1]) for words in killed if words[-2] in WORKERS}
        fatal = [one for one in killed if one[-2] == "server" or not self.asynchronous or "early" in self.faults]
        self.expect(len(self.done) == len(self.ranks), f"ends: {sorted(self.done)} of {len(self.ranks)} have")
        for row, code in self.done.items():
            if row not in hit | self.late and not fatal:
                self.expect(code == 0, f"goes_on: worker {row} ended with {code}, and only {killed} were hit")
        if not killed:
            self.expect(set(self.taken.values()) <= {(self.steps, version) for _, version in self.taken.values()},
                        f"trains_to_the_end: {self.taken}")
        for line in self.world.history:
            if "TRACEBACK" in line or "Traceback (most recent" in line:
                self.expect(False, f"raises_nothing: {line}")
                break

    # Faults

    def _hit(self, kind: str, where: float) -> None:
        workers = [name for name, process in self.processes.items() if name.startswith(WORKERS) and not process.dead]
        if not workers:
            return
        name = workers[int(where * len(workers))]
        host = self.hosts[name]
        if kind in OF_WORKERS:
            self._hit_worker(kind, name, where)
        elif kind == "kill server":
            self._kill(f"server {int(where * self.num_servers)}")
        elif kind == "lose host":
            self._lose(host)
        elif kind == "pause":
            self._pause(list(self.processes)[int(where * len(self.processes))])
        elif kind in ("cut", "cut one way", "slow"):
            self._hit_links(kind, host)
        elif kind == "stranger":
            self._note("stranger")
            Process(host, None, ["stranger"], self._stranger, {}, {0: Null(), 1: Null(), 2: Null()})

    def _hit_worker(self, kind: str, name: str, where: float) -> None:
        if kind == "kill worker":  # at one of its calls from now on
            self._kill_soon(name, int(10 ** (2 * where)))
        elif kind == "kill leaver":
            self.leavers += 1
        elif kind == "reset":
            self._reset(name)
        else:  # its host is cut off from the launcher's, or held up: it goes on meanwhile
            self._note(f"give up {name}")
            self._go_on_without([name])

    def _hit_links(self, kind: str, host: Host) -> None:
        self._note(f"{kind} {host.name}")
        links = [self.world.link(*pair) for other in HOSTS if other != host.name
                 for pair in ((host.name, other), (other, host.name))]
        for link in links[::2 if kind == "cut one way" else 1]:
            link.cut, link.slow_s = kind != "slow", 0.2
        for link in links:
            self.world.after(6.0, link.heal)

    def _pause(self, name: str) -> None:
        self._note(f"pause {name}")
        self.processes[name].signal(19)
        self.world.after(4.0, lambda: self.processes[name].signal(18))

    def _note(self, what: str) -> None:
        self.faults.append(f"{what}: at {self.world.now:.3f} s")
        self.world.note(f"FAULT {what}")

    def _kill(self, name: str) -> None:
        if not self.processes[name].dead:
            self._note(f"kill {name}")
            self.processes[name].end(-9)
            self._go_on_without([name])

    def _kill_soon(self, name: str, calls: int) -> None:
        victim = self.processes[name]
        victim.hit_at_call, victim.hit = victim.calls + 1 + calls, functools.partial(self._kill, name)

    def _reset(self, name: str) -> None:
        """A worker's connection to another host breaks."""
        process = self.processes[name]
        ways = [(file.reader.way, file.writer.way) for file in process.fds.values() if isinstance(file, Both)
                and isinstance(file.reader, WayReader) and isinstance(file.writer, WayWriter)]
        if ways:
            self._note(f"kill a connection of {name}")
            process.data["on_end"].append(lambda: self.world.after(0.05, lambda: self._failed(name)))
            for way in self.draw.choice(ways):
                way.reset()

    def _failed(self, name: str) -> None:
        """The launcher hears of it, unless it is done."""
        if self.processes[name].code:
            self._go_on_without([name])

    def _lose(self, host: Host) -> None:
        """All processes of a host are gone at once, and no connection hears of it."""
        gone = [name for name, process in self.processes.items() if process.host is host and not process.dead]
        host.lose_power()
        for name in gone:
            self._note(f"kill {name}")
            if name.startswith(WORKERS):
                self.done[int(name.split()[1])] = -9
        self._go_on_without(gone)

    def _go_on_without(self, names: List[str]) -> None:
        """The launcher tells the job that workers are lost, or ends it."""
        workers = [name for name in names if name.startswith(WORKERS)]
        if self.ready < self.num_workers or not self.asynchronous or workers != names:
            self.faults.append("early")
            self._end_all_later()
            return
        for row in (int(name.split()[1]) for name in workers):
            self.lost[row], rank = self.world.now, self.ranks[row]
            for host in self.world.hosts.values():
                at_s = self.draw.choice((0.3, 0.3, 0.3, 6.0)) + 1.5 * self.draw.random()
                self.world.after(at_s, functools.partial(self._tell, host, f"{rank}"))
            if self.draw.random() < 0.9 and rank and self.options.codec_weights == "none":  # as `odsgd join` has it
                self.world.after(0.5 + 3 * self.draw.random(), functools.partial(self._join, rank))

    def _join(self, rank: int) -> None:
        """Somebody has a worker take the place of a lost one, unless another has it by now."""
        row = len(self.ranks)
        hosts = [host for host in self.world.hosts.values() if host.up]
        there = {self.ranks[other] for other in set(range(row)) - set(self.done) - set(self.lost)}
        if row < self.num_workers + MOST_JOINERS and hosts and there and rank not in there:
            self.ranks.append(rank)
            self.hosts[f"joiner {row}"] = self.draw.choice(hosts)
            self.world.note(f"joiner {row} starts as worker {rank}")
            self._start(f"joiner {row}", 0.5 * self.draw.random())

    @staticmethod
    def _tell(host: Host, line: str) -> None:
        """As the launcher's agents do (`agent._append_lines`)."""
        host.files[LOST] = bytearray(bytes(host.files.get(LOST) or b"") + f"{line}\n".encode())

    def _end_all_later(self) -> None:
        """The launcher ends what is left, unless it has ended by itself."""
        for process in self.processes.values():
            self.world.after(3.0, functools.partial(process.signal, 15))

    def _stranger(self, process: Process) -> int:
        """Connect to all listeners of this host, and send bytes that no process of the job would send."""
        for at in list(process.host.listeners):
            connection = _call(process, at)
            if connection and self.draw.random() < 0.7:
                connection.send(bytes(self.draw.randrange(256) for _ in range(self.draw.choice((3, 1024, 3000)))))
        stdlib.sleep(self.draw.choice((0.01, 5.0)))
        return 0


def _call(process: Process, at: Any) -> Any:
    from scripts.maintain.simulation import processes
    try:
        if isinstance(at, str):
            connection = processes.Socket()
            connection.connect(at)
            return connection
        return processes.create_connection((process.host.name, at), 1.0)
    except OSError:
        return None
