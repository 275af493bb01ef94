"""The emulated cluster in real namespaces: its links, jobs on it, and that nothing of it is left. Needs root."""
from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import pytest

from kvstore.errors import ConfigError
from odsgd.lab import processes
from odsgd.lab.cluster import Cluster, cluster
from tests.integration.launching import DEBIANS, debians_mpirun, real_mpirun
from tests.jobs import ROOT, until

PATIENCE_S = 200.0
"""Bounds a hang, as the limit of each test does; nothing here is as slow, beside whatever runs on the same cores."""


def why_not() -> str:
    """What stands in the way of an emulated cluster on this machine."""
    try:
        cluster.check_machine()
    except ConfigError as error:
        return str(error)
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "tc", "qdisc", "add", "dev", "lo", "root",
                            "tbf", "rate", "1mbit", "burst", "9kb", "limit", "9kb"], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S)
    return tried.stdout.strip() if tried.returncode else ""


WHY_NOT = why_not()
sees_us = pytest.mark.skipif(str(ROOT).startswith("/tmp/"), reason="a host with a /tmp of its own sees no copy in /tmp")
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
MPIEXEC = real_mpirun()


@pytest.fixture(scope="module")
def slow() -> Iterator[Cluster]:
    """Three hosts; the link of the last is ten times slower. Few cores carry both, beside other work."""
    with Cluster.up(hosts=3, rate="200mbit", rates={2: "20mbit"}) as up:
        yield up


@pytest.fixture
def name() -> Iterator[str]:
    """For a cluster that a test brings up from the command line; it is down after it."""
    name = "test-" + uuid.uuid4().hex[:12]
    yield name
    Cluster(name).down()


