"""A simulated operating system: hosts, processes, signals, files and links on one heap of events, from one seed.

Processes run the project's real code in coroutines (greenlet). A call that would wait gives its turn away. What becomes
ready is resumed a drawn moment later, so that the seed decides about the order. Nothing here knows of odsgd.
"""
import collections
import contextlib
import heapq
import posixpath
import random
import signal
import traceback
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

from greenlet import getcurrent, greenlet

from scripts.maintain.simulation.files import File, Link, Node

QUIET = (signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH)
"""Signals that do nothing by default."""
THAWS_WITHIN_S = 0.5
Main = Callable[["Process"], Optional[int]]


class Killed(BaseException):
    """Unwinds the stacks of a process that has ended: each of its calls raises it, so that it does nothing more."""


class NoTurn(Exception):
    """A program has waited where only the system runs."""


Timer = List[Any]
"""Something that will happen: when, its number, and what is called; None if it has been cancelled."""


class World:
    """Everything that happens, in the order of time. `delay_s`: the longest time until a task that is ready runs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"world {seed}")  # a job's draws are another stream
        self.now, self.events = 0.0, 0
        self.delay_s = self.random.choice((1e-4, 2e-3, 2e-2))
        self.preempted = self.random.choice((0.0, 0.0, 0.002, 0.02))
        """How often a task is interrupted at a call that would not wait."""
        self._parts = random.Random(f"parts {seed}") if seed % 10 == 3 else None
        self.clocks_differ = seed % 5 == 0  # of hosts; when they do the history is longer by a tenth
        self.hosts: Dict[str, Host] = {}
        self.links: Dict[Tuple[str, str], Link] = {}
        self.current: Optional[Task] = None
        self.history: List[str] = []
        self.programs: Callable[[Sequence[str]], Main] = lambda argv: _missing(argv)
        self.pids = 100
        self.corpses: List[Task] = []
        self.hub = getcurrent()
        self._heap: List[Timer] = []
        self._number = 0

    def after(self, delay_s: float, call: Callable[[], object]) -> Timer:
        """Have something happen."""
        self._number += 1
        timer = [self.now + delay_s, self._number, call]
        heapq.heappush(self._heap, timer)
        return timer

    def run(self, until_s: float, over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until then, or until something is over."""
        heap = self._heap
        while heap and heap[0][0] <= until_s and not over():
            at, _, call = heapq.heappop(heap)
            if call:
                if at > self.now:
                    self.now = at
                self.events += 1
                call()
                if self.corpses:
                    self.bury()

    def bury(self) -> None:
        """Unwind the stacks of processes that have ended."""
        while self.corpses:
            task = self.corpses.pop(0)
            if not task.greenlet.dead:
                self.current = task
                with contextlib.suppress(Killed):  # one that has not begun has nothing to unwind
                    task.greenlet.throw(Killed)
                self.current = None

    def close(self) -> None:
        """Unwind whatever is left, so that nothing of this world reaches the next."""
        for host in self.hosts.values():
            for process in host.processes.values():
                process.dead = True
                self.corpses += process.tasks
        self.bury()

    def note(self, text: str) -> None:
        """A line of the history."""
        self.history.append(f"{self.now:11.6f} {text}")

    def host(self, name: str) -> "Host":
        if name not in self.hosts:
            self.hosts[name] = Host(self, name)
        return self.hosts[name]

    def link(self, source: str, target: str) -> "Link":
        if (source, target) not in self.links:
            self.links[source, target] = Link(self, source, target)
        return self.links[source, target]

    def process(self) -> "Process":
        """The process whose code runs."""
        if self.current is None:
            raise NoTurn
        return self.current.process

    def call(self) -> "Process":
        """A system call begins: the process that makes it. A dead one is unwound, signals are handled."""
        task = self.current
        if task is None:
            raise NoTurn
        process = task.process
        if process.dead:
            raise Killed
        process.calls += 1
        if process.calls == process.hit_at_call and process.hit:
            process.hit()
            if process.dead:
                raise Killed
        if process.stopped or (self.preempted and self.random.random() < self.preempted):
            task.pause(self.random.random() * 10 * self.delay_s)
        if process.pending:
            process.handle_signals()
        return process

    def part(self, most: int) -> int:
        """How much a read of a pipe or a connection gets at most: in a tenth of the seeds at times a part."""
        return min(most, self._parts.randrange(1, 60)) if self._parts and self._parts.random() < 0.3 else most

    def wait(self, files: Sequence["File"], until: Optional[float]) -> bool:
        """Give the turn away until one of the files changes, a signal comes or it is time; false: it is time."""
        task = self.current
        if task is None:
            raise NoTurn
        queues = files[0].queues if len(files) == 1 else [queue for file in files for queue in file.queues]
        for queue in queues:
            queue.append(task)
        timer = None
        if until is not None:
            wait_s = until - self.now if until > self.now else 0.0
            timer = self.after(wait_s + self.random.random() * self.delay_s, task.resume)
        try:
            task.sleep()
        finally:
            for queue in queues:
                queue.remove(task)
            if timer:
                timer[2] = None
        if task.process.pending:
            task.process.handle_signals()
        return until is None or self.now < until


