"""An agent: the environment that it hands on, and its tunnel."""
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

import pytest

from kvstore.job import environment, lean
from kvstore.weights.servers import __main__ as roles
from kvstore.weights.servers import sockets
from odsgd.launch import hook, linux, messages
from odsgd.launch.agent import __main__ as agent_process
from odsgd.launch.agent import child
from odsgd.launch.agent.child import MPI_PRIVATE, TunnelProcess
from odsgd.launch.connections.tunnel import new_certificate
from odsgd.launch.hostfile import Host
from odsgd.launch.hosts import ssh
from odsgd.launch.messages import Channel, Message
from odsgd.launch.plan import Job, make_plan
from tests.jobs import until


def test_variables_of_mpirun_are_taken_away_and_settings_of_mpich_are_not() -> None:
    names = ["PMI_RANK", "PMI_FD", "MPI_LOCALNRANKS", "MPIR_X", "OMPI_COMM_WORLD_RANK", "MPIR_CVAR_CH4_NETMOD",
             "MPICH_X"]
    assert [name for name in names if not MPI_PRIVATE.fullmatch(name)] == ["MPIR_CVAR_CH4_NETMOD", "MPICH_X"]


@pytest.mark.parametrize("num_servers", [0, 1])
def test_a_worker_alone_on_its_host_gets_the_store_in_place_of_mxnets(num_servers: int) -> None:
    alone = Host("10.0.0.1")
    job = Job(("train.py",), 1, num_servers, launcher="ssh", slots=(alone, Host("10.0.0.2")), store="ssgd")
    sent = ssh.orders(job, make_plan(job, ("10.0.0.9", 4000)).on(alone), remote=True)
    env = child.environment(sent.processes[0], sent, lost_file=None)
    assert env["PYTHONPATH"].split(os.pathsep)[0] == hook.FOLDER


def test_an_address_that_this_host_does_not_have_is_not_bound() -> None:
    """As that of an old /etc/hosts, or one that belongs to a router."""
    job = Job(("train.py",), 2, 1, launcher="ssh", slots=(Host("127.0.0.2"), Host("192.0.2.77")))
    sent = ssh.orders(job, make_plan(job, ("127.0.0.1", 4000)).processes, remote=True)
    bound = {process.name: child.environment(process, sent, lost_file=None)["DMLC_NODE_HOST"]
             for process in sent.processes}
    assert sent.processes[-1].env["DMLC_NODE_HOST"] == "192.0.2.77"
    assert (bound["worker 0"], bound["worker 1"]) == ("127.0.0.2", "127.0.0.1")


def test_what_a_host_lacks_is_said_with_the_word_to_look_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(number: int, *told: str) -> Any:
        def call(*given: Any, **named: Any) -> None:
            raise OSError(number, *(told or (os.strerror(number),)))
        return call

    job = Job(("train.py",), 1, 0)
    sent = ssh.orders(job, make_plan(job, ("127.0.0.1", 4000)).processes, remote=False)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", fails(errno.EMFILE))
        with pytest.raises(child.StartError, match=r"Too many open files; raise `ulimit -n` there"):
            child.start(sent.processes[0], sent, str(tmp_path), None)
    monkeypatch.setattr(agent_process, "first_orders", lambda _: sent)
    monkeypatch.setattr(agent_process, "Agent", fails(errno.ENOENT, "No usable temporary directory found in ['/tmp']"))
    with pytest.raises(SystemExit, match=r"No usable temporary directory found in \['/tmp'\]; name another in TMPDIR"):
        agent_process.main()


