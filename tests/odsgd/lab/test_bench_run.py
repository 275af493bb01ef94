"""How `odsgd bench` runs its jobs, without a cluster, and what it says of what was measured."""
from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np
import pytest

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError
from odsgd.lab.bench import cli, report, results, run, systems
from odsgd.lab.bench.config import BenchConfig
from odsgd.lab.cluster import Cluster
from tests.jobs import ROOT


def config(*flags: str) -> BenchConfig:
    return BenchConfig.from_flags(flags)


def a_reading(system: str, times_ms: List[float], workers: int = 2, compute_ms: float = 20.0, rate: str = "1gbit",
              server_cpu_ms: Optional[float] = 3.0, compute: str = "20ms") -> run.Reading:
    return run.Reading(run.Setting(rate, "cnn", workers, compute), system, compute_ms, statistics.mean(times_ms),
                       [times_ms], 5.0, 200.0, server_cpu_ms, None if server_cpu_ms is None else 100.0)


# --- how it is run ----------------------------------------------------------------------------------------------------

Jobs = Tuple[List[Tuple[str, int, str]], Set[str]]


@pytest.fixture
def no_jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Every job takes 10 ms an iteration, except those of systems in the second part, the names that fail."""
    asked: List[Tuple[str, int, str]] = []
    fail: Set[str] = set()

    def job(config: BenchConfig, cluster: object, rate: str, goodput: float, workers: int,
            system: systems.System, group: Sequence[str]) -> List[run.Reading]:
        asked.append((rate, workers, system.label if "cnn" in group else f"{system.label}, {', '.join(group)}"))
        if system.label in fail:
            raise run.JobFailed("exit code 1\n    why")
        return [a_reading(system.label, [10.0, 30.0], workers, rate=rate)]

    monkeypatch.setattr(Cluster, "up", lambda hosts, rate: contextlib.nullcontext())
    monkeypatch.setattr(run, "_goodputs", lambda cluster: [1e8])
    monkeypatch.setattr(run, "job", job)
    return asked, fail


def test_repetitions_are_interleaved(no_jobs: Jobs) -> None:
    measured = run.measure(config("--systems", "ssgd,odsgd", "--workers", "2,4", "--repeat", "2", "--rates", "1gbit"),
                           lambda text: None)
    assert measured.goodputs == {"1gbit": [1e8, 1e8]}  # before and after
    once = [("1gbit", 2, "ssgd"), ("1gbit", 2, "odsgd"), ("1gbit", 4, "ssgd"), ("1gbit", 4, "odsgd")]
    assert no_jobs[0] == once + once


def test_a_failed_job_is_told_and_the_others_go_on(
        no_jobs: Jobs, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    no_jobs[1].add("asgd")
    code = cli.main(["--systems", "ssgd,asgd,odsgd", "--repeat", "1", "--rates", "1gbit", "--compute", "20ms",
                     "--markdown", str(tmp_path / "a" / "page.md"), "--json", str(tmp_path / "all.json")])
    said = capsys.readouterr()
    assert code == 70
    assert "asgd, 2 workers, 1gbit, repetition 1: exit code 1\n    why" in said.out
    assert [line.split()[0] for line in said.out.splitlines()[1:4]] == ["system", "ssgd", "odsgd"]
    assert "asgd, 2 workers, 1gbit" in (tmp_path / "a" / "page.md").read_text()
    assert [row["system"] for row in json.loads((tmp_path / "all.json").read_text())["rows"]] == ["ssgd", "odsgd"]


def test_a_job_measures_one_model_alone_where_memory_is_shown(no_jobs: Jobs) -> None:
    flags = ("--systems", "ssgd,odsgd", "--models", "cnn,4.2M", "--repeat", "1")
    run.measure(config(*flags), lambda text: None)
    run.measure(config(*flags, "--columns", "memory"), lambda text: None)
    assert [system for _, _, system in no_jobs[0]] == ["ssgd", "odsgd", "ssgd", "odsgd", "ssgd, 4.2M", "odsgd, 4.2M"]


@pytest.mark.parametrize("name, flag", [("torch/ddp", "--torch-python"), ("horovod/mxnet", "--horovod-python")])
def test_without_its_python_a_system_is_left_out(no_jobs: Jobs, name: str, flag: str) -> None:
    said: List[str] = []
    run.measure(config("--systems", f"{name},ssgd", "--repeat", "1"), said.append)
    assert [system for _, _, system in no_jobs[0]] == ["ssgd"] and f"{name} is left out" in said[0] and flag in said[0]
    with pytest.raises(ConfigError, match=f"{flag} PATH"):
        run.measure(config("--systems", name), said.append)
    run.measure(config("--systems", name, "--repeat", "1", flag, "/its/python"), said.append)
    assert no_jobs[0][-1][-1] == name


def test_workers_of_another_framework_run_with_its_python() -> None:
    horovod = config("--systems", "horovod/mxnet", "--horovod-python", "/its/python", "--torch-python", "/another")
    system, = horovod.systems
    python, file = system.worker_command(horovod.python(system.name))
    assert python == "/its/python" and Path(file).name == "hvd.py" and Path(file).exists()


@pytest.mark.parametrize("text, servers, variables", [
    ("ssgd", "auto", []), ("odsgd@2", "2", []), ("dsync", "0", []), ("mxnet/dist_sync@1", "1", []),
    ("mxnet/p3@1", "1", ["DMLC_PS_VAN_TYPE:p3"])])
def test_a_job_is_launched_as_its_system_asks(text: str, servers: str, variables: List[str]) -> None:
    asked, flags = config("--systems", text), []

    def launch(command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        job = json.loads(Path(command[-1]).read_text())
        flags.extend(job["flags"])
        folder = Path(command[-1]).parent
        for rank in range(2):
            log = [{"at_s": at_s, "cpu_s": 0.0, "memory_mb": 1.0} for at_s in (0.0, 1.0)]
            (folder / f"server-{rank}").write_text("".join(json.dumps(line) + "\n" for line in log))
            worker = {"moments_s": [0.1, 0.6], "usage": log}
            (folder / f"{rank}.json").write_text(json.dumps([worker]))
        return subprocess.CompletedProcess(list(command), 0, "", "")

    cluster: Any = types.SimpleNamespace(run=launch, hostfile="hosts")
    one, = run.job(asked, cluster, "1gbit", 1e8, 2, asked.systems[0], asked.models)
    assert (one.iteration_ms, one.times_ms) == (500.0, [[500.0], [500.0]])
    assert flags[:6] == ["-n", "2", "-s", servers, "-H", "hosts"]
    assert [word for word in flags if word.startswith("DMLC_")] == variables


@pytest.mark.parametrize("name, kind", [("mxnet/dist_sync", "dist_sync"), ("mxnet/dist_async", "dist_async"),
                                            ("mxnet/p3", "dist_sync")])
def test_stock_stores_are_mxnet_s(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    from odsgd.lab.bench import worker
    made = []

    def create(asked: str) -> types.SimpleNamespace:
        made.append(asked)
        return types.SimpleNamespace(set_optimizer=lambda optimizer: None)

    monkeypatch.setattr(mx.kv, "create", create)
    stores = worker._stores({"name": name, "stock": True, "options": {}})
    assert next(stores) is next(stores) and made == [kind]


@pytest.mark.parametrize("compute_ms, dtype", [(0.0, "float32"), (4.0, "float16")])
def test_iterations_of_the_warm_up_do_not_count(compute_ms: float, dtype: str) -> None:
    import kvstore
    from odsgd.lab.bench import worker
    store = kvstore.create("local")
    store.set_optimizer(worker.optimizer())
    loop = worker.Loop(store, [(3, 2), (4,)], 0, dtype)
    found = loop.measure({"compute_ms": compute_ms, "warm_up": 2, "iterations": 3})
    moments_s = found["moments_s"]
    assert {np.dtype(array.dtype).name for array in loop.weights + loop.grads} == {dtype}
    assert len(moments_s) == 3 + 1 and store.iteration == 5
    assert sorted(set(moments_s)) == moments_s and moments_s[-1] - moments_s[0] >= (3 * compute_ms - 1) / 1000


def test_both_accelerators_compute_in_the_same_steps() -> None:
    from odsgd.training.step import emulated
    torchs = (Path(run.__file__).parent / "torch_worker.py").read_text()  # imports torch
    step_s, = re.findall(r"^STEP_S = (.*)$", torchs, re.M)
    assert float(step_s) == emulated.STEP_S


def test_as_many_iterations_as_fill_the_time_asked_for() -> None:
    asked = config("--systems", "ssgd", "--rates", "1gbit", "--compute", "wire/5,0", "--seconds", "2")
    wire_ms = 2 * run.nbytes("cnn") / 1e8 * 1000
    short, exchange = (run.Stint.of(asked, "cnn", compute, 2, 1e8, 1) for compute in asked.compute)
    assert short.compute_ms == pytest.approx(wire_ms / 5)
    assert short.iterations == round(2000 / (1.2 * wire_ms)) and exchange.iterations == round(2000 / wire_ms)
    long = config("--systems", "ssgd", "--compute", "9s")
    assert run.Stint.of(long, "cnn", asked.compute[1], 2, 1e8, 1).iterations >= 8


def test_whole_periods_are_measured_of_what_sends_every_so_many_iterations() -> None:
    asked = config("--systems", "ssgd,sasgd:T=10,diloco,diloco:H=20,downpour:push_every=4:fetch_every=6", "--compute",
                   "400ms")
    stints: Dict[str, Dict[str, Any]] = {}

    def launch(command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        job = json.loads(Path(command[-1]).read_text())
        stints[system.label] = job["models"][0]["stints"][0]
        return subprocess.CompletedProcess(list(command), 1, "", "")

    cluster: Any = types.SimpleNamespace(run=launch, hostfile="hosts")
    for system in asked.systems:
        with pytest.raises(run.JobFailed):
            run.job(asked, cluster, "1gbit", 1e8, 2, system, ["cnn"])
    assert {label: (stint["warm_up"], stint["iterations"]) for label, stint in stints.items()} == {
        "ssgd": (3, 9), "sasgd:T=10": (10, 10), "diloco": (100, 100), "diloco:H=20": (20, 20),
        "downpour:push_every=4:fetch_every=6": (12, 12)}


def test_a_multiple_of_the_wires_is_that_of_a_fast_link() -> None:
    asked = config("--systems", "ssgd", "--rates", "10gbit", "--compute", "2wire")
    assert run.Stint.of(asked, "4.2M", asked.compute[0], 2, 1.2e9, 1).compute_ms == pytest.approx(
        2 * 2000 * 4 * 4_208_650 / 1.2e9)


def a_worker(moments_s: List[float], cpu_s_per_s: float) -> Dict[str, Any]:
    return {"moments_s": moments_s, "usage": [
        {"at_s": at_s, "cpu_s": 7 + cpu_s_per_s * at_s, "memory_mb": 10.0 + at_s} for at_s in (0.0, 10.0)]}


def test_what_counts_is_the_time_in_which_all_workers_are_measured() -> None:
    log = [{"at_s": at_s, "cpu_s": at_s ** 2, "memory_mb": 100 + at_s} for at_s in map(float, range(10))]
    late = a_worker([2.0, 2.1, 2.2, 2.3, 4.0, 4.1], 1.0)  # four iterations, and one that it has to itself
    early = a_worker([1.0, 2.0, 3.0, 4.0], 0.5)           # one per second, two while both are measured
    iteration_ms, times_ms, worker_cpu_ms, worker_mb, server_cpu_ms, server_mb = run._merged([late, early], [log])
    assert iteration_ms == 666.667                        # 2 s for three on average
    assert times_ms == [pytest.approx([100, 100, 100, 1700, 100]), [1000] * 3]
    assert (worker_cpu_ms, worker_mb) == (500, 14)        # 2 s and 1 s
    assert (server_cpu_ms, server_mb) == (4000, 104)      # from 4 to 16


def test_workers_that_are_not_measured_at_once_are_a_failed_job() -> None:
    with pytest.raises(run.JobFailed, match="raise `seconds`"):
        run._merged([a_worker([1.0, 2.0], 1), a_worker([3.0, 4.0], 1)], [])


# --- what is said -----------------------------------------------------------------------------------------------------

@pytest.fixture
def measured() -> run.Measured:
    """Two systems, three jobs each; B = 1e8 bytes per second, so the wires need 20.2 ms with servers beside workers."""
    readings = [a_reading("ssgd", [base, base + 20], server_cpu_ms=3.0) for base in (30.0, 90.0, 40.0)]
    readings += [a_reading("odsgd@1", [50.0, 50.0]) for _ in range(3)]
    return run.Measured(readings, {"1gbit": [0.9e8, 1e8, 1.1e8]}, [])


ASKED = ("--systems", "odsgd@1,ssgd", "--compute", "20ms", "--rates", "1gbit", "--repeat", "3")


def test_a_finding_is_the_median_of_the_jobs_means(measured: run.Measured) -> None:
    odsgd, ssgd = results.findings(config(*ASKED, "--baseline", "ssgd"), measured)
    assert (ssgd.iteration_ms, min(ssgd.iterations_ms), max(ssgd.iterations_ms)) == (50.0, 40.0, 100.0)
    assert ssgd.limit_ms == pytest.approx(20.20232)    # 2 (M-1)/M N / B, above T_cop
    assert odsgd.limit_ms == pytest.approx(40.40464)   # M N / B
    assert odsgd.share == pytest.approx(40.40464 / 50)
    assert (ssgd.speedup, odsgd.speedup) == (1.0, 1.0)


def test_the_table_has_the_columns_asked_for(measured: run.Measured) -> None:
    asked = config(*ASKED, "--batch-size", "10", "--columns", "cpu,memory,size", "--baseline", "ssgd")
    lines = report.table(asked, results.findings(asked, measured), measured).splitlines()
    assert lines[0] == ("cnn (0.51 M parameters in 10 tensors), 2 workers, T_cop 20.0 ms, links of 1gbit "
                        "(B = 800 Mbit/s)")
    assert lines[2].split() == ["odsgd@1", "50.0", "50.0", "–", "50.0", "40.4", "0.81", "400.0", "+0", "%", "99.00",
                                "5.0", "3.0", "200", "100", "103.8", "51.9"]
    assert lines[3].split()[:5] == ["ssgd", "50.0", "40.0", "–", "100"]


def test_what_was_not_measured_is_a_dash() -> None:
    asked = config("--systems", "dsync", "--columns", "cpu,memory")
    reading = a_reading("dsync", [5.0], compute_ms=0.0, rate="none", server_cpu_ms=None, compute="0")
    loopback = run.Measured([reading], {"none": [math.inf]}, [])
    line = report.table(asked, results.findings(asked, loopback), loopback).splitlines()[-1]
    assert line.split() == ["dsync", "5.0", "5.0", "–", "5.0", "–", "–", "5.0", "–", "200", "–", "103.8", "–"]


def test_the_page_has_the_numbers_the_reference_and_the_configuration(measured: run.Measured) -> None:
    asked = config(*ASKED)
    object.__setattr__(asked, "reference", "the paper")
    object.__setattr__(asked, "reference_values", {"1gbit/2/cnn/ssgd": 47.5})
    page = report.markdown(asked, results.findings(asked, measured), measured, {"machine": "2 cores"},
                           ["odsgd", "bench", "--title", "two words"])
    assert "| ssgd | 50.0 | 40.0 – 100 | 20.2 | 0.40 | 47.5 |" in page
    assert "| odsgd@1 | 50.0 | 50.0 – 50.0 | 40.4 | 0.81 | – |" in page
    assert "| machine | 2 cores |" in page and "| repeat | 3 |" in page and "--title 'two words'" in page
    assert "| systems | odsgd@1, ssgd |" in page


def test_a_process_knows_what_it_used() -> None:
    from odsgd.lab.bench import usage
    before = usage.now()
    sum(range(3_000_000))
    after = usage.now()
    assert after["cpu_s"] >= before["cpu_s"] and after["memory_mb"] > 1
    assert after["cpu_s"] <= sum(os.times()[:2]) + 0.05


def test_the_memory_of_a_process_is_not_its_parents() -> None:
    child = "from usage import now; print(now()['memory_mb'])"
    parent = ("import subprocess, sys; largest = b'1' * 200_000_000\n"
              f"subprocess.run([sys.executable, '-c', {child!r}], check=True)")
    told = subprocess.run([sys.executable, "-c", parent], cwd=ROOT / "odsgd/lab/bench", capture_output=True, text=True,
                          timeout=60)
    assert 1 < float(told.stdout) < 100, told


def test_the_report_of_a_process_without_mxnet_names_the_version_that_its_workers_had() -> None:
    code = ("import sys; from odsgd.lab.bench import report; from odsgd.lab.bench.config import BenchConfig; "
            "assert 'mxnet' not in sys.modules; "
            "print(report.machine(BenchConfig.from_flags(['--systems', 'ssgd@1']), (0, 0))['versions'])")
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert f", MXNet {mx.__version__}, " in told.stdout, told.stderr
