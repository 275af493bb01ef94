"""PMI as the launcher speaks it: the table without a socket, then on real ones. MPI itself is not needed."""
import selectors
import socket
from typing import Iterator, List, Tuple, Union

import pytest

from kvstore.errors import ConfigError
from odsgd.launch import addresses, pmi

ENTERED = "cmd=initack rc=0\ncmd=set size=2\ncmd=set rank={}\ncmd=set debug=0"


@pytest.fixture
def table() -> pmi.Table:
    """A table of two ranks, both in; its name."""
    table = pmi.Table(["11", "22"], "(vector,(0,1,2))")
    assert [table.enter("cmd=initack pmiid=" + number)[0] for number in ("22", "11")] == [1, 0]
    return table


def name_of(table: pmi.Table) -> str:
    return table.answer(0, "cmd=get_my_kvsname")[0].rpartition("=")[2]


def test_a_process_that_shows_a_number_is_told_its_rank_once() -> None:
    table = pmi.Table(["11", "22"], "")
    assert table.enter("cmd=initack pmiid=22") == (1, ENTERED.format(1))
    for line in ("cmd=initack pmiid=22", "cmd=initack pmiid=33", "cmd=initack", "cmd=init pmi_version=1",
                 "cmd=put pmiid=11 key=k value=v"):
        with pytest.raises(pmi.Refused):
            table.enter(line)
    assert table.enter("cmd=initack pmiid=11")[0] == 0


def test_a_start_as_mpich_makes_it(table: pmi.Table) -> None:
    def ask(line: str) -> str:
        return table.answer(0, line)[0]
    assert ask("cmd=init pmi_version=1 pmi_subversion=1") == \
        "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
    assert ask("cmd=get_maxes") == "cmd=maxes rc=0 kvsname_max=32 keylen_max=64 vallen_max=896"
    assert ask("cmd=get_appnum") == "cmd=appnum rc=0 appnum=0"
    assert ask("cmd=get_universe_size") == "cmd=universe_size rc=0 size=2"
    get = "cmd=get kvsname={} key={}".format(name_of(table), "{}")
    assert ask(get.format("PMI_process_mapping")) == "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))"
    assert ask(get.format("card")) == "cmd=get_result rc=-1 msg=key_not_found value=unknown"
    assert ask("cmd=put kvsname={} key=card value=a=b c".format(name_of(table))) == \
        "cmd=put_result rc=0 msg=success"
    assert table.answer(1, get.format("card")) == {1: "cmd=get_result rc=0 msg=success value=a=b c"}
    assert ask("cmd=finalize") == "cmd=finalize_ack rc=0"


def test_limits_told_to_mpich_fit_in_its_lines() -> None:
    assert pmi.NAME_MAX + pmi.KEY_MAX + pmi.VALUE_MAX + 30 <= pmi.LINE_MAX
    assert len(name_of(pmi.Table([], ""))) <= pmi.NAME_MAX


def test_two_jobs_have_tables_of_different_names() -> None:
    assert name_of(pmi.Table([], "")) != name_of(pmi.Table([], ""))


def test_a_barrier_opens_when_all_are_in_it_and_closes_again(table: pmi.Table) -> None:
    for _ in range(2):
        assert table.answer(0, "cmd=barrier_in") == {}
        assert table.answer(0, "cmd=barrier_in") == {}  # a rank that asks twice is still one
        assert table.answer(1, "cmd=barrier_in") == {0: "cmd=barrier_out rc=0", 1: "cmd=barrier_out rc=0"}


@pytest.mark.parametrize("line, why", [
    ("cmd=spawn nprocs=2", "`spawn`, which this launcher does not serve"),
    ("hello", "`hello`, which is no line of PMI"),
    ("", "``, which is no line of PMI"),
    ("key=k cmd=get", "no line of PMI"),
    ("cmd=get kvsname=other key=k", "a table `other`"),
    ("cmd=put kvsname={name} key= value=v", "more than the table takes"),
    ("cmd=put kvsname={name} key=" + 65 * "k" + " value=v", "more than the table takes"),
    ("cmd=put kvsname={name} key=k value=" + 897 * "v", "more than the table takes"),
])
def test_what_is_not_the_protocol_is_refused(table: pmi.Table, line: str, why: str) -> None:
    with pytest.raises(pmi.Refused, match=why):
        table.answer(0, line.format(name=name_of(table)))


def test_a_rank_fills_only_its_part_of_the_table(table: pmi.Table) -> None:
    put = "cmd=put kvsname={} key=k value=v".format(name_of(table))
    for _ in range(pmi.MOST_PUTS):
        table.answer(0, put)
    with pytest.raises(pmi.Refused):
        table.answer(0, put)
    assert table.answer(1, put) == {1: "cmd=put_result rc=0 msg=success"}


def test_an_abort_is_left_to_the_exit_of_the_process(table: pmi.Table) -> None:
    assert table.answer(0, "cmd=abort exitcode=1 message=a few words") == {}