def test_programs_beside_the_agents_python_are_found_and_threads_are_not_divided_by_other_tasks(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1000")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = Job(("odsgd", "--version"), 1, 0)
    sent = ssh.orders(job, make_plan(job, ("127.0.0.1", 4000)).processes, remote=False)
    env = child.environment(sent.processes[0], sent, lost_file=None)
    assert env["PATH"] == f"/nowhere{os.pathsep}{os.path.dirname(sys.executable)}"
    assert env["OMP_NUM_THREADS"] == str(linux.cores())


def test_a_tunnel_that_is_stopped_before_its_first_word_is_not_ended_at_once() -> None:
    launcher = Channel(*os.pipe())
    tunnel = TunnelProcess(messages.TunnelOrders(new_certificate(["openssl"]), 0, "", "127.0.0.1", 600.0, []), launcher)
    assert tunnel.popen.stdout
    os.kill(tunnel.popen.pid, signal.SIGSTOP)
    until(lambda: linux.state(tunnel.popen.pid) == "T")
    tunnel.watch()
    os.kill(tunnel.popen.pid, signal.SIGCONT)
    said: List[Message] = []
    until(lambda: said.extend(tunnel.channel.receive()) or said or not tunnel.channel.open)
    assert isinstance(said[0], messages.TunnelListens)
    tunnel.close()
    tunnel.popen.wait(300)
    tunnel.popen.stdout.close()
    for fd in (launcher.read_fd, launcher.write_fd):
        os.close(fd)


def test_an_agent_whose_orders_never_come_ends_by_itself() -> None:
    code = "from odsgd.launch.agent import __main__ as agent; agent.ORDERS_WITHIN_S = 1; agent.main()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as waits:
        assert waits.wait(300) == -signal.SIGALRM


@contextlib.contextmanager
def agent_of(code: str, cwd: Optional[Path] = None) -> Iterator[Tuple["subprocess.Popen[bytes]", Channel]]:
    """An agent that has been told to run a worker, which runs `code`; and the launcher's end of their channel."""
    job = Job((sys.executable, "-c", code), 1, 0)
    with subprocess.Popen([sys.executable, *ssh.AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          cwd=cwd) as agent:
        assert agent.stdin and agent.stdout
        channel = Channel(agent.stdout.fileno(), agent.stdin.fileno())
        channel.send(ssh.orders(job, make_plan(job, ("127.0.0.1", 4000)).processes, remote=False))
        yield agent, channel


def test_files_of_the_current_folder_are_no_modules_of_an_agents_and_the_last_ones_of_a_servers(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kvstore", "yaml", "queue"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(__file__)")
    with agent_of("pass", tmp_path) as (_, channel):
        said: List[Message] = []
        until(lambda: said.extend(channel.receive()) or said or not channel.open)
        assert isinstance(said[0], messages.Hello)
        channel.send(messages.Stop(0.0))
        until(lambda: channel.receive() or not channel.open)
    monkeypatch.chdir(tmp_path)
    job = Job(("train.py",), 1, 1)
    sent = ssh.orders(job, make_plan(job, ("127.0.0.1", 4000)).processes, remote=False)
    env = child.environment(next(one for one in sent.processes if one.name == "server 0"), sent, lost_file=None)
    assert str(tmp_path) not in env.get("PYTHONPATH", "").split(os.pathsep)
    for name, value in {"DMLC_ROLE": "server", "ODSGD_WIRE": "sockets", "ODSGD_SECRET": "0" * 64,
                        "ODSGD_MODULES": env["ODSGD_MODULES"]}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(environment, "serving", False)
    monkeypatch.setattr(lean, "begin", lambda: None)
    monkeypatch.setattr(os, "umask", lambda mask: None)
    monkeypatch.setattr(sockets, "serve", lambda: None)
    assert roles.main() == 0 and sys.path[-1] == str(tmp_path)


MIXED = """
import os
fd = int(os.environ["ODSGD_REPORT_FD"])
os.write(fd, b'\\n{"event": "beat", "stale": [[1, 2')
os.write(fd, b'\\n{"event": "done"}\\n')
os.write(fd, b', 3]]}\\n')
"""


BEATS = """
import os, sys, time
fd = int(os.environ["ODSGD_REPORT_FD"])
for _ in range(600):
    os.write(fd, b'\\n{"event": "beat", "at": 1}\\n')
    os.set_blocking(1, False)
    try:
        os.write(1, b"x" * 60000 + b"\\n")
    except BlockingIOError:
        pass
    time.sleep(0.1)
"""


@pytest.mark.parametrize("held_up", ["the launcher", "all the host"])
def test_after_an_absence_a_process_that_is_well_is_not_said_to_have_been_silent(held_up: str) -> None:
    with agent_of(BEATS) as (agent, channel):
        said: List[Message] = []

        def read(beats: int) -> List[float]:
            said.clear()
            until(lambda: said.extend(channel.receive()) or sum(type(one) is messages.Beats for one in said) >= beats)
            return [beat["silent_s"] for one in said if isinstance(one, messages.Beats) for beat in one.beats.values()]

        read(2)
        stopped = [agent.pid, next(one.pid for one in said if isinstance(one, messages.Started))]
        try:
            for pid in stopped if held_up == "all the host" else ():
                os.kill(pid, signal.SIGSTOP)
            time.sleep(8.0)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        silent = read(12)
        channel.send(messages.Stop(0.0))
        until(lambda: said.extend(channel.receive()) or not channel.open)
        agent.wait(300)
    assert max(silent) < 4.0, silent


def test_a_report_that_another_is_mixed_into_takes_none_with_it_and_is_told_of_once() -> None:
    with agent_of(MIXED) as (agent, channel):
        said: List[Message] = []
        until(lambda: said.extend(channel.receive()) or any(isinstance(one, messages.Exit) for one in said))
        assert agent.stdin
        agent.stdin.close()
        agent.wait(300)
    assert [one.report for one in said if isinstance(one, messages.Report)] == [{"event": "done"}]
    assert [one.text for one in said if isinstance(one, messages.HostWarning)] == [
        'a report of worker 0 cannot be read and is lost: {"event": "beat", "stale": [[1, 2']


def test_a_ping_is_answered_when_all_is_told_that_had_happened_before_it() -> None:
    with agent_of("import time; time.sleep(600)") as (agent, channel):
        said: List[Message] = []
        until(lambda: said.extend(channel.receive()) or any(isinstance(one, messages.Started) for one in said))
        os.kill(agent.pid, signal.SIGSTOP)
        until(lambda: linux.state(agent.pid) == "T")
        worker = next(one.pid for one in said if isinstance(one, messages.Started))
        os.kill(worker, signal.SIGKILL)
        until(lambda: linux.state(worker) == "Z")
        channel.send(messages.Ping(3.0))
        os.kill(agent.pid, signal.SIGCONT)
        until(lambda: said.extend(channel.receive()) or any(isinstance(one, messages.Pong) for one in said))
        assert agent.stdin
        agent.stdin.close()
        agent.wait(300)
    told = [one for one in said if isinstance(one, (messages.Exit, messages.Pong))]
    assert told == [messages.Exit("worker 0", -signal.SIGKILL), messages.Pong(3.0)]


def test_a_stop_that_comes_with_the_orders_ends_an_agent_that_has_started_nothing() -> None:
    with agent_of("import time; time.sleep(600)") as (agent, channel):
        channel.send(messages.Stop(60.0))
        said: List[Message] = []
        until(lambda: said.extend(channel.receive()) or not channel.open)
        agent.wait(300)
    assert [type(one) for one in said] == [messages.Hello, messages.Ended]
