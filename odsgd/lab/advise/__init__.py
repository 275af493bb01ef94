"""``odsgd advise``: which store, how many servers, which codec, before anything is bought or started.

    config.py       the options
    candidates.py   the systems to look at, and which change gains most
    predictions.py  what to expect of a system: time, bound, staleness, memory
    knowledge.py    measured accuracies, and the range in which the times were checked
    report.py       the table and JSON
"""
