"""One clock for processes of several hosts, from what must come before what.

Processes of a host share its monotonic clock, so nothing is to be done. Between hosts, the offset is bounded by each
round of each bucket: on no worker does it end before it has begun on every worker, no server updates before it has
begun everywhere, and none of its answers arrives before the update is over. With hundreds of rounds the bounds close
to about the time of the quickest exchange, one way; the middle is taken, and half the distance is the precision. A
begin may be noted late, by a probe that waited for a core, and would then move a bound too far: so the tightest tenth
of the bounds is left out.

In an asynchronous job no round is everybody's. Then the hosts' wall clocks have to do, as well as they are set.
"""
from __future__ import annotations

import math
from typing import Any, Dict, List, Tuple

Window = Tuple[float, float]
"""(latest moment by which something of a round had begun, earliest by which something had ended), on one host."""


def align(processes: List[Any]) -> List[str]:
    """Move the bars of other hosts to the clock of the first process's host; a line for each host that was moved."""
    hosts: Dict[str, List[Any]] = {}
    for process in processes:
        hosts.setdefault(process.about["boot"], []).append(process)
    (_, first), *others = hosts.items()
    remarks = []
    for _, members in others:
        offset_s, how = _offset(first, members)
        for process in members:
            process.shift(offset_s)
        remarks.append(f"clock of {members[0].about['host']}: {how}")
    return remarks


def _offset(first: List[Any], members: List[Any]) -> Tuple[float, str]:
    """What to add to the times of `members`."""
    ours, theirs = _windows(first), _windows(members)
    common = ours.keys() & theirs.keys()
    left_out = len(common) // 10
    lows = sorted(ours[key][0] - theirs[key][1] for key in common)
    highs = sorted((ours[key][1] - theirs[key][0] for key in common), reverse=True)
    if common:
        low, high = lows[-1 - left_out], highs[-1 - left_out]
        return (low + high) / 2, f"within {1000 * abs(high - low) / 2:.2g} ms, from {len(common)} rounds"
    return _wall(first[0]) - _wall(members[0]), "as the hosts' wall clocks are set"


def _wall(process: Any) -> float:
    """Monotonic time at which the wall clock stood at 0."""
    return float(process.about["monotonic_s"] - process.about["wall_s"])


def _windows(processes: List[Any]) -> Dict[Tuple[int, int], Window]:
    """By bucket and round."""
    windows: Dict[Tuple[int, int], Window] = {}
    for process in processes:
        server = process.about["role"] == "server"
        for span in process.spans:
            if span.lane != ("update" if server else "exchange") or "round" not in span.args:
                continue
            # The update comes after the begin of each exchange and before the end of each.
            begun, ended = (span.end_s, span.start_s) if server else (span.start_s, span.end_s)
            key = span.args["bucket"], span.args["round"]
            before = windows.get(key, (-math.inf, math.inf))
            windows[key] = max(before[0], begun), min(before[1], ended)
    return windows
