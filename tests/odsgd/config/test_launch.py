"""The options of `odsgd launch` as fields: their flags and words, and variables that are passed on."""
import shlex
from typing import Dict, List

import pytest

from kvstore.errors import ConfigError
from odsgd.config import launch
from odsgd.config.flags import flag_of
from odsgd.config.launch import JobOptions, parse_env


def test_the_words_of_options_are_the_flags_that_give_them() -> None:
    options = JobOptions(port=5000, grace_s=7.5, grow=True, env={"A": "b c", "B": "1"}, on_worker_loss="continue")
    assert shlex.join(launch.words(options)) == (
        "--port 5000 --env 'A=b c' --env B=1 --grow --grace 7.5 --on-worker-loss continue")
    assert launch.words(JobOptions()) == []


def test_every_option_has_one_flag_of_two_dashes_in_messages() -> None:
    flags = [flag_of(field) for field in launch.fields().values()]
    assert len(set(flags)) == len(flags) and {"--num-workers", "--startup-timeout", "--dry-run"} < set(flags)


@pytest.mark.parametrize("values, expected", [
    (["A:1"], {"A": "1"}), (["A=1"], {"A": "1"}), (["A:b:c=d"], {"A": "b:c=d"}), (["A:"], {"A": ""}),
    (["HOME"], {"HOME": "/root"}), (["HOME,A:2"], {"HOME": "/root", "A": "2"}), (["A:1,B:2"], {"A": "1", "B": "2"}),
    (["GPUS:0,1"], {"GPUS": "0,1"}), (["A:1", "A:2"], {"A": "2"}),
])
def test_env_takes_values_and_names(values: List[str], expected: Dict[str, str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    assert parse_env(values) == expected


@pytest.mark.parametrize("value, complaint", [
    ("1A:2", "`1A:2`: expected NAME or NAME:VALUE"),
    ("MISSING", "MISSING is not set here; set it, or give its value as MISSING:VALUE"),
    ("DMLC_ROLE:worker", "DMLC_ROLE is set by the launcher"),
])
def test_env_refuses_what_cannot_work(value: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_env([value])
