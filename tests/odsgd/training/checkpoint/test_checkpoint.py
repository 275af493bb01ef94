"""Files of a checkpoint: complete or not there, checked when read, old ones removed."""
import errno
import json
import os
import re
import socket
import struct
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest

import kvstore
import odsgd
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, RoundTimeoutError
from kvstore.state.npz import read_npz
from kvstore.transports.in_process import Stage
from odsgd.training.checkpoint import checkpoint, manifests, resuming, weights
from odsgd.training.checkpoint.mirror import CheckpointMirror
from tests.jobs import take_step, train_once

Trained = Tuple[Any, Any, Callable[[], None]]


@pytest.fixture
def trained() -> Trained:
    """A store and a network after one step; `step` takes another."""
    net = mx.gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(3, in_units=4), mx.gluon.nn.BatchNorm(in_channels=3))
    net.initialize(mx.init.Xavier())
    store = kvstore.create("local")
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store)

    def step() -> None:
        take_step(trainer, lambda x: net(x).square().sum(), mx.nd.array(np.random.RandomState(0).rand(2, 4)), batch=2)
    step()
    return store, net, step


def save(root: Path, trained: Trained, steps: int = 1, keep: int = 3) -> Any:
    store, net, step = trained
    for _ in range(steps):
        step()
    checkpoint.UnfinishedCheckpoint(root, store, net, {"config": {}}, keep).finish()
    return root / str(store.iteration)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# --- writing ----------------------------------------------------------------------------------------------------------

def test_arrays_and_json_come_back_as_they_were(tmp_path: Path) -> None:
    arrays = {"global/w": np.arange(6, dtype=np.float32).reshape(2, 3), "0/w": np.zeros(0, np.float32)}
    meta = {"t": [1, None]}
    checkpoint.write_arrays(tmp_path / "a.npz", arrays, meta)
    read, read_meta = read_npz(tmp_path / "a.npz")
    assert read_meta == meta and read.keys() == arrays.keys()
    assert all(np.array_equal(read[name], arrays[name]) and read[name].dtype == arrays[name].dtype for name in arrays)


def test_weights_are_loaded_by_plain_gluon(tmp_path: Path, trained: Trained) -> None:
    folder = save(tmp_path, trained)
    again = mx.gluon.nn.HybridSequential()
    again.add(mx.gluon.nn.Dense(3), mx.gluon.nn.BatchNorm())
    again.load_parameters(str(folder / "weights.params"))
    inputs = mx.nd.ones((2, 4))
    assert np.array_equal(again(inputs).asnumpy(), trained[1](inputs).asnumpy())


def test_weights_that_a_full_disk_has_cut_short_do_not_count(tmp_path: Path, trained: Trained,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    copied, written = weights.copied(trained[1]), mx.nd.save

    def cut_short(path: str, arrays: Any) -> None:  # as MXNet does, without a word, where only the last bytes miss
        written(path, arrays)
        os.truncate(path, os.path.getsize(path) - 1)
    monkeypatch.setattr(mx.nd, "save", cut_short)
    with pytest.raises(OSError, match="No space left"):
        weights.write(tmp_path / "weights.params", copied)
    assert not list(tmp_path.iterdir())


def test_the_manifest_lists_every_file_with_size_and_digest(tmp_path: Path, trained: Trained) -> None:
    folder = save(tmp_path, trained)
    manifest = manifests.read_manifest(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*manifest["files"], "manifest.json"])
    assert {name: manifests.digest(folder / name) for name in manifest["files"]} == manifest["files"]
    assert manifest["iteration"] == 2 and manifest["num_workers"] == 1
    assert manifest["parameters"]["net_dense0_weight"] == {"shape": [3, 4], "dtype": "float32"}


@pytest.mark.parametrize("last_file", ["worker-0.npz", "weights.params", "servers.npz", "manifest.json"])
def test_a_checkpoint_that_could_not_be_finished_does_not_count(tmp_path: Path, trained: Trained, last_file: str,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, trained)
    replace = os.replace

    def fail(source: str, target: str) -> None:
        if os.path.basename(target) == last_file:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, trained)
    assert (tmp_path / "3").is_dir() and manifests.complete(tmp_path) == [2]
    monkeypatch.undo()
    checkpoint.UnfinishedCheckpoint(tmp_path, trained[0], trained[1], {}, 3).finish()
    assert manifests.complete(tmp_path) == [2, 3] and not list((tmp_path / "3").glob("*.tmp"))


