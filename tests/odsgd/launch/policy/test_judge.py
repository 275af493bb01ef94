"""When a job ends and whose fault it is said to be: events in, a verdict out, in a time of our own."""
import itertools
import math
import signal
from typing import List, Optional, Sequence

import pytest

from odsgd.launch.policy.failures import TAIL_LINES, Member
from odsgd.launch.policy.judge import (
    EARLY_EXIT_FAILS_AFTER_S,
    FAREWELL_S,
    LAST_WORDS_S,
    SETTLE_S,
    Judge,
    LostWorkers,
    News,
    Verdict,
)
from tests.odsgd.launch.jobs import job

NAMES = ("scheduler", "server 0", "worker 0", "worker 1")
RING = ("worker 0", "worker 1", "worker 2")


def running(*joined: str, startup_timeout_s: float = 300.0, names: Sequence[str] = NAMES,
            on_worker_loss: str = "fail", hang_timeout_s: float = 0.0) -> Judge:
    """A job of two workers and a server at time 0; these have joined."""
    asked = job(2, 1, startup_timeout_s=startup_timeout_s, on_worker_loss=on_worker_loss, hang_timeout_s=hang_timeout_s)
    judge = Judge(asked, [Member(name, name.split()[0], "hostA") for name in names], 0.0, "10.0.0.9:4000")
    judge.liveness.answered(names, math.inf)
    for number, name in enumerate(names):
        judge.started(name, 100 + number)
    for name in joined:
        judge.reported(name, {"event": "joined"}, 0.0)
    return judge


def verdict_at(judge: Judge, now: float) -> Verdict:
    verdict = judge.tick(now)
    assert verdict is not None
    return verdict


def test_a_running_job_has_no_verdict() -> None:
    assert running(*NAMES).tick(1e6) is None


def test_the_verdict_waits_for_failures_that_belong_together() -> None:
    judge = running(*NAMES)
    judge.exited("worker 1", 3, 10.0)
    assert judge.tick(10.0 + SETTLE_S / 2) is None
    verdict = verdict_at(judge, 10.0 + SETTLE_S)
    assert (verdict.exit_code, verdict.culprit) == (3, "worker 1")
    assert verdict.message == "worker 1 failed (host hostA, pid 103): exit code 3"


def test_the_first_failure_is_the_cause_and_the_others_are_listed() -> None:
    judge = running(*NAMES)
    judge.exited("server 0", -signal.SIGKILL, 10.0)
    judge.exited("worker 0", 1, 10.1)
    verdict = verdict_at(judge, 11.0)
    assert (verdict.exit_code, verdict.culprit) == (137, "server 0")
    assert "killed by SIGKILL (kill -9, or the kernel ran out of memory)" in verdict.message
    assert "after it, not the cause: worker 0: exit code 1" in verdict.message


def test_of_two_that_mpi_may_have_ended_on_a_ring_none_is_said_to_be_the_consequence() -> None:
    """An agent does not tell of them in their order, either."""
    for codes, first, known in (((-11, -11), 0, False), ((1, -6), 0, False), ((-11, -6), 0, False),
                                ((1, -11), 1, False), ((1, -9), 1, True)):
        judge = running(*NAMES[2:], names=NAMES[2:])
        for name, code in zip(NAMES[2:], codes):
            judge.exited(name, code, 10.0)
        verdict = verdict_at(judge, 11.0)
        assert verdict.culprit == f"worker {first}"
        assert (f"or before it (which failed first is not known): worker {1 - first}" in verdict.message) == (not known)
        assert (f"after it, not the cause: worker {1 - first}" in verdict.message) == known


def test_behind_a_silent_agent_of_a_ring_another_may_have_failed_first() -> None:
    """So whom MPI has crashed, or ended, is not blamed without a doubt until all agents have answered."""
    for code, (answered_at, doubt) in itertools.product((-signal.SIGSEGV, 1), ((9.0, True), (10.0, False))):
        judge = running(*NAMES[2:], names=NAMES[2:])
        judge.exited("worker 0", code, 10.0)
        assert judge.take_news().failed and not judge.take_news().failed
        answers(judge, "worker 1", answered_at, 10.3)  # a beat says nothing, nor does an answer to an earlier ping
        assert (judge.tick(10.0 + SETTLE_S) is None) == doubt
        text = "no agent has answered since for worker 1: whether another failed first is not known"
        assert (text in verdict_at(judge, 10.0 + LAST_WORDS_S).message) == doubt


def test_behind_a_silent_agent_that_which_another_misses_may_have_failed_first() -> None:
    for consequence in (True, False):
        judge = running(*NAMES)
        answers(judge, "server 0", 9.0, 9.0)
        judge.reported("worker 0", {"event": "failed", "error": "server 0 is gone", "consequence": consequence}, 10.0)
        judge.exited("worker 0", 70, 10.0)
        assert (judge.tick(10.0 + SETTLE_S) is None) == consequence
        text = "no agent has answered since for server 0: whether another failed first is not known"
        assert (text in verdict_at(judge, 10.0 + LAST_WORDS_S).message) == consequence