def _missing(argv: Sequence[str]) -> Main:
    raise FileNotFoundError(2, "No such file or directory", argv[0])


class Task:
    """A thread of a process."""

    def __init__(self, process: "Process", main: Callable[[], object]) -> None:
        self.process = process
        self._due: Optional[Timer] = None
        self.greenlet = greenlet(main, process.world.hub)
        process.tasks.append(self)

    def wake(self, delay_s: Optional[float] = None) -> None:
        """Run soon."""
        if self._due is None:
            world = self.process.world
            self._due = world.after(world.random.random() * world.delay_s if delay_s is None else delay_s, self.resume)

    def resume(self) -> None:
        """Run now, if the process does."""
        process = self.process
        due, self._due = self._due, None
        if due:
            due[2] = None
        if process.dead:
            return
        if process.stopped:
            process.held.append(self)
        elif not self.greenlet.dead:
            process.world.current = self
            self.greenlet.switch()
            process.world.current = None

    def sleep(self) -> None:
        """Give the turn away until somebody wakes this task."""
        if self.process.dead:
            raise Killed
        self.process.world.hub.switch()
        if self.process.dead:
            raise Killed

    def pause(self, seconds: float) -> None:
        self.wake(seconds)
        self.sleep()


class Process:
    """A process of a host. `main` gets it and returns the exit code."""

    def __init__(self, host: "Host", parent: Optional["Process"], argv: Sequence[str], main: Main,
                 env: Dict[str, str], fds: Dict[int, File], start_s: float = 0.0) -> None:
        self.world, self.host, self.parent, self.argv, self.env = host.world, host, parent, tuple(argv), dict(env)
        self.world.pids += 1
        self.pid = self.pgid = self.world.pids
        self.label = self.name = f"{argv[0]} {self.pid}"
        self.cwd, self.umask = "/home", 0o022
        self.began = self.world.now
        self.fds: Dict[int, File] = {}
        for number, file in fds.items():
            self.install(file, number)
        self.children: List[Process] = []
        self.reaped = File()  # changes when a child ends
        self.code: Optional[int] = None  # set when the process has ended and can be waited for
        self.dead = self.stopped = self.frozen = self.subreaper = False
        self.death_signal = 0
        self.handlers: Dict[int, Any] = {}
        self.wakeup_fd = -1
        self.alarm: Optional[Timer] = None
        self.pending: Deque[int] = collections.deque()
        self.held_signals: List[int] = []
        self.tasks: List[Task] = []
        self.held: List[Task] = []
        self.calls, self.hit_at_call = 0, 0
        self.hit: Optional[Callable[[], object]] = None
        self.data: Dict[str, Any] = {}  # what its program keeps: streams, modules
        host.processes[self.pid] = self
        if parent:
            parent.children.append(self)
            self.pgid, self.cwd = parent.pgid, parent.cwd
        Task(self, lambda: self._main(main)).wake(start_s)

    def _main(self, main: Main) -> None:
        try:
            code = main(self) or 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 1 if ending.code else 0
            if isinstance(ending.code, str):
                self.complain(f"{ending.code}\n")
        except Killed:
            return
        except KeyboardInterrupt:  # before the program handles the signal; Python says so, and ends by it then
            self.complain("KeyboardInterrupt\n")
            code = 128 + signal.SIGINT
        except BaseException as error:
            self._note_error(error)
            code = 1
        if not self.dead:
            self.end(code & 255)

    def _note_error(self, error: BaseException) -> None:
        if not self.dead:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self.world.note(f"{self.label} TRACEBACK {text}")

    def complain(self, text: str) -> None:
        """A line on standard error, as far as it is taken at once."""
        if 2 in self.fds:
            try:
                self.fds[2].write(text.encode())
            except OSError:
                return

    def install(self, file: File, number: Optional[int] = None) -> int:
        """A descriptor for an open file."""
        if number is None:
            number = next(one for one in range(3, 65536) if one not in self.fds)
        file.refs += 1
        self.fds[number] = file
        return number

    def close(self, number: int) -> None:
        file = self.fds.pop(number, None)
        if file is None:
            raise OSError(9, "Bad file descriptor")
        file.refs -= 1
        if not file.refs:
            file.release()

    def thread(self, main: Callable[[], object]) -> Task:
        """A further thread; an error in it is noted, and ends nothing."""
        def run() -> None:
            try:
                main()
            except (Killed, SystemExit):
                return
            except BaseException as error:
                self._note_error(error)
        task = Task(self, run)
        task.wake()
        return task

    # Signals

    def signal(self, number: int) -> None:
        """Somebody sends it a signal."""
        if self.dead:
            return
        handler = self.handlers.get(number, signal.SIG_DFL)
        if number == signal.SIGKILL:
            self.end(-number)
        elif number == signal.SIGSTOP:
            self.stopped = True
        elif number == signal.SIGCONT:
            self.go_on(thawed=False)
        elif handler == signal.SIG_IGN or (handler == signal.SIG_DFL and number in QUIET):
            return
        elif self.stopped:
            self.held_signals.append(number)
        else:
            self._deliver(number, handler)

    def _deliver(self, number: int, handler: Any) -> None:
        if handler == signal.SIG_DFL:
            self.end(-number)
        elif getattr(handler, "native", False):
            handler(self)
        elif number not in self.pending:
            self.pending.append(number)
            if self.wakeup_fd in self.fds:
                self.fds[self.wakeup_fd].write(bytes([number]))
            self.tasks[0].wake()

    def freeze(self) -> None:
        """Its container does: no signal has it go on, and the kernel does not call it stopped."""
        self.frozen = self.stopped = True

    def go_on(self, thawed: bool = True) -> None:
        """By SIGCONT, or since its container does."""
        if not self.stopped or (self.frozen and not thawed):
            return
        self.stopped = self.frozen = False
        held, self.held = self.held, []
        for task in held:
            task.wake()
        numbers, self.held_signals = self.held_signals, []
        for number in numbers:
            self.signal(number)

    def handle_signals(self) -> None:
        """Python calls a signal's function on the main thread."""
        while self.pending and self.world.current is self.tasks[0]:
            number = self.pending.popleft()
            self.handlers[number](number, None)

    # The end

    def end(self, code: int) -> None:
        """It ends at once: its files close, and a moment later its parent can learn of it."""
        if self.dead:
            return
        self.dead, world = True, self.world
        world.corpses += self.tasks
        for number in list(self.fds):
            self.close(number)
        for connection in self.data.get("on_end", ()):
            connection()
        world.after(world.random.random() * world.delay_s, lambda: self._become_zombie(code))

    def _become_zombie(self, code: int) -> None:
        self.code = code
        self.world.note(f"{self.label} (pid {self.pid}, {self.host.name}) ended: {code}")
        heir = self.parent
        while heir and (heir.dead or not heir.subreaper):
            heir = heir.parent
        for child in self.children:
            child.parent = heir
            if heir:
                heir.children.append(child)
            if child.code is not None and heir is None:
                child.forget()
            if child.death_signal:
                child.signal(child.death_signal)
        self.children = []
        if self.parent is None or self.parent.dead:
            self.forget()
        else:
            self.parent.signal(signal.SIGCHLD)
            self.parent.reaped.changed()

    def forget(self) -> None:
        """Its parent knows of its end, and its number is free."""
        self.host.processes.pop(self.pid, None)
        if self.parent and self in self.parent.children:
            self.parent.children.remove(self)

    @property
    def state(self) -> str:
        return "Z" if self.code is not None else "T" if self.stopped and not self.frozen else "S"


