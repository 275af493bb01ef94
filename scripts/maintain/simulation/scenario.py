"""A job and its faults from a seed, and what comes of them.

The draws of the faults do not depend on each other's presence, so a failing seed can be shrunk by leaving some out.
"""
import collections
import dataclasses
import functools
import hashlib
import random
import signal
from typing import Any, Callable, Collection, Counter, Dict, List, NamedTuple, Optional, Sequence, Tuple

from scripts.maintain.simulation import programs, stdlib
from scripts.maintain.simulation.files import Link, Null, Sink
from scripts.maintain.simulation.loader import Image
from scripts.maintain.simulation.system import Host, Process, World

HERE, THERE = "10.0.0.9", ("10.0.0.1", "10.0.0.2", "10.0.0.3")
AFTERWARDS_S, ALONE_S = 12.0, 310.0
"""How long the processes of a job may outlive their launcher, and how much longer behind a link that is cut."""
ON_PROCESSES = ("kill", "segv", "abort", "stop", "pause")
IN_CODE = {"hang": "hangs_s", "refuse": "refuses", "stand": "stands_s", "raise": "raises", "fewer": "fewer"}
"""Faults that a process meets in its own code: it hangs while it imports, refuses its options, stands still while its
pulse goes on, raises an error, has fewer batches."""
KINDS = (*ON_PROCESSES * 2, "interrupt", "interrupt twice", "terminate", "end agent", "lose host", "reboot", "cut",
         "cut one way", "cut data", "slow",
         "reset", "clock", "block output", "close output", "late agents")
SENT = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT, "term": signal.SIGTERM,
        "xcpu": signal.SIGXCPU, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP, "stutter": signal.SIGSTOP,
        "interrupt": signal.SIGINT, "interrupt twice": signal.SIGINT, "terminate": signal.SIGTERM,
        "end agent": signal.SIGTERM}
"""Faults that are a signal, at first."""
STATES = {"late agents": ("late_s", 6.0, 0.0), "full": ("full", True, False)}
"""Those that set something of a host for a while."""
STUTTERS, STUTTERS_S = 6, 0.8
"""A process that stutters stands still so often, a second apart, for so long."""


SELDOM = (("odsgd.launch.hosts.agents", "TICK_S", 0.5), ("odsgd.launch.supervisor", "SHOW_EVERY_S", 10.0))
"""Constants of the launcher as most seeds have them: it looks at the clock and writes its state less often, since that
was half of all events."""


class Fault(NamedTuple):
    """Something bad. It happens `at_s`, at the `call` of the victim's system calls, or about a `moment` of the job."""

    kind: str
    victim: str
    at_s: float
    call: int
    lasts_s: float
    moment: str  # such as "evaluation 2": when a worker begins one and it is the second that does

    def __str__(self) -> str:
        when = f"at call {self.call}" if self.call else f"at {self.moment or f'{self.at_s:.2f} s'}"
        return f"{self.kind} {self.victim} {when}" + (f" for {self.lasts_s:.1f} s" if self.lasts_s else "")


class Hit(NamedTuple):
    """A fault that met its victim, and when."""

    kind: str
    victim: str
    at_s: float
    lasts_s: float
    attempt: int

    @property
    def cuts_for_good(self) -> bool:
        return self.kind in ("cut", "cut one way") and not self.lasts_s


@dataclasses.dataclass
class Result:
    """A history, for the promises. `code` is the launcher's; None: it has not ended."""

    seed: int
    job: Any
    training: programs.Training
    world: World
    launcher: Process
    heals: bool
    faults: List[Fault] = dataclasses.field(default_factory=list)
    hits: List[Hit] = dataclasses.field(default_factory=list)
    asks_from: Optional[float] = None  # since when somebody asks to join
    ended_at: float = 0.0
    said: List[Any] = dataclasses.field(default_factory=list)  # time and text of the launcher's lines
    left: Dict[str, List[str]] = dataclasses.field(default_factory=dict)  # by host, what still runs at the end

    @property
    def code(self) -> Optional[int]:
        return self.launcher.code

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.world.history).encode()).hexdigest()[:16]

    @property
    def only_hit(self) -> Optional[Hit]:
        """The fault, if one alone has met its victim."""
        return self.hits[0] if len(self.hits) == 1 else None

    def texts(self) -> List[str]:
        return [text for _, text in self.said]


