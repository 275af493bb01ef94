"""The emulated cluster without one: rates, files, the stand-in `ssh`, and what is refused."""
from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple

import pytest

from kvstore.errors import ConfigError
from odsgd.cli import main
from odsgd.lab.cluster import boot, cluster, links
from odsgd.launch import linux


@pytest.mark.parametrize("text, rate", [("1gbit", 10**9), ("100mbit", 10**8), ("2.5Gbit", 25 * 10**8),
                                        ("1500kbit", 1500000)])
def test_a_rate_is_read_in_bits_per_second(text: str, rate: int) -> None:
    assert links.parse_rate(text, "--rate") == rate


@pytest.mark.parametrize("text", ["", "1", "fast", "-1gbit", "1gb", "0mbit", "999kbit", "101gbit", "1 gbit x"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--rate .*: expected a rate from 1mbit to 100gbit, e.g. `1gbit`"):
        links.parse_rate(text, "--rate")


def test_single_hosts_have_rates_of_their_own() -> None:
    rates = links.link_rates(3, "1gbit", links.parse_host_rates(["2=100mbit"]))
    assert rates == [10**9, 10**9, 10**8]
    assert links.link_rates(2, None, {1: "1gbit"}) == [None, 10**9]


def test_a_virtual_clusters_description_gives_the_hosts_and_links_that_carry_its_goodput(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{workers: 2, links: {goodput: 954mbit}, hosts: {server0: {goodput: 9540mbit}}}", encoding="utf-8")
    rates = links.described(str(path))
    assert links.link_rates(len(rates), None, rates) == [10**9, 10**9, 10**10]
    for text, complaint in (("racks: {hosts: 2}", "`: racks: an emulated cluster has one switch"),
                            ("hosts: {server0: {goodput: 9kbit}}", "`: link of server0: 0.00943396mbit: expected")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=complaint):
            links.described(str(path))


@pytest.mark.parametrize("hosts, rates, message", [
    (2, {2: "1gbit"}, "--host-rate 2=1gbit: there is no host 2; with --hosts 2 they are 0 to 1"),
    (0, {}, "--hosts 0: expected 1 to 250"), (251, {}, "--hosts 251: expected 1 to 250")])
def test_hosts_that_cannot_be_are_refused(hosts: int, rates: Dict[int, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        links.link_rates(hosts, "1gbit", rates)
    assert str(error.value) == message


def test_a_packet_with_its_headers_fits_into_the_burst_and_the_burst_into_the_queue() -> None:
    headers = (links.LARGE_NBYTES // 1448 + 1) * 66
    for rate in (links.LEAST, 10**9, links.MOST):
        words = links.discipline(rate).split()
        burst, limit = (int(words[words.index(name) + 1][:-1]) for name in ("burst", "limit"))
        assert links.segment(rate) + headers < burst < limit


def test_the_files_name_every_host_and_its_shape() -> None:
    files = boot.files([10**9, None])
    assert files["hosts"] == "host0\nhost1\n"
    assert files["etc-hosts"] == "127.0.0.1 localhost\n10.0.0.254 head\n10.0.0.1 host0\n10.0.0.2 host1\n"
    assert files["plan"] == f"host0 10.0.0.1 65536 {links.discipline(10**9)}\nhost1 10.0.0.2 65536 \n"
    assert boot.files([10**8])["plan"] == f"host0 10.0.0.1 32768 {links.discipline(10**8)}\n"


def test_no_host_has_the_heads_address() -> None:
    assert boot.HEAD_ADDRESS not in boot.addresses(links.MOST_HOSTS).values()


# --- the stand-in ssh -------------------------------------------------------------------------------------------------

Ssh = Callable[..., Tuple[int, str, str]]
"""Called with words and perhaps the `program`; returns exit code, output and errors."""


@pytest.fixture
def ssh(tmp_path: Path) -> Ssh:
    """It, on a cluster whose hosts are this process; nsenter is a stand-in as well."""
    nsenter, script = tmp_path / "nsenter", tmp_path / "ssh"
    nsenter.write_text('#!/bin/sh\necho "entering $2"\nwhile [ "$1" != env ]; do shift; done\nexec "$@"\n')
    pids = {"host0": os.getpid(), "host1": 999999999}
    script.write_text(boot.ssh_script("it", os.readlink("/proc/self/ns/net"), pids))
    for program in (nsenter, script):
        program.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "MINE": "1"}

    def call(*words: str, program: Path = script) -> Tuple[int, str, str]:
        done = subprocess.run([str(program), *words], env=env, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=300)
        return done.returncode, done.stdout, done.stderr
    return call


@pytest.mark.parametrize("options", [[], ["-x"], ["-o", "BatchMode=yes", "-p", "22", "-q"], ["-oBatchMode=yes"]])
@pytest.mark.parametrize("host", ["host0", "10.0.0.1", "me@host0"])
def test_options_are_dropped_and_the_host_is_found(ssh: Ssh, options: List[str], host: str) -> None:
    assert ssh(*options, host, "echo", "'a  b'") == (0, f"entering {os.getpid()}\na  b\n", "")


def test_the_command_begins_as_a_login_does(ssh: Ssh, tmp_path: Path) -> None:
    code, output, _ = ssh("host0", 'pwd; echo "$MINE,$UCX_TLS"; exit 3')
    assert (code, output.splitlines()[1:]) == (3, [str(tmp_path), ",tcp,self"])


def test_an_unknown_host_and_one_that_is_gone_are_told_as_ssh_does(ssh: Ssh) -> None:
    assert ssh("host7", "true") == (255, "", "ssh: Could not resolve hostname host7: there are host0 to host1\n")
    assert ssh("host1", "true") == (255, "", "ssh: connect to host host1 port 22: No route to host\n")


def test_elsewhere_than_on_the_head_it_does_nothing(ssh: Ssh, tmp_path: Path) -> None:
    script = tmp_path / "elsewhere"
    script.write_text(boot.ssh_script("it", "net:[1]", {"host0": os.getpid()}))
    script.chmod(0o755)
    code, output, errors = ssh("host0", "echo", "done", program=script)
    assert (code, output) == (255, "") and "use it in: odsgd cluster run" in errors


# --- what is refused --------------------------------------------------------------------------------------------------

@pytest.fixture
def nothing_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As root on a machine with every program and no cluster; after it, none has been tried."""
    monkeypatch.setattr(cluster, "FOLDER", tmp_path / "clusters")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda program: "/bin/" + program)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # these tests are not the command line
    monkeypatch.setattr(cluster.Cluster, "_boot", lambda *_: pytest.fail("was brought up"))
    yield
    assert not (tmp_path / "clusters").exists() or os.listdir(tmp_path / "clusters") in ([], ["lock"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["cluster", *arguments]) == 64
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("arguments, message", [
    (["upp"], "unknown action `upp`; did you mean `up`? Known: down, run, up"),
    (["up"], "--hosts N is needed: how many hosts"),
    (["up", "--hosts", "two"], "argument --hosts: invalid int value: 'two' (see odsgd cluster --help)"),
    (["up", "--hosts", "2", "--rate", "1"],
     "--rate 1: expected a rate from 1mbit to 100gbit, e.g. `1gbit` or `100mbit`"),
    (["up", "--hosts", "2", "--host-rate", "1"],
     "--host-rate 1: expected HOST=RATE, e.g. `2=100mbit` (hosts count from 0)"),
    (["up", "--hosts", "2", "--name", "../x"], "--name ../x: expected letters, digits, `-`, `_` and `.`"),
    (["run", "--hosts", "2"], "no command: say what to run, e.g. `odsgd cluster run -- odsgd launch -n 2 -H @hosts …`"),
    *((["run", *flags, "true"],
       "--rate, --host-rate and --own-tmp shape a new cluster: give --hosts as well, or leave them out")
      for flags in (["--rate", "1gbit"], ["--own-tmp"])),
    (["up", "--like", "no.yaml", "--hosts", "2"],
     "--like has hosts and rates of its own: leave --hosts, --rate and --host-rate out"),
    (["up", "--like", "no.yaml"],
     "cannot read `no.yaml`, the description of a cluster in YAML: No such file or directory"),
    (["down", "--name", "none"],
     "cluster `none` is not up, nor is any other; bring it up with `odsgd cluster up --name none`"),
    (["run", "--", "true"],
     "cluster `default` is not up, nor is any other; bring it up with `odsgd cluster up --name default`"),
])
@pytest.mark.usefixtures("nothing_made")
def test_mistakes_are_one_line_and_nothing_is_made(
        capsys: pytest.CaptureFixture[str], arguments: List[str], message: str) -> None:
    assert refused(capsys, *arguments) == f"odsgd cluster: {message}\n"


@pytest.mark.usefixtures("nothing_made")
def test_a_program_that_is_not_there_is_told_before_anything_is_made(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shutil.which", lambda program: program not in ("tc", "no-such") or None)
    assert refused(capsys, "up", "--hosts", "2") == (
        "odsgd cluster: an emulated cluster needs the program `tc`; install iproute2\n")
    assert refused(capsys, "run", "--hosts", "2", "no-such") == "odsgd cluster: no such program: no-such\n"


@pytest.mark.parametrize("arguments", [["up", "--hosts", "2"], ["run", "true"], ["down"], ["down", "--all"]])
@pytest.mark.usefixtures("nothing_made")
def test_other_users_than_root_are_told(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: List[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert refused(capsys, *arguments) == (
        "odsgd cluster: an emulated cluster needs root, for its network namespaces; run it with sudo\n")


@pytest.mark.parametrize("is_up", [True, False])
def test_a_process_number_in_other_hands_is_not_the_cluster(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_up: bool) -> None:
    started = linux.start_time(os.getpid()) if is_up else "1"
    monkeypatch.setattr(cluster, "FOLDER", tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "init").write_text(f"{os.getpid()} {started}")
    assert cluster.clusters() == {"old": is_up}
    if not is_up:
        cluster.Cluster("old").down()  # and this test is still alive
        assert not (tmp_path / "old").exists()
