"""Who is silent and who stands still, in a time of our own: the beats that agents would pass on, made up."""
from typing import Any, Dict, Optional, Set

import pytest

from odsgd.config.launch import LEAST_HANG_TIMEOUT_S
from odsgd.launch.policy.failures import Member
from odsgd.launch.policy.liveness import PAUSE_FACTOR, WARN_S, Hung, LivenessMonitor

HOSTS = {"scheduler": "head", "server 0": "node1", "server 1": "node2", "worker 0": "node1", "worker 1": "node2"}


def monitor(hosts: Dict[str, str], hang_timeout_s: float = 60.0) -> LivenessMonitor:
    return LivenessMonitor([Member(name, name.split()[0], host) for name, host in hosts.items()], hang_timeout_s, 0.0)


class Story:
    """A job whose processes beat every second, for `since` seconds at first; `states` says how each differs from a
    worker or server that is well.
    """

    def __init__(self, hang_timeout_s: float = 60.0, hosts: Optional[Dict[str, str]] = None, since: int = 20) -> None:
        self.hosts = dict(hosts or HOSTS)
        self.liveness = monitor(self.hosts, hang_timeout_s)
        self.now = 0.0
        self.at = 0
        self.states: Dict[str, Dict[str, Any]] = {}
        self.mute: Set[str] = set()  # hosts whose agent says nothing
        self.goes_on(since)

    def beat(self, name: str) -> Dict[str, Any]:
        idle = {"at": self.at, "moves": self.at, "activity": "", "waits_s": 0.2, "silent_s": 0.4}
        well = {"at": self.at, "moves": self.at, "activity": "training", "waits_s": None, "silent_s": 0.4}
        return {**(well if name.startswith("worker") else idle), **self.states.get(name, {})}

    def goes_on(self, seconds: int, moves: bool = True, every: int = 1) -> Optional[Hung]:
        for _ in range(seconds):
            self.now += 1
            self.at += moves and self.now % every == 0
            for host in set(self.hosts.values()) - self.mute:
                names = [name for name, other in self.hosts.items() if other == host]
                self.liveness.heard(names, self.now)
                self.liveness.beats({name: self.beat(name) for name in names}, self.now)
            for name in self.states:
                if "silent_s" in self.states[name]:
                    self.states[name]["silent_s"] += 1.0
            hung = self.liveness.find_hung(self.now)
            if hung:
                return hung
        return None


def test_a_job_that_is_well_is_left_alone() -> None:
    story = Story(since=0)
    assert story.goes_on(1000) is None
    assert story.liveness.take_warnings() == []


@pytest.mark.parametrize("name, others", [("server 1", "workers 0 and 1 wait for it since iteration 20"),
                                          ("worker 1", "worker 0 waits for it since iteration 20")])
def test_a_stopped_process_is_named_after_10_s_and_has_failed_after_60(name: str, others: str) -> None:
    story = Story()
    story.states = {"worker 0": {"waits_s": 5.0}, "worker 1": {"waits_s": 5.0}, name: {"silent_s": 0.5, "state": "T"}}
    began = story.now
    while not story.liveness._warnings:
        assert story.goes_on(1, moves=False) is None
    assert WARN_S <= story.now - began <= WARN_S + 2
    host = HOSTS[name]
    stopped = "it is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    assert story.liveness.take_warnings() == [f"{name} on host {host} has not answered for 10 s: {stopped}; {others}"]
    assert story.goes_on(100, moves=False) == Hung([name], f"has not answered for 60 s: {stopped}; {others}")
    assert story.liveness.take_warnings() == []


