"""What a store runs on, by its name and its job; the store that stands in for MXNet's: how it is written, and what is
refused before a job starts.
"""
import multiprocessing
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.fronts import choice
from kvstore.transports.in_process import Stage


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


def test_a_name_with_options_and_the_sum_that_the_script_reckons_with() -> None:
    one = choice.stand_in("odsgd:warmup=200:lr-local=0.05")
    assert (one.kvstore, one.needs_servers, one.asynchronous) == ("odsgd", True, False)
    assert one.in_place_of("dist_sync") == {"reduction": "sum", "warmup": "200", "lr_local": "0.05"}
    assert one.in_place_of("device") == {"warmup": "200", "lr_local": "0.05"}
    assert choice.stand_in("ssgd:reduction=mean").in_place_of("dist_sync") == {"reduction": "mean"}
    assert choice.stand_in("asgd").in_place_of("dist_async") == {}
    assert choice.stand_in("decoupled:quorum=2").in_place_of("dist_sync") == {"quorum": "2"}  # has no `reduction`
    assert choice.stand_in("softsync:modulate=false").options == {"modulate": False}
    ring = choice.stand_in("odsgd:transport=ring")
    assert (ring.needs_servers, ring.transport, ring.options) == (False, "ring", {})


def test_a_script_may_write_options_behind_the_name_too() -> None:
    method, options, _ = choice.checked("odsgd:warmup=3:lr-local=0.5", Stage(1).worker(0), {"lr_local": 0.25})
    given = options.plain()
    assert (method.name, str(given["warmup"]), given["lr_local"]) == ("odsgd", "3", 0.25)  # a keyword wins


@pytest.mark.parametrize("text, says", [
    ("odsdg", "unknown store `odsdg`; did you mean `odsgd`"),
    ("odsgd:warmpu=3", "unknown option of store odsgd `warmpu`; did you mean `warmup`"),
    ("odsgd:warmup", "expected :OPTION=VALUE behind the store's name, got `:warmup`"),
    ("odsgd:warmup=-1", "store odsgd: warmup: expected iterations"),
    ("odsgd:warmup=2epochs", "only a training run knows how long an epoch is; give a number of iterations"),
    ("ssgd:transport=ring", "store ssgd runs on transport server or sharded, not on `ring`"),
    ("odsgd:transport=ring:codec=2bit", "codec `2bit` needs servers"),
    ("asgd:reduction=sum", "reduction has no meaning in store asgd, whose every gradient is an update"),
    ("local", "store `local` trains in one process alone; the stores of a job are ssgd, odsgd,"),
    ("", "unknown store ``"),
])
def test_a_mistake_is_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        choice.stand_in(text)
    assert "\n" not in str(caught.value)