def draw_job(image: Image, draw: random.Random, more: random.Random) -> Any:
    """A request as a user may make it."""
    num_workers = draw.choice((1, 2, 2, 3, 4))
    num_servers = draw.choice((0, 0, 1, 1, 2))
    ssh = draw.random() < 0.6
    host = image.load("odsgd.launch.hostfile").Host
    slots = tuple(host(address) for address in THERE[:draw.randrange(1, 4)]) if ssh else ()
    restarts = draw.choice((0, 1, 2, 3))
    elastic = bool(restarts) and num_workers > 1 and draw.random() < 0.5
    goes_on = num_servers > 0 and num_workers > 1 and not restarts and draw.random() < 0.6
    job = image.load("odsgd.launch.plan").Job(
        command=("train",), num_workers=num_workers, num_servers=num_servers, launcher="ssh" if ssh else "local",
        slots=slots, remote_python="python", hang_timeout_s=draw.choice((4.0, 15.0, 60.0)), max_restarts=restarts,
        startup_timeout_s=draw.choice((20.0, 60.0)), rejoin_timeout_s=draw.choice((5.0, 20.0, 60.0)),
        grace_s=draw.choice((1.0, 5.0)), least_workers=1 if elastic else None,
        most_workers=num_workers if elastic else None, grow=elastic and draw.random() < 0.5,
        on_worker_loss="continue" if goes_on else "fail", wire="ps-lite",
        spare=draw.choice((0, 1)) if goes_on and num_workers > 2 else 0)
    if slots and more.random() < 0.1:  # a second agent at an address, by another user, or beside the launcher's own
        twice = more.choice((host(HERE), slots[0]._replace(user="bob")))
        job = dataclasses.replace(job, slots=(slots[0], twice, *slots[1:]))
    if num_servers and (job.spare or more.random() < (0.9 if goes_on else 0.6)):
        return dataclasses.replace(job, wire="sockets")
    return dataclasses.replace(job, closed="ps-lite and MPI take nobody in later")


def draw_faults(job: Any, about_s: float, draw: random.Random, heals: bool, more: random.Random) -> List[Fault]:
    """None to four faults on the job's processes, hosts and links; or one of the seldom ones."""
    hosts, everybody = [host.address for host in job.slots], _everybody(job)
    faults = []
    kinds = (*KINDS, *["cut data"] * 4) if not job.num_servers and len(hosts) > 1 else KINDS  # rings seldom outlive it
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        kind, at_s = draw.choice(kinds), about_s * draw.random()
        lasts_s = draw.choice((0.3, 3.0, 8.0, 30.0)) if heals or draw.random() < 0.5 else 0.0
        host = draw.choice([*hosts, HERE])
        if kinds is not KINDS and kind == "cut data":  # of a worker, for longer than MPI searches
            host, lasts_s = draw.choice(hosts), draw.choice((8.0, 30.0)) if lasts_s else 0.0
        victim = {"lose host": host, "reboot": host, "cut": host, "cut one way": host, "cut data": host, "slow": host,
                  "reset": host, "late agents": host, "clock": host, "end agent": f"agent {host}"}.get(
                      kind, "launcher" if kind not in ON_PROCESSES else draw.choice(everybody))
        call = int(10 ** (3.5 * draw.random())) if kind in (*ON_PROCESSES, "interrupt", "interrupt twice", "terminate",
                                                   "end agent") and draw.random() < 0.4 else 0
        if kind == "stop" and heals:
            kind = "pause"
        if kind in ("lose host", "reboot") and victim == HERE:
            continue
        if kind not in ("kill", "segv", "abort", "stop", "interrupt", "interrupt twice", "terminate", "end agent",
                        "reset", "clock", "close output"):
            lasts_s = lasts_s or (5.0 if kind in ("pause", "late agents", "reboot") else 0.0)
        else:
            lasts_s = 0.0
        kind = _perhaps_otherwise(kind, victim, more)
        call = 0 if kind in IN_CODE else call
        moment = f"{draw.choice(('evaluation', 'checkpoint', 'end'))} {draw.randrange(1, 4)}"
        faults.append(Fault(kind, victim, at_s, call, lasts_s, moment if not call and draw.random() < 0.3 else ""))
    drawn = draw_seldom(job, about_s, heals, more) or faults
    if job.max_restarts and drawn and more.random() < 0.2:  # when it has begun again
        kind, victim = more.choice(("kill", "segv", "pause", "pause" if heals else "stop")), more.choice(everybody)
        drawn.append(Fault(kind, victim, 0.0, int(10 ** (3 * more.random())), 5.0 if kind == "pause" else 0.0,
                           f"start 2 of {victim}"))
    if more.random() < 0.05:
        lasts_s = more.choice((3.0, 8.0, 30.0)) if heals else 0.0
        drawn.append(Fault("full", more.choice([*hosts, HERE]), about_s * more.random(), 0, lasts_s, ""))
    return drawn


