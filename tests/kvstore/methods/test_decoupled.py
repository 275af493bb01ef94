"""Decoupled DiLoCo: a path worked out by hand, what it is where its freedoms are taken, and rounds that repeat."""
import json
import queue
import random
import threading
from collections import deque
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest

import kvstore
from kvstore.engine import engine
from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, DivergedError
from kvstore.messages.header import Header
from kvstore.messages.seam import Pending
from kvstore.methods.contract import Update
from kvstore.methods.decoupled import Decoupled, Learner, Syncer, mean, rda
from kvstore.methods.quorum import LOG_PIECE, check_logs, log_in, planned
from kvstore.state import declared
from kvstore.transports.in_process import Stage
from tests import paper
from tests.jobs import alone
from tests.kvstore.methods.test_diloco import alike, drawn, walk
from tests.scripted import ScriptedStage

ONES = np.ones(5, np.float32)
SHORT: Dict[str, Any] = {"H": 4, "lr_outer": 0.5, "momentum_outer": 0.5, "delay": 3}


def test_two_workers_follow_the_hand_computed_path() -> None:
    """g = w - m, inner rate 1/2, H = 2, delay 1, no mix, outer rate 1/2. Worker 0 takes all its steps first.

        worker 0:  4, 2, 1: sends 3, Theta 2.5;       0.5 becomes 2.5;     1.25: sends 1.25, Theta 1.875
        worker 1:  4, 2.5, 1.75: sends 2.25, Theta 0.75;  1.375 becomes 0.75;  0.875: sends -0.125, Theta 0.8125
    """
    ways = walk("decoupled", 2, 4, lambda m, t, w: w - m, np.full(1, 4, np.float32), 0.5, H=2, lr_outer=0.5, delay=1,
                mix=0.0)
    np.testing.assert_array_equal(ways[0][0][:, 0], [4, 2, 1, 2.5, 1.25])
    np.testing.assert_array_equal(ways[1][0][:, 0], [4, 2.5, 1.75, 0.75, 0.875])
    assert [float(final[0]) for _, final, _ in ways] == [0.8125, 0.8125]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"mix": 0.0, "delay": 0}, {"grace": 3}])
def test_rounds_of_all_with_the_mean_are_streaming_diloco(workers: int, options: Dict[str, Any]) -> None:
    """To the bit, since a mean of equal counts is one."""
    settings = {**SHORT, "momentum": 0.9, **options}
    ours = walk("decoupled", workers, 14, drawn(5), ONES, quorum=workers, merge="mean", **settings)
    settings.pop("grace", None)
    theirs = walk("diloco", workers, 14, drawn(5), ONES, **settings)
    alike(ours, theirs, atol=1e-6)


def test_an_outer_gradient_counts_the_examples_of_all_its_steps_also_after_a_resume() -> None:
    """Of worker 1 the batch with which it sends is short."""
    def examples(m: int, t: int) -> int:
        return 1 if m and t % 3 == 2 else 8

    settings: Dict[str, Any] = {"H": 3, "lr_outer": 0.5, "delay": 1, "grace": 1, "quorum": 2, "merge": "mean",
                                "examples": examples}
    theory = paper.DecoupledDiloco(ONES, None, [paper.Sgd(0.1)] * 2, 3, 0.5, 0.0, [slice(0, 5)], 1, 0.5, 1,
                                   examples=examples)
    path, _ = paper.in_order(drawn(5), ONES, 2, [0, 1] * 11, theory)
    first = walk("decoupled", 2, 8, drawn(5), ONES, **settings)
    then = walk("decoupled", 2, 3, drawn(5), ONES, states=[ends[2] for ends in first], **settings)
    for m in range(2):
        np.testing.assert_allclose(np.concatenate([first[m][0], then[m][0][1:]]), path[m], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers, options, warns", [
    (4, {}, True), (8, {"quorum": 3}, True), (2, {}, False), (8, {"quorum": 4}, False),
    (4, {"delay": 6, "grace": 5}, False)])