def test_the_agents_are_to_answer_after_the_failure_that_is_blamed() -> None:
    """Of three on a ring two are ended by MPI, which crashes the second: it is blamed, and the third not heard yet."""
    judge = running(*RING, names=RING)
    judge.exited("worker 0", 1, 10.0)
    answers(judge, "worker 2", 10.0, 10.1)
    judge.exited("worker 1", -signal.SIGSEGV, 10.3)
    assert judge.tick(10.0 + SETTLE_S) is None
    judge.exited("worker 2", -signal.SIGKILL, 10.5)
    assert verdict_at(judge, 10.5).culprit == "worker 2"


def test_on_a_ring_a_reported_error_is_the_cause_of_a_crash_that_was_seen_before_it() -> None:
    judge = running(*RING, names=RING)
    judge.exited("worker 0", -signal.SIGSEGV, 10.0)
    judge.reported("worker 1", {"event": "failed", "error": "ValueError: nan"}, 10.0)
    judge.exited("worker 1", 70, 10.0)
    for name in RING:
        answers(judge, name, 10.0, 10.1)
    assert verdict_at(judge, 11.0).culprit == "worker 1"


def answers(judge: Judge, name: str, ping_at: float, now: float) -> None:
    """The process's agent speaks now, and has answered the ping of `ping_at`."""
    judge.liveness.heard([name], now)
    judge.liveness.answered([name], ping_at)


def test_a_lost_host_is_the_cause_of_a_crash_that_was_seen_before_it() -> None:
    judge = running(*NAMES[2:], names=NAMES[2:])
    judge.exited("worker 0", -signal.SIGSEGV, 10.0)
    judge.host_lost("hostB", ["worker 1"], "ssh ended with exit code 245", (), 10.1)
    assert verdict_at(judge, 11.0).message.startswith("lost host hostB (worker 1): ssh ended")


def test_a_report_counts_when_it_is_made_not_when_the_process_ends() -> None:
    judge = running(*NAMES)
    judge.reported("worker 1", {"event": "failed", "error": "ValueError: nan"}, 10.0)
    judge.exited("worker 0", 1, 10.1)
    assert judge.tick(10.5) is None  # worker 1 is still printing its traceback
    judge.output("worker 1", "Traceback")
    judge.exited("worker 1", 70, 10.6)
    verdict = verdict_at(judge, 10.7)
    assert (verdict.exit_code, verdict.culprit) == (70, "worker 1")
    assert verdict.message.splitlines()[2] == "  it reported: ValueError: nan"
    assert verdict.message.splitlines()[-1] == "    | Traceback"


def test_what_a_process_has_reported_and_printed_is_not_told_once_more() -> None:
    judge = running(*NAMES)
    judge.output("worker 1", "worker 1: ValueError: nan")
    judge.reported("worker 1", {"event": "failed", "error": "ValueError: nan"}, 10.0)
    judge.exited("worker 1", 70, 10.1)
    verdict = verdict_at(judge, 10.7)
    assert verdict.message.splitlines()[1:] == ["  it reported: ValueError: nan"]


def test_a_reporter_that_does_not_end_is_not_waited_for_for_ever() -> None:
    judge = running(*NAMES)
    judge.reported("worker 1", {"event": "failed", "error": "stuck"}, 10.0)
    assert verdict_at(judge, 10.0 + LAST_WORDS_S).exit_code == 70


@pytest.mark.parametrize("first", ["deadline", "admitted"])
def test_a_process_that_missed_another_one_is_not_the_cause(first: str) -> None:
    judge = running(*NAMES)
    if first == "deadline":
        judge.reported("worker 0", {"event": "failed", "error": "no answer within 600 s"}, 10.0)
        judge.exited("worker 0", 75, 10.0)
    else:
        judge.reported("worker 0", {"event": "failed", "error": "peer lost", "consequence": True}, 10.0)
    judge.exited("worker 1", -signal.SIGSEGV, 10.1)
    assert verdict_at(judge, 11.0).culprit == "worker 1"


@pytest.mark.parametrize("first, second, culprit", [
    *((ended, -signal.SIGKILL, "worker 0") for ended in (255, -signal.SIGABRT, -signal.SIGSEGV)),
    *((ended, -signal.SIGSEGV, "worker 0") for ended in (255, -signal.SIGABRT)),
    (-signal.SIGSEGV, -signal.SIGBUS, "worker 1"),
    (3, -signal.SIGABRT, "worker 1"),  # it ended itself, and perhaps for that reason
])
def test_a_worker_that_mpi_may_have_ended_is_the_cause_only_where_none_was_killed_or_crashed_before(
        first: int, second: int, culprit: str) -> None:
    judge = running(*NAMES)
    judge.exited("worker 1", first, 10.0)
    judge.exited("worker 0", second, 10.1)
    assert verdict_at(judge, 11.0).culprit == culprit


@pytest.mark.parametrize("ended", [255, -signal.SIGABRT, -signal.SIGSEGV])
def test_a_worker_that_mpi_has_ended_after_a_deadline_of_another_is_not_the_cause(ended: int) -> None:
    ends = [("worker 1", 75), ("worker 0", ended)]
    for seen in (ends, ends[::-1]):
        judge = running(*NAMES[2:], names=NAMES[2:])
        for name, code in seen:
            judge.exited(name, code, 10.0)
        assert verdict_at(judge, 11.0).culprit == "worker 1"