def draw_seldom(job: Any, about_s: float, heals: bool, more: random.Random) -> List[Fault]:
    """One of two agents at an address stands still; hosts freeze; a worker hangs while it imports, or is given up and
    lives on beside who joins; or none."""
    hosts = [host.address for host in job.slots]
    served = {(job.num_workers + rank) % len(hosts) for rank in range(job.num_servers) if hosts}
    given_up = [host for number, host in enumerate(hosts[:job.num_workers]) if number and number not in served]
    twice = [host for host in hosts if hosts.count(host) > 1 or (host == HERE and job.num_servers)]
    if twice and more.random() < 0.2:
        kind, lasts_s = ("pause", 30.0) if heals else ("stop", 0.0)
        return [Fault(kind, f"agent {twice[0]}", about_s * more.random(), 0, lasts_s, "")]
    if more.random() < 0.02:
        victim = more.choice((*hosts, HERE, "all", "all"))
        return [Fault("freeze", victim, about_s * more.random(), 0, more.choice((3.0, 8.0, 25.0, 40.0)), "")]
    if more.random() < 0.01:
        return [Fault("stutter", more.choice(_everybody(job)), about_s * more.random(), 0, 0.0, "")]
    if job.max_restarts > 1 and more.random() < 0.04:
        return draw_again(f"worker {more.randrange(job.num_workers)}", more)
    if job.least_workers and more.random() < 0.03:
        return draw_gone(job, about_s, more)
    if more.random() < 0.01 and (job.num_servers or job.num_workers > 1):  # else nobody waits for it
        lasts_s = more.choice((3.0, 30.0)) if heals else 0.0
        return [Fault("hang", f"worker {more.randrange(job.num_workers)}", 0.0, 1, lasts_s, "")]
    if more.random() < 0.005:
        return [Fault("refuse", f"worker {rank}", 0.0, 1, 0.0, "") for rank in range(job.num_workers)]
    if more.random() < 0.01 and job.num_workers > 1 and job.on_worker_loss != "continue":
        return [Fault("fewer", f"worker {more.randrange(job.num_workers)}", 0.0, 1, 0.0, "")]
    if job.on_worker_loss == "continue" and not job.closed and given_up and job.hang_timeout_s < 10.0 < about_s - 5.0:
        host, lasts_s = more.choice(given_up), job.hang_timeout_s + 5 * more.random()
        kind, victim = more.choice((("pause", f"agent {host}"), ("cut", host)))
        return [Fault(kind, victim, 4 + 4 * more.random(), 0, lasts_s, "")]
    return []


def draw_again(victim: str, more: random.Random) -> List[Fault]:
    """A worker is killed, and once more when it has come farther."""
    return [Fault("kill", victim, 4.0 + 4 * more.random(), 0, 0.0, ""),
            Fault("kill", victim, 12.0 + 4 * more.random(), 0, 0.0, f"start 2 of {victim}")]


