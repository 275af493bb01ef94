"""From a request (`Job`) to its processes, their hosts and environments (`Plan`). Nothing is started here.

Placement. The hostfile is a list of slots, in its order. Workers take one slot each, then servers the next ones; after
the last slot comes the first again. So `-n 4 -s 1` on four hosts of one slot puts the server beside worker 0, and
`-n 4 -s 4` puts one beside every worker. With `-s auto` server k is on the host of worker k whatever the slots.
The scheduler only introduces the others to each other, and runs on the launching machine.

Sockets. The processes of a local job meet by sockets in the file system (ps-lite's DMLC_LOCAL), which no network and no
other user reaches. ps-lite names them /tmp/PORT, so PORT is a number that no other job has. The agent removes the
names when all have met.

A job without servers has no scheduler either. If its workers send to each other, they use MPI, and the launcher
introduces them (`pmi.py`).

With a tunnel between hosts (`--secure`) each process has one address that is the same on all hosts: its socket's file,
or with MPI a port of the loopback interface that no other worker has. `tunnel.py` opens it on the other hosts.
"""
import collections
import ipaddress
import os
import re
import secrets
import sys
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from kvstore._version import running_versions
from kvstore.job import environment
from odsgd.config.launch import AGENTS_CALL, NO_STORE, SET_BY_LAUNCHER, JobOptions
from odsgd.launch.addresses import LOOPBACK, node_host
from odsgd.launch.hostfile import Host

LOCAL = Host("127.0.0.1", here=True)