@pytest.mark.parametrize("limit_s", [LEAST_HANG_TIMEOUT_S, 4.0, 8.0, 15.0, 25.0])
@pytest.mark.parametrize("trouble", ["stopped", "agent", "still", "all"])
def test_any_hang_timeout_works_as_it_says(limit_s: float, trouble: str) -> None:
    story = Story(limit_s)
    if trouble == "stopped":
        story.states = {"worker 1": {"silent_s": 0.0, "state": "T"}}
    elif trouble == "agent":
        story.mute = {"node1"}
    elif trouble == "still":
        story.states = {"worker 1": {"at": 20, "moves": 20}}
    else:
        story.states = {name: {"at": 20, "moves": 20, "waits_s": 1000.0} for name in ("worker 0", "worker 1")}
    hung, began = None, story.now
    while hung is None and story.now < began + 1000:
        hung = story.goes_on(1)
    if trouble in ("still", "all"):
        limit_s = max(limit_s, PAUSE_FACTOR * 1.0)  # iterations took a second
    assert hung is not None and limit_s < story.now - began <= limit_s + 2
    named = limit_s > PAUSE_FACTOR if trouble == "still" else trouble != "all"
    assert len(story.liveness.take_warnings()) == named


def test_of_a_silent_agent_it_is_the_host_that_is_blamed_though_a_worker_there_stood_still_first() -> None:
    story = Story(4.0)
    story.states = {"worker 1": {"at": 20, "moves": 20}}
    story.goes_on(3)
    story.mute = {"node2"}
    hung = story.goes_on(10)
    assert hung is not None and hung.host == "node2"


def test_a_process_that_stood_still_before_it_was_stopped_is_said_to_do_both() -> None:
    story = Story()
    story.states = {"worker 1": {"at": 20, "moves": 20}}
    story.goes_on(12)
    story.states["worker 1"].update(silent_s=1.0, state="T")
    story.goes_on(12)
    still, silent = story.liveness.take_warnings()
    assert "has been at iteration 20" in still and "has not answered for" in silent


def test_a_process_that_answers_again_is_told() -> None:
    story = Story(since=0)
    story.states = {"server 0": {"silent_s": 1.0}}
    story.goes_on(15)
    del story.states["server 0"]
    story.goes_on(2)
    assert story.liveness.take_warnings()[1:] == ["server 0 on host node1 answers again"]


def test_a_process_that_has_done_its_part_may_clean_up_in_silence() -> None:
    story = Story(hosts={"worker 0": "a", "worker 1": "b"})
    story.liveness.leaving("worker 1", story.now)
    story.states = {"worker 1": {"silent_s": 0.5, "state": "R"}}
    assert story.goes_on(95) is None and story.liveness.take_warnings() == []
    hung = story.goes_on(600)
    assert hung and hung.names == ["worker 1"]
    assert story.now > 600
    story.goes_on(20)
    story.liveness.leaving("worker 0", story.now)
    story.states = {"worker 0": {"silent_s": 0.5, "state": "T"}}
    assert story.goes_on(62) == Hung(["worker 0"], "has not answered for 60 s: it is stopped (SIGSTOP, Ctrl-Z or a "
                                     "debugger)")


def test_a_script_without_a_pulse_is_not_missed() -> None:
    liveness = monitor(HOSTS)
    for second in range(1000):
        liveness.heard(HOSTS, float(second))
        liveness.beats({}, float(second))
        assert liveness.find_hung(float(second)) is None


@pytest.mark.parametrize("name, state, text", [
    ("worker 1", {"at": 7, "waits_s": None}, "has been at iteration 7 for 61 s (training), and waits for nobody"),
    ("server 0", {"at": 7, "activity": "serving", "waits_s": None},
     "has carried out message 7 for 61 s (serving), and waits for nobody"),
])
def test_a_process_that_answers_and_does_not_move_is_told_from_those_that_wait(
        name: str, state: Dict[str, Any], text: str) -> None:
    story = Story(since=7)
    story.states = {"worker 0": {"waits_s": 5.0}, "worker 1": {"waits_s": 5.0}, name: state}
    hung = story.goes_on(100, moves=False)
    assert hung and hung.names == [name] and hung.text.startswith(text), hung
    assert story.liveness.take_warnings()[0].startswith(f"{name} on host {HOSTS[name]} has ")


def test_long_iterations_are_given_their_time() -> None:
    story = Story(since=0)
    assert story.goes_on(600, every=40) is None  # 40 s each
    assert story.goes_on(195, moves=False) is None
    assert story.goes_on(10, moves=False) is not None
    first = Story(since=0)
    assert first.goes_on(590, moves=False) is None  # the first iteration compiles


