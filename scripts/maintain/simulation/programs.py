"""What runs in the simulated world: the launcher and the agents as they ship; ssh, workers and servers as models.

A model is a short program on the real reports, pulse and deadlines (`kvstore/job`). A worker's step takes a drawn time;
its gradient is a whole number by rank and step, so that a sum tells what is in it.
"""
import collections
import functools
import random
import signal
from subprocess import PIPE
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Set, Tuple

from kvstore.errors import EXIT_FAILURE, EXIT_USAGE, KVStoreError
from scripts.maintain.simulation import stdlib
from scripts.maintain.simulation.files import File, Link, Way
from scripts.maintain.simulation.loader import Image
from scripts.maintain.simulation.processes import Popen
from scripts.maintain.simulation.system import Host, Process, World

OWN = ("kvstore.job.report", "kvstore.job.deadlines", "kvstore.job.pulse", "kvstore.job.aside", "kvstore.job.ending",
       "kvstore.job.environment")
"""Modules of which each process has its own copy, since they keep something."""
UNIT = 12
"""What a step's gradients come to for each unit of the step's number, whatever the number of workers (1 to 4)."""
RUN = "/home/run"
MPI_SEARCHES_S, MPI_GAVE_UP = 9.0, 15
"""After this time, and with this exit code, MPI ends a worker that does not reach the others at its start."""
ALIVE_EVERY_S, ALIVE_TIMES = 15.0, 3
"""ssh's ServerAliveInterval as the launcher sets it, and ServerAliveCountMax."""


class Training:
    """What all workers of a job know: how long it is, and what it takes. `log` is for the promises."""

    def __init__(self, world: World, image: Image, draw: random.Random) -> None:
        self.world, self.image = world, image
        self.iterations, self.every = draw.randrange(6, 26), draw.choice((3, 5, 8))
        self.step_s = draw.choice((0.05, 0.2, 0.6))
        self.timeout_s = draw.choice((30.0, 600.0))
        self.import_s = draw.choice((0.5, 2.0))
        self.alone: Optional[Tuple[int, int, str, float]] = None  # which rank, from which step, does what how long
        self.seldom = draw.random() < 0.9  # whether deadlines and the launcher are looked at less often than they ship
        self.asynchronous = False
        self.deaf = False  # whether workers ignore SIGTERM
        self.disk = world.host("10.0.0.9")  # the run's folder: one disk that all hosts share
        self.fabrics: Dict[str, Fabric] = {}
        self.saved: List[Tuple[int, str, int, float]] = []  # (attempt, process, iteration, time) of those told of
        self.resumed: List[Tuple[int, int, int]] = []  # (attempt, iteration, newest whole one then)
        self.steps: List[Tuple[int, int, int, float]] = []  # (attempt, rank, step, time) that began
        self.finals: List[Tuple[int, int, int]] = []  # (attempt, rank, sum) at a worker's end
        self.begun: Dict[int, int] = {}  # how many workers an attempt has
        self.stood: Dict[str, Tuple[str, int]] = {}  # who stood still: at what, and after so many steps
        self.fewer: Dict[str, int] = {}  # who has fewer batches than the others, and by how many
        self.pushes: Dict[Tuple[str, int, int], int] = collections.Counter()
        self.born: Callable[[Process], object] = lambda process: None
        self.reach: Callable[[str], object] = lambda what: None

    @property
    def about_s(self) -> float:
        """How long a job may take that nothing hits."""
        return 3 + self.import_s + self.iterations * self.step_s * 1.6 + self.alone_s

    @property
    def alone_s(self) -> float:
        return self.alone[3] if self.alone else 0.0

    def draw_alone(self, job: Any, draw: random.Random) -> None:
        """Perhaps one worker begins, evaluates or writes for longer than --hang-timeout, while the others wait."""
        if draw.random() < 0.35 / job.hang_timeout_s:
            activity, times = draw.choice(("training", "evaluation", "checkpoint")), 1.1 + 0.4 * draw.random()
            step = draw.randrange(3, self.iterations) if activity != "training" else 1
            lasts_s = min(times * job.hang_timeout_s, 0.8 * self.timeout_s)
            self.alone = draw.randrange(job.num_workers), step, activity, lasts_s

    def fabric(self, process: Process) -> "Fabric":
        """The network of this attempt's processes."""
        return self.fabrics.setdefault(process.env["ODSGD_SECRET"], Fabric(self.world))

    def newest(self) -> Tuple[int, int]:
        """The newest whole checkpoint: its iteration and its sum."""
        found = [data for path, data in self.disk.files.items() if path.startswith(f"{RUN}/whole-") and data]
        return max(((int(text[0]), int(text[1])) for text in (bytes(data).split() for data in found)), default=(0, 0))