class Host:
    """A machine: its processes and its files. `data` of a file is a bytearray, of a folder None."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.up = True
        self.boot, self.late_s = 0, 0.0
        self.full = False  # of its disk
        self.frozen = False
        self.wall_s = 1.7e9  # what its wall clock shows at the beginning
        self.started_s, self.pace = 1e3 * sum(name.encode()) % 7e5, 1 + (sum(name.encode()) % 7 - 3) * 1e-4
        """What its other clock shows at the beginning, and how fast that one is."""
        self.processes: Dict[int, Process] = {}
        self.listeners: Dict[Any, File] = {}  # by port, or path
        self.files: Dict[str, Optional[bytearray]] = {"/": None, "/tmp": None, "/home": None}
        self.names = dict(self.files)  # those that outlast a loss of power for sure

    def group(self, pgid: int) -> List[Process]:
        return [process for process in list(self.processes.values()) if process.pgid == pgid]

    def lose_power(self) -> None:
        """All processes are gone at once, and no connection hears of it."""
        self.up = False
        self.boot += 1
        for process in list(self.processes.values()):
            process.data["lost"] = True
            process.dead = True
            self.world.corpses += process.tasks
            process.code = -9
        self.processes = {}
        self.files = self._left_on_disk()
        self.names = dict(self.files)

    def _left_on_disk(self) -> Dict[str, Optional[bytearray]]:
        """Of each name that has not been synced it is drawn whether it is as before or as now."""
        draw, gone = self.world.random, Node(b"gone")
        left: Dict[str, Optional[bytearray]] = {}
        for path in sorted({*self.files, *self.names}):
            now, then = self.files.get(path, gone), self.names.get(path, gone)
            kept = now if now is then else draw.choice((now, then))
            if kept is gone or path.startswith("/tmp/") or posixpath.dirname(path) not in (*left, path, "/"):
                continue
            left[path] = None if kept is None else Node(kept.survives(draw) if isinstance(kept, Node) else kept)
            if isinstance(left[path], Node):
                left[path].synced = bytes(left[path] or b"")  # type: ignore[union-attr]
        return left

    def return_power(self) -> None:
        self.up = True

    def freeze(self) -> None:
        """All processes stand still at once."""
        self.frozen = True
        for process in self.processes.values():
            process.freeze()

    def thaw(self) -> None:
        """They go on, in any order."""
        self.frozen = False
        for process in self.processes.values():
            self.world.after(THAWS_WITHIN_S * self.world.random.random(), process.go_on)

    def below(self, folder: str) -> Iterator[str]:
        """The paths in a folder."""
        return (path for path in sorted(self.files) if posixpath.dirname(path) == folder and path != "/")
