"""The loop between the agents, the judge that decides, and the console. One thread; everything is an event."""
import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import selectors
import shlex
import signal
import subprocess
import time
from typing import Callable, ContextManager, Deque, Dict, Iterator, List, Optional, Tuple

from kvstore.errors import EXIT_FAILURE, ConfigError
from kvstore.job import aside
from odsgd.config.launch import NO_STORE
from odsgd.launch import early, linux
from odsgd.launch.addresses import LOOPBACK, launching_address, numeric, reserve_port
from odsgd.launch.connections import pmi, tunnel
from odsgd.launch.hosts import kubernetes, slurm, ssh
from odsgd.launch.hosts.check import check_hosts
from odsgd.launch.hosts.listener import AgentListener
from odsgd.launch.hosts.missing import MissingHosts
from odsgd.launch.hosts.mpi import open_mpirun
from odsgd.launch.hosts.ssh import AgentConnection
from odsgd.launch.lines import Stream
from odsgd.launch.messages import Message
from odsgd.launch.plan import Job, Plan, Process, exposure, make_plan
from odsgd.launch.policy.judge import TAIL_LINES, Judge, Member, Verdict
from odsgd.launch.policy.restarts import Attempt, Membership, decide
from odsgd.launch.view import overview
from odsgd.launch.view.console import Console
from odsgd.launch.view.overview import Overview
from odsgd.launch.view.status_file import StatusFile

TICK_S = 0.1
"""Between two looks at the time, and at the signals, which end no wait."""
PING_EVERY_S = 10.0
REJOIN_EVERY_S = 2.0
"""Between two attempts of a job that lacks a host or a worker."""
SHOW_EVERY_S = 1.0
"""Between two updates of how far the job is."""
PATIENCE_S = 1.0
"""How long all that carried connections which have gone may take to end and say why; the loop is deaf meanwhile."""
COMING_S, COMING_SAID_S = 2.0, 10.0
"""How long it may be coming up without a word: on a terminal, and where lines stay. There the next word comes after as
long again."""
ENDED_WITHIN_S = 6.0
"""How long after the last SIGKILL an agent may take to say that nothing is left."""
SCHEDULER_ENDS_WITHIN_S = 2.0
"""How long after the workers the scheduler of a job that has met by MXNet's own store may take to end."""
HUNG_UP_WITHIN_S, UNHEARD_WITHIN_S = 4.0, 0.5
"""How long an agent may take to end after the connection has been closed on it; one that has never spoken."""
FILES, FILES_PER_PROCESS = 256, 4
"""Open ones that a job on other hosts needs here: for all of it, and at most for a process, which may have an agent of
its own, with three to ssh."""
LISTENERS: Dict[str, Callable[[Job, Plan], AgentListener]] = {
    "mpi": open_mpirun, "slurm": slurm.open_step, "kubernetes": kubernetes.wait_for_pods}
"""Of the launchers whose agents come by themselves."""


def run(job: Job, console: Optional[Console] = None) -> int:
    """Run a job to its end; return the launcher's exit code. Blocks; on the main thread it takes the signals."""
    console = console or Console()
    job = dataclasses.replace(job, live=all(console.on_terminal.values()))
    before: Optional[Attempt] = None
    membership, restarts = Membership(job), 0
    root = root_uri(job)
    for warning in filter(None, (None if job.secure else exposure(root), _allow_files(job))):
        console.say(warning)
    with early.exit_on_signals(), contextlib.closing(StatusFile()) as status_file, console.flushed():
        ssh.check_programs(job)
        ssh.check_tunnels(job, root)
        check_hosts(job)
        if job.sync_dst_dir:
            ssh.synchronise(job)
        for attempts in itertools.count():
            with contextlib.closing(reserve_port(job.port)) as holder:
                certificate = tunnel.new_certificate(ssh.program("ODSGD_OPENSSL", "openssl")) if job.secure else ""
                saved = before.saved if before else 0
                plan = make_plan(membership.job, (root, holder.getsockname()[1]), attempts, certificate, saved)
                missing_hosts = MissingHosts(membership.full, *membership.missing(time.monotonic()))
                supervisor = Supervisor(membership.job, plan, console, status_file, missing_hosts)
                exit_code = supervisor.run()
            attempt = supervisor.attempt(before)
            if attempt is None:
                return exit_code
            if supervisor.judge.came_up:
                membership.met()
            recalled = membership.missed(supervisor.absent(), plan.processes, time.monotonic())
            decision = recalled or decide(attempt, before, restarts, job.max_restarts)
            if decision.text:
                console.say(decision.text)
            if not decision.again:
                return exit_code
            if recalled:
                time.sleep(REJOIN_EVERY_S)
                continue
            before = attempt
            if attempt.verdict.grows:
                membership.grows()
            else:
                restarts += 1
    raise AssertionError("there is no end of restarts")


