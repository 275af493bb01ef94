"""The launcher's door: agents that something else has started (mpirun, srun, Kubernetes) come to it by themselves."""
import errno
import functools
import os
import selectors
import socket
import subprocess
import time
from typing import Callable, List, Mapping, NamedTuple, Optional, Sequence

from kvstore.errors import ConfigError
from odsgd.launch import plan as planning
from odsgd.launch.connections import handshake
from odsgd.launch.hosts.ssh import AGENT, Outpost, orders
from odsgd.launch.messages import Channel
from odsgd.launch.plan import Job, Plan, Process

ANSWERED_WITHIN_S = 30.0
"""How long a visitor has to prove itself; an agent may come up on a busy machine, and nobody waits for a stranger."""
MOST_STRANGERS, UNDISTURBED_S = 64, 2.0
"""Visitors beside the agents that are awaited. More wait, and who is there for so long has to make room for them."""
AGAIN_S = 0.5
"""For so long nobody is let in where too many files are open; the loop would turn for nothing else."""
BACKLOG = 1024


class Post(NamedTuple):
    """Where an agent will be, and its processes. Agents say which post is theirs by its number."""

    label: str
    processes: List[Process]


class Door:
    """Where they knock. Invariant: `waiting` has the numbers of the posts whose agents are still to come."""

    def __init__(self, posts: Sequence[Post], secret: str, address: str, port: int = 0) -> None:
        self.posts, self.secret = posts, secret
        self.waiting = {number for number, post in enumerate(posts) if post.processes}
        self.starter: Optional[subprocess.Popen[bytes]] = None  # the local program that starts them, if there is one
        self.starter_name = self.family = ""  # as `mpirun` and `MPI`
        self.listener = socket.create_server((address, port), backlog=BACKLOG)
        self.listener.setblocking(False)
        self._visitors: List[handshake.Visitor] = []
        self._full, self._again_at = False, 0.0

    def serve(self, selector: selectors.BaseSelector, arrived: Callable[[Outpost], object]) -> None:
        """Become a part of the loop that asks `selector` and calls the functions it finds there.

        `arrived` is called with each agent that has come and proved that it is one. Nothing here waits.
        """
        self._selector, self._arrived = selector, arrived
        selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def tick(self) -> None:
        """Turn away those who have been silent for too long, and make room for those who wait to be taken."""
        within_s = UNDISTURBED_S if self._full else ANSWERED_WITHIN_S
        for visitor in self._visitors[:]:
            if time.monotonic() - visitor.since > within_s:
                self._take(visitor).close()
        if self._full and len(self._visitors) < self._room() and time.monotonic() >= self._again_at:
            self._full = False
            self._selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def _room(self) -> int:
        return MOST_STRANGERS + len(self.waiting)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError as error:  # else it has gone again
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._again_at = time.monotonic() + AGAIN_S
                self._fill()
            return
        visitor = handshake.Visitor(connection, self.secret)
        self._visitors.append(visitor)
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._heard, visitor))
        if len(self._visitors) >= self._room():
            self._fill()

    def _fill(self) -> None:
        """Nobody else is let in for now."""
        self._full = True
        self._selector.unregister(self.listener)

    def _heard(self, visitor: handshake.Visitor) -> None:
        if visitor not in self._visitors:  # turned away in this very turn of the loop
            return
        try:
            agent = visitor.heard(self.waiting)
        except OSError:
            self._take(visitor).close()
            return
        if agent:
            self._arrived(self._outpost(self._take(visitor), *agent))

    def _take(self, visitor: handshake.Visitor) -> socket.socket:
        """Its connection, which is then no visitor's any more."""
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.connection)
        return visitor.connection

    def take_missing(self) -> List[Process]:
        """The processes of the posts whose agents have not come, which are not waited for any more."""
        missing = [process for number in sorted(self.waiting) for process in self.posts[number].processes]
        self.waiting.clear()
        return missing

    def close(self) -> None:
        """Nobody is let in any more."""
        for visitor in self._visitors:
            visitor.connection.close()
        self.listener.close()

    def _outpost(self, connection: socket.socket, number: int, nonce: str) -> Outpost:
        self.waiting.remove(number)
        label, processes = self.posts[number]
        fd = connection.detach()
        return Outpost(label, processes, Channel(fd, fd))


def start(family: str, command: Sequence[str], job: Job, plan: Plan, posts: Sequence[Post],
          nodes: Sequence[str] = (), env: Optional[Mapping[str, str]] = None) -> Door:
    """Have a program start the agents; it carries their orders in its environment, and nothing on its command line.

    `command`: without the agent's own; `family`: what it belongs to, for messages. `nodes`: the posts' names, where
    agents know theirs and no number. `env`: on top of the program's environment.
    """
    door = Door(posts, plan.secret, plan.root[0])
    packed = handshake.pack({
        "launcher": list(door.listener.getsockname()), "secret": plan.secret,
        "ranks": [orders(job, post.processes, remote=True) for post in posts],
        "common": {"directory": os.getcwd()}, "nodes": list(nodes)})
    exported = {"PYTHONPATH": planning.package_path(job), handshake.VARIABLE: packed}
    # In front: MPICH's mpirun does not see the last variable of its environment when it exports by name.
    environment = {**exported, **planning.scrubbed(os.environ), **(env or {}), **exported}
    door.starter_name, door.family = os.path.basename(command[0]), family
    try:
        door.starter = subprocess.Popen([*command, job.remote_python, *AGENT], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                                        env=environment, start_new_session=True)
    except OSError as error:
        door.close()
        why = error.strerror if error.errno != errno.E2BIG else (
            f"the orders of {len(posts)} agents have {len(packed) // 1024} KiB, and Linux hands on at most 128 in a "
            "variable; take fewer workers, or --launcher ssh, whose agents are told on their own")
        raise ConfigError(f"cannot run {command[0]}: {why}") from None
    return door
