"""The launcher's loop, with agents that are this test: what it sends to whom, and when."""
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type, TypeVar

import pytest

from kvstore.errors import ConfigError
from odsgd.launch import messages, supervisor
from odsgd.launch.agent.child import unless_gone
from odsgd.launch.hostfile import Host
from odsgd.launch.hosts import agents as hosts_agents
from odsgd.launch.hosts.check import MissingHosts
from odsgd.launch.hosts.ssh import AgentConnection
from odsgd.launch.messages import Channel, Message
from odsgd.launch.plan import Job, make_plan
from odsgd.launch.policy.judge import Verdict
from odsgd.launch.policy.membership import why_closed
from odsgd.launch.supervisor import Supervisor
from odsgd.launch.view import status_file
from odsgd.launch.view.console import Console
from odsgd.launch.view.status_file import StatusFile
from tests.odsgd.launch.jobs import ROOT, A, B, job

T = TypeVar("T", bound=Message)


class Agents:
    """Those of a ring on two hosts, which share nothing."""

    def __init__(self, secure: bool) -> None:
        asked = job(2, 0, A, B, secure=secure)
        plan = make_plan(asked, ROOT, certificate="PEM" if secure else "")
        self.errors = io.StringIO()
        self.supervisor = Supervisor(asked, plan, Console(stderr=self.errors), StatusFile(),
                                     MissingHosts(asked, [], 0.0))
        self.ends: Dict[str, Channel] = {}
        for host in (A, B):
            ours, theirs = (end.detach() for end in socket.socketpair())
            self.ends[host.address] = Channel(theirs, theirs)
            self.supervisor.agents.add(AgentConnection(host.address, plan.on(host), Channel(ours, ours)))

    def ask(self, line: str) -> None:
        """Both, for the MPI of their worker."""
        for rank, agent in enumerate(self.supervisor.agents.all):
            self.supervisor.handle(agent, messages.MpiRequest(f"worker {rank}", line), 0.0)

    def say(self, host: int, message: Message) -> None:
        """A message of a host's agent."""
        self.supervisor.handle(self.supervisor.agents.all[host], message, 0.0)

    def told(self, kind: Type[T]) -> List[List[T]]:
        """What each of them has been told of this kind since the last look."""
        return [[message for message in end.receive() if isinstance(message, kind)] for end in self.ends.values()]

    def close(self) -> None:
        self.supervisor.agents._selector.close()
        self.supervisor.status_file.close()
        for channel in (*self.ends.values(), *(agent.channel for agent in self.supervisor.agents.all)):
            os.close(channel.read_fd)


@pytest.fixture(params=[False, True], ids=["plain", "secure"])
def agents(request: pytest.FixtureRequest) -> Iterator[Agents]:
    with contextlib.closing(Agents(request.param)) as agents:
        yield agents


def test_an_address_that_this_machine_does_not_have_is_refused_before_anything_starts() -> None:
    assert supervisor.scheduler_host(job(2, 1, A, B, host_ip="127.0.0.1")) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"^--host-ip 192\.0\.2\.77: this machine does not have that address; name"):
        supervisor.scheduler_host(job(2, 1, A, B, host_ip="192.0.2.77"))
    assert supervisor.scheduler_host(job(2, 0, A, B, host_ip="192.0.2.77")) == "192.0.2.77", "nothing listens there"


def test_a_loopback_address_for_other_hosts_is_warned_of() -> None:
    here = Host("127.0.0.1")
    warning = supervisor._loopback_guessed(job(2, 1, here, Host("n1.invalid")), "127.0.1.1")
    assert warning and "on the way to n1.invalid is not known, and 127.0.1.1 is taken" in warning
    for asked, host in ((job(2, 1), "127.0.0.1"), (job(2, 1, here), "127.0.0.1"), (job(2, 1, A, B), "10.0.0.9"),
                        (job(2, 1, A, B, host_ip="127.0.0.1"), "127.0.0.1")):
        assert supervisor._loopback_guessed(asked, host) is None


def test_a_job_that_a_signal_has_ended_waits_for_no_reader(agents: Agents) -> None:
    agents.supervisor._announce(Verdict(1, "worker 0 failed"))
    assert not agents.supervisor.console.hurries
    agents.supervisor._announce(Verdict(143, "stopped by SIGTERM", by_signal=True))
    assert agents.supervisor.console.hurries


