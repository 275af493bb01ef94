"""Places of a job's workers: which are empty, and who may join there while the job runs. No I/O.

A job has as many places as `-n` says. One is empty from the start (`--spare`), or when its worker is lost. A worker
that joins takes one that nobody has had, else the one that was lost longest ago: the host of the last loss may still be
down. Worker 0's is not given again: it has told the servers what to train.
"""
import math
from typing import List, Optional

from odsgd.launch.plan import Plan, Process
from odsgd.launch.policy.judge import Judge


def why_closed(job_closed: str, plan: Plan, judge: Judge) -> str:
    """Why nobody may join now, in words; empty if somebody may. `job_closed`: why never, if so."""
    if job_closed:
        return job_closed
    if not judge.all_joined:
        return "it is still starting; join it once it trains"
    if judge.workers_ended_at is not None:
        return "its workers have finished"
    if next_empty(plan, judge) is None:
        return "no place is empty: each of its workers is there, or worker 0 is lost; launch it with --spare to grow"
    return ""


def all_empty(plan: Plan, judge: Judge) -> List[Process]:
    """The processes of the empty places."""
    members = judge.members
    return [one for one in (*plan.workers[1:], *plan.spare)
            if one.name not in members or members[one.name].part == "lost"]


def next_empty(plan: Plan, judge: Judge) -> Optional[Process]:
    """The process of the empty place that the next worker takes."""
    members, empty = judge.members, all_empty(plan, judge)
    return min(empty, key=lambda one: members[one.name].lost_at if one.name in members else -math.inf, default=None)
