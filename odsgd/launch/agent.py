"""The agent: one per host, it starts its processes and forwards their output; neither outlives the other.

Its orders and its answers are in `messages.py`. A process here is started in a session of its own, so that a signal
reaches its children and no terminal reaches it. The kernel kills it if the agent dies. When it ends, the rest of
its group is killed before its exit is told. The agent adopts the orphans below it, so that even a grandchild with a
session of its own is found in the end. If the channel to the launcher closes, breaks, or stays silent for too long,
everything is stopped. One thread, no locks: a fork in a threaded process is not safe.
"""
import contextlib
import functools
import json
import math
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Dict, Iterable, List, Optional, Set, Tuple

from kvstore.errors import shown
from kvstore.job.pulse import STACKS
from odsgd.launch import hook, linux
from odsgd.launch.addresses import address_towards, mpi_interface
from odsgd.launch.connections import handshake
from odsgd.launch.lines import CHUNK, Pieces, Stream
from odsgd.launch.messages import Channel, Message
from odsgd.launch.policy.liveness import STATES, warn_s

MAX_BACKLOG = 1 << 20
"""Bytes not yet taken by the launcher, above which the processes' output is left in their pipes."""
ORPHANED_GRACE_S = 1.0
KILLED_WITHIN_S, SWEPT_WITHIN_S, SENT_WITHIN_S, TUNNEL_ENDED_WITHIN_S = 5.0, 0.2, 5.0, 1.0
PROGRESS_EVERY_S = 0.1
BEATS_EVERY_S = 1.0
STACKS_WITHIN_S = 0.5
"""How long a process that hangs has to print its stacks."""
SILENT_S = 3.0
"""After so long without a beat the kernel is asked for the state of the process."""
MPI_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
MPI_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
MPI_PRIVATE = re.compile(r"(OMPI|PMI|PMIX|PRTE|HYDRA|HYDI|MPI|MPIR(?!_CVAR_)|MPIEXEC|GFORKER)_\w+")
"""Variables by which mpirun speaks of the agent; a process that believed them would speak into its connection."""

_unless_gone = contextlib.suppress(ProcessLookupError, PermissionError, FileNotFoundError)


