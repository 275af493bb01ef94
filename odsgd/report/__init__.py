"""``odsgd report``: what finished runs came to, as a table, and as one page with pictures.

    runs.py       the records that a run has left, and its outcome
    breakdown.py  where the time of its iterations went
    page.py       the page, in HTML: accuracy, throughput, staleness, and that breakdown, with their pictures
    cli.py        the command
"""
