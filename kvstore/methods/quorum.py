"""Rounds of some workers, on an asynchronous server: which workers are in which round, and a log to repeat a run by.

    push               is kept until its round is over
    fetch, `end_round` of a worker whose push is kept: the round is over if `quorum` workers are in it. If not, the
                       answer is the weights as they are, and the push is in the round that closes next

So nobody waits for anybody, unless the quorum is all workers: then the answer waits for them, but not that to a worker
that has joined, which may be at another fragment than those that wait for it. A round is also over when it has all
workers from whom a push can come: the launcher has not given them up, and they do not rest (wait for all others at a
meeting, or have ended); or when it has `MOST_KEPT` pushes for each worker. Pushes are handed on in the order of ranks,
so that their order of arrival changes no bit. What could change bits: which workers are in a round, and which round's
weights answer a worker. The log has both, and grows as long as the run: all but the current version is text, 20 bytes a
round of three workers, which an export does not copy. A rule with a plan, the log of another run, closes rounds and
answers by it; at the plan's end it goes on without.
"""
import functools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, Collection, Dict, List, Sequence, Set

import numpy as np

from kvstore.errors import ConfigError, shown
from kvstore.job.environment import absent_workers, lost_workers
from kvstore.messages.header import Header
from kvstore.methods.asgd import AsyncRule

MOST_KEPT = 8
"""Pushes that are kept for a round, times the number of workers: others may be too slow for the quorum."""
LOG_PIECE = 16 * 1024
"""Characters of a piece of the log, to which later rounds are no longer added."""


class QuorumRule(AsyncRule):
    """The server, for one bucket. Options: `quorum`, and `replay`, a file of logs by bucket; None: no plan."""

    arrays = {"pushes": "what workers have sent for the next round"}
    facts = (*AsyncRule.facts, "members", "log_before", "log_now")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pushes: List[np.ndarray] = []
        self.members: List[Any] = []  # of each push: the worker's rank, and the rate that came with it
        # Of each version: the ranks of its round, and those that its weights have answered. Older versions are JSON.
        self.log_before: List[str] = []
        self.log_now: List[List[int]] = [[], []]
        self._came = [0.0] * self.num_workers  # to how many meetings each worker has come, its end included
        self._over = 0.0  # how many meetings are over
        self._plan: List[Any] = planned(self.options.replay, self.index) if self.options.replay else []

    def close(self, w: np.ndarray, rates: np.ndarray, pushes: Sequence[np.ndarray]) -> None:
        """A round is over: apply it to `w`."""
        raise NotImplementedError

    def push(self, header: Header, tau: int, grad: np.ndarray, w: np.ndarray) -> float:
        if not header.lr:  # the worker had no examples
            self.skip(header, w)
            return 0.0
        self._keep(header.worker_rank, header.lr, grad.copy(), w)
        return float(self.options.lr_outer / header.lr)

    def skip(self, header: Header, w: np.ndarray) -> None:
        """The worker is in the round, and its push counts nothing."""
        self._keep(header.worker_rank, 0.0, np.zeros_like(w), w)

    def _keep(self, worker_rank: int, rate: float, push: np.ndarray, w: np.ndarray) -> None:
        self.pushes.append(push)
        self.members.append([worker_rank, rate])
        if worker_rank in lost_workers():  # it has joined, and meets nobody
            self._came[worker_rank] = 0.0
        self._over = max(self._over, self._came[worker_rank])
        self._close(w, self.num_workers, rests=not self._plan)  # what the plan's run left open stays open

    def rest(self, worker_rank: int) -> None:
        """This worker rests; workers say so only where the quorum is more than one."""
        self._came[worker_rank] += math.inf if worker_rank in lost_workers() else 1  # a joiner's end is for good

    def _resting(self) -> Set[int]:
        """A meeting is over once all that take part have come, or one of them has pushed again: this host may hear late
        that another is lost."""
        meet = set(range(self.num_workers)) - lost_workers()
        self._over = max(self._over, min((self._came[rank] for rank in meet), default=0.0))
        return {rank for rank, came in enumerate(self._came) if came > self._over}

    def _may_still_come(self, ranks: Collection[int], rests: bool) -> Set[int]:
        """The workers beside `ranks` from whom a push can still come; `rests`: none comes from those that rest."""
        return set(range(self.num_workers)) - set(ranks) - absent_workers() - (self._resting() if rests else set())

    def end_round(self, worker_rank: int, w: np.ndarray) -> bool:
        if worker_rank in self._pushed_ranks() or not self._answers(worker_rank):
            self._close(w, self.options.quorum)
            if not self._answers(worker_rank):
                return False
        self.log_now[1].append(worker_rank)
        return True

    def look(self, w: np.ndarray) -> None:
        """An evaluation ends a round that has its quorum, so that all workers that evaluate together see the same, and
        what they save has all rounds of the log. Which workers rest may not be known yet, and does not count here. A
        look is not in the log: with a plan it closes all rounds that are due by the plan."""
        while self.version + 1 < len(self._plan):
            if not self._close(w, 0):
                return
        self._close(w, self.options.quorum, rests=False)

    def _pushed_ranks(self) -> List[int]:
        return [rank for rank, _ in self.members]

    def _answers(self, worker_rank: int) -> bool:
        """Whether this worker may be answered with the weights as they are."""
        if self.version < len(self._plan):
            return bool(self._plan[self.version][1].count(worker_rank) > self.log_now[1].count(worker_rank))
        return (self.options.quorum < self.num_workers or worker_rank not in self._pushed_ranks()
                or worker_rank in lost_workers())  # it has joined

    def _close(self, w: np.ndarray, at_least: int, rests: bool = True) -> bool:
        """Close the round if so many workers are in it, or all that can still come; with a plan, if it is the next one
        there. Whether it is closed.
        """
        ranks = self._pushed_ranks()
        if self.version < len(self._plan) and len(self.log_now[1]) < len(self._plan[self.version][1]):
            return False
        if self.version + 1 < len(self._plan):
            at_least, ranks = 0, self._plan[self.version + 1][0]
        if not ranks or Counter(ranks) - Counter(self._pushed_ranks()):
            return False
        few = len(set(ranks)) < at_least and len(ranks) < MOST_KEPT * self.num_workers
        if few and self._may_still_come(ranks, rests):
            return False
        rates, pushes = [], []
        for rank in sorted(ranks):
            first = self._pushed_ranks().index(rank)
            rates.append(self.members.pop(first)[1])
            pushes.append(self.pushes.pop(first))
        self.close(w, np.array(rates), pushes)
        self._log_next(sorted(ranks))
        return True

    def _log_next(self, ranks: List[int]) -> None:
        """Begin the log of the version that this round has made."""
        text = json.dumps(self.log_now, separators=(",", ":"))
        if self.log_before and len(self.log_before[-1]) < LOG_PIECE:
            self.log_before[-1] += f",{text}"
        else:
            self.log_before.append(text)
        self.log_now = [ranks, []]


