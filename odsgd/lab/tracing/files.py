"""Chrome traces of a job's processes, read and put into one file on one clock.

    job = read_job(Path("runs/trace"))      a folder of traces, one per process; or a file of `write`
    job.processes[0].spans                  bars; seconds since the first of the job
"""
from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from kvstore.errors import ConfigError
from kvstore.tracing.recorder import row
from odsgd.lab.tracing import clocks

MERGED = "trace.json"

Event = Dict[str, Any]


@dataclasses.dataclass
class Span:
    """One bar."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Dict[str, Any]


@dataclasses.dataclass
class Process:
    """One process of a job. `about`: what its recorder wrote of it."""

    about: Dict[str, Any]
    spans: List[Span]

    @property
    def name(self) -> str:
        return f"{self.about['role']} {self.about['rank']}"

    def lane(self, lane: str) -> List[Span]:
        """Its bars of one lane, in order."""
        return sorted((span for span in self.spans if span.lane == lane), key=lambda span: span.start_s)

    def shift(self, seconds: float) -> None:
        """Move all bars."""
        for span in self.spans:
            span.start_s += seconds
            span.end_s += seconds


@dataclasses.dataclass
class Job:
    """All processes, workers first; `remarks`: what a reader must know of the clocks."""

    name: str
    processes: List[Process]
    remarks: List[str]

    @property
    def workers(self) -> List[Process]:
        return [process for process in self.processes if process.about["role"] == "worker"]


def read_job(path: Path) -> Job:
    """The trace of a job; ConfigError if there is none, or not of one job."""
    if path.is_dir():
        return _from_parts(path)
    events, remarks = _events(path)
    return Job(path.parent.name or path.name, _processes(events, path), remarks)


def _from_parts(folder: Path) -> Job:
    """Files that an earlier job left in the same folder are not of this one, that of worker 0."""
    paths = [path for pattern in ("worker-*.json", "server-*.json") for path in sorted(folder.glob(pattern))]
    found = [process for path in paths for process in _processes(_events(path)[0], path)]
    if not found:
        raise ConfigError(f"no trace in `{folder}`; expected worker-0.json ..., which `odsgd train --trace {folder}` "
                          "writes")
    found = [process for process in found if process.about["job"] == found[0].about["job"]]
    remarks = clocks.align(found)
    first_s = min((span.start_s for process in found for span in process.spans), default=0.0)
    for process in found:
        process.shift(-first_s)
    return Job(folder.name, found, remarks)


def _events(path: Path) -> Tuple[List[Event], List[str]]:
    """The events of a file, which may end anywhere if its process was killed."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`: {error.strerror}") from None
    try:
        content = json.loads(text)
    except ValueError:
        content = list(_whole_lines(text))
    if isinstance(content, dict):
        return content["traceEvents"], content.get("otherData", {}).get("remarks", [])
    return content, []


def _whole_lines(text: str) -> Iterator[Event]:
    for line in text.splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue  # brackets, and the half line at the end
        if isinstance(event, dict):
            yield event


def _processes(events: List[Event], path: Path) -> List[Process]:
    found: Dict[int, Process] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "odsgd":
            found[event["pid"]] = Process(event["args"], [])
    for event in events:
        if event["ph"] == "X" and event["pid"] in found:
            start_s = event["ts"] / 1e6
            found[event["pid"]].spans.append(Span(event["cat"], event["name"], start_s, start_s + event["dur"] / 1e6,
                                                  event["args"]))
    if not found:
        raise ConfigError(f"`{path}` is no trace of odsgd; expected what `odsgd train --trace DIR` or `odsgd trace "
                          "merge` writes")
    return sorted(found.values(), key=lambda process: (process.about["role"] != "worker", process.about["rank"]))


def write(job: Job, path: Path) -> None:
    """One Chrome trace of all processes."""
    events: List[Event] = []
    for pid, process in enumerate(job.processes):
        metadata = {"process_name": {"name": f"{process.name} on {process.about['host']}"},
                    "process_sort_index": {"sort_index": pid}, "odsgd": process.about}
        events += [{"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args} for name, args in metadata.items()]
        rows: Dict[int, str] = {}
        for span in process.spans:
            tid, title = row(span.lane, span.args)
            rows[tid] = title
            events.append({"ph": "X", "name": span.name, "cat": span.lane, "pid": pid, "tid": tid,
                           "ts": round(1e6 * span.start_s, 1), "dur": round(1e6 * (span.end_s - span.start_s), 1),
                           "args": span.args})
        for tid, name in sorted(rows.items()):
            events += [{"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}},
                       {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}]
    lines = ",\n".join(json.dumps(event) for event in events)
    remarks = json.dumps({"remarks": job.remarks})
    path.write_text(f'{{"displayTimeUnit": "ms", "otherData": {remarks}, "traceEvents": [\n{lines}\n]}}\n',
                    encoding="utf-8")
