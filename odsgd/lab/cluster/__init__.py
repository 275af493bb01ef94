"""A cluster with slow links on one machine: hosts in network namespaces on a bridge. Linux, root.

    links.py     rates, and how a link is made so slow
    boot.py      the shell scripts by which namespaces and links come up, and the stand-in `ssh`
    cluster.py   Cluster: up, find, run, down
    goodput.py   runs on two hosts, to measure their links
    cli.py       `odsgd cluster`
"""
from odsgd.lab.cluster.cluster import Cluster, Goodput, check_machine

__all__ = ["Cluster", "Goodput", "check_machine"]