def test_nor_is_one_that_misses_the_worker_whose_deadline_was_over() -> None:
    judge = running(*RING, names=RING)
    judge.reported("worker 2", {"event": "failed", "error": "MPI reports an error", "consequence": True}, 10.0)
    judge.exited("worker 2", 70, 10.0)
    judge.reported("worker 1", {"event": "failed", "error": "nothing has moved for 30 s", "consequence": True}, 10.1)
    judge.exited("worker 1", 75, 10.1)
    assert verdict_at(judge, 10.0 + LAST_WORDS_S).culprit == "worker 1"


@pytest.mark.parametrize("killed", [-signal.SIGKILL, -signal.SIGSEGV])
def test_one_whose_mpi_aborts_is_the_cause_unless_another_was_struck(killed: int) -> None:
    for other, culprit, exit_code in ((killed, "worker 0", 128 - killed), (7, "worker 1", 15)):
        judge = running(*NAMES)
        judge.mpi_aborted("worker 1", 0x30290F, 10.0)
        judge.exited("worker 1", 0, 10.1)
        judge.exited("worker 0", other, 10.2)
        verdict = verdict_at(judge, 11.0)
        assert (verdict.culprit, verdict.exit_code) == (culprit, exit_code)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGXCPU, signal.SIGFPE])
def test_one_that_a_signal_has_ended_which_mpi_does_not_send_is_the_cause(number: int) -> None:
    judge = running(*RING, names=RING)
    judge.exited("worker 1", -signal.SIGABRT, 10.0)
    judge.exited("worker 2", -number, 10.1)
    assert verdict_at(judge, 10.0 + LAST_WORDS_S).culprit == "worker 2"


def test_an_expired_deadline_alone_is_the_cause() -> None:
    judge = running(*NAMES)
    judge.exited("worker 0", 75, 10.0)
    assert verdict_at(judge, 11.0).exit_code == 75


def test_the_message_ends_with_the_last_lines_of_the_culprit() -> None:
    judge = running(*NAMES)
    for number in range(30):
        judge.output("worker 0", "line %d" % number)
    judge.exited("worker 0", 1, 10.0)
    tail = verdict_at(judge, 11.0).message.splitlines()[-TAIL_LINES:]
    assert tail == ["    | line %d" % number for number in range(10, 30)]


def test_a_script_that_imports_mxnet_first_is_told_what_it_lacks() -> None:
    judge = running(*NAMES)
    judge.output("worker 0", "AttributeError: module 'numpy' has no attribute 'bool'.")
    judge.exited("worker 0", 1, 10.0)
    assert "put `import odsgd` before `import mxnet`" in verdict_at(judge, 11.0).message


def test_a_job_that_never_makes_a_store_does_not_wait_for_its_servers() -> None:
    judge = running()
    end_workers(judge, 10.0)
    verdict = verdict_at(judge, 10.1)
    assert (verdict.exit_code, verdict.message) == (0, "")


def end_workers(judge: Judge, now: float) -> None:
    judge.exited("worker 0", 0, now)
    judge.exited("worker 1", 0, now)


def test_all_have_ended_well() -> None:
    judge = running(*NAMES)
    end_workers(judge, 10.0)
    assert judge.tick(10.05) is None
    judge.exited("server 0", 0, 10.1)
    assert verdict_at(judge, 10.1) == Verdict(0, "", workers_succeeded=True)  # the scheduler hears no farewell


def test_a_server_whose_word_of_joining_comes_late_is_waited_for_all_the_same() -> None:
    judge = running("scheduler", "worker 0", "worker 1")  # nobody joins alone
    end_workers(judge, 10.0)
    assert judge.tick(10.05) is None
    judge.reported("server 0", {"event": "joined"}, 10.1)
    judge.exited("server 0", 0, 10.2)
    assert verdict_at(judge, 10.2) == Verdict(0, "", workers_succeeded=True)


def test_a_server_that_says_it_is_done_is_not_waited_for() -> None:
    judge = running(*NAMES)
    judge.reported("server 0", {"event": "done"}, 9.9)
    end_workers(judge, 10.0)
    assert verdict_at(judge, 10.0) == Verdict(0, "", workers_succeeded=True)


def test_servers_that_stay_are_stopped_and_the_job_has_succeeded() -> None:
    judge = running(*NAMES)
    end_workers(judge, 10.0)
    assert judge.tick(10.0 + FAREWELL_S - 0.1) is None
    verdict = verdict_at(judge, 10.0 + FAREWELL_S)
    assert verdict.exit_code == 0
    assert verdict.message == "server 0 had not ended 5 s after the last worker; stopped"


def test_a_server_that_crashes_after_success_is_named_and_the_job_has_not_succeeded() -> None:
    judge = running(*NAMES)
    end_workers(judge, 10.0)
    judge.exited("server 0", -signal.SIGABRT, 10.1)
    judge.exited("scheduler", 0, 10.1)
    verdict = verdict_at(judge, 10.2)
    assert verdict.exit_code == 134
    assert verdict.message == "server 0 ended badly after the last worker had succeeded (host hostA, pid 101): " \
                              "killed by SIGABRT"


