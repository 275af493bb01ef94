"""Chrome traces of a job's processes, read and put into one file on one clock.

    timeline = read_timeline(Path("runs/trace"))    a folder of traces, one per process; or a file of `write`
    timeline.tracks[0].bars                         seconds since the first of the job
"""
import json
import math
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from kvstore.errors import ConfigError
from kvstore.job.aside import without_waiting
from kvstore.tracing.trace import row
from odsgd.timeline import clocks
from odsgd.timeline.timeline import Bar, Timeline, Track

MERGED = "trace.json"

Event = Dict[str, Any]


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
    paths = [path for role in ("worker", "server") for path in sorted(folder.glob(f"{role}-*.json"), key=_by_rank)
             if path.is_file() and path.stat().st_size]  # a process that was killed at once leaves an empty one
    found = [track for path in paths for track in _tracks(_events(path)[0], path)]
    if not found:
        raise ConfigError(f"no trace in `{folder}`; expected worker-0.json ..., which `odsgd train --trace {folder}` "
                          "writes")
    first = found[0].about
    found = [track for track in found if track.about["job"] == first["job"]
             and (track.about["role"] != "worker" or track.about["rank"] < first.get("workers", math.inf))]
    remarks = clocks.align(found)
    first_s = min((bar.start_s for track in found for bar in track.bars), default=0.0)
    for track in found:
        track.shift(-first_s)
    return Timeline(home(folder).name, found, remarks)


def _by_rank(path: Path) -> Tuple[int, str]:
    """10 comes after 9."""
    return len(path.name), path.name


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
            tid, titles[tid] = row(bar.stage, bar.args)
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
