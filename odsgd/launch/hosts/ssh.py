"""Starting an agent on a host: as a subprocess, by ssh, or by a program whose agents call us (`listener.py`).

Each way ends in an `AgentConnection`. The job's secret never stands on a command line, which every user of a machine
can read: a subprocess and ssh get it on stdin, with their orders; mpirun and srun carry it in an environment variable.
"""
import errno
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from kvstore.errors import ConfigError, KVStoreError
from odsgd.config.launch import SET_BY_LAUNCHER
from odsgd.launch import plan as planning
from odsgd.launch.addresses import is_loopback, node_host, numeric
from odsgd.launch.hostfile import Host
from odsgd.launch.linux import python_words
from odsgd.launch.messages import Channel, Orders, ProcessOrders, RemoteSocket, TunnelOrders
from odsgd.launch.plan import Job, Plan, Process

SSH_OPTIONS = tuple(word for option in (
    "BatchMode=yes", "ServerAliveInterval=15", "LogLevel=ERROR", "ControlMaster=no", "ClearAllForwardings=yes",
    "RequestTTY=no") for word in ("-o", option))
"""With its usual LogLevel ssh announces each new host in the middle of the job's output. With ControlMaster=no ssh uses
a connection that the user shares, and leaves none behind that would hold our streams."""
CONNECTED_WITHIN_S = 30
ROOM_WITHIN_S = 3.0
"""How long we try again if the machine has no memory for one more process, or its user may not start one more."""
NEW_HOST_KEY = ("-o", "StrictHostKeyChecking=accept-new")
"""ssh accepts a host that it has never met, and refuses a host whose key has changed. With --secure it refuses both:
the job's secret goes only to hosts that ssh knows."""
SILENCE_S = 300.0
"""After this silence of its launcher a remote agent ends its processes. It is long, because a launcher whose output
nobody reads (`| less`, Ctrl-S, Ctrl-Z) is silent as well; an agent notices a closed connection at once."""
AGENT = python_words("odsgd.launch.agent.__main__")


class ReachError(KVStoreError):
    """A host could not be prepared."""


@dataclass
class AgentConnection:
    """One agent, as the launcher sees it."""

    host: str
    processes: List[Process]
    channel: Channel
    starter: "Optional[subprocess.Popen[bytes]]" = None  # the local process at the channel's end; None: a socket
    starter_name: str = "its agent"
    tunnel: str = ""  # where its tunnel listens
    socket_namespace: str = ""  # the folder or network of its sockets; another agent's may be the same
    reaches_others: bool = False  # its tunnel has made the sockets of other hosts
    greeted: bool = False  # the agent has spoken: there may be processes of the job there
    ended: bool = False  # the agent has said that nothing is left there
    joiner: bool = False  # its process came later, and the agent ends with it

    @property
    def names(self) -> List[str]:
        """The names of its processes. One that joins in the place of another has an agent of its own."""
        return [process.name for process in self.processes]

    def close(self) -> None:
        """Hang up, once; the agent then ends the processes that are left."""
        self.channel.close()
        if self.starter and self.starter.stdin:
            self.starter.stdin.close()
        else:
            os.close(self.channel.read_fd)


def program(variable: str, default: str) -> List[str]:
    """The words that run a program; the user may set others in this variable."""
    return shlex.split(os.environ.get(variable, "")) or [default]


def check_programs(job: Job) -> None:
    """ConfigError, before anything has been started, if this machine lacks a program that the job needs."""
    needed = {"ssh": "ODSGD_SSH"} if job.launcher == "ssh" else {}
    if job.secure:
        needed["openssl"] = "ODSGD_OPENSSL"
    if job.sync_dst_dir:
        needed["rsync"] = "ODSGD_RSYNC"
    for name, variable in needed.items():
        found = program(variable, name)[0]
        if not shutil.which(found):
            raise ConfigError(f"{found} is not a program on this machine; install {name} or name one in {variable}")


def check_tunnels(job: Job, scheduler_host: str) -> None:
    """ConfigError if two tunnels would listen at one port of one machine. The scheduler has a tunnel, too."""
    known = {scheduler_host: "the launching machine"} if job.num_servers else {}
    workers, servers = planning.place(job)
    for host in dict.fromkeys([*workers, *servers]) if job.secure and job.port else ():
        address = numeric(host.address)
        if address and is_loopback(address) and not is_loopback(scheduler_host):
            address = scheduler_host
        if address in known:
            raise ConfigError(f"--secure --port {job.port}: {host.target} of the hostfile is {known[address]}, where a "
                              "tunnel listens at that port already; leave the host out, or leave out --port")
        if address:
            known[address] = f"the same machine as {host.target}"