def test_mpi_is_told_of_the_others_when_their_sockets_are_there(agents: Agents) -> None:
    agents.ask("cmd=barrier_in")
    if agents.supervisor.job.secure:
        for host in (0, 1):
            assert agents.told(messages.OpenRemoteSockets) == [[], []]
            agents.say(host, messages.TunnelListens(f"10.0.0.{host + 1}:7", str(host)))
        told = [message.sockets for (message,) in agents.told(messages.OpenRemoteSockets)]
        assert [socket.tunnel for (socket,) in told] == ["10.0.0.2:7", "10.0.0.1:7"]
        for host in (0, 1):
            assert agents.told(messages.MpiAnswer) == [[], []]
            agents.say(host, messages.RemoteSocketsOpen())
    assert agents.told(messages.MpiAnswer) == [[messages.MpiAnswer(f"worker {rank}", "cmd=barrier_out rc=0")]
                                               for rank in (0, 1)]


@pytest.mark.parametrize("agents", [False], indirect=True)
def test_a_process_that_asks_for_what_is_not_served_is_cut_off(agents: Agents) -> None:
    agents.ask("cmd=spawn nprocs=2")
    assert [answer.line for (answer,) in agents.told(messages.MpiAnswer)] == [None, None]
    assert agents.errors.getvalue().splitlines() == [
        f"odsgd launch: worker {rank}: its MPI asked for `spawn`, which this launcher does not serve; it was cut off"
        for rank in (0, 1)]


@pytest.mark.parametrize("agents", [False], indirect=True)
def test_an_agent_speaks_for_its_own_processes_alone(agents: Agents) -> None:
    """Another may have joined in the place of one that it had."""
    for message in (messages.Exit("worker 1", 70), messages.Report("worker 1", {"event": "failed", "error": "gone"}),
                    messages.Beats({"worker 1": {"at": 900}})):
        agents.say(0, message)
    judge = agents.supervisor.judge
    assert (judge.members["worker 1"].code, judge.failures, judge.liveness.farthest) == (None, [], 0)
    agents.say(1, messages.Exit("worker 1", 70))
    assert judge.members["worker 1"].code == 70


@pytest.mark.parametrize("agents", [False], indirect=True)
def test_an_attempt_has_begun_when_worker_0_has_looked_for_a_checkpoint_or_had_in_an_earlier_one(
        agents: Agents) -> None:
    verdict = Verdict(137, "worker 1 failed")
    early = agents.supervisor.attempt(verdict, None)
    agents.say(0, messages.Report("worker 0", {"event": "resumed", "iteration": 0, "folder": "runs/a"}))
    begun = agents.supervisor.attempt(verdict, early)
    agents.supervisor.judge.kept.clear()
    assert [one.began for one in (early, begun, agents.supervisor.attempt(verdict, begun))] == [False, True, True]


@pytest.mark.parametrize("agents", [False], indirect=True)
def test_hosts_that_are_lost_together_do_not_keep_the_loop_from_its_work_one_by_one(agents: Agents) -> None:
    starters = [subprocess.Popen(["sleep", "600"], stderr=subprocess.PIPE) for _ in range(30)]
    began = time.monotonic()
    for starter in starters:
        opened = agents.supervisor.agents
        agent = opened.all[0]
        opened._lost_agent(AgentConnection(agent.host, agent.processes, agent.channel, starter, "ssh"))
    assert time.monotonic() - began < 15.0  # each had a second
    for starter in starters:
        starter.kill()
        starter.communicate()


