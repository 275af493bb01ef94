"""How an agent gets onto a host: a subprocess, ssh or mpirun; each way ends in a `Link` to it.

The job's secret never stands on a command line, where every user of a machine can read it: a subprocess and ssh get
the whole job on stdin; mpirun takes it over in an environment variable that is exported by name.
"""
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from typing import Any, Dict, List, Optional, Sequence

from kvstore.errors import ConfigError, KVStoreError
from odsgd.launch import agent
from odsgd.launch import plan as planning
from odsgd.launch.hosts import Host
from odsgd.launch.plan import Job, Plan, Process

SSH_OPTIONS = ("-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
SILENCE_S = 300.0
"""A remote agent that has heard nothing for so long is cut off, and ends its processes. Long, since a launcher whose
output nobody takes (`| less`, Ctrl-S, Ctrl-Z) is silent as well; a connection that closes is noticed at once."""
HANDSHAKE_S = 5.0
AGENT = ("-m", "odsgd.launch.agent")


class ReachError(KVStoreError):
    """A host could not be prepared."""


class Link:
    """The way to one agent: a channel, and the local process that carries it (none for a socket)."""

    def __init__(self, host: str, names: Sequence[str], channel: agent.Channel,
                 carrier: "Optional[subprocess.Popen[bytes]]" = None, carrier_name: str = "its agent") -> None:
        self.host, self.names, self.channel = host, list(names), channel
        self.carrier, self.carrier_name = carrier, carrier_name
        self.greeted = False
        """The agent has spoken: there may be processes of the job there."""
        self.ended = False
        """The agent has said that nothing is left there."""

    def close(self) -> None:
        """Hang up; an agent that has not been told to stop does so now."""
        self.channel.close()
        if self.carrier and self.carrier.stdin:
            self.carrier.stdin.close()
        elif self.channel.read_fd >= 0:
            os.close(self.channel.read_fd)
            self.channel.read_fd = -1


def check_programs(job: Job) -> None:
    """Refuse, before anything has been started, what this machine has no program for."""
    needed = {"ssh": ("ODSGD_SSH", "ssh")} if job.launcher == "ssh" else {}
    if job.sync_dst_dir:
        needed["rsync"] = ("ODSGD_RSYNC", "rsync")
    for name, (variable, default) in needed.items():
        program = _program(variable, default)[0]
        if not shutil.which(program):
            raise ConfigError(f"{program} is not a program on this machine; install {name} or name one in {variable}")
    if job.launcher == "mpi":
        _find_mpirun()


# What every agent is told

def agent_job(job: Job, processes: Sequence[Process], remote: bool) -> Dict[str, Any]:
    """The description of one host's part of the job."""
    shared = dict(set.intersection(*(set(process.env.items()) for process in processes))) if processes else {}
    specs = [{"name": process.name, "command": list(process.command),
              "env": {name: value for name, value in process.env.items() if name not in shared}}
             for process in processes]
    return {"processes": specs, "env": shared, "drop": sorted(planning.OURS | planning.MISLEADING),
            "grace_s": job.grace_s, "silence_s": SILENCE_S if remote else None,
            "tells_losses": job.on_worker_loss == "continue"}


# This machine, and ssh

def open_local(job: Job, plan: Plan, host: Host) -> Link:
    """An agent on this machine."""
    env = planning.scrubbed(os.environ)
    env["PYTHONPATH"] = planning.package_path(job)
    return _open(job, plan, host, [sys.executable, *AGENT], env, "its agent")


def open_ssh(job: Job, plan: Plan, host: Host) -> Link:
    """An agent on another host."""
    port = ["-p", str(host.port)] if host.port else []
    command = [*_program("ODSGD_SSH", "ssh"), *SSH_OPTIONS, *port, host.target, remote_command(job)]
    return _open(job, plan, host, command, dict(os.environ), "ssh")


def remote_command(job: Job) -> str:
    """One line for the shell over there, whichever it is: `cd`, `&&` and `env` are the same in sh and csh."""
    path = planning.package_path(job)
    words = ["env", f"PYTHONPATH={path}"] if path else []
    words += [job.remote_python, *AGENT]
    directory = job.sync_dst_dir or os.getcwd()
    return f"cd {shlex.quote(directory)} && exec {' '.join(map(shlex.quote, words))}"


def _open(job: Job, plan: Plan, host: Host, command: List[str], env: Dict[str, str], carrier_name: str) -> Link:
    try:
        carrier = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   bufsize=0, env=env, start_new_session=True)  # Ctrl-C is for the launcher alone
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from None
    assert carrier.stdin and carrier.stdout
    channel = agent.Channel(carrier.stdout.fileno(), carrier.stdin.fileno())
    processes = plan.on(host)
    channel.send(agent_job(job, processes, remote=not host.here))
    return Link(host.address, [process.name for process in processes], channel, carrier, carrier_name)


