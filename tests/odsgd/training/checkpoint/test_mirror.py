"""A second place for checkpoints: a folder, and one behind a stand-in for ssh."""
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

import kvstore
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from kvstore.transports.in_process import Stage
from odsgd.training.checkpoint import checkpoint, manifests, resuming
from odsgd.training.checkpoint.mirror import CheckpointMirror, MirrorError, RemoteMirror, mirror_at
from tests.integration.launching import executable, stand_in_ssh
from tests.jobs import take_step, train_once


@pytest.fixture(params=["folder", "host"])
def place(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ODSGD_SSH", stand_in_ssh(tmp_path))
    monkeypatch.setenv("LAUNCH_TEST_MARK", "none")
    there = tmp_path / "it's there"
    return str(there) if request.param == "folder" else f"me@backup:{there}"


def made(place: str) -> CheckpointMirror:
    found = mirror_at(place)
    assert found is not None and isinstance(found, RemoteMirror) == (":" in place)
    return found


def test_files_go_there_and_come_back_and_old_ones_go(place: str, tmp_path: Path) -> None:
    second, file = made(place), tmp_path / "manifest.json"
    assert second.holds("manifest.json") == []
    for iteration in (8, 20, 100):
        file.write_text(f"number {iteration}")
        second.put(file, iteration)
    assert second.holds("manifest.json") == [8, 20, 100] and second.holds("other") == []
    second.remove(8)
    assert second.holds("manifest.json") == [20, 100] and not (tmp_path / "it's there" / "8").exists()
    second.get(20, "manifest.json", tmp_path / "back")
    assert (tmp_path / "back").read_text() == "number 20"
    assert not list(tmp_path.rglob("*.tmp"))


def test_files_there_that_are_not_a_checkpoints_stay(place: str, tmp_path: Path) -> None:
    second, there = made(place), tmp_path / "it's there"
    for name in ("1/thesis.tex", "1/my worker-0.npz", "1/servers.npz.tmp", "2/manifest.json", "2/worker-10.npz"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).touch()
    for iteration in (1, 2, 3):
        second.remove(iteration)
    assert sorted(path.name for path in there.rglob("*")) == ["1", "my worker-0.npz", "thesis.tex"]


def test_what_is_not_copied_is_told_in_one_line_and_leaves_nothing(place: str, tmp_path: Path) -> None:
    second = made(place)
    with pytest.raises(MirrorError) as caught:
        second.get(7, "manifest.json", tmp_path / "back")
    assert "\n" not in str(caught.value) and "No such file" in str(caught.value)
    assert not (tmp_path / "back").exists() and not list(tmp_path.rglob("*.tmp"))
    (tmp_path / "it's there").write_text("a file where a folder should be")
    with pytest.raises(MirrorError, match="it's there"):
        second.put(Path(__file__), 7)


def trained(store: Any = None) -> Tuple[Any, Any]:
    """A network, and the store of its first step."""
    net, store = mx.gluon.nn.Dense(1, in_units=1, prefix="net_"), store or kvstore.create("local")
    net.initialize()
    train_once(net, store)
    return net, store


def test_a_run_goes_on_from_the_second_place_when_its_disk_is_lost(place: str, tmp_path: Path) -> None:
    net = mx.gluon.nn.Dense(3, in_units=4, prefix="net_")
    net.initialize(mx.init.One())
    store = kvstore.create("local")
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore=store)
    second, unfinished_part = made(place), tmp_path / manifests.SERVERS
    unfinished_part.touch()
    second.put(unfinished_part, 0)  # of a checkpoint that was never complete
    second.put(unfinished_part, 9)
    for _ in range(5):
        take_step(trainer, lambda x: net(x).sum(), mx.nd.ones((2, 4)), batch=2)
        unfinished = checkpoint.UnfinishedCheckpoint(tmp_path / "run", store, net, {"config": {}}, 3, second=second)
        assert unfinished.finish() == []
    assert second.failures(60.0) == []
    assert second.holds(manifests.MANIFEST) == manifests.complete(tmp_path / "run") == [3, 4, 5]
    assert second.holds() == [3, 4, 5, 9]
    saved = (tmp_path / "run" / "5" / manifests.WEIGHTS).read_bytes()
    shutil.rmtree(tmp_path / "run")

    def resume() -> Tuple[int, List[str]]:
        manifest, warnings = resuming.resume(tmp_path / "run", kvstore.create("local"), net, lambda manifest: None,
                                             second=second)
        return manifest["iteration"], [line.partition(" (")[0] for line in warnings]
    assert resume() == (5, [])
    assert (tmp_path / "run" / "5" / manifests.WEIGHTS).read_bytes() == saved
    (tmp_path / "run" / "5" / manifests.SERVERS).write_text("damaged")
    (tmp_path / "it's there" / "4" / "worker-0.npz").unlink()
    assert resume() == (3, ["checkpoint 5 is not whole", "checkpoint 4 is not whole"])


