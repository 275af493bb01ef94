"""One clock for processes of several hosts, from events that must come before others.

Between hosts, the offset is bounded by each round of each bucket: on no worker does it end before it has begun on every
worker, no server updates before it has begun everywhere, and none of its answers arrives before the update is over. A
begin may be noted late, by a probe that waited for a core, and would then move a bound too far: so the tightest tenth
of the bounds is left out. In an asynchronous job no round is everybody's: there the hosts' wall clocks have to do.
"""
import math
from typing import Dict, List, Tuple

from odsgd.timeline.timeline import Track

Bounds = Tuple[float, float]
"""(latest moment by which something of a round had begun, earliest by which something had ended), on one host."""


def align(tracks: List[Track]) -> List[str]:
    """Move the bars of other hosts to the clock of the first track's host; a line for each host that was moved."""
    hosts: Dict[str, List[Track]] = {}
    for track in tracks:
        hosts.setdefault(track.about["boot"], []).append(track)
    first, *others = hosts.values()
    remarks = []
    for members in others:
        offset_s, how = _offset(first, members)
        for track in members:
            track.shift(offset_s)
        remarks.append(f"clock of {members[0].about['host']}: {how}")
    return remarks


def _offset(first: List[Track], members: List[Track]) -> Tuple[float, str]:
    """Seconds to add to the times of `members`, and how they were found."""
    ours, theirs = _bounds(first), _bounds(members)
    common = ours.keys() & theirs.keys()
    if not common:
        return _wall_s(first[0]) - _wall_s(members[0]), "as the hosts' wall clocks are set"
    left_out = len(common) // 10
    low = sorted(ours[key][0] - theirs[key][1] for key in common)[-1 - left_out]
    high = sorted(ours[key][1] - theirs[key][0] for key in common)[left_out]
    return (low + high) / 2, f"within {1000 * abs(high - low) / 2:.2g} ms, from {len(common)} rounds"


def _wall_s(track: Track) -> float:
    """Monotonic time at which the wall clock stood at 0."""
    return float(track.about["monotonic_s"] - track.about["wall_s"])


def _bounds(tracks: List[Track]) -> Dict[Tuple[int, int], Bounds]:
    """The bounds by bucket and round."""
    found: Dict[Tuple[int, int], Bounds] = {}
    for track in tracks:
        server = track.about["role"] == "server"
        for bar in track.of("update" if server else "exchange"):
            if "round" in bar.args:
                # The update comes after the begin of each exchange and before the end of each.
                begun, ended = (bar.end_s, bar.start_s) if server else (bar.start_s, bar.end_s)
                key = bar.args["bucket"], bar.args["round"]
                latest, earliest = found.get(key, (-math.inf, math.inf))
                found[key] = max(latest, begun), min(earliest, ended)
    return found
