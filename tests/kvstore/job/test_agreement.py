"""Versions of the processes of a job, compared; and what a worker that is lost between two sums leaves to those that
gather texts."""
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore import _version
from kvstore._version import VERSION
from kvstore.errors import LacksError, ProtocolError
from kvstore.job import agreement
from kvstore.transports.in_process import InProcess, Stage
from kvstore.transports.sockets import SocketsJoined
from tests.jobs import launch

PIECE = SocketsJoined.piece_floats

class WithAWorkerThatDies:
    """Worker 0 of two. Worker 1 adds `text` to the sums of a gathering, as far as it gets in the second one."""

    worker_rank, num_workers = 0, 2

    def __init__(self, text: str, gets: int) -> None:
        self._parts = [np.array([0, len(text)]), self._rows(text, gets)]

    def _rows(self, text: str, gets: int) -> np.ndarray:
        rows = np.zeros((2, len(text)))
        rows[1, :gets] = bytearray(text[:gets].encode())
        return rows

    def total(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array + self._parts.pop(0), np.float32)


@pytest.mark.parametrize("gets, expected", [(0, ""), (PIECE, ""), (PIECE + 9, "x" * (PIECE + 9))])
def test_a_text_that_did_not_come_whole_is_an_empty_one(gets: int, expected: str) -> None:
    others = WithAWorkerThatDies("x" * (PIECE + 9), gets)
    assert agreement.gather_texts(others, "mine") == ["mine", expected]


OURS = "0.3.0 1.9.1 1.26.4 3.11.7"


def compare(*workers: str, servers: "tuple[str, ...]" = ()) -> None:
    def one(transport: InProcess) -> None:
        _version.running_versions = lambda: workers[transport.worker_rank]
        agreement.compare_versions(transport, servers)
    Stage(len(workers)).run(one)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_version, "running_versions", _version.running_versions)
    monkeypatch.delenv("ODSGD_VERSIONS", raising=False)


def test_the_same_versions_are_no_news(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_VERSIONS", "0.3.0 - 1.26.4 3.11.7")  # a launcher does not import MXNet
    compare(OURS, OURS, servers=(OURS,))
    assert capsys.readouterr().err == ""


def test_other_versions_are_one_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_VERSIONS", OURS)
    compare(OURS, "0.3.0 1.9.1 1.23.5 3.8.10", OURS, servers=(OURS, "0.3.0 1.9.1 1.23.5 3.8.10"))
    assert capsys.readouterr().err == """\
warning: the processes of this job run different versions, and may compute different bits
  odsgd  mxnet  numpy   python
  0.3.0  1.9.1  1.26.4  3.11.7  launcher, worker 0, worker 2, server 0
  0.3.0  1.9.1  1.23.5  3.8.10  worker 1, server 1
"""


@pytest.mark.parametrize("workers, servers, launcher", [
    ((OURS, OURS.replace("0.3.0", "0.2.0")), (), OURS), ((OURS,), (OURS.replace("0.3.0", "0.2.0"),), OURS),
    ((OURS, OURS), (), OURS.replace("0.3.0", "0.2.0"))], ids=["worker", "server", "launcher"])
def test_another_odsgd_is_an_error(workers: "tuple[str, ...]", servers: "tuple[str, ...]", launcher: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_VERSIONS", launcher)
    with pytest.raises(ProtocolError, match="different versions of odsgd; install the same") as caught:
        compare(*workers, servers=servers)
    assert "0.2.0" in str(caught.value)


@pytest.mark.slow
def test_the_processes_of_a_real_job_are_compared(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tests.lean, odsgd, mxnet as mx\nimport os, sys\n"
                      "if os.environ['ODSGD_WORKER_RANK'] == '1':\n    sys.version = '3.8.1 (another one)'\n"
                      "print(mx.kv.create('ssgd'))\n", encoding="utf-8")
    done = launch(2, 1, [sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stderr.splitlines() if line.startswith(f"worker 0 |   {VERSION}")]
    processes = [row.split("  ")[-1].strip() for row in rows]
    assert processes == ["launcher", "worker 0, server 0", "worker 1"], done.stderr


def test_a_worker_of_another_version_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    agreement.check_launcher()
    monkeypatch.setenv("ODSGD_VERSIONS", f"{VERSION} - 1.26.4 3.11.7")
    agreement.check_launcher()
    monkeypatch.setenv("ODSGD_VERSIONS", "0.3.0 - 1.26.4 3.11.7")
    with pytest.raises(LacksError, match=f"this worker runs odsgd {VERSION}, and its job's launcher 0\\.3\\.0"):
        agreement.check_launcher()
