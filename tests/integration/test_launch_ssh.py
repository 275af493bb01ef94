"""Jobs over several hosts through a stand-in `ssh`, which runs what it is told here, in a scrubbed environment."""
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.launching import (
    HERE,
    MEMBER,
    ROOT,
    Launch,
    Way,
    by_ssh,
    command_line,
    leaves_nothing_when_killed,
    marked,
    python_program,
    stand_in_ssh,
    startup_table,
    words,
)


@pytest.fixture
def ssh(tmp_path: Path) -> Way:
    """Options and environment of a job on two hosts; both are this machine."""
    return by_ssh(tmp_path, "127.0.0.1  # the first\nme@127.0.0.2 slots=2\n")


def test_a_job_over_two_hosts(ssh: Way) -> None:
    options, env = ssh
    with Launch("-n", 2, "-s", 1, *options, MEMBER, env=env) as launch:
        launch.wait_for_all_joined()
        assert launch.wait() == 0
    assert launch.said == ""


@pytest.mark.parametrize("number, hang_timeout_s", [(signal.SIGKILL, 60), (signal.SIGSTOP, 8)])
def test_a_secure_job_on_hosts_that_share_their_sockets_ends_with_a_tunnel(ssh: Way, number: int, hang_timeout_s: int
                                                                           ) -> None:
    options, env = ssh
    with Launch("--secure", "-n", 2, "-s", 1, "--hang-timeout", hang_timeout_s, *options, MEMBER, "children",
                env=env) as launch:
        launch.wait_for_all_joined()
        tunnels = [pid for pid in marked(launch.mark) if "odsgd.launch.connections.tunnel" in command_line(pid)]
        assert len(tunnels) == 3  # of the launching machine and two hosts
        os.kill(tunnels[-1], number)
        assert launch.wait() == 70
    assert launch.said.startswith("lost host 127.0.0.")
    assert "exit code 0: odsgd agent: the tunnel of this host has ended" in launch.said


def test_addresses_and_variables_reach_the_hosts(ssh: Way, tmp_path: Path) -> None:
    options, env = ssh
    show = tmp_path / "show.py"
    show.write_text("import os\nprint({k: os.environ.get(k) for k in ('DMLC_NODE_HOST', 'DMLC_PS_ROOT_URI', 'MXNET_X', "
                    "'GIVEN', 'PASSED', 'OTHER', 'ONLY_WORKERS')}, os.getcwd())")
    env = {**env, "MXNET_X": "1", "PASSED": "2", "OTHER": "3"}
    with Launch("-n", 3, "--store", "none", *options, "--env", "GIVEN:a b'c", "--env", "PASSED", "--env-worker",
                "ONLY_WORKERS=1", show, env=env, cwd=tmp_path) as launch:
        assert launch.wait() == 0
    for line in launch.output:
        host = "127.0.0.1" if line.startswith("worker 0") else "127.0.0.2"
        assert line.split(" | ")[1] == str({
            "DMLC_NODE_HOST": host, "DMLC_PS_ROOT_URI": "127.0.0.1", "MXNET_X": "1", "GIVEN": "a b'c", "PASSED": "2",
            "OTHER": None, "ONLY_WORKERS": "1"}) + " " + str(tmp_path)


def test_arguments_with_quotes_and_spaces_survive_the_way(ssh: Way, tmp_path: Path) -> None:
    options, env = ssh
    nasty = ["two words", "it's", '"quoted"', "$HOME `id` \\", "*", ""]
    show = tmp_path / "arguments.py"
    show.write_text("import sys\nprint(sys.argv[1:])")
    with Launch("-n", 1, "-s", 0, *options, show, *nasty, env=env) as launch:
        assert launch.wait() == 0
    assert launch.output == ["worker 0 | " + str(nasty)]


def test_a_working_directory_with_a_space_is_entered(ssh: Way, tmp_path: Path) -> None:
    options, env = ssh
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    (folder / "here.py").write_text("import os\nprint(os.getcwd())")
    with Launch("-n", 1, "-s", 0, *options, "here.py", env=env, cwd=folder) as launch:
        assert launch.wait() == 0
    assert launch.output == ["worker 0 | " + str(folder)]


def test_kill_9_of_a_remote_worker_names_it_and_its_host_and_no_command_line_has_the_secret(ssh: Way) -> None:
    options, env = ssh
    with Launch("-n", 2, "-s", 1, *options, MEMBER, "children", env=env) as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        secret = marked(launch.mark)[launch.pid("worker 0")]["ODSGD_SECRET"]
        assert not any(secret in command_line(pid) for pid in marked(launch.mark))
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 137
    assert launch.said.startswith("worker 1 failed (host 127.0.0.2, pid")


def test_every_host_is_told_of_a_lost_worker(ssh: Way) -> None:
    options, env = ssh
    with Launch("-n", 3, "-s", 1, "--on-worker-loss", "continue", *options, "--env-worker", "MEMBER_WORKER_1:wait",
                MEMBER, "until-lost", env=env) as launch:
        launch.wait_for_all_joined(workers=3)
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 0
    assert launch.said.startswith("worker 1 was lost (host 127.0.0.2, pid")
    files = {line.split(" | ")[0]: line.split("file ")[1] for line in launch.output if " | file " in line}
    assert set(files) == {"worker 0", "worker 2"} and files["worker 0"] != files["worker 2"]  # a file on each host
    assert not any(map(os.path.exists, files.values()))
    assert {r"worker 0 | lost '1\n', mode 600", r"worker 2 | lost '1\n', mode 600"} <= set(launch.output)


