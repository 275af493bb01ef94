"""The hostfile: one host per line, with its slots and its port.

    hostA                    one slot
    alice@hostB slots=4      four slots, logged into as alice
    10.0.0.7:2               two slots (as MPICH writes it)
    hostC slots=2 port=2222  its ssh server listens on port 2222
    # a comment

A slot is room for one process of the job; a host on several lines has the slots of all its lines. dmlc's own tracker
read ``host:2222`` as an ssh port. Here it would mean 2222 slots, so such numbers are refused.
"""
import re
from typing import List, NamedTuple, Optional

from kvstore.errors import ConfigError, shown
from odsgd.config.files import read_text

LINE = re.compile(r"(?:(?P<user>[^\s@:-][^\s@:]*)@)?(?P<address>[^\s@:=-][^\s@:=]*)(?::(?P<slots>\d+))?"
                  r"(?P<options>(?:\s+\S+)*)", re.ASCII)
MOST_SLOTS = 1023
MOST_PLACES, MOST_NBYTES = 1 << 16, 1 << 20
"""Most slots of all hosts together; most bytes of the file."""


class Host(NamedTuple):
    """A machine on which processes can be started."""

    address: str
    user: Optional[str] = None
    port: Optional[int] = None
    here: bool = False  # the launching machine, reached without ssh

    @property
    def target(self) -> str:
        """The host as ssh and rsync take it."""
        return f"{self.user}@{self.address}" if self.user else self.address


def read_hostfile(path: str) -> List[Host]:
    """The slots of a hostfile, in its order: a host with four slots stands there four times."""
    slots: List[Host] = []
    for number, line in enumerate(read_text(path, "a hostfile, with one host per line", MOST_NBYTES).split("\n"), 1):
        slots += _slots(line, f"{path}, line {number}")
        if len(slots) > MOST_PLACES:
            raise ConfigError(f"{path}, line {number}: more than {MOST_PLACES} slots in all; leave hosts out")
    if not slots:
        raise ConfigError(f"the hostfile {path} names no host; write one per line, e.g. `hostA slots=4`")
    return slots


def _slots(line: str, where: str) -> List[Host]:
    text = line.split("#", 1)[0].strip()
    if not text:
        return []
    match = LINE.fullmatch(text) if text.isprintable() or "\t" in text else None
    if not match or not match["address"].isprintable():
        names = " (of an IPv6 host give the name, or an IPv4 address)" if text.count(":") > 1 else ""
        raise ConfigError(f"{where}: cannot read `{shown(text)}`; expected `[user@]host`, `host slots=4` or `host:4`"
                          f"{names}")
    numbers = {"slots": match["slots"]} if match["slots"] else {}
    for option in match["options"].split():
        name, _, value = option.partition("=")
        if name not in ("slots", "port") or not re.fullmatch("[0-9]{1,9}", value) or name in numbers:
            raise ConfigError(f"{where}: cannot read `{shown(option)}`; expected `slots=NUMBER` or `port=NUMBER`, once "
                              "each")
        numbers[name] = value
    slots = int(numbers.get("slots", "1")[:10])
    if slots < 1:
        raise ConfigError(f"{where}: {slots} slots; expected at least 1 (leave the line out to leave the host out)")
    if slots > MOST_SLOTS or (match["slots"] and slots == 22):
        raise ConfigError(f"{where}: {slots} slots? For an ssh port write `port={slots}`; if you mean slots, "
                          "repeat the line")
    port = int(numbers["port"]) if "port" in numbers else None
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"{where}: port {port}; expected a number from 1 to 65535")
    return [Host(match["address"], match["user"], port)] * slots