class Box(File):
    """What has come for a process."""

    def __init__(self) -> None:
        super().__init__()
        self.items: Deque[Tuple[Any, ...]] = collections.deque()

    @property
    def readable(self) -> bool:
        return bool(self.items)


class Fabric:
    """Messages between the processes of one attempt, in order between two of them. None is lost while both live."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.nodes: Dict[str, Process] = {}
        self.before: Dict[str, Process] = {}  # those in whose place others have joined
        self.early: Dict[str, List[Tuple[Process, Tuple[Any, ...]]]] = collections.defaultdict(list)

    def add(self, name: str, process: Process) -> Box:
        """It binds; who has called before tries again."""
        if name in self.nodes:
            self.before[name] = self.nodes[name]
        self.nodes[name] = process
        box = process.data["box"] = Box()
        for source, message in self.early.pop(name, ()):
            self.link(source, process).deliver(functools.partial(self.arrive, process, message))
        return box

    def link(self, source: Process, target: Process) -> Link:
        return self.world.link(f"data {source.host.name}", f"data {target.host.name}")

    def send(self, source: Process, to: str, *message: Any) -> None:
        if to in self.nodes:
            self.carry(source, self.nodes[to], message)
        else:
            self.early[to].append((source, message))

    def carry(self, source: Process, target: Process, message: Tuple[Any, ...]) -> None:
        self.link(source, target).carry(lambda: self.arrive(target, message))

    @staticmethod
    def arrive(target: Process, message: Tuple[Any, ...]) -> None:
        if not target.dead:
            target.data["box"].items.append(message)
            target.data["box"].changed()


def launcher(training: Training, job: Any) -> Any:
    """`odsgd launch`, from where its options are read."""
    def main(process: Process) -> int:
        process.handlers[signal.SIGINT] = _interrupt
        training.image.load("odsgd.launch.early").end_on_signals()
        training.born(process)
        supervisor = training.image.load("odsgd.launch.supervisor")
        try:
            try:
                return int(supervisor.run(job))
            except KVStoreError as error:
                stdlib.stderr.write(f"odsgd launch: {error}\n")
                return EXIT_FAILURE
        except BrokenPipeError:  # as `odsgd.cli.ended`
            return 128 + signal.SIGPIPE
    return main


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def table(training: Training) -> Any:
    """Which program a command line starts."""
    def find(argv: Sequence[str]) -> Any:
        if argv[0] == "ssh":
            return lambda process: ssh(training, process, argv)
        if "odsgd.launch.agent" in argv[-1]:
            return lambda process: _agent(training, process)
        if list(argv[1:3]) == ["-m", "kvstore.weights.servers"]:
            return lambda process: _node(training, process)
        if argv[0] == "train":
            return lambda process: _node(training, process)
        raise FileNotFoundError(2, "No such file or directory", argv[0])
    return find


def _agent(training: Training, process: Process) -> int:
    process.label = f"agent {process.host.name}"
    training.born(process)
    process.handlers[signal.SIGPIPE] = signal.SIG_IGN
    stdlib.sleep(process.host.late_s)
    return int(training.image.load("odsgd.launch.agent.__main__").main())


# ssh

def ssh(training: Training, process: Process, argv: Sequence[str]) -> int:
    """Carries the standard streams of a command on another host; its settings are the launcher's."""
    world = process.world
    address = argv[-2].rpartition("@")[2]
    process.label = f"ssh {address}"
    process.handlers[signal.SIGPIPE] = signal.SIG_DFL
    training.born(process)
    within_s = float(next(word for word in argv if word.startswith("ConnectTimeout=")).partition("=")[2])
    target = world.host(address)
    out, back = world.link(process.host.name, target.name), world.link(target.name, process.host.name)
    stdlib.sleep(0.1 + world.random.random() * 0.4)
    began = world.now
    while not target.up or target.frozen or out.cut or back.cut:
        if world.now - began >= within_s:
            return _complain(f"ssh: connect to host {target.name} port 22: Connection timed out")
        stdlib.sleep(1.0)
    if argv[-1] == "true":
        return 0
    if argv[-1].startswith("exec sh"):
        stdlib.stdout.write("odsgd has looked\n")
        return 0
    session = Session(process.host, target)
    words = ["python", "-m", "odsgd.launch.agent"]
    Process(target, None, ["sshd"], lambda sshd: session.serve(sshd, words), {}, {}, 0.05)
    return session.call(process)


