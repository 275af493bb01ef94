"""The hostfile."""
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from odsgd.launch.hostfile import Host, read_hostfile


def hostfile(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hosts"
    path.write_text(text)
    return str(path)


def test_a_host_stands_there_once_per_slot_in_the_files_order(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# two racks\n\na\nme@b slots=2  # big\n10.0.0.7:2\nc port=2222\na\n")
    b, ip = Host("b", "me"), Host("10.0.0.7")
    assert read_hostfile(path) == [Host("a"), b, b, ip, ip, Host("c", port=2222), Host("a")]


@pytest.mark.parametrize("line, complaint", [
    ("a b", "cannot read `b`; expected `slots=NUMBER`"),
    ("a slots=many", "cannot read `slots=many`"),
    ("a:2 slots=3", "cannot read `slots=3`"),
    ("a:x", "cannot read `a:x`; expected `[user@]host`"),
    ("-oProxyCommand=evil", "cannot read `-oProxyCommand=evil`"),
    ("a slots=0", "0 slots; expected at least 1"),
    ("a:22", "22 slots? For an ssh port write `port=22`"),
    ("a:2222", "2222 slots? For an ssh port write `port=2222`"),
])
def test_an_error_names_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = hostfile(tmp_path, "fine\n" + line + "\n")
    with pytest.raises(ConfigError) as error:
        read_hostfile(path)
    assert str(error.value).startswith(path + ", line 2: " + complaint)


def test_a_file_that_is_absent_or_empty_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read `.*absent`, a hostfile.*: No such file"):
        read_hostfile(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(hostfile(tmp_path, "# nobody\n"))
