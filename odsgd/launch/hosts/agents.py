"""The agents of one attempt, and their starters: the local processes (ssh, mpirun …) that connect us with them."""
import collections
import contextlib
import functools
import selectors
import signal
import subprocess
import time
from typing import Callable, Deque, Dict, List, Optional, Sequence

from odsgd.launch import messages
from odsgd.launch.hosts import kubernetes, slurm, ssh
from odsgd.launch.hosts.listener import AgentListener
from odsgd.launch.hosts.mpi import open_mpirun
from odsgd.launch.hosts.ssh import AgentConnection
from odsgd.launch.lines import Stream
from odsgd.launch.messages import Message
from odsgd.launch.plan import Job, Plan, Process
from odsgd.launch.policy.failures import TAIL_LINES, signal_name

TICK_S, AWAITING_TICK_S = 0.1, 0.01
"""How often the loop looks at the time, and at signals, which do not end its wait. The second holds while agents are
still to call: their port does not end its wait, either."""
PING_EVERY_S = 10.0
STARTERS_END_WITHIN_S = 1.0
"""How long all starters of lost connections together may take to end and say why; meanwhile the loop stands still."""
HUNG_UP_WITHIN_S, UNHEARD_WITHIN_S, ASKED_WITHIN_S = 4.0, 0.5, 0.5
"""How long a starter may take to end after we have hung up, if its agent has never spoken, and after we have asked."""
LISTENERS: Dict[str, Callable[[Job, Plan], AgentListener]] = {
    "mpi": open_mpirun, "slurm": slurm.open_step, "kubernetes": kubernetes.open_port}
"""Launchers whose agents call us."""