def draw_gone(job: Any, about_s: float, more: random.Random) -> List[Fault]:
    """A host that does not come back, or not soon, or a worker that hangs when it begins once more."""
    at_s, victim = 3.0 + (about_s - 3.0) * more.random(), f"worker {more.randrange(job.num_workers)}"
    away = [host.address for host in job.slots if host.address != HERE]
    if away and job.grow and more.random() < 0.5:
        lasts_s = job.hang_timeout_s + job.rejoin_timeout_s + 60.0 * more.random()
        return [Fault(more.choice(("reboot", "cut")), more.choice(away), at_s, 0, lasts_s, "")]
    if away and more.random() < 0.5:
        return [Fault(more.choice(("lose host", "cut")), more.choice(away), at_s, 0, 0.0, "")]
    return [Fault("kill", victim, at_s, 0, 0.0, ""), Fault("hang", victim, 0.0, 0, 0.0, f"start 2 of {victim}")]


def draw_close_faults(job: Any, about_s: float, draw: random.Random, heals: bool, more: random.Random) -> List[Fault]:
    """Two to six faults of processes within seconds: who failed first?"""
    victims = [name for name in _everybody(job) if name != "launcher"]
    faults, began_s = [], about_s * draw.random()
    for _ in range(draw.choice((2, 2, 3, 3, 4, 6))):
        kind = draw.choice(("kill", "kill", "segv", "abort", "pause", "pause", "pause", "pause" if heals else "stop"))
        lasts_s = draw.choice((0.3, 0.6, 1.0, 1.7, 2.5, 3.0, 5.0, 8.0)) if kind == "pause" else 0.0
        at_s = began_s + draw.choice((0.05, 0.5, 2.0, 5.0)) * draw.random()
        victim = draw.choice(victims)
        faults.append(Fault(_perhaps_otherwise(kind, victim, more), victim, at_s, 0, lasts_s, ""))
    return faults


def _perhaps_otherwise(kind: str, victim: str, more: random.Random) -> str:
    """Of the workers and servers that are killed some meet a signal that a process may handle (none of ours does), or
    raise an error; of those that are stopped a third stands still, but its pulse goes on."""
    if not victim.startswith(("worker", "server")):
        return kind
    others = {"kill": ("kill", "kill", "term", "xcpu", "raise"), "stop": ("stop", "stop", "stand"),
              "pause": ("pause", "pause", "stand")}
    return more.choice(others.get(kind, (kind,)))


def _everybody(job: Any) -> List[str]:
    """Who may be hit, some twice: they are drawn more often."""
    workers = [f"worker {rank}" for rank in range(job.num_workers)]
    servers = [f"server {rank}" for rank in range(job.num_servers)]
    return [*workers * 2, *servers, *["scheduler"] * bool(servers), "launcher", f"agent {HERE}",
            *(f"{what} {host.address}" for host in job.slots for what in ("agent", "ssh"))]


