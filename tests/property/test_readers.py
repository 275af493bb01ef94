"""Whatever a reader is given: a value, or one line of at most 400 characters, within 2 s of processor time and 200 MB.

`nasty.py` makes the inputs.
"""
import atexit
import contextlib
import gzip
import json
import math
import os
import resource
import shutil
import socket
import struct
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Callable, Dict, List, Optional, Tuple, Type

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, ProtocolError
from kvstore.job.commands import Signer, Verifier
from kvstore.messages import codecs
from odsgd.config.files import read_cluster
from odsgd.config.launch import LaunchOptions, Workers, parse_resources
from odsgd.config.train import TrainConfig
from odsgd.launch import command, messages
from odsgd.launch.connections import handshake, pmi
from odsgd.launch.hostfile import read_hostfile
from odsgd.launch.hosts import kubernetes
from odsgd.launch.messages import Channel
from odsgd.launch.plan import Job
from odsgd.launch.policy.failures import Member
from odsgd.launch.policy.judge import Judge
from odsgd.launch.view import overview, watch
from odsgd.training.checkpoint import checkpoint, manifests, resuming, weights
from odsgd.training.data import datasets, records
from scripts.maintain import fuzz
from scripts.reproduction import results
from tests.property import nasty
from tests.property.nasty import (
    PIECES,
    anything,
    binary,
    both,
    chosen,
    fed,
    json_of,
    mutated,
    octets,
    one_of,
    text,
    texts,
    words,
)

MOST_S, MOST_MB, MOST_CHARACTERS = 2.0, 200, 400
MEMORY = "/dev/shm"
"""Where a file is overwritten in microseconds; on a disk that takes milliseconds."""


def holds(reader: Callable[[], Any], *also: Type[Exception]) -> Optional[str]:
    """The property; returns the line of an error."""
    _forget_peak()
    began, size_mb = time.process_time(), _peak_mb()
    line = None
    expected: Tuple[Type[Exception], ...] = (ConfigError, ProtocolError, *also)
    try:
        reader()
    except expected as error:
        line = str(error)
        assert len(line) <= MOST_CHARACTERS, line
        assert "\n" not in line and line.isprintable(), repr(line)
        assert line.strip(), "an error without a word"
    assert time.process_time() - began < MOST_S
    assert _peak_mb() - size_mb < MOST_MB
    return line