@pytest.mark.parametrize("hosts, mapping", [
    ("a", "(vector,(0,1,1))"), ("aaa", "(vector,(0,1,3))"), ("abc", "(vector,(0,3,1))"),
    ("aabbc", "(vector,(0,2,2),(2,1,1))"), ("abab", "(vector,(0,2,1),(0,2,1))"),
])
def test_ranks_of_a_host_are_told_to_share_it(hosts: str, mapping: str) -> None:
    assert pmi.process_mapping(hosts) == mapping


def test_a_mapping_too_long_to_be_told_is_a_host_for_each_rank() -> None:
    irregular = [host for number in range(200) for host in [number, 1000 + number // 2]]
    assert pmi.process_mapping(irregular) == "(vector,(0,400,1))"


def test_numbers_are_different_ints_of_c() -> None:
    numbers = pmi.new_numbers(100)
    assert len(set(numbers)) == 100 and all(0 < int(number) < 2 ** 31 for number in numbers)


class Loop:
    """The launcher's loop, a rendezvous in it, and clients that wait for its answers."""

    def __init__(self, numbers: List[str]) -> None:
        self.selector = selectors.DefaultSelector()
        self.complaints: List[Tuple[int, str]] = []
        with addresses.reserve_port() as holder:
            self.address = ("127.0.0.1", holder.getsockname()[1])
            self.rendezvous = pmi.Rendezvous(self.address, pmi.Table(numbers, ""), self.selector,
                                     lambda rank, why: self.complaints.append((rank, why)))
        self.clients: List[socket.socket] = []

    def client(self, text: Union[str, bytes, None] = None) -> socket.socket:
        client = socket.create_connection(self.address, timeout=10)
        self.clients.append(client)
        self.turn()
        return client if text is None else self.say(client, text)

    def say(self, client: socket.socket, text: Union[str, bytes]) -> socket.socket:
        client.sendall(text if isinstance(text, bytes) else text.encode())
        self.turn()
        return client

    def turn(self) -> None:
        while True:
            ready = self.selector.select(0.05)
            if not ready:
                return
            for key, _ in ready:
                key.data()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.rendezvous.close()
        self.selector.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(["11", "22"])
    yield loop
    loop.close()


def answer(client: socket.socket) -> str:
    return client.recv(4096).decode()


def is_cut_off(client: socket.socket) -> bool:
    try:
        return client.recv(4096) == b""
    except ConnectionError:
        return True


def test_ranks_are_served_over_sockets(loop: Loop) -> None:
    one, two = loop.client("cmd=initack pmiid=11\n"), loop.client("cmd=initack pmi")
    assert answer(one) == ENTERED.format(0) + "\n"
    loop.say(two, "id=22\ncmd=get_appnum\n")  # lines do not come as packets
    assert answer(two) == ENTERED.format(1) + "\ncmd=appnum rc=0 appnum=0\n"
    loop.say(one, "cmd=barrier_in\n")
    loop.say(two, "cmd=barrier_in\n")
    assert answer(one) == answer(two) == "cmd=barrier_out rc=0\n"
    assert loop.complaints == []


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"cmd=initack pmiid=33\n", b"\xff\xfe\n", 1025 * b"x",
                                  b"cmd=get_maxes\n", b"\n"])
def test_a_stranger_is_cut_off_without_effect(loop: Loop, text: Union[str, bytes]) -> None:
    one, stranger = loop.client("cmd=initack pmiid=11\n"), loop.client(text)
    assert is_cut_off(stranger) and loop.complaints == []
    assert answer(loop.client("cmd=initack pmiid=22\n")) == ENTERED.format(1) + "\n"
    assert answer(one) == ENTERED.format(0) + "\n"


def test_a_second_process_with_a_number_is_cut_off_and_the_first_goes_on(loop: Loop) -> None:
    first = loop.client("cmd=initack pmiid=11\n")
    assert answer(first) == ENTERED.format(0) + "\n"
    assert is_cut_off(loop.client("cmd=initack pmiid=11\n"))
    assert answer(loop.say(first, "cmd=finalize\n")) == "cmd=finalize_ack rc=0\n"


def test_a_rank_that_asks_for_something_else_is_cut_off_and_named(loop: Loop) -> None:
    one = loop.client("cmd=initack pmiid=11\n")
    answer(one)
    assert is_cut_off(loop.say(one, "cmd=spawn nprocs=2\n"))
    assert loop.complaints == [(0, "`spawn`, which this launcher does not serve")]


def test_strangers_that_say_nothing_make_room_for_others(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmi, "MOST_STRANGERS", 0)
    silent = [loop.client() for _ in range(2)]  # as many as there are ranks
    assert answer(loop.client("cmd=initack pmiid=11\n")) == ENTERED.format(0) + "\n"
    assert is_cut_off(silent[0])


def test_a_rank_that_has_gone_holds_no_other_up(loop: Loop) -> None:
    one, two = loop.client("cmd=initack pmiid=11\n"), loop.client("cmd=initack pmiid=22\n")
    loop.say(one, "cmd=barrier_in\n").close()
    loop.say(two, "cmd=barrier_in\n")
    assert answer(two) == ENTERED.format(1) + "\ncmd=barrier_out rc=0\n"


def test_an_address_that_is_not_this_machines_is_told(loop: Loop) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.77:4000.*Say with --host-ip"):
        pmi.Rendezvous(("192.0.2.77", 4000), pmi.Table([], ""), loop.selector, print)