def test_a_checkpoint_written_again_does_not_count_meanwhile(tmp_path: Path, trained: Trained,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, trained)
    monkeypatch.setattr(weights, "copied", lambda net: pytest.fail("stop here"))
    with pytest.raises(pytest.fail.Exception):
        save(tmp_path, trained, steps=0)
    assert not (folder / "manifest.json").exists()


def test_the_newest_are_kept_by_number_and_what_was_left_unfinished_goes(tmp_path: Path, trained: Trained) -> None:
    for iteration in ("1", "notes"):
        (tmp_path / iteration).mkdir()
    for _ in range(10):
        save(tmp_path, trained, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "11", "notes"]


def test_nothing_but_a_checkpoints_own_files_is_removed(tmp_path: Path) -> None:
    for name in ("1/result.csv", "1/worker-one.npz", "2/manifest.json", "2/notes/thesis.tex", "3/worker-12.npz.tmp",
                 "3/weights.params", "\u00b2/a", "9/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "4").touch()
    checkpoint._retire(tmp_path, [], 9)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "1/result.csv", "1/worker-one.npz", "2/notes/thesis.tex", "4", "9/a", "\u00b2/a"]
    assert not (tmp_path / "3").exists()


def test_a_slow_worker_does_not_remove_what_a_faster_one_has_begun(tmp_path: Path) -> None:
    for name in ("4", "6", "8"):
        (tmp_path / name).mkdir()
    checkpoint._retire(tmp_path, [6], 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "8"]