def test_a_small_quorum_that_is_known_to_diverge_is_told(workers: int, options: Dict[str, Any], warns: bool) -> None:
    said = Decoupled(Decoupled.Options(momentum_outer=0.9, **options).in_iterations(), workers).advice()
    assert (said is not None) is warns
    assert not warns or f"may diverge with {workers} workers" in str(said)


def test_rda_has_the_mean_length_in_the_mean_direction() -> None:
    equal, half = np.array([3, 4], np.float32), [np.float32(0.5)] * 2
    np.testing.assert_allclose(rda(half, [equal, equal]), equal, rtol=1e-6)
    np.testing.assert_allclose(rda([np.float32(1)], [equal]), equal, rtol=1e-6)
    np.testing.assert_allclose(rda(half, [equal, np.array([0, 5], np.float32)]),
                               5 * np.array([0.3, 0.9]) / np.sqrt(0.9), rtol=1e-6)
    np.testing.assert_array_equal(rda(half, [np.zeros(2, np.float32)] * 2), [0, 0])
    eighth, apart = [np.float32(1 / 8)] * 8, list(np.eye(8, dtype=np.float32))
    assert np.linalg.norm(rda(eighth, apart)) == pytest.approx(1)
    assert np.linalg.norm(mean(eighth, apart)) == pytest.approx(8 ** -0.5)  # 2.8 times shorter


class Steps(Update):
    """w <- w - lr g."""

    def __call__(self, w: Any, grad: Any, lr: float, gradient_weight: float = 1.0, out: Any = None) -> Any:
        w -= np.float32(lr) * grad
        return w


def syncer(workers: int, **options: Any) -> Syncer:
    rule = Syncer(0, Decoupled.Options(lr_outer=1.0, **options), workers, Steps())
    rule.start(np.zeros(1, np.float32))
    return rule


def sends(rule: Syncer, rank: int, delta: float, w: np.ndarray, counts: float = 1.0) -> None:
    rule.receive(Header(rule.version, counts, rank), np.full(1, delta, np.float32), w)


def test_a_round_stays_open_until_one_of_it_asks_and_who_has_seen_more_counts_more() -> None:
    rule, w = syncer(3, merge="mean"), np.zeros(1, np.float32)
    sends(rule, 2, 4, w, counts=1)
    assert rule.end_round(1, w) and rule.version == 0  # it has sent nothing: the weights as they are
    sends(rule, 0, 8, w, counts=3)
    assert rule.version == 0
    assert rule.end_round(2, w) and float(w[0]) == -7 and rule.version == 1
    sends(rule, 1, 1, w)
    assert rule.end_round(0, w) and rule.version == 1  # its round was over already
    assert rule.end_round(1, w) and float(w[0]) == -8
    assert log_in(vars(rule)) == [[[], [1]], [[0, 2], [2, 0]], [[1], [1]]]


def test_what_is_sent_without_an_example_counts_nothing() -> None:
    rule, w = syncer(2, merge="mean"), np.zeros(1, np.float32)
    sends(rule, 0, 4, w, counts=0)
    sends(rule, 1, 8, w)
    assert rule.end_round(0, w) and rule.version == 1 and float(w[0]) == -8