SOCKETS = "/tmp"  # where ps-lite has them
MPI_PORTS = range(10240, 32768)  # of the loopback interface; Linux uses higher ones for connections
KEPT_ON_LOOPBACK = {"FI_TCP_IFACE": "lo", "UCX_NET_DEVICES": "lo"}
"""Variables that keep MPI on the loopback interface, with libfabric or with UCX."""
THROUGH_TUNNEL = {**KEPT_ON_LOOPBACK, "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
"""MPI uses libfabric: only it lets the launcher choose its port, and connects to another host by loopback."""
LIBFABRIC_PORT = ("FI_TCP_PORT_LOW_RANGE", "FI_TCP_PORT_HIGH_RANGE")
FIRST_NUMBER = 2 ** 30  # of a socket in the file system; above every TCP port

#: Removed unless --env sets them (docs/reference/environment.md). ps-lite would bind every process to PORT, which many
#: tools set; MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RUN_ID would lead PyTorch, or a store, into an outer job.
MISLEADING = frozenset(("PORT", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_GPUS_PER_TASK",
                        "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"))
#: Variables that other hosts get without --env: the settings of the libraries that a job uses.
FORWARDED = re.compile(r"(MXNET|DMLC|PS|OMP|KMP|GOMP|MKL|OPENBLAS|DGL|UCX|FI|MPICH|MPIR_CVAR)_\w+"
                       r"|LD_LIBRARY_PATH|PYTHON(UNBUFFERED|HASHSEED|WARNINGS)")


@dataclass(frozen=True)
class Placement:
    """How many processes a job has, and where they run."""

    command: Tuple[str, ...]
    num_workers: int
    num_servers: int  # 0: a job without parameter server, hence without scheduler
    servers_beside_workers: bool = False
    launcher: str = "local"
    slots: Tuple[Host, ...] = ()  # one entry per slot of the hostfile; none for a local job


@dataclass(frozen=True)
class Job(JobOptions, Placement):
    """A user's request. `secure` is true if a tunnel carries the connections between hosts."""

    known_hosts: bool = False  # processes copy files only to hosts that ssh knows
    least_workers: Optional[int] = None  # the fewest workers of a restart; None: all
    most_workers: Optional[int] = None  # with `least_workers`: `num_workers` before workers were left out
    reads: Tuple[str, ...] = ()  # files and folders that every worker needs, as its command names them
    secret: Optional[str] = field(default=None, repr=False)  # pods have it already; None: a new one
    agents_port: int = 0  # where pods call the launcher
    live: bool = False  # the launcher shows the job's status on a terminal
    closed: str = ""  # why no worker can ever join while it runs
    server_command: Optional[Tuple[str, ...]] = None  # instead of ``python -m kvstore.weights.servers`` (bench, tests)


class Process(NamedTuple):
    """One process of the job, before it exists."""

    role: str
    rank: int
    host: Host
    command: Tuple[str, ...]
    env: Dict[str, str]

    @property
    def name(self) -> str:
        """`worker 0`, `server 1`, `scheduler`: its name in logs and messages."""
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"

    @property
    def sockets(self) -> Dict[str, bool]:
        """Files, or a port of loopback, where a tunnel reaches it; and whether each is still used when all have met."""
        port = self.env.get(LIBFABRIC_PORT[0])
        return {**self.files, **({f"{LOOPBACK}:{port}": True} if port else {})}

    @property
    def files(self) -> Dict[str, bool]:
        """Files where others reach it, and whether each is still used when all have met."""
        if self.env.get("DMLC_LOCAL") != "1" or "PORT" not in self.env:
            return {}
        couriers, scheduler_lasts = self.env.get("ODSGD_COURIERS"), self.env.get("ODSGD_WIRE") == "sockets"
        return {os.path.join(SOCKETS, self.env["PORT"]): scheduler_lasts, **({couriers: True} if couriers else {})}


class Plan(NamedTuple):
    """Every process of the job, and the secret and address that all of them share."""

    processes: List[Process]
    secret: str
    scheduler_address: Tuple[str, int]
    """Address and port of the scheduler, or where one would be."""
    certificate: str = ""
    """The certificate of the job's tunnel, with its key; empty without a tunnel."""
    spare: Sequence[Process] = ()
    """Workers that are not there at the start: one may join in the place of each."""

    @property
    def workers(self) -> List[Process]:
        """The workers, by rank."""
        return [process for process in self.processes if process.role == "worker"]

    def on(self, host: Host) -> List[Process]:
        """The processes of one host."""
        return [process for process in self.processes if process.host == host]


def make_plan(job: Job, scheduler_address: Tuple[str, int], attempts_before: int = 0, certificate: str = "",
              saved: Optional[int] = None) -> Plan:
    """Place every process of the job and write out its environment. `saved`: the iteration of its last checkpoint, 0 if
    it has none yet; None: nobody has looked for one."""
    by_file, (scheduler_host, port) = meets_by_file(job), scheduler_address
    port = new_number() if by_file else port
    worker_hosts, server_hosts = place(job)
    secret = job.secret or secrets.token_hex(32)
    common = _common_env(job, scheduler_host, port, secret)
    if job.secret:
        common["ODSGD_ATTEMPT"] = secrets.token_hex(16)
    if attempts_before:
        common["ODSGD_RESTARTS"] = str(attempts_before)
        if saved is not None:
            common["ODSGD_SAVED"] = str(saved)
    if job.most_workers:
        common["ODSGD_MOST_WORKERS"] = str(job.most_workers)
    python = sys.executable if job.launcher == "local" else job.remote_python
    scheduler = job.server_command or (sys.executable, "-m", "kvstore.weights.servers")  # always on this machine
    server = job.server_command or (python, "-m", "kvstore.weights.servers")
    command = tuple(path_on_hosts(word, job) if word in job.reads else word for word in job.command)
    worker = (python, *command) if command[0].endswith(".py") else command

    def process(role: str, rank: int, host: Host, command: Tuple[str, ...], env: Mapping[str, str]) -> Process:
        mine = _identity(job, role, rank, host, scheduler_host)
        if by_file:
            mine["PORT"] = str(port if role == "scheduler" else new_number())
            if role == "server":
                mine["ODSGD_COURIERS"] = os.path.join(SOCKETS, str(new_number()))
        return Process(role, rank, host, command, {**common, **env, **mine})

    processes = [process("scheduler", 0, Host(scheduler_host, here=True), scheduler, {})] if job.num_servers else []
    processes += [process("server", rank, host, server, job.env_server) for rank, host in enumerate(server_hosts)]
    standing_in = {"ODSGD_STORE": job.store} if job.store not in (None, NO_STORE) else {}
    ports = new_ports(job.num_workers)
    master = {**_master(job, worker_hosts[0], scheduler_host), **job.env}
    processes += [process("worker", rank, host, worker, {**master, **job.env_worker, **standing_in, **group,
                                                         **_meeting(job, rank, ports)})
                  for rank, (host, group) in enumerate(zip(worker_hosts, _groups(job, worker_hosts)))]
    began = len(processes) - job.spare
    return Plan(processes[:began], secret, (scheduler_host, port), certificate, processes[began:])


def place(job: Job) -> Tuple[List[Host], List[Host]]:
    """The host of every worker and of every server; the rule stands at the head of the module."""
    if job.launcher == "mpi":
        # mpirun places one agent per worker by its own rules; Host(k) stands for "wherever MPI rank k is".
        slots = [Host(f"MPI rank {rank}") for rank in range(job.num_workers)]
    else:
        slots = list(job.slots) or [LOCAL]
    workers = [slots[rank % len(slots)] for rank in range(job.num_workers)]
    if job.servers_beside_workers:
        return workers, [workers[rank % len(workers)] for rank in range(job.num_servers)]
    return workers, [slots[(job.num_workers + rank) % len(slots)] for rank in range(job.num_servers)]


def meets_by_file(job: Job) -> bool:
    """Whether the job's sockets are files. `--port` and `--env DMLC_LOCAL:0` ask for TCP on the loopback interface."""
    if job.secure:
        return job.num_servers > 0
    asked = job.env.get("DMLC_LOCAL", os.environ.get("DMLC_LOCAL", "1")) == "1" and not job.port
    return asked and job.launcher == "local" and job.num_servers > 0 and os.access(SOCKETS, os.W_OK | os.X_OK)


def on_sockets(job: Job) -> bool:
    """Whether the job's workers and servers talk over sockets of our own."""
    usual = "ps-lite" if environment.has_mxnet() else "sockets"
    return job.num_servers > 0 and (job.wire or usual) == "sockets"


def new_number() -> int:
    """A number whose socket no other job has."""
    return FIRST_NUMBER + secrets.randbelow(FIRST_NUMBER)


def new_ports(count: int) -> range:
    """A port for each worker. The ports are neighbours, so that two jobs of a host hardly ever share one."""
    size = 1 << (count - 1).bit_length()
    first = MPI_PORTS.start + size * secrets.randbelow(len(MPI_PORTS) // size)
    return range(first, first + count)


def exposure(address: str) -> Optional[str]:
    """The warning for a job at this address, if the whole internet may be able to reach it.

    >>> exposure("10.0.0.9"), exposure("127.0.0.1")
    (None, None)
    """
    if ipaddress.ip_address(address).is_private:
        return None
    return (f"the job listens at {address}, which is no private address; anyone who can reach its ports can "
            "read the weights and end it (docs/explanation/security.md). Name another address with --host-ip, or "
            "close the ports to others")


def forwarded(environ: Mapping[str, str]) -> Dict[str, str]:
    """The variables of this process that processes on other hosts also get."""
    return {name: value for name, value in environ.items() if FORWARDED.fullmatch(name) and name not in SET_BY_LAUNCHER}


def scrubbed(environ: Mapping[str, str]) -> Dict[str, str]:
    """An environment without the roles and addresses of another job."""
    return {name: value for name, value in environ.items() if name not in SET_BY_LAUNCHER and name not in MISLEADING}


def path_on_hosts(path: str, job: Job) -> str:
    """A path of this machine as the hosts have it: below a copied working directory it is relative to the copy."""
    if job.sync_dst_dir:
        relative = os.path.relpath(path, os.getcwd())
        if relative != os.pardir and not relative.startswith(os.pardir + os.sep):
            return relative
    return path


def package_path(job: Job) -> str:
    """PYTHONPATH for every process, so that a checkout need not be installed."""
    given = job.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    entries = [os.path.abspath(entry) for entry in given.split(os.pathsep) if entry]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.basename(root) not in ("site-packages", "dist-packages") and root not in entries:
        entries.append(root)
    return os.pathsep.join(path_on_hosts(entry, job) for entry in entries)


def _common_env(job: Job, scheduler_host: str, port: int, secret: str) -> Dict[str, str]:
    inherited = {} if job.launcher in ("local", "kubernetes") else forwarded(os.environ)  # a pod has what it needs
    env = {"PYTHONUNBUFFERED": "1", **inherited, **job.env}  # a line should be seen when it is printed
    env.update(DMLC_PS_ROOT_URI=LOOPBACK if job.secure else scheduler_host, DMLC_PS_ROOT_PORT=str(port),
               DMLC_NUM_WORKER=str(job.num_workers),
               DMLC_NUM_SERVER=str(job.num_servers), ODSGD_SECRET=secret, ODSGD_VERSIONS=running_versions())
    if on_sockets(job):
        env["ODSGD_WIRE"] = "sockets"
    if job.live:
        env["ODSGD_LIVE"] = "1"
    if job.known_hosts:
        env["ODSGD_SECURE"] = "1"
    env["DMLC_LOCAL"] = str(int(meets_by_file(job)))
    path = package_path(job)
    return {**env, "PYTHONPATH": path} if path else env


def _identity(job: Job, role: str, rank: int, host: Host, scheduler_host: str) -> Dict[str, str]:
    """The variables in which processes differ."""
    env = {"DMLC_ROLE": role}
    address = scheduler_host if host.here else (
        None if job.launcher in AGENTS_CALL else node_host(host.address, scheduler_host))
    if job.secure:
        address = LOOPBACK
    if address:  # else its agent finds the address
        env["DMLC_NODE_HOST"] = address
    if role != "scheduler":
        env.update({f"DMLC_{role.upper()}_ID": str(rank), f"ODSGD_{role.upper()}_RANK": str(rank)})
    return env


def _groups(job: Job, hosts: Sequence[Host]) -> Iterator[Dict[str, str]]:
    """Each worker's place among all workers, under PyTorch's names; only mpirun knows which workers share a host."""
    size = collections.Counter(hosts)
    before: Dict[Host, int] = collections.defaultdict(int)
    for rank, host in enumerate(hosts):
        env = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts))}
        if job.launcher != "mpi":
            env.update(LOCAL_RANK=str(before[host]), LOCAL_WORLD_SIZE=str(size[host]),
                       GROUP_RANK=str(list(size).index(host)))
        before[host] += 1
        yield env


def _master(job: Job, first: Host, scheduler_host: str) -> Dict[str, str]:
    """Where a process group of the script's own would meet: on worker 0's host, if it is known.

    Empty with `--secure`, because nothing would protect the group's connections.
    """
    if job.known_hosts or job.launcher == "mpi":
        return {}
    address = scheduler_host if first.here else node_host(first.address, scheduler_host)
    return {"MASTER_ADDR": address, "MASTER_PORT": str(new_ports(1)[0])} if address else {}


def _meeting(job: Job, rank: int, ports: Sequence[int]) -> Dict[str, str]:
    """What a worker's MPI needs to ask its agent for the others, and to be found by them."""
    if job.num_servers:
        return {}
    tunneled = {**THROUGH_TUNNEL, **dict.fromkeys(LIBFABRIC_PORT, str(ports[rank]))} if job.secure else {}
    return {"PMI_SIZE": str(job.num_workers), "PMI_RANK": str(rank), **tunneled}