def _allow_files(job: Job) -> Optional[str]:
    """Let the launcher have as many files open as agents on other hosts take; a warning, if it may not."""
    files = FILES + FILES_PER_PROCESS * (job.num_workers + job.num_servers)
    if job.launcher == "local" or linux.allow_files(files):
        return None
    return (f"warning: the launcher may have fewer files open than the {files} that such a job can need; if agents do "
            "not come, raise the limit (`ulimit -Hn`)")


def root_uri(job: Job) -> str:
    """The scheduler's address: loopback for a local job, else this machine's as the hosts see it."""
    if job.launcher == "local":
        return LOOPBACK
    if job.host_ip:
        address = numeric(job.host_ip)
        if address is None:
            raise ConfigError(f"--host-ip {job.host_ip}: not an address of this machine that is known here")
        return address
    return launching_address([host.address for host in job.slots])


class Supervisor:
    """Starts an agent on every host, feeds the judge with their messages, and ends the job with its verdict."""

    def __init__(self, job: Job, plan: Plan, console: Console, status_file: StatusFile,
                 missing_hosts: MissingHosts) -> None:
        self.job, self.plan, self.console = job, plan, console
        self.selector = selectors.DefaultSelector()
        self.agents: List[AgentConnection] = []
        self.questions: Deque[Tuple[str, str]] = collections.deque()  # of MPI, by process
        self.mpi_asked = False
        self.exit_wait_s = PATIENCE_S
        self.agent_of: Dict[str, AgentConnection] = {}  # by process
        self.table = pmi.Table(job.num_workers, pmi.process_mapping([worker.host for worker in plan.workers]))
        self.listener: Optional[AgentListener] = None
        self.carriers: List[subprocess.Popen[bytes]] = []
        self.complaints: Dict[str, Deque[str]] = collections.defaultdict(lambda: collections.deque(maxlen=TAIL_LINES))
        members = [Member(process.name, process.role, process.host.address) for process in plan.processes]
        root = "{}:{}".format(*plan.root) if job.num_servers else "the others"
        self.judge = Judge(job, members, time.monotonic(), root)
        self.overview = Overview({member.name: member.host for member in members})
        self.status_file, self.missing_hosts = status_file, missing_hosts
        self.kept = 0  # the last checkpoint that was looked at
        self.shown_at = self.began_at = time.monotonic()
        self.say_at_s = COMING_SAID_S
        self.signals_seen = 0
        self.pinged_at = time.monotonic()
        self.met = self.ending = False
        self.verdict: Optional[Verdict] = None
        self.failed_at = 0.0

    def run(self) -> int:
        """From the first agent to the last."""
        with self._signals():
            try:
                self._open()
                verdict = self._check_stores(self._wait())
                self.verdict, self.failed_at = verdict, time.monotonic()
                if verdict.by_signal and self.console.on_terminal["stderr"]:
                    self.console.say("stopping; once more to end everything at once")
                self._end()
            except BrokenPipeError:  # our output is not read any more (`| head`): as if by SIGPIPE
                return 128 + signal.SIGPIPE
            finally:
                self._close()
        self._announce(verdict)
        return verdict.exit_code

    def attempt(self, before: Optional[Attempt]) -> Optional[Attempt]:
        """How it went; None if nobody reads our output any more. What was kept `before` counts until it is known with
        which checkpoint this one went on, which may have been an older one.
        """
        history = self.judge.history
        if self.verdict is None:
            return None
        saved = history.saved or (before.saved if before else 0)
        at = self.judge.liveness.farthest()
        return Attempt(self.verdict, history.resumed, saved, at, self.failed_at - history.since)

    def absent(self) -> List[Process]:
        """The processes without which the job did not come up, if it failed for that."""
        if self.verdict is None or self.verdict.by_signal or self.verdict.finished:
            return []
        names = self.judge.absent()
        if not self.job.least_workers:  # nobody else would do; one that has said what is wrong says it again
            names = [name for name in names if self.judge.members[name].error is None]
        return [process for process in self.plan.processes if process.name in names]

    def _wait(self) -> Verdict:
        while True:
            self._turn()
            verdict = self.judge.tick(time.monotonic()) or self._check_growth(time.monotonic())
            for name in self.judge.take_hung():
                self._tell({"do": "end", "process": name})
            for line in self.judge.liveness.take_warnings():
                self.console.say(f"warning: {line}")
            for lost in self.judge.take_lost():
                self._tell({"do": "lost", "workers": lost.ranks})
                self.console.say(lost.message)
            if verdict:
                self.console.stand("")
                return verdict
            if self.judge.came_up and not self.met:
                self.met = True
                self._tell({"do": "met"})
            self._show_progress(time.monotonic())

    def _check_stores(self, verdict: Verdict) -> Verdict:
        """The verdict, or a failure where several workers have succeeded and none has made a store or asked MPI."""
        job = self.job
        expected = job.store != NO_STORE if job.store else job.num_workers > 1
        if not verdict.finished or not expected or self.judge.met or self.mpi_asked or self._met_by_mxnet():
            return verdict
        served = f", so `{job.store}` has served none" if job.store else ""
        text = (f"no worker has made a store{served}; the script has to ask for one (kvstore=…; one of MXNet's with "
                "--store, in a Python that is not started with -E or -I). If the workers meet otherwise, or need not, "
                f"say --store {NO_STORE}")
        return dataclasses.replace(verdict, exit_code=verdict.exit_code or EXIT_FAILURE,
                                   message="\n".join(filter(None, [verdict.message, text])))

    def _met_by_mxnet(self) -> bool:
        """Whether they had a store of MXNet's own, of which no report tells: then the scheduler ends by itself."""
        scheduler = self.judge.members.get("scheduler")
        until = time.monotonic() + SCHEDULER_ENDS_WITHIN_S
        while scheduler and not scheduler.finished and time.monotonic() < until:
            self._turn()
        return scheduler is not None and scheduler.finished

    def _check_growth(self, now: float) -> Optional[Verdict]:
        """The end of this attempt at a checkpoint, if somebody is back whom it goes on without."""
        self.missing_hosts.ask(now)
        history = self.judge.history
        if history.saved in (self.kept, history.resumed):
            return None
        self.kept = history.saved
        back = ", ".join(dict.fromkeys(host.address for host in self.missing_hosts.back))
        return Verdict(0, f"back: {back}; the job ends after checkpoint {self.kept} and is started again with all",
                       grows=True) if back else None

    def _show_progress(self, now: float) -> None:
        """Show how the job stands, on the terminal and to those who watch it."""
        if now - self.shown_at < SHOW_EVERY_S:
            return
        self.shown_at = now
        standing, text = {}, ""  # type: overview.Facts, str
        with self._aside("the line that tells how the job stands"):
            standing = self.overview.standing(now)
            text = overview.line(standing, self.console.columns) if standing else ""
        coming = "" if standing else self._starting_text(now)
        self.console.stand(text or coming)
        with self._aside("the file for `odsgd watch`"):
            self.status_file.write({"job": os.getpid(), "command": shlex.join(self.job.command), "at": time.time(),
                               "standing": standing, "coming": coming, "out": self.overview.out(),
                               "rows": self.overview.table()})

    def _aside(self, what: str) -> ContextManager[None]:
        """Of those that only observe the job: an error of theirs is said, and goes no further."""
        return aside.guarded(what, self.console.say)

    def _starting_text(self, now: float) -> str:
        """What is waited for before the first iteration; where there is no terminal to show it on, it is said."""
        coming_s = now - self.began_at
        text = self.judge.coming(coming_s) if coming_s > COMING_S else ""
        if text and not self.console.on_terminal["stderr"] and coming_s > self.say_at_s and self.judge.asked_at:
            self.say_at_s = 2 * coming_s
            self.console.say(f"warning: {text}")
        return text

    # Opening

    def _open(self) -> None:
        hosts = list(dict.fromkeys(process.host for process in self.plan.processes))
        if self.job.launcher in LISTENERS:
            self.listener = LISTENERS[self.job.launcher](self.job, self.plan)
            self.listener.serve(self.selector, self._arrived)
            if self.listener.starter:
                self._carried_by(self.listener.starter, self.listener.starter_name, "stdout", "stderr")
            hosts = [host for host in hosts if host.here]
        for host in hosts:
            open_at = ssh.open_local if host.here else ssh.open_ssh
            self._add(open_at(self.job, self.plan, host))

    def _add(self, agent: AgentConnection) -> None:
        self.agents.append(agent)
        self.agent_of.update(dict.fromkeys((process.name for process in agent.processes), agent))
        self._listen(agent.channel.read_fd, functools.partial(self._heard, agent))
        if agent.carrier:
            self._carried_by(agent.carrier, agent.host, "stderr")

    def _arrived(self, agent: AgentConnection) -> None:
        self._add(agent)
        if self.ending:
            agent.channel.send({"do": "kill"})

    def _answer_mpi(self) -> None:
        """Answer what MPI has asked. It calls the others when it knows of them: not before the portals are there."""
        while self.questions and not (self.job.secure and not all(agent.opened for agent in self.agents)):
            self._answer(*self.questions.popleft())

    def _answer(self, name: str, line: str) -> None:
        rank, code = self.judge.members[name].rank, pmi.aborts(line)
        answers: Dict[int, Optional[str]] = {}
        try:
            if code is None:
                answers.update(self.table.answer(rank, line))
            else:
                self.judge.aborted(name, code, time.monotonic())
        except pmi.Refused as refused:
            self.console.say(f"{name}: its MPI asked for {refused}; it was cut off")
            answers[rank] = None
        for rank, answer in answers.items():
            self.agent_of[f"worker {rank}"].channel.send({"do": "answer", "process": f"worker {rank}", "line": answer})

    # One turn of the loop

    def _turn(self) -> None:
        for key, _ in self.selector.select(TICK_S):
            key.data()
        now = time.monotonic()
        if now - self.pinged_at >= PING_EVERY_S:
            self.pinged_at = now
            self._tell({"do": "ping"})
        for agent in self.agents:
            agent.channel.flush()
        if self.listener:
            self.listener.tick()
            self._check_starter(self.listener)

    def _check_starter(self, listener: AgentListener) -> None:
        starter, name = listener.starter, listener.starter_name
        if listener.waiting and starter and starter.poll() is not None:
            why = f"{name} ended with exit code {starter.returncode} before they started"
            self._lost(f"of {listener.family}", listener.take_missing(), why, starter, name)

    def _heard(self, agent: AgentConnection) -> None:
        now = time.monotonic()
        self.judge.liveness.heard((process.name for process in agent.processes), now)
        for message in agent.channel.receive():
            self._handle(agent, message, now)
        if not agent.channel.open:
            self.selector.unregister(agent.channel.read_fd)
            if not agent.ended:
                self._lost_agent(agent)

    def _handle(self, agent: AgentConnection, message: Message, now: float) -> None:
        event, name = message.get("event"), message.get("process", "")
        if event == "hello":
            self._greeted(agent, message["host"])
        elif event == "beats":
            self.judge.liveness.beats(message["beats"], now)
            with self._aside("the overview of beats"):
                self.overview.beats(message["beats"], now)
        elif event == "told" and not self.ending:
            self.judge.host_told(agent.host, [process.name for process in agent.processes], message["signal"], now)
        elif name in self.judge.members:
            self._handle_process(name, message, now)
        elif event == "ended":
            agent.ended = True
            if not self.ending:
                self._lost_agent(agent)
        elif event == "noise":
            self._complaint(agent.host, message["text"], "stdout")
        elif event == "warning":
            self.console.say(f"warning: host {agent.host}: {message['text']}")
        elif event in ("listens", "opened"):
            self._handle_tunnel(agent, message)

    def _handle_tunnel(self, agent: AgentConnection, message: Message) -> None:
        """When all tunnels are there, each is told of the others; when it has made its portals, MPI may begin."""
        if message["event"] == "opened":
            agent.opened = True
            self._answer_mpi()
            return
        agent.tunnel, agent.place = message["at"], message["place"]
        if all(one.tunnel for one in self.agents):
            for one, portals in ssh.portals(self.agents):
                one.channel.send({"do": "portals", "portals": portals})

    def _handle_process(self, name: str, message: Message, now: float) -> None:
        """Something that concerns one process."""
        event = message["event"]
        if event == "started":
            self.judge.started(name, message["pid"])
        elif event == "unstartable":
            self.judge.unstartable(name, message["error"], now)
        elif event == "output":
            self._show(name, message)
        elif event == "report":
            self.judge.reported(name, message["report"], now)
        elif event == "asks":
            self.mpi_asked = True
            self.questions.append((name, message["line"]))
            self._answer_mpi()
        elif event == "exit":
            self.judge.exited(name, message["code"], now)
            self.overview.ended(name)

    def _show(self, name: str, message: Message) -> None:
        if message["progress"]:
            self.console.progress(name, message["text"])
        else:
            self.judge.output(name, message["text"])
            self.console.line(name, message["text"], "stderr" if message["stream"] == "stderr" else "stdout")

    def _greeted(self, agent: AgentConnection, host: str) -> None:
        agent.greeted = True
        if agent.carrier is None:  # mpirun has chosen the host, or Kubernetes; now we know which
            agent.host = host
            for process in agent.processes:
                self.judge.members[process.name].host = host
                self.judge.liveness.placed(process.name, host)
                self.overview.placed(process.name, host)

    def _lost_agent(self, agent: AgentConnection) -> None:
        why = "its agent has gone"
        if agent.carrier:
            began = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = agent.carrier.wait(timeout=self.exit_wait_s)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                why = f"{agent.carrier_name} {how}"
            self.exit_wait_s = max(0.0, self.exit_wait_s - (time.monotonic() - began))
        self._lost(agent.host, agent.processes, why, agent.carrier, agent.host)

    def _lost(self, host: str, processes: List[Process], why: str, carrier: "Optional[subprocess.Popen[bytes]]",
              label: str) -> None:
        if carrier and carrier.stderr:
            last_words = self.selector.get_map().get(carrier.stderr.fileno())
            if last_words:
                last_words.data()
        names = [process.name for process in processes]
        self.judge.host_lost(host, names, why, list(self.complaints[label]), time.monotonic())

    # Ending

    def _end(self) -> None:
        """Stop everything, and wait until every agent has said that nothing is left."""
        self.ending = True
        for agent in self.agents:
            agent.wake()
        self._tell({"do": "stop", "grace_s": self.job.grace_s})
        deadline = time.monotonic() + self.job.grace_s + ENDED_WITHIN_S
        signals_seen = self.signals_seen
        while time.monotonic() < deadline and any(agent.occupied for agent in self.agents):
            self._turn()
            if self.signals_seen > signals_seen:  # told again: at once
                signals_seen = self.signals_seen
                self._tell({"do": "kill"})
                deadline = min(deadline, time.monotonic() + ENDED_WITHIN_S)

    def _close(self) -> None:
        """Close every channel (an agent that has not heard us ends at that), and let no carrier stay behind."""
        self.missing_hosts.close()
        for agent in self.agents:
            agent.close()
        if self.listener:
            self.listener.close()
        unheard = [agent.carrier for agent in self.agents if not agent.greeted]
        if self.listener and self.listener.starter and not any(agent.carrier is None and agent.greeted
                                                       for agent in self.agents):
            unheard.append(self.listener.starter)
        closed_at = time.monotonic()
        for carrier in self.carriers:
            deadline = closed_at + (UNHEARD_WITHIN_S if carrier in unheard else HUNG_UP_WITHIN_S)
            try:
                carrier.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                carrier.kill()
                carrier.wait()
            for pipe in (carrier.stdout, carrier.stderr):
                assert pipe
                pipe.close()
        self.selector.close()
        for process in self.plan.processes:  # of an agent that was killed before its processes had met
            for path in process.files if process.host.here else ():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def _announce(self, verdict: Verdict) -> None:
        with contextlib.suppress(BrokenPipeError):
            unsure = sorted({agent.host for agent in self.agents if agent.greeted and not agent.ended})
            if verdict.by_signal and not unsure:
                self.console.say(f"{verdict.message}; nothing of the job is left")
            elif verdict.message:
                self.console.say(verdict.message)
            if unsure and verdict.exit_code:
                self.console.say(f"the agent on {', '.join(unsure)} has not confirmed that everything there has ended; "
                                 "it ends its processes by itself when it finds the connection closed")

    # Small things

    def _tell(self, message: Message) -> None:
        for agent in self.agents:
            agent.channel.send(message)

    def _listen(self, fd: int, call: Callable[[], object]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, call)

    def _carried_by(self, carrier: "subprocess.Popen[bytes]", label: str, *kinds: str) -> None:
        self.carriers.append(carrier)
        for kind in kinds:
            stream = Stream(kind, getattr(carrier, kind).fileno())
            self._listen(stream.fd, functools.partial(self._carrier_said, stream, label))

    def _carrier_said(self, stream: Stream, label: str) -> None:
        for text, progress in stream.read():
            if not progress:
                self._complaint(label, text, stream.kind)
        if not stream.open:
            self.selector.unregister(stream.fd)

    def _complaint(self, label: str, text: str, stream: str) -> None:
        self.complaints[label].append(text)
        self.console.line(label, text, stream)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Take the signals for the time of the job."""
        handlers = {number: signal.signal(number, self._signalled) for number in early.heard()}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: object) -> None:
        self.signals_seen += 1
        self.judge.interrupted(number)
        if self.signals_seen > 3:  # our own output may be blocked; the agents end everything when we are gone
            os._exit(128 + number)