def test_a_checkpoint_that_is_written_once_more_counts_nowhere_meanwhile(place: str, tmp_path: Path) -> None:
    (net, store), second = trained(), made(place)

    def begin() -> checkpoint.UnfinishedCheckpoint:
        return checkpoint.UnfinishedCheckpoint(tmp_path / "run", store, net, {"config": {}}, 3, second=second)

    assert begin().finish() == [] and second.failures(60.0) == []
    assert second.holds(manifests.MANIFEST) == manifests.complete(tmp_path / "run") == [1]
    again = begin()
    assert second.holds(manifests.MANIFEST) == manifests.complete(tmp_path / "run") == []
    assert again.finish() == [] and second.failures(60.0) == []
    assert second.holds(manifests.MANIFEST) == manifests.complete(tmp_path / "run") == [1]


@pytest.mark.parametrize("why", ["not done within 4 s", "ssh ended"])
def test_no_worker_copies_where_an_earlier_one_of_this_number_is_not_removed(tmp_path: Path, why: str) -> None:
    there, go = tmp_path / "there", threading.Event()

    class Obstinate(CheckpointMirror):
        def remove(self, iteration: int) -> None:
            self.wait()
            super().remove(iteration)

        def uncount(self, iteration: int) -> None:
            self.wait()
            super().uncount(iteration)

        def wait(self) -> None:
            if why == "ssh ended":
                raise MirrorError(why)
            assert go.wait(60)

    def files() -> Dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (there / "1").iterdir()}

    def run(transport: Any) -> None:
        net, store = trained(kvstore.create("ssgd", transport=transport, timeout_s=8.0))
        for kind in (CheckpointMirror, Obstinate):
            second = kind(str(there))
            writer = checkpoint.CheckpointWriter(tmp_path / "run", store, net, 3, told.append, second)
            writer.begin({})
            writer.finish()
            assert second.failures(60.0) == []
            store.barrier()
            saved.update(saved or files())
        go.set()
        second.later(lambda: None).result(60)

    told: List[str] = []
    saved: Dict[str, int] = {}
    Stage(2, timeout_s=8.0).run(run)
    if why != "ssh ended":
        del saved[manifests.MANIFEST]
    assert files() == saved and "worker-1.npz" in saved
    assert told == [f"checkpoint 1 is not in the second place: an earlier one could not be removed there: {why}"] * 2


def test_a_copy_that_fails_costs_a_warning(tmp_path: Path) -> None:
    net, store = trained()
    (tmp_path / "there").write_text("a file where a folder should be")
    warnings = checkpoint.UnfinishedCheckpoint(tmp_path / "run", store, net, {"config": {}}, 3,
                                               second=CheckpointMirror(str(tmp_path / "there"))).finish()
    assert len(warnings) == 1 and "checkpoint 1 is not in the second place: worker 0 could not copy" in warnings[0]
    assert manifests.complete(tmp_path / "run") == [1]


def test_a_second_place_whose_disk_went_away_is_told_and_not_made_anew(tmp_path: Path) -> None:
    (net, store), there = trained(), tmp_path / "there"
    second = CheckpointMirror(str(there))
    unfinished = checkpoint.UnfinishedCheckpoint(tmp_path / "run", store, net, {"config": {}}, 3, second=second)
    while not (second.holds(manifests.SERVERS) and second.holds(manifests.WEIGHTS)):
        unfinished.advance(store.iteration)
    second.later(lambda: None).result(60)  # behind all copies, the last of which may still make its name durable
    there.rename(tmp_path / "unmounted")
    there.mkdir()
    assert unfinished.finish() == []
    [told] = second.failures(60)
    assert "checkpoint 1 does not count there, since worker-0.npz, " in told and list(there.glob("*/*")) == []
    shutil.rmtree(there)
    [told] = checkpoint.UnfinishedCheckpoint(tmp_path / "run", store, net, {"config": {}}, 3, second=second).finish()
    assert "checkpoint 1 is not in the second place: worker 0 could not copy" in told and not there.exists()


