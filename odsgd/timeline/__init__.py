"""Timelines of jobs: the traces that each process wrote (`kvstore.tracing`), put together, summed up and drawn.

    timeline.py  bars, tracks, timelines
    files.py     reads and writes them
    clocks.py    one clock for the tracks of several hosts
    summary.py   shares of compute, exchanges and waiting
    draw.py      the figure
    cli.py       `odsgd trace`
"""
from pathlib import Path
from typing import Optional

from odsgd.timeline.files import MERGED, read_timeline, write


def finish(folder: Path, out: Optional[Path] = None) -> str:
    """Put the files of `folder` together in `out`, by default `MERGED` beside them; returns a line that says so."""
    timeline, out = read_timeline(folder), out or folder / MERGED
    write(timeline, out)
    return (f"timeline of {', '.join(track.name for track in timeline.tracks)} in {out}"
            + "".join(f"; {line}" for line in timeline.remarks))
