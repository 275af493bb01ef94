"""The command line: MXNet's surface, both spellings, mistakes; its options as fields, their flags and words."""
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Dict, List

import pytest

from kvstore.errors import ConfigError
from odsgd.cli import main
from odsgd.config import launch
from odsgd.config.flags import flag_of
from odsgd.config.launch import JobOptions, LaunchOptions, parse_env
from odsgd.launch import command, supervisor
from odsgd.launch.hostfile import Host
from odsgd.launch.plan import make_plan


@pytest.fixture
def hosts(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text("a\nb\n")
    return str(path)


def test_an_old_job_script_of_mxnet_works(hosts: str) -> None:
    job = command.parse(["-n", "4", "-s", "1", "--launcher", "ssh", "-H", hosts, "--sync-dst-dir", "/tmp/x",
                     "--env", "PS_VERBOSE:1", "--env-server", "OMP_NUM_THREADS:2", "--env-worker", "B:3",
                     "python", "train.py", "-n", "50", "--kv-store", "dist_sync"])
    assert (job.num_workers, job.num_servers, job.launcher, job.sync_dst_dir) == (4, 1, "ssh", "/tmp/x")
    assert job.slots == (Host("a"), Host("b"))
    assert (job.env, job.env_server, job.env_worker) == ({"PS_VERBOSE": "1"}, {"OMP_NUM_THREADS": "2"}, {"B": "3"})
    assert job.command == ("python", "train.py", "-n", "50", "--kv-store", "dist_sync")


def test_defaults() -> None:
    job = command.parse(["-n", "3", sys.executable])
    assert (job.num_servers, job.servers_beside_workers, job.launcher, job.port) == (3, False, "local", 0)
    assert (job.startup_timeout_s, job.grace_s, job.on_worker_loss) == (300, 5, "fail")


def test_a_hostfile_means_ssh(hosts: str) -> None:
    assert command.parse(["-n", "1", "-H", hosts, "x"]).launcher == "ssh"


def test_secure_makes_a_tunnel_between_hosts_and_none_on_one_machine(hosts: str) -> None:
    assert command.parse(["-n", "1", "--secure", "-H", hosts, "-p", "4000", "x"]).secure
    assert not command.parse(["-n", "1", "--secure", sys.executable]).secure
    assert command.parse(["-n", "2", "-s", "0", "--secure", "-H", hosts, "x"]).secure
    assert command.parse(["-n", "2", "-s", "0", "--secure", sys.executable]).env_worker["UCX_NET_DEVICES"] == "lo"


@pytest.mark.parametrize("where", [[], ["-s", "0"], ["-H", "HOSTS"]])
def test_with_secure_processes_copy_to_hosts_that_ssh_knows_alone(hosts: str, where: List[str]) -> None:
    words = ["-n", "2", *(word.replace("HOSTS", hosts) for word in where)]
    for secure in (False, True):
        asked = command.parse([*words, *(["--secure"] if secure else []), sys.executable])
        plan = make_plan(asked, ("127.0.0.1", 4000), certificate="PEM" if asked.secure else "")
        assert {process.env.get("ODSGD_SECURE") for process in plan.processes} == {"1" if secure else None}


def test_auto_servers() -> None:
    job = command.parse(["-n", "3", "-s", "auto", sys.executable])
    assert (job.num_servers, job.servers_beside_workers) == (3, True)


def test_a_range_of_workers_begins_with_the_most() -> None:
    job = command.parse(["-n", "2:3", "--max-restarts", "1", "--rejoin-timeout", "7", sys.executable])
    assert (job.num_workers, job.num_servers, job.least_workers, job.most_workers) == (3, 3, 2, 3)
    assert job.rejoin_timeout_s == 7
    fixed = command.parse(["-n", "2:2", sys.executable])
    assert (fixed.num_workers, fixed.least_workers, fixed.most_workers) == (2, None, None)


def test_every_option_of_two_words_is_read_with_dashes_and_with_underscores() -> None:
    for words in (["--num-workers", "2", "--startup-timeout", "7"], ["--num_workers=2", "--startup_timeout=7"]):
        job = command.parse([*words, sys.executable, "--not_ours", "a_b"])
        assert (job.num_workers, job.startup_timeout_s, job.command[1:]) == (2, 7, ("--not_ours", "a_b"))


def test_dashes_may_stand_before_the_command() -> None:
    assert command.parse(["-n", "1", "--", sys.executable, "--", "-n"]).command == (sys.executable, "--", "-n")


@pytest.mark.parametrize("argv, complaint", [
    (["x"], "required: -n"),
    (["-n", "0", "x"], "expected a whole number from 1 to 4096"),
    (["-n", "3:2", "--max-restarts", "1", "x"], "expected a whole number from 1 to 4096, or MIN:MAX, got `3:2`"),
    (["-n", "2:3", sys.executable], "-n 2:3 needs --max-restarts"),
    (["-n", "2", "--grow", sys.executable], "--grow brings back workers that a restart has left out; it needs -n MIN"),
    (["-n", "2", "--rejoin-timeout", "5", sys.executable], "--rejoin-timeout is how long a restart waits; it"),
    (["-n", "2", sys.executable, "-m", "odsgd", "train", "--cluster", "virtual"],
     "the workers' command: cluster: a cluster in virtual time is one process; start it without `odsgd launch`"),
    (["-n", "2", "--secure", "--launcher", "mpi", "x"], "--secure is for --launcher ssh: mpirun"),
    (["-n", "2", "-s", "0", "--secure", "--env", "FI_PROVIDER:x", sys.executable], "--secure and --env FI_PROVIDER: "),
    (["-n", "2", "--secure", "--env", "DMLC_LOCAL:0", sys.executable], "leave one of them out"),
    (["-n", "2", "--secure", "--port", "4000", sys.executable], "--secure: this job would listen on TCP"),
    (["-n", "2:3", "--max-restarts", "1", "--launcher", "mpi", "x"], "with mpi all workers are started, or none"),
    (["-n", "2:3", "--max-restarts", "1", "--on-worker-loss", "continue", "x"], "two ways to go on without a worker"),
    (["-n", "1", "-s", "-1", "x"], "--num-servers: expected a whole number up to 4096"),
    (["-n", "1", "-s", "some", "x"], "--num-servers: expected a whole number up to 4096, or `auto`, got `some`"),
    (["-n", "1", "-p", "70000", "x"], "expected a whole number from 0 to 65535"),
    (["-n", "1", "--grace", "-2", "x"], "number of seconds"),
    (["-n", "1", "--launcher", "ssh", "x"], "needs a hostfile"),
    (["-n", "1", "--launcher", "yarn", "x"], "unknown launcher `yarn`"),
    (["-n", "1", "--on-worker-loss", "contine", "x"],
     "--on-worker-loss: unknown value `contine`; did you mean `continue`? Known: continue, fail"),
    (["-n", "1", "--sync-dst-dir", "/x", sys.executable], "works with --launcher ssh only"),
    (["-n", "1", "--startup-timeot", "3", "x"], "unknown option `--startup-timeot`; did you mean `--startup-timeout`?"),
    (["--numworkers", "2", "x"], "unknown option `--numworkers`; did you mean `--num-workers`?"),
    (["-n", "1"], "no command"),
    (["-n", "1", "no-such-program"], "no such program: no-such-program"),
])
def test_mistakes_are_told_in_one_line(argv: List[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        command.parse(argv)
    assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("launcher", ["local", "mpi", "ssh"])
def test_an_option_of_odsgd_train_is_checked_before_a_process_starts(
        launcher: str, hosts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "run", lambda job: pytest.fail("a process would have been started"))
    where = ["-H", hosts] if launcher == "ssh" else []
    train = [sys.executable, "-m", "odsgd", "train", "--lr-locl", "0.1"]
    assert main(["launch", "-n", "2", "--launcher", launcher, *where, *train]) == 64
    error = capsys.readouterr().err
    assert error.startswith("odsgd launch: the workers' command: unknown option `--lr-locl`; did you mean `--lr-local`")
    assert error.count("\n") == 1


def test_only_an_asynchronous_training_goes_on_without_a_worker() -> None:
    argv = ["-n", "2", "--on_worker_loss", "continue", sys.executable, "-m", "odsgd", "train"]
    for store in ("asgd", "dist_async"):
        assert command.parse([*argv, "--kvstore", store]).on_worker_loss == "continue"
    for flags, store in ([], "odsgd"), (["--kvstore", "dist_sync"], "ssgd"):
        with pytest.raises(ConfigError) as error:
            command.parse([*argv, *flags])
        assert str(error.value) == (
            "--on-worker-loss continue is for asynchronous stores, and the workers' command trains with "
            f"kvstore `{store}`; leave it out, or choose another store")


TRAIN = (sys.executable, "-m", "odsgd", "train", "--kvstore")


@pytest.mark.parametrize("more, why", [
    (["--wire", "sockets", *TRAIN, "decoupled"], "launch it with --on-worker-loss continue"),
    (["--wire", "ps-lite", "--on-worker-loss", "continue", *TRAIN, "decoupled"], "launch it with --wire sockets"),
    (["--wire", "sockets", *TRAIN, "pipesgd"], "launch it with servers and --wire sockets"),
    (["--wire", "sockets", "--on-worker-loss", "continue", *TRAIN, "asgd"], "kvstore `asgd` with its options needs"),
    (["--wire", "sockets", "--on-worker-loss", "continue", *TRAIN, "decoupled", "--replay", "a"], "the same workers"),
    *((["--wire", "sockets", "--on-worker-loss", "continue", *TRAIN, store, "--codec-weights", "float16"],
       f"`{store}` with its options") for store in ("decoupled", "async_diloco")),
    (["--wire", "sockets", "--on-worker-loss", "continue", "--launcher", "mpi", *TRAIN, "decoupled"], "is mpi, which")])
def test_a_job_that_nobody_can_join_has_no_spare_places(more: List[str], why: str) -> None:
    assert why in command.parse(["-n", "3", *more]).closed
    with pytest.raises(ConfigError, match="--spare 1: nobody could join this job: ") as error:
        command.parse(["-n", "3", "--spare", "1", *more])
    assert why in str(error.value)


def test_a_job_of_decoupled_on_sockets_that_may_lose_workers_may_be_joined() -> None:
    options = ["-n", "3", "--wire", "sockets", "--on-worker-loss", "continue"]
    for store in ("decoupled", "async_diloco"):
        assert command.parse([*options, "--spare", "2", *TRAIN, store]).closed == ""
    assert command.parse([*options, "--store", "decoupled:H=5", sys.executable, "own.py"]).closed == ""
    assert "needs the same" in command.parse([*options, "--store", "asgd", sys.executable, "own.py"]).closed
    with pytest.raises(ConfigError, match="--spare 3 of -n 3 workers leaves none to begin with"):
        command.parse([*options, "--spare", "3", *TRAIN, "decoupled"])


@pytest.mark.parametrize("store, servers", [("odsgd", 2), ("dist_async", 2), ("local", 0)])
def test_the_store_of_a_training_says_whether_there_are_servers(store: str, servers: int) -> None:
    assert command.parse(["-n", "2", *TRAIN, store]).num_servers == servers


@pytest.mark.parametrize("asked, store, why, or_", [
    ("2", "local", ", which has no use for servers", ""), ("auto", "pipesgd", ", which has no use for servers", ""),
    ("0", "asgd", ", which cannot do without servers", ""),
    ("0", "odsgd", " on transport `server`, which cannot do without servers", ", or choose transport `ring`"),
    ("0", "ssgd", " on transport `server`, which cannot do without servers", ", or choose transport `sharded`")])
def test_servers_that_do_not_go_with_the_store_are_told(asked: str, store: str, why: str, or_: str) -> None:
    with pytest.raises(ConfigError) as error:
        command.parse(["-n", "2", "-s", asked, *TRAIN, store])
    assert str(error.value) == (
        f"-s {asked}: the workers' command trains with kvstore `{store}`{why}; leave -s out{or_}")


def test_a_store_that_cannot_be_known_here_is_left_to_the_user(hosts: str) -> None:
    options = ["-n", "2", "--on-worker-loss", "continue"]
    assert command.parse([*options, sys.executable, "own.py"]).on_worker_loss == "continue"
    elsewhere = command.parse([*options, "-H", hosts, "odsgd", "train", "--config", "no/such.yaml"])
    assert elsewhere.on_worker_loss == "continue"


def test_a_configuration_that_may_lie_on_the_hosts_is_missed_only_here(hosts: str) -> None:
    train = ["odsgd", "train", "--config", "no/such.yaml"]
    assert command.parse(["-n", "1", "-H", hosts, *train]).command == tuple(train)
    with pytest.raises(ConfigError, match=r"the workers' command: cannot read `no/such.yaml`"):
        command.parse(["-n", "1", sys.executable, "-m", *train])
    with pytest.raises(ConfigError, match="unknown option `--lr-locl`"):
        command.parse(["-n", "1", "-H", hosts, *train, "--lr-locl", "1"])


def test_a_local_job_has_no_hostfile_and_mpirun_no_user(hosts: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out -H"):
        command.parse(["-n", "1", "--launcher", "local", "-H", hosts, "x"])
    (tmp_path / "users").write_text("me@a\n")
    with pytest.raises(ConfigError, match="neither user@host"):
        command.parse(["-n", "1", "--launcher", "mpi", "-H", str(tmp_path / "users"), "x"])


def test_the_words_of_options_are_the_flags_that_give_them() -> None:
    options = JobOptions(port=5000, grace_s=7.5, grow=True, env={"A": "b c", "B": "1"}, on_worker_loss="continue")
    assert shlex.join(launch.words(options)) == (
        "--port 5000 --env 'A=b c' --env B=1 --grow --grace 7.5 --on-worker-loss continue")
    assert launch.words(JobOptions()) == []


def test_every_option_has_one_flag_of_two_dashes_in_messages() -> None:
    flags = list(map(flag_of, dataclasses.fields(LaunchOptions)))
    assert len(set(flags)) == len(flags) and {"--num-workers", "--startup-timeout", "--dry-run"} < set(flags)


@pytest.mark.parametrize("values, expected", [
    (["A:1"], {"A": "1"}), (["A=1"], {"A": "1"}), (["A:b:c=d"], {"A": "b:c=d"}), (["A:"], {"A": ""}),
    (["HOME"], {"HOME": "/root"}), (["HOME,A:2"], {"HOME": "/root", "A": "2"}), (["A:1,B:2"], {"A": "1", "B": "2"}),
    (["GPUS:0,1"], {"GPUS": "0,1"}), (["A:1", "A:2"], {"A": "2"}),
])
def test_env_takes_values_and_names(values: List[str], expected: Dict[str, str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    assert parse_env(values) == expected


@pytest.mark.parametrize("value, complaint", [
    ("1A:2", "`1A:2`: expected NAME or NAME:VALUE"),
    ("MISSING", "MISSING is not set here; set it, or give its value as MISSING:VALUE"),
    ("DMLC_ROLE:worker", "DMLC_ROLE is set by the launcher"),
])
def test_env_refuses_what_cannot_work(value: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_env([value])
