"""Timelines of jobs: the traces that each process wrote (`kvstore.tracing`), put together, summed up and drawn."""
from __future__ import annotations

from pathlib import Path

from odsgd.lab.tracing.files import MERGED, read_job, write


def finish(folder: Path) -> str:
    """Put together what lies in `folder`, in `MERGED`; a line that says so."""
    job = read_job(folder)
    write(job, folder / MERGED)
    return (f"timeline of {', '.join(process.name for process in job.processes)} in {folder / MERGED}"
            + "".join(f"; {line}" for line in job.remarks))