def test_a_slow_copy_costs_a_warning_while_the_others_still_wait(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Of worker 1's, by an ssh that waits for a file."""
    monkeypatch.setenv("ODSGD_SSH", executable(tmp_path / "ssh", f"#!/bin/sh\nwhile [ ! -e {tmp_path}/go ]; do "
                                               "sleep 0.1; done\n"))

    def run(transport: Any) -> List[str]:
        net, store = trained(kvstore.create("ssgd", transport=transport, timeout_s=8.0))
        second = mirror_at("me@backup:/data" if transport.worker_rank else str(tmp_path / "there"))
        return checkpoint.UnfinishedCheckpoint(tmp_path / "run", store, net, {}, 3, second=second).finish()

    try:
        told = Stage(2, timeout_s=8.0).run(run)
    finally:
        (tmp_path / "go").touch()
    line = "checkpoint 1 is not in the second place: worker 1 could not copy its part: not done within 4 s"
    assert told == [[line]] * 2
    assert manifests.complete(tmp_path / "run") == [1]


def test_a_copy_that_is_late_counts_when_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "copies_within_s", lambda store: 0.0)
    go, put = threading.Event(), CheckpointMirror.put
    told: List[str] = []

    def slow(*arguments: Any) -> None:
        go.wait(300)
        put(*arguments)

    monkeypatch.setattr(CheckpointMirror, "put", slow)
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    store, second = kvstore.create("local"), CheckpointMirror(str(tmp_path / "there"))
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    writer = checkpoint.CheckpointWriter(tmp_path / "run", store, net, 3, told.append, second)
    for number in (1, 2):
        take_step(trainer, net, mx.nd.ones((1, 1)))
        writer.begin({"config": {}})
        if number == 1:
            writer.finish()
            assert "checkpoint 1 is not in the second place" in told[0]
            go.set()
            second.later(lambda: None).result(300)  # behind all copies
    monkeypatch.setattr(checkpoint, "copies_within_s", lambda store: 300.0)
    writer.close()
    assert second.holds(manifests.MANIFEST) == [1, 2] and len(told) == 1


@pytest.mark.parametrize("unfinished", [False, True])
def test_what_can_be_resumed_outlasts_the_loss_of_worker_0_and_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                        unfinished: bool) -> None:
    """Each worker has a disk of its own. `unfinished`: the loss falls into the next checkpoint."""
    monkeypatch.setenv("ODSGD_LOST", str(tmp_path / "lost"))

    def run(transport: Any) -> None:
        net = mx.gluon.nn.Dense(1, in_units=1, prefix="net_")
        net.initialize()
        store = kvstore.create("asgd", transport=transport, timeout_s=8.0)
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        writer = checkpoint.CheckpointWriter(tmp_path / f"host {store.rank}", store, net, 1, print,
                                             CheckpointMirror(str(tmp_path / "there")))

        def save() -> None:
            take_step(trainer, net, mx.nd.ones((1, 1)))
            writer.begin({})

        save()
        writer.close()
        if unfinished:
            save()
        store.barrier()
        if store.rank == 0:
            return
        (tmp_path / "lost").write_text("0\n")
        transport.total = lambda array: np.array(array, np.float32)
        for _ in range(2):
            save()
        writer.close()

    Stage(2, timeout_s=8.0).run(run)
    assert manifests.complete(tmp_path / "host 0") == [1] == manifests.complete(tmp_path / "there")[:1]
    assert manifests.is_whole(manifests.read_manifest(tmp_path / "there" / "1"))
    assert (tmp_path / "host 1" / "1" / "worker-1.npz").exists()


def test_a_copy_stays_while_the_checkpoint_after_it_has_none(tmp_path: Path) -> None:
    second, file = CheckpointMirror(str(tmp_path)), tmp_path / manifests.MANIFEST
    file.touch()
    for iteration in (1, 2, 4):
        second.put(file, iteration)
    checkpoint._retire_copies(second, [3, 4], iteration=4, whole=3, keep=1)
    assert second.holds() == [2, 4]
    checkpoint._retire_copies(second, [3, 4], iteration=4, whole=4, keep=2)
    assert second.holds() == [2, 4]  # 4 may be passed over at a restart, and written again
    checkpoint._retire_copies(second, [3, 4], iteration=4, whole=4, keep=1)
    assert second.holds() == [4]


