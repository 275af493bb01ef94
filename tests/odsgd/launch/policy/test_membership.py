"""Whether a job that has failed is started again, from facts alone."""
import dataclasses
import subprocess
from pathlib import Path
from typing import Any, List, Optional

import pytest

from odsgd.launch.hosts.check import ASKED_EVERY_S, MissingHosts
from odsgd.launch.plan import LOCAL, Job, Process, make_plan
from odsgd.launch.policy.failures import Member
from odsgd.launch.policy.judge import Judge, Verdict
from odsgd.launch.policy.membership import Attempt, Decision, Membership, decide
from tests.integration.launching import stand_in_ssh
from tests.jobs import until
from tests.odsgd.launch.jobs import ROOT, A, B, C, job


def attempt(exit_code: int = 137, culprit: Optional[str] = "worker 1", resumed: int = 400, saved: int = 400,
            farthest: int = 412, message: str = "worker 1 failed (host a, pid 7): killed by SIGKILL\n  the last lines",
            by_signal: bool = False, succeeded: bool = False) -> Attempt:
    return Attempt(Verdict(exit_code, message, culprit, by_signal, succeeded), resumed, saved, farthest, 3.45)


def test_a_failure_is_followed_by_a_restart_that_says_what_is_lost() -> None:
    assert decide(attempt(saved=405), None, 0, 3) == Decision(
        True, "restart 1 of 3, from checkpoint 405; this loses 3.5 s, at least 7 iterations")
    assert decide(attempt(saved=0), None, 1, 3).text.startswith("restart 2 of 3, from the beginning; this loses 3.5 s")


@pytest.mark.parametrize("ended", [attempt(exit_code=0, culprit=None, succeeded=True),
                                   attempt(exit_code=137, culprit=None, succeeded=True),  # a server, after the workers
                                   attempt(exit_code=130, by_signal=True)])
def test_success_and_signals_end_a_job_without_a_word(ended: Attempt) -> None:
    assert decide(ended, None, 0, 3) == Decision(False)


def test_without_restarts_nothing_is_said() -> None:
    assert decide(attempt(), None, 0, 0) == Decision(False)


def test_a_mistake_in_the_options_is_not_tried_again() -> None:
    assert decide(attempt(exit_code=64), None, 0, 3) == Decision(
        False, "not started again: the options would be wrong again")


@pytest.mark.parametrize("most, used", [(3, "all 3 restarts are"), (1, "the 1 restart is")])
def test_there_are_so_many_and_no_more(most: int, used: str) -> None:
    assert decide(attempt(saved=410), attempt(), most - 1, most).again
    assert decide(attempt(saved=410, resumed=410), attempt(), most, most) == Decision(
        False, f"not restarted: {used} used up (--max-restarts)")


def test_the_same_failure_at_the_same_place_is_not_tried_again() -> None:
    again = attempt(message="worker 1 failed (host a, pid 99): killed by SIGKILL")
    assert decide(again, attempt(), 1, 9) == Decision(
        False, "not started again: worker 1 has failed in the same way as before, after the same checkpoint (400) and "
        "no farther than then (iteration 412)")
    early, first = (one._replace(resumed=0) for one in (again, attempt()))  # they had not looked for the checkpoint
    assert "after the same checkpoint (400)" in decide(early, first, 1, 9).text


def test_of_two_that_make_the_same_mistake_either_may_be_heard_of_first() -> None:
    def fails(culprit: str, alike: str, error: str = "worker 1: unknown store `odsdg`") -> Attempt:
        one = attempt(culprit=culprit, message=f"{culprit} failed (host a, pid 7): exit code 70")
        return one._replace(verdict=dataclasses.replace(one.verdict, error=error, alike=(alike,)))

    first = fails("worker 1", "worker 0")
    assert decide(fails("worker 0", "worker 1", "worker 0: unknown store `odsdg`"), first, 1, 9).text.startswith(
        "not started again: worker 1 has failed in the same way as before")
    assert decide(fails("worker 0", "worker 2"), first, 1, 9).again, "worker 1 has not"
    assert decide(fails("worker 0", "worker 1", "no disk"), first, 1, 9).again, "with another error"


