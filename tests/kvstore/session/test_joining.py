"""A worker that joins a running job, and the stores that it makes."""
from typing import Any, Dict

import pytest

import kvstore
from kvstore import methods
from kvstore.errors import ConfigError
from kvstore.methods import fit
from kvstore.session.session import Session
from kvstore.transports.in_process import Stage


@pytest.fixture(autouse=True)
def joiner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_JOINED", "1")
    monkeypatch.setenv("ODSGD_JOINED_AT", "9")


def test_a_store_of_one_process_has_no_part_in_the_job_that_its_worker_joins() -> None:
    pytest.importorskip("kvstore.engine._mxnet")
    store = kvstore.create("local")
    assert (store.leads, store.iteration, store.session.first_of_joiner(1)) == (True, 0, False)


@pytest.mark.parametrize("name, options", [
    ("asgd", {}), ("decoupled", {"replay": "log"}), ("decoupled", {"codec_weights": "float16"}),
    ("async_diloco", {"codec_weights": "float16"})])
def test_the_session_refuses_what_the_launcher_refuses(name: str, options: Dict[str, Any]) -> None:
    method = methods.find(name)
    checked = fit.options_of(method, options)
    assert not method.admits(checked)
    servers = Stage(2).worker(1)
    servers.joins = True
    with pytest.raises(ConfigError, match=f"nobody can join a running job of `{name}` with these options"):
        Session(method, checked, servers)