def _forget_peak() -> None:
    """The peak of this process's memory is then what it has now, so that no earlier one hides the next."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


FOLDER = Path(tempfile.mkdtemp(dir=MEMORY if os.path.isdir(MEMORY) else None))
atexit.register(shutil.rmtree, FOLDER)


def written(name: str, content: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(content)
    return path


CONFIG = TrainConfig(kvstore="odsgd", dataset="synthetic", lr_local=0.5, warmup="2epochs",
                     optimizer_params={"clip_gradient": 5}).to_yaml()
BILLION = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi"))


@fed(texts(CONFIG), b"lr: !!int x", b"seed: 0x_", b"lr: 2001-99-99", BILLION.encode(), b"lr: " + b"[" * 100000,
     b"lr: " + b"9" * 100000, b"seed: " + b"1:" * 100000 + b"1", b"lr: " + b"x" * 10 ** 7,
     b"data_dir: \"a\\0b\"\ndataset: mnist", b"\xef\xbb\xbflr: 0.1", b"optimizer_params: {a: 2001-01-01}")
def test_a_configuration_in_yaml(content: bytes) -> None:
    if b"method" in content:  # such a file is run, as asked
        return
    path = written("config.yaml", content)
    holds(lambda: TrainConfig.from_flags(["--config", str(path)]).to_yaml())


CLUSTER = """workers: 3
servers: 2
compute: {iteration: 0.1s, forward: 0.3, layers: {a: [1ms, 2ms]}, draws: lognormal:0.1, speeds: {2: 0.5}}
links: {goodput: 1gbit, latency: 50us}
hosts: {server1: {goodput: 10gbit}}
racks: {hosts: 2}
worker: {stores: {easgd: 1ms}}
codecs: {float16: 1ms}
"""


@fed(texts(CLUSTER), BILLION.encode(), b"\xff\xfe", b"? [1]", b"workers: 2001-99-99", b"[" * 3000, b"7", b"3: 4",
     b"servers: 2000000000\nhosts: {server0: {}}", b"hosts: {server0: {}, server0: {}}",
     b"hosts: {" + b"x" * 1000 + b": {a: b}}", b"links: " + b"x" * 4000,
     b"workers: 131072\nhosts: {" + b", ".join(b"worker%d: {}" % m for m in range(3000)) + b"}")
def test_the_description_of_a_cluster(content: bytes) -> None:
    path = written("cluster.yaml", content)
    holds(lambda: read_cluster(str(path), workers=131072))


RESULT = results.Result("n1", 0, "sasgd", "figure-1", "paper", {"options": {}}, {"lr": 0.1}, {"odsgd": "1"},
                        {"cores": 2}, 10, 1, 2.5, [[1, 10, 0.5, 0.5, 0.5, None, 1.0]], None)


@fed(texts(f"{results.line_of(RESULT)}\n" * 2))
def test_the_results_of_runs(content: bytes) -> None:
    path = written("changed.jsonl", content)
    holds(lambda: results.read(path))


@pytest.mark.parametrize("text", [
    "[" * 100000, '{"schema": 2}', '{"schema": 2, "checksum": ' + "[" * 900 + "]" * 900 + "}",
    '{"schema": ' + "9" * 5000 + "}", "{}", "null", '{"schema": 2, "a": "\\ud800"}'])
def test_the_result_of_a_run_that_was_made_up(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    results.refused.clear()
    assert results.read(written("made-up.jsonl", text.encode())) == {}
    refused, = capsys.readouterr().err.splitlines()
    assert "made-up.jsonl`, line 1: " in refused and len(refused) <= 400


FLAGS = ["--lr", "--seed", "--kvstore", "--epochs", "--warmup", "--lr-local", "--optimizer-params", "--gpus",
         "--dataset", "--image-shape", "--lr-step-epochs", "--emulate-compute", "--data-dir", "--config", "--model",
         "--T"]
VALUES = ["0.1", "3", "odsgd", "2epochs", "a=1,b=!!int x", "0,1,2", "synthetic", "3,32,32", "mlp",
          "200ms,lognormal:0.1"]
LAUNCHERS = ["-n", "-s", "-p", "--env", "--grace", "--hang-timeout", "2", "sleep", "auto", "A:1", "--launcher", "ssh",
             "mpi", "slurm", "kubernetes", "--image", "--resources", "cpu=4,nvidia.com/gpu=1", "--name", "--pod"]


@fed(words(FLAGS + VALUES, 6), ["--optimizer-params", "a=!!int x"], ["--lr", "9" * 5000],
     ["--warmup", "9" * 4000 + "epochs"], ["x" * 10 ** 6])
def test_flags_of_a_training(words: List[str]) -> None:
    if any("method" in word for word in words) or {"-h", "--help"} & set(words):
        return
    holds(lambda: TrainConfig.from_flags(words).to_yaml())


@fed(words(LAUNCHERS, 8), ["-n", "9" * 4000, "sleep"], ["-n", "1000000000", "sleep"], ["-n", "2", "-s", "²", "sleep"])
def test_flags_of_the_launcher(words: List[str]) -> None:
    if {"-h", "--help"} & set(words):
        return
    holds(lambda: command.parse(words))


HOSTS = "hostA\nalice@hostB slots=4\n10.0.0.7:2\nhostC slots=2 port=2222 # far\n"


@fed(texts(HOSTS), "hostA slots=²".encode(), b"hostA slots=" + b"9" * 5000, b"hostA slots=1023\n" * 20000,
     b"hostA port=0", b"hostA port=99999999", b"ho\0stA", b"\xef\xbb\xbfhostA slots=2", b"host" * 10 ** 6)
def test_a_hostfile(content: bytes) -> None:
    path = written("hosts", content)
    holds(lambda: read_hostfile(str(path)))


def test_a_hostfile_with_a_mark_of_its_byte_order_is_read() -> None:
    hosts = read_hostfile(str(written("hosts", b"\xef\xbb\xbfhostA slots=2\n")))
    assert [host.address for host in hosts] == ["hostA", "hostA"]


IDX = struct.pack(">4B3I", 0, 0, 8, 3, 4, 28, 28) + bytes(4 * 784)


@fed(both(one_of(mutated(IDX), binary(100)), chosen((False, True))),
     (struct.pack(">4B3I", 0, 0, 8, 3, 2 ** 32 - 1, 28, 28), False),
     (struct.pack(">4B3I", 0, 0, 8, 3, 300000, 28, 28), True))
def test_an_idx_file(content_and_packed: Tuple[bytes, bool]) -> None:
    content, packed = content_and_packed
    path = written("images.gz" if packed else "images", gzip.compress(content, 1) if packed else content)
    holds(lambda: datasets.read_idx(path, (28, 28)))


def test_a_small_gzip_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "bomb.gz", "wb", 1) as file:
        file.write(IDX)
        for _ in range(1200):
            file.write(bytes(1 << 20))
    assert (tmp_path / "bomb.gz").stat().st_size < 1 << 24
    line = holds(lambda: datasets.read_idx(tmp_path / "bomb.gz", (28, 28)))
    assert line and "expected 3152 bytes after unpacking, got more" in line
    line = holds(lambda: datasets.read_cifar(tmp_path / "bomb.gz"))
    assert line and "got more" in line


@fed(both(one_of(mutated(gzip.compress(bytes(5000))), mutated(bytes(3073)), binary(100)), chosen((False, True))))
def test_a_cifar_file(content_and_packed: Tuple[bytes, bool]) -> None:
    content, packed = content_and_packed
    path = written("batch.gz" if packed else "batch", content)
    holds(lambda: datasets.read_cifar(path))


RECORD = struct.pack("<II", records.MAGIC, 8) + bytes(8)


@fed(both(texts("0\t0\n1\t16\n2\t32\n"), mutated(RECORD * 3)),
     *((index, RECORD) for index in (b"0\t-5\n", b"0\t" + b"9" * 17 + b"\n", b"0\t" + b"9" * 50 + b"\n",
                                     b"0\t-" + b"9" * 5000 + b"\n")))
def test_an_index_and_its_records(index_and_content: Tuple[bytes, bytes]) -> None:
    index, content = index_and_content
    rec, idx = written("train.rec", content), written("train.idx", index)
    holds(lambda: records.count_records(rec, idx))


GOOD: Dict[str, Any] = {
    "schema": manifests.SCHEMA, "iteration": 7, "num_workers": 1, "spare": [], "batches_per_epoch": 3, "config": {},
    "versions": {}, "parameters": {"w": {"shape": [2, 3], "dtype": "float32"}},
    "files": {"worker-0.npz": {"nbytes": 3, "sha256": "0" * 64}}}


@fed(one_of(texts(json.dumps(GOOD)), json_of,
            lambda random: json.dumps({**GOOD, random.choice(sorted(GOOD)): anything(random)}).encode()),
     b"[" * 100000, json.dumps({**GOOD, "files": {"worker-0.npz": 7}}).encode(),
     json.dumps({**GOOD, "iteration": 8}).encode(), json.dumps({**GOOD, "versions": 3, "schema": 1}).encode())
def test_a_manifest_and_what_it_says_of_a_file(content: bytes) -> None:
    path = FOLDER / "7"
    path.mkdir(exist_ok=True)
    written(f"7/{manifests.MANIFEST}", content)
    written("7/worker-0.npz", b"abc")
    holds(lambda: manifests.verify(path, "worker-0.npz", manifests.read_manifest(path)))


checkpoint.write_arrays(FOLDER / "good.npz", {"local/w": np.zeros((2, 3), np.float32)}, {"iteration": 7})
NPZ = (FOLDER / "good.npz").read_bytes()


@fed(one_of(mutated(NPZ), binary(200)), NPZ.replace(b"(2, 3)", b"(2,2**99)"[:6]), NPZ.replace(b"'<f4'", b"'O'  "))
def test_a_saved_state(content: bytes) -> None:
    path = written("worker-0.npz", content)
    holds(lambda: resuming.read_arrays(path))


mx.nd.save(str(FOLDER / "good.params"), {"0.weight": mx.nd.ones((2, 3)), "0.bias": mx.nd.zeros(2, dtype="float16")})
PARAMS = (FOLDER / "good.params").read_bytes()


@fed(one_of(mutated(PARAMS), binary(200)), PARAMS.replace(struct.pack("<Q", 2), struct.pack("<Q", 1 << 27)),
     PARAMS.replace(struct.pack("<qq", 2, 3), struct.pack("<qq", 1 << 62, 4)))
def test_named_weights(content: bytes) -> None:
    path = written("weights.params", content)
    holds(lambda: weights.read(path))


KEY = b"the secret of the job"
SIGNED = Signer(3, KEY).sign("open", {"buckets": [1, 2, 3]})


@fed(one_of(lambda random: texts(SIGNED)(random).decode("latin-1"), text(200)), "9" * 4000 + " 1 x {}",
     "1 1 \ud800 {}", "² ² x {}", "\r" + SIGNED, "+" + SIGNED)
def test_a_command_to_the_servers(message: str) -> None:
    if message != SIGNED:
        assert holds(lambda: Verifier(KEY).verify(message)) is not None


@fed(both(anything, anything))
def test_a_signed_command_is_not_trusted_to_be_one(payload_and_name: Tuple[Any, Any]) -> None:
    payload, name = payload_and_name
    signer = Signer(3, KEY)
    message = signer.sign(name, payload)
    line = holds(lambda: Verifier(KEY).verify(message))
    assert (line is None) == (isinstance(name, str) and isinstance(payload, dict))


SAID: List[Dict[str, Any]] = [
    {"message": "Hello", "host": "node1"}, {"message": "Started", "process": "worker 0", "pid": 8},
    {"message": "Report", "process": "worker 0", "report": {"event": "failed", "error": "x"}},
    {"message": "Beats", "beats": {"worker 0": {"at": 3, "silent_s": 0.5}}},
    {"message": "Output", "process": "worker 0", "stream": "stdout", "text": "x", "progress": False},
    {"message": "OpenRemoteSockets", "sockets": [{"name": "/tmp/1", "tunnel": "a:1", "lasting": True}]},
    {"message": "Exit", "process": "worker 0", "code": 1}]


WORDS_OF_MESSAGES = ["message", "process", "pid", "report", "beats", "code", "host", "text", "progress", "sockets"]


def changed_message(random: Random) -> bytes:
    changes = {random.choice(WORDS_OF_MESSAGES): anything(random) for _ in range(random.randint(0, 2))}
    return json.dumps({**random.choice(SAID), **changes}).encode()


@fed(one_of(lambda random: mutated(json.dumps(random.choice(SAID)).encode())(random), changed_message, json_of,
            binary(100)),
     b"[" * 100000, b'{"message": ["Hello"]}',
     b'{"message": "Beats", "beats": {"worker 0": {"silent_s": 1e999, "waits_s": NaN, "at": -1}}}')
def test_a_message_of_an_agent_and_the_judgement_of_it(data: bytes) -> None:
    judge = Judge(Job((), 1, 0), [Member("worker 0", "worker", "node1")], 0.0)

    def heard() -> None:
        read_fd, write_fd = os.pipe()
        channel = Channel(read_fd, write_fd)
        os.write(write_fd, data[:60000] + b"\n")
        for message in channel.receive():
            if isinstance(message, messages.Report):
                judge.reported("worker 0", message.report, 1.0)
            elif isinstance(message, messages.Beats):
                judge.liveness.heard(["worker 0"], 1.0)
                judge.liveness.beats(message.beats, 1.0)
            elif isinstance(message, messages.Exit):
                judge.exited("worker 0", message.code, 1.0)
        os.close(read_fd)
        os.close(write_fd)
        for now in (1.0, 2.0, 100.0, 1000.0):
            judge.tick(now)
    holds(heard)


AT = {"scheduler": "a", "server 0": "a", "worker 0": "a", "worker 1": "b", "worker 2": "b"}
FIELDS = ["at", "waited_s", "nbytes", "silent_s", "waits_s", "activity", "stale", "run", "part", "moves"]


def strange_beat(random: Random) -> Any:
    """Mostly numbers that a count or a clock never says; some fields are missing."""
    def value(name: str) -> Any:
        if name == "stale":
            return [[random.choice([0, 1, 2, anything(random)]), *random.choices([*nasty.NUMBERS, *nasty.FLOATS], k=2)]
                    for _ in range(random.randint(0, 3))]
        if name == "run":
            return {key: random.choice([*nasty.NUMBERS, *nasty.FLOATS, anything(random), "epoch 1/2"])
                    for key in random.sample(["total", "head", "tail", "out"], random.randint(0, 4))}
        return random.choice([*nasty.NUMBERS[:5], *nasty.FLOATS[:3], random.randint(-9, 9), random.random() * 9])
    beat = {name: value(name) for name in FIELDS if random.random() < 0.9}
    beat.update((random.choice(FIELDS), random.choice([*nasty.NUMBERS, *nasty.FLOATS, anything(random)]))
                for _ in range(random.choice([0, 0, 1, 2])))
    return beat if random.random() < 0.97 else anything(random)


def beats_over_time(random: Random) -> List[Tuple[float, Dict[str, Any]]]:
    """Clocks go on by a second, and jump now and then. From one seed: hypothesis takes minutes for so many draws."""
    random = Random(random.getrandbits(64))
    steps = random.choices([1.0, 0.0, 0.1, 20.0, -1.0, -1e6, 1e9], [20, 1, 1, 1, 1, 1, 1], k=random.randint(1, 15))
    names = [*AT, "worker 7", "nobody"]
    return [(step, {name: strange_beat(random) for name in names if random.random() < 0.7}) for step in steps]


@fed(beats_over_time, [(1.0, {"worker 0": {"at": at, "waited_s": at, "silent_s": 0.1},
                              "worker 1": {"at": 9 - at, "waited_s": 0, "silent_s": 0.1}}) for at in range(9)])
def test_any_beats_have_a_table_a_line_and_a_screen(steps: List[Tuple[float, Dict[str, Any]]]) -> None:
    of = overview.Overview()

    def told() -> None:
        now = 1e6
        for step, beats in steps:
            now += step
            of.beats(beats, now)
            rows, status = of.table(AT), of.status(now)
            assert [row["name"] for row in rows] == ["worker 0", "worker 1", "worker 2", "server 0"]
            assert all(row["rate"] is None or 0 <= row["rate"] < math.inf for row in rows)
            shown = [overview.line(status, columns) for columns in (-1, 0, 1, 40, 200)] if status else [""]
            facts = {"job": 1, "command": "x", "written_at": now, "status": status, "starting": "", "rows": rows}
            shown += watch.screen(json.loads(json.dumps({**facts, "out": of.out()})), now, 80).splitlines()
            assert all(map(str.isprintable, shown))
    holds(told)


def _let_in(said: bytes) -> bool:
    """Whether a caller at the agents' port, which says one thing and goes, is let in."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        caller = handshake.UnprovenConnection(ours, "00" * 32)
        theirs.sendall(said[:1000] + b"\n")
        try:
            return caller.heard({0, 1}, 60.0) is not None
        except ConnectionError:
            return False


