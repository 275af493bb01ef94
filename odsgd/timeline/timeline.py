"""A job's timeline: bars, a track of them per process, and the tracks of all on one clock; from files, and to one.

    timeline = read_timeline(Path("runs/trace"))    a folder of Chrome traces, one per process; or a file of `write`
    timeline.tracks[0].bars                         seconds since the first of the job
"""
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from kvstore.errors import ConfigError
from kvstore.job.aside import without_waiting
from kvstore.tracing.trace import Bar

MERGED = "trace.json"

Event = Dict[str, Any]
Bounds = Tuple[float, float]
"""(latest moment by which something of a round had begun, earliest by which something had ended), on one host."""


@dataclasses.dataclass
class Track:
    """The bars of one process. `about`: its role, rank, host, job and clock, as its recorder wrote them."""

    about: Dict[str, Any]
    bars: List[Bar]

    @property
    def name(self) -> str:
        return f"{self.about['role']} {self.about['rank']}"

    def of(self, stage: str) -> List[Bar]:
        """The bars of one stage, in order."""
        return sorted((bar for bar in self.bars if bar.stage == stage), key=lambda bar: bar.start_s)

    def shift(self, seconds: float) -> None:
        self.bars = [bar._replace(start_s=bar.start_s + seconds, end_s=bar.end_s + seconds) for bar in self.bars]


@dataclasses.dataclass
class Timeline:
    """The tracks of a job on one clock, workers first; `remarks`: how well the clocks agree."""

    name: str
    tracks: List[Track]
    remarks: List[str]

    @property
    def workers(self) -> List[Track]:
        return [track for track in self.tracks if track.about["role"] == "worker"]


def read_timeline(path: Path) -> Timeline:
    """The timeline of a job; ConfigError if the path holds none, or no trace of one job."""
    if path.is_dir():
        return _from_parts(path)
    events, remarks = _events(path)
    return Timeline(home(path).name, _tracks(events, path), remarks)


def home(path: Path) -> Path:
    """The whole path of the folder that a timeline is named by."""
    return path.resolve() if path.is_dir() else path.resolve().parent


def _from_parts(folder: Path) -> Timeline:
    """The job is worker 0's; files that an earlier job left in the folder are passed over. Jobs that our launcher did
    not start are all called alike, and the earlier one may have had more workers.
    """
    def by_rank(path: Path) -> Tuple[int, str]:
        return len(path.name), path.name  # 10 comes after 9

    paths = [path for role in ("worker", "server") for path in sorted(folder.glob(f"{role}-*.json"), key=by_rank)
             if path.is_file() and path.stat().st_size]  # a process that was killed at once leaves an empty one
    found = [track for path in paths for track in _tracks(_events(path)[0], path)]
    if not found:
        raise ConfigError(f"no trace in `{folder}`; expected worker-0.json ..., which `odsgd train --trace {folder}` "
                          "writes")
    first = found[0].about
    found = [track for track in found if track.about["job"] == first["job"]
             and (track.about["role"] != "worker" or track.about["rank"] < first.get("workers", math.inf))]
    remarks = _align(found)
    first_s = min((bar.start_s for track in found for bar in track.bars), default=0.0)
    for track in found:
        track.shift(-first_s)
    return Timeline(home(folder).name, found, remarks)


def _events(path: Path) -> Tuple[List[Event], List[str]]:
    """The events of a file, which may end anywhere if its process was killed; and remarks."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _no_trace(path) from None
    try:
        content = json.loads(text)
    except ValueError:
        content = list(_whole_lines(text))
    if isinstance(content, dict):
        about = content.get("otherData", {})
        return content.get("traceEvents", []), about.get("remarks", []) if isinstance(about, dict) else []
    return content, []


def _no_trace(path: Path) -> ConfigError:
    return ConfigError(f"`{path}` is no trace of odsgd; expected what `odsgd train --trace DIR` or `odsgd trace merge` "
                       "writes")


def _whole_lines(text: str) -> Iterator[Event]:
    for line in text.splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue  # brackets, and the half line at the end
        if isinstance(event, dict):
            yield event


def _tracks(events: List[Event], path: Path) -> List[Track]:
    try:
        found = {event["pid"]: Track(event["args"], []) for event in events
                 if event["ph"] == "M" and event["name"] == "odsgd"}
        for event in events:
            if event["ph"] == "X" and event["pid"] in found:
                start_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                found[event["pid"]].bars.append(Bar(event["cat"], event["name"], start_s, end_s, event["args"]))
        tracks = sorted(found.values(), key=lambda track: (track.about["role"] != "worker", track.about["rank"]))
    except (KeyError, TypeError):
        raise _no_trace(path) from None
    if not tracks:
        raise _no_trace(path)
    return tracks


def write(timeline: Timeline, path: Path) -> None:
    """One Chrome trace of all processes."""
    events: List[Event] = []
    for pid, track in enumerate(timeline.tracks):
        titles: Dict[int, str] = {}
        for bar in track.bars:
            tid, titles[tid] = bar.row()
            events.append({"ph": "X", "name": bar.name, "cat": bar.stage, "pid": pid, "tid": tid,
                           "ts": round(1e6 * bar.start_s, 1), "dur": round(1e6 * (bar.end_s - bar.start_s), 1),
                           "args": bar.args})
        metadata: List[Tuple[str, int, Event]] = [
            ("process_name", 0, {"name": f"{track.name} on {track.about['host']}"}),
            ("process_sort_index", 0, {"sort_index": pid}), ("odsgd", 0, track.about)]
        for tid, title in titles.items():
            metadata += [("thread_name", tid, {"name": title}), ("thread_sort_index", tid, {"sort_index": tid})]
        events += [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args} for name, tid, args in metadata]
    lines = ",\n".join(json.dumps(event) for event in events)
    remarks = json.dumps({"remarks": timeline.remarks})
    with open(path, "w", encoding="utf-8", opener=without_waiting) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {remarks}, "traceEvents": [\n{lines}\n]}}\n')


def finish(folder: Path, out: Optional[Path] = None) -> str:
    """Put the files of `folder` together in `out`, by default `MERGED` beside them; returns a line that says so."""
    timeline, out = read_timeline(folder), out or folder / MERGED
    write(timeline, out)
    return (f"timeline of {', '.join(track.name for track in timeline.tracks)} in {out}"
            + "".join(f"; {line}" for line in timeline.remarks))


def _align(tracks: List[Track]) -> List[str]:
    """Move the bars of other hosts to the clock of the first track's host; a line for each host that was moved.

    Between hosts, the offset is bounded by each round of each bucket: on no worker does it end before it has begun on
    every worker, no server updates before it has begun everywhere, and none of its answers arrives before the update is
    over. A begin may be noted late, by a probe that waited for a core, and would then move a bound too far: so the
    tightest tenth of the bounds is left out. In an asynchronous job no round is everybody's: there the hosts' wall
    clocks have to do.
    """
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
