"""How the workers of a job without servers find each other: PMI-1, which MPICH and its kin speak at their start.

MPI's processes exchange their addresses through a table of keys and values, which the program that starts them keeps. A
process asks one question at a time; question and answer are a line each:

    cmd=put kvsname=… key=… value=…     cmd=get kvsname=… key=…
    cmd=barrier_in                      answered when every rank has asked

Other lines ask for the limits, for the name of the table, and to leave.

A process asks at PMI_FD, a socket without an address whose other end its agent has; so nobody else can ask. The agent
passes the lines on (`messages.py`). Here is the launcher's part: a line and its sender go in, answers by rank come out.
"""
import itertools
import re
import secrets
from typing import Dict, Hashable, List, Mapping, Optional, Sequence, Set, Tuple

from kvstore.errors import shown

NAME_MAX, KEY_MAX, VALUE_MAX = 32, 64, 896
"""Bytes of the table's name, a key and a value. A line of MPICH has 1024 bytes: these and 30 for the words between."""
LINE_MAX = 1024
MOST_PUTS = 1024
"""The most entries of one rank; MPICH makes about ten."""


class Refused(Exception):
    """A line that is not part of the protocol; its sender is to be cut off."""


class Table:
    """The table of one job.

    Invariant: a barrier opens when all ranks are in it, and then for all of them.
    """

    def __init__(self, size: int, mapping: str) -> None:
        self.size = size
        self._values = {"PMI_process_mapping": mapping}
        self._puts = [0] * self.size
        self._waiting: Set[int] = set()
        # MPICH names its shared memory by the table's name: no two jobs of a machine may have the same.
        self._name = "odsgd-" + secrets.token_hex(8)
        self._answers = {
            "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
            "get_maxes": f"cmd=maxes rc=0 kvsname_max={NAME_MAX} keylen_max={KEY_MAX} vallen_max={VALUE_MAX}",
            "get_appnum": "cmd=appnum rc=0 appnum=0",
            "get_my_kvsname": f"cmd=my_kvsname rc=0 kvsname={self._name}",
            "get_universe_size": f"cmd=universe_size rc=0 size={self.size}",
            "finalize": "cmd=finalize_ack rc=0"}

    def answer(self, rank: int, line: str) -> Dict[int, str]:
        """The answers that follow from a rank's line, by the rank that gets them."""
        if len(line) > LINE_MAX:
            raise Refused("more than a line of PMI holds")
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
    """The words of a line. The first one is the command; `value` is the last one and may hold anything printable.

    >>> _parse("cmd=put kvsname=t key=k value=a=b")
    {'cmd': 'put', 'kvsname': 't', 'key': 'k', 'value': 'a=b'}
    """
    head, mark, value = line.partition(" value=")
    pairs = [word.split("=", 1) for word in head.split(" ") if word]
    if not pairs or pairs[0][0] != "cmd" or any(len(pair) < 2 for pair in pairs):
        raise Refused(f"`{shown(line)}`, which is no line of PMI")
    words = dict(pairs)
    return {**words, "value": value} if mark else words


def aborts(line: str) -> Optional[int]:
    """The exit code with which a process wants the job to end (MPI_Abort); None for any other line. We do not
    answer: MPICH 4 then waits until it is killed, and MPICH 5 would go on after an answer and end with 0.

    >>> aborts("cmd=abort exitcode=7 message=a few words"), aborts("cmd=barrier_in")
    (7, None)
    """
    match = re.match(r"cmd=abort exitcode=(-?\d{1,10})\b", line)
    return int(match[1]) if match else None


def process_mapping(hosts: Sequence[Hashable]) -> str:
    """Which ranks share a host, and so may share memory, as MPICH writes it: blocks of (first host, hosts, ranks on
    each), in the order of the ranks.

    >>> process_mapping(["a", "a", "b", "b"]), process_mapping(["a", "b", "c", "c", "a"])
    ('(vector,(0,2,2))', '(vector,(0,2,1),(2,1,2),(0,1,1))')

    A mapping that is too long for a value becomes one host for each rank: slower, and never wrong.
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
