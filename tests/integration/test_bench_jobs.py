"""odsgd bench with real jobs: on loopback, and on an emulated cluster where one can be made."""
import json
import os
import shutil

import pytest

from odsgd.bench import cli

CLUSTER = hasattr(os, "geteuid") and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "nsenter", "unshare")))


def bench(folder, *flags):
    """Run it; what it wrote as JSON."""
    path = folder / "all.json"
    assert cli.main([*flags, "--repeat", "1", "--timeout-s", "90", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_ours_and_stock_on_loopback(tmp_path, capfd):
    found = bench(tmp_path, "--systems", "odsgd@1,mxnet/dist_sync@1", "--models", "cnn,0.27M", "--compute",
                  "0.27M=9ms,cnn=0", "--seconds", "0.2")
    rows = {(row["case"]["model"], row["system"]): row for row in found["rows"]}
    assert set(rows) == {(model, system) for model in ("cnn", "0.27M") for system in ("odsgd@1", "mxnet/dist_sync@1")}
    for (model, _), row in rows.items():
        assert row["iteration_ms"] > (9 if model == "0.27M" else 0)  # what the emulated accelerator takes
        assert row["server_cpu_ms"] is not None and row["server_memory_mb"] > 50
    assert all(len(run["times_ms"]) >= 8 for run in found["runs"])


@pytest.mark.skipif(not CLUSTER, reason="an emulated cluster needs root, iproute2 and util-linux")
def test_no_iteration_beats_the_limit_of_a_slow_link(tmp_path, capfd):
    found = bench(tmp_path, "--systems", "ssgd@1", "--models", "0.27M", "--compute", "0", "--rates", "100mbit",
                  "--seconds", "0.2")
    row, = found["rows"]
    assert row["limit_ms"] > 150  # 2 workers x 1.09 MB at less than 12.5 MB/s
    assert row["iteration_ms"] > 0.95 * row["limit_ms"]
