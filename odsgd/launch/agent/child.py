"""The processes that the agent starts here: those of the job, with their environment, pipes and beats, and the tunnel.

Each has a session of its own: a signal to its group reaches its children, and no terminal sends it signals. The kernel
kills it if the agent dies.
"""
import contextlib
import errno
import functools
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Sequence

from kvstore.job.pulse import STACKS
from odsgd.launch import hook, linux
from odsgd.launch.addresses import own_address, ring_interface
from odsgd.launch.lines import Stream
from odsgd.launch.messages import Beats, Channel, HostWarning, Noise, Orders, ProcessOrders, TunnelOrders
from odsgd.launch.policy.liveness import KERNEL_STATES, warn_s

PROGRESS_EVERY_S = 0.1
STACKS_WITHIN_S = 0.5
"""How long a process that hangs has to print its stacks."""
SILENT_S = 3.0
"""After this time without a beat the agent asks the kernel for the state of the process."""
TUNNEL_ENDED_WITHIN_S = 1.0
MPI_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
MPI_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
MPI_PRIVATE = re.compile(r"(OMPI|PMI|PMIX|PRTE|HYDRA|HYDI|MPI|MPIR(?!_CVAR_)|MPIEXEC|GFORKER)_\w+")
"""Variables in which mpirun describes the agent; a process that used them would write into the agent's connection."""

unless_gone = contextlib.suppress(ProcessLookupError, PermissionError, FileNotFoundError, IsADirectoryError)


class StartError(Exception):
    """Says why a process could not be started."""


class Child:
    """A running process."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", streams: List[Stream]) -> None:
        self.name, self.popen, self.pid, self.streams = name, popen, popen.pid, streams
        self.progress_at = 0.0
        self.garbled = False
        """The user has been told that a report could not be read."""
        self.connecting = False
        """It asks for the others, and has not met them yet."""
        self.beat: Dict[str, Any] = {}
        self.beat_at: Optional[float] = None
        self.stopped_at: Optional[float] = None
        self.kill_at: Optional[float] = None

    def last_beat(self, now: float) -> Optional[Dict[str, Any]]:
        """Its last beat and the beat's age; None: no beat has come, and the kernel does not call it stopped."""
        state = ""
        if self.beat_at is None or now - self.beat_at > SILENT_S:
            state = linux.state(self.pid)
        if self.beat_at is None:
            self.stopped_at = (self.stopped_at or now) if state == "T" else None
            return {"silent_s": round(now - self.stopped_at, 1), "state": state} if self.stopped_at else None
        return {**self.beat, "silent_s": round(now - self.beat_at, 2), "state": state}

    def shows_progress(self) -> bool:
        """Whether it is time to forward a frame of its progress bar."""
        now = time.monotonic()
        due = now - self.progress_at >= PROGRESS_EVERY_S
        if due:
            self.progress_at = now
        return due

    def signal(self, number: int) -> None:
        """Send a signal to it and to the processes of its group."""
        with unless_gone:
            os.killpg(self.pid, number)

    def end_hung(self) -> None:
        """Have it print its stacks (a stopped process does so when it goes on), and kill it soon."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + STACKS_WITHIN_S
            with unless_gone:
                os.kill(self.pid, STACKS)
                os.kill(self.pid, signal.SIGCONT)

    def answer_mpi(self, line: Optional[str]) -> None:
        """Answer its MPI; None cuts it off. MPI makes one request at a time, so there is room for the answer."""
        for stream in self.streams:
            if stream.kind == "mpi":
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(stream.fd)) as link:
                    link.shutdown(socket.SHUT_RDWR) if line is None else link.send(line.encode() + b"\n")


def start(process: ProcessOrders, orders: Orders, folder: str, lost_file: Optional[str]) -> Child:
    """Start a process; servers and the scheduler work in `folder`."""
    pipes = {kind: os.pipe() for kind in ("report", "stdout", "stderr")}  # report first: the reason before the exit
    told = {"ODSGD_REPORT_FD": pipes["report"][1]}
    if "PMI_RANK" in {**orders.env, **process.env}:
        here, there = socket.socketpair()
        pipes["mpi"] = here.detach(), there.detach()
        told["PMI_FD"] = pipes["mpi"][1]
    program, *arguments = process.command
    try:
        popen = subprocess.Popen(
            [os.path.abspath(program) if os.sep in program else program, *arguments],
            stdin=subprocess.DEVNULL, stdout=pipes["stdout"][1], stderr=pipes["stderr"][1],
            env={**environment(process, orders, lost_file), **{name: str(fd) for name, fd in told.items()}},
            cwd=None if process.name.startswith("worker") else folder, pass_fds=tuple(told.values()),
            start_new_session=True, preexec_fn=functools.partial(linux.die_with, os.getpid()))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        for read_fd, _ in pipes.values():
            os.close(read_fd)
        limit = "; raise `ulimit -n` there" if getattr(error, "errno", None) == errno.EMFILE else ""
        raise StartError(f"{program}: {getattr(error, 'strerror', None) or error}{limit}") from None
    finally:
        for _, write_fd in pipes.values():
            os.close(write_fd)
    return Child(process.name, popen, [Stream(kind, read_fd) for kind, (read_fd, _) in pipes.items()])


def environment(process: ProcessOrders, orders: Orders, lost_file: Optional[str]) -> Dict[str, str]:
    """The agent's own variables, the job's, and variables that only this host knows."""
    inherited = {name: value for name, value in os.environ.items()
                 if name not in orders.drop and not MPI_PRIVATE.fullmatch(name)}
    env = {**inherited, **orders.env, **process.env}
    beside = os.path.dirname(sys.executable)  # `odsgd` and `python` of this environment, which ssh may not know
    env["PATH"] = os.pathsep.join([env.get("PATH", os.defpath), beside])
    if lost_file:
        env["ODSGD_LOST"] = lost_file
    env.setdefault("OMP_NUM_THREADS", str(_threads(orders)))
    env["DMLC_NODE_HOST"] = own_address(env.get("DMLC_NODE_HOST"), env["DMLC_PS_ROOT_URI"])
    if "RANK" in env and "LOCAL_RANK" not in env:
        env.update(_local_rank())
    if "PMI_RANK" in env:
        env = {**ring_interface(env), **env}
    path = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
    if not process.name.startswith("worker"):
        env["ODSGD_MODULES"] = os.getcwd()  # it runs in another folder
    elif "ODSGD_STORE" in env:
        path.insert(0, hook.FOLDER)
    if path:
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path))
    return env


def _local_rank() -> Dict[str, str]:
    """A worker's place among the workers of its host, by what mpirun tells each agent; empty if it tells nothing."""
    found = {name: _number(variables) for name, variables in
             (("LOCAL_RANK", MPI_LOCAL_RANKS), ("LOCAL_WORLD_SIZE", MPI_LOCAL_SIZES))}
    return {name: number for name, number in found.items() if number}


