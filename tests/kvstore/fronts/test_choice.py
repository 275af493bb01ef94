"""What a store runs on, by its name and its job."""
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