def test_a_server_that_reports_a_failure_after_success_fails_the_job() -> None:
    judge = running(*NAMES)
    end_workers(judge, 10.0)
    judge.reported("server 0", {"event": "failed", "error": "disk full"}, 10.1)
    judge.exited("server 0", 70, 10.1)
    assert verdict_at(judge, 11.0).exit_code == 70


def test_a_server_that_leaves_while_all_workers_run_fails_the_job() -> None:
    judge = running(*NAMES)
    judge.exited("server 0", 0, 10.0)
    assert judge.tick(10.0 + EARLY_EXIT_FAILS_AFTER_S - 0.1) is None
    verdict = verdict_at(judge, 10.0 + EARLY_EXIT_FAILS_AFTER_S)
    assert verdict.exit_code == 70 and verdict.culprit == "server 0"


def test_a_server_that_leaves_when_a_worker_is_done_is_as_it_should_be() -> None:
    judge = running(*NAMES)
    judge.reported("worker 0", {"event": "done"}, 9.0)  # it may go on alone for hours, evaluating
    judge.exited("server 0", 0, 10.0)
    assert judge.tick(1e5) is None


def test_the_startup_table_says_where_each_process_stands() -> None:
    judge = Judge(job(2, 1, startup_timeout_s=60.0), [Member(name, name.split()[0], "hostB") for name in NAMES], 0.0)
    judge.started("scheduler", 100)
    judge.reported("scheduler", {"event": "joined"}, 1.0)
    judge.started("server 0", 101)
    judge.reported("server 0", {"event": "connecting"}, 1.0)
    judge.started("worker 0", 102)
    assert judge.tick(59.9) is None
    verdict = verdict_at(judge, 60.0)
    assert verdict.exit_code == 75
    assert verdict.message.splitlines()[:6] == [
        "the job has not come up within 60 s; missing: worker 0, worker 1 (2 of 4)",
        "  process    host   pid  state",
        "  scheduler  hostB  100  joined",
        "  server 0   hostB  101  asked to join, waits for the others",
        "  worker 0   hostB  102  running, has not asked to join",
        "  worker 1   hostB  -    never started"]


def test_a_job_whose_processes_ask_and_do_not_meet_points_to_the_network() -> None:
    judge = running(startup_timeout_s=60.0)
    for name in NAMES:
        judge.reported(name, {"event": "connecting"}, 1.0)
    assert "Check that every host can connect to 10.0.0.9:4000" in verdict_at(judge, 60.0).message


def test_a_worker_that_has_not_met_the_others_is_waited_for_though_all_servers_have_joined() -> None:
    """As when one host does not reach a server's: ps-lite would wait for ten minutes."""
    judge = running("scheduler", "server 0", startup_timeout_s=60.0)
    for name in WORKERS:
        judge.reported(name, {"event": "connecting"}, 1.0)
    judge.reported("worker 0", {"event": "met"}, 2.0)
    assert judge.tick(59.0) is None and "waiting for worker 1 on hostA (asked" in judge.startup_text(59.0)
    verdict = verdict_at(judge, 60.0)
    assert verdict.apart and "Check that every host can connect to 10.0.0.9:4000 and hostA" in verdict.message
    judge = running("scheduler", "server 0", startup_timeout_s=60.0)
    for name in WORKERS:
        judge.reported(name, {"event": "connecting"}, 1.0)
        judge.reported(name, {"event": "met"}, 2.0)
    assert judge.tick(1e5) is None  # they read their data now


def test_a_worker_that_never_reports_is_not_missed_once_the_servers_have_joined() -> None:
    judge = running("scheduler", "server 0", startup_timeout_s=60.0)
    assert judge.tick(1e5) is None


def test_a_worker_that_left_before_joining_is_missing() -> None:
    judge = running("scheduler", startup_timeout_s=60.0)
    judge.exited("worker 1", 0, 2.0)
    assert "worker 1   hostA  103  exited with code 0 without joining" in verdict_at(judge, 60.0).message


WORKERS = ("worker 0", "worker 1")


def test_without_servers_no_worker_is_missed_before_a_worker_asks_for_the_others() -> None:
    judge = running(names=WORKERS)
    assert judge.tick(1e6) is None
    judge.reported("worker 0", {"event": "connecting"}, 1e6)
    assert judge.tick(1e6 + 299) is None
    verdict = verdict_at(judge, 1e6 + 300)
    assert verdict.exit_code == 75 and "missing: worker 1 (1 of 2)" in verdict.message


def test_without_servers_a_worker_that_left_instead_of_joining_is_missing() -> None:
    judge = running(names=WORKERS)
    judge.reported("worker 0", {"event": "connecting"}, 0.0)
    judge.exited("worker 1", 0, 1.0)
    assert "missing: worker 1" in verdict_at(judge, 300).message


