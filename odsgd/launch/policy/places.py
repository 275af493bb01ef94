"""Places of a job's workers: which are empty, and who may join there while the job runs. No I/O.

A job has as many places as `-n` says. One is empty from the start (`--spare`), or when its worker is lost. A worker
that joins takes the first. Worker 0's is not given again: it has told the servers what to train.
"""
from typing import List, Optional

from odsgd.launch.plan import Plan, Process
from odsgd.launch.policy.judge import Judge


def why_closed(job_closed: str, plan: Plan, judge: Judge) -> str:
    """Why nobody may join now, in words; empty if somebody may. `job_closed`: why never, if so."""
    if job_closed:
        return job_closed
    if not judge.all_joined:
        return "it is still starting; join it once it trains"
    if first_empty(plan, judge) is None:
        return "no place is empty: each of its workers is there, or worker 0 is lost; launch it with --spare to grow"
    return ""


def first_empty(plan: Plan, judge: Judge) -> Optional[Process]:
    """The process of the first empty place."""
    return next((one for one in _places(plan) if one.name not in judge.members or judge.members[one.name].absent), None)


def _places(plan: Plan) -> List[Process]:
    return [*plan.workers[1:], *plan.spare]