@pytest.mark.parametrize("other", [
    attempt(farthest=413), attempt(resumed=405), attempt(culprit="worker 0"),
    attempt(message="worker 1 failed (host a, pid 7): exit code 70"),
    attempt(culprit=None, message="lost host a (worker 1): ssh ended")])
def test_another_failure_is_tried_again(other: Attempt) -> None:
    assert decide(other, attempt(culprit=other.verdict.culprit and "worker 1"), 1, 9).again


def test_the_judge_knows_what_has_been_kept() -> None:
    judge = Judge(job(1, 1), [Member("worker 0", "worker", "hostA")], 5.0)
    assert (judge.saved, judge.saved_at) == (0, 5.0)
    judge.reported("worker 0", {"event": "resumed", "iteration": 40}, 7.0)
    judge.reported("worker 0", {"event": "saved", "iteration": 60}, 9.0)
    judge.reported("worker 0", {"event": "saved", "iteration": "x"}, 11.0)
    assert (judge.resumed, judge.saved, judge.saved_at) == (40, 60, 9.0)


def test_a_job_with_checkpoints_in_two_folders_goes_on_from_what_both_have() -> None:
    judge = Judge(job(1, 1), [Member("worker 0", "worker", "hostA")], 5.0)
    for event, folder, iteration in (("resumed", "a", 20), ("resumed", "b", 0), ("saved", "a", 30), ("saved", "a", 60)):
        judge.reported("worker 0", {"event": event, "iteration": iteration, "folder": folder}, 7.0)
    assert (judge.resumed, judge.saved) == (0, 0)
    judge.reported("worker 0", {"event": "saved", "iteration": 50, "folder": "b"}, 8.0)
    assert judge.saved == 50


def elastic(*slots: Any, servers: int = 1, rejoin_timeout_s: float = 20.0, **settings: Any) -> Job:
    return job(3, servers, *slots, least_workers=2, most_workers=3, max_restarts=3, rejoin_timeout_s=rejoin_timeout_s,
               **settings)


def planned(members: Membership) -> List[Process]:
    return make_plan(members.job, ROOT).processes


def failed_start(members: Membership, now: float, *blocking: str) -> Optional[Decision]:
    processes = planned(members)
    return members.after_failed_start([process for process in processes if process.name in blocking], processes, now)


def test_a_worker_that_does_not_come_back_is_waited_for_and_then_left_out() -> None:
    members = Membership(elastic())
    assert failed_start(members, 0.0, "worker 1") is None  # the first start: a failure
    members.note_started()
    assert failed_start(members, 5.0) is None
    assert failed_start(members, 10.0, "worker 1") == Decision(
        True, "worker 1 did not come back; trying again for 20 s, then without")
    assert members.job.num_workers == 3
    assert failed_start(members, 31.0, "worker 1") == Decision(
        True, "going on with 2 of 3 workers, without worker 1; batches are dealt anew")
    assert (members.job.num_workers, members.job.most_workers, members.present_ranks) == (2, 3, [0, 2])
    assert failed_start(members, 40.0, "worker 1") == Decision(
        True, "worker 2 did not come back; trying again for 20 s, then without")  # it is worker 1 by now
    assert failed_start(members, 61.0, "worker 1") is None  # there would be fewer than two


def test_at_the_next_restart_all_are_called_and_the_missing_have_one_try() -> None:
    members = Membership(elastic(rejoin_timeout_s=0.0))
    members.note_started()
    assert failed_start(members, 1.0, "worker 0")
    members.full_job = elastic(rejoin_timeout_s=100.0)
    members.note_started()
    assert members.job.num_workers == 3
    decision = failed_start(members, 2.0, "worker 0")
    assert decision and decision.text.startswith("going on with 2 of 3 workers, without worker 0")


def test_nothing_is_placed_on_a_host_that_is_gone() -> None:
    members = Membership(elastic(A, B, C, servers=3, servers_beside_workers=True, rejoin_timeout_s=0.0))
    members.note_started()
    assert failed_start(members, 0.0, "worker 1", "server 1")
    assert {process.host for process in planned(members) if process.role != "scheduler"} == {A, C}
    assert (members.job.num_workers, members.job.num_servers) == (2, 2)
    assert all(process.env["ODSGD_MOST_WORKERS"] == "3" for process in planned(members))