def test_without_servers_a_worker_that_is_stopped_when_it_has_asked_for_the_others_is_missing() -> None:
    judge = running(names=WORKERS, startup_timeout_s=60.0, hang_timeout_s=90.0)
    for name in WORKERS:
        judge.reported(name, {"event": "connecting"}, 0.0)
    judge.reported("worker 1", {"event": "joined"}, 1.0)
    for now in range(1, 60):
        judge.liveness.heard(WORKERS, now)
        judge.liveness.beats({"worker 0": {"silent_s": float(now), "state": "T"}}, now)
        assert judge.tick(now) is None
    message = verdict_at(judge, 60.0).message
    assert "missing: worker 0 (1 of 2)" in message and "for the others, does not answer" in message


def test_without_servers_workers_that_have_met_are_up() -> None:
    judge = running(names=WORKERS)
    for name in WORKERS:
        judge.reported(name, {"event": "connecting"}, 10.0)
        judge.reported(name, {"event": "joined"}, 11.0)
    assert judge.tick(1e6) is None


def test_a_worker_whose_agent_never_speaks_is_missed_though_all_servers_have_joined() -> None:
    members = [Member(name, name.split()[0], "hostA") for name in NAMES[:3]]
    judge = Judge(job(1, 1, startup_timeout_s=60.0), members, 0.0)
    for name in NAMES[:2]:
        judge.started(name, 100)
        judge.reported(name, {"event": "joined"}, 5.0)
    assert judge.tick(59.0) is None
    assert "missing: worker 0 (1 of 3)" in verdict_at(judge, 60.0).message


def test_startup_timeout_0_waits_for_ever() -> None:
    assert running(startup_timeout_s=0.0).tick(1e9) is None


def test_a_signal_goes_before_everything_else() -> None:
    judge = running(*NAMES)
    judge.exited("worker 0", 1, 10.0)
    judge.interrupted(signal.SIGTERM)
    assert verdict_at(judge, 10.0) == Verdict(143, "stopped by SIGTERM", by_signal=True)


def test_a_lost_host_names_the_processes_that_were_there() -> None:
    judge = running(*NAMES)
    judge.host_lost("hostA", ["worker 0", "worker 1"], "ssh ended with exit code 255", ["Connection reset"], 10.0)
    verdict = verdict_at(judge, 11.0)
    assert verdict.message == "lost host hostA (worker 0, worker 1): ssh ended with exit code 255: Connection reset"
    assert verdict.exit_code == 70


def test_an_agent_that_is_told_to_end_is_the_cause_and_not_its_processes() -> None:
    judge = running(*NAMES)
    judge.agent_signalled("hostA", ["worker 0", "worker 1"], signal.SIGTERM, 10.0)
    judge.exited("worker 1", -signal.SIGTERM, 10.1)
    assert verdict_at(judge, 11.0) == Verdict(
        143, "lost host hostA (worker 0, worker 1): its agent was told to end by SIGTERM")


# --on-worker-loss continue

FIVE = (*NAMES, "worker 2")


def going_on(*joined: str) -> Judge:
    """A job of three workers that may lose some; all have joined unless said otherwise."""
    return running(*(joined or FIVE), names=FIVE, on_worker_loss="continue")


def news_at(judge: Judge, now: float) -> News:
    assert judge.tick(now) is None
    return judge.take_news()


def lost_at(judge: Judge, now: float) -> List[LostWorkers]:
    return news_at(judge, now).lost


def test_a_worker_is_lost_and_the_job_goes_on() -> None:
    judge = going_on()
    judge.output("worker 1", "its last line")
    judge.exited("worker 1", -signal.SIGKILL, 10.0)
    assert lost_at(judge, 10.0 + SETTLE_S / 2) == []
    assert lost_at(judge, 10.0 + SETTLE_S) == [LostWorkers([1], (
        "worker 1 was lost (host hostA, pid 103): killed by SIGKILL (kill -9, or the kernel ran out of memory); "
        "the job goes on with 2 of 3 workers\n  the last lines of worker 1:\n    | its last line"))]
    assert lost_at(judge, 1e5) == []


def test_a_job_that_has_lost_workers_succeeds_and_says_so() -> None:
    judge = going_on()
    judge.exited("worker 2", 3, 10.0)
    assert "goes on with 2 of 3" in lost_at(judge, 11.0)[0].message
    judge.reported("worker 1", {"event": "failed", "error": "ValueError: nan"}, 12.0)
    judge.exited("worker 1", 70, 12.1)
    (lost,) = lost_at(judge, 13.0)
    assert "exit code 70; the job goes on with 1 of 3 workers\n  it reported: ValueError: nan" in lost.message
    judge.exited("worker 0", 0, 14.0)
    judge.exited("server 0", 0, 14.1)
    judge.exited("scheduler", 0, 14.1)
    assert verdict_at(judge, 14.1) == Verdict(0, "the job has finished without workers [1, 2]",
                                               workers_succeeded=True)


def test_a_worker_may_be_lost_when_all_others_have_finished() -> None:
    judge = going_on()
    judge.exited("worker 0", 0, 10.0)
    judge.exited("worker 2", 0, 10.0)
    judge.exited("worker 1", 1, 10.1)
    assert lost_at(judge, 11.0)[0].message.endswith("exit code 1; every other worker has finished")
    assert verdict_at(judge, 11.0 + FAREWELL_S).message.endswith("finished without workers [1]")


