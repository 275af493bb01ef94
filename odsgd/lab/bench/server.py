"""A server or scheduler of a measured job: ours, or stock MXNet's: ``server.py MODULE``; run by path.

Ten times a second a server writes its usage so far to ODSGD_BENCH_FOLDER/server-RANK, a line of JSON each; its usage
during a measurement follows from the lines around it (`run.used`).
"""
import importlib
import json
import os
import runpy
import sys
import threading
import time

import usage  # type: ignore[import-not-found]  # beside this file

EVERY_S = 0.1


def note_usage() -> None:
    """Write the usage now and then; never returns."""
    path = os.path.join(os.environ["ODSGD_BENCH_FOLDER"], "server-" + os.environ["ODSGD_SERVER_RANK"])
    with open(path, "w", encoding="utf-8") as file:
        while True:
            file.write(json.dumps(usage.now()) + "\n")
            file.flush()
            time.sleep(EVERY_S)


if __name__ == "__main__":
    if os.environ["DMLC_ROLE"] == "server":
        threading.Thread(target=note_usage, daemon=True).start()
    del sys.path[0]  # this folder: its files are no modules for others
    if sys.argv[1] == "mxnet":
        import kvstore.engine._before  # noqa: F401  or the import fails
        importlib.import_module("mxnet")  # is its server loop
    else:
        runpy.run_module(sys.argv[1], run_name="__main__")
