"""``odsgd bench``: the time of an iteration, ours and others', on the same links in the same run.

    config.py    the options: systems x models x computing times x workers x link rates
    systems.py   the systems by name, and how a job of each is launched
    models.py    models as lists of shapes
    run.py       the jobs, interleaved
    worker.py    runs as its workers: ours, and stock MXNet's
    torch_worker.py   runs as its workers: on PyTorch, ours and DistributedDataParallel
    hvd.py       runs as its workers, for Horovod, on the loop of worker.py
    server.py    runs as its servers
    usage.py     CPU time and memory of a process; standard library only
    results.py   medians and spread of the jobs, and the limit: the bytes of a system's traffic over the links' goodput
    report.py    the table, Markdown and JSON
"""