def test_a_worker_that_joins_later_may_die_and_the_job_does_not_wait_for_it() -> None:
    judge = going_on()
    judge.exited("worker 2", 3, 10.0)
    assert "goes on with 2 of 3" in lost_at(judge, 11.0)[0].message
    judge.joins(Member("worker 2", "worker", "hostB"), 12.0)
    judge.reported("worker 2", {"event": "joined"}, 13.0)
    assert (judge.take_news().joined, judge.take_news().joined) == ([2], [])
    judge.exited("worker 1", 3, 14.0)
    assert "goes on with 2 of 3" in lost_at(judge, 15.0)[0].message
    judge.joins(Member("worker 1", "worker", "hostB"), 16.0)
    judge.exited("worker 1", -signal.SIGKILL, 16.1)  # before it had joined
    assert "goes on with 2 of 3" in lost_at(judge, 17.0)[0].message
    judge.exited("worker 0", 0, 18.0)
    judge.exited("server 0", 0, 18.1)
    assert verdict_at(judge, 18.1) == Verdict(0, "the job has finished without workers [1]", workers_succeeded=True)


def test_who_has_not_joined_at_the_end_fills_no_place() -> None:
    judge = going_on()
    judge.exited("worker 2", 3, 10.0)
    assert lost_at(judge, 11.0)
    judge.joins(Member("worker 2", "worker", "hostB"), 12.0)
    judge.joins(Member("worker 3", "worker", "hostB"), 12.0)  # into a place that was empty from the start
    for name in ("worker 0", "worker 1", "server 0"):
        judge.exited(name, 0, 13.0)
    assert verdict_at(judge, 13.0) == Verdict(0, "the job has finished without workers [2]", workers_succeeded=True)


def test_the_job_ends_when_none_is_left_that_began_with_it() -> None:
    judge = going_on()
    judge.exited("worker 1", 3, 10.0)
    judge.exited("worker 2", 3, 10.0)
    assert lost_at(judge, 11.0)
    judge.joins(Member("worker 2", "worker", "hostB"), 12.0)
    judge.reported("worker 2", {"event": "joined"}, 13.0)
    judge.exited("worker 0", 3, 14.0)
    assert "no worker is left" in verdict_at(judge, 15.0).message


def test_worker_0_may_be_lost_and_the_last_worker_may_not() -> None:
    judge = going_on()
    judge.exited("worker 0", -signal.SIGKILL, 10.0)
    assert [lost.ranks for lost in lost_at(judge, 11.0)] == [[0]]
    judge.exited("worker 1", -signal.SIGKILL, 12.0)
    judge.exited("worker 2", -signal.SIGSEGV, 12.1)
    verdict = verdict_at(judge, 13.0)
    assert verdict.exit_code == 137 and "continue does not help: no worker is left" in verdict.message


@pytest.mark.parametrize("name, why", [
    ("server 0", "a job cannot go on without server 0"),
    ("scheduler", "a job cannot go on without the scheduler"),
])
def test_a_process_that_a_job_cannot_spare_ends_it(name: str, why: str) -> None:
    judge = going_on()
    judge.exited(name, -signal.SIGKILL, 10.0)
    verdict = verdict_at(judge, 11.0)
    assert (verdict.exit_code, verdict.culprit) == (137, name)
    assert verdict.message.splitlines()[1] == "  --on-worker-loss continue does not help: " + why


@pytest.mark.parametrize("joined, missing", [(FIVE[:1], 1), (FIVE[:-1], 2)])
def test_a_loss_before_the_job_is_up_ends_it(joined: Sequence[str], missing: int) -> None:
    judge = going_on(*joined)
    judge.exited("worker 1", 1, 10.0)
    verdict = verdict_at(judge, 11.0)
    assert verdict.exit_code == 1
    assert f"the job was still starting, which takes all of them: worker {missing} has not joined" in verdict.message
    assert judge.take_news().lost == []


def test_a_loss_that_belongs_to_a_failure_is_a_failure() -> None:
    judge = going_on()
    judge.exited("worker 1", 1, 10.0)
    judge.exited("server 0", 1, 10.2)
    verdict = verdict_at(judge, 11.0)
    assert verdict.culprit == "worker 1" and judge.take_news().lost == []
    assert "continue does not help: a job cannot go on without server 0" in verdict.message


def test_a_failure_after_a_loss_tells_of_the_loss() -> None:
    judge = going_on()
    judge.exited("worker 1", 1, 10.0)
    lost_at(judge, 11.0)
    judge.exited("server 0", 1, 20.0)
    assert "  the job had lost workers [1] before" in verdict_at(judge, 21.0).message.splitlines()


def test_a_worker_that_reports_a_failure_and_stays_ends_the_job() -> None:
    judge = going_on()
    judge.reported("worker 1", {"event": "failed", "error": "stuck"}, 10.0)
    assert lost_at(judge, 11.0) == []
    assert "worker 1 has not ended, and may still take part" in verdict_at(judge, 10.0 + LAST_WORDS_S).message