@fed(one_of(mutated(b'{"rank": 0, "proof": "00"}'), json_of,
            lambda random: json.dumps({"rank": anything(random), "proof": anything(random),
                                       "nonce": anything(random)}).encode()),
     b'{"rank": 1e999, "proof": "x"}', b"[" * 990)
def test_a_stranger_at_the_port_for_agents(said: bytes) -> None:
    let_in: List[bool] = []
    holds(lambda: let_in.append(_let_in(said)))
    assert let_in == [False]


POD = "nodeSelector: {a: b}\nvolumes: [{name: x}]\ncontainers:\n- env: [{name: A}]\n  volumeMounts: []\n"


@fed(both(texts(POD), one_of(chosen(PIECES), text(20))), (b"containers: 7", ""),
     (b"containers: [{env: {}}]", "cpu=1"), (b"volumes: [1]", "cpu="))
def test_a_users_part_of_a_pod(content_and_resources: Tuple[bytes, str]) -> None:
    content, resources = content_and_resources
    path = str(written("pod.yaml", content))
    options = LaunchOptions(num_workers=Workers(2, 2), launcher="kubernetes", image="i", pod=path)
    holds(lambda: kubernetes.manifests(Job(("true",), 2, 1), "n", options))
    holds(lambda: parse_resources(resources))


