"""odsgd profile in a job: it measures links and servers, too, and what it writes is a cluster to train on."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from odsgd.config.files import read_cluster
from tests.jobs import launch
from tests.odsgd.lab.test_profile import QUICK


def test_a_job_measures_links_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    launch(2, 1, [sys.executable, "-c", QUICK, "--dataset", "digits", "--kvstore", "ssgd", "--emulate-compute", "100ms",
                  "--write", str(path)])
    cluster, values = read_cluster(str(path)), yaml.safe_load(path.read_text(encoding="utf-8"))
    assert cluster.workers == 2 and cluster.compute.iteration == pytest.approx(0.1)
    assert 1e7 < cluster.links.goodput < 1e12, "of this machine's loopback"
    assert set(values["links"]) == {"goodput", "latency", "message", "processor"}
    # A line through four times; where a busy machine bends it, it is laid through 0 (`processor.price`).
    assert 0 <= cluster.server.message < 0.1 and 0 <= cluster.worker.message < 0.1
    assert cluster.server.message + cluster.server.receive > 0