def log_in(facts: Dict[str, Any]) -> List[Any]:
    """The log in the facts of a rule: a pair of lists for each version. Empty if its method has no rounds."""
    if "log_now" not in facts:
        return []
    return [*json.loads(f"[{','.join(facts['log_before'])}]"), facts["log_now"]]


def planned(file: str, bucket: int) -> List[Any]:
    """A bucket's log in a file of logs."""
    logs = read_logs(file)
    if str(bucket) not in logs:
        raise ConfigError(f"replay: `{shown(file)}` has no rounds of bucket {bucket}; is it another one than on worker "
                          "0's host?")
    return logs[str(bucket)]


def check_logs(file: str, buckets: Collection[int], num_workers: int) -> None:
    """ConfigError unless these are the logs of a job with such buckets and workers."""
    read_logs.cache_clear()  # what a store before has read may have been written anew
    logs = read_logs(file)
    ranks = {rank for log in logs.values() for version in log for part in version for rank in part}
    if set(logs) != set(map(str, buckets)):
        raise ConfigError(f"replay: `{shown(file)}` has the rounds of {len(logs)} buckets ({shown(', '.join(logs))}), "
                          f"this run has buckets {min(buckets)} to {max(buckets)}; it belongs to another model or "
                          "other options")
    if ranks and ranks != set(range(num_workers)):
        raise ConfigError(f"replay: `{shown(file)}` has rounds of workers {shown(sorted(ranks))}, and this job has "
                          f"{num_workers}, from 0 on; it belongs to a job of other workers")


@functools.lru_cache(maxsize=1)  # each bucket asks
def read_logs(file: str) -> Dict[str, List[Any]]:
    """The logs by bucket in a file of what `store.rounds()` gives; ConfigError if it is something else."""
    try:
        logs = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"replay: `{shown(file)}` cannot be read ({type(error).__name__}: {shown(str(error))}); it "
                          "lies at the same path on the hosts of worker 0 and the servers") from None
    if not (isinstance(logs, dict) and all(isinstance(log, list) and all(map(_is_version, log))
                                           for log in logs.values())):
        raise ConfigError(f"replay: `{shown(file)}` has no rounds by bucket, as `store.rounds()` gives them")
    return logs


def _is_version(value: Any) -> bool:
    """Whether this may be the ranks of a round, and those that were answered after it."""
    return isinstance(value, list) and len(value) == 2 and all(
        isinstance(part, list) and all(type(rank) is int for rank in part) for part in value)
