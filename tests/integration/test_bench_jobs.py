"""odsgd bench with real jobs: on loopback, and on an emulated cluster where one can be made; odsgd profile in a job."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Dict

import pytest
import yaml

from odsgd.config.files import read_cluster
from odsgd.lab.bench import cli, models
from tests.integration.launching import MARK, marked
from tests.jobs import ROOT, launch, until
from tests.odsgd.lab.test_profile import QUICK

CLUSTER = hasattr(os, "geteuid") and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "nsenter", "unshare")))


def bench(folder: Path, *flags: str) -> Dict[str, Any]:
    """Run it; what it wrote as JSON."""
    path = folder / "all.json"
    assert cli.main([*flags, "--repeat", "1", "--timeout-s", "200", "--json", str(path)]) == 0
    found: Dict[str, Any] = json.loads(path.read_text())
    return found


def test_ours_and_stock_on_loopback(tmp_path: Path) -> None:
    found = bench(tmp_path, "--systems", "odsgd@1,mxnet/dist_sync@1", "--models", "cnn,0.27M", "--compute",
                  "0.27M=9ms,cnn=0", "--seconds", "0.2")
    rows = {(row["case"]["model"], row["system"]): row for row in found["rows"]}
    assert set(rows) == {(model, system) for model in ("cnn", "0.27M") for system in ("odsgd@1", "mxnet/dist_sync@1")}
    for (model, _), row in rows.items():
        assert row["iteration_ms"] > (9 if model == "0.27M" else 0)  # what the emulated accelerator takes
        assert row["server_cpu_ms"] is not None and row["server_memory_mb"] > 50
    assert all(len(run["times_ms"]) == 2 for run in found["runs"])
    assert all(len(times_ms) >= 8 for run in found["runs"] for times_ms in run["times_ms"])


@pytest.mark.skipif(not CLUSTER, reason="an emulated cluster needs root, iproute2 and util-linux")
def test_no_iteration_beats_the_limit_of_a_slow_link(tmp_path: Path) -> None:
    found = bench(tmp_path, "--systems", "ssgd@1", "--models", "0.27M", "--compute", "0", "--rates", "100mbit",
                  "--seconds", "0.2")
    row, = found["rows"]
    wire_ms = 1000 * 2 * 4 * models.size("0.27M") / 12.5e6  # of two workers' parameters, without a header
    assert row["limit_ms"] > wire_ms and row["iteration_ms"] > 0.95 * wire_ms


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_an_interrupted_benchmark(number: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
         "from odsgd.lab.bench import cli; sys.exit(cli.main(sys.argv[1:]))",
         "--systems", "odsgd@1", "--compute", "50ms", "--seconds", "600"],
        env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: sum(env.get("DMLC_ROLE") == "worker" for env in marked(mark).values()) >= 2, 200)
        process.send_signal(number)
        assert process.wait(300) == 128 + number
        assert not marked(mark)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("wire", ["ps-lite", "sockets"])
def test_a_job_measures_links_and_messages(tmp_path: Path, wire: str) -> None:
    path = tmp_path / "cluster.yaml"
    launch(2, 1, [sys.executable, "-c", QUICK, "--dataset", "digits", "--kvstore", "ssgd", "--emulate-compute", "100ms",
                  "--write", str(path)], extra=["--wire", wire])
    cluster, values = read_cluster(str(path)), yaml.safe_load(path.read_text(encoding="utf-8"))
    assert cluster.workers == 2 and cluster.compute.iteration == pytest.approx(0.1)
    assert 1e7 < cluster.links.goodput < 1e12, "of this machine's loopback"
    assert set(values["links"]) == {"goodput", "latency", "message", "processor"}
    # A line through four times; where a busy machine bends it, it is laid through 0 (`processor.price`).
    assert 0 <= cluster.server.message < 0.1 and 0 <= cluster.worker.message < 0.1
    assert cluster.server.update > 0