def test_a_lost_host_of_workers_can_be_spared_and_one_with_a_server_cannot() -> None:
    judge = going_on()
    judge.host_lost("hostB", ["worker 1", "worker 2"], "ssh ended with exit code 255", ["Connection reset"], 10.0)
    assert lost_at(judge, 11.0) == [LostWorkers([1, 2], (
        "lost host hostB (worker 1, worker 2): ssh ended with exit code 255: Connection reset; the job goes on with 1 "
        "of 3 workers"))]
    judge = going_on()
    judge.host_lost("hostB", ["worker 1", "server 0"], "its agent has gone", [], 10.0)
    assert "a job cannot go on without server 0" in verdict_at(judge, 11.0).message


def test_servers_that_leave_are_missed_though_a_worker_was_lost() -> None:
    judge = going_on()
    judge.exited("worker 1", 1, 10.0)
    lost_at(judge, 11.0)
    judge.exited("server 0", 0, 12.0)
    assert verdict_at(judge, 12.0 + EARLY_EXIT_FAILS_AFTER_S).culprit == "server 0"


def silence(judge: Judge, name: str, until_s: int) -> None:
    """Everyone beats from time 1 on, but for this one."""
    for now in range(1, until_s + 1):
        judge.liveness.heard(NAMES, now)
        judge.liveness.beats({other: {"at": now, "activity": "training" if "worker" in other else "", "waits_s": 0.5,
                                   "silent_s": float(now) if other == name else 0.5, "state": "T"}
                           for other in NAMES}, now)
        assert judge.tick(now) is None


def test_a_process_that_hangs_is_to_be_ended_and_its_stacks_are_waited_for() -> None:
    judge = running(*NAMES, hang_timeout_s=30.0)
    silence(judge, "server 0", 31)
    assert judge.take_news().hung == ["server 0"] and judge.take_news().hung == []
    assert judge.tick(31.0 + SETTLE_S) is None
    judge.output("server 0", "Thread 1")
    judge.exited("server 0", -signal.SIGKILL, 32.0)
    judge.reported("worker 0", {"event": "failed", "error": "no answer", "consequence": True}, 32.0)
    verdict = verdict_at(judge, 32.0)
    assert (verdict.exit_code, verdict.culprit) == (75, "server 0")
    assert verdict.message.startswith("server 0 failed (host hostA, pid 101): it has not answered for 31 s: it is stop")
    assert verdict.message.endswith("    | Thread 1")


@pytest.mark.parametrize("ended", [15, 75, -signal.SIGABRT, -signal.SIGKILL])
def test_one_that_hangs_on_a_ring_is_the_cause_however_it_ends_and_whatever_mpi_does_then(ended: int) -> None:
    judge = running(*NAMES[2:], names=NAMES[2:], hang_timeout_s=30.0)
    silence(judge, "worker 1", 31)
    judge.exited("worker 1", ended, 32.0)
    judge.exited("worker 0", -signal.SIGSEGV, 32.0)
    verdict = verdict_at(judge, 33.0)
    assert (verdict.exit_code, verdict.culprit) == (75, "worker 1")
    assert "it has not answered for 31 s" in verdict.message and "not the cause: worker 0: killed by" in verdict.message


def test_the_last_worker_that_waits_for_others_is_not_blamed_for_it() -> None:
    judge = running(*NAMES[2:], names=NAMES[2:], hang_timeout_s=30.0)
    judge.exited("worker 0", 0, 0.5)
    for now in range(1, 400):
        judge.liveness.heard(["worker 1"], now)
        judge.liveness.beats({"worker 1": {"at": 6, "activity": "evaluation", "waits_s": now, "silent_s": 0.5}}, now)
        judge.tick(now)
    failure, = judge.failures
    assert failure.member is None and failure.text.startswith("for 301 s every process has answered")


def test_a_hanging_worker_of_an_asynchronous_job_is_lost() -> None:
    judge = running(*NAMES, hang_timeout_s=30.0, on_worker_loss="continue")
    silence(judge, "worker 1", 31)
    judge.exited("worker 1", -signal.SIGKILL, 32.0)
    assert judge.tick(32.0) is None
    assert [lost.ranks for lost in judge.take_news().lost] == [[1]]


def test_a_joiner_that_does_not_join_gives_its_place_back() -> None:
    judge = going_on()
    judge.exited("worker 1", 1, 10.0)
    lost_at(judge, 11.0)
    judge.joins(Member("worker 1", "worker", "hostB"), 20.0)
    assert news_at(judge, 319.0) == News()
    news = news_at(judge, 321.0)
    (ranks, message), = news.lost
    assert (ranks, message) == ([1], "worker 1 has not joined (host hostB) within 300 s, and is given up")
    assert news.hung == ["worker 1"] and judge.members["worker 1"].part == "lost"
    judge.exited("worker 1", -signal.SIGKILL, 322.0)
    assert lost_at(judge, 330.0) == []


