"""Starting a job's processes on one machine or many, and watching over them until the last one is gone.

    command.py      the command line                                            -> Job
    plan.py         which process runs where, with which environment            -> Plan
    supervisor.py   the loop between agents, judge and console
    agent/          runs on each host: agent.py starts processes, forwards their output, kills them; child.py is one
                    process, or the tunnel of the host
    messages.py     the messages between launcher and agents: a class each, lines of JSON on the way
    policy/         decides, without any I/O: judge.py when and how the job ends, liveness.py who is silent or stands
                    still, membership.py whether a failed job starts again, with which workers, and who may join
    hosts/          agents.py: all agents of an attempt. ssh.py (or a local subprocess), mpi.py, slurm.py and
                    kubernetes.py start agents; listener.py takes the calls of agents that another program has started;
                    check.py asks hosts before the start, and missing ones later
    connections/    handshake.py: how a calling agent and its launcher recognise each other; tunnel.py encrypts the
                    connections between hosts; pmi.py: how the workers of a job without servers find each other
    view/           console.py: every line with the name of its process in front, and a status line at the bottom
                    (overview.py, without any I/O); status_file.py hands the status to watch.py, `odsgd watch`
    function.py     a job whose workers call a Python function: ``odsgd.launch(function, num_workers=2)``
    pod.py          what a pod of Kubernetes runs: the launcher, or an agent
    hostfile.py     the hostfile                                                -> a list of slots
    lines.py        a process's output as lines and frames of progress bars
    early.py        signals before there is a job
    linux.py, addresses.py   ask the operating system

Nothing here imports MXNet.
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