@pytest.mark.parametrize("activity, limit_s", [("evaluation", 600), ("checkpoint", 600), ("", 10 ** 4)])
def test_other_activities_have_a_limit_of_their_own(activity: str, limit_s: int) -> None:
    story = Story()
    story.states = {"worker 0": {"activity": activity}, "worker 1": {"activity": activity, "waits_s": 9.0}}
    assert story.goes_on(limit_s, moves=False) is None
    assert (story.goes_on(5, moves=False) is None) == (not activity)


def test_batches_of_an_evaluation_are_movement() -> None:
    story = Story()
    for substep in range(20):
        story.states = {name: {"activity": "evaluation", "substep": substep, "waits_s": None}
                        for name in ("worker 0", "worker 1")}
        assert story.goes_on(100, moves=False) is None


def test_when_all_wait_nobody_is_blamed() -> None:
    story = Story()
    story.states = {"worker 0": {"waits_s": 90.0}, "worker 1": {"waits_s": 90.0}}
    hung = story.goes_on(100, moves=False)
    assert hung and hung.names == list(HOSTS) and hung.text.startswith("for 61 s every process has answered"), hung
    assert "worker 0 at iteration 20, worker 1 at iteration 20" in hung.text


def test_when_all_wait_in_the_first_iteration_a_warning_comes_long_before_the_end() -> None:
    """As where large packets do not come through."""
    story = Story(since=0)
    story.states = {name: {"activity": "training", "waits_s": 900.0} for name in ("worker 0", "worker 1")}
    assert story.goes_on(299, moves=False) is None and story.liveness.take_warnings() == []
    assert story.goes_on(200, moves=False) is None
    warning, = story.liveness.take_warnings()
    assert warning.startswith("for 301 s every process has answered and every worker has waited (worker 0 at iteration")


def test_who_has_waited_for_a_worker_that_ended_is_given_its_time_again() -> None:
    """Worker 0 was long at an evaluation; the other has not heard yet that it is over."""
    story = Story()
    story.states = {"worker 0": {"activity": "evaluation"}, "worker 1": {"waits_s": 90.0}}
    assert story.goes_on(100, moves=False) is None
    story.liveness.leaving("worker 0", story.now)
    story.liveness.ended("worker 0")
    assert story.goes_on(55, moves=False) is None
    assert story.goes_on(10, moves=False) is not None


@pytest.mark.parametrize("trouble", [{"activity": "serving", "waits_s": None}, {"silent_s": 0.0}])
def test_a_server_that_holds_up_all_is_blamed_though_they_have_waited_longer(trouble: Dict[str, Any]) -> None:
    story = Story()
    story.states = {"worker 0": {"waits_s": 90.0}, "worker 1": {"waits_s": 90.0}}
    assert story.goes_on(30, moves=False) is None
    story.states["server 1"] = trouble
    hung = story.goes_on(100, moves=False)
    assert hung and hung.names == ["server 1"] and hung.text.endswith("0 and 1 wait for it since iteration 20")


def test_all_that_wait_hang_whatever_they_are_at() -> None:
    story = Story()
    story.states = {"worker 0": {"waits_s": 90.0, "activity": "checkpoint"},
                    "worker 1": {"waits_s": 90.0, "activity": "evaluation"}}
    assert story.goes_on(55, moves=False) is None
    hung = story.goes_on(10, moves=False)
    assert hung and "messages between them do not come through" in hung.text


def test_the_end_of_a_long_wait_is_movement_and_no_sign_of_long_iterations() -> None:
    story = Story(hang_timeout_s=5.0)
    for substep in range(12):
        story.states = {"worker 0": {"activity": "evaluation", "substep": substep},
                        "worker 1": {"waits_s": substep + 1.0}}
        assert story.goes_on(1, moves=False) is None
    story.states = {"worker 0": {"activity": "evaluation", "substep": 12}}
    assert story.goes_on(2, moves=False) is None
    story.states = {}
    assert story.goes_on(3) is None and story.liveness.take_warnings() == []
    assert story.goes_on(7, moves=False) is not None


