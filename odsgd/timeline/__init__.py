"""Timelines of jobs: the traces that each process wrote (`kvstore.tracing`), put together, summed up and drawn.

    timeline.py  bars, tracks, timelines
    files.py     reads and writes them
    clocks.py    one clock for the tracks of several hosts
    summary.py   shares of compute, exchanges and waiting
    draw.py      the figure
    cli.py       `odsgd trace`
"""
from __future__ import annotations

from pathlib import Path

from odsgd.timeline.files import MERGED, read_timeline, write


def finish(folder: Path) -> str:
    """Put the files of `folder` together in `MERGED`; returns a line that says so."""
    timeline = read_timeline(folder)
    write(timeline, folder / MERGED)
    return (f"timeline of {', '.join(track.name for track in timeline.tracks)} in {folder / MERGED}"
            + "".join(f"; {line}" for line in timeline.remarks))
