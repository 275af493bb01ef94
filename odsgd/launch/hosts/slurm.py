"""Slurm: one step of srun with one agent on each node of an allocation; they call this machine's `AgentListener`.

The launcher runs where srun does: in an sbatch script, or on a login node (salloc). The allocation gives nodes and
slots; processes are placed as by a hostfile with these nodes.
"""
import shutil
from typing import List, Mapping

from kvstore.errors import ConfigError, shown
from odsgd.launch.hostfile import MOST_SLOTS, Host
from odsgd.launch.hosts import listener
from odsgd.launch.plan import Job, Plan
from odsgd.tools import ran

ANSWERS_WITHIN_S = 30.0
LIST, PER_NODE = "SLURM_JOB_NODELIST", "SLURM_NTASKS_PER_NODE"


def allocated(environ: Mapping[str, str]) -> List[Host]:
    """The slots of the allocation that we run in: one per node, or as many as --ntasks-per-node has asked for."""
    if not environ.get("SLURM_JOB_ID") or not environ.get(LIST):
        raise ConfigError("--launcher slurm needs an allocation, and runs in none: run it in a script for sbatch, or "
                          "from here as `salloc --nodes=N odsgd launch ...`")
    for name in ("srun", "scontrol"):
        if not shutil.which(name):
            raise ConfigError(f"--launcher slurm: {name} is not a program on this machine; install Slurm's client "
                              "commands here")
    asked = ran(["scontrol", "show", "hostnames", environ[LIST]], "--launcher slurm", ANSWERS_WITHIN_S)
    nodes = asked.stdout.split()
    if asked.returncode or not nodes:
        raise ConfigError(f"--launcher slurm: scontrol cannot name the nodes of {LIST}={shown(environ[LIST])}: "
                          f"{shown(asked.stderr.strip()) or 'no reason given'}")
    return [Host(node) for node in nodes for _ in range(_slots(environ.get(PER_NODE, "1")))]


def _slots(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MOST_SLOTS:
        raise ConfigError(f"--launcher slurm: {PER_NODE} is `{shown(text)}`; expected a number from 1 to {MOST_SLOTS}")
    return int(text)


def open_step(job: Job, plan: Plan) -> listener.AgentListener:
    """Start the agents by one srun."""
    nodes = dict.fromkeys(process.host for process in plan.processes if not process.host.here)
    expected = {node.address: plan.on(node) for node in nodes}
    return listener.start("Slurm", srun_command(list(expected)), job, plan, expected, list(expected), {PER_NODE: "1"})


def srun_command(nodes: List[str]) -> List[str]:
    """The words of srun. An agent may use all of its node's part of the allocation, beside other steps.

    srun passes on the whole environment, even if sbatch was told otherwise, because the job's secret and orders are in
    it. If one agent fails, the launcher decides what follows, not srun.
    """
    count = str(len(nodes))
    return ["srun", "--quiet", "--job-name=odsgd", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}", "--distribution=block", "--overlap", "--cpu-bind=none", "--mpi=none",
            "--kill-on-bad-exit=0", "--wait=0", "--input=none", "--export=ALL"]
