"""Starting a job's processes on one machine or many, and watching over them until the last one is gone.

    cli.py        the command line                                            -> Job
    hosts.py      the hostfile                                                -> a list of slots
    plan.py       which process runs where, with which environment            -> Plan
    reach.py      how an agent gets onto a host: subprocess, ssh              -> Outpost
    door.py       how agents come that something else starts: mpirun.py, slurm.py, pods.py (kubernetes.py has their
                  manifests); handshake.py: how they and their launcher know each other
    tunnel.py     carries a job's connections from host to host, encrypted    -> Tunnel
    absentees.py  the hosts that a job goes on without, and whether they are back
    pmi.py        how the workers of a job without servers find each other    -> Table
    agent.py      runs on each host: starts processes, forwards their output, kills them
    channel.py    the messages between launcher and agents, lines of JSON
    lines.py      a process's output, as lines and frames of progress bars
    judge.py      decides, without any I/O, when and how the job ends         -> Verdict
    vigil.py      notices, without any I/O, who is silent and who stands still
    restarts.py   decides, without any I/O, whether a job that has failed is started again
    early.py      signals before there is a job
    supervise.py  the loop between agents, judge and console
    console.py    every line with the name of its process in front, and at the bottom how far the job is
    overview.py   how far it is, and how each process stands, without any I/O
    notice.py     the file that says so; watch.py: `odsgd watch`, which reads it
    function.py   a job whose workers call a Python function: ``odsgd.launch(function, num_workers=2)``

addresses.py and linux.py ask the operating system. Nothing here imports MXNet.
"""
import sys
import types
from typing import Any, List


class _Launch(types.ModuleType):
    """This module, which can be called."""

    def __call__(self, *arguments: Any, **keywords: Any) -> List[Any]:
        """See `function.call`."""
        from odsgd.launch import function
        return function.call(*arguments, **keywords)


sys.modules[__name__].__class__ = _Launch
