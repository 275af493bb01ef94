"""The agent: one per host, it starts that host's processes, forwards what they say, and never outlives them or they it.

It is told what to do by JSON lines (stdin from `subprocess` or ssh; a socket from mpirun) and answers in JSON lines:

    in   {"processes": [{"name", "command", "env"}, ...], "env": {...}, "drop": [names], ...}
                                                         the first line: the job of this host, the secret included
         {"do": "stop", "grace_s": 5} | {"do": "kill"} | {"do": "ping"}
         {"do": "lost", "workers": [1]}              the job goes on without these: a line each in the ODSGD_LOST file
    out  {"event": "hello", "host": ..., "pid": ...}
         {"event": "started", "process": "worker 0", "pid": ...} | {"event": "unstartable", "process", "error"}
         {"event": "output", "process", "stream": "stdout", "text", "progress": false}
         {"event": "report", "process", "report": {...}}     what the process wrote on ODSGD_REPORT_FD
         {"event": "exit", "process", "code"}                after all of its output; negative: the signal that ended it
         {"event": "ended"}                                  nothing of the job is left on this host

Life of a process here: it is started in a session of its own, so that a signal reaches its children and no terminal
reaches it; the kernel kills it if the agent dies (PR_SET_PDEATHSIG); when it ends, what is left of its group is
killed before its exit is told. The agent is the reaper of orphans below it (PR_SET_CHILD_SUBREAPER), so that even a
grandchild with a session of its own is found in the end. If the channel to the launcher closes, breaks, or stays
silent for too long, everything is stopped. One thread, no locks: a fork in a threaded process is not safe.
"""
import base64
import ctypes
import hashlib
import hmac
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from odsgd.launch.addresses import address_towards, mpi_interface

CHUNK = 65536
MAX_LINE = 65536
MAX_BACKLOG = 1 << 20
"""Bytes not yet taken by the launcher, above which the processes' output is left in their pipes."""
ORPHANED_GRACE_S = 1.0
KILLED_WITHIN_S, SWEPT_WITHIN_S = 5.0, 0.2
PROGRESS_EVERY_S = 0.1
JOBS_VARIABLE = "ODSGD_AGENT_JOBS"
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
MPI_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
MPI_PRIVATE = re.compile(r"(OMPI|PMI|PMIX|PRTE|HYDRA|HYDI|MPI|MPIR(?!_CVAR_)|MPIEXEC|GFORKER)_\w+")
"""What mpirun tells the agent about itself; a process that believed it would speak into the agent's connection."""
MPI_MEMORY = re.compile(rb" (/dev/shm/mpich_\w+)$", re.MULTILINE)
"""Memory that MPICH's processes share, as /proc/PID/maps has it. It stays when they are killed, unless they have taken
its name away, as our workers do when they have met (kvstore/mpi.py); until then it is for the agent to remember."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else lambda *_: 0


class Lines:
    """Cuts a stream of bytes into lines, and into the frames of a progress bar that redraws its line with CR.

    >>> lines = Lines()
    >>> lines.feed(b"epoch 0\\n\\r 10%"), lines.feed(b"\\r 20%"), lines.feed(b"\\rdone\\n")
    ([('epoch 0', False), (' 10%', True)], [(' 20%', True)], [('done', False)])
    """

    _ENDS = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the very end may still become CR LF
    _MOVES = re.compile(r"\x1b\[\d*(;\d*)?[A-HJKf]")  # cursor movements would leave the line that is ours

    def __init__(self) -> None:
        self.rest = b""
        self.redrawn = False

    def feed(self, data: bytes) -> List[Tuple[str, bool]]:
        """The complete lines (False) and the newest frame (True) in what has come so far."""
        found: List[Tuple[str, bool]] = []
        data, start = self.rest + data, 0
        for end in self._ENDS.finditer(data):
            self._add(found, data[start:end.start()], progress=end.group() == b"\r")
            self.redrawn = end.group() == b"\r"
            start = end.end()
        self.rest = data[start:]
        if self.redrawn and self.rest.strip():
            self._add(found, self.rest, progress=True)
        if len(self.rest) > MAX_LINE:
            self._add(found, self.rest, progress=False)
            self.rest = b""
        return found

    def flush(self) -> List[Tuple[str, bool]]:
        """What stood there without an end of line when the stream ended."""
        rest, self.rest = self.rest.rstrip(b"\r"), b""
        found: List[Tuple[str, bool]] = []
        if rest:
            self._add(found, rest, progress=False)
        return found

    def _add(self, found: List[Tuple[str, bool]], piece: bytes, progress: bool) -> None:
        text = self._MOVES.sub("", piece.rstrip(b"\r").decode("utf-8", "replace"))
        if found and found[-1][1]:
            found.pop()  # what comes next stands in the place of a frame
        if text.strip() or not progress:
            found.append((text, progress))


class Child:
    """A running process and the three pipes it writes to."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", report_fd: int) -> None:
        self.name, self.popen, self.pid = name, popen, popen.pid
        assert popen.stdout and popen.stderr
        self.kinds = {report_fd: "report", popen.stdout.fileno(): "stdout", popen.stderr.fileno(): "stderr"}
        self.lines = {fd: Lines() for fd in self.kinds}
        self.open = list(self.kinds)  # reports first: why a process failed comes before that it ended
        self.progress_at = 0.0
        self.asking = False
        """For the other workers of its job, which it has not met yet."""

    def close(self) -> None:
        """Give the pipes back."""
        assert self.popen.stdout and self.popen.stderr
        self.popen.stdout.close()
        self.popen.stderr.close()
        os.close(next(iter(self.kinds)))


