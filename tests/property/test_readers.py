"""Whatever a reader is given: a value, or one line of at most 400 characters, within 2 s of processor time and 200 MB.

Inputs are of three kinds: the bytes of a good file with parts cut out, doubled and overwritten; pieces that have
done harm to some reader before, in any order; and anything at all.
"""
import gzip
import json
import os
import resource
import socket
import struct
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Type

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, ProtocolError
from kvstore.job.control import Signer, Verifier
from kvstore.wire import codecs
from odsgd.config.train import TrainConfig
from odsgd.lab.reproduce import results
from odsgd.launch import cli, handshake, kubernetes, pmi
from odsgd.launch.channel import Channel
from odsgd.launch.hosts import read_hostfile
from odsgd.launch.judge import Judge, Member
from odsgd.launch.plan import Job
from odsgd.training import checkpoint, datasets, records

MOST_S, MOST_MB, MOST_CHARACTERS = 2.0, 200, 400
PIECES = ["!!int x", "!!float .", "!!bool z", "!!timestamp 2001-99-99", "!!binary é", "!!set {a}", "!!python/none",
          "0x_", "2001-99-99", "9" * 5000, "1:" * 3000 + "1", "[" * 3000, "{a: " * 500, "&a [*a]", "*b", "&x [1,1]",
          "\0", "\x1b[2J", "\ufeff", "²", "１２", "-1", "99999999", "1e999", "nan", "inf", "~", "''", "# ", "\r", "\t",
          "\n", "\u2028", "\x85", "slots=²", "slots=1023", "port=0", "port=99999999", "slots=" + "9" * 5000,
          "a" * 2000, "..", "%", "@", ":", "="]