class Injector:
    """Brings faults into a world."""

    def __init__(self, result: Result, out: Sink, err: Sink) -> None:
        self.result, self.world, self.out, self.err = result, result.world, out, err
        self.waiting: Dict[str, List[Fault]] = {}  # by victim, or moment
        self.reached: Counter[str] = collections.Counter()
        for fault in result.faults:
            if fault.call or fault.moment:
                self.waiting.setdefault(fault.moment or fault.victim, []).append(fault)
            else:
                self.world.after(fault.at_s, functools.partial(self._hit, fault))

    def born(self, process: Process) -> None:
        """A process has its name now: perhaps a fault waits for its start, or for one of its calls."""
        self.reached[process.label] += 1
        begun = self.waiting.pop(f"start {self.reached[process.label]} of {process.label}", [])
        for fault in begun:
            if not fault.call:
                self.world.after(fault.at_s, functools.partial(self._hit, fault, process))
        for fault in [*begun, *self.waiting.pop(process.label, [])][:1]:
            if fault.call:
                process.hit_at_call = process.calls + fault.call
                process.hit = functools.partial(self._hit, fault, process)

    def reach(self, what: str) -> None:
        """A worker begins this: perhaps a fault waits for it, and comes up to a second later."""
        self.reached[what] += 1
        for fault in self.waiting.pop(f"{what} {self.reached[what]}", []):
            self.world.after(self.world.random.random() ** 3, functools.partial(self._hit, fault))

    def _find(self, label: str) -> Optional[Process]:
        found = [process for host in self.world.hosts.values() for process in host.processes.values()
                 if process.label == label and not process.dead]
        return max(found, key=lambda process: process.pid, default=None)

    def _hit(self, fault: Fault, process: Optional[Process] = None) -> None:
        if fault.kind in ("stand", "raise") and process is None:  # when its code comes to it
            process = self._find(fault.victim)
            if process:
                process.data["due"] = functools.partial(self._hit, fault, process)
                return
        attempts = max((process.data.get("attempt", 0) for host in self.world.hosts.values()
                        for process in host.processes.values()), default=0)
        happened = self._do(fault, process)
        self.world.note(f"FAULT {fault}" + ("" if happened else ": too late"))
        if happened:
            self.result.hits.append(Hit(fault.kind, fault.victim, self.world.now, fault.lasts_s, attempts))

    def _do(self, fault: Fault, process: Optional[Process]) -> bool:
        world, kind = self.world, fault.kind
        if kind in SENT:
            victim = process or self._find(fault.victim)
            if victim is None or victim.dead or self.result.launcher.dead:
                return False
            self._send(fault, victim)
            return True
        if kind in IN_CODE and process:
            process.data[IN_CODE[kind]] = fault.lasts_s or 1e9
            return True
        if self.result.launcher.dead or kind in IN_CODE:
            return False
        if kind == "freeze":
            for host in [one for name, one in world.hosts.items() if fault.victim in ("all", name)]:
                host.freeze()
                world.after(fault.lasts_s, host.thaw)
            return True
        undo = self._at_host(kind, world.host(fault.victim) if fault.victim[0].isdigit() else world.host(HERE))
        if undo and fault.lasts_s:
            world.after(fault.lasts_s, undo)
        return undo is not None

    def _send(self, fault: Fault, victim: Process) -> None:
        """The signals of a fault, those that come later, too."""
        later: Sequence[Tuple[float, int]] = ()
        if fault.kind == "pause":
            later = [(fault.lasts_s, signal.SIGCONT)]
        elif fault.kind == "interrupt twice":
            later = [(0.5, signal.SIGINT)]
        elif fault.kind == "stutter":
            later = [(second + after_s, number) for second in range(STUTTERS)
                     for after_s, number in ((0.0, signal.SIGSTOP), (STUTTERS_S, signal.SIGCONT))][1:]
        victim.signal(SENT[fault.kind])
        for after_s, number in later:
            self.world.after(after_s, functools.partial(victim.signal, number))

    def _block(self, blocked: bool) -> None:
        """The user reads no more, or again."""
        for sink in (self.out, self.err):
            sink.block(blocked)

    def _at_host(self, kind: str, host: Host) -> Any:
        """Do it; returns what undoes it, or None if it cannot be done."""
        world = self.world
        if kind in ("lose host", "reboot"):
            if not host.up:
                return None
            host.lose_power()
            return host.return_power
        if kind in ("cut", "cut one way", "cut data", "slow"):
            return self._at_links(kind, host)
        if kind == "reset":
            sessions = [process.data["session"] for process in world.host(HERE).processes.values()
                        if "session" in process.data and process.data["session"].there is host]
            for session in sessions:
                session.reset()
            return (lambda: None) if sessions else None
        if kind == "clock":
            host.wall_s += world.random.choice((-3600.0, 3600.0))
        elif kind == "block output":
            self._block(True)
            return functools.partial(self._block, False)
        elif kind == "close output":
            self.out.gone = self.err.gone = True
            self._block(False)
        elif kind in STATES:
            name, meanwhile, otherwise = STATES[kind]
            setattr(host, name, meanwhile)
            return lambda: setattr(host, name, otherwise)
        return lambda: None

    def _at_links(self, kind: str, host: Host) -> Any:
        others = [one for one in self.world.hosts if one != host.name]
        pairs = [pair for one in others for pair in ((host.name, one), (one, host.name))]
        links = [self.world.link(f"data {source}", f"data {target}") for source, target in pairs]
        if kind != "cut data":  # its ssh goes another way
            links = [self.world.link(*pair) for pair in pairs] + links
        for link in links[::2 if kind == "cut one way" else 1]:
            link.cut, link.slow_s = kind != "slow", 0.4
        return functools.partial(_heal, links)