LINES = "cmd=init pmi_version=1\ncmd=put kvsname=t key=k value=v\ncmd=get kvsname=t key=k\ncmd=barrier_in\n"


@fed(texts(LINES))
def test_lines_of_mpi_at_the_rendezvous(content: bytes) -> None:
    lines = content.decode("ascii", "replace").split("\n")
    table = pmi.Table(2, "(vector,(0,1,2))")
    for line in lines[:20]:
        holds(partial(table.answer, 0, line), pmi.Refused)


def frame(random: Random) -> Tuple[str, int, bytes]:
    """A codec, a number of floats, and as many bytes as it makes of them."""
    name, size = random.choice(sorted(codecs.CODECS)), random.randint(1, 40)
    return name, size, octets(random, codecs.codec(name).nbytes(size))


@fed(frame)
def test_frames_of_the_ring_and_of_couriers_in_any_codec(frame: Tuple[str, int, bytes]) -> None:
    name, size, received = frame
    codec, message, values = codecs.codec(name), np.frombuffer(received, np.uint8).copy(), np.zeros(size, np.float32)
    with np.errstate(all="ignore"):  # a NaN among them is looked for elsewhere
        line = holds(lambda: codec.decode(message, values))
        assert line is None
        holds(lambda: codec.encode(values, message), codecs.NotFiniteError)


