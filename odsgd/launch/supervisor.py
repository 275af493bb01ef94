"""The loop between the agents, the judge that decides, and the console. One thread; everything is an event."""
import collections
import contextlib
import dataclasses
import itertools
import os
import shlex
import signal
import time
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple, Type

from kvstore.errors import EXIT_FAILURE, ConfigError
from kvstore.job.aside import guarded
from odsgd.config.launch import NO_STORE
from odsgd.launch import early, linux, messages
from odsgd.launch.addresses import LOOPBACK, is_loopback, is_own, launching_address, numeric, reserve_port
from odsgd.launch.connections import pmi, tunnel
from odsgd.launch.hosts import ssh
from odsgd.launch.hosts.agents import Agents
from odsgd.launch.hosts.check import MissingHosts, check_hosts
from odsgd.launch.hosts.ssh import AgentConnection
from odsgd.launch.messages import Message
from odsgd.launch.plan import Job, Plan, Process, exposure, make_plan
from odsgd.launch.policy.failures import Member
from odsgd.launch.policy.judge import Judge, Verdict
from odsgd.launch.policy.membership import Attempt, Membership, decide, empty_places, next_place, why_closed
from odsgd.launch.view import overview
from odsgd.launch.view.console import Console
from odsgd.launch.view.overview import Overview
from odsgd.launch.view.status_file import StatusFile, taken

REJOIN_EVERY_S = 2.0
"""The pause between two attempts to start a job that lacks a host or a worker."""
SHOW_EVERY_S = 1.0
"""The time between two updates of the job's status."""
STARTING_SHOWN_S, STARTING_SAID_S = 2.0, 10.0
"""After this time a job that has not started says so in its status, and in a line of output. Each further line comes
after twice the time."""
ENDED_WITHIN_S = 6.0
"""How long after the last SIGKILL an agent may take to say that nothing is left."""
SCHEDULER_ENDS_WITHIN_S = 2.0
"""How long the scheduler may take to end after workers that used MXNet's own store."""
OPEN_FILES, OPEN_FILES_PER_PROCESS = 256, 4
"""Files that the launcher may open for a job on other hosts, and for each of its processes: every process may have an
agent of its own, with three pipes to ssh."""


def run(job: Job) -> int:
    """Run a job to its end; return the launcher's exit code. Blocks; on the main thread it handles signals."""
    console = Console()
    job = dataclasses.replace(job, live=all(console.on_terminal.values()))
    before: Optional[Attempt] = None
    membership, attempts, restarts_used = Membership(job), itertools.count(), 0
    host = scheduler_host(job)
    for warning in filter(None, (None if job.secure else exposure(host), _raise_open_file_limit(job),
                                 _loopback_guessed(job, host), taken())):
        console.say(f"warning: {warning}")
    with early.exit_on_signals(), contextlib.closing(StatusFile()) as status_file, console.flushed():
        ssh.check_programs(job)
        ssh.check_tunnels(job, host)
        check_hosts(job)
        if job.sync_dst_dir:
            ssh.synchronise(job)
        while True:
            with contextlib.closing(reserve_port(job.port)) as holder:
                certificate = tunnel.new_certificate(ssh.program("ODSGD_OPENSSL", "openssl")) if job.secure else ""
                saved = before.saved if before and before.began else None
                scheduler = host, holder.getsockname()[1]
                plan = make_plan(membership.job, scheduler, next(attempts), certificate, saved)
                missing_hosts = MissingHosts(membership.full_job, *membership.left_out_hosts(time.monotonic()))
                supervisor = Supervisor(membership.job, plan, console, status_file, missing_hosts)
                verdict = supervisor.run()
            if verdict is None:
                return 128 + signal.SIGPIPE
            if supervisor.judge.all_joined:
                membership.note_started()
            rejoin_decision = membership.after_failed_start(supervisor.blocking_startup(verdict), plan.processes,
                                                            time.monotonic(), verdict.apart)
            attempt = supervisor.attempt(verdict, before)
            decision = rejoin_decision or decide(attempt, before, restarts_used, job.max_restarts)
            if decision.text:
                console.say(decision.text)
            if not decision.again:
                return verdict.exit_code
            if rejoin_decision:
                time.sleep(REJOIN_EVERY_S)
                continue
            before = attempt
            if verdict.grows:
                membership.note_growth()
            else:
                restarts_used += 1


