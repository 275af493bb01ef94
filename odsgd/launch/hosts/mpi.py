"""mpirun, Open MPI's or MPICH's, places one agent per worker; the agents call this machine's `AgentListener`."""
import collections
import os
import re
import shutil
import sys
from typing import List

from kvstore.errors import ConfigError
from odsgd.launch.connections import handshake
from odsgd.launch.hostfile import Host
from odsgd.launch.hosts import listener
from odsgd.launch.hosts.ssh import program
from odsgd.launch.plan import Job, Plan
from odsgd.tools import ran


def open_mpirun(job: Job, plan: Plan) -> listener.AgentListener:
    """Start the agents by mpirun."""
    labels = [f"MPI rank {rank}" for rank in range(job.num_workers)]
    return listener.start("MPI", mpirun_command(job), job, plan, {label: plan.on(Host(label)) for label in labels})


def mpirun_command(job: Job) -> List[str]:
    """The command line for the mpirun found here, up to the program it starts."""
    mpirun = find()
    names = (handshake.VARIABLE, "PYTHONPATH")
    hosts = collections.Counter(host.address for host in job.slots)
    listed = ",".join(f"{address}:{slots}" for address, slots in hosts.items())
    if _is_open_mpi(mpirun):
        # Bound to one core, as Open MPI does for few ranks, a worker and its threads would share that core.
        options = ["--bind-to", "none", "--oversubscribe", *(["--host", listed] if listed else [])]
        options += [word for name in names for word in ("-x", name)]
    else:
        options = [*(["-hosts", listed] if listed else []), "-genvlist", ",".join(names)]
    return [*mpirun, "-n", str(job.num_workers), *options]


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
    version = ran([*mpirun, "--version"], "--launcher mpi", 30.0)
    return re.search("Open MPI|OpenRTE|PRRTE|prte", version.stdout + version.stderr) is not None