@pytest.mark.parametrize("at_once", [1, 100])
def test_there_are_many_different_inputs(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(nasty, "at_once", at_once)
    seen: List[bytes] = []
    fed(mutated(bytes(100)))(seen.append)()
    assert len(seen) >= 25 * at_once and len(set(seen)) > len(seen) / 2


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel forgets no peak of memory")
def test_a_reader_that_takes_too_much_memory_is_noticed_each_time() -> None:
    for _ in range(2):
        with pytest.raises(AssertionError):
            holds(lambda: len(b"x" * (MOST_MB + 10 << 20)))


def test_an_input_that_does_harm_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nasty, "at_once", 1)
    seen: List[bytes] = []

    @fed(binary(300))
    def harmed(content: bytes) -> None:
        seen.append(content)
        assert len(content) < 20

    with pytest.raises(AssertionError):
        harmed()
    assert len(seen[-1]) == 20


def test_a_campaign_goes_on_with_the_reader_that_has_the_fewest_examples() -> None:
    results: List[Dict[str, Any]] = [{"reader": "a", "examples": 40}, {"reader": "b", "examples": 10}]
    seen = []
    for reader in fuzz.in_turn(["a", "b", "c"], 60, results):
        seen.append(reader)
        results.append({"reader": reader, "examples": 25})
    assert seen == ["c", "b", "c", "b", "a", "c"]
    assert list(fuzz.in_turn(["a"], 60, results)) == []


def test_the_table_has_a_line_for_each_reader() -> None:
    held = {"reader": "x.py::test_a_hostfile", "examples": 1000, "seconds": 1.5, "broken": ""}
    lines = fuzz.table([held, {**held, "broken": "it did not"}]).splitlines()
    assert lines[2:] == ["| a hostfile | 2000 | 1.5 | 1 |"]
