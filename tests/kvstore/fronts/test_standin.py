"""The store that stands in for MXNet's: how it is written, and what is refused before a job starts."""
import pytest

from kvstore.errors import ConfigError
from kvstore.fronts import choice
from kvstore.fronts.standin import parse
from kvstore.transports.in_process import Stage


def test_a_name_with_options_and_the_sum_that_the_script_reckons_with() -> None:
    one = parse("odsgd:warmup=200:lr-local=0.05")
    assert (one.kvstore, one.needs_servers, one.asynchronous) == ("odsgd", True, False)
    assert one.in_place_of("dist_sync") == {"reduction": "sum", "warmup": "200", "lr_local": "0.05"}
    assert one.in_place_of("device") == {"warmup": "200", "lr_local": "0.05"}
    assert parse("ssgd:reduction=mean").in_place_of("dist_sync") == {"reduction": "mean"}
    assert parse("asgd").in_place_of("dist_async") == {}
    assert parse("softsync:modulate=false").options == {"modulate": False}
    ring = parse("odsgd:transport=ring")
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
        parse(text)
    assert "\n" not in str(caught.value)
