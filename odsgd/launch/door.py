"""The launcher's door: agents that something else has started (mpirun, srun, Kubernetes) come to it by themselves."""
import os
import socket
import subprocess
from typing import List, Mapping, NamedTuple, Optional, Sequence

from odsgd.launch import handshake
from odsgd.launch import plan as planning
from odsgd.launch.channel import Channel
from odsgd.launch.plan import Job, Plan, Process
from odsgd.launch.reach import AGENT, Outpost, orders


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
        self.listener = socket.create_server((address, port))
        self.listener.setblocking(False)

    def accept(self) -> Optional[Outpost]:
        """An agent that has come; None for a visitor that cannot prove that it is one."""
        try:
            connection, _ = self.listener.accept()
        except OSError:  # gone again, or too many files are open
            return None
        admitted = handshake.admit(connection, self.secret, self.waiting) if self.waiting else None
        if admitted is None:
            connection.close()
            return None
        return self._outpost(connection, *admitted)

    def take_missing(self) -> List[Process]:
        """The processes of the posts whose agents have not come, which are not waited for any more."""
        missing = [process for number in sorted(self.waiting) for process in self.posts[number].processes]
        self.waiting.clear()
        return missing

    def close(self) -> None:
        """Nobody is let in any more."""
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
    door.starter = subprocess.Popen([*command, job.remote_python, *AGENT], stdin=subprocess.DEVNULL,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                                    env=environment, start_new_session=True)
    return door
