"""The folder of a run belongs to one job at a time, and what is removed in it stays away."""
import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, Dict, List, Optional, Tuple

import pytest

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, RoundTimeoutError
from kvstore.transports.in_process import Stage
from odsgd import checkpoint
from odsgd.launch.hosts import ssh
from odsgd.training.checkpoint import disk
from odsgd.training.checkpoint.checkpoint import UnfinishedCheckpoint
from tests.jobs import ROOT, environment, train_once

HOLD = """
import sys
from pathlib import Path
from odsgd.training.checkpoint import disk
with disk.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(folder: Path, secret: Optional[str] = None) -> "subprocess.Popen[str]":
    """A process that has the folder, or that has ended."""
    env = {**environment(), **({"ODSGD_SECRET": secret} if secret else {})}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, env=env, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stdout: Optional[IO[str]] = process.stdout
    assert stdout
    stdout.readline()
    return process


def test_a_folder_that_another_job_has_is_refused_until_that_job_is_killed(tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FREE_WITHIN_S", 0.3)
    folder = tmp_path / "new" / "run"
    with holding(folder) as other:
        refused = rf"another job trains there \(host .* pid {other.pid}\); take another"
        with pytest.raises(ConfigError, match=refused), disk.held(folder):
            pass
        other.kill()
        other.wait(300)
        with disk.held(folder):
            pass


@pytest.mark.parametrize("umask, mode", [(0o022, 0o600), (0o077, 0o600), (0o002, 0o660)])
def test_only_who_can_train_in_a_folder_can_keep_others_out(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        for _ in ("new", "of an earlier version"):
            with disk.held(tmp_path):
                assert (tmp_path / disk.LOCK).stat().st_mode & 0o777 == mode
            (tmp_path / disk.LOCK).chmod(0o666 & ~umask)
    finally:
        os.umask(before)


def test_a_job_that_is_started_again_waits_for_what_is_left_of_the_attempt_before(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert disk.FREE_AGAIN_WITHIN_S > ssh.SILENCE_S  # after which they have ended, whatever the link did
    monkeypatch.setenv("ODSGD_RESTARTS", "1")
    monkeypatch.setattr(disk, "FREE_WITHIN_S", 0.0)
    monkeypatch.setattr(disk, "SAID_AFTER_S", 0.1)
    with holding(tmp_path) as before:
        end = threading.Timer(0.5, before.kill)
        end.start()
        with disk.held(tmp_path):
            assert before.wait(300)
        end.join()
    said, = capsys.readouterr().err.splitlines()
    assert f"pid {before.pid}, or a worker beside it, still has it" in said and "waiting up to 330 s" in said
    monkeypatch.setattr(disk, "FREE_AGAIN_WITHIN_S", 0.3)
    with holding(tmp_path) as before:
        refused = rf"pid {before.pid}, or a worker beside it, still has it, .* after 0.3 s; end that process"
        with pytest.raises(RoundTimeoutError, match=refused), disk.held(tmp_path):
            pass
        before.kill()


def test_the_checkpoints_of_a_script_have_their_folder_until_they_are_closed(tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FREE_WITHIN_S", 0.3)
    net, store = mx.gluon.nn.Dense(1, in_units=1), kvstore.create("local")
    net.initialize()
    with holding(tmp_path) as other:
        with pytest.raises(ConfigError, match="another job trains there"):
            checkpoint.keep(store, net, tmp_path, every=1)
        other.kill()
    keeper = checkpoint.keep(store, net, tmp_path, every=1)
    with holding(tmp_path) as other:
        assert other.wait(300) == 1
    keeper.close()
    with holding(tmp_path) as other:
        assert other.poll() is None
        other.kill()


def test_two_jobs_do_not_have_one_second_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FREE_WITHIN_S", 0.3)
    net, store = mx.gluon.nn.Dense(1, in_units=1), kvstore.create("local")
    net.initialize()
    with holding(tmp_path / "copies") as other:
        with pytest.raises(ConfigError, match="/copies`: another job trains there"):
            checkpoint.keep(store, net, tmp_path / "run", every=1, to=str(tmp_path / "copies"))
        other.kill()
    (tmp_path / "file").touch()
    for place in ("copies", "file"):  # in the latter copies fail with a warning
        checkpoint.keep(store, net, tmp_path / "run", every=1, to=str(tmp_path / place)).close()


def test_a_worker_that_joined_the_running_job_has_no_part_in_checkpoints(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_JOINED", "1")
    monkeypatch.setenv("ODSGD_JOINED_AT", "7")
    net, store = mx.gluon.nn.Dense(1, in_units=1), kvstore.create("local")
    net.initialize()
    train_once(net, store)
    with contextlib.closing(checkpoint.keep(store, net, tmp_path, every=1)) as keeper:
        for _ in range(3):
            keeper.step()
    assert keeper.iteration == 10 and [path.name for path in tmp_path.iterdir()] == [disk.LOCK]


def test_the_workers_of_a_job_share_it_and_those_of_another_do_not(tmp_path: Path) -> None:
    with holding(tmp_path, "ab") as one, holding(tmp_path, "ab") as two, holding(tmp_path, "cd") as stranger:
        assert one.poll() is None and two.poll() is None
        assert stranger.wait(300) == 1 and stranger.stderr and "another job trains there" in stranger.stderr.read()
        for worker in (one, two):
            assert worker.stdin
            worker.stdin.close()
            assert worker.wait(300) == 0


def test_a_folder_is_flushed_when_a_file_is_removed_for_good(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: List[Tuple[Path, List[Path]]] = []
    monkeypatch.setattr(disk, "flush_folder", lambda folder: flushed.append((folder, sorted(folder.iterdir()))))
    for name in ("a", "b"):
        (tmp_path / name).touch()
    disk.remove_for_good(tmp_path / "a")
    disk.remove_for_good(tmp_path / "a")  # perhaps a process removed it that was killed before it flushed
    assert flushed == [(tmp_path, [tmp_path / "b"])] * 2
    disk.remove_for_good(tmp_path / "removed by another worker" / "a")


def test_each_worker_flushes_the_names_of_its_folders_before_a_checkpoint_can_count(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: List[Path] = []
    flush = disk.flush_folder
    monkeypatch.setattr(disk, "flush_folder", lambda folder: (flushed.append(folder), flush(folder)))

    def run(transport: Any) -> None:
        net = mx.gluon.nn.Dense(1, in_units=1, prefix="net_")
        net.initialize()
        store, root = kvstore.create("ssgd", transport=transport), tmp_path / str(transport.worker_rank) / "checkpoints"
        train_once(net, store)
        unfinished = UnfinishedCheckpoint(root, store, net, {}, 3)
        met[root] = list(flushed)
        unfinished.finish()

    met: Dict[Path, List[Path]] = {}
    Stage(2).run(run)
    assert len(met) == 2 and all({root, root.parent} <= set(before) for root, before in met.items())


def test_a_file_system_without_locks_or_flushed_folders_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(code: int) -> Any:
        def call(*given: Any) -> None:
            raise OSError(code, os.strerror(code))
        return call

    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    with disk.held(tmp_path):
        disk.make_folder(tmp_path / "checkpoints")
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        disk.flush_folder(tmp_path)