def _raise_open_file_limit(job: Job) -> Optional[str]:
    """Let the launcher open as many files as agents on other hosts need; returns a warning if it may not."""
    files = OPEN_FILES + OPEN_FILES_PER_PROCESS * (job.num_workers + job.num_servers)
    if job.launcher == "local" or linux.allow_files(files):
        return None
    return (f"this job may need {files} open files, and the launcher may not open so many; if agents do not "
            "call, raise the limit (`ulimit -Hn`)")


def scheduler_host(job: Job) -> str:
    """The scheduler's address: loopback for a local job, else this machine's as the hosts see it."""
    if job.launcher == "local":
        return LOOPBACK
    if job.host_ip:
        address = numeric(job.host_ip)
        if address is None:
            raise ConfigError(f"--host-ip {job.host_ip}: not an address of this machine that is known here")
        listens = job.num_servers > 0 or job.secure or job.launcher in ("mpi", "slurm")
        if listens and not is_own(address):
            raise ConfigError(f"--host-ip {job.host_ip}: this machine does not have that address; name the one of its "
                              "own by which the hosts reach it")
        return address
    return launching_address([host.address for host in job.slots])


def _loopback_guessed(job: Job, host: str) -> Optional[str]:
    """A warning if the scheduler's address is a guess that other machines do not reach."""
    names = dict.fromkeys(slot.address for slot in job.slots) if is_loopback(host) and not job.host_ip else ()
    other = next((name for name, address in zip(names, map(numeric, names))
                  if address is None or not is_loopback(address)), None)
    return other and (f"this machine's IPv4 address on the way to {other} is not known, and {host} is taken; unless "
                      "all hosts are this machine, say with --host-ip how they reach it")