class Agents:
    """Calls `heard` with an agent's messages, `show_line` with a line that a starter has printed (whose, text, stream),
    and `host_lost` with a host, the names of its processes, the reason and the last lines.

    Invariant: an agent that ends without having said that no process is left is reported as lost, exactly once.
    """

    def __init__(self, job: Job, plan: Plan, heard: Callable[[AgentConnection, Sequence[Message]], object],
                 host_lost: Callable[[str, List[str], str, List[str]], object],
                 show_line: Callable[[str, str, str], object]) -> None:
        self.job, self.plan = job, plan
        self._heard, self._host_lost, self._show_line = heard, host_lost, show_line
        self.all: List[AgentConnection] = []
        self.ending = False
        self._selector = selectors.DefaultSelector()
        self._listener: Optional[AgentListener] = None
        self._last_lines: Dict[str, Deque[str]] = collections.defaultdict(
            lambda: collections.deque(maxlen=TAIL_LINES))
        self._exit_wait_s = STARTERS_END_WITHIN_S
        self._pinged_at = time.monotonic()

    def open(self) -> None:
        """Start an agent on each host, or the program that starts it there."""
        hosts = list(dict.fromkeys(process.host for process in self.plan.processes))
        if self.job.launcher in LISTENERS:
            self._listener = LISTENERS[self.job.launcher](self.job, self.plan)
            if self._listener.starter:
                self._watch_starter(self._listener.starter, self._listener.starter_name, "stdout", "stderr")
            hosts = [host for host in hosts if host.here]
        for host in hosts:
            self.add(ssh.open_agent(self.job, self.plan, host))

    def start(self, process: Process) -> None:
        """Start an agent of its own for a process that comes later."""
        agent = ssh.open_agent(self.job, self.plan._replace(processes=[process]), process.host)
        agent.joiner = True
        self.add(agent)

    def add(self, agent: AgentConnection) -> None:
        """Listen to an agent."""
        self.all.append(agent)
        agent.channel.send(messages.Ping(self._pinged_at))  # the last one, of which it has not heard
        self._selector.register(agent.channel.read_fd, selectors.EVENT_READ, functools.partial(self._read, agent))
        if agent.starter:
            self._watch_starter(agent.starter, agent.host, "stderr")

    def turn(self) -> None:
        """Read what has come; wait for it, but not long."""
        awaits = self._listener and self._listener.waiting
        for key, _ in self._selector.select(AWAITING_TICK_S if awaits else TICK_S):
            if self._selector.get_map().get(key.fd) == key:  # else an earlier one in this turn has removed it
                key.data()
        if time.monotonic() - self._pinged_at >= PING_EVERY_S:
            self.ping()
        for agent in list(self.all):
            agent.channel.flush()
            if agent.joiner and not agent.channel.open:
                self._forget_if_over(agent)
        if self._listener:
            for agent in self._listener.arrivals():
                self.add(agent)
                if self.ending:
                    agent.channel.send(messages.Stop(0.0))
            self._check_starter(self._listener)

    def tell(self, message: Message, of: Optional[str] = None) -> None:
        """Send a message to all agents, or to that of a process."""
        for agent in self.all:
            if of is None or of in agent.names:
                agent.channel.send(message)
                if of is not None:
                    return

    def ping(self) -> None:
        """Ask all agents for an answer."""
        self._pinged_at = time.monotonic()
        self.tell(messages.Ping(self._pinged_at))

    def stop(self, grace_s: float) -> None:
        """Have the agents end all processes."""
        self.ending = True
        for agent in self.all:  # a stopped agent of this machine has to go on, so that it can end its processes
            if agent.starter and agent.starter.poll() is None:
                agent.starter.send_signal(signal.SIGCONT)
        self.tell(messages.Stop(grace_s))

    @property
    def occupied(self) -> bool:
        """Whether an agent may still have processes, and will say when they are gone."""
        return any(agent.channel.open and agent.greeted and not agent.ended for agent in self.all)

    def ended(self, agent: AgentConnection) -> None:
        """The agent has said that nothing is left."""
        agent.ended = True
        if agent.names and not self.ending:
            self._lost_agent(agent)

    def close(self) -> None:
        """Close every channel, which ends agents that have not heard us, and end every starter."""
        for agent in self.all:
            agent.close()
        found = [(agent.starter, agent.greeted) for agent in self.all]
        if self._listener:
            self._listener.close()
            found.append((self._listener.starter, any(agent.greeted for agent in self.all if agent.starter is None)))
        starters = [starter for starter, _ in found if starter]
        _end([starter for starter, greeted in found if starter and not greeted], UNHEARD_WITHIN_S)
        _end(starters, HUNG_UP_WITHIN_S)
        for starter in starters:
            _close_pipes(starter)
        self._selector.close()

    def _read(self, agent: AgentConnection) -> None:
        said = agent.channel.receive()
        self._heard(agent, said)
        if agent.joiner and any(isinstance(message, (messages.Exit, messages.Unstartable)) for message in said):
            agent.processes = []
            agent.channel.send(messages.Stop(0.0))
        if not agent.channel.open:
            self._selector.unregister(agent.channel.read_fd)
            if not agent.ended:
                self._lost_agent(agent)

    def _forget_if_over(self, agent: AgentConnection) -> None:
        """Close all that is open of a joiner's agent that has gone: many may come, one after the other."""
        starter, watched = agent.starter, self._selector.get_map()
        assert starter and starter.stderr
        unread = agent.channel.read_fd in watched or starter.stderr.fileno() in watched
        if not unread and (agent.ended or not agent.greeted) and starter.poll() is not None:
            self.all.remove(agent)
            agent.close()
            _close_pipes(starter)

    def _check_starter(self, listener: AgentListener) -> None:
        starter, name = listener.starter, listener.starter_name
        if listener.waiting and starter and starter.poll() is not None:
            why = f"{name} ended with exit code {starter.returncode} before they started"
            self._report_lost(f"of {listener.family}", listener.take_missing(), why, starter, name)

    def _lost_agent(self, agent: AgentConnection) -> None:
        why = "its agent has gone"
        if agent.starter:
            began = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = agent.starter.wait(timeout=self._exit_wait_s)
                how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                why = f"{agent.starter_name} {how}"
            self._exit_wait_s = max(0.0, self._exit_wait_s - (time.monotonic() - began))
        self._report_lost(agent.host, agent.names, why, agent.starter, agent.host)

    def _report_lost(self, host: str, names: List[str], why: str, starter: "Optional[subprocess.Popen[bytes]]",
                     label: str) -> None:
        if starter and starter.stderr:
            last_words = self._selector.get_map().get(starter.stderr.fileno())
            if last_words:
                last_words.data()
        self._host_lost(host, names, why, list(self._last_lines[label]))

    # Starters

    def _watch_starter(self, starter: "subprocess.Popen[bytes]", label: str, *kinds: str) -> None:
        for kind in kinds:
            stream = Stream(kind, getattr(starter, kind).fileno())
            said = functools.partial(self._starter_said, stream, label)
            self._selector.register(stream.fd, selectors.EVENT_READ, said)

    def _starter_said(self, stream: Stream, label: str) -> None:
        for text, progress in stream.read():
            if not progress:
                self.show(label, text, stream.kind)
        if not stream.open:
            self._selector.unregister(stream.fd)

    def show(self, label: str, text: str, stream: str) -> None:
        """Show a line of an agent or of its starter, and keep it for the message that the agent is lost."""
        self._last_lines[label].append(text)
        self._show_line(label, text, stream)


def _close_pipes(starter: "subprocess.Popen[bytes]") -> None:
    for pipe in (starter.stdout, starter.stderr):
        assert pipe
        pipe.close()


def _end(starters: "List[subprocess.Popen[bytes]]", within_s: float) -> None:
    """Wait `within_s` for these; ask those that are left to end, as an agent then removes its files; then kill them."""
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        until = time.monotonic() + within_s
        for starter in starters:
            with contextlib.suppress(subprocess.TimeoutExpired):
                starter.wait(timeout=max(0.0, until - time.monotonic()))
        starters, within_s = [starter for starter in starters if starter.poll() is None], ASKED_WITHIN_S
        for starter in starters:
            end(starter)
    for starter in starters:
        starter.wait()