def synchronise(job: Job, hosts: Sequence[Host]) -> None:
    """Copy the working directory to `--sync-dst-dir` on every host, all at once; any failure is the job's."""
    copies = []
    try:
        for host in hosts:
            shell = [*_program("ODSGD_SSH", "ssh"), *SSH_OPTIONS, *(["-p", str(host.port)] if host.port else [])]
            command = [*_program("ODSGD_RSYNC", "rsync"), "-az", "-e", " ".join(map(shlex.quote, shell)),
                       os.path.join(os.getcwd(), ""), f"{host.target}:{job.sync_dst_dir}"]
            try:
                copies.append((host, subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)))
            except OSError as error:
                raise ConfigError(f"--sync-dst-dir: cannot run {command[0]}: {error.strerror}") from None
        for host, copy in copies:
            complaint = copy.communicate()[1].decode("utf-8", "replace").strip().splitlines()
            if copy.returncode:
                raise ReachError(f"copying the working directory to {host.target}:{job.sync_dst_dir} failed: "
                                 f"rsync ended with exit code {copy.returncode}"
                                 + (f": {complaint[-1]}" if complaint else ""))
    finally:
        for _, copy in copies:
            if copy.poll() is None:
                copy.kill()
                copy.communicate()


def _program(variable: str, default: str) -> List[str]:
    return shlex.split(os.environ.get(variable, "")) or [default]


# mpirun

class Mpirun:
    """mpirun places one agent per worker; the agents then come to this machine through a socket.

    mpirun mixes the output of its ranks and forwards stdin to the first only, so it carries nothing but the start. An
    agent proves with the job's secret that it belongs to the job.
    """

    def __init__(self, job: Job, plan: Plan) -> None:
        self.plan = plan
        self.ranks = [plan.on(Host(f"MPI rank {rank}")) for rank in range(job.num_workers)]
        command = mpirun_command(job)
        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listener.bind((plan.root[0], 0))
        self.listener.listen(128)
        self.listener.setblocking(False)
        self.waiting = set(range(job.num_workers))
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, bufsize=0, env=self._environment(job),
                                        start_new_session=True)

    def accept(self) -> Optional[Link]:
        """The link to an agent that has come; None for a visitor that cannot prove what it is."""
        connection, _ = self.listener.accept()
        nonce = secrets.token_hex(16)
        try:
            connection.settimeout(HANDSHAKE_S)
            connection.sendall(nonce.encode() + b"\n")
            answer = json.loads(_first_line(connection))
            rank, shown = int(answer["rank"]), str(answer["proof"])
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return None
        expected = agent.proof(self.plan.secret, nonce, rank)
        if rank not in self.waiting or not secrets.compare_digest(shown.encode(), expected.encode()):
            connection.close()
            return None
        self.waiting.remove(rank)
        names = [process.name for process in self.ranks[rank]]
        fd = connection.detach()
        return Link(f"MPI rank {rank}", names, agent.Channel(fd, fd))

    def _environment(self, job: Job) -> Dict[str, str]:
        ranks = [agent_job(job, processes, remote=True) for processes in self.ranks]
        address = list(self.listener.getsockname())
        exported = {"PYTHONPATH": planning.package_path(job), agent.JOBS_VARIABLE: agent.pack({
            "launcher": address, "secret": self.plan.secret, "ranks": ranks, "common": {"directory": os.getcwd()}})}
        # In front: MPICH's mpirun does not see the last variable of its environment when it exports by name.
        return {**exported, **planning.scrubbed(os.environ), **exported}


def mpirun_command(job: Job) -> List[str]:
    """The command line for the mpirun found here; the secret is behind the exported name only."""
    program = _find_mpirun()
    names = (agent.JOBS_VARIABLE, "PYTHONPATH")
    hosts: Dict[str, int] = {}
    for host in job.slots:
        hosts[host.address] = hosts.get(host.address, 0) + 1
    listed = ",".join(f"{address}:{slots}" for address, slots in hosts.items())
    if _is_open_mpi(program):
        # Bound to one core, as Open MPI does for few ranks, a worker and its threads would share that core.
        options = ["--bind-to", "none", "--oversubscribe", *(["--host", listed] if listed else [])]
        options += [word for name in names for word in ("-x", name)]
    else:
        options = [*(["-hosts", listed] if listed else []), "-genvlist", ",".join(names)]
    return [*program, "-n", str(job.num_workers), *options, job.remote_python, *AGENT]


def _find_mpirun() -> List[str]:
    given = _program("ODSGD_MPIRUN", "")
    if given != [""]:
        return given
    beside_python = os.path.dirname(sys.executable)  # where the wheel `mpich` puts it
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name) or shutil.which(name, path=beside_python)
        if found:
            return [found]
    raise ConfigError("--launcher mpi: neither mpirun nor mpiexec is on PATH; install Open MPI or MPICH "
                      "(`pip install mpich` will do), or name the program in ODSGD_MPIRUN")


def _is_open_mpi(program: List[str]) -> bool:
    try:
        told = subprocess.run([*program, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--launcher mpi: cannot run {program[0]}: {why}") from None
    return any(name in told for name in (b"Open MPI", b"OpenRTE", b"PRRTE", b"prte"))


def _first_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > 1024:
            raise ValueError("not an agent")
        line += byte
    return line