class Supervisor:
    """Starts an agent on every host, feeds the judge with their messages, and ends the job with its verdict."""

    def __init__(self, job: Job, plan: Plan, console: Console, status_file: StatusFile,
                 missing_hosts: MissingHosts) -> None:
        self.job, self.plan, self.console = job, plan, console
        self.agents = Agents(job, plan, self._heard, lambda host, names, why, last_lines: self.judge.host_lost(
            host, names, why, last_lines, time.monotonic()), console.line)
        self.mpi_requests: Deque[messages.MpiRequest] = collections.deque()
        self.mpi_asked = False
        self.pmi_table = pmi.Table(job.num_workers, pmi.process_mapping([worker.host for worker in plan.workers]))
        members = [Member(process.name, process.role, process.host.address) for process in plan.processes]
        address = "{}:{}".format(*plan.scheduler_address) if job.num_servers else "the others"
        self.judge = Judge(job, members, time.monotonic(), address)
        self.overview = Overview()
        self.status_file, self.missing_hosts = status_file, missing_hosts
        self.joiners: Dict[str, Tuple[str, str]] = {}  # workers that came later, and their hosts, by request
        self.checkpoint_seen = 0  # the last checkpoint at which `_check_growth` looked for missing hosts
        self.shown_at = self.began_at = time.monotonic()
        self.say_at_s = STARTING_SAID_S
        self.signals_seen = 0
        self.all_met_sent = False
        self.failed_at = 0.0
        self.blocking: List[str] = []  # the processes that kept the job from starting, when the verdict came
        self._handlers: Dict[Type[Message], Callable[[AgentConnection, Any, float], object]] = {
            messages.Hello: self._greeted,
            messages.Beats: self._beats,
            messages.Pong: lambda agent, pong, now: self.judge.liveness.answered(agent.names, pong.at),
            messages.AgentSignalled: lambda agent, told, now: self.judge.agent_signalled(
                agent.host, agent.names, told.signal, now),
            messages.Ended: lambda agent, message, now: self.agents.ended(agent),
            messages.Noise: lambda agent, noise, now: self.agents.show(agent.host, noise.text, "stdout"),
            messages.HostWarning: lambda agent, warning, now: console.say(
                f"warning: host {agent.host}: {warning.text}"),
            messages.TunnelListens: self._tunnel_listens,
            messages.RemoteSocketsOpen: self._remote_sockets_open,
            messages.Started: lambda agent, started, now: self.judge.started(started.process, started.pid),
            messages.Unstartable: lambda agent, failed, now: self.judge.unstartable(failed.process, failed.error, now),
            messages.Output: self._show,
            messages.Report: lambda agent, told, now: self.judge.reported(told.process, told.report, now),
            messages.MpiRequest: self._mpi_asks,
            messages.Exit: self._exited}

    def run(self) -> Optional[Verdict]:
        """Start the job, see it to its end, and say how it ended; None: nobody reads our output any more (`| head`)."""
        with early.handled_by(self._signalled):
            try:
                self.agents.open()
                if self.plan.spare:
                    self.agents.tell(messages.WorkersChanged([f"{process.rank}" for process in self.plan.spare]))
                verdict = self._fail_without_store(self._wait())
                self.failed_at = time.monotonic()
                self.blocking = self.judge.blocking_startup()  # before we end the rest
                if verdict.by_signal and self.console.on_terminal["stderr"]:
                    self.console.say("stopping; a second signal ends everything at once")
                self._end(verdict)
            except BrokenPipeError:
                return None
            finally:
                self._close()
        stopped = None if verdict.by_signal or verdict.workers_succeeded else self.judge.stopped()
        if stopped:  # told to end while a failed attempt ended: it does not start again
            text = "\n".join(filter(None, [verdict.message, stopped.message]))
            verdict = dataclasses.replace(stopped, message=text)
        self._announce(verdict)
        return verdict

    def attempt(self, verdict: Verdict, before: Optional[Attempt]) -> Attempt:
        """How this attempt went.

        Until it has a checkpoint, or has resumed from one, the last one of the attempt `before` counts.
        """
        judge = self.judge
        saved = judge.saved or (before.saved if before else 0)
        since_s = max(0.0, self.failed_at - judge.saved_at)  # below 0: the checkpoint came while the attempt ended
        began = bool(judge.kept) or (before is not None and before.began)
        return Attempt(verdict, judge.resumed, saved, judge.liveness.farthest, since_s, began)

    def blocking_startup(self, verdict: Verdict) -> List[Process]:
        """The processes that kept the job from starting, if that is why it failed."""
        if verdict.by_signal or verdict.workers_succeeded:
            return []
        names = self.blocking
        if not self.job.least_workers:  # no worker can be spared, and one that has reported an error would do so again
            names = [name for name in names if self.judge.members[name].error is None]
        return [process for process in self.plan.processes if process.name in names]

    def _wait(self) -> Verdict:
        while True:
            self.agents.turn()
            verdict = self.judge.tick(time.monotonic()) or self._check_growth(time.monotonic())
            self._pass_on()
            if verdict:
                self.console.show_status("")
                return verdict
            if self.judge.all_joined and not self.all_met_sent:
                self.all_met_sent = True
                self.agents.tell(messages.AllMet())
            self._show_progress(time.monotonic())

    def _pass_on(self) -> None:
        """Tell the agents and the user what the judge has found."""
        news = self.judge.take_news()
        if news.failed:
            self.agents.ping()
        for name in news.hung:
            self.agents.tell(messages.EndHung(name), name)
        for line in self.judge.liveness.take_warnings():
            self.console.say(f"warning: {line}")
        for lost in news.lost:
            self.agents.tell(messages.WorkersChanged([f"{rank}" for rank in lost.ranks]))
            self.console.say(lost.message)
            self.shown_at = 0.0  # update the status now: who has read this line may run `odsgd join`
        for rank in news.joined:
            self.agents.tell(messages.WorkersChanged([f"+{rank}"]))
            self.console.say(f"worker {rank} has joined")

    def _fail_without_store(self, verdict: Verdict) -> Verdict:
        """The verdict; a failure if the workers have succeeded without a store and without a request from their MPI."""
        job = self.job
        expected = job.store != NO_STORE if job.store else job.num_workers > 1
        if not verdict.workers_succeeded or not expected:
            return verdict
        if self.judge.any_worker_joined or self.mpi_asked or self._met_by_mxnet():
            return verdict
        served = f", so `{job.store}` was not used" if job.store else ""
        text = (f"no worker has made a store{served}; the script has to ask for one (kvstore=…; PyTorch: od.create; "
                "one of MXNet's with --store, in a Python that is not started with -E or -I). If the workers exchange "
                f"nothing, or by other means, say --store {NO_STORE}")
        return dataclasses.replace(verdict, exit_code=verdict.exit_code or EXIT_FAILURE,
                                   message="\n".join(filter(None, [verdict.message, text])))

    def _met_by_mxnet(self) -> bool:
        """Whether the workers met in a store of MXNet's, which reports nothing: the scheduler then ends by itself."""
        scheduler = self.judge.members.get("scheduler")
        until = time.monotonic() + SCHEDULER_ENDS_WITHIN_S
        while scheduler and not scheduler.done_or_ended and time.monotonic() < until:
            self.agents.turn()
        return scheduler is not None and scheduler.done_or_ended

    def _check_growth(self, now: float) -> Optional[Verdict]:
        """The end of this attempt at a checkpoint, if a missing host is back."""
        self.missing_hosts.ask(now)
        saved = self.judge.saved
        if saved in (self.checkpoint_seen, self.judge.resumed):
            return None
        self.checkpoint_seen = saved
        back = ", ".join(dict.fromkeys(host.address for host in self.missing_hosts.back))
        return Verdict(0, f"back: {back}; the job ends after checkpoint {saved} and is started again with all",
                       grows=True) if back else None

    def _show_progress(self, now: float) -> None:
        """Show the job's status on the terminal and to `odsgd watch`; start the worker that `odsgd join` asks for."""
        if now - self.shown_at < SHOW_EVERY_S:
            return
        self.shown_at = now
        closed = self.job.closed or why_closed(self.plan, self.judge)
        request = self.status_file.take_request()
        if request and not closed:
            self._let_join(request, now)
        status, text = {}, ""  # type: overview.Facts, str
        with guarded("the status line", self.console.say):
            status = self.overview.status(now)
            text = overview.line(status, self.console.columns) if status else ""
        starting = "" if status else self._starting_text(now)
        self.console.show_status(text or starting)
        with guarded("the file for `odsgd watch`", self.console.say):
            hosts = {name: member.host for name, member in self.judge.members.items()
                     if member.code is None and member.part != "lost"}
            self.status_file.write({
                "job": os.getpid(), "command": shlex.join(self.job.command), "written_at": time.time(),
                "status": status, "starting": starting, "out": self.overview.out(),
                "rows": self.overview.table(hosts), "closed": closed, "joiners": self.joiners})

    def _let_join(self, request: str, now: float) -> None:
        """Start a worker in an empty place, by an agent of its own."""
        process = next_place(self.plan, self.judge)
        assert process is not None
        self.joiners[request] = process.name, process.host.address
        process.env.update(ODSGD_JOINED=str(len(self.joiners)), ODSGD_JOINED_AT=str(self.judge.liveness.farthest))
        for agent in self.agents.all:
            agent.processes = [one for one in agent.processes if one.name != process.name]
        self.judge.joins(Member(process.name, process.role, process.host.address), now)
        self.console.say(f"{process.name} starts on {process.host.address}, to join after iteration "
                         f"{self.judge.liveness.farthest}")
        try:
            self.agents.start(process)
        except ConfigError as error:
            self.judge.unstartable(process.name, str(error), now)
        else:
            empty = [f"{one.rank}" for one in empty_places(self.plan, self.judge)]
            self.agents.tell(messages.WorkersChanged(empty), process.name)

    def _starting_text(self, now: float) -> str:
        """What the job waits for before its first iteration; without a terminal it is printed from time to time."""
        seconds = now - self.began_at
        text = self.judge.startup_text(seconds) if seconds > STARTING_SHOWN_S else ""
        if text and not self.console.on_terminal["stderr"] and seconds > self.say_at_s and self.judge.joining_since:
            self.say_at_s = 2 * seconds
            self.console.say(f"warning: {text}")
        return text

    # What agents say

    def _heard(self, agent: AgentConnection, said: Sequence[Message]) -> None:
        now = time.monotonic()
        self.judge.liveness.heard(agent.names, now)
        for message in said:
            self.handle(agent, message, now)

    def handle(self, agent: AgentConnection, message: Message, now: float) -> None:
        """Act on a message of an agent; not on what it says of a process in whose place another has joined."""
        replaced = isinstance(message, messages.ProcessMessage) and message.process not in agent.names
        if type(message) in self._handlers and not replaced:
            self._handlers[type(message)](agent, message, now)

    def _greeted(self, agent: AgentConnection, hello: messages.Hello, now: float) -> None:
        agent.greeted = True
        if agent.starter is None:  # mpirun or Kubernetes has chosen the host, and only now we know it
            agent.host = hello.host
            for name in agent.names:
                self.judge.members[name].host = hello.host

    def _beats(self, agent: AgentConnection, message: messages.Beats, now: float) -> None:
        names = agent.names
        beats = {name: beat for name, beat in message.beats.items() if name in names}
        self.judge.liveness.beats(beats, now)
        with guarded("the overview", self.console.say):
            self.overview.beats(beats, now)

    def _show(self, agent: AgentConnection, output: messages.Output, now: float) -> None:
        if output.progress:
            self.console.progress(output.process, output.text)
        else:
            self.judge.output(output.process, output.text)
            self.console.line(output.process, output.text, "stderr" if output.stream == "stderr" else "stdout")

    def _exited(self, agent: AgentConnection, message: messages.Exit, now: float) -> None:
        self.judge.exited(message.process, message.code, now)
        with guarded("the overview", self.console.say):
            self.overview.ended(message.process)

    def _tunnel_listens(self, agent: AgentConnection, message: messages.TunnelListens, now: float) -> None:
        """When all tunnels listen, tell each of them the sockets of the other hosts."""
        agent.tunnel, agent.socket_namespace = message.address, message.socket_namespace
        if all(one.tunnel for one in self.agents.all):
            for one, sockets in ssh.remote_sockets(self.agents.all):
                one.channel.send(messages.OpenRemoteSockets(sockets))

    def _remote_sockets_open(self, agent: AgentConnection, message: messages.RemoteSocketsOpen, now: float) -> None:
        agent.reaches_others = True
        self._answer_mpi()

    def _mpi_asks(self, agent: AgentConnection, request: messages.MpiRequest, now: float) -> None:
        self.mpi_asked, code = True, pmi.aborts(request.line)
        if code is None:
            self.mpi_requests.append(request)
            self._answer_mpi()
        else:
            self.judge.mpi_aborted(request.process, code, now)

    def _answer_mpi(self) -> None:
        """Answer MPI's requests, when the sockets of other hosts are open: an answer lets it call other workers."""
        while self.mpi_requests and not (self.job.secure and not all(one.reaches_others for one in self.agents.all)):
            self._answer(self.mpi_requests.popleft())

    def _answer(self, request: messages.MpiRequest) -> None:
        rank = self.judge.members[request.process].rank
        try:
            answers: Dict[int, Optional[str]] = {**self.pmi_table.answer(rank, request.line)}
        except pmi.Refused as refused:
            self.console.say(f"{request.process}: its MPI asked for {refused}; it was cut off")
            answers = {rank: None}
        for rank, answer in answers.items():
            self.agents.tell(messages.MpiAnswer(f"worker {rank}", answer), f"worker {rank}")

    # Ending

    def _end(self, verdict: Verdict) -> None:
        """Stop everything, and wait until every agent has said that nothing is left."""
        self.agents.stop(self.job.grace_s)
        deadline = time.monotonic() + self.job.grace_s + ENDED_WITHIN_S
        signals_seen = 1 if verdict.by_signal else self.signals_seen
        while time.monotonic() < deadline and self.agents.occupied:
            self.agents.turn()
            if self.signals_seen > signals_seen:  # told again: end at once
                signals_seen = self.signals_seen
                self.agents.stop(0.0)
                deadline = min(deadline, time.monotonic() + ENDED_WITHIN_S)

    def _close(self) -> None:
        """Leave nothing behind."""
        self.missing_hosts.close()
        self.agents.close()
        for process in self.plan.processes:  # an agent may have been killed before its processes had met
            for path in process.files if process.host.here else ():
                with contextlib.suppress(OSError):  # the name is free by now, and may be another user's
                    os.unlink(path)

    def _announce(self, verdict: Verdict) -> None:
        if verdict.by_signal:
            self.console.hurries = True
        with contextlib.suppress(BrokenPipeError):
            unsure = sorted({agent.host for agent in self.agents.all if agent.greeted and not agent.ended})
            if verdict.by_signal and not unsure:
                self.console.say(f"{verdict.message}; nothing of the job is left")
            elif verdict.message:
                self.console.say(verdict.message)
            if unsure and verdict.exit_code:
                self.console.say(f"the agent on {', '.join(unsure)} has not confirmed that everything there has ended; "
                                 "the agent ends its processes by itself when it finds the connection closed")

    def _signalled(self, number: int, frame: object) -> None:
        self.signals_seen += 1
        self.judge.interrupted(number)
        if self.signals_seen > 3:  # our own output may be blocked; the agents end everything when we are gone
            os._exit(128 + number)