def test_kill_9_of_the_launcher_leaves_nothing_on_any_host(ssh: Way) -> None:
    options, env = ssh
    leaves_nothing_when_killed(*options, env=env)


def test_a_host_that_cannot_be_reached_is_named_with_what_ssh_said(ssh: Way, tmp_path: Path) -> None:
    options, _ = ssh
    refusing = stand_in_ssh(tmp_path, """
if [ "$host" = me@127.0.0.2 ]; then echo "ssh: Connection refused" >&2; exit 255; fi""")
    with Launch("-n", 2, "-s", 0, *options, MEMBER, "wait", env={"ODSGD_SSH": refusing}) as launch:
        assert launch.wait() == 70
    assert launch.said == ("1 of 2 hosts cannot take part; nothing was started\n"
                           "  127.0.0.2: ssh ended with exit code 255: ssh: Connection refused")
    assert not launch.output


def test_a_host_that_does_not_answer_is_missed_at_the_deadline(ssh: Way, tmp_path: Path) -> None:
    options, _ = ssh
    hanging = stand_in_ssh(tmp_path, 'case "$host $*" in me@127.0.0.2*agent*) exec sleep 600;; esac')
    table = startup_table(2, "-n", 2, "-s", 1, *options, MEMBER, env={"ODSGD_SSH": hanging})
    assert "missing: server 0, worker 1 (2 of 4)" in table
    assert ["worker", "1", "127.0.0.2", "-", "never", "started"] in map(str.split, table.splitlines())


def test_hosts_are_asked_before_anything_starts_for_what_workers_read(ssh: Way, tmp_path: Path) -> None:
    options, env = ssh
    with Launch("-n", 2, "-s", 1, *options, "--remote-python", tmp_path / "no python", "odsgd", "train", "--dataset",
                "mnist", "--data-dir", tmp_path / "it's not there", env=env) as launch:
        assert launch.wait() == 70
    missing = f"there is no {tmp_path}/it's not there and no {tmp_path}/no python"
    assert launch.said == ("2 of 2 hosts cannot take part; nothing was started\n"
                           f"  127.0.0.1: {missing}\n  127.0.0.2: {missing}")
    silent = stand_in_ssh(tmp_path, 'if [ "$host" = me@127.0.0.2 ]; then exec sleep 600; fi')
    with Launch("-n", 2, "--startup-timeout", 2, *options, MEMBER, env={"ODSGD_SSH": silent}) as launch:
        assert launch.wait() == 70
    assert launch.said.endswith("\n  127.0.0.2: ssh has not answered for 2 s")


def test_a_command_that_a_host_does_not_have_is_told(ssh: Way) -> None:
    options, env = ssh
    with Launch("-n", 1, "-s", 0, *options, "no-such-program", env=env) as launch:
        assert launch.wait() == 70
    assert launch.said == ("worker 0 failed (host 127.0.0.1): could not be started: "
                           "no-such-program: No such file or directory")


def test_greetings_of_a_login_shell_do_no_harm(ssh: Way, tmp_path: Path) -> None:
    options, _ = ssh
    greeting = stand_in_ssh(tmp_path, "echo Welcome")
    with Launch("-n", 1, "-s", 0, *options, sys.executable, "-c", "print('hello')",
                env={"ODSGD_SSH": greeting}) as launch:
        assert launch.wait() == 0
    assert set(launch.output) == {"127.0.0.1 | Welcome", "worker 0 | hello"}


RSYNC = """import shutil, sys
assert sys.argv[1:3] == ["-az", "-e"], sys.argv
source, (host, _, target) = sys.argv[-2], sys.argv[-1].partition(":")
{note}
shutil.copytree(source, target, dirs_exist_ok=True)
"""


def test_the_working_directory_is_copied_and_worked_in(ssh: Way, tmp_path: Path) -> None:
    options, env = ssh
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "work.py").write_text("import os, helper\nprint(os.getcwd(), os.path.dirname(helper.__file__))")
    (here / "lib").mkdir()
    (here / "lib" / "helper.py").write_text("")
    env = {**env, "ODSGD_RSYNC": stand_in_rsync(tmp_path), "PYTHONPATH": ROOT + ":" + str(here / "lib")}
    with Launch("-n", 2, "--store", "none", *options, "--sync-dst-dir", there, "work.py", cwd=here, env=env) as launch:
        assert launch.wait() == 0
    assert sorted(launch.output) == [f"worker {rank} | {there} {there / 'lib'}" for rank in (0, 1)]


def test_a_copy_that_fails_starts_nothing(ssh: Way, tmp_path: Path) -> None:
    options, env = ssh
    failing = stand_in_rsync(tmp_path, "if host == 'me@127.0.0.2': sys.exit('no space left')")
    with Launch("-n", 2, "-s", 0, *options, "--sync-dst-dir", tmp_path / "there", MEMBER,
                env={**env, "ODSGD_RSYNC": failing}, cwd=HERE) as launch:
        assert launch.wait() == 70
    assert launch.said == (f"copying the working directory to me@127.0.0.2:{tmp_path / 'there'} failed: "
                           "rsync ended with exit code 1: no space left")


def stand_in_rsync(folder: Path, note: str = "") -> str:
    return words(python_program(folder / "program", RSYNC.format(note=note)))


def test_no_ssh_on_this_machine_is_one_line(ssh: Way) -> None:
    options, _ = ssh
    with Launch("-n", 1, *options, MEMBER, env={"ODSGD_SSH": "no-such-ssh"}) as launch:
        assert launch.wait() == 64
    assert launch.said == "no-such-ssh is not a program on this machine; install ssh or name one in ODSGD_SSH"
