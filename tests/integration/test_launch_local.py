"""Local jobs of real processes: what they print, how they end, and that nothing of them stays behind."""
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from tests.integration.launching import (
    MEMBER,
    ROOT,
    Launch,
    Word,
    command_line,
    leaves_nothing_when_killed,
    marked,
    startup_table,
    words,
)


def script(tmp_path: Path, text: str, name: str = "work.py") -> str:
    path = tmp_path / name
    path.write_text("import os, sys, time\nRANK = int(os.environ['ODSGD_WORKER_RANK'])\n" + text)
    return str(path)


def test_every_line_carries_role_and_rank_and_keeps_its_stream(tmp_path: Path) -> None:
    work = script(tmp_path, "print('out', RANK)\nprint('err', RANK, file=sys.stderr)\nsys.stdout.write('no newline')")
    with Launch("-n", 2, "--store", "none", work) as launch:
        assert launch.wait() == 0
    assert sorted(launch.output) == ["worker 0 | no newline", "worker 0 | out 0",
                                     "worker 1 | no newline", "worker 1 | out 1"]
    assert sorted(launch.errors) == ["worker 0 | err 0", "worker 1 | err 1"]


def test_a_progress_bar_leaves_its_last_state_when_there_is_no_terminal(tmp_path: Path) -> None:
    bar = "for i in range(4):\n    sys.stderr.write('\\r%d of 3' % i); sys.stderr.flush(); time.sleep(0.01)\n"
    with Launch("-n", 1, "-s", 0, script(tmp_path, bar + "sys.stderr.write('\\n')")) as launch:
        assert launch.wait() == 0
    assert launch.errors == ["worker 0 | 3 of 3"]


def test_a_job_that_succeeds_returns_0_and_the_launcher_says_nothing() -> None:
    with Launch("-n", 2, "-s", 1, MEMBER) as launch:
        assert launch.wait() == 0
    assert launch.said == ""