def test_only_a_quorum_of_all_is_waited_for_and_the_lost_are_not(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, w = syncer(3, quorum=2), np.zeros(1, np.float32)
    sends(rule, 0, 1, w)
    assert rule.end_round(0, w) and rule.version == 0  # the weights as they are
    sends(rule, 2, 1, w)
    assert rule.end_round(2, w) and log_in(vars(rule)) == [[[], [0]], [[0, 2], [2]]]
    (tmp_path / "lost").write_text("0\n2\n")
    monkeypatch.setenv("ODSGD_LOST", str(tmp_path / "lost"))
    sends(rule, 1, 1, w)
    assert log_in(vars(rule))[2:] == [[[1], []]]  # nobody else is left: at once
    (tmp_path / "lost").write_text("0\n2\n+2\n")  # another one has joined in the place of worker 2
    sends(rule, 1, 1, w)
    assert len(log_in(vars(rule))) == 3
    sends(rule, 2, 1, w)
    assert log_in(vars(rule))[3:] == [[[1, 2], []]]
    whole = syncer(2, quorum=2)
    monkeypatch.delenv("ODSGD_LOST")
    sends(whole, 0, 1, w)
    assert not whole.end_round(0, w)
    sends(whole, 1, 1, w)
    assert whole.end_round(0, w) and whole.version == 1
    left = syncer(3, quorum=3)
    sends(left, 2, 1, w)
    (tmp_path / "lost").write_text("2\n")
    monkeypatch.setenv("ODSGD_LOST", str(tmp_path / "lost"))
    sends(left, 0, 1, w)
    assert not left.end_round(0, w)  # worker 1 is there, too
    sends(left, 1, 1, w)
    assert left.end_round(0, w) and log_in(vars(left)) == [[[], []], [[0, 1, 2], [0]]]


def test_a_long_log_of_rounds_takes_little_memory_and_is_not_copied_when_it_is_exported() -> None:
    rule, w, rounds = syncer(3), np.zeros(1, np.float32), 3000

    def turn() -> None:
        for rank in range(3):
            sends(rule, rank, 0, w)
        for rank in range(3):
            assert rule.end_round(rank, w)

    for _ in range(rounds):
        turn()
    assert sum(map(len, rule.log_before)) < 20 * rounds
    assert log_in(vars(rule)) == [[[], []], *[[[0, 1, 2], [0, 1, 2]]] * rounds]
    facts = declared.saved(rule)[1]
    assert len(facts["log_before"]) <= 2 + 20 * rounds / LOG_PIECE
    assert all(mine is its for mine, its in zip(rule.log_before, facts["log_before"]))
    turn()  # what was exported stays as it was
    assert log_in(facts) == log_in(vars(rule))[:-1]


def test_a_worker_that_rests_is_not_waited_for_until_all_rest(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, w = syncer(3, quorum=2), np.zeros(1, np.float32)
    rule.rest(0)
    sends(rule, 2, 1, w)
    assert rule.version == 0  # worker 1 is there
    rule.rest(1)
    assert rule.end_round(2, w) and rule.version == 1
    sends(rule, 2, 1, w)
    assert rule.version == 2  # at once
    rule.rest(2)  # all have met, and go on
    sends(rule, 2, 1, w)
    assert rule.version == 2
    sends(rule, 0, 1, w)
    assert rule.end_round(0, w) and log_in(vars(rule))[3] == [[0, 2], [0]]
    (tmp_path / "lost").write_text("0\n")
    rule.rest(1)
    rule.rest(2)
    monkeypatch.setenv("ODSGD_LOST", str(tmp_path / "lost"))  # the server hears of it when the others have met
    sends(rule, 2, 1, w)
    assert rule.version == 3


def test_a_worker_that_has_met_is_waited_for_though_its_servers_host_hears_of_a_loss_after_the_others(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, w = syncer(3, quorum=3), np.zeros(1, np.float32)
    rule.rest(0)
    rule.rest(1)  # they meet without worker 2
    sends(rule, 0, 1, w)
    (tmp_path / "lost").write_text("2\n")
    monkeypatch.setenv("ODSGD_LOST", str(tmp_path / "lost"))
    assert not rule.end_round(0, w)
    sends(rule, 1, 1, w)
    assert rule.end_round(0, w) and rule.version == 1
    sends(rule, 0, 1, w)
    rule.rest(1)
    assert rule.end_round(0, w) and rule.version == 2


def test_a_joiner_that_has_left_is_not_waited_for_once_the_others_have_met(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_LOST", str(tmp_path / "lost"))
    (tmp_path / "lost").write_text("1\n+1\n")  # it meets nobody, and may push
    rule, w = syncer(2, quorum=2), np.zeros(1, np.float32)
    sends(rule, 0, 1, w)
    assert not rule.end_round(0, w)
    rule.rest(1)
    rule.rest(0)  # all that meet have met
    assert rule.end_round(0, w) and rule.version == 1


def test_a_joiner_at_another_fragment_than_the_worker_that_waits_for_it_goes_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODSGD_LOST", str(tmp_path / "lost"))
    (tmp_path / "lost").write_text("1\n+1\n")
    (one, other), w = (syncer(2, quorum=2) for _ in range(2)), np.zeros(1, np.float32)
    sends(one, 0, 1, w)
    sends(other, 1, 1, w)
    assert other.end_round(1, w) and not one.end_round(0, w)
    sends(one, 1, 1, w)
    assert one.end_round(0, w) and (one.version, other.version) == (1, 0)


def test_what_is_kept_for_a_round_that_has_no_quorum_is_bounded() -> None:
    rule, w = syncer(3, quorum=2), np.zeros(1, np.float32)
    for _ in range(50):
        sends(rule, 2, 1, w)
        assert rule.end_round(2, w) and len(rule.pushes) < 24
    assert [ranks for ranks, _ in log_in(vars(rule))] == [[], [2] * 24, [2] * 24]


@pytest.mark.parametrize("ends", ["barrier", "close"])
@pytest.mark.parametrize("quorum, steps", [(2, (4, 4, 40)), (3, (4, 4, 40)), (3, (4, 40, 40))])
def test_what_a_worker_finds_when_the_others_have_ended_is_not_lost(
        quorum: int, steps: Sequence[int], ends: str) -> None:
    """All 20 pushes of the last worker are in a round."""
    stage = Stage(3, timeout_s=20)

    def train(transport: Any) -> Any:
        store = kvstore.create("decoupled", transport, H=2, delay=0, lr_outer=1.0, merge="mean", quorum=quorum)
        w = alone(store, mx.nd.zeros(1), learning_rate=1.0)
        store.begin()
        for _ in range(steps[transport.worker_rank]):
            store.pushpull("w", mx.nd.ones(1), w)
        rule: Any = stage.shards[0]._entries[0].rule
        getattr(store, ends)()
        return len(rule.pushes), sum(ranks.count(2) for ranks, _ in log_in(vars(rule)))

    assert stage.run(train)[2] == (0, 20)


@pytest.mark.parametrize("merge", ["rda", "mean"])
def test_by_the_log_of_its_rounds_a_run_repeats_to_the_bit(merge: str, tmp_path: Path) -> None:
    settings: Dict[str, Any] = {**SHORT, "H": 3, "delay": 2, "merge": merge, "momentum": 0.9}
    order = [0, 1, 2, 0, 1, 2, 0, 2, 1, 0, 2, 1]
    first = walk("decoupled", 3, 13, drawn(5), ONES, order=order, quorum=2, **settings)
    anew = walk("decoupled", 3, 13, drawn(5), ONES, **settings)
    log = log_in(first[0][2][1][1]["w@0"]["rule"])
    assert [ranks for ranks, _ in log[1:]] == [[0, 1], [0, 2], [1, 2], [0, 2], [0, 1], [1, 2]]
    assert np.abs(first[0][1] - anew[0][1]).max() > 1e-3
    (tmp_path / "rounds.json").write_text(json.dumps({"0": log}))
    again = walk("decoupled", 3, 13, drawn(5), ONES, replay=str(tmp_path / "rounds.json"), **settings)
    alike(first, again)
    with pytest.raises(ConfigError, match=r"replay: .*has no rounds of bucket 7"):
        planned(str(tmp_path / "rounds.json"), 7)


ORDER = [0, 1, 2, 0, 1, 2, 0, 2, 1, 0, 2, 1]


def evaluated(every: int, **options: Any) -> List[Any]:
    """Of 3 workers that evaluate every so many steps: of each its path, the global weights at the end, and the log."""
    stage = ScriptedStage(3, ORDER if "replay" not in options else None, timeout_s=20)

    def train(transport: Any) -> Any:
        store = kvstore.create("decoupled", transport, H=3, delay=2, grace=1, lr_outer=0.5, **options)
        w = alone(store, mx.nd.array(ONES), learning_rate=0.1, momentum=0.9)
        store.begin()
        path = []
        for t in range(1, 14):
            store.pushpull("w", mx.nd.array(drawn(5)(transport.worker_rank, t, w.asnumpy())), w)
            path.append(w.asnumpy())
            if t % every == 0:
                with store.global_weights():
                    pass
        with store.global_weights():
            final = w.asnumpy()
        store.barrier()
        return np.array(path), final, store.rounds()

    return stage.run(train)


@pytest.mark.parametrize("codec_weights", ["none", "float16"])
@pytest.mark.parametrize("first, then", [(13, 1), (1, 13), (3, 2), (4, 4)])
def test_a_run_repeats_to_the_bit_whenever_it_and_the_run_before_it_evaluate(
        first: int, then: int, codec_weights: str, tmp_path: Path) -> None:
    options: Dict[str, Any] = {"codec_weights": codec_weights, "quorum": 2}
    one = evaluated(first, **options)
    (tmp_path / "rounds.json").write_text(json.dumps(one[0][2]))
    other = evaluated(then, replay=str(tmp_path / "rounds.json"), **options)
    alike(one, other)
    members = [[ranks for ranks, _ in run[0][2]["0"]] for run in (one, other)]
    assert members[0] == members[1]


def check_left_open(rule: Syncer, w: np.ndarray) -> None:
    """A look leaves open a round without its quorum, though the others rest; its own worker's question ends it."""
    version = rule.version
    sends(rule, 0, 1, w)
    rule.rest(1)
    rule.rest(2)
    rule.look(w)
    assert rule.version == version
    assert rule.end_round(0, w) and rule.version == version + 1


def test_who_looks_sees_all_rounds_of_the_plan_that_are_due(tmp_path: Path) -> None:
    """The answer to worker 2 comes last. It makes two rounds due, and closes none."""
    (tmp_path / "rounds.json").write_text(json.dumps({"0": [[[], [2]], [[0, 1], []], [[1, 2], []]]}))
    rule, w = syncer(3, quorum=2, replay=str(tmp_path / "rounds.json")), np.zeros(1, np.float32)
    for rank in (0, 1, 1, 2):
        sends(rule, rank, 1, w)
    assert rule.end_round(2, w) and rule.version == 0
    rule.look(w)
    assert rule.version == 2
    check_left_open(rule, w)  # as the run of the log had left it when it ended


def arrive(seed: int, **options: Any) -> Tuple[float, Dict[int, List[int]], List[Any]]:
    """Each of 3 workers pushes four times, asks after all but the last push, and rests; whose turn it is is drawn.
    The weights at the end, the versions that each worker has got, and the log."""
    rule, w, draw = syncer(3, quorum=2, merge="mean", **options), np.zeros(1, np.float32), random.Random(seed)
    turns = dict.fromkeys(range(3), 0)
    got: Dict[int, List[int]] = {rank: [] for rank in turns}
    while turns:
        rank = draw.choice(list(turns))
        if turns[rank] == 7:
            rule.rest(rank)
            del turns[rank]
        elif turns[rank] % 2 == 0:
            sends(rule, rank, 10 ** rank * (1 + turns[rank]), w, counts=1 + rank)
            turns[rank] += 1
        elif rule.end_round(rank, w):  # else it waits
            got[rank].append(rule.version)
            turns[rank] += 1
    rule.look(w)
    return float(w[0]), got, log_in(vars(rule))


def test_by_its_log_a_run_repeats_whenever_messages_arrive(tmp_path: Path) -> None:
    for seed in range(100):
        one, file = arrive(seed), tmp_path / f"{seed}.json"
        file.write_text(json.dumps({"0": one[2]}))
        assert arrive(seed + 100, replay=str(file))[:2] == one[:2], seed


def test_what_a_run_left_open_stays_open_though_its_push_comes_when_the_others_rest(tmp_path: Path) -> None:
    (tmp_path / "rounds.json").write_text(json.dumps({"0": [[[], []], [[0, 1, 2], []]]}))
    rule, w = syncer(3, quorum=2, replay=str(tmp_path / "rounds.json")), np.zeros(1, np.float32)
    for rank in range(3):
        sends(rule, rank, 1, w)
    rule.rest(0)
    rule.rest(1)
    sends(rule, 2, 1, w)
    rule.look(w)
    assert rule.version == 1
    assert rule.end_round(2, w) and rule.version == 2  # a run that is longer than the log goes on


def test_whoever_looks_ends_a_round_that_has_its_quorum_and_no_other() -> None:
    """All who look together see the same, whether it is known yet who rests."""
    rule, w = syncer(3, quorum=2), np.zeros(1, np.float32)
    for rank in (1, 2):
        sends(rule, rank, 1, w)
    rule.look(w)
    assert rule.version == 1
    check_left_open(rule, w)


ROUNDS = [[[], [0]], [[0, 1], [0, 1]]]


@pytest.mark.parametrize("content, says", [
    (None, "cannot be read (FileNotFoundError"), ("{", "cannot be read (JSONDecodeError"),
    ("[" * 100000, "cannot be read (RecursionError"), ("[]", "has no rounds by bucket"),
    (json.dumps({"0": [[0], [1]]}), "has no rounds by bucket"),
    (json.dumps({"0": [[[True], []]]}), "has no rounds by bucket"),
    (json.dumps({"0": ROUNDS, "1": ROUNDS}), "has the rounds of 2 buckets (0, 1), this run has buckets 0 to 0"),
    (json.dumps({"0": [*ROUNDS, [[2], []]]}), "has rounds of workers [0, 1, 2], and this job has 2, from 0 on"),
    (json.dumps({"0": [*ROUNDS, [[-1], []]]}), "has rounds of workers [-1, 0, 1], and this job has 2"),
    (json.dumps({"0": [[[], [0]], [[0], []]]}), "has rounds of workers [0], and this job has 2")])
def test_worker_0_refuses_a_log_of_another_job_in_a_line_before_anything_starts(
        content: Optional[str], says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "rounds.json").write_text(content)
    stage = Stage(2, timeout_s=20)
    with pytest.raises(ConfigError) as error:
        stage.run(lambda transport: begins(transport, str(tmp_path / "rounds.json")))
    assert says in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400
    assert not stage.shards[0]._entries


def test_a_log_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    for workers in (2, 3):
        (tmp_path / "rounds.json").write_text(json.dumps({"0": [[[], []], [list(range(workers)), []]]}))
        check_logs(str(tmp_path / "rounds.json"), [0], workers)


def begins(transport: Any, replay: str) -> None:
    store = kvstore.create("decoupled", transport, replay=replay)
    alone(store, mx.nd.zeros(1))
    store.begin()


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_run_that_stops_between_sending_and_applying_goes_on_to_the_same_bits(quorum: int) -> None:
    settings: Dict[str, Any] = {**SHORT, "momentum": 0.9, "quorum": quorum, "order": [0, 1] * 2}
    whole = walk("decoupled", 2, 11, drawn(5), ONES, **settings)
    first = walk("decoupled", 2, 6, drawn(5), ONES, **{**settings, "order": [0, 1]})
    then = walk("decoupled", 2, 5, drawn(5), ONES, states=[ends[2] for ends in first], **{**settings, "order": [0, 1]})
    alike(whole, then, since=6)


def test_a_round_that_is_not_finite_is_left_out() -> None:
    def spoiled(m: int, t: int, w: np.ndarray) -> np.ndarray:
        return np.full_like(w, np.nan) if (m, t) == (1, 1) else np.zeros_like(w)

    options: Dict[str, Any] = {"H": 2, "delay": 1, "mix": 0.0}
    ways = walk("decoupled", 2, 4, spoiled, ONES, on_nan="skip", **options)
    np.testing.assert_array_equal(ways[1][0][3], ONES)  # the global weights, without what it had found
    with pytest.raises(DivergedError, match="worker 1"):
        walk("decoupled", 2, 4, spoiled, ONES, **options)


@pytest.mark.parametrize("worst", [(1,), (0, 1)])
def test_a_round_of_all_workers_is_over_without_what_is_not_finite(worst: Sequence[int]) -> None:
    def spoiled(m: int, t: int, w: np.ndarray) -> np.ndarray:
        return np.full_like(w, 3e38) if t < 2 and m in worst else 0.01 * (w - m)  # a step of -inf

    ways = walk("decoupled", 2, 7, spoiled, ONES, lr=10.0, on_nan="skip", H=2, delay=1, mix=0.0, quorum=2)
    np.testing.assert_array_equal(ways[0][1], ways[1][1])
    assert np.isfinite(ways[0][1]).all()


def test_a_worker_that_waits_waits_for_what_it_has_asked_for() -> None:
    learner, answer, over = Learner.__new__(Learner), engine.zeros(5), threading.Event()
    begun: queue.Queue[engine.Done] = queue.Queue()
    engine.push_async(begun.put, [], [answer])
    learner.last_exchange, learner.asked = Pending(engine.zeros(5)), deque([Pending(answer)])
    threading.Thread(target=lambda: (learner.wait(), over.set()), daemon=True).start()
    assert not over.wait(0.2)
    begun.get()()
    assert over.wait(60)


@pytest.mark.parametrize("looks", [False, True])
def test_a_worker_that_looks_at_the_global_weights_applies_what_it_had_asked_for_before(looks: bool) -> None:
    """H = 3, grace 1, delay 2, no mix, rate 1, gradients -1 and -10. Worker 0 sends -3 and asks: Theta is 3. Then
    worker 1 sends -30 and asks: Theta is 33. Worker 0 applies 3.
    """
    def train(transport: Any) -> float:
        m = transport.worker_rank
        store = kvstore.create("decoupled", transport, H=3, grace=1, delay=2, mix=0.0, fragments=1, merge="mean",
                               lr_outer=1.0, momentum_outer=0.0)
        w = alone(store, mx.nd.zeros(1), learning_rate=1.0)
        store.begin()

        def steps(number: int) -> None:
            for _ in range(number):
                store.pushpull("w", mx.nd.full(1, [-1, -10][m]), w)

        steps(4 * (m == 0))
        transport.total(np.zeros(1))
        steps(4 * (m == 1))
        transport.total(np.zeros(1))
        if looks and m == 0:
            assert store.snapshot().weights[0].asnumpy() == 33
        steps(1)
        return float(w.asnumpy()[0])

    assert Stage(2, timeout_s=60).run(train) == [3, 33]


@pytest.mark.parametrize("given, says", [
    ({"quorum": 3}, "quorum is 3, and the job has 2 workers"), ({"delay": 24}, "delay is 24, expected less than H"),
    ({"grace": 3}, "grace is 3, expected at most delay, which is 2"), ({"quorum": 0}, r"quorum.*expected"),
    ({"merge": "sum"}, "unknown merge `sum`"), ({"reduction": "sum"}, "reduction has no meaning in store decoupled"),
    ({"uneven": "join"}, "whose workers wait for nobody")])
def test_options_that_do_not_go_together_are_refused_in_a_line(given: Dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        kvstore.create("decoupled", Stage(2).worker(0), **given)
    assert "\n" not in str(error.value)


def test_a_small_model_has_as_many_fragments_as_parameters_unless_told_otherwise() -> None:
    fitted: List[int] = [Decoupled.fitted(Decoupled.Options(), count).fragments for count in (1, 10, 160)]
    assert fitted == [1, 10, 24]
    with pytest.raises(ConfigError, match="`fragments` is 2, and the model has 1 trained parameters"):
        walk("decoupled", 1, 1, drawn(5), ONES, fragments=2)
