"""Whether a job that has failed is started again: facts in, a decision and its words out. No I/O.

Not started again: a mistake in the options (exit code 64), a signal to the launcher, a job whose workers have all
succeeded, whatever became of a server then, and a failure that has already happened in the same way: the same process,
in the same words, from the same checkpoint, and no farther than before.
"""
import re
from typing import NamedTuple, Optional

from kvstore.errors import EXIT_USAGE
from odsgd.launch.judge import Verdict


class Attempt(NamedTuple):
    """One start of a job, when it has ended."""

    verdict: Verdict
    resumed: int  # the iteration it began after
    saved: int  # the last iteration that it, or one before it, has kept
    at: int  # the farthest iteration that a worker has told of, perhaps a second before the end
    lost_s: float  # the time since then, or since the start

    @property
    def manner(self) -> str:
        """The failure in words, without pids, times and other numbers."""
        return re.sub(r"\d+(\.\d+)?", "N", self.verdict.message.partition("\n")[0])


class Decision(NamedTuple):
    """What comes after an attempt."""

    again: bool
    text: str = ""


def decide(attempt: Attempt, before: Optional[Attempt], done: int, most: int) -> Decision:
    """After `done` restarts of `most`; `before`: the last attempt but this one."""
    verdict = attempt.verdict
    if verdict.finished or verdict.by_signal or not most:
        return Decision(False)
    if verdict.exit_code == EXIT_USAGE:
        return Decision(False, "not started again: a mistake in the options stays one")
    if before is not None and before.verdict.culprit is not None and attempt.at <= before.at \
            and attempt.saved == before.saved \
            and (attempt.manner, attempt.resumed, verdict.culprit) == (before.manner, before.resumed,
                                                                       before.verdict.culprit):
        return Decision(False, f"not started again: {verdict.culprit} has failed in the same way as before, after the "
                        f"same checkpoint ({attempt.resumed}) and no farther than then (iteration {before.at})")
    if done == most:
        return Decision(False, f"not started again: that were {most} restarts (--max-restarts)")
    iterations = max(0, attempt.at - attempt.saved)
    where = f"checkpoint {attempt.saved}" if attempt.saved else "the beginning"
    return Decision(True, f"restart {done + 1} of {most}, from {where}; lost are {attempt.lost_s:.1f} s, at least "
                    f"{iterations} iterations")
