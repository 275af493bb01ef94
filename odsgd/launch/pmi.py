"""How the workers of a job without servers find each other: PMI-1, which MPICH and its kin ask at their start.

MPI's processes exchange their addresses through a table of keys and values, kept by the program that starts them. A
process connects to PMI_PORT, shows its PMI_ID and is told its rank; from then on it asks one question at a time, a line
each, and is answered with a line:

    cmd=put kvsname=… key=… value=…     cmd=get kvsname=… key=…
    cmd=barrier_in                      answered when every rank has asked

Others ask for the limits, for the name of the table, and to leave.

The table knows no socket: a line and its sender go in, answers by rank come out. PMI has no secrets of its own, so
PMI_ID, which the processes take for any number, is one of 31 random bits here. Without it a visitor is cut off.
"""
import contextlib
import itertools
import secrets
import selectors
import socket
from typing import Callable, Dict, Hashable, List, Mapping, Optional, Sequence, Set, Tuple

from kvstore.errors import ConfigError, shown

NAME_MAX, KEY_MAX, VALUE_MAX = 32, 64, 896
"""Bytes of the table's name, a key and a value. A line of MPICH has 1024: these three and 30 for the words between."""
LINE_MAX = 1024
MOST_PUTS = 1024
"""Of one rank; MPICH makes about ten."""
MOST_STRANGERS = 64
"""Connections that have not shown a PMI_ID yet, beside one for each rank; the oldest has to go when another comes."""


class Refused(Exception):
    """This line is not part of the protocol, or not from one of ours; its sender is to be cut off."""


class Table:
    """The table of one job.

    Invariants: a rank is taken once, by the first visitor that shows its number; only a rank changes anything; a
    barrier opens when all ranks are in it, and then for all of them.
    """

    def __init__(self, numbers: Sequence[str], mapping: str) -> None:
        self.size = len(numbers)
        self._ranks = {number: rank for rank, number in enumerate(numbers)}  # not shown yet
        self._values = {"PMI_process_mapping": mapping}
        self._puts = [0] * self.size
        self._waiting: Set[int] = set()
        # MPICH names its shared memory by the table's name, so that no two jobs of a machine may have the same.
        self._name = "odsgd-" + secrets.token_hex(8)
        self._answers = {
            "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
            "get_maxes": f"cmd=maxes rc=0 kvsname_max={NAME_MAX} keylen_max={KEY_MAX} vallen_max={VALUE_MAX}",
            "get_appnum": "cmd=appnum rc=0 appnum=0",
            "get_my_kvsname": f"cmd=my_kvsname rc=0 kvsname={self._name}",
            "get_universe_size": f"cmd=universe_size rc=0 size={self.size}",
            "finalize": "cmd=finalize_ack rc=0"}

    def enter(self, line: str) -> Tuple[int, str]:
        """The rank of a newcomer whose first line this is, and the answer to it."""
        words = _parse(line)
        rank = self._ranks.pop(words.get("pmiid", ""), None) if words["cmd"] == "initack" else None
        if rank is None:
            raise Refused("a stranger")
        return rank, "\n".join(["cmd=initack rc=0", f"cmd=set size={self.size}", f"cmd=set rank={rank}",
                                "cmd=set debug=0"])

    def answer(self, rank: int, line: str) -> Dict[int, str]:
        """The answers that a rank's line leads to, by the rank to which they go."""
        if line.startswith("cmd=abort "):  # the end of the process itself says it, with its exit code
            return {}
        words = _parse(line)
        if words["cmd"] == "barrier_in":
            return self._barrier(rank)
        if words["cmd"] == "put":
            return {rank: self._put(rank, words)}
        if words["cmd"] == "get":
            return {rank: self._get(words)}
        if words["cmd"] not in self._answers:
            raise Refused(f"`{shown(words['cmd'])}`, which this launcher does not serve")
        return {rank: self._answers[words["cmd"]]}

    def _barrier(self, rank: int) -> Dict[int, str]:
        self._waiting.add(rank)
        if len(self._waiting) < self.size:
            return {}
        self._waiting.clear()
        return dict.fromkeys(range(self.size), "cmd=barrier_out rc=0")

    def _put(self, rank: int, words: Mapping[str, str]) -> str:
        key, value = self._own(words).get("key", ""), words.get("value", "")
        self._puts[rank] += 1
        if not 0 < len(key) <= KEY_MAX or len(value) > VALUE_MAX or self._puts[rank] > MOST_PUTS:
            raise Refused("more than the table takes")
        self._values[key] = value
        return "cmd=put_result rc=0 msg=success"

    def _get(self, words: Mapping[str, str]) -> str:
        value = self._values.get(self._own(words).get("key", ""))
        if value is None:
            return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
        return f"cmd=get_result rc=0 msg=success value={value}"

    def _own(self, words: Mapping[str, str]) -> Mapping[str, str]:
        if words.get("kvsname") != self._name:
            raise Refused(f"a table `{shown(words.get('kvsname'))}`, and this job's is `{self._name}`")
        return words