def holds(reader: Callable[[], Any], *also: Type[Exception]) -> Optional[str]:
    """The property; returns the line of an error."""
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


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@st.composite
def mutated(draw: Any, good: bytes) -> bytes:
    """`good`, with a few of its parts cut out, doubled, moved or overwritten."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 12))
        kind = draw(st.sampled_from("cut double write insert end"))
        if kind == "c":
            del data[start:start + length]
        elif kind == "d":
            data[start:start] = data[start:start + length]
        elif kind == "w":
            data[start:start + length] = draw(st.binary(max_size=length))
        elif kind == "i":
            data[start:start] = draw(st.sampled_from(PIECES)).encode()
        else:
            del data[start:]
    return bytes(data)


def texts(good: str) -> st.SearchStrategy[bytes]:
    """Texts like `good`, and unlike it."""
    lines = good.splitlines()
    piece = st.one_of(st.sampled_from(PIECES), st.sampled_from(lines), st.sampled_from([": ", " ", "\n", ","]))
    pieced = st.lists(piece, max_size=12).map("".join).map(str.encode)
    return st.one_of(mutated(good.encode()), pieced, st.binary(max_size=300))


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


CONFIG = TrainConfig(kvstore="odsgd", dataset="synthetic", lr_local=0.5, warmup="2epochs",
                     optimizer_params={"clip_gradient": 5}).to_yaml()
BILLION = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi"))


@given(content=texts(CONFIG))
@example(b"lr: !!int x")
@example(b"seed: 0x_")
@example(b"lr: 2001-99-99")
@example(BILLION.encode())
@example(b"lr: " + b"[" * 100000)
@example(b"lr: " + b"9" * 100000)
@example(b"seed: " + b"1:" * 100000 + b"1")
@example(b"lr: " + b"x" * 10 ** 7)
@example(b"data_dir: \"a\\0b\"\ndataset: mnist")
@example(b"\xef\xbb\xbflr: 0.1")
@example(b"optimizer_params: {a: 2001-01-01}")
def test_a_configuration_in_yaml(folder: Path, content: bytes) -> None:
    if b"method" in content:  # such a file is run, as asked
        return
    path = written(folder, "config.yaml", content)
    holds(lambda: TrainConfig.from_flags(["--config", str(path)]).to_yaml())


TRIAL = {"paper": "sasgd", "item": "figure-1", "scale": "paper", "cell": "n1", "seed": 0}
RESULT = results.Result(TRIAL, {"options": {}}, {"lr": 0.1}, {"odsgd": "1"}, {"cores": 2}, 10, 1, 2.5,
                        [[1, 10, 0.5, 0.5, 0.5, None, 1.0]], None)


@given(data=st.data())
def test_the_result_of_a_run(folder: Path, data: st.DataObject) -> None:
    path = folder / "result.json"
    results.write(RESULT, path)
    changed = written(folder, "changed.json", data.draw(texts(path.read_text())))
    holds(lambda: results.read(changed))


@pytest.mark.parametrize("text", [
    "[" * 100000, '{"schema": 1}', '{"schema": 1, "checksum": ' + "[" * 900 + "]" * 900 + "}",
    '{"schema": ' + "9" * 5000 + "}", "{}", "null", '{"schema": 1, "a": "\\ud800"}'])
def test_the_result_of_a_run_that_was_made_up(folder: Path, text: str) -> None:
    line = holds(lambda: results.read(written(folder, "made-up.json", text.encode())))
    assert line and "made-up.json" in line


FLAGS = ["--lr", "--seed", "--kvstore", "--epochs", "--warmup", "--lr-local", "--optimizer-params", "--gpus",
         "--dataset", "--image-shape", "--lr-step-epochs", "--emulate-compute", "--data-dir", "--config", "--model",
         "--T"]
VALUES = ["0.1", "3", "odsgd", "2epochs", "a=1,b=!!int x", "0,1,2", "synthetic", "3,32,32", "mlp",
          "200ms,lognormal:0.1"]
LAUNCHERS = ["-n", "-s", "-p", "--env", "--grace", "--hang-timeout", "2", "sleep", "auto", "A:1", "--launcher", "ssh",
             "mpi", "slurm", "kubernetes", "--image", "--resources", "cpu=4,nvidia.com/gpu=1", "--name", "--pod"]


@given(words=st.lists(st.one_of(st.sampled_from(FLAGS), st.sampled_from(VALUES), st.sampled_from(PIECES),
                                st.text(max_size=20)), max_size=6))
@example(["--optimizer-params", "a=!!int x"])
@example(["--lr", "9" * 5000])
@example(["--warmup", "9" * 4000 + "epochs"])
@example(["x" * 10 ** 6])
def test_flags_of_a_training(words: List[str]) -> None:
    if any("method" in word for word in words) or {"-h", "--help"} & set(words):
        return
    holds(lambda: TrainConfig.from_flags(words).to_yaml())


@given(words=st.lists(st.one_of(st.sampled_from(LAUNCHERS), st.sampled_from(PIECES), st.text(max_size=20)),
                      max_size=8))
@example(["-n", "9" * 4000, "sleep"])
@example(["-n", "1000000000", "sleep"])
@example(["-n", "2", "-s", "²", "sleep"])
def test_flags_of_the_launcher(words: List[str]) -> None:
    if {"-h", "--help"} & set(words):
        return
    holds(lambda: cli.parse(words))


HOSTS = "hostA\nalice@hostB slots=4\n10.0.0.7:2\nhostC slots=2 port=2222 # far\n"


@given(content=texts(HOSTS))
@example("hostA slots=²".encode())
@example(b"hostA slots=" + b"9" * 5000)
@example(b"hostA slots=1023\n" * 20000)
@example(b"hostA port=0")
@example(b"hostA port=99999999")
@example(b"ho\0stA")
@example(b"\xef\xbb\xbfhostA slots=2")
@example(b"host" * 10 ** 6)
def test_a_hostfile(folder: Path, content: bytes) -> None:
    path = written(folder, "hosts", content)
    holds(lambda: read_hostfile(str(path)))


def test_a_hostfile_with_a_mark_of_its_byte_order_is_read(tmp_path: Path) -> None:
    hosts = read_hostfile(str(written(tmp_path, "hosts", b"\xef\xbb\xbfhostA slots=2\n")))
    assert [host.address for host in hosts] == ["hostA", "hostA"]


IDX = struct.pack(">4B3I", 0, 0, 8, 3, 4, 28, 28) + bytes(4 * 784)


@given(content=st.one_of(mutated(IDX), st.binary(max_size=100)), packed=st.booleans())
@example(struct.pack(">4B3I", 0, 0, 8, 3, 2 ** 32 - 1, 28, 28), False)
@example(struct.pack(">4B3I", 0, 0, 8, 3, 300000, 28, 28), True)
def test_an_idx_file(folder: Path, content: bytes, packed: bool) -> None:
    path = written(folder, "images.gz" if packed else "images", gzip.compress(content, 1) if packed else content)
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


@given(content=st.one_of(mutated(gzip.compress(bytes(5000))), mutated(bytes(3073)), st.binary(max_size=100)),
       packed=st.booleans())
def test_a_cifar_file(folder: Path, content: bytes, packed: bool) -> None:
    path = written(folder, "batch.gz" if packed else "batch", content)
    holds(lambda: datasets.read_cifar(path))


RECORD = struct.pack("<II", records.MAGIC, 8) + bytes(8)


@given(index=texts("0\t0\n1\t16\n2\t32\n"), content=mutated(RECORD * 3))
@example(b"0\t-5\n", RECORD)
@example(b"0\t" + b"9" * 17 + b"\n", RECORD)
@example(b"0\t" + b"9" * 50 + b"\n", RECORD)
@example(b"0\t-" + b"9" * 5000 + b"\n", RECORD)
def test_an_index_and_its_records(folder: Path, index: bytes, content: bytes) -> None:
    rec, idx = written(folder, "train.rec", content), written(folder, "train.idx", index)
    holds(lambda: records.count_records(rec, idx))


GOOD: Dict[str, Any] = {
    "schema": checkpoint.SCHEMA, "iteration": 7, "num_workers": 1, "batches_per_epoch": 3, "config": {}, "versions": {},
    "parameters": {"w": {"shape": [2, 3], "dtype": "float32"}},
    "files": {"worker-0.npz": {"nbytes": 3, "sha256": "0" * 64}}}
ANYTHING = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
                        lambda inner: st.one_of(st.lists(inner, max_size=3),
                                                st.dictionaries(st.text(max_size=5), inner, max_size=3)), max_leaves=8)


@given(content=st.one_of(
    texts(json.dumps(GOOD)),
    st.tuples(st.sampled_from(sorted(GOOD)), ANYTHING).map(
        lambda pair: json.dumps({**GOOD, pair[0]: pair[1]}).encode()),
    ANYTHING.map(json.dumps).map(str.encode)))
@example(b"[" * 100000)
@example(json.dumps({**GOOD, "files": {"worker-0.npz": 7}}).encode())
@example(json.dumps({**GOOD, "iteration": 8}).encode())
@example(json.dumps({**GOOD, "versions": 3, "schema": 1}).encode())
def test_a_manifest_and_what_it_says_of_a_file(folder: Path, content: bytes) -> None:
    path = folder / "7"
    path.mkdir(exist_ok=True)
    written(path, checkpoint.MANIFEST, content)
    written(path, "worker-0.npz", b"abc")
    holds(lambda: checkpoint.verify(path, "worker-0.npz", checkpoint.read_manifest(path)))


def _npz(folder: Path) -> bytes:
    checkpoint.write_arrays(folder / "good.npz", {"local/w": np.zeros((2, 3), np.float32)}, {"iteration": 7})
    return (folder / "good.npz").read_bytes()


with tempfile.TemporaryDirectory() as _name:
    NPZ = _npz(Path(_name))


@given(content=st.one_of(mutated(NPZ), st.binary(max_size=200)))
@example(NPZ.replace(b"(2, 3)", b"(2,2**99)"[:6]))
@example(NPZ.replace(b"'<f4'", b"'O'  "))
def test_a_saved_state(folder: Path, content: bytes) -> None:
    path = written(folder, "worker-0.npz", content)
    holds(lambda: checkpoint.read_arrays(path))


KEY = b"the secret of the job"
SIGNED = Signer(3, KEY).sign("open", {"buckets": [1, 2, 3]})


@given(message=st.one_of(texts(SIGNED).map(lambda data: data.decode("latin-1")), st.text(max_size=200)))
@example("9" * 4000 + " 1 x {}")
@example("1 1 \ud800 {}")
@example("² ² x {}")
@example("\r" + SIGNED)
@example("+" + SIGNED)
def test_a_command_to_the_servers(message: str) -> None:
    if message != SIGNED:
        assert holds(lambda: Verifier(KEY).open(message)) is not None


@given(payload=ANYTHING, name=ANYTHING)
def test_a_signed_command_is_not_trusted_to_be_one(payload: Any, name: Any) -> None:
    signer = Signer(3, KEY)
    message = signer.sign(name, payload)
    line = holds(lambda: Verifier(KEY).open(message))
    assert (line is None) == (isinstance(name, str) and isinstance(payload, dict))


EVENTS: List[Dict[str, Any]] = [
    {"event": "hello", "host": "node1", "pid": 7}, {"event": "started", "process": "worker 0", "pid": 8},
    {"event": "report", "process": "worker 0", "report": {"event": "failed", "error": "x"}},
    {"event": "beats", "beats": {"worker 0": {"at": 3, "silent_s": 0.5}}},
    {"event": "output", "process": "worker 0", "stream": "stdout", "text": "x", "progress": False},
    {"event": "exit", "process": "worker 0", "code": 1}]


@given(data=st.one_of(
    st.sampled_from(EVENTS).flatmap(lambda event: mutated(json.dumps(event).encode())),
    st.tuples(st.sampled_from(EVENTS), st.dictionaries(st.sampled_from(
        ["event", "process", "pid", "report", "beats", "code", "host", "text", "progress"]), ANYTHING, max_size=2)).map(
        lambda pair: json.dumps({**pair[0], **pair[1]}).encode()),
    ANYTHING.map(json.dumps).map(str.encode), st.binary(max_size=100)))
@example(b"[" * 100000)
@example(b'{"event": ["hello"]}')
@example(b'{"event": "beats", "beats": {"worker 0": {"silent_s": 1e999, "waits_s": NaN, "at": -1}}}')
def test_a_message_of_an_agent_and_the_judgement_of_it(data: bytes) -> None:
    judge = Judge([Member("worker 0", "worker", "node1")], 300.0, 0.0, hang_timeout_s=60.0)

    def heard() -> None:
        read_fd, write_fd = os.pipe()
        channel = Channel(read_fd, write_fd)
        os.write(write_fd, data[:60000] + b"\n")
        for message in channel.receive():
            if message["event"] == "report":
                judge.reported("worker 0", message["report"], 1.0)
            elif message["event"] == "beats":
                judge.vigil.heard(["worker 0"], 1.0)
                judge.vigil.beats(message["beats"], 1.0)
            elif message["event"] == "exit":
                judge.exited("worker 0", message["code"], 1.0)
        os.close(read_fd)
        os.close(write_fd)
        for now in (1.0, 2.0, 100.0, 1000.0):
            judge.tick(now)
    if b'"do"' not in data and b'"processes"' not in data:
        holds(heard)


def _visited(said: bytes) -> bool:
    """Whether a visitor at the agents' door, who says one thing and goes, is let in."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        visitor = handshake.Visitor(ours, "00" * 32)
        theirs.sendall(said[:1000] + b"\n")
        try:
            return visitor.heard({0, 1}) is not None
        except ConnectionError:
            return False


