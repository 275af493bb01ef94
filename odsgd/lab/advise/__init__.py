"""``odsgd advise``: which store, how many servers, which codec, before anything is bought or started.

    config.py       the options
    candidates.py   the systems that are looked at, and the cluster on which each runs
    predictions.py  what is to be expected of one: time, bound, staleness, memory
    changes.py      what gains most
    knowledge.py    what is known of accuracy, and where the times were checked
    report.py       the table and JSON
    figure.py       the picture
"""