def test_a_half_removed_folder_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("4", "6"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    monkeypatch.setattr(manifests, "FILES", re.compile("none"))  # killed before the other files
    checkpoint._retire(tmp_path, [6], 6)
    assert manifests.complete(tmp_path) == [6]


def test_the_arrays_are_those_of_the_moment_however_long_the_writing_takes(tmp_path: Path, trained: Trained) -> None:
    store, net, step = trained
    unfinished = checkpoint.UnfinishedCheckpoint(tmp_path / "draft", store, net, {}, 3)
    checkpoint.UnfinishedCheckpoint(tmp_path / "saved", store, net, {}, 3).finish()
    for _ in range(3):
        step()
    assert manifests.complete(tmp_path / "draft") == []
    unfinished.finish()
    for name in ("worker-0.npz", "servers.npz"):
        one, other = (read_npz(tmp_path / kind / "1" / name) for kind in ("draft", "saved"))
        assert one[1] == other[1] and all(np.array_equal(one[0][key], other[0][key]) for key in one[0])
    one, other = (mx.nd.load(str(tmp_path / kind / "1" / "weights.params")) for kind in ("draft", "saved"))
    assert all(np.array_equal(one[key].asnumpy(), other[key].asnumpy()) for key in one)


def test_a_disk_that_takes_nothing_is_not_waited_for_longer_than_for_another_process(tmp_path: Path,
                                                                                          trained: Trained) -> None:
    trained[0].session.timeout_s = 0.2
    disk = tmp_path / "1" / "worker-0.npz.tmp"
    disk.parent.mkdir()
    os.mkfifo(disk)  # which waits for a reader
    try:
        with pytest.raises(RoundTimeoutError, match=f"checkpoint 1 was not written to `{tmp_path}/1` within 0.2 s"):
            save(tmp_path, trained, steps=0)
    finally:
        os.close(os.open(disk, os.O_RDONLY | os.O_NONBLOCK))


# --- reading ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["worker-0.npz", "weights.params", "servers.npz"])
def test_a_damaged_file_is_named_with_what_was_expected(tmp_path: Path, trained: Trained, name: str) -> None:
    folder = save(tmp_path, trained)
    manifest = manifests.read_manifest(folder)
    expected = manifest["files"][name]
    damage(folder / name)
    with pytest.raises(ConfigError) as caught:
        resuming.verify_mine(folder, manifest, worker_rank=0)
    got = manifests.digest(folder / name)
    assert f"`{folder / name}`: expected SHA-256 {expected['sha256']}, got SHA-256 {got['sha256']}" in str(caught.value)
    os.truncate(folder / name, 7)
    with pytest.raises(ConfigError, match=f"expected {expected['nbytes']} bytes, got 7 bytes") as caught:
        resuming.verify_mine(folder, manifest, worker_rank=0)
    os.remove(folder / name)
    with pytest.raises(ConfigError, match=f"no `{folder / name}`, a part of checkpoint 2"):
        resuming.verify_mine(folder, manifest, worker_rank=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text, said", [("{", "JSONDecodeError"), ("[]", "TypeError"), ("{}", "KeyError"),
                                        ('{"schema": 99}', "in schema 99; odsgd .* reads schema 4")])
def test_a_manifest_that_is_none_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        manifests.read_manifest(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("key, value", [("course", ["1", 0, 0]), ("course", [1, 0]), ("since", "1"), ("num_workers", 0),
                                        ("untold", {"epoch": 1}), ("versions", "0.4.0")])
def test_a_manifest_with_something_else_in_it_is_one_line(tmp_path: Path, trained: Trained, key: str,
                                                          value: object) -> None:
    folder = save(tmp_path, trained)
    manifests.write_manifest(folder, {**manifests.read_manifest(folder), key: value})
    with pytest.raises(manifests.DamagedError, match=f"`{key}` is not what a manifest has there; remove `{folder}`"):
        manifests.read_manifest(folder)


@pytest.mark.parametrize("schema, writer, remedy", [
    (99, "0.9.1", "Resume it with odsgd 0.9.1, or begin a new run in another folder"),
    (3, "0.3.0", "reads schema 4. Begin a new run in another folder")])  # 0.3.0 was never released
def test_a_checkpoint_of_another_version_is_refused_with_a_remedy_that_exists(tmp_path: Path, schema: int, writer: str,
                                                                              remedy: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": schema, "versions": {"odsgd": writer}}))
    with pytest.raises(ConfigError) as caught:
        manifests.read_manifest(tmp_path)
    said = str(caught.value)
    assert said.startswith(f"`{tmp_path}/manifest.json` was written by odsgd {writer}, in schema {schema}; odsgd ")
    assert said.endswith(remedy)


def test_another_versions_checkpoint_is_told(tmp_path: Path, trained: Trained) -> None:
    folder = save(tmp_path, trained)
    manifest = manifests.read_manifest(folder)
    manifest["versions"]["odsgd"] = "0.3.9"
    manifests.write_manifest(folder, manifest)
    told = f"odsgd 0.3.9 wrote checkpoint 2, and this is odsgd {odsgd.__version__}"
    _, warnings = resuming.resume(tmp_path, kvstore.create("local"), trained[1], lambda saved: None)
    assert warnings == [f"{told}; going on from checkpoint 2"]
    with pytest.raises(ConfigError, match=f"4 now\\. Resume with the same.*; {told}$"):
        resuming.resume(tmp_path, kvstore.create("local"), trained[1],
                        lambda saved: manifests.check_facts(saved, {"num_workers": 4}, []))


@pytest.mark.parametrize("name", ["worker-0.npz", "servers.npz", "manifest.json"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path: Path, trained: Trained, name: str) -> None:
    for _ in range(3):
        save(tmp_path, trained)
    damage(tmp_path / "4" / name) if name != "manifest.json" else (tmp_path / "4" / name).write_text("{")
    (tmp_path / "3" / "weights.params").unlink()
    store = kvstore.create("local")
    manifest, warnings = resuming.resume(tmp_path, store, trained[1], lambda manifest: None)
    assert manifest["iteration"] == 2
    assert [line.partition(" (")[0] for line in warnings] == ["checkpoint 4 is not whole", "checkpoint 3 is not whole"]
    assert all(line.endswith("; going on from checkpoint 2") for line in warnings)


def test_a_checkpoint_that_cannot_be_read_gives_way_to_the_one_before_it(tmp_path: Path, trained: Trained,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        save(tmp_path, trained)

    def opened(path: Any, *args: Any, **more: Any) -> Any:
        if path == tmp_path / "3" / "worker-0.npz":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open(path, *args, **more)
    monkeypatch.setattr(manifests, "open", opened, raising=False)
    manifest, (warning,) = resuming.resume(tmp_path, kvstore.create("local"), trained[1], lambda manifest: None)
    assert manifest["iteration"] == 2 and warning.startswith("checkpoint 3 is not whole (cannot read")


def test_without_a_whole_checkpoint_the_newest_ones_damage_is_told(tmp_path: Path, trained: Trained,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    damage(save(tmp_path, trained) / "servers.npz")
    with pytest.raises(ConfigError, match=r"^`\S+2/servers.npz`: expected SHA-256"):
        resuming.resume(tmp_path, kvstore.create("local"), trained[1], lambda manifest: None)
    monkeypatch.setenv("ODSGD_SAVED", "40")
    with pytest.raises(ConfigError, match=r"^`\S+2/servers.npz`: .*; the job has saved checkpoint 40"):
        resuming.resume(tmp_path, kvstore.create("local"), trained[1], lambda manifest: None,
                        CheckpointMirror(str(tmp_path / "second")))


def test_what_is_older_than_what_was_saved_is_gone_on_from_with_a_warning(tmp_path: Path, trained: Trained,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, trained)
    monkeypatch.setenv("ODSGD_SAVED", "40")
    manifest, (warning,) = resuming.resume(tmp_path, kvstore.create("local"), trained[1], lambda manifest: None,
                                           CheckpointMirror(str(tmp_path / "second")))
    assert manifest["iteration"] == 2 and warning.endswith("is 2; going on from checkpoint 2")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", w=np.array([{}], dtype=object), meta=np.frombuffer(b"{}", np.uint8))
    with pytest.raises(ConfigError, match="allow_pickle=False"):
        read_npz(tmp_path / "evil.npz")


def test_another_model_is_refused_with_the_difference(tmp_path: Path, trained: Trained) -> None:
    manifest = manifests.read_manifest(save(tmp_path, trained))
    manifests.check_model(manifest, trained[1])
    other = mx.gluon.nn.Dense(5, in_units=4, prefix="net_dense0_")
    other.initialize()
    with pytest.raises(ConfigError) as caught:
        manifests.check_model(manifest, other)
    assert "net_dense0_weight: 3x4 float32 saved, 5x4 float32 now" in str(caught.value)
    assert "net_batchnorm0_gamma: 3 float32 saved, none now; and" not in str(caught.value)
    assert "net_batchnorm0_gamma: 3 float32 saved, none now" in str(caught.value)


def test_other_settings_are_refused_by_name() -> None:
    manifest = json.loads('{"iteration": 7, "num_workers": 4, "batches_per_epoch": 10}')
    manifests.check_facts(manifest, {"num_workers": 4, "batches_per_epoch": 10}, [])
    with pytest.raises(ConfigError, match=r"7 .*: lr: 1 in the saved run, 2 now; num_workers: 4 in the saved run, 3"):
        manifests.check_facts(manifest, {"num_workers": 3}, ["lr: 1 in the saved run, 2 now"])


def saved_before(tmp_path: Path, *iterations: int) -> List[int]:
    """Manifests of these checkpoints; all that are found."""
    for iteration in iterations:
        (tmp_path / str(iteration)).mkdir()
        (tmp_path / str(iteration) / manifests.MANIFEST).touch()
    return resuming.complete(tmp_path, None)[0]


def test_worker_0_without_the_checkpoint_that_its_job_has_saved_does_not_begin_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_SAVED", "40")
    for iterations, found in ((), "there is none in"), ((20,), "the newest in"):
        with pytest.raises(ConfigError) as caught:
            resuming.check_saved(tmp_path, saved_before(tmp_path, *iterations), None)
        told = str(caught.value)
        assert told.startswith(f"the job has saved checkpoint 40, and {found} `{tmp_path}` on host ")
        assert socket.gethostname() in told and "--checkpoint-to" in told and "\n" not in told
    assert "is 20, where worker 0 runs now" in told
    assert resuming.check_saved(tmp_path, saved_before(tmp_path, 40), None) == []


def test_what_was_brought_back_may_be_older_than_what_was_saved(tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_SAVED", "40")
    second = CheckpointMirror(str(tmp_path / "second"))
    with pytest.raises(ConfigError, match="there is none in"):
        resuming.check_saved(tmp_path, [], second)
    warning, = resuming.check_saved(tmp_path, saved_before(tmp_path, 20), second)
    assert "checkpoint 40, and the newest in" in warning and warning.endswith("is 20")


def arrays() -> Dict[str, np.ndarray]:
    draw = np.random.RandomState(0)
    return {f"{dtype} {axes}": (draw.rand(*range(2, 2 + axes)) * 100).astype(dtype)
            for dtype in weights.DTYPES if dtype != "bool" for axes in (1, 2, 4)}


def test_what_mxnet_has_written_is_read_as_mxnet_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.params"
    mx.nd.save(str(path), {name: mx.nd.array(array, dtype=array.dtype) for name, array in arrays().items()})
    found, expected = weights.read(path), mx.nd.load(str(path))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array.asnumpy())


def test_arrays_of_mx_np_are_read_scalars_and_truths_too(tmp_path: Path) -> None:
    path = tmp_path / "a.params"
    with mx.util.np_shape(True), mx.util.np_array(True):
        mx.npx.save(str(path), {"scalar": mx.np.array(3.5), "truths": mx.np.array([True, False], dtype="bool"),
                                "empty": mx.np.zeros((0, 3))})
    found = weights.read(path)
    assert found["scalar"] == np.float32(3.5) and found["scalar"].shape == ()
    assert found["truths"].tolist() == [True, False] and found["empty"].shape == (0, 3)


def sparse() -> Any:
    return {"w": mx.nd.ones((4, 2)).tostype("row_sparse")}


@pytest.mark.parametrize("make, said", [
    (lambda path: path.write_bytes(b""), "empty"), (lambda path: path.write_bytes(b"x" * 40), "it begins otherwise"),
    (lambda path: path.mkdir(), "Is a directory"), (lambda path: None, "No such file"),
    (lambda path: mx.nd.save(str(path), sparse()), "sparse"),
    (lambda path: mx.nd.save(str(path), [mx.nd.ones(2)]), "1 arrays and 0 names"),
    (lambda path: path.write_bytes(struct.pack("<QQQ", weights.LIST, 0, 1 << 27)), "134217728 parts announced"),
])
def test_another_file_is_told_in_one_line(tmp_path: Path, make: Any, said: str) -> None:
    path = tmp_path / "a.params"
    make(path)
    with pytest.raises(ConfigError) as caught:
        weights.read(path)
    assert str(caught.value).startswith(f"`{path}`: expected a file of named weights") and said in str(caught.value)


@pytest.mark.parametrize("method, then", [("asgd", ["exporting", "sum"]), ("ssgd", ["sum", "exporting"])])
def test_workers_of_an_asynchronous_job_meet_when_the_servers_have_laid_their_state_aside(
        tmp_path: Path, method: str, then: List[str]) -> None:
    """Else the next push of one that is fast would be in it, and come again after a resume."""
    def run(transport: Any) -> List[str]:
        net = mx.gluon.nn.Dense(1, in_units=1, prefix="net_")
        net.initialize()
        store: Any = kvstore.create(method, transport=transport, timeout_s=60.0)
        train_once(net, store)
        calls: List[str] = []

        def noting(name: str, call: Any) -> Any:
            return lambda *arguments: [calls.append(name), call(*arguments)][1]

        store.exporting = noting("exporting", store.exporting)
        transport.total = noting("sum", transport.total)
        unfinished = checkpoint.UnfinishedCheckpoint(tmp_path / "run", store, net, {}, 3)
        began, _ = list(calls), unfinished.finish()
        return began

    assert Stage(2, timeout_s=60.0).run(run)[0][-2:] == then


def test_a_checkpoint_is_whole_without_a_worker_that_was_not_there_at_the_start(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = tmp_path / "lost"
    monkeypatch.setenv("ODSGD_LOST", str(lost))

    def run(transport: Any) -> None:
        if transport.worker_rank == 1:
            return
        net = mx.gluon.nn.Dense(1, in_units=1, prefix="net_")
        net.initialize()
        store = kvstore.create("asgd", transport=transport, timeout_s=8.0)
        transport.total = lambda array: np.array(array, np.float32)
        there = checkpoint.CheckpointWriter(tmp_path / "lost later", store, net, 1, print, None)
        lost.write_text("1\n")  # from the start with --spare 1
        spare = checkpoint.CheckpointWriter(tmp_path / "spare", store, net, 1, print, None)
        train_once(net, store)
        for writer in (there, spare):
            writer.begin({})
            writer.close()
        assert (there.whole, spare.whole) == (0, 1)

    Stage(2, timeout_s=8.0).run(run)
    assert manifests.read_manifest(tmp_path / "spare" / "1")["spare"] == [1]