@given(said=st.one_of(mutated(b'{"rank": 0, "proof": "00"}'), ANYTHING.map(json.dumps).map(str.encode),
                      st.fixed_dictionaries({"rank": ANYTHING, "proof": ANYTHING}).map(json.dumps).map(str.encode)))
@example(b'{"rank": 1e999, "proof": "x"}')
@example(b"[" * 990)
def test_a_stranger_at_the_door_of_the_agents(said: bytes) -> None:
    let_in: List[bool] = []
    holds(lambda: let_in.append(_visited(said)))
    assert let_in == [False]


POD = "nodeSelector: {a: b}\nvolumes: [{name: x}]\ncontainers:\n- env: [{name: A}]\n  volumeMounts: []\n"


@given(content=texts(POD), resources=st.one_of(st.sampled_from(PIECES), st.text(max_size=20)))
@example(b"containers: 7", "")
@example(b"containers: [{env: {}}]", "cpu=1")
@example(b"volumes: [1]", "cpu=")
def test_a_users_part_of_a_pod(folder: Path, content: bytes, resources: str) -> None:
    path = str(written(folder, "pod.yaml", content))
    holds(lambda: kubernetes.manifests(Job(("true",), 2, 1), kubernetes.container("i", "n", None, None, path)))
    holds(lambda: kubernetes.container("i", "n", None, resources, None))


