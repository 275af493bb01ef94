"""``odsgd report``: what finished runs came to, as a table, and as one page with pictures.

    runs.py       the records that a run has left, and its outcome
    breakdown.py  where the time of its iterations went
    pictures.py   accuracy, throughput, staleness, and that breakdown
    page.py       the page, in HTML
    cli.py        the command
"""
