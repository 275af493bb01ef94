"""PMI as the launcher speaks it. MPI itself is not needed."""
import pytest

from odsgd.launch.connections import pmi


@pytest.fixture
def table() -> pmi.Table:
    """A table of two ranks."""
    return pmi.Table(2, "(vector,(0,1,2))")


def name_of(table: pmi.Table) -> str:
    return table.answer(0, "cmd=get_my_kvsname")[0].rpartition("=")[2]


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
    assert len(name_of(pmi.Table(0, ""))) <= pmi.NAME_MAX


def test_two_jobs_have_tables_of_different_names() -> None:
    assert name_of(pmi.Table(0, "")) != name_of(pmi.Table(0, ""))


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
    ("cmd=get " + 1100 * "x", "more than a line of PMI holds"),
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


@pytest.mark.parametrize("hosts, mapping", [
    ("a", "(vector,(0,1,1))"), ("aaa", "(vector,(0,1,3))"), ("abc", "(vector,(0,3,1))"),
    ("aabbc", "(vector,(0,2,2),(2,1,1))"), ("abab", "(vector,(0,2,1),(0,2,1))"),
])
def test_ranks_of_a_host_are_told_to_share_it(hosts: str, mapping: str) -> None:
    assert pmi.process_mapping(hosts) == mapping


def test_a_mapping_too_long_to_be_told_is_a_host_for_each_rank() -> None:
    irregular = [host for number in range(200) for host in [number, 1000 + number // 2]]
    assert pmi.process_mapping(irregular) == "(vector,(0,400,1))"