def test_a_lost_worker_is_not_lost_once_more_when_it_ends_or_its_host_is_lost() -> None:
    judge = going_on()
    judge.host_lost("hostB", ["worker 1"], "its agent has not answered", (), 10.0)
    assert [ranks for ranks, _ in lost_at(judge, 12.1)] == [[1]]
    judge.reported("worker 1", {"event": "failed", "error": "hung up"}, 20.0)
    judge.exited("worker 1", 70, 20.0)
    judge.host_lost("hostB", ["worker 1"], "ssh ended", (), 21.0)
    assert lost_at(judge, 30.0) == [] and judge.failures == []


def test_when_all_workers_have_succeeded_a_server_may_be_lost() -> None:
    judge = running(*NAMES, hang_timeout_s=30.0)
    for name in ("worker 0", "worker 1"):
        judge.exited(name, 0, 10.0)
    judge.host_lost("hostA", ["server 0"], "its agent has not answered", (), 11.0)
    verdict = verdict_at(judge, 10.0 + FAREWELL_S)
    assert (verdict.exit_code, verdict.workers_succeeded) == (0, True)


def test_on_sockets_a_worker_that_has_not_asked_to_join_is_waited_for() -> None:
    """Servers there have joined when worker 0 has called."""
    judge = Judge(job(2, 1, startup_timeout_s=20.0, wire="sockets"),
                  [Member(name, name.split()[0], "hostA") for name in NAMES], 0.0, "10.0.0.9:4000")
    for number, name in enumerate(NAMES):
        judge.started(name, 100 + number)
    for name in ("scheduler", "server 0"):
        judge.reported(name, {"event": "joined"}, 1.0)
    judge.reported("worker 0", {"event": "connecting"}, 1.0)
    assert judge.tick(19.0) is None and "waiting for worker 1" in judge.startup_text(19.0)
    assert "missing: worker 1 (1 of 4)" in verdict_at(judge, 21.0).message


def test_a_silent_agent_is_a_lost_host() -> None:
    judge = running(*NAMES, hang_timeout_s=30.0)
    judge.liveness.heard(NAMES, 1.0)
    for now in range(2, 32):
        assert judge.tick(now) is None
    assert judge.tick(31.5) is None
    verdict = verdict_at(judge, 32.0)
    assert verdict.message == ("lost host hostA (scheduler, server 0, worker 0, worker 1): its agent has not answered "
                               "for 30 s")


# --- who keeps a job from starting ------------------------------------------------------------------------------------

def test_the_worker_that_fails_before_all_have_joined_blocks_the_start() -> None:
    judge = running("scheduler", "server 0", "worker 0")
    judge.exited("worker 1", 1, 10.0)
    judge.exited("worker 0", 75, 10.1)  # it waited for worker 1
    verdict_at(judge, 11.0)
    assert not judge.all_joined and judge.blocking_startup() == ["worker 1"]


def test_processes_of_a_lost_host_and_those_that_never_joined_block_the_start() -> None:
    judge = running("scheduler")
    judge.host_lost("hostB", ["server 0", "worker 1"], "ssh ended with exit code 255", (), 10.0)
    verdict_at(judge, 11.0)
    assert judge.blocking_startup() == ["server 0", "worker 1"]
    judge = running("server 0", "worker 0", startup_timeout_s=20.0)
    judge.reported("scheduler", {"event": "connecting"}, 1.0)
    verdict_at(judge, 21.0)
    assert judge.blocking_startup() == ["worker 1"]


def test_a_start_that_others_gave_up_is_blocked_by_those_that_were_missing() -> None:
    judge = running("scheduler", "server 0")
    judge.reported("worker 0", {"event": "connecting"}, 1.0)
    judge.exited("worker 0", 75, 10.0)
    verdict_at(judge, 11.0)
    assert judge.blocking_startup() == ["worker 1"]


def test_lost_hosts_of_all_workers_block_the_start() -> None:
    judge = running("scheduler")
    judge.host_lost("hostB", ["worker 0", "worker 1"], "ssh ended with exit code 255", (), 10.0)
    verdict_at(judge, 11.0)
    assert judge.blocking_startup() == ["worker 0", "worker 1"]


@pytest.mark.parametrize("codes", [(1, 1), (64, None)])
def test_nobody_blocks_the_start_who_fails_like_all_others_or_by_a_mistake(codes: Sequence[Optional[int]]) -> None:
    judge = running("scheduler")
    for name, code in zip(("worker 1", "worker 0"), codes):
        if code:
            judge.exited(name, code, 10.0)
    verdict_at(judge, 11.0)
    assert judge.blocking_startup() == []


def test_nobody_blocks_a_start_that_succeeded() -> None:
    judge = running(*NAMES)
    judge.tick(1.0)
    judge.exited("worker 1", 1, 10.0)
    verdict_at(judge, 11.0)
    assert judge.all_joined and judge.blocking_startup() == []


def test_workers_that_end_alike_because_they_did_not_find_each_other_block_the_start() -> None:
    judge = Judge(job(2, 0), [Member(f"worker {rank}", "worker", "hostA") for rank in range(2)], 0.0)
    for rank in range(2):
        judge.started(f"worker {rank}", rank)
        judge.reported(f"worker {rank}", {"event": "connecting"}, 0.0)
        judge.exited(f"worker {rank}", 15, 1.0)
    assert judge.blocking_startup() == ["worker 0"]