def test_a_host_of_servers_alone_is_left_out_and_no_worker() -> None:
    members = Membership(elastic(A, A, A, B, C, servers=2, rejoin_timeout_s=0.0))
    members.note_started()
    decision = failed_start(members, 0.0, "server 0")
    assert decision and "going on with 3 of 3 workers, without host 10.0.0.2" in decision.text
    assert [process.host for process in planned(members) if process.role == "server"] == [C, A]


def test_a_job_of_a_fixed_number_waits_for_one_that_does_not_come_back_and_leaves_nobody_out() -> None:
    members = Membership(job(3, 1, max_restarts=2, rejoin_timeout_s=20.0))
    assert failed_start(members, 0.0, "worker 1") is None  # the first start
    members.note_started()
    assert failed_start(members, 10.0, "worker 1") == Decision(
        True, "worker 1 did not come back; trying again for 20 s")
    assert failed_start(members, 31.0, "worker 1") is None and members.job is members.full_job


def test_workers_that_all_ask_for_each_other_in_vain_do_so_again_for_as_long() -> None:
    members = Membership(elastic())
    assert members.after_failed_start([], planned(members), 0.0, apart=True) is None  # it may be the network's fault
    members.note_started()
    again = members.after_failed_start([], planned(members), 10.0, apart=True)
    assert again == (True, "trying again for 20 s, should a link be down")
    assert members.after_failed_start([], planned(members), 31.0, apart=True) is None
    assert members.present_ranks == [0, 1, 2]


def test_a_job_without_restarts_leaves_nobody_out() -> None:
    members = Membership(job(3, 1))
    members.note_started()
    assert failed_start(members, 10.0, "worker 1") is None and members.job is members.full_job


def test_a_job_grows_when_a_host_is_back_and_later_and_later_if_that_was_in_vain() -> None:
    members = Membership(elastic(A, B, C, rejoin_timeout_s=0.0, grow=True))
    assert members.left_out_hosts(1.0) == ([], 1.0)
    members.note_started()
    assert failed_start(members, 0.0, "worker 1")
    assert members.left_out_hosts(10.0) == ([B], 10.0)
    for wait_s in (60.0, 120.0):
        members.note_started()
        members.note_growth()
        assert members.job.num_workers == 3
        assert failed_start(members, 20.0, "worker 1")
        assert members.left_out_hosts(30.0) == ([B], 30.0 + wait_s)
    members.note_started()  # by a restart
    members.note_started()  # now all three had met
    assert failed_start(members, 40.0, "worker 2") and members.left_out_hosts(50.0) == ([C], 50.0)
    members.full_job = elastic(A, B, C)
    assert members.left_out_hosts(60.0)[0] == []


def test_growth_is_no_restart() -> None:
    grown = Attempt(Verdict(0, "back: b; the job ends", grows=True), 400, 440, 450, 1.0)
    assert decide(grown, attempt(), 3, 3) == Decision(
        True, "going on from checkpoint 440 with all workers, if they come")


def test_missing_hosts_are_asked_and_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_SSH", stand_in_ssh(tmp_path, f'[ "$host" = {A.address} ] || exit 255'))
    missing_hosts = MissingHosts(elastic(A, B), [A, B, LOCAL], since=5.0)
    missing_hosts.ask(4.0)
    assert missing_hosts.back == []
    missing_hosts.ask(5.0)
    until(lambda: missing_hosts.ask(6.0) or missing_hosts.back == [A, LOCAL])
    missing_hosts.close()
    assert MissingHosts(elastic(A, B), [], since=0.0).back == []


def test_missing_hosts_are_asked_later_if_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[float] = []

    def fails(*_: Any, **__: Any) -> None:
        asked.append(len(asked))
        raise BlockingIOError

    monkeypatch.setattr(subprocess, "Popen", fails)
    missing_hosts = MissingHosts(elastic(A, B), [A, B], since=5.0)
    for now in (5.0, 6.0, 5.0 + ASKED_EVERY_S):
        missing_hosts.ask(now)
    assert len(asked) == 4 and missing_hosts.back == []