def _complain(text: str) -> int:
    stdlib.stderr.write(text + "\n")
    return 255


class Session:
    """One connection of ssh: a way there, and two back."""

    def __init__(self, here: Host, there: Host) -> None:
        self.world = here.world
        self.stdin = Way(here.world, here, there)
        self.stdout, self.stderr = Way(here.world, there, here), Way(here.world, there, here)
        self.code: Optional[int] = None
        self.here, self.there = here, there

    def reset(self) -> None:
        for way in (self.stdin, self.stdout, self.stderr):
            way.reset()

    def call(self, process: Process) -> int:
        """The local end."""
        process.data["session"] = self
        fds = [process.install(end) for end in (self.stdin.writer, self.stdout.reader, self.stderr.reader)]
        over = Ends()
        process.thread(functools.partial(_copy, 0, fds[0], over, close=True))
        for source, target in ((fds[1], 1), (fds[2], 2)):
            process.thread(functools.partial(_copy, source, target, over))
        silent = 0.0
        while over.told.count("end") < 2:
            if "error" in over.told:
                return _complain(f"client_loop: connection to {self.there.name} was reset")
            over.look()
            links = self.world.link(self.here.name, self.there.name), self.world.link(self.there.name, self.here.name)
            away = not self.there.up or self.there.frozen or any(link.cut for link in links)
            silent = (silent or self.world.now) if away else 0.0
            if silent and self.world.now - silent > ALIVE_EVERY_S * ALIVE_TIMES:
                return _complain(f"Timeout, server {self.there.name} not responding.")
            if self.there.boot != self.stdin.boots[1] and self.there.up:
                return _complain(f"client_loop: send disconnect: Broken pipe ({self.there.name})")
        return 255 if self.code is None else self.code & 255

    def serve(self, process: Process, words: List[str]) -> int:
        """The other host's end: it starts the command. When the connection is gone it closes the command's pipes."""
        process.label = f"sshd {process.host.name}"
        process.env["HOME"] = "/home"
        connection = [process.install(self.stdin.reader), process.install(self.stdout.writer),
                      process.install(self.stderr.writer)]
        child = Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True)
        ended = Ends()
        process.thread(functools.partial(_copy, connection[0], child.stdin.fileno(), ended, close=True))
        for source, target in ((child.stdout.fileno(), connection[1]), (child.stderr.fileno(), connection[2])):
            process.thread(functools.partial(_copy, source, target, ended))
        while ended.told.count("end") < 2 and "error" not in ended.told:
            ended.look()
        if "error" not in ended.told:
            self.code = child.wait(1.0) if child.poll() is None else child.returncode
        return 0