def test_an_agent_whose_streams_all_end_in_one_turn_of_the_loop_is_lost_once() -> None:
    asked = job(1, 0, A)
    lost: List[Any] = []
    plan = make_plan(asked, ROOT)
    agents = hosts_agents.Agents(asked, plan, lambda *said: None, lambda *told: lost.append(told), lambda *line: None)
    starter = subprocess.Popen(["sh", "-c", "exit 3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    starter.wait()  # so that the loop finds both ends at once
    assert starter.stdin and starter.stdout
    channel = Channel(starter.stdout.fileno(), starter.stdin.fileno())
    agents.add(AgentConnection("10.0.0.1", plan.on(A), channel, starter, "ssh"))
    agents.turn()
    agents.close()
    assert lost == [("10.0.0.1", ["worker 0"], "ssh ended with exit code 3", [])]


def test_an_agent_that_has_not_spoken_yet_may_remove_its_files_before_it_is_killed(tmp_path: Path) -> None:
    asked, file = job(1, 0, A), tmp_path / "file"
    plan = make_plan(asked, ROOT)
    agents = hosts_agents.Agents(asked, plan, *[lambda *told: None] * 3)
    script = f"trap 'rm {file}; exit 0' TERM; touch {file}; while :; do sleep 0.01; done"
    starter = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert starter.stdin and starter.stdout
    channel = Channel(starter.stdout.fileno(), starter.stdin.fileno())
    agents.add(AgentConnection("10.0.0.1", plan.on(A), channel, starter, "ssh"))
    while not file.exists():
        time.sleep(0.01)
    agents.close()
    assert starter.returncode == 0 and not file.exists()


@pytest.mark.parametrize("command, code", [((sys.executable, "-c", "exit(3)"), 3), (("/no/such/program",), None)])
def test_a_joiner_that_has_ended_leaves_no_agent_and_no_open_file(command: Tuple[str, ...], code: Optional[int]
                                                                  ) -> None:
    """Many may join a long job, one after the other."""
    asked = job(1, 0, command=command)
    plan = make_plan(asked, ROOT)
    supervisor = Supervisor(asked, plan, Console(stderr=io.StringIO()), StatusFile(), MissingHosts(asked, [], 0.0))
    agents, before = supervisor.agents, os.listdir("/proc/self/fd")
    agents.start(plan.processes[0])
    until = time.monotonic() + 60
    while agents.all and time.monotonic() < until:
        agents.turn()
    assert (agents.all, os.listdir("/proc/self/fd")) == ([], before)
    failure, = supervisor.judge.failures
    assert failure.member == supervisor.judge.members["worker 0"] and failure.member.code == code
    agents.close()
    supervisor.status_file.close()


def joined(asked: Job) -> Supervisor:
    """Of a job all of whose processes have joined."""
    supervisor = Supervisor(asked, make_plan(asked, ROOT), Console(stderr=io.StringIO()), StatusFile(),
                            MissingHosts(asked, [], 0.0))
    for member in supervisor.judge.members:
        supervisor.judge.reported(member, {"event": "joined"}, 0.0)
    supervisor.judge.tick(0.0)
    return supervisor


def test_a_joiner_that_cannot_be_started_is_lost_and_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = joined(job(3, 1, A, spare=1, on_worker_loss="continue"))
    monkeypatch.setenv("ODSGD_SSH", "/no/such/program")
    supervisor._let_join("request", 1.0)
    assert supervisor.judge.tick(9.0) is None
    lost, = supervisor.judge.take_news().lost
    assert lost.message == ("worker 2 was lost (host 10.0.0.1): could not be started: cannot run /no/such/program: No "
                            "such file or directory; the job goes on with 2 of 3 workers")
    assert why_closed(supervisor.plan, supervisor.judge) == ""
    supervisor._show_progress(supervisor.shown_at + 9.0)
    facts = status_file.read(os.getpid())
    assert facts and [row["name"] for row in facts["rows"]] == ["worker 0", "worker 1", "server 0"]
    supervisor.agents._selector.close()
    supervisor.status_file.close()


def test_a_joiner_hears_which_others_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = joined(job(4, 1, A, spare=1, on_worker_loss="continue"))
    supervisor.judge.exited("worker 1", -signal.SIGKILL, 1.0)
    supervisor.judge.tick(9.0)
    ours, theirs = (end.detach() for end in socket.socketpair())
    told = Channel(theirs, theirs)
    monkeypatch.setattr(supervisor.agents, "start", lambda process: supervisor.agents.add(
        AgentConnection(A.address, [process], Channel(ours, ours))))
    supervisor._let_join("request", 10.0)
    supervisor.agents.all[0].channel.flush()
    assert [message for message in told.receive() if isinstance(message, messages.WorkersChanged)] == [
        messages.WorkersChanged(["1"])]
    supervisor.agents._selector.close()
    supervisor.status_file.close()
    for fd in (ours, theirs):
        os.close(fd)


def test_what_another_user_makes_at_the_name_of_a_socket_is_no_failure() -> None:
    asked = job(1, 1)
    plan = make_plan(asked, ROOT)
    with contextlib.closing(StatusFile()) as file:
        supervisor = Supervisor(asked, plan, Console(), file, MissingHosts(asked, [], 0.0))
        taken = [Path(path) for process in plan.processes for path in process.files]
        for path in taken:
            path.mkdir()  # that of root cannot be removed by `unlink` either
        try:
            supervisor._close()
            with unless_gone:  # as the agent does
                os.unlink(taken[0])
        finally:
            for path in taken:
                path.rmdir()
    assert taken