class Channel:
    """The two ends towards the launcher; writing never blocks, so that a stop is heard at any time."""

    def __init__(self, read_fd: int, write_fd: int, partial: bytes = b"") -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self.backlog = bytearray()
        self.partial = partial
        self.open = True
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, message: Dict[str, Any]) -> None:
        """Queue one message and write what can be written."""
        if self.open:
            self.backlog += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Write what the other end takes."""
        try:
            while self.backlog:
                del self.backlog[:os.write(self.write_fd, self.backlog[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def receive(self) -> List[Dict[str, Any]]:
        """The messages that have come; at the end of the stream `open` becomes false."""
        data = b""
        try:
            data = os.read(self.read_fd, CHUNK)
            if not data:
                self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *whole, self.partial = (self.partial + data).split(b"\n")
        return [_message(line) for line in whole if line.strip()]

    def close(self) -> None:
        """There is nobody to talk to any more."""
        self.open = False
        self.backlog.clear()


def _message(line: bytes) -> Dict[str, Any]:
    """One message; what a login shell prints before the agent speaks is passed on as `noise`."""
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    return message if isinstance(message, dict) else {"event": "noise", "text": line.decode("utf-8", "replace")}


class Agent:
    """See the head of the module. Invariants: a child is in `children` from its start until its exit is queued; after
    `stopping` is set no child is started; `run` returns only when `children` is empty or SIGKILL has not helped."""

    def __init__(self, job: Dict[str, Any], channel: Channel) -> None:
        self.job, self.channel = job, channel
        self.children: Dict[int, Child] = {}
        self.stopping = False
        self.kill_at: Optional[float] = None
        self.give_up_at: Optional[float] = None
        self.heard_at = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.paused = False
        self.lost_file = _new_lost_file() if job.get("tells_losses") else None
        self.mpi_memory: Set[str] = set()

    def run(self) -> int:
        """Start everything, stay until told to stop and everything is gone."""
        try:
            self._run()
        finally:
            for path in [*self.mpi_memory, *([self.lost_file] if self.lost_file else [])]:
                _quietly(os.unlink, path)
        self.channel.send({"event": "ended"})
        self._drain_channel()
        return 0

    def _run(self) -> None:
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._listen_to_signals()
        self.selector.register(self.channel.read_fd, selectors.EVENT_READ, self._told)
        self.channel.send({"event": "hello", "host": socket.gethostname(), "pid": os.getpid()})
        for spec in self.job["processes"]:
            self._start(spec)
        self._told()  # a stop may have come together with the job
        while not (self.stopping and (not self.children or self._hopeless())):
            for key, _ in self.selector.select(self._patience()):
                key.data()
            self._note_memory(child for child in self.children.values() if child.asking)
            self._reap()
            self._check_channel()
            self._enforce()
        self._sweep()

    # Starting

    def _start(self, spec: Dict[str, Any]) -> None:
        report_read, report_write = os.pipe()
        try:
            popen = subprocess.Popen(
                spec["command"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                env=self._environment(spec, report_write), pass_fds=(report_write,), start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            os.close(report_read)
            why = f"{spec['command'][0]}: {getattr(error, 'strerror', None) or error}"
            self.channel.send({"event": "unstartable", "process": spec["name"], "error": why})
            return
        finally:
            os.close(report_write)
        child = self.children[popen.pid] = Child(spec["name"], popen, report_read)
        for fd in child.open:
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ, _bind(self._read, child, fd))
        self.channel.send({"event": "started", "process": child.name, "pid": child.pid})

    def _environment(self, spec: Dict[str, Any], report_fd: int) -> Dict[str, str]:
        dropped = self.job["drop"]
        env = {name: value for name, value in os.environ.items()
               if name not in dropped and not MPI_PRIVATE.fullmatch(name)}
        env.update(self.job["env"])
        env.update(spec["env"])
        env["ODSGD_REPORT_FD"] = str(report_fd)
        if self.lost_file:
            env["ODSGD_LOST"] = self.lost_file
        env.setdefault("OMP_NUM_THREADS", str(self._threads()))
        if "DMLC_NODE_HOST" not in env:
            env["DMLC_NODE_HOST"] = address_towards(env["DMLC_PS_ROOT_URI"]) or "127.0.0.1"
        if "PMI_PORT" in env:
            env = {**mpi_interface(env), **env}
        if env.get("PYTHONPATH"):
            env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, env["PYTHONPATH"].split(os.pathsep)))
        return env

    def _threads(self) -> int:
        """The host's cores shared by its workers and servers (the scheduler computes nothing), at least one each."""
        agents = next((int(os.environ[name]) for name in MPI_LOCAL_SIZES if os.environ.get(name, "").isdigit()), 1)
        computing = sum(spec["name"] != "scheduler" for spec in self.job["processes"])
        return max(1, len(os.sched_getaffinity(0)) // max(1, computing * agents))

    # Reading

    def _read(self, child: Child, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        for text, progress in child.lines[fd].feed(data):
            self._forward(child, child.kinds[fd], text, progress)
        if not data:
            self._end_of_stream(child, fd)

    def _end_of_stream(self, child: Child, fd: int) -> None:
        for text, progress in child.lines[fd].flush():
            self._forward(child, child.kinds[fd], text, progress)
        self._forget(fd)
        child.open.remove(fd)

    def _forward(self, child: Child, kind: str, text: str, progress: bool) -> None:
        if kind == "report":
            self._forward_report(child, text)
            return
        if progress:
            now = time.monotonic()
            if now - child.progress_at < PROGRESS_EVERY_S:
                return
            child.progress_at = now
        self.channel.send({"event": "output", "process": child.name, "stream": kind, "text": text,
                           "progress": progress})

    def _forward_report(self, child: Child, text: str) -> None:
        try:
            report = json.loads(text)
        except ValueError:
            return  # a process killed while it wrote
        if isinstance(report, dict):
            child.asking = report.get("event") == "connecting"
            self.channel.send({"event": "report", "process": child.name, "report": report})

    def _forget(self, fd: int) -> None:
        try:
            self.selector.unregister(fd)
        except KeyError:
            pass  # reading is paused

    # Ending

    def _reap(self) -> None:
        """Take leave of every process that has ended: ours, and the orphans we have inherited."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            child = self.children.get(info.si_pid)
            if child is None:
                os.waitpid(info.si_pid, 0)
                continue
            _signal_group(child.pid, signal.SIGKILL)  # before the pid is free to become somebody else's
            _, status = os.waitpid(child.pid, 0)
            self._take_leave(child, _exit_code(status))

    def _take_leave(self, child: Child, code: int) -> None:
        child.popen.returncode = code  # we have waited for it ourselves
        for fd in list(child.open):
            while fd in child.open and _readable(fd):
                self._read(child, fd)
            if fd in child.open:  # a grandchild outside the group still holds the other end
                self._end_of_stream(child, fd)
        child.close()
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

    def _enforce(self) -> None:
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            for pid in self.children:
                _signal_group(pid, signal.SIGKILL)
            self.give_up_at = self.give_up_at or now + KILLED_WITHIN_S

    def _note_memory(self, children: Iterable[Child]) -> None:
        for child in children:
            self.mpi_memory |= mpi_memory(child.pid)

    def _hopeless(self) -> bool:
        """A process can be beyond SIGKILL (waiting for a dead disk); the launcher must not wait for that."""
        return self.give_up_at is not None and time.monotonic() >= self.give_up_at

    def _sweep(self) -> None:
        """Kill what has left its group: on Linux all of it has become our own descendants."""
        now = time.monotonic()
        give_up_at = max(self.give_up_at or now + KILLED_WITHIN_S, now + SWEPT_WITHIN_S)
        while time.monotonic() < give_up_at:
            left = descendants(os.getpid())
            if not left:
                return
            for pid in left:
                _quietly(os.kill, pid, signal.SIGKILL)
            time.sleep(0.02)
            self._reap()

    # The launcher

    def _told(self) -> None:
        self.heard_at = time.monotonic()
        for message in self.channel.receive():
            if message.get("do") == "stop":
                self._stop(message["grace_s"])
            elif message.get("do") == "kill":
                self._stop(0.0)
            elif message.get("do") == "lost" and self.lost_file:
                _append_lines(self.lost_file, message["workers"])

    def _check_channel(self) -> None:
        """Stop when nobody is there any more; leave output in the pipes while the launcher is slow to take it."""
        silence_s = self.job.get("silence_s")
        if silence_s and time.monotonic() - self.heard_at > silence_s:
            self.channel.close()
        if not self.channel.open:
            self._forget(self.channel.read_fd)
            self._stop(ORPHANED_GRACE_S)
        self.channel.flush()
        full = len(self.channel.backlog) > MAX_BACKLOG
        if full != self.paused:
            self.paused = full
            for child in self.children.values():
                for fd in child.open:
                    if full:
                        self._forget(fd)
                    else:
                        self.selector.register(fd, selectors.EVENT_READ, _bind(self._read, child, fd))

    def _drain_channel(self) -> None:
        deadline = time.monotonic() + 5.0
        while self.channel.backlog and time.monotonic() < deadline:
            self.channel.flush()
            time.sleep(0.01)

    def _patience(self) -> float:
        return 0.05 if self.stopping or self.channel.backlog else 1.0

    def _listen_to_signals(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop(self.job.get("grace_s", ORPHANED_GRACE_S)))
        self.selector.register(read_fd, selectors.EVENT_READ, lambda: os.read(read_fd, CHUNK))


def descendants(ancestor: int) -> List[int]:
    """Every living process below `ancestor`; zombies do not count. Empty where there is no /proc."""
    parents: Dict[int, int] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                parents[int(entry)] = int(fields[1])
    below, frontier = [], [ancestor]
    while frontier:
        parent = frontier.pop()
        children = [pid for pid, its_parent in parents.items() if its_parent == parent]
        below += children
        frontier += children
    return below


def mpi_memory(pid: int) -> Set[str]:
    """Files of shared memory that MPI has made for a process, and that somebody has to take away."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            return {path.decode() for path in MPI_MEMORY.findall(maps.read())}
    except OSError:  # it has ended, or there is no /proc
        return set()


def _die_with_parent(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
    return in_child


def _signal_group(pgid: int, number: int) -> None:
    _quietly(os.killpg, pgid, number)


def _quietly(call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except (ProcessLookupError, PermissionError, FileNotFoundError):
        pass


def _new_lost_file() -> str:
    """An empty file that only this user can read; the processes of this host look into it for lost workers."""
    descriptor, path = tempfile.mkstemp(prefix="odsgd-lost-")
    os.close(descriptor)
    return path


def _append_lines(path: str, numbers: List[int]) -> None:
    """In one write, so that nobody reads half a number. A clean-up of old files may have taken the file away."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, "".join(f"{number}\n" for number in numbers).encode())
    finally:
        os.close(descriptor)


def _readable(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(0))


def _exit_code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _bind(call: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: call(*args)


def proof(secret: str, nonce: str, rank: int) -> str:
    """What an agent started by mpirun shows, so that nobody else can take its place."""
    return hmac.new(bytes.fromhex(secret), f"agent {rank} {nonce}".encode(), hashlib.sha256).hexdigest()


def pack(jobs: Dict[str, Any]) -> str:
    """The jobs of all agents as one environment variable; Linux allows 128 KiB for it."""
    return base64.b64encode(zlib.compress(json.dumps(jobs).encode())).decode()


def unpack(text: str) -> Dict[str, Any]:
    """The reverse of `pack`."""
    jobs: Dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return jobs


def _from_mpirun(jobs: Dict[str, Any]) -> Tuple[Dict[str, Any], Channel]:
    """Find out which MPI rank we are, and report at the launcher's door."""
    rank = next((int(os.environ[name]) for name in MPI_RANKS if os.environ.get(name, "").isdigit()), None)
    if rank is None:
        sys.exit(f"odsgd agent: mpirun has not said which rank this is; looked for {', '.join(MPI_RANKS)}")
    connection = socket.create_connection(tuple(jobs["launcher"]), timeout=30)
    nonce = connection.makefile("rb").readline().decode().strip()
    connection.sendall(json.dumps({"rank": rank, "proof": proof(jobs["secret"], nonce, rank)}).encode() + b"\n")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    fd = connection.detach()
    return {**jobs["common"], **jobs["ranks"][rank]}, Channel(fd, fd)


def _from_stdin() -> Tuple[Dict[str, Any], Channel]:
    """Our job is the first line; what has come behind it is for the channel."""
    data = b""
    while b"\n" not in data:
        chunk = os.read(0, CHUNK)
        if not chunk:
            sys.exit("odsgd agent: the launcher has gone before saying what to do")
        data += chunk
    line, _, partial = data.partition(b"\n")
    return json.loads(line), Channel(0, 1, partial)


def main() -> int:
    """``python -m odsgd.launch.agent``."""
    jobs = os.environ.pop(JOBS_VARIABLE, None)
    try:
        job, channel = _from_mpirun(unpack(jobs)) if jobs else _from_stdin()
        if job.get("directory"):
            os.chdir(job["directory"])
        agent = Agent(job, channel)
    except OSError as error:
        sys.exit(f"odsgd agent on {socket.gethostname()}: {error}")
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