LINES = "cmd=initack pmiid=12345\ncmd=put kvsname=t key=k value=v\ncmd=get kvsname=t key=k\ncmd=barrier_in\n"


@given(lines=texts(LINES).map(lambda data: data.decode("ascii", "replace").split("\n")))
def test_lines_of_mpi_at_the_rendezvous(lines: List[str]) -> None:
    table = pmi.Table(["12345", "23456"], "(vector,(0,1,2))")
    for line in lines[:20]:
        holds(partial(table.enter, line), pmi.Refused)
        holds(partial(table.answer, 0, line), pmi.Refused)


@given(name=st.sampled_from(sorted(codecs.CODECS)), size=st.integers(1, 40), data=st.data())
def test_frames_of_the_ring_and_of_couriers_in_any_codec(name: str, size: int, data: Any) -> None:
    codec = codecs.codec(name)
    nbytes = codec.nbytes(size)
    message = np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8).copy()
    values = np.zeros(size, np.float32)
    with np.errstate(all="ignore"):  # a NaN among them is looked for elsewhere
        line = holds(lambda: codec.decode(message, values))
        assert line is None
        holds(lambda: codec.encode(values, message), codecs.NotFiniteError)


def test_the_examples_are_as_many_as_asked_for() -> None:
    seen: List[Tuple[int, ...]] = []

    @given(st.tuples(st.integers(), st.integers()))
    def count(pair: Tuple[int, ...]) -> None:
        seen.append(pair)

    count()
    assert len(seen) >= 25