def test_those_that_are_left_when_one_has_ended_are_not_judged_by_beats_from_before() -> None:
    story = Story(hang_timeout_s=60.0, hosts={"worker 0": "a", "worker 1": "b"})
    story.states = {"worker 0": {"activity": "evaluation", "substep": 1}, "worker 1": {"waits_s": 90.0}}
    assert story.goes_on(90, moves=False) is None
    story.liveness.ended("worker 0")  # it has let worker 1 go on just before
    assert story.liveness.find_hung(story.now + 0.1) is None


def test_of_two_agents_at_one_address_the_silent_one_is_lost() -> None:
    liveness = monitor(dict.fromkeys(["scheduler", "worker 0", "worker 1"], "10.0.0.1"))
    for now in range(1, 100):
        liveness.heard(["scheduler"], now)
        if now <= 20:
            liveness.heard(["worker 0", "worker 1"], now + 0.5)
        hung = liveness.find_hung(now + 0.6)
        if hung:
            break
    assert hung == Hung(["worker 0", "worker 1"], "its agent has not answered for 60 s", "10.0.0.1")


def test_an_agent_that_goes_on_may_speak_before_it_passes_on_beats() -> None:
    story = Story(hang_timeout_s=4.0)
    story.goes_on(2, moves=False)
    assert [story.liveness.find_hung(now) for now in (23.0, 24.0, 25.0)] == [None] * 3
    story.liveness.heard(HOSTS, 25.2)
    assert story.liveness.find_hung(25.2) is None


def test_one_that_stood_still_and_is_stopped_then_is_named_for_both() -> None:
    story = Story()
    story.states = {"worker 0": {"at": 20}, "worker 1": {"waits_s": 5.0}}
    assert story.goes_on(15, moves=False) is None
    story.states = {"worker 0": {"activity": "", "silent_s": 0.5, "state": "T"}, "worker 1": {"waits_s": 5.0}}
    story.liveness.beats({"worker 0": {"at": 20, "moves": 20, "activity": "", "silent_s": 0.1}}, story.now)
    story.liveness.find_hung(story.now)
    assert story.goes_on(15, moves=False) is None
    said = story.liveness.take_warnings()
    assert ["has been at iteration 20" in said[0], "has not answered" in said[-1]] == [True, True]


def test_a_silent_agent_is_named_and_then_lost_with_its_processes() -> None:
    story = Story()
    story.mute = {"node2"}
    story.states = {"worker 0": {"waits_s": 5.0}}
    assert story.goes_on(11, moves=False) is None
    assert story.liveness.take_warnings() == ["the agent on host node2 has not answered for 11 s; it, its host or the "
                                           "network is held up (server 1, worker 1 run there)"]
    hung = story.goes_on(60, moves=False)
    assert hung == Hung(["server 1", "worker 1"], "its agent has not answered for 61 s", "node2")


def test_a_launcher_that_was_held_up_blames_nobody() -> None:
    story = Story()
    story.now += 500
    assert story.liveness.find_hung(story.now) is None
    assert story.goes_on(20) is None
    assert story.liveness.take_warnings() == []


def test_what_a_launcher_did_not_see_is_no_long_iteration_and_no_movement_to_come() -> None:
    """Though it reads the beats that have come before it looks at the clock."""
    story = Story()
    story.now += 600
    assert story.goes_on(5) is None
    assert story.goes_on(63, moves=False) is not None


def test_without_a_hang_timeout_there_are_only_warnings() -> None:
    story = Story(hang_timeout_s=0.0, since=0)
    story.states = {"server 0": {"silent_s": 1.0}}
    assert story.goes_on(5000) is None
    assert len(story.liveness.take_warnings()) == 1


@pytest.mark.parametrize("beat", [{}, {"at": "x", "silent_s": None}, {"at": 1e300, "waits_s": [], "activity": 3},
                                  {"silent_s": float("nan")}, {"at": True, "state": {}}, 7])