def test_a_manifest_that_is_not_copied_is_told_once(place: str, tmp_path: Path) -> None:
    second = made(place)
    second.aside(lambda: second.put(Path(__file__), 7))
    second.aside(lambda: second.get(8, "manifest.json", tmp_path / "back"))
    failures = second.failures(60.0)
    assert len(failures) == 1 and failures[0].startswith("the second place of checkpoints: ")
    assert "No such file" in failures[0] and second.failures() == []


def test_a_copy_that_hangs_does_not_keep_a_process_from_its_end(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """By an ssh that waits for a file."""
    monkeypatch.setenv("ODSGD_SSH", executable(tmp_path / "ssh", f"#!/bin/sh\nwhile [ ! -e {tmp_path}/go ]; do "
                                               "sleep 0.1; done\n"))
    script = ("import pathlib, sys; from odsgd.training.checkpoint.mirror import mirror_at\n"
              "second = mirror_at('me@backup:/data')\n"
              "second.aside(lambda: second.put(pathlib.Path(sys.argv[1]), 7)); print(*second.failures(0.1))")
    try:
        ran = subprocess.run([sys.executable, "-c", script, __file__], stdout=subprocess.PIPE, timeout=300, check=True)
    finally:
        (tmp_path / "go").touch()
    assert ran.stdout == b"the second place of checkpoints: not done within 0.1 s\n"


@pytest.mark.parametrize("secure", [True, False])
def test_in_a_secure_job_weights_go_to_hosts_alone_that_ssh_knows(secure: bool, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_SSH", executable(tmp_path / "ssh", f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n'))
    monkeypatch.setenv("ODSGD_SECURE", "1" if secure else "")
    assert made("me@backup:/data").holds() == []
    asked = (tmp_path / "asked").read_text()
    assert "me@backup ls -d /data/" in asked and ("StrictHostKeyChecking=accept-new" in asked) is not secure
    assert made("me@backup:~/data").holds() == []  # ssh begins at home
    assert "me@backup ls -d data/" in (tmp_path / "asked").read_text()
    for home in ("me@backup:", "me@backup:~"):
        assert made(home).holds() == []
        assert "me@backup ls -d ./" in (tmp_path / "asked").read_text()


def test_ssh_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_SSH", "no-such-ssh")
    with pytest.raises(ConfigError, match="checkpoint_to: no-such-ssh is not a program"):
        mirror_at("backup:/data")
    assert mirror_at(None) is None


def test_a_second_place_that_is_down_costs_a_warning_where_the_last_checkpoint_is_here(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_SSH", executable(tmp_path / "ssh", "#!/bin/sh\necho No route to host >&2; exit 255\n"))
    (net, store), second = trained(), mirror_at("backup:/data")

    def resume() -> Tuple[Dict[str, Any], List[str]]:
        return resuming.resume(tmp_path / "run", kvstore.create("local"), net, lambda manifest: None, second)

    with pytest.raises(MirrorError, match="No route to host"):
        resume()
    checkpoint.UnfinishedCheckpoint(tmp_path / "run", store, net, {"config": {}}, 3).finish()
    monkeypatch.setenv("ODSGD_SAVED", "1")
    manifest, warnings = resume()
    assert manifest["iteration"] == 1 and warnings == [
        "the second place of checkpoints: backup:/data: ssh ended with exit code 255: No route to host; going on from "
        "checkpoint 1"]
    monkeypatch.setenv("ODSGD_SAVED", "2")
    with pytest.raises(MirrorError, match="No route to host"):
        resume()


def test_a_copy_that_cannot_be_brought_gives_way_to_the_checkpoint_before(place: str, tmp_path: Path) -> None:
    net = mx.gluon.nn.Dense(1, in_units=1, prefix="net_")
    net.initialize()
    store, second = kvstore.create("local"), made(place)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
    for _ in range(2):
        take_step(trainer, net, mx.nd.ones((1, 1)))
        assert checkpoint.UnfinishedCheckpoint(tmp_path / "run", store, net, {"config": {}}, 3,
                                               second=second).finish() == []
    assert second.failures(60.0) == []
    shutil.rmtree(tmp_path / "run" / "2")
    (tmp_path / "it's there" / "2" / manifests.SERVERS).unlink()
    manifest, warnings = resuming.resume(tmp_path / "run", kvstore.create("local"), net, lambda manifest: None,
                                         second=second)
    assert manifest["iteration"] == 1 and "checkpoint 2 is not whole" in warnings[0]
