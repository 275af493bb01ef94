"""Timelines of jobs: the traces that each process wrote (`kvstore.tracing`), put together, summed up and drawn.

    timeline.py  bars, tracks, timelines; read, put on one clock, written
    summary.py   shares of compute, exchanges and waiting
    draw.py      the figure
    cli.py       `odsgd trace`
"""