class Ends(File):
    """What has become of the streams of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.told: List[str] = []

    def tell(self, what: str) -> None:
        self.told.append(what)
        self.changed()

    def look(self) -> None:
        """Wait for news, or a second."""
        stdlib.world.call()
        stdlib.world.wait([self], stdlib.world.now + 1.0)


def _copy(source: int, target: int, over: Ends, close: bool = False) -> None:
    """Pass on what comes, to its end."""
    try:
        while True:
            data = stdlib.os_read(source, 65536)
            if not data:
                break
            while data:
                data = data[stdlib.os_write(target, data):]
        if close:
            stdlib.os_close(target)
        else:
            over.tell("end")
    except OSError:
        over.tell("error")


# Workers and servers

def _node(training: Training, process: Process) -> int:
    role = process.env["DMLC_ROLE"]
    rank = process.env.get(f"ODSGD_{role.upper()}_RANK")
    process.label = process.name = role if rank is None else f"{role} {rank}"
    process.data["attempt"] = int(process.env.get("ODSGD_RESTARTS", "0"))
    training.begun[process.data["attempt"]] = int(process.env["DMLC_NUM_WORKER"])
    training.born(process)
    node = Node(training, process)
    if training.deaf and role == "worker":
        process.handlers[signal.SIGTERM] = signal.SIG_IGN
    stdlib.sleep(training.import_s * (0.5 + training.world.random.random()))
    if "hangs_s" in process.data:
        stdlib.sleep(process.data["hangs_s"])
    if "fewer" in process.data:
        training.fewer[process.name] = 2
    if "refuses" in process.data:
        stdlib.stderr.write("odsgd train: lr is -1, expected more than 0\n")
        return EXIT_USAGE
    return {"scheduler": node.scheduler, "server": node.server, "worker": node.worker}[role]()


class Node:
    """A process of the job's data."""

    def __init__(self, training: Training, process: Process) -> None:
        self.training, self.process, self.world = training, process, training.world
        image = Image(parent=training.image, own=OWN)
        self.pulse, self.deadlines, self.report, self.environment = (image.load(f"kvstore.job.{name}") for name in (
            "pulse", "deadlines", "report", "environment"))
        self.ending = image.load("kvstore.job.ending")
        self.waiting = self.deadlines.deadlines
        if training.seldom:
            self.deadlines.Deadlines.TICK_S = 1.0
        env = process.env
        self.num_workers, self.num_servers = int(env["DMLC_NUM_WORKER"]), int(env["DMLC_NUM_SERVER"])
        self.rank, self.joined = int(env.get("ODSGD_WORKER_RANK") or 0), int(env.get("ODSGD_JOINED") or 0)
        self.on_sockets = self.environment.on_sockets()
        self.fabric = training.fabric(process)
        self.workers = [f"worker {rank}" for rank in range(self.num_workers)]
        self.servers = [f"server {rank}" for rank in range(self.num_servers)]
        self.met: Dict[int, Set[str]] = collections.defaultdict(set)
        self.parts: Dict[int, List[int]] = collections.defaultdict(list)  # of a ring, by step
        self.rounds: Dict[int, Dict[int, int]] = collections.defaultdict(dict)  # of a server, by step and rank
        self.total = 0  # of a server, or on a ring
        self.begun: List[int] = []  # where servers have begun

    def begin(self) -> None:
        """Look for the others; with a socket in the file system where the job is local."""
        env, calls = self.process.env, self.on_sockets and self.process.name in self.workers
        if env.get("DMLC_LOCAL") == "1" and not calls:
            couriers = env.get("ODSGD_COURIERS") if self.on_sockets else None
            self.process.host.files[couriers or f"/tmp/{env['PORT']}"] = bytearray()
        self.pulse.connecting()
        self.box = self.fabric.add(self.process.name, self.process)

    def receive(self, until: Optional[float] = None) -> Optional[Tuple[Any, ...]]:
        stdlib.world.call()
        while not self.box.items:
            if not self.world.wait([self.box], until) and not self.box.items:
                return None
        return self.box.items.popleft()

    def send(self, to: str, *message: Any) -> None:
        self.fabric.send(self.process, to, *message)

    def lost(self) -> List[str]:
        return [f"worker {rank}" for rank in self.environment.lost_workers()]

    def meet_fault(self, steps: int = 0) -> None:
        """Raise an error, or stand still while the pulse goes on, if that is due."""
        due = self.process.data.pop("due", None)
        if due:
            self.training.stood[self.process.name] = self.pulse.pulse.activity, steps
            due()
            if "raises" in self.process.data:
                self.ending.die("ValueError: a fault", EXIT_FAILURE)
            stdlib.sleep(self.process.data.pop("stands_s"))

    def scheduler(self) -> int:
        """Introduces the others to each other; on sockets as soon as the servers are there."""
        self.begin()
        self.report.report("joined")
        seen: Dict[str, bool] = {}
        while not seen.keys() >= {*self.servers, *(() if self.on_sockets else self.workers)} - set(self.lost()):
            message = self.receive(self.world.now + 0.2)
            if message:
                seen[message[1]] = True
        for name in seen:
            self.send(name, "all")
        while True:
            message = self.receive()
            assert message
            self.send(message[1], "all")

    def server(self) -> int:
        """Adds up, and answers when all have pushed, or each at once."""
        self.begin()
        self.send("scheduler", "here", self.process.name)
        if self.on_sockets:
            self.process.data["on_end"] = [lambda: self.tell_workers("gone")]
        start, here, left, begun = -1, set(), set(), False  # type: int, Set[str], Set[str], bool
        while True:
            message = self.receive(self.world.now + 1.0 if start >= 0 and not begun else None) or ("looks for losses",)
            if message[0] in ("begin", "here", "looks for losses"):
                here.update(message[1:2])
                if message[0] == "begin":
                    self.total, start = message[2:]
                    self.report.report("joined")
                begun = start >= 0 and (here >= set(self.workers) - set(self.lost()) or not self.on_sockets)
                if begun:
                    self.tell_workers("begun", start)
            elif message[0] == "joins" and message[1] in self.fabric.before:  # who was given up may still send
                self.fabric.carry(self.process, self.fabric.before[message[1]], ("gone",))
            elif message[0] == "push":
                self.add_up(*message[1:])
            elif message[0] == "leave":
                left.add(message[1])
                if left >= set(self.workers) - set(self.lost()):
                    self.report.report("done")

    def tell_workers(self, *message: Any) -> None:
        for name in self.workers:
            self.send(name, *message)

    def add_up(self, rank: int, step: int, value: int, joined: int) -> None:
        """A push has come."""
        pulse, name = self.pulse.pulse, self.process.name
        with pulse.doing("serving"):
            self.meet_fault(pulse.at)
            pulse.moved(pulse.at + 1)
        self.training.pushes[self.process.env["ODSGD_SECRET"] + name, rank + 100 * joined, step] += 1
        if self.training.asynchronous:
            self.total += value
            self.send(f"worker {rank}", "answer", name, step, self.total)
            return
        self.rounds[step][rank] = value
        if len(self.rounds[step]) == self.num_workers:
            self.total += sum(self.rounds.pop(step).values())
            self.tell_workers("answer", name, step, self.total)

    def worker(self) -> int:
        self.begin()
        if not self.num_servers:
            return self.ring_worker()
        if self.joined:
            for name in self.servers:
                self.send(name, "joins", self.process.name)
            return self.train(int(self.process.env["ODSGD_JOINED_AT"]), 0)
        with self.waiting.within(self.training.timeout_s, "the others have not come"):
            self.send("scheduler", "here", self.process.name)
            self.await_(lambda message: message[0] == "all")  # a server may be nearer: "begun" is kept
            start, total = self.training.newest()
            for name in self.servers if self.rank == 0 or self.on_sockets else ():
                self.send(name, *("here", self.process.name) if self.rank else ("begin", "worker 0", total, start))
            while len(self.begun) < self.num_servers:
                self.receive_meeting()
        return self.train(self.begun[0], total)

    def train(self, start: int, total: int) -> int:
        self.report.report("joined")
        self.process.data["joined"] = True
        training, pulse, attempt = self.training, self.pulse.pulse, self.process.data["attempt"]
        pulse.asynchronous = training.asynchronous
        if start and self.rank == 0:
            self.report.report("resumed", iteration=start)
        if self.rank == 0:
            training.resumed.append((attempt, start, training.newest()[0]))
        pulse.activity = "training"
        for step in range(start + 1, training.iterations + 1 - training.fewer.get(self.process.name, 0)):
            training.steps.append((attempt, self.rank, step, self.world.now))
            if training.alone and training.alone[:2] == (self.rank, step - start):
                with pulse.doing(training.alone[2]):
                    stdlib.sleep(training.alone_s)
            self.meet_fault(step - start - 1)
            stdlib.sleep(training.step_s * (0.5 + self.world.random.random()))
            pulse.moved(step)
            with self.waiting.within(training.timeout_s, f"iteration {step} has not been answered"):
                total = self.exchange(step)
            if step % training.every == 0 and not self.joined:
                self.meet(step, total)
        training.reach("end")
        training.finals.append((attempt, self.rank, total))
        self.report.report("done", at=pulse.at)
        for name in self.servers:
            self.send(name, "leave", self.process.name)
        stdlib.sleep(self.world.random.random() * 0.5)
        return 0

    def meet(self, step: int, total: int) -> None:
        """Evaluate some batches, then meet; then worker 0 saves."""
        self.training.reach("evaluation")
        with self.pulse.pulse.doing("evaluation"):
            for _ in range(3):
                self.pulse.pulse.substep += 1
                self.meet_fault()
                stdlib.sleep(self.training.step_s * self.world.random.random())
            for name in self.workers:
                self.send(name, "evaluated", step, self.process.name)
            with self.waiting.within(self.training.timeout_s, f"the evaluation after iteration {step} has not ended"):
                while not set(self.workers) - set(self.lost()) <= self.met[step]:
                    self.receive_meeting(self.world.now + 1.0)
        if self.rank == 0:
            with self.pulse.pulse.doing("checkpoint"):
                self.save(step, total)

    def exchange(self, step: int) -> int:
        """This step's gradient there, the sum back."""
        part = step * UNIT // self.num_workers
        if not self.num_servers:
            return self.allreduce(step, part)
        for name in self.servers:
            self.send(name, "push", self.rank, step, part, self.joined)
        totals = [self.await_(lambda message: message[0] == "answer" and message[2] == step)[3] for _ in self.servers]
        return int(totals[0])

    def save(self, step: int, total: int) -> None:
        """Write, then rename: from then on it counts."""
        self.training.reach("checkpoint")
        self.meet_fault()
        stdlib.sleep(0.02 + 0.3 * self.world.random.random())
        if self.training.disk.up:
            self.training.disk.files[f"{RUN}/whole-{step}"] = bytearray(f"{step} {total}".encode())
        self.report.report("saved", iteration=step)
        if self.training.disk.up:
            self.training.saved.append((self.process.data["attempt"], self.process.name, step, self.world.now))

    def await_(self, fits: Any) -> Tuple[Any, ...]:
        while True:
            message = self.receive_meeting()
            if message and fits(message):
                return message

    def receive_meeting(self, until: Optional[float] = None) -> Optional[Tuple[Any, ...]]:
        """As `receive`, and note who has come to an evaluation, and what a ring that is further has sent."""
        message = self.receive(until)
        if message and message[0] == "gone":
            self.ending.die("another process does not answer any more; see what it ended with", EXIT_FAILURE,
                            consequence=True)
        if message and message[0] == "evaluated":
            self.met[message[1]].add(message[2])
        elif message and message[0] == "begun":
            self.begun.append(message[1])
        elif message and message[0] == "part":
            self.parts[message[1]].append(message[2])
        return message

    # Without servers, as by MPI: when one process has ended, MPI tells the others, or ends them, each in its own way.

    def ring_worker(self) -> int:
        others = [name for name in self.workers if name != self.process.name]
        self.process.data["on_end"] = [lambda: self._mpi_ends(others)]
        for name in others:
            self.send(name, "here", self.process.name)
        came: Set[str] = set()
        gives_up_at = 0.0
        while len(came) < len(others):
            if len(self.fabric.nodes) == self.num_workers and not gives_up_at:  # by the launcher all know of each other
                gives_up_at = self.world.now + MPI_SEARCHES_S
            if gives_up_at and self.world.now > gives_up_at:  # all at about the same time, in its words
                stdlib.stderr.write("Fatal error in internal_Init: Other MPI error\n")
                return MPI_GAVE_UP
            message = self.receive_meeting(gives_up_at + 0.1 if gives_up_at else self.world.now + 0.2)
            if message and message[0] == "here":
                came.add(message[1])
        start, self.total = self.training.newest()
        return self.train(start, self.total)

    def allreduce(self, step: int, part: int) -> int:
        for name in self.workers:
            if name != self.process.name:
                self.send(name, "part", step, part)
        while len(self.parts[step]) < self.num_workers - 1:
            self.receive_meeting()
        self.total += part + sum(self.parts.pop(step))
        return self.total

    def _mpi_ends(self, others: List[str]) -> None:
        if self.training.finals and self.process.data["attempt"] == self.training.finals[-1][0]:
            return  # after MPI_Finalize nobody needs the others
        for name in others:
            peer = self.fabric.nodes.get(name)
            if peer and not peer.dead and peer.data.get("joined"):  # one that has not met the others searches on
                code = self.world.random.choice((0, 0, -int(signal.SIGABRT), -int(signal.SIGSEGV), 1, 15))
                self.world.after(0.3 * self.world.random.random() ** 12, functools.partial(
                    _abort, peer, code) if code else functools.partial(self.fabric.arrive, peer, ("gone",)))


def _abort(peer: Process, code: int) -> None:
    if not peer.stopped and peer.code is None:
        peer.end(code)
