"""The launcher's side of mpirun, which places one agent per worker; they then come to this machine (`handshake.py`)."""
import os
import shutil
import socket
import subprocess
import sys
from typing import Dict, List, Optional

from kvstore.errors import ConfigError
from odsgd.launch import handshake
from odsgd.launch import plan as planning
from odsgd.launch.channel import Channel
from odsgd.launch.hosts import Host
from odsgd.launch.plan import Job, Plan, Process
from odsgd.launch.reach import AGENT, Outpost, orders, program


class Mpirun:
    """A running mpirun, and the door at which its agents knock."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self.plan = plan
        self.ranks = [plan.on(Host(f"MPI rank {rank}")) for rank in range(job.num_workers)]
        self.waiting = set(range(job.num_workers))
        command = mpirun_command(job)
        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listener.bind((plan.root[0], 0))
        self.listener.listen(128)
        self.listener.setblocking(False)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, bufsize=0, env=self._environment(job),
                                        start_new_session=True)

    def accept(self) -> Optional[Outpost]:
        """An agent that has come; None for a visitor that cannot prove that it is one."""
        connection, _ = self.listener.accept()
        rank = handshake.admit(connection, self.plan.secret, self.waiting)
        if rank is None:
            connection.close()
            return None
        self.waiting.remove(rank)
        fd = connection.detach()
        return Outpost(f"MPI rank {rank}", self.ranks[rank], Channel(fd, fd))

    def take_missing(self) -> List[Process]:
        """The processes of the ranks that have not come, which are not waited for any more."""
        missing = [process for rank in sorted(self.waiting) for process in self.ranks[rank]]
        self.waiting.clear()
        return missing

    def _environment(self, job: Job) -> Dict[str, str]:
        packed = handshake.pack({
            "launcher": list(self.listener.getsockname()), "secret": self.plan.secret,
            "ranks": [orders(job, processes, remote=True) for processes in self.ranks],
            "common": {"directory": os.getcwd()}})
        exported = {"PYTHONPATH": planning.package_path(job), handshake.VARIABLE: packed}
        # In front: MPICH's mpirun does not see the last variable of its environment when it exports by name.
        return {**exported, **planning.scrubbed(os.environ), **exported}


def mpirun_command(job: Job) -> List[str]:
    """The command line for the mpirun found here; the secret is behind the exported name only."""
    mpirun = find()
    names = (handshake.VARIABLE, "PYTHONPATH")
    hosts: Dict[str, int] = {}
    for host in job.slots:
        hosts[host.address] = hosts.get(host.address, 0) + 1
    listed = ",".join(f"{address}:{slots}" for address, slots in hosts.items())
    if _is_open_mpi(mpirun):
        # Bound to one core, as Open MPI does for few ranks, a worker and its threads would share that core.
        options = ["--bind-to", "none", "--oversubscribe", *(["--host", listed] if listed else [])]
        options += [word for name in names for word in ("-x", name)]
    else:
        options = [*(["-hosts", listed] if listed else []), "-genvlist", ",".join(names)]
    return [*mpirun, "-n", str(job.num_workers), *options, job.remote_python, *AGENT]


def find() -> List[str]:
    """The words that run mpirun; ConfigError if there is none."""
    beside_python = os.path.dirname(sys.executable)  # where the wheel `mpich` puts it
    found = (shutil.which(name, path=path) for name in ("mpirun", "mpiexec") for path in (None, beside_python))
    mpirun = program("ODSGD_MPIRUN", next(filter(None, found), ""))
    if mpirun == [""]:
        raise ConfigError("--launcher mpi: neither mpirun nor mpiexec is on PATH; install Open MPI or MPICH "
                          "(`pip install mpich` will do), or name the program in ODSGD_MPIRUN")
    return mpirun


def _is_open_mpi(mpirun: List[str]) -> bool:
    try:
        told = subprocess.run([*mpirun, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--launcher mpi: cannot run {mpirun[0]}: {why}") from None
    return any(name in told for name in (b"Open MPI", b"OpenRTE", b"PRRTE", b"prte"))