class Child:
    """A running process and the pipes it writes to."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", streams: List[Stream]) -> None:
        self.name, self.popen, self.pid, self.streams = name, popen, popen.pid, streams
        self.progress_at = 0.0
        self.garbled = False
        """A report of it could not be read, as has been said."""
        self.asking = False
        """It asks for the other workers of its job, and has not met them yet."""
        self.beat: Message = {}
        self.beat_at: Optional[float] = None
        self.stopped_at: Optional[float] = None
        self.kill_at: Optional[float] = None

    def last_beat(self, now: float) -> Optional[Message]:
        """Its last beat, and how long ago that was; None: it has no pulse, or not yet, and runs as far as one sees."""
        state = ""
        if self.beat_at is None or now - self.beat_at > SILENT_S:
            state = linux.state(self.pid)
        if self.beat_at is None:
            self.stopped_at = (self.stopped_at or now) if state == "T" else None
            return {"silent_s": round(now - self.stopped_at, 1), "state": state} if self.stopped_at else None
        return {**self.beat, "silent_s": round(now - self.beat_at, 2), "state": state}

    def is_to_be_redrawn(self) -> bool:
        """Whether it is time to forward a frame of its progress bar."""
        now = time.monotonic()
        due = now - self.progress_at >= PROGRESS_EVERY_S
        if due:
            self.progress_at = now
        return due


class Agent:
    """See the head of the module. Invariants: a child is in `children` from its start until its exit is queued; after
    `stopping` is set no child is started; `run` returns only when `children` is empty or SIGKILL has not helped."""

    def __init__(self, orders: Message, channel: Channel) -> None:
        self.orders, self.channel = orders, channel
        self.children: Dict[int, Child] = {}
        self.stopping = False
        self.signalled: Optional[int] = None  # not told of yet
        self.ended_by: Optional[int] = None
        self.portals: List[str] = []  # that a tunnel which is killed leaves behind
        self.kill_at: Optional[float] = None
        self.give_up_at: Optional[float] = None
        self.heard_at = time.monotonic()
        self.beats_at = 0.0
        self.selector = selectors.DefaultSelector()
        self.paused = False
        self.lost_file = _new_lost_file() if orders["tells_losses"] else None
        self.folder = tempfile.mkdtemp(prefix="odsgd-servers-")
        """Where servers and the scheduler work: empty, and this user's alone, whatever they are made to write."""
        self.tunnel: Optional[subprocess.Popen[bytes]] = None
        self.tunnel_channel: Optional[Channel] = None
        self.tunnel_at = time.monotonic()  # it was heard last
        self.tunnel_spoke = self.tunnel_missed = False
        self.mpi_memory: Set[str] = set()
        self.wakeup: Tuple[int, ...] = ()

    def run(self) -> int:
        """Start everything, stay until told to stop and everything is gone."""
        try:
            self._run()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            for path in [*self.mpi_memory, *self.orders["sockets"], *self.portals,
                         *([self.lost_file] if self.lost_file else [])]:
                with _unless_gone:
                    os.unlink(path)
        self.channel.send({"event": "ended"})
        self._drain_channel()
        self._close_signals()
        return 0

    def _run(self) -> None:
        linux.adopt_orphans()
        self._listen_to_signals()
        self.selector.register(self.channel.read_fd, selectors.EVENT_READ, self._read_channel)
        self.channel.send({"event": "hello", "host": socket.gethostname(), "pid": os.getpid()})
        if self.orders["tunnel"]:
            self._open_tunnel(self.orders["tunnel"])
        for spec in self.orders["processes"]:
            self._start(spec)
        self._read_channel()  # a stop may have come together with the orders
        while not (self.stopping and (not self.children or self._hopeless())):
            for key, _ in self.selector.select(self._patience_s()):
                key.data()
            self._tell_of_signal()
            self._note_memory(child for child in self.children.values() if child.asking)
            self._reap()
            self._check_channel()
            self._enforce()
            self._watch_tunnel()
            self._pass_beats()
        self._close_tunnel()
        self._sweep()

    def _patience_s(self) -> float:
        """How long nothing need be looked at, unless there is news."""
        if self.stopping or self.channel.backlog or any(child.kill_at for child in self.children.values()):
            return 0.05
        return BEATS_EVERY_S / 4

    # Starting

    def _start(self, spec: Message) -> None:
        pipes = {kind: os.pipe() for kind in ("report", "stdout", "stderr")}  # why it failed comes before that it ended
        told = {"ODSGD_REPORT_FD": pipes["report"][1]}
        if "PMI_RANK" in {**self.orders["env"], **spec["env"]}:
            here, there = socket.socketpair()
            pipes["mpi"] = here.detach(), there.detach()
            told["PMI_FD"] = pipes["mpi"][1]
        program, *arguments = spec["command"]
        try:
            popen = subprocess.Popen(
                [os.path.abspath(program) if os.sep in program else program, *arguments],
                stdin=subprocess.DEVNULL, stdout=pipes["stdout"][1], stderr=pipes["stderr"][1],
                env={**self._environment(spec), **{name: str(fd) for name, fd in told.items()}},
                cwd=None if spec["name"].startswith("worker") else self.folder, pass_fds=tuple(told.values()),
                start_new_session=True, preexec_fn=functools.partial(linux.die_with, os.getpid()))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            for read_fd, _ in pipes.values():
                os.close(read_fd)
            why = f"{spec['command'][0]}: {getattr(error, 'strerror', None) or error}"
            self.channel.send({"event": "unstartable", "process": spec["name"], "error": why})
            return
        finally:
            for _, write_fd in pipes.values():
                os.close(write_fd)
        streams = [Stream(kind, read_fd) for kind, (read_fd, _) in pipes.items()]
        child = self.children[popen.pid] = Child(spec["name"], popen, streams)
        for stream in streams:
            self._listen(child, stream)
        self.channel.send({"event": "started", "process": child.name, "pid": child.pid})

    def _environment(self, spec: Message) -> Dict[str, str]:
        inherited = {name: value for name, value in os.environ.items()
                     if name not in self.orders["drop"] and not MPI_PRIVATE.fullmatch(name)}
        env = {**inherited, **self.orders["env"], **spec["env"]}
        if self.lost_file:
            env["ODSGD_LOST"] = self.lost_file
        env.setdefault("OMP_NUM_THREADS", str(self._threads()))
        if "DMLC_NODE_HOST" not in env:
            env["DMLC_NODE_HOST"] = address_towards(env["DMLC_PS_ROOT_URI"]) or "127.0.0.1"
        if "RANK" in env and "LOCAL_RANK" not in env:
            env.update(self._place_among_agents())
        if "PMI_RANK" in env:
            env = {**mpi_interface(env), **env}
        path = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
        if not spec["name"].startswith("worker"):
            path.insert(0, "")  # it works elsewhere, and finds the same modules
        elif "ODSGD_STORE" in env:
            path.insert(0, hook.FOLDER)
        if path:
            env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path))
        return env

    def _place_among_agents(self) -> Dict[str, str]:
        """Of mpirun's ranks on this host, each of which is an agent with one worker; empty where it does not say."""
        found = {name: [os.environ[key] for key in keys if os.environ.get(key, "").isdigit()] for name, keys in
                 (("LOCAL_RANK", MPI_LOCAL_RANKS), ("LOCAL_WORLD_SIZE", MPI_LOCAL_SIZES))}
        return {name: values[0] for name, values in found.items() if values}

    def _threads(self) -> int:
        """The host's cores shared by its workers and servers (the scheduler computes nothing), at least one each."""
        agents = next((int(os.environ[name]) for name in MPI_LOCAL_SIZES if os.environ.get(name, "").isdigit()), 1)
        computing = sum(spec["name"] != "scheduler" for spec in self.orders["processes"])
        return max(1, linux.cores() // max(1, computing * agents))

    # Reading

    def _listen(self, child: Child, stream: Stream) -> None:
        self.selector.register(stream.fd, selectors.EVENT_READ, functools.partial(self._read, child, stream))

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):  # reading is paused
            self.selector.unregister(fd)

    def _read(self, child: Child, stream: Stream) -> None:
        self._forward(child, stream.kind, stream.read())
        if not stream.open:
            self._forget(stream.fd)

    def _forward(self, child: Child, kind: str, pieces: Pieces) -> None:
        for text, progress in pieces:
            if kind == "report":
                self._forward_report(child, text)
            elif kind == "mpi":
                self.channel.send({"event": "asks", "process": child.name, "line": text})
            elif not progress or child.is_to_be_redrawn():
                self.channel.send({"event": "output", "process": child.name, "stream": kind, "text": text,
                                   "progress": progress})

    def _forward_report(self, child: Child, text: str) -> None:
        report = _read_report(text)
        if report is None:
            self._unreadable(child, text)
        elif report.get("event") == "beat":
            child.beat, child.beat_at = report, time.monotonic()
        elif report:
            child.asking = report.get("event") == "connecting"
            self.channel.send({"event": "report", "process": child.name, "report": report})

    def _unreadable(self, child: Child, text: str) -> None:
        """A line that two writers have mixed, or one cut off by a kill. What a process says next is whole again."""
        if not child.garbled:
            child.garbled = True
            text = f"a report of {child.name} cannot be read and is lost: {shown(text)}"
            self.channel.send({"event": "warning", "text": text})

    def _answer(self, name: str, line: Optional[str]) -> None:
        """To what its MPI has asked; it asks one question at a time, so that there is room for the answer."""
        for stream in (stream for child in self.children.values() if child.name == name for stream in child.streams):
            if stream.kind == "mpi":
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(stream.fd)) as link:
                    link.shutdown(socket.SHUT_RDWR) if line is None else link.send(line.encode() + b"\n")

    def _pass_beats(self) -> None:
        """Also where no process has a pulse: they are the agent's own, too. A launcher that does not read gets none."""
        now = time.monotonic()
        if now - self.beats_at >= BEATS_EVERY_S and not self.paused:
            self.beats_at = now
            beats = {child.name: child.last_beat(now) for child in self.children.values()}
            self.channel.send({"event": "beats", "beats": {name: beat for name, beat in beats.items() if beat}})

    # The tunnel

    def _open_tunnel(self, orders: Message) -> None:
        """Start it (`tunnel.py`). What the launcher tells it, and what it answers, passes through here."""
        goes_on = functools.partial(linux.die_with, os.getpid(), signal.SIGCONT)  # one that is stopped hears of our end
        self.tunnel = subprocess.Popen([sys.executable, "-m", "odsgd.launch.connections.tunnel"], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, bufsize=0, start_new_session=True, preexec_fn=goes_on)
        assert self.tunnel.stdin and self.tunnel.stdout
        self.tunnel_channel = Channel(self.tunnel.stdout.fileno(), self.tunnel.stdin.fileno())
        self.tunnel_channel.send(orders)
        self.selector.register(self.tunnel_channel.read_fd, selectors.EVENT_READ, self._tunnel_said)

    def _tunnel_said(self) -> None:
        assert self.tunnel_channel
        self.tunnel_at, self.tunnel_spoke = time.monotonic(), True
        for message in self.tunnel_channel.receive():
            if message["event"] != "beats":
                self.channel.send(message)
        if not self.tunnel_channel.open:
            self._forget(self.tunnel_channel.read_fd)
            self.channel.send({"event": "noise", "text": "odsgd agent: the tunnel of this host has ended"})
            self.channel.close()  # none of its processes is to blame, so that their ends are not told

    def _watch_tunnel(self) -> None:
        """It beats, too. One that is silent for too long is ended; one that has not spoken yet, if it is stopped."""
        if not self.tunnel or not self.tunnel_channel or not self.tunnel_channel.open:
            return
        now = time.monotonic()
        if not self.tunnel_spoke and linux.state(self.tunnel.pid) not in ("T", "t"):
            self.tunnel_at = now
        silent_s = now - self.tunnel_at
        if silent_s > (self.orders["tunnel"]["hang_timeout_s"] or math.inf):
            self.tunnel.kill()
        elif silent_s > warn_s(self.orders["tunnel"]["hang_timeout_s"]) and not self.tunnel_missed:
            self.tunnel_missed = True
            text, state = f"its tunnel has not answered for {silent_s:.0f} s", linux.state(self.tunnel.pid)
            self.channel.send({"event": "warning", "text": f"{text}: {STATES[state]}" if state in STATES else text})

    def _close_tunnel(self) -> None:
        """Hang up: it then takes its portals away, and ends."""
        if self.tunnel and self.tunnel.stdin:
            self.tunnel.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.tunnel.wait(TUNNEL_ENDED_WITHIN_S)

    # Ending

    def _reap(self) -> None:
        """Wait for every process that has ended: ours, and the orphans we have inherited."""
        with contextlib.suppress(ChildProcessError):
            while True:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if info is None:
                    return
                if info.si_pid in self.children:
                    self._ended(self.children[info.si_pid])
                else:
                    os.waitpid(info.si_pid, 0)

    def _ended(self, child: Child) -> None:
        _signal_group(child.pid, signal.SIGKILL)  # before the pid is free to become another process's
        code = child.popen.wait()
        for stream in child.streams:
            if stream.open:
                self._forward(child, stream.kind, stream.drain())
                self._forget(stream.fd)
            os.close(stream.fd)
        del self.children[child.pid]
        self.channel.send({"event": "exit", "process": child.name, "code": code})

    def _stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after `grace_s`; a second, shorter stop brings the SIGKILL forward."""
        now = time.monotonic()
        if not self.stopping:
            self._note_memory(self.children.values())
            for pid in self.children:
                _signal_group(pid, signal.SIGTERM)
                _signal_group(pid, signal.SIGCONT)  # a stopped process would not even notice
        self.stopping = True
        self.kill_at = min(self.kill_at or now + grace_s, now + grace_s)

    def _end_hung(self, name: str) -> None:
        """Have it print its stacks (one that is stopped does so when it goes on), and kill it soon."""
        for child in self.children.values():
            if child.name == name and child.kill_at is None:
                child.kill_at = time.monotonic() + STACKS_WITHIN_S
                with _unless_gone:
                    os.kill(child.pid, STACKS)
                    os.kill(child.pid, signal.SIGCONT)

    def _enforce(self) -> None:
        now = time.monotonic()
        for child in self.children.values():
            if child.kill_at is not None and now >= child.kill_at:
                _signal_group(child.pid, signal.SIGKILL)
        if self.kill_at is not None and now >= self.kill_at:
            for pid in self.children:
                _signal_group(pid, signal.SIGKILL)
            self.give_up_at = self.give_up_at or now + KILLED_WITHIN_S

    def _note_memory(self, children: Iterable[Child]) -> None:
        for child in children:
            self.mpi_memory |= linux.mpi_memory(child.pid)

    def _hopeless(self) -> bool:
        """A process can be beyond SIGKILL (waiting for a dead disk); the launcher must not wait for that."""
        return self.give_up_at is not None and time.monotonic() >= self.give_up_at

    def _sweep(self) -> None:
        """Kill the processes that have left their group: on Linux all of them have become our own descendants."""
        now = time.monotonic()
        give_up_at = max(self.give_up_at or now + KILLED_WITHIN_S, now + SWEPT_WITHIN_S)
        while time.monotonic() < give_up_at:
            left = linux.descendants(os.getpid())
            if not left:
                return
            for pid in left:
                with _unless_gone:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            self._reap()

    # The launcher

    def _read_channel(self) -> None:
        self.heard_at = time.monotonic()
        for message in self.channel.receive():
            if message.get("do") == "stop":
                self._stop(message["grace_s"])
            elif message.get("do") == "kill":
                self._stop(0.0)
            elif message.get("do") == "end":
                self._end_hung(message["process"])
            elif message.get("do") == "answer":
                self._answer(message["process"], message["line"])
            elif message.get("do") == "lost" and self.lost_file:
                _append_lines(self.lost_file, message["workers"])
            elif message.get("do") == "met":
                self._all_have_met()
            if self.tunnel_channel and message.get("do") in ("portals", "met"):
                self.portals += [portal["socket"] for portal in message.get("portals", ())
                                 if os.path.isabs(portal["socket"])]
                self.tunnel_channel.send(message)

    def _all_have_met(self) -> None:
        """The portals are closed behind them: no one else can connect."""
        for path, lasting in self.orders["sockets"].items():
            with _unless_gone:
                if not lasting:
                    os.unlink(path)

    def _check_channel(self) -> None:
        """Stop when the launcher has gone; leave output in the pipes while it is slow to take it."""
        silence_s = self.orders["silence_s"]
        if silence_s and time.monotonic() - self.heard_at > silence_s:
            self.channel.close()
        if not self.channel.open:
            self._forget(self.channel.read_fd)
            self._stop(ORPHANED_GRACE_S)
        self.channel.flush()
        if self.tunnel_channel:
            self.tunnel_channel.flush()
        full = len(self.channel.backlog) > MAX_BACKLOG
        if full != self.paused:
            self.paused = full
            for child in self.children.values():
                for stream in child.streams:
                    if full:
                        self._forget(stream.fd)
                    elif stream.open:
                        self._listen(child, stream)

    def _signalled(self, number: int, frame: object) -> None:
        self.signalled = self.ended_by = number
        self._stop(self.orders["grace_s"])

    def _tell_of_signal(self) -> None:
        """Somebody else than the launcher has told us to end: that is why our processes do."""
        if self.signalled is not None:
            self.channel.send({"event": "told", "signal": self.signalled})
            self.signalled = None

    def _drain_channel(self) -> None:
        deadline = time.monotonic() + SENT_WITHIN_S
        while self.channel.backlog and time.monotonic() < deadline:
            self.channel.flush()
            time.sleep(0.01)

    def _listen_to_signals(self) -> None:
        """They end a wait of the selector; of SIGCHLD, which tells that a process has ended, no more is asked."""
        read_fd, write_fd = self.wakeup = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)
        self.selector.register(read_fd, selectors.EVENT_READ, lambda: os.read(read_fd, CHUNK))

    def _close_signals(self) -> None:
        """A pod has many agents, one after the other, so that each closes its files."""
        signal.set_wakeup_fd(-1)
        self.selector.close()
        for fd in self.wakeup:
            os.close(fd)


def _read_report(text: str) -> Optional[Message]:
    """One report; empty for an empty line, None for what is none."""
    try:
        report = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) else None


def _signal_group(pgid: int, number: int) -> None:
    with _unless_gone:
        os.killpg(pgid, number)


def _new_lost_file() -> str:
    """An empty file that only this user can read; the processes of this host look into it for lost workers."""
    descriptor, path = tempfile.mkstemp(prefix="odsgd-lost-")
    os.close(descriptor)
    return path


def _append_lines(path: str, numbers: List[int]) -> None:
    """In one write, so that half a number is never read. A clean-up of old files may have taken the file away."""
    def safely(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW, 0o600)
    with open(path, "a", opener=safely) as file:
        file.write("".join(f"{number}\n" for number in numbers))


def main() -> int:
    """``python -m odsgd.launch.agent``."""
    packed = os.environ.pop(handshake.VARIABLE, None)
    try:
        if packed:
            orders, fd = handshake.receive_packed_orders(packed)
            os.chdir(orders["directory"])
            agent = Agent(orders, Channel(fd, fd))
        else:
            with open(0, "rb", buffering=0, closefd=False) as stdin:  # the bytes behind the line are the channel's
                line = stdin.readline()
            if not line.endswith(b"\n"):
                sys.exit("odsgd agent: the launcher has gone before saying what to do")
            agent = Agent(json.loads(line), Channel(0, 1))
    except OSError as error:
        sys.exit(f"odsgd agent on {socket.gethostname()}: {error}")
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
