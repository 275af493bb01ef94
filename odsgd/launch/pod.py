"""What a pod of a Kubernetes job runs: the launcher in pod 0, an agent in each other pod.

A pod needs only its environment, which `kubernetes.py` writes into the job's manifest:

    ODSGD_LAUNCH          options and command of `odsgd launch`, as for a shell
    ODSGD_LAUNCHER        name and port at which pod 0 is found
    ODSGD_SECRET          the job's secret
    ODSGD_POD_IP          this pod's address
    JOB_COMPLETION_INDEX  this pod's number, from Kubernetes itself

Pod 0 is the job's launching machine, with an agent of its own. The other pods' agents call its `AgentListener`. When
an agent has ended, its pod calls again, because the job may restart (--max-restarts). When nobody answers any more, the
job is over, and pod 0's exit code says whether it has succeeded.
"""
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import time
from typing import Mapping, Optional, Tuple

from kvstore.errors import EXIT_DEADLINE, EXIT_FAILURE, EXIT_USAGE, ConfigError, shown
from odsgd.launch import command, supervisor
from odsgd.launch.agent.agent import Agent
from odsgd.launch.connections import handshake
from odsgd.launch.hostfile import Host
from odsgd.launch.hosts.kubernetes import pod_names
from odsgd.launch.messages import Channel, Orders
from odsgd.launch.plan import Job

OVER_S = 5.0
"""If pod 0 has not answered for this long, a pod whose agent has served takes the job for over."""
AGAIN_S = 0.5


def launcher_address(environ: Mapping[str, str]) -> Tuple[str, int]:
    """Name and port of pod 0."""
    text = _needed(environ, "ODSGD_LAUNCHER")
    name, _, port = text.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port[:9]) < 65536:
        raise ConfigError(f"ODSGD_LAUNCHER is `{shown(text)}`; expected NAME:PORT of pod 0")
    return name, int(port)


def job_of(environ: Mapping[str, str]) -> Job:
    """The job that pod 0 launches."""
    try:
        words = shlex.split(_needed(environ, "ODSGD_LAUNCH"))
    except ValueError as error:
        raise ConfigError(f"ODSGD_LAUNCH is not what a shell would read: {error}") from None
    job = command.parse(["--launcher", "local", *words])
    closed = command.why_closed(dataclasses.replace(job, launcher="kubernetes"))
    name, port = launcher_address(environ)
    first = name.partition(".")[0]
    rest = pod_names(first.rpartition("-")[0], job.num_workers)[1:]
    return dataclasses.replace(
        job, launcher="kubernetes", closed=closed, slots=(Host(first, here=True), *map(Host, rest)),
        secret=_secret(environ), host_ip=job.host_ip or environ.get("ODSGD_POD_IP"), agents_port=port)


def serve(number: int, environ: Mapping[str, str]) -> int:
    """Be the agent of one pod while there is a launcher; return the pod's exit code."""
    secret, launcher = _secret(environ), launcher_address(environ)
    startup_s = job_of(environ).startup_timeout_s or float("inf")
    called = call(number, launcher, secret, startup_s)
    if called is None:
        print(f"odsgd pod {number}: no launcher has answered at {launcher[0]}:{launcher[1]} for {startup_s:g} s; is "
              "pod 0 running (kubectl get pods), and does the Service of the job's name exist?", file=sys.stderr)
        return EXIT_DEADLINE
    while called is not None:
        orders, fd = called
        agent = Agent(orders, Channel(fd, fd))
        agent.run()
        os.close(fd)
        exit_code = 0 if agent.told_to_stop else EXIT_FAILURE  # else pod 0 was lost, and the job with it
        if agent.ended_by is not None:  # by Kubernetes: another pod has to take this one's place
            return 128 + agent.ended_by
        _end_on_signals()
        called = call(number, launcher, secret, OVER_S)
    return exit_code


def call(number: int, launcher: Tuple[str, int], secret: str, patience_s: float) -> Optional[Tuple[Orders, int]]:
    """Call until the launcher answers; returns its orders and the connection's descriptor. None: nobody answered."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # not there yet, or not any more
            called = handshake.call(launcher, secret, number)
            if called:
                return called
            deadline = time.monotonic() + patience_s  # the launcher may still be ending the last attempt
        time.sleep(AGAIN_S)
    return None


def _end_on_signals() -> None:
    """Let signals end this process: by default they do not end the first process of a container."""
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))


def main(environ: Mapping[str, str] = os.environ) -> int:
    """``python -m odsgd.launch.pod``."""
    _end_on_signals()
    try:
        number = _needed(environ, "JOB_COMPLETION_INDEX")
        if not number.isdecimal():
            raise ConfigError(f"JOB_COMPLETION_INDEX is `{shown(number)}`; expected the number of this pod")
        if int(number):
            return serve(int(number), environ)
        return supervisor.run(job_of(environ))
    except ConfigError as error:
        print(f"odsgd pod: {error}", file=sys.stderr)
        return EXIT_USAGE


def _needed(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise ConfigError(f"{name} is not set; this is the command of a pod, whose environment is in the manifest that "
                          "`odsgd launch --launcher kubernetes --dry-run` shows")
    return value


def _secret(environ: Mapping[str, str]) -> str:
    secret = _needed(environ, "ODSGD_SECRET")
    try:
        bytes.fromhex(secret)
    except ValueError:
        raise ConfigError("ODSGD_SECRET is not a number in hexadecimal digits") from None
    return secret


if __name__ == "__main__":
    sys.exit(main())