def _parse(line: str) -> Dict[str, str]:
    """The words of a line, the first of which is the command. A value is the last one and may hold anything printable.

    >>> _parse("cmd=put kvsname=t key=k value=a=b")
    {'cmd': 'put', 'kvsname': 't', 'key': 'k', 'value': 'a=b'}
    """
    head, mark, value = line.partition(" value=")
    pairs = [word.split("=", 1) for word in head.split(" ") if word]
    if not pairs or pairs[0][0] != "cmd" or any(len(pair) < 2 for pair in pairs):
        raise Refused(f"`{shown(line)}`, which is no line of PMI")
    words = dict(pairs)
    return {**words, "value": value} if mark else words


def new_numbers(count: int) -> List[str]:
    """A PMI_ID for each rank; MPICH reads it as an int."""
    numbers: Set[str] = set()
    while len(numbers) < count:
        numbers.add(str(1 + secrets.randbelow(2 ** 31 - 1)))
    return list(numbers)


def process_mapping(hosts: Sequence[Hashable]) -> str:
    """Which ranks share a host, and so may share memory, in the manner of MPICH: blocks of (first host, hosts, ranks
    on each), in the order of the ranks.

    >>> process_mapping(["a", "a", "b", "b"]), process_mapping(["a", "b", "c", "c", "a"])
    ('(vector,(0,2,2))', '(vector,(0,2,1),(2,1,2),(0,1,1))')

    A mapping too long for a value is told as a host for each rank: slower, and never wrong.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    blocks: List[Tuple[int, int, int]] = []
    for host, ranks in itertools.groupby(hosts):
        number, length = numbers[host], len(list(ranks))
        if blocks and number == sum(blocks[-1][:2]) and length == blocks[-1][2]:
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + 1, length)
        else:
            blocks.append((number, 1, length))
    text = "(vector,{})".format(",".join("({},{},{})".format(*block) for block in blocks))
    return text if len(text) <= VALUE_MAX else f"(vector,(0,{len(hosts)},1))"


class Rendezvous:
    """Serves a table at an address, as a part of the loop that asks `selector` and calls the functions it finds there.

    Nothing here waits. A rank asks its next question when it has been answered, so an answer fits into the socket's
    buffer; where it does not, the other end does not read, and is cut off.
    """

    def __init__(self, address: Tuple[str, int], table: Table, selector: selectors.BaseSelector,
                 complain: Callable[[int, str], None]) -> None:
        self._table, self._selector, self._complain = table, selector, complain
        self._ranks: Dict[int, _Visitor] = {}
        self._strangers: List[_Visitor] = []
        self._listener = _listen(address, table.size)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Serve nothing any more."""
        for visitor in [*self._strangers, *self._ranks.values()]:
            self._cut_off(visitor)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone already, or we have no descriptor left
            return
        connection.setblocking(False)
        visitor = _Visitor(connection)
        if len(self._strangers) >= MOST_STRANGERS + self._table.size:
            self._cut_off(self._strangers[0])
        self._strangers.append(visitor)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._heard(visitor))

    def _heard(self, visitor: "_Visitor") -> None:
        try:
            for line in visitor.lines():
                self._act(visitor, line)
        except OSError:
            self._cut_off(visitor)
        except Refused as refused:
            if visitor.rank is not None:
                self._complain(visitor.rank, str(refused))
            self._cut_off(visitor)

    def _act(self, visitor: "_Visitor", line: str) -> None:
        if visitor.rank is None:
            visitor.rank, answer = self._table.enter(line)
            self._strangers.remove(visitor)
            self._ranks[visitor.rank] = visitor
            self._send(visitor, answer)
            return
        for rank, answer in self._table.answer(visitor.rank, line).items():
            if rank in self._ranks:  # else it has ended, which is for the judge
                self._send(self._ranks[rank], answer)

    def _send(self, visitor: "_Visitor", answer: str) -> None:
        data, sent = answer.encode() + b"\n", 0
        with contextlib.suppress(OSError):
            sent = visitor.connection.send(data)
        if sent < len(data):
            self._cut_off(visitor)

    def _cut_off(self, visitor: "_Visitor") -> None:
        if visitor in self._strangers:
            self._strangers.remove(visitor)
        if visitor.rank is not None:
            self._ranks.pop(visitor.rank, None)
        with contextlib.suppress(KeyError, ValueError):  # done before
            self._selector.unregister(visitor.connection)
        visitor.connection.close()


class _Visitor:
    """A connection, and the beginning of its next line. Before it has shown a number it has no rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: Optional[int] = None
        self.partial = b""

    def lines(self) -> List[str]:
        """The lines that are complete; OSError at the end of the connection."""
        try:
            data = self.connection.recv(4 * LINE_MAX)
        except BlockingIOError:
            return []
        if not data:
            raise OSError("closed")
        *whole, self.partial = (self.partial + data).split(b"\n")
        if any(len(line) > LINE_MAX for line in [*whole, self.partial]):
            raise Refused("a line that is too long")
        try:
            return [line.decode("ascii") for line in whole]
        except UnicodeDecodeError:
            raise Refused("bytes that are no text") from None


def _listen(address: Tuple[str, int], size: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port is reserved by a socket of ours
    try:
        listener.bind(address)
        listener.listen(max(128, size))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {address[0]}:{address[1]}, where the workers are to meet: "
                          f"{error.strerror}. Say with --host-ip which address of this machine the hosts see") from None
    listener.setblocking(False)
    return listener
