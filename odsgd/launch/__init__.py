"""Starting a job's processes on one machine or many, and watching over them until the last one is gone.

    cli.py        the command line                                            -> Job
    hosts.py      the hostfile                                                -> a list of slots
    plan.py       which process runs where, with which environment            -> Plan
    reach.py      how an agent gets onto a host: subprocess, ssh, mpirun      -> Link
    pmi.py        how the workers of a job without servers find each other    -> Server
    agent.py      runs on each host: starts processes, forwards what they say, kills them
    watch.py      decides, without any I/O, when and how the job ends         -> Verdict
    supervise.py  the loop between agents, watch and console
    console.py    whose line it is, in front of every line

Nothing here imports MXNet, and nothing is imported until it is used: a mistyped option is answered at once.
"""
from typing import Optional, Sequence


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``odsgd launch`` with these arguments (default: the process's own); return the exit code."""
    from odsgd.launch import cli
    return cli.main(argv)