def test_a_beat_of_another_form_does_no_harm(beat: Any) -> None:
    liveness = monitor(HOSTS)
    liveness.heard(HOSTS, 1.0)
    liveness.beats({"worker 0": beat, "nobody": beat}, 1.0)
    assert liveness.find_hung(1.0) is None


# --- data that are not of one length ----------------------------------------------------------------------------------

def test_a_worker_that_ends_early_fails_the_job_at_once_and_is_named_if_it_did_not_say_where_it_ended() -> None:
    for told in (20, None):
        story = Story()
        story.liveness.leaving("worker 1", story.now, told)
        story.liveness.beats({"worker 1": {"at": 3}}, 20.0)  # an old one
        story.liveness.ended("worker 1")
        del story.hosts["worker 1"]
        story.states = {"worker 0": {"at": 21, "waits_s": 2.5}}
        hung = story.goes_on(30, moves=False)
        if told:
            assert hung and hung.names == ["worker 0"] and not hung.print_stacks and story.now == 21
            assert hung.text.startswith("worker 1 has ended after iteration 20, and worker 0 waits in iteration 21: ")
        else:
            warning, = story.liveness.take_warnings()
            assert hung is None
            assert warning.startswith("worker 1 has ended, and worker 0 waits in iteration 21: ")


def test_one_that_is_done_waits_in_no_iteration() -> None:
    """Its last beat is from before, when it waited for a worker that was lost."""
    story = Story(since=0)
    story.states = {"worker 0": {"at": 0, "waits_s": 15.0}}
    story.goes_on(1, moves=False)
    story.liveness.leaving("worker 0", 1.2, 6)
    story.liveness.ended("worker 1")
    assert story.liveness.find_hung(1.5) is None and story.liveness.take_warnings() == []


def test_one_that_is_done_soon_after_a_long_wait_has_moved() -> None:
    """It says so before its beat tells of the last iterations, and that beat is no news then."""
    story = Story(hang_timeout_s=4.0)
    story.states = {"worker 0": {"waits_s": 3.5}, "worker 1": {"waits_s": 3.5}}
    assert story.goes_on(4, moves=False) is None
    story.states = {}
    story.liveness.leaving("worker 0", story.now, 22)
    story.at = 21
    assert story.goes_on(3) is None


def test_workers_that_wait_at_different_iterations_are_named() -> None:
    """As one that evaluates, which all do together, while the other has a batch left."""
    story = Story()
    story.states = {"worker 0": {"at": 21, "waits_s": 11.0}, "worker 1": {"waits_s": 11.0, "activity": "evaluation"}}
    story.goes_on(9, moves=False)
    assert story.liveness.take_warnings() == []
    story.goes_on(3, moves=False)
    warning, = story.liveness.take_warnings()
    assert warning.startswith("worker 1 waits elsewhere after iteration 20, and worker 0 waits in iteration 21: "
                              "either messages between them do not come through, or not all do the same")


def test_a_worker_whose_answer_does_not_come_through_has_no_fewer_batches() -> None:
    story = Story()
    story.states = {"worker 0": {"at": 21, "waits_s": 11.0}, "worker 1": {"waits_s": 11.0}}
    story.goes_on(40, moves=False)
    assert story.liveness.take_warnings() == []


def test_asynchronous_workers_may_wait_at_different_iterations() -> None:
    story = Story()
    story.states = {"worker 0": {"at": 25, "waits_s": 11.0, "asynchronous": True},
                    "worker 1": {"waits_s": 11.0, "asynchronous": True}}
    story.goes_on(40, moves=False)
    assert story.liveness.take_warnings() == []


@pytest.mark.parametrize("at, waits_s", [(20, 30.0), (21, 1.0), (21, None)])
def test_a_worker_that_ended_where_the_others_are_is_no_news(at: int, waits_s: Optional[float]) -> None:
    story = Story()
    story.liveness.ended("worker 1")
    story.states = {"worker 0": {"at": at, "waits_s": waits_s}}
    story.goes_on(5, moves=False)
    assert story.liveness.take_warnings() == []
