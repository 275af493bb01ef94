"""The port at which agents call the launcher, where mpirun, srun or Kubernetes has started them."""
import errno
import os
import socket
import subprocess
from typing import List, Mapping, Optional, Sequence

from kvstore.errors import ConfigError
from odsgd.launch import plan as planning
from odsgd.launch.connections import handshake
from odsgd.launch.hosts.ssh import AGENT, AgentConnection, orders
from odsgd.launch.messages import Channel
from odsgd.launch.plan import Job, Plan, Process

ANSWERED_WITHIN_S = 30.0
"""How long a caller may take to prove that it is an agent. Its machine may be busy; nothing waits for it."""
MOST_STRANGERS, UNDISTURBED_S = 64, 2.0
"""Most unproven connections beside the expected agents'. If there are so many, those of this age are closed."""
BACKLOG = 1024


class AgentListener:
    """The port; the launcher's loop looks at it in each turn.

    `expected`: the processes of each agent, by a label that says where it will be; the agent itself gives its number
    there. Invariant: `waiting` has the numbers of the expected agents that have not come yet.
    """

    def __init__(self, job: Job, expected: Mapping[str, List[Process]], secret: str, address: str, port: int = 0
                 ) -> None:
        self.job, self.expected, self.secret = job, list(expected.items()), secret
        self.waiting = {number for number, (_, processes) in enumerate(self.expected) if processes}
        self.starter: Optional[subprocess.Popen[bytes]] = None  # the local program that starts them, if there is one
        self.starter_name = self.family = ""  # as `mpirun` and `MPI`
        try:
            self.socket = socket.create_server((address, port), backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"agents cannot call {address or 'this machine'}{f':{port}' if port else ''}: "
                              f"{error.strerror}; --host-ip has to be an address of this machine, and the port free"
                              ) from None
        self.socket.setblocking(False)
        self._unproven: List[handshake.UnprovenConnection] = []

    def arrivals(self) -> List[AgentConnection]:
        """The agents that have proved themselves since the last call; callers that fail, or are silent, are closed."""
        within_s = ANSWERED_WITHIN_S if self._accept() else UNDISTURBED_S
        arrived = []
        callers, self._unproven = self._unproven, []
        for caller in callers:
            try:
                agent = caller.heard(self.waiting, within_s)
            except OSError:
                caller.connection.close()
                continue
            if agent:
                arrived.append(self._connected(caller.connection, *agent))
            else:
                self._unproven.append(caller)
        return arrived

    def _accept(self) -> bool:
        """Let callers in until nobody else calls; false if there is no room for more, or no file descriptor."""
        while len(self._unproven) < MOST_STRANGERS + len(self.waiting):
            try:
                connection, _ = self.socket.accept()
            except OSError as error:  # else nobody calls, or the caller has gone again
                return error.errno not in (errno.EMFILE, errno.ENFILE)
            self._unproven.append(handshake.UnprovenConnection(connection, self.secret))
        return False

    def take_missing(self) -> List[str]:
        """The processes of the agents that have not come; nobody waits for them any more."""
        missing = [process.name for number in sorted(self.waiting) for process in self.expected[number][1]]
        self.waiting.clear()
        return missing

    def close(self) -> None:
        """Shut the port."""
        for caller in self._unproven:
            caller.connection.close()
        self.socket.close()

    def _connected(self, connection: socket.socket, number: int, nonce: str) -> AgentConnection:
        self.waiting.remove(number)
        label, processes = self.expected[number]
        fd = connection.detach()
        agent = AgentConnection(label, processes, Channel(fd, fd))
        agent.channel.send(handshake.seal(orders(self.job, processes, remote=True), self.secret, nonce))
        return agent


def start(family: str, command: Sequence[str], job: Job, plan: Plan, expected: Mapping[str, List[Process]],
          nodes: Sequence[str] = (), env: Optional[Mapping[str, str]] = None) -> AgentListener:
    """Have a program start the agents; it carries what they need in its environment, and nothing on its command line.

    `command`: the program's words, without the agent's; `family`: the name of such programs in messages; `nodes`: the
    agents' names, if an agent knows only its name; `env`: variables on top of the program's environment.
    """
    listener = AgentListener(job, expected, plan.secret, plan.scheduler_address[0])
    packed = handshake.pack({"launcher": list(listener.socket.getsockname()), "secret": plan.secret,
                             "directory": os.getcwd(), "nodes": list(nodes)})
    exported = {"PYTHONPATH": planning.package_path(job), handshake.VARIABLE: packed}
    # In front: MPICH's mpirun does not see the last variable of its environment when it exports by name.
    environment = {**exported, **planning.scrubbed(os.environ), **(env or {}), **exported}
    listener.starter_name, listener.family = os.path.basename(command[0]), family
    try:
        listener.starter = subprocess.Popen([*command, job.remote_python, *AGENT], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                                        env=environment, start_new_session=True)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from None
    return listener