def test_environment_of_every_role(tmp_path: Path) -> None:
    path = tmp_path / "show.py"
    path.write_text("import os, time\nprint({name: value for name, value in os.environ.items()\n"
                    "       if name.startswith(('DMLC', 'ODSGD_W', 'ODSGD_S', 'OMP', 'PORT'))})\n"
                    "seen = os.environ['SEEN']\nopen(seen + os.environ['DMLC_ROLE'], 'w').close()\n"
                    "while os.environ['DMLC_ROLE'] == 'worker' and not os.path.exists(seen + 'scheduler'):\n"
                    "    time.sleep(0.02)\n")  # the job ends with its workers
    with Launch("-n", 2, "-s", 1, "--store", "none", "--env-worker", "OMP_NUM_THREADS:3", path,
                env={"LAUNCH_TEST_SERVER": words(sys.executable, path), "DMLC_SERVER_ID": "9", "DMLC_RANK": "7",
                     "ODSGD_SECRET": "old", "PORT": "80", "SEEN": str(tmp_path / "seen-")}) as launch:
        assert launch.wait() == 0
    seen = {line.split(" | ")[0]: eval(line.split(" | ")[1]) for line in launch.output}
    assert set(seen) == {"scheduler", "server 0", "worker 0", "worker 1"}
    for name, env in seen.items():
        assert env["DMLC_ROLE"] == name.split()[0]
        assert env["DMLC_PS_ROOT_URI"] == env["DMLC_NODE_HOST"] == "127.0.0.1"
        assert (env["DMLC_NUM_WORKER"], env["DMLC_NUM_SERVER"]) == ("2", "1")
        assert int(env["PORT"]) > 65535 and env["DMLC_LOCAL"] == "1" and "DMLC_RANK" not in env
    assert len({env["PORT"] for env in seen.values()}) == 4
    assert len({env["DMLC_PS_ROOT_PORT"] for env in seen.values()}) == 1
    secret = {env["ODSGD_SECRET"] for env in seen.values()}
    assert len(secret) == 1 and re.fullmatch("[0-9a-f]{64}", secret.pop())
    assert seen["worker 1"]["ODSGD_WORKER_RANK"] == seen["worker 1"]["DMLC_WORKER_ID"] == "1"
    assert seen["server 0"]["ODSGD_SERVER_RANK"] == seen["server 0"]["DMLC_SERVER_ID"] == "0"
    assert seen["worker 0"]["OMP_NUM_THREADS"] == "3"
    assert int(seen["server 0"]["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3)


def test_the_first_failure_ends_the_job_with_its_code_and_its_last_lines() -> None:
    with Launch("-n", 2, "-s", 1, MEMBER, "wait", env={"MEMBER_WORKER_1": "exit 3"}) as launch:
        assert launch.wait() == 3
    assert re.match(r"worker 1 failed \(host 127.0.0.1, pid \d+\): exit code 3\n", launch.said)
    assert "    | about to exit with 3" in launch.said


@pytest.mark.parametrize("name", ["worker 1", "server 0", "scheduler"])
def test_kill_9_of_any_process_ends_the_job_and_names_it(name: str) -> None:
    with Launch("-n", 2, "-s", 1, MEMBER, "wait") as launch:
        launch.wait_for_all_joined()
        launch.kill(name, signal.SIGKILL)
        assert launch.wait() == 128 + signal.SIGKILL
    assert launch.said.startswith(name + " failed") and "killed by SIGKILL" in launch.said


GOES_ON = ("-n", 3, "-s", 1, "--on-worker-loss", "continue")
MEMBERS = ("server 0", "worker 0", "worker 2")


def test_a_job_goes_on_without_a_worker_that_was_killed() -> None:
    with Launch(*GOES_ON, MEMBER, "until-lost", env={"MEMBER_SERVER_0": "until-lost",
                                                     "MEMBER_WORKER_1": "wait"}) as launch:
        launch.wait_for_all_joined(workers=3)
        launch.kill("worker 1", signal.SIGKILL)
        assert launch.wait() == 0
    told = [line for line in launch.errors if line.startswith("odsgd launch: ")]
    assert re.fullmatch(r"odsgd launch: worker 1 was lost \(host 127.0.0.1, pid \d+\): killed by SIGKILL \(.*\); "
                        "the job goes on with 2 of 3 workers", told[0])
    assert told[1:] == ["odsgd launch: the job has finished without workers [1]"] and launch.errors[-1] == told[-1]
    assert "    | joined" in launch.errors
    assert {line for line in launch.output if " | lost " in line} == {
        name + r" | lost '1\n', mode 600" for name in MEMBERS}
    files = {line.split(" | file ")[1] for line in launch.output if " | file " in line}
    assert len(files) == 1 and not any(map(os.path.exists, files))


def test_a_failure_of_those_that_are_left_is_the_jobs() -> None:
    with Launch(*GOES_ON, MEMBER, "wait") as launch:
        launch.wait_for_all_joined(workers=3)
        launch.kill("worker 1", signal.SIGKILL)
        launch.wait_for("    | joined")
        launch.kill("server 0", signal.SIGKILL)
        assert launch.wait() == 137
    assert "\nserver 0 failed" in launch.said and "\n  the job had lost workers [1] before" in launch.said


def test_the_last_worker_is_not_spared() -> None:
    with Launch(*GOES_ON, MEMBER, "wait") as launch:
        launch.wait_for_all_joined(workers=3)
        for name, left in (("worker 0", 2), ("worker 1", 1)):
            launch.kill(name, signal.SIGKILL)
            launch.wait_for_text(f"the job goes on with {left} of 3 workers")
        launch.kill("worker 2", signal.SIGKILL)
        assert launch.wait() == 137
    assert "\nworker 2 failed" in launch.said
    assert "continue does not help: no worker is left" in launch.said


def test_a_worker_that_dies_before_the_job_is_up_ends_it(tmp_path: Path) -> None:
    work = script(tmp_path, "if RANK == 1:\n    sys.exit(3)\ntime.sleep(600)")
    with Launch(*GOES_ON, work) as launch:
        assert launch.wait() == 3
    assert "the job was still starting, which takes all of them: worker 1 has not joined" in launch.said


def test_only_a_job_that_goes_on_has_a_file_of_losses(tmp_path: Path) -> None:
    show = script(tmp_path, "print(os.environ.get('ODSGD_LOST', 'none'))")
    outer = str(tmp_path / "of another job")
    with Launch("-n", 1, "-s", 0, show, env={"ODSGD_LOST": outer}) as launch:
        assert launch.wait() == 0
    assert launch.output == ["worker 0 | none"]
    with Launch("-n", 1, "-s", 0, "--on-worker-loss", "continue", show,
                env={"ODSGD_LOST": outer, "TMPDIR": str(tmp_path)}) as launch:
        assert launch.wait() == 0
    assert launch.output[0].startswith(f"worker 0 | {tmp_path}/odsgd-lost-")
    assert not list(tmp_path.glob("odsgd-lost-*"))


def test_a_report_names_the_reason_and_the_cause() -> None:
    # Worker 0 reports and goes; worker 1 dies of it in the same moment.
    with Launch("-n", 2, "-s", 1, MEMBER, env={"MEMBER_WORKER_0": "report-and-exit 70",
                                               "MEMBER_SERVER_0": "wait"}) as launch:
        assert launch.wait() == 70
    assert launch.said.startswith("worker 0 failed")
    assert "  it reported: ValueError: the loss is nan" in launch.said


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    with Launch("-n", 2, "-s", 1, "--grace", 0.3, MEMBER, "hang", env={"MEMBER_WORKER_1": "exit 1"}) as launch:
        assert launch.wait() == 1


def test_a_server_that_hangs_after_success_is_stopped_and_the_job_has_succeeded() -> None:
    with Launch("-n", 1, "-s", 1, "--grace", 0.3, MEMBER,
                env={"MEMBER_SERVER_0": "hang", "LAUNCH_TEST_FAREWELL_S": "1"}) as launch:
        assert launch.wait() == 0
    assert launch.said == "server 0 had not ended 1 s after the last worker; stopped"


@pytest.mark.parametrize("options, served", [(["-s", 1, "--store", "ssgd"], ", so `ssgd` was not used"),
                                             ([], ""), (["-s", 0], "")])
def test_workers_of_whom_none_makes_a_store_are_told_of_and_have_failed(options: List[Word], served: str) -> None:
    with Launch("-n", 2, *options, sys.executable, "-c", "print('alone')") as launch:
        assert launch.wait() == 70
    assert sorted(launch.output) == ["worker 0 | alone", "worker 1 | alone"]
    assert launch.said == (f"no worker has made a store{served}; the script has to ask for one (kvstore=…; PyTorch: "
                           "od.create; one of MXNet's with --store, in a Python that is not started with -E or -I). If "
                           "the workers exchange nothing, or by other means, say --store none")


@pytest.mark.parametrize("options", [["-n", 2, "--store", "none"], ["-n", 1, "-s", 0]])
def test_a_command_that_needs_no_store_and_one_worker_alone_succeed(options: List[Word]) -> None:
    with Launch(*options, sys.executable, "-c", "print('alone')") as launch:
        assert launch.wait() == 0
    assert launch.errors == [] and "worker 0 | alone" in launch.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_leaves_nothing_behind(number: int) -> None:
    with Launch("-n", 2, "-s", 1, MEMBER, "children") as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        launch.process.send_signal(number)
        assert launch.wait() == 128 + number
    assert launch.said == f"stopped by {signal.Signals(number).name}; nothing of the job is left"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_launcher_is_still_being_imported_is_one_line(number: int) -> None:
    """Python itself takes the first tenth of a second; from the first line of odsgd on the signal is heeded."""
    program = ("import os, sys, threading\nsys.argv = ['odsgd', 'launch', '-n', '1', '-s', '0', 'sleep', '60']\n"
               "class Tell:\n    def find_spec(self, name, *_):\n        if name == 'kvstore':\n"
               f"            os.kill(os.getpid(), {int(number)})\n"
               "sys.meta_path.insert(0, Tell())\nimport odsgd.__main__\nprint('imported')\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == f"odsgd launch: stopped by {signal.Signals(number).name}; nothing of the job is left\n"


def test_when_its_output_is_not_read_any_more_the_job_ends(tmp_path: Path) -> None:
    work = script(tmp_path, "while True:\n    print('x' * 1000)")
    with Launch("-n", 2, "-s", 0, work, unread=True) as launch:
        assert launch.process.stdout
        assert launch.process.stdout.readline() in (f"worker {rank} | {'x' * 1000}\n" for rank in range(2))
        launch.process.stdout.close()
        assert launch.wait() == 128 + signal.SIGPIPE


def test_a_second_ctrl_c_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    work = script(tmp_path, "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
                  "print('hanging', flush=True)\ntime.sleep(600)\n")
    with Launch("-n", 1, "-s", 0, "--grace", 60, work) as launch:
        launch.wait_for("worker 0 | hanging")
        launch.process.send_signal(signal.SIGINT)
        launch.wait_for("worker 0 | told")
        assert launch.process.poll() is None  # the first one is orderly
        launch.process.send_signal(signal.SIGINT)
        assert launch.wait() == 130


def test_ctrl_c_while_a_failed_job_ends_means_that_it_does_not_start_again(tmp_path: Path) -> None:
    work = script(tmp_path, f"import signal\nready = {str(tmp_path / 'ready')!r}\nif RANK:\n"
                  "    signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
                  "    open(ready, 'w').close()\n"
                  "while RANK or not os.path.exists(ready):\n    time.sleep(0.02)\nsys.exit(3)\n")
    with Launch("-n", 2, "--store", "none", "--max-restarts", 3, "--grace", 60, work) as launch:
        launch.wait_for("worker 1 | told")
        launch.process.send_signal(signal.SIGINT)
        assert launch.wait() == 130
    assert "exit code 3" in launch.said and launch.said.endswith("stopped by SIGINT; nothing of the job is left")


def test_kill_9_of_the_launcher_leaves_nothing_behind() -> None:
    leaves_nothing_when_killed()


def test_kill_9_of_the_agent_ends_the_job() -> None:
    with Launch("-n", 2, "-s", 1, MEMBER, "wait") as launch:
        launch.wait_for_all_joined()
        agent = next(pid for pid in marked(launch.mark) if "odsgd.launch.agent" in command_line(pid))
        os.kill(agent, signal.SIGKILL)
        assert launch.wait() == 70
    assert launch.said.startswith("lost host 127.0.0.1 (scheduler, server 0, worker 0, worker 1): "
                                  "its agent was killed by SIGKILL")


def test_children_of_a_worker_that_has_ended_are_gone_with_it(tmp_path: Path) -> None:
    work = script(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '600'])")
    with Launch("-n", 1, "-s", 0, work) as launch:
        assert launch.wait() == 0


def test_a_process_missing_at_the_startup_deadline_is_told() -> None:
    table = startup_table(3, "-n", 2, "-s", 1, MEMBER, env={"MEMBER_WORKER_1": "silent"})
    said = [re.sub(r"\d{3,}", "PID", re.sub(" +", " ", line)).strip() for line in table.splitlines()]
    assert re.fullmatch(r"the job has not come up within \d+ s; missing: worker 1 \(1 of 4\)", said[0])
    assert said[1:6] == ["process host pid state",
                         "scheduler PID.0.0.1 PID asked to join, waits for the others",
                         "server 0 PID.0.0.1 PID asked to join, waits for the others",
                         "worker 0 PID.0.0.1 PID asked to join, waits for the others",
                         "worker 1 PID.0.0.1 PID running, has not asked to join"]


def test_a_stopped_process_without_a_pulse_is_known_by_the_kernels_state(tmp_path: Path) -> None:
    work = script(tmp_path, "print('works', flush=True)\ntime.sleep(600)")
    with Launch("-n", 2, "-s", 0, "--hang-timeout", 4, work) as launch:
        launch.wait_for("worker 0 | works", "worker 1 | works")
        launch.kill("worker 1", signal.SIGSTOP)
        launch.wait_for_text("warning: worker 1 on host 127.0.0.1 has not answered for")
        assert launch.wait() == 75
    assert "worker 1 failed" in launch.said and "it is stopped (SIGSTOP, Ctrl-Z or a debugger)" in launch.said


def test_two_jobs_at_once_do_not_meet() -> None:
    with Launch("-n", 2, "-s", 1, MEMBER) as one, Launch("-n", 2, "-s", 1, MEMBER) as two:
        assert one.wait() == 0 and two.wait() == 0


def test_the_secret_is_on_no_command_line() -> None:
    with Launch("-n", 1, "-s", 1, MEMBER, "wait") as launch:
        launch.wait_for_all_joined(workers=1)
        secret = marked(launch.mark)[launch.pid("worker 0")]["ODSGD_SECRET"]
        assert not any(secret in command_line(pid) for pid in filter(str.isdigit, os.listdir("/proc")))
        launch.process.terminate()
        launch.wait()


@pytest.mark.parametrize("arguments, complaint", [
    (["-n", "2", "--num-server", "1", "x.py"], "unknown option `--num-server`; did you mean `--num-servers`?"),
    (["-n", "two", "x.py"], "--num-workers: expected a whole number from 1 to 4096, or MIN:MAX, got `two`"),
    (["-n", "2"], "no command"),
    (["-n", "2", "absent.py"], "no such file: absent.py"),
    (["-n", "2", "--launcher", "sssh", "x.py"], "--launcher: unknown launcher `sssh`; did you mean `ssh`? Known: "),
])
def test_a_mistake_is_one_line_and_exit_code_64(arguments: List[str], complaint: str) -> None:
    done = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "launch.py"), *arguments],
                          capture_output=True, text=True)
    assert done.returncode == 64 and done.stdout == ""
    assert done.stderr.startswith("odsgd launch: " + complaint) and done.stderr.count("\n") == 1