def odsgd(*words: str, env: Optional[Mapping[str, str]] = None, **options: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.Popen([sys.executable, "-m", "odsgd", "cluster", *words], env=environ, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, **options)


def ended(process: subprocess.Popen[str]) -> Tuple[int, str, str]:
    """Its exit code, and what it has said."""
    output, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output, errors


def done(*words: str, **options: Any) -> Tuple[int, str, str]:
    return ended(odsgd(*words, **options))


def running(mark: str) -> List[int]:
    """Processes with the mark on their command line; those that look for it are not among them."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as cmdline:
                words = cmdline.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if mark in words:
            found.append(int(entry))
    return found


Sleeper = Tuple[str, List[str]]


@pytest.fixture
def sleeper() -> Sleeper:
    """A command on the head that starts one on a host, and a mark on both."""
    mark = str(10**6 + uuid.uuid4().int % 10**6)
    return mark, ["sh", "-c", f"$ODSGD_SSH host1 sleep {mark} & sleep {mark}; wait"]


def test_hosts_are_machines_of_their_own(slow: Cluster) -> None:
    before = set(os.listdir("/sys/class/net"))
    show = ["sh", "-c", "cat /proc/sys/kernel/hostname; echo $(ls /sys/class/net); echo $$; pwd"]
    for host in (0, 2):
        name, devices, pid, directory = slow.run(show, host=host).stdout.splitlines()
        assert (name, devices, directory) == (f"host{host}", "eth0 lo", os.getcwd())
        assert int(pid) < 100  # numbers of its own
    assert slow.run(show).stdout.splitlines()[:2] == ["head", "eth0 host0 host1 host2 lo"]
    assert set(os.listdir("/sys/class/net")) == before


def test_a_link_is_as_slow_as_it_is_told(slow: Cluster) -> None:
    fast, slowed = slow.goodput(2.0, between=(0, 1)), slow.goodput(2.0, between=(0, 2))
    for rate, measured in ((2e8, fast), (2e7, slowed)):
        for goodput in measured:
            assert 0.4 * rate < 8 * goodput < rate


def test_what_a_host_is_not_told_does_not_reach_it(slow: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    show = [sys.executable, "-I", "-c", "import os; print([os.environ.get(name) for name in ('A', 'B', 'UCX_TLS')])"]
    monkeypatch.setenv("A", "1")
    assert slow.run(show, env={"B": "2"}).stdout == "['1', '2', 'tcp,self']\n"
    assert slow.run(show, env={"B": "2"}, host=0).stdout == "[None, '2', 'tcp,self']\n"


def test_a_job_over_ssh_trains_on_the_hosts(slow: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tests.lean, odsgd, socket, mxnet as mx\n"
                      "store, total = mx.kv.create('dist_sync'), mx.nd.zeros(4)\n"
                      "store.init(0, total)\nstore.push(0, mx.nd.ones(4))\nstore.pull(0, total)\n"
                      "print(socket.gethostname(), total.asnumpy().tolist())\n")
    job = slow.run([sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2", "-s", "1", "-H", "@hosts",
                    str(script)], env={"PYTHONPATH": str(ROOT)}, timeout=300)
    assert (job.returncode, sorted(job.stdout.splitlines())) == (0, [
        f"worker {rank} | host{rank} [2.0, 2.0, 2.0, 2.0]" for rank in (0, 1)]), job.stderr


SIZE, ITERATIONS = 1 << 18, 5
COUNTS = f"""
import json, sys
import tests.lean, odsgd, kvstore, mxnet as mx

def counted():
    return [int(open(f"/sys/class/net/eth0/statistics/{{way}}_bytes").read()) for way in ("tx", "rx")]

for options in json.loads(sys.argv[1]):
    store = kvstore.create("ssgd", **options)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
    w = mx.nd.ones({SIZE})
    store.broadcast(0, w, w)
    store.begin()
    store.barrier()
    before = counted()
    for _ in range({ITERATIONS}):
        store.pushpull(0, mx.nd.ones({SIZE}), out=w)
    w.wait_to_read()
    print(*(now - then for now, then in zip(counted(), before)), flush=True)
    store.close()
"""
"""Of stores one after another: bytes that a worker sends and receives."""


def crossed(hosts: Cluster, each: List[Dict[str, str]], *flags: str) -> List[List[float]]:
    """For the options of each store, how many times the floats of all iterations go out and come in."""
    job = hosts.run([sys.executable, str(ROOT / "scripts" / "launch.py"), *flags, "-n", "1", "-s", "1", "-H", "@hosts",
                     sys.executable, "-c", COUNTS, json.dumps(each)], env={"PYTHONPATH": str(ROOT)}, timeout=300)
    assert job.returncode == 0, job.stderr
    found = [line.partition(" | ")[2].split() for line in job.stdout.splitlines()]
    assert len(found) == len(each), job.stdout
    return [[int(nbytes) / (4 * SIZE * ITERATIONS) for nbytes in ways] for ways in found]


def test_a_codec_leaves_so_many_bytes_on_the_wire(slow: Cluster) -> None:
    each: List[Tuple[Dict[str, str], float, float]] = [
        ({}, 1, 1), ({"codec": "float16", "codec_weights": "truncate"}, 1 / 2, 1 / 2),
        ({"codec": "quantize"}, 1 / 4, 1), ({"codec": "2bit", "codec_weights": "quantize"}, 1 / 16, 1 / 4)]
    found = crossed(slow, [options for options, _, _ in each])
    for (options, there, back), (sent, received) in zip(each, found):
        assert there < sent < 1.1 * there + 0.05 and back < received < 1.1 * back + 0.05, (options, found)


@sees_us
def test_messages_of_a_secure_job_use_the_links() -> None:
    with Cluster.up(hosts=2, own_tmp=True) as hosts:
        whole, half = crossed(hosts, [{}, {"codec": "float16", "codec_weights": "float16"}], "--secure")
    assert 2 < sum(whole) < 2.3 and 1 < sum(half) < 1.2, (whole, half)


@pytest.mark.parametrize("mpi", ["wheel", *(pytest.param(name, marks=pytest.mark.slow) for name in DEBIANS)])
def test_a_job_over_mpi_runs_on_the_hosts(slow: Cluster, mpi: str) -> None:
    mpirun = debians_mpirun(mpi) if mpi in DEBIANS else MPIEXEC or pytest.skip("no mpiexec here")
    show = ["sh", "-c", "echo $(cat /proc/sys/kernel/hostname) $UCX_TLS $DMLC_NODE_HOST"]
    job = slow.run([sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2", "--store", "none", "-H",
                    "@hosts", "--launcher", "mpi", *show],
                   env={"PYTHONPATH": str(ROOT), "ODSGD_MPIRUN": str(mpirun)}, timeout=300)
    assert (job.returncode, sorted(job.stdout.splitlines())) == (0, [
        f"worker {rank} | host{rank} tcp,self 10.0.0.{rank + 1}" for rank in (0, 1)]), job.stderr


@pytest.mark.skipif(not (MPIEXEC and importlib.util.find_spec("mpi4py")), reason="no mpi4py here")
def test_messages_of_mpi_use_the_links(slow: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from mpi4py import MPI\nimport numpy\n"
                      "total = numpy.zeros(1 << 18)\nMPI.COMM_WORLD.Allreduce(numpy.ones(1 << 18), total)\n"
                      "received = open('/sys/class/net/eth0/statistics/rx_bytes').read()\n"
                      "print(f'{total[0]} {int(received) > 1 << 20}\\n', end='', flush=True)\n")
    job = slow.run([str(MPIEXEC), "-hosts", "host0,host1", "-n", "2", sys.executable, str(script)], timeout=300)
    assert (job.returncode, job.stdout.splitlines()) == (0, ["2.0 True"] * 2), job.stderr


@pytest.mark.parametrize("before", ["", "trap '' HUP; "], ids=["login", "nohup"])
def test_the_end_of_the_connection_is_the_end_of_the_command(slow: Cluster, sleeper: Sleeper, before: str) -> None:
    mark, _ = sleeper
    process = slow.popen(["sh", "-c", f"{before}exec $ODSGD_SSH host0 'exec sleep {mark}'"])
    until(lambda: running(mark))
    process.kill()
    process.wait()
    until(lambda: not running(mark))


def test_a_command_that_takes_too_long_is_ended(slow: Cluster, sleeper: Sleeper) -> None:
    mark, _ = sleeper
    process = slow.popen(["sh", "-c", f"echo begun; exec sleep {mark}"], **processes.READ_TO_THE_END)
    until(lambda: running(mark))
    with pytest.raises(subprocess.TimeoutExpired) as overdue:
        processes.completed(process, 0.1)
    said: Any = overdue.value.stdout  # not always bytes, as its type has it
    assert said == "begun\n" and not running(mark)


def test_two_clusters_have_the_same_addresses_and_do_not_meet(slow: Cluster) -> None:
    listen = ("import socket, time; server = socket.create_server(('', 5000)); print('open', flush=True); "
              "time.sleep(900)")
    call = "import socket; socket.create_connection(('10.0.0.1', 5000), timeout=300); print('reached')"
    with slow.popen([sys.executable, "-I", "-c", listen], host=0, stdout=subprocess.PIPE) as listening:
        try:
            assert listening.stdout and listening.stdout.readline() == b"open\n"
            with Cluster.up(hosts=1) as other:
                assert slow.run([sys.executable, "-I", "-c", call], host=1).stdout == "reached\n"
                assert "ConnectionRefusedError" in other.run([sys.executable, "-I", "-c", call]).stderr
        finally:
            listening.kill()


def test_up_stays_run_finds_it_and_down_ends_what_is_left(name: str, sleeper: Sleeper) -> None:
    mark, command = sleeper
    assert done("up", "--hosts", "2", "--name", name) == (
        0, f"cluster `{name}` is up: host0 to host1, hosts file /run/odsgd/cluster/{name}/hosts\n", "")
    code, _, error = done("up", "--hosts", "2", "--name", name)
    assert code == 64 and error.startswith(f"odsgd cluster: cluster `{name}` is up already; take it down")
    code, _, error = done("run", "--name", name[:-1], "true")
    assert code == 64 and f"did you mean `{name}`?" in error
    assert done("run", "--name", name, "--", "sh", "-c", "cat $0; exit 5", "@hosts") == (5, "host0\nhost1\n", "")
    with odsgd("run", "--name", name, *command) as tool:
        until(lambda: len(running(mark)) == 2)
        tool.kill()
        assert done("down", "--name", name) == (0, f"cluster `{name}` is down\n", "")
        assert not running(mark) and not (cluster.FOLDER / name).exists()


def test_kill_9_of_a_tool_with_a_cluster_of_its_own_leaves_nothing_running(name: str, sleeper: Sleeper) -> None:
    mark, command = sleeper
    with odsgd("run", "--hosts", "2", "--name", name, *command) as tool:
        until(lambda: len(running(mark)) == 2)
        tool.kill()
        until(lambda: not running(mark))
    assert done("down", "--name", name) == (0, f"cluster `{name}` is down\n", "")
    assert not (cluster.FOLDER / name).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_for_the_command_and_the_cluster_goes_with_it(
        name: str, sleeper: Sleeper, number: signal.Signals) -> None:
    mark, _ = sleeper
    trapping = f"trap 'echo told; exit 7' INT TERM; echo begun; $ODSGD_SSH host1 sleep {mark} & wait"
    with odsgd("run", "--hosts", "2", "--name", name, "sh", "-c", trapping,
               preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)) as tool:
        until(lambda: running(mark))
        tool.send_signal(number)
        assert ended(tool) == (7, "begun\ntold\n", "")
    assert not running(mark) and not (cluster.FOLDER / name).exists()


@pytest.mark.parametrize("program, message", [
    ("tc", "cannot shape the link of host0 with tbf (kernel module sch_tbf): not today\n"),
    ("ip", "cannot make a bridge: not today\n"),
    ("env", "cannot give a host's processes the signals of a login (coreutils 8.31 or newer): not today\n"),
    ("unshare", "cannot make namespaces: not today (in a container it has to be a privileged one)\n")])
def test_a_machine_that_does_not_let_us_is_one_line_and_nothing_is_left(
        name: str, tmp_path: Path, program: str, message: str) -> None:
    stub = tmp_path / program
    stub.write_text("#!/bin/sh\necho not today >&2\nexit 1\n")
    stub.chmod(0o755)
    refused = done("run", "--hosts", "1", "--rate", "1gbit", "--name", name, "true",
                   env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert refused == (64, "", "odsgd cluster: " + message)
    assert not (cluster.FOLDER / name).exists() and not running(str(cluster.FOLDER / name))