def orders(job: Job, processes: Sequence[Process], remote: bool, tunnel: Optional[TunnelOrders] = None) -> Orders:
    """The orders to the agent of these processes; variables that all of them share are sent once."""
    shared = dict(set.intersection(*(set(process.env.items()) for process in processes))) if processes else {}
    own = [ProcessOrders(process.name, list(process.command),
                         {name: value for name, value in process.env.items() if name not in shared})
           for process in processes]
    return Orders(own, shared, sorted(SET_BY_LAUNCHER | planning.MISLEADING), job.grace_s,
                  SILENCE_S if remote else None, job.on_worker_loss == "continue",
                  {path: lasting for process in processes for path, lasting in process.files.items()}, tunnel)


def tunnel_orders(job: Job, plan: Plan, host: Host) -> TunnelOrders:
    """The orders to the tunnel of a host."""
    scheduler_host = plan.scheduler_address[0]
    address = scheduler_host if host.here else node_host(host.address, scheduler_host)
    return TunnelOrders(plan.certificate, job.port, scheduler_host, address, job.hang_timeout_s,
                        [name for process in plan.on(host) for name in process.sockets])


def remote_sockets(agents: Sequence[AgentConnection]) -> List[Tuple[AgentConnection, List[RemoteSocket]]]:
    """The remote sockets of each tunnel. Of agents that share a namespace, the first one's tunnel makes them."""
    firsts = {agent.socket_namespace: agent for agent in reversed(agents)}
    return [(one, [RemoteSocket(name, other.tunnel, lasting) for other in agents
                   if one is firsts[one.socket_namespace] and other.socket_namespace != one.socket_namespace
                   for process in other.processes for name, lasting in process.sockets.items()]) for one in agents]


def working_directory(job: Job) -> str:
    """The working directory of the job's processes on other hosts."""
    return job.sync_dst_dir or os.getcwd()


def remote_command(job: Job) -> str:
    """One line for any shell on the host: `cd`, `&&` and `env` are the same in sh and csh."""
    path = planning.package_path(job)
    words = [*(["env", f"PYTHONPATH={path}"] if path else []), job.remote_python, *AGENT]
    return f"cd {quoted(working_directory(job))} && exec {' '.join(map(quoted, words))}"


def quoted(word: str) -> str:
    """A word for a shell on a host, which knows where its ~ is."""
    home, rest = ('"$HOME"/', word[2:]) if word.startswith("~/") else ("", word)
    return home + shlex.quote(rest)


def ssh_to(job: Job, host: Host, within_s: int = CONNECTED_WITHIN_S) -> List[str]:
    """The words of a command line up to the host's name."""
    return [*ssh(job.secure, within_s), *(["-p", str(host.port)] if host.port else [])]


def ssh(known_hosts: bool, within_s: int) -> List[str]:
    """The words that run ssh; with `known_hosts` it refuses hosts whose keys it does not know."""
    return [*program("ODSGD_SSH", "ssh"), *(() if known_hosts else NEW_HOST_KEY), *SSH_OPTIONS,
            "-o", f"ConnectTimeout={within_s}"]


def open_agent(job: Job, plan: Plan, host: Host) -> AgentConnection:
    """An agent on a host, with the host's processes: a subprocess here, by ssh elsewhere."""
    if host.here:
        name, command = "its agent", [sys.executable, *AGENT]
        env = {**planning.scrubbed(os.environ), "PYTHONPATH": planning.package_path(job)}
    else:
        name, command = "ssh", [*ssh_to(job, host), host.target, remote_command(job)]
        env = dict(os.environ)
    starter, until = None, time.monotonic() + ROOM_WITHIN_S
    while starter is None:
        try:
            starter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       bufsize=0, env=env, start_new_session=True)  # Ctrl-C is for the launcher alone
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM) or time.monotonic() > until:
                raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from None
            time.sleep(0.2)
    assert starter.stdin and starter.stdout
    channel = Channel(starter.stdout.fileno(), starter.stdin.fileno())
    processes = plan.on(host)
    tunnel = tunnel_orders(job, plan, host) if plan.certificate else None
    channel.send(orders(job, processes, not host.here, tunnel))
    return AgentConnection(host.address, processes, channel, starter, name)


def synchronise(job: Job) -> None:
    """Copy the working directory to `--sync-dst-dir` on every host, all at once; ReachError if a copy fails."""
    copies = []
    try:
        for host in dict.fromkeys(job.slots):
            command = [*program("ODSGD_RSYNC", "rsync"), "-az", "-e", shlex.join(ssh_to(job, host)),
                       os.path.join(os.getcwd(), ""), f"{host.target}:{job.sync_dst_dir}"]
            try:
                copies.append((host, subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)))
            except OSError as error:
                raise ConfigError(f"--sync-dst-dir: cannot run {command[0]}: {error.strerror}") from None
        for host, copy in copies:
            complaint = copy.communicate()[1].decode("utf-8", "replace").strip().splitlines()
            if copy.returncode:  # the first line has the cause; the others only say that rsync has failed
                raise ReachError(f"copying the working directory to {host.target}:{job.sync_dst_dir} failed: "
                                 f"rsync ended with exit code {copy.returncode}"
                                 + (f": {complaint[0]}" if complaint else ""))
    finally:
        for _, copy in copies:
            if copy.poll() is None:
                copy.kill()
                copy.communicate()