def _threads(orders: Orders) -> int:
    """The host's cores shared by its workers and servers (the scheduler computes nothing), at least one each."""
    computing = sum(process.name != "scheduler" for process in orders.processes)
    agents = int(_number(MPI_LOCAL_SIZES) or 1) if _number(MPI_LOCAL_RANKS) else 1  # else the size is sbatch's own
    return max(1, linux.cores() // max(1, computing * agents))


def _number(variables: Sequence[str]) -> str:
    """The first of these variables that holds a number; empty if none does."""
    return next((os.environ[name] for name in variables if os.environ.get(name, "").isdigit()), "")


class TunnelProcess:
    """The tunnel of this host (`tunnel.py`). Passes on to the launcher what it says, and kills it if it is silent."""

    def __init__(self, orders: TunnelOrders, launcher: Channel) -> None:
        goes_on = functools.partial(linux.die_with, os.getpid(), signal.SIGCONT)  # so a stopped tunnel sees our end
        self.popen = subprocess.Popen([sys.executable, *linux.python_words("odsgd.launch.connections.tunnel")],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
                                      preexec_fn=goes_on)
        assert self.popen.stdin and self.popen.stdout
        self.channel = Channel(self.popen.stdout.fileno(), self.popen.stdin.fileno())
        self.channel.send(orders)
        self._launcher, self._hang_timeout_s = launcher, orders.hang_timeout_s
        self._heard_at = time.monotonic()
        self._spoke = self._warned = False

    def read(self) -> None:
        """Pass on what the tunnel says. If it has ended, hang up, so that no process is blamed for its own end."""
        self._heard_at, self._spoke = time.monotonic(), True
        for message in self.channel.receive():
            if not isinstance(message, Beats):
                self._launcher.send(message)
        if not self.channel.open:
            self._launcher.send(Noise("odsgd agent: the tunnel of this host has ended"))
            self._launcher.close()

    def watch(self) -> None:
        """Kill a tunnel that is silent for too long. Before its first word only a stopped one is silent."""
        if not self.channel.open:
            return
        now = time.monotonic()
        state = linux.state(self.popen.pid)
        if not self._spoke and state not in ("T", "t"):
            self._heard_at = now
        silent_s = now - self._heard_at
        if silent_s > (self._hang_timeout_s or math.inf):
            self.popen.kill()
        elif silent_s > warn_s(self._hang_timeout_s) and not self._warned:
            self._warned = True
            text = f"its tunnel has not answered for {silent_s:.0f} s"
            self._launcher.send(HostWarning(f"{text}: {KERNEL_STATES[state]}" if state in KERNEL_STATES else text))

    def close(self) -> None:
        """Hang up: the tunnel then removes its sockets and ends."""
        assert self.popen.stdin
        self.popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(TUNNEL_ENDED_WITHIN_S)
