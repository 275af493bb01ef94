"""Whether a job that has failed is started again, from facts alone."""
from typing import Optional

import pytest

from odsgd.launch.judge import Judge, Member, Verdict
from odsgd.launch.restarts import Attempt, Decision, decide


def attempt(exit_code: int = 137, culprit: Optional[str] = "worker 1", resumed: int = 400, saved: int = 400,
            at: int = 412, message: str = "worker 1 failed (host a, pid 7): killed by SIGKILL\n  the last lines",
            by_signal: bool = False, finished: bool = False) -> Attempt:
    return Attempt(Verdict(exit_code, message, culprit, by_signal, finished), resumed, saved, at, 3.45)


def test_a_failure_is_followed_by_a_restart_that_says_what_is_lost() -> None:
    assert decide(attempt(saved=405), None, 0, 3) == Decision(
        True, "restart 1 of 3, from checkpoint 405; lost are 3.5 s, at least 7 iterations")
    assert decide(attempt(saved=0), None, 1, 3).text.startswith("restart 2 of 3, from the beginning; lost are 3.5 s")


@pytest.mark.parametrize("ended", [attempt(exit_code=0, culprit=None, finished=True),
                                   attempt(exit_code=137, culprit=None, finished=True),  # a server, after the workers
                                   attempt(exit_code=130, by_signal=True)])
def test_success_and_signals_end_a_job_without_a_word(ended: Attempt) -> None:
    assert decide(ended, None, 0, 3) == Decision(False)


def test_without_restarts_nothing_is_said() -> None:
    assert decide(attempt(), None, 0, 0) == Decision(False)


def test_a_mistake_in_the_options_stays_one() -> None:
    assert decide(attempt(exit_code=64), None, 0, 3) == Decision(
        False, "not started again: a mistake in the options stays one")


def test_there_are_so_many_and_no_more() -> None:
    assert decide(attempt(saved=410), attempt(), 2, 3).again
    assert decide(attempt(saved=410, resumed=410), attempt(), 3, 3) == Decision(
        False, "not started again: that were 3 restarts (--max-restarts)")


def test_the_same_failure_at_the_same_place_is_not_tried_again() -> None:
    again = attempt(message="worker 1 failed (host a, pid 99): killed by SIGKILL")
    assert decide(again, attempt(), 1, 9) == Decision(
        False, "not started again: worker 1 has failed in the same way as before, after the same checkpoint (400) and "
        "no farther than then (iteration 412)")


@pytest.mark.parametrize("other", [
    attempt(at=413), attempt(resumed=405), attempt(culprit="worker 0"),
    attempt(message="worker 1 failed (host a, pid 7): exit code 70"),
    attempt(culprit=None, message="lost host a (worker 1): ssh ended")])
def test_another_failure_is_tried_again(other: Attempt) -> None:
    assert decide(other, attempt(culprit=other.verdict.culprit and "worker 1"), 1, 9).again


def test_the_judge_knows_what_has_been_kept() -> None:
    judge = Judge([Member("worker 0", "worker", "hostA")], 300.0, 5.0)
    assert (judge.history.saved, judge.history.since) == (0, 5.0)
    judge.reported("worker 0", {"event": "resumed", "iteration": 40}, 7.0)
    judge.reported("worker 0", {"event": "saved", "iteration": 60}, 9.0)
    judge.reported("worker 0", {"event": "saved", "iteration": "x"}, 11.0)
    assert (judge.history.resumed, judge.history.saved, judge.history.since) == (40, 60, 9.0)
