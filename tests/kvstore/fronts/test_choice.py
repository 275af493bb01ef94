"""What a store runs on, by its name and its job."""
import multiprocessing
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.fronts import choice


@pytest.mark.parametrize("name, line", [
    ("odsgd", 'store odsgd needs servers, and this job has none (-s 0): give -s 1, or transport="ring"'),
    ("ssgd", 'store ssgd needs servers, and this job has none (-s 0): give -s 1, or transport="sharded"'),
    ("asgd", "store asgd needs servers, and this job has none (-s 0): give -s 1")])
@pytest.mark.parametrize("wire", ["ps-lite", "sockets"])
def test_a_store_of_servers_in_a_job_without_any_says_what_to_give(name: str, line: str, wire: str,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")
    monkeypatch.setenv("DMLC_NUM_SERVER", "0")
    monkeypatch.setenv("ODSGD_WIRE", wire)
    with pytest.raises(ConfigError) as caught:
        choice.connect(name)
    assert str(caught.value) == line


@pytest.mark.parametrize("arguments", [(None,), (3,), (["ssgd"],), ("odsgd", {"warmup": 5}), ("odsgd", 200)])
def test_what_is_no_name_or_no_transport_is_told(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=r"^create\(.*expected the name of a store, then .*; options go by name"):
        choice.checked(arguments[0], arguments[1] if arguments[1:] else None, {})


def test_whole_numbers_may_be_numpys() -> None:
    _, options, _ = choice.checked("local", None, {"bucket_nbytes": np.int64(1000)})
    assert options.bucket_nbytes == 1000


def test_a_process_that_imports_the_script_makes_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match=r"started by `spawn` .* `ssgd`, again: put .* under `if __name__ == "):
        choice.checked("ssgd", None, {})
    assert choice.checked("local", None, {})[0].name == "local"  # nothing is connected


@pytest.mark.parametrize("given, told", [
    ({"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NUM_WORKER": "2"}, 1),
    ({"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NUM_WORKER": "1"}, 0),
    ({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}, 1), ({"WORLD_SIZE": "2"}, 0)])
def test_a_local_store_in_a_job_of_several_workers_is_told(given: Any, told: int, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    choice.connect("local")
    assert capsys.readouterr().err.count("has 2 workers, and a `local` store trains on this one alone") == told