def _ask_to_join(here: Host, launcher: Process) -> None:
    """Somebody has a worker join, as `odsgd join`, whenever there is a place."""
    if not launcher.dead:
        asked = f"/tmp/odsgd-1000/{launcher.pid}.{here.world.now:.3f}.join"
        here.files[asked] = bytearray()
        here.world.after(1.0, lambda: here.files.pop(asked, None))
        here.world.after(1.0, lambda: _ask_to_join(here, launcher))


def _set_pace(image: Image, seldom: bool) -> None:
    for name, constant, seldom_s in SELDOM:
        module = image.load(name)
        shipped = image.shipped.setdefault((name, constant), getattr(module, constant))
        setattr(module, constant, seldom_s if seldom else shipped)


def _heal(links: List[Link]) -> None:
    for link in links:
        link.heal()


def run(seed: int, image: Image, without: Collection[int] = (), limit_s: float = 12000.0,
        draw_faults: Callable[..., List[Fault]] = draw_faults) -> Result:
    """One history: the same seed and the same faults left out give the same one."""
    draw, more = random.Random(seed), random.Random(f"more {seed}")
    """What came later is drawn from `more`, so that most histories stay as they were."""
    world = World(seed)
    stdlib.use(world)
    image.load("kvstore.job.aside")._failed.clear()
    job, heals = draw_job(image, draw, more), draw.random() < 0.5
    training = programs.Training(world, image, draw)
    training.draw_alone(job, more)
    training.asynchronous = job.on_worker_loss == "continue"
    grows = training.asynchronous and draw.random() < 0.7 and not job.closed
    _set_pace(image, training.seldom and not grows)
    world.programs = programs.table(training)
    here = world.host(HERE)
    here.files["/home/train"] = bytearray()
    for host in job.slots:
        world.host(host.address)
    out, err = Sink(world, "out"), Sink(world, "err")
    process = Process(here, None, ["odsgd", "launch"], programs.launcher(training, job), {},
                      {0: Null(), 1: out, 2: err})
    process.label = "launcher"
    result = Result(seed, job, training, world, process, heals)
    drawn = draw_faults(job, training.about_s, draw, heals, more)
    if job.grow and [fault.kind for fault in drawn] in (["reboot"], ["cut"]):
        training.iterations, training.step_s = 600, 0.6  # long enough that it may be there again
    training.deaf = more.random() < 0.1 and all(fault.kind != "term" for fault in drawn)
    if any(fault.moment.startswith("start") and fault.at_s for fault in drawn):
        training.iterations, training.step_s, training.every = 60, 0.3, 50  # no checkpoint between two crashes
    result.faults = [fault for number, fault in enumerate(drawn) if number not in without]
    injector = Injector(result, out, err)
    training.born, training.reach = injector.born, injector.reach
    may_stand = any(fault.kind == "stop" and fault.victim == "launcher" for fault in result.faults)
    if grows:
        result.asks_from = training.about_s * draw.random()
        world.after(result.asks_from, lambda: _ask_to_join(here, process))
    world.run(limit_s, lambda: process.code is not None or (may_stand and process.stopped and world.now > 300.0))
    result.ended_at = world.now
    alone = any(hit.cuts_for_good for hit in result.hits)
    world.run(world.now + (AFTERWARDS_S + ALONE_S if alone else AFTERWARDS_S), lambda: False)
    result.said = err.lines
    result.left = {host.name: [f"{process.label} (pid {process.pid})" for process in host.processes.values()
                               if not process.dead] for host in world.hosts.values() if host.up}
    world.close()
    return result
