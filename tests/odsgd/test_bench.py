"""odsgd bench without a job: what is asked for, what limits an iteration, and what is said of what was measured."""
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import types
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from odsgd.lab.bench import cli, limits, models, report, results, run, systems
from odsgd.lab.bench.config import BenchConfig

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("bench_*.yaml"))
N = 4e6  # bytes


def config(*flags):
    return BenchConfig.from_flags(flags)


def a_run(system, times_ms, workers=2, compute_ms=20.0, rate="1gbit", server_cpu_ms=3.0):
    return run.Run(rate, "cnn", "20ms", compute_ms, workers, system, statistics.mean(times_ms), [times_ms], 5.0, 200.0,
                   server_cpu_ms, None if server_cpu_ms is None else 100.0)


# --- what is asked for ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("text", "name", "options", "servers", "of_four", "extra"), [
    ("ssgd", "ssgd", {}, "auto", 4, 0),
    ("ssgd@2", "ssgd", {}, "2", 2, 2),
    ("odsgd@1", "odsgd", {"warmup": 0}, "1", 1, 1),
    ("odsgd:warmup=5:optimizer_local=none", "odsgd", {"warmup": 5, "optimizer_local": "none"}, "auto", 4, 0),
    ("odsgd:transport=ring", "odsgd", {"warmup": 0, "transport": "ring"}, None, 0, 0),
    ("odsgd:transport=server@1", "odsgd", {"warmup": 0, "transport": "server"}, "1", 1, 1),
    ("pipesgd:codec=quantize", "pipesgd", {"warmup": 0, "codec": "quantize"}, None, 0, 0),
    ("sasgd:gamma_p=0.1", "sasgd", {"gamma_p": 0.1}, None, 0, 0),
    ("mxnet/p3@1", "mxnet/p3", {}, "1", 1, 1),
    ("torch/ddp:bucket_cap_mb=4", "torch/ddp", {"bucket_cap_mb": 4}, None, 0, 0),
])
def test_a_system_is_a_name_with_options_and_servers(text, name, options, servers, of_four, extra):
    system = systems.parse(text)
    assert (system.name, system.servers, system.options) == (name, servers, options)
    assert (system.num_servers(4), system.extra_hosts()) == (of_four, extra)


@pytest.mark.parametrize(("text", "complaint"), [
    ("odsdg", "unknown system `odsdg`; did you mean `odsgd`?"),
    ("local", "unknown system `local`"),
    ("dsync@1", "it has no servers"),
    ("torch/ddp@auto", "it has no servers"),
    ("odsgd:transport=ring@2", "it has no servers"),
    ("ssgd@0", "expected a number of servers or `auto`"),
    ("ssgd@", "expected a number of servers or `auto`"),
    ("pipesgd:quantize", "expected OPTION=VALUE, got `quantize`"),
    ("torch/ddp:bucket_cap=4", "unknown option of torch/ddp `bucket_cap`; did you mean `bucket_cap_mb`?"),
    ("odsgd:lr_locl=1", "unknown option of odsgd `lr_locl`; did you mean `lr_local`?"),
])
def test_a_system_that_does_not_exist_is_told(text, complaint):
    with pytest.raises(ConfigError) as error:
        systems.parse(text)
    assert complaint in str(error.value)


@pytest.mark.parametrize(("text", "ms"), [("272ms", 272), ("0.5s", 500), ("0", 0), ("wire", 100), ("2wire", 200),
                                          ("wire/5", 20), ("0.5wire", 50), ("cnn=3ms", 3)])
def test_a_computing_time_is_a_duration_or_a_multiple_of_the_wires(text, ms):
    compute, = config("--systems", "ssgd", "--rates", "1gbit", "--compute", text).compute
    assert compute.milliseconds(wire_ms=100) == pytest.approx(ms)
    again, = config("--systems", "ssgd", "--rates", "1gbit", "--compute", str(compute)).compute
    assert again == compute


@pytest.mark.parametrize(("flags", "complaint"), [
    ([], "no systems"),
    (["--systems", "ssgd", "--models", "cnnn"], "unknown model `cnnn`"),
    (["--systems", "ssgd", "--compute", "5"], "expected times as 272ms"),
    (["--systems", "ssgd", "--compute", "wire/0"], "expected times as 272ms"),
    (["--systems", "ssgd", "--compute", "wire"], "loopback has no T_wire"),
    (["--systems", "ssgd", "--compute", "4.2M=3ms"], "the models are cnn"),
    (["--systems", "ssgd", "--models", "cnn,4.2M", "--compute", "4.2M=3ms"], "no time for model cnn"),
    (["--systems", "ssgd", "--baseline", "odsgd"], "baseline `odsgd` is not among the systems: ssgd"),
    (["--systems", "ssgd", "--rates", "fast"], "fast"),
    (["--systems", "ssgd", "--columns", "cpus"], "expected columns: cpu"),
    (["--systems", "ssgd", "--wokers", "2"], "did you mean `--workers`?"),
])
def test_a_benchmark_that_cannot_be_run_is_told_before_anything_starts(flags, complaint):
    with pytest.raises(ConfigError) as error:
        config(*flags)
    assert complaint in str(error.value)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_can_be_run_and_says_how(path):
    preset = config("--config", str(path))
    assert f"odsgd bench --config configs/{path.name}" in path.read_text()
    known = {"/".join((rate, str(workers), model, system.label)) for rate in preset.rates for workers in preset.workers
             for model in preset.models for system in preset.systems}
    assert set(preset.reference_values) <= known


def test_flags_win_over_the_file():
    assert config("--config", str(PRESETS[0]), "--repeat", "1").repeat == 1


def test_the_models_have_the_sizes_that_they_are_named_for():
    assert {name: (len(models.shapes(name)), run.nbytes(name) // 4) for name in models.PLAIN} == {
        "4.2M": (10, 4_208_650), "cnn": (10, 505_058), "0.27M": (97, 271_098)}


def test_a_network_of_odsgd_train_has_the_shapes_of_its_parameters():
    assert models.shapes("mlp")[0][1:] == (3 * 32 * 32,) and models.shapes("mlp")[-1] == (10,)
    assert run.nbytes("resnet18_v2") == 4 * 11_179_978  # the OD-SGD paper's


# --- limits -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("system", "workers", "nbytes"), [
    ("ssgd@1", 4, 4 * N),
    ("ssgd@2", 4, 2 * N),
    ("ssgd@4", 2, N),                  # a worker's own link
    ("mxnet/dist_sync@1", 2, 2 * N),
    ("ssgd", 4, 1.5 * N),              # 3/4 N to the others' servers, and as much from the own one
    ("torch/ddp", 4, 1.5 * N),
    ("pipesgd", 2, N),
    ("pipesgd", 1, 0),
    ("pipesgd:codec=truncate", 2, N / 2),
    ("pipesgd:codec=quantize", 2, N / 4 + 4),  # and a scale
    ("easgd@1", 4, N),                 # exchanges every fourth iteration
    ("easgd:T=8@1", 4, N / 2),
    ("downpour:T=2@1", 4, 2 * N),
    ("downpour:push_every=4:fetch_every=1@1", 4, 4 * N),
    ("downpour:push_every=1:fetch_every=2", 4, 0.75 * 1.5 * N),
    ("sasgd:T=2", 4, 0.75 * N),
])
def test_the_busiest_link_carries(system, workers, nbytes):
    assert limits.wire_nbytes(systems.parse(system), workers, N) == nbytes


def test_the_limit_is_the_longer_of_computing_and_communicating():
    assert limits.bound_ms(30.0, N, 1e8) == 40.0
    assert limits.bound_ms(50.0, N, 1e8) == 50.0
    assert limits.bound_ms(30.0, N, math.inf) == 30.0


# --- how it is run ----------------------------------------------------------------------------------------------------

@pytest.fixture()
def no_jobs(monkeypatch):
    """Every job takes 10 ms an iteration, except those of systems in `fail`."""
    asked, fail = [], set()

    def job(config, links, rate, goodput, workers, system):
        asked.append((rate, workers, system.label))
        if system.label in fail:
            raise run.JobFailed("exit code 1\n    why")
        return [a_run(system.label, [10.0, 30.0], workers, rate=rate)]

    monkeypatch.setattr(run, "_links", lambda rate, hosts: contextlib.nullcontext(run.Links(None, (), lambda: [1e8])))
    monkeypatch.setattr(run, "_job", job)
    asked_and_fail = asked, fail
    return asked_and_fail


def test_repetitions_are_interleaved(no_jobs):
    measured = run.measure(config("--systems", "ssgd,odsgd", "--workers", "2,4", "--repeat", "2", "--rates", "1gbit"),
                           lambda text: None)
    assert measured.goodput == {"1gbit": [1e8, 1e8]}  # before and after
    once = [("1gbit", 2, "ssgd"), ("1gbit", 2, "odsgd"), ("1gbit", 4, "ssgd"), ("1gbit", 4, "odsgd")]
    assert no_jobs[0] == once + once


def test_a_failed_job_is_told_and_the_others_go_on(no_jobs, capsys, tmp_path):
    no_jobs[1].add("asgd")
    code = cli.main(["--systems", "ssgd,asgd,odsgd", "--repeat", "1", "--rates", "1gbit", "--compute", "20ms",
                     "--markdown", str(tmp_path / "a" / "page.md"), "--json", str(tmp_path / "all.json")])
    said = capsys.readouterr()
    assert code == 70
    assert "asgd, 2 workers, 1gbit, repetition 1: exit code 1\n    why" in said.out
    assert [line.split()[0] for line in said.out.splitlines()[1:4]] == ["system", "ssgd", "odsgd"]
    assert "asgd, 2 workers, 1gbit" in (tmp_path / "a" / "page.md").read_text()
    assert [row["system"] for row in json.loads((tmp_path / "all.json").read_text())["rows"]] == ["ssgd", "odsgd"]


def test_without_torch_its_systems_are_left_out(no_jobs):
    said = []
    run.measure(config("--systems", "torch/ddp,ssgd", "--repeat", "1"), said.append)
    assert [system for _, _, system in no_jobs[0]] == ["ssgd"] and "torch/ddp is left out" in said[0]
    with pytest.raises(ConfigError, match="--torch-python PATH"):
        run.measure(config("--systems", "torch/ddp"), said.append)


@pytest.mark.parametrize(("text", "servers", "variables"), [
    ("ssgd", "auto", []), ("odsgd@2", "2", []), ("dsync", "0", []), ("mxnet/dist_sync@1", "1", []),
    ("mxnet/p3@1", "1", ["DMLC_PS_VAN_TYPE:p3"])])
def test_a_job_is_launched_as_its_system_asks(text, servers, variables):
    asked, flags = config("--systems", text), []

    def launch(command, timeout_s):
        job = json.loads(Path(command[-1]).read_text())
        flags.extend(job["flags"])
        folder = Path(command[-1]).parent
        for rank in range(2):
            log = [{"at_s": at_s, "cpu_s": 0.0, "memory_mb": 1.0} for at_s in (0.0, 1.0)]
            (folder / f"server-{rank}").write_text("".join(json.dumps(line) + "\n" for line in log))
            worker = {"moments_s": [0.1, 0.6], "usage": log}
            (folder / f"{rank}.json").write_text(json.dumps([worker]))
        return subprocess.CompletedProcess(command, 0, "", "")

    one, = run._job(asked, run.Links(launch, ("-H", "hosts"), None), "1gbit", 1e8, 2, asked.systems[0])
    assert (one.iteration_ms, one.times_ms) == (500.0, [[500.0], [500.0]])
    assert flags[:6] == ["-n", "2", "-s", servers, "-H", "hosts"]
    assert [word for word in flags if word.startswith("DMLC_")] == variables


@pytest.mark.parametrize(("name", "kind"), [("mxnet/dist_sync", "dist_sync"), ("mxnet/dist_async", "dist_async"),
                                            ("mxnet/p3", "dist_sync")])
def test_stock_stores_are_mxnet_s(monkeypatch, name, kind):
    from odsgd.lab.bench import worker
    made = []

    def create(asked):
        made.append(asked)
        return types.SimpleNamespace(set_optimizer=lambda optimizer: None)

    monkeypatch.setattr(worker.mx.kv, "create", create)
    stores = worker._stores({"name": name, "stock": True, "options": {}})
    assert next(stores) is next(stores) and made == [kind]


@pytest.mark.parametrize("compute_s", [0.0, 0.004])
def test_iterations_of_the_warm_up_do_not_count(compute_s):
    import kvstore
    from odsgd.lab.bench import worker
    store = kvstore.create("local")
    store.set_optimizer(worker._optimizer())
    found = worker.Training(store, [(3, 2), (4,)], 0).measure({"compute_s": compute_s, "warm_up": 2, "iterations": 3})
    moments_s = found["moments_s"]
    assert len(moments_s) == 3 + 1 and store.iteration == 5
    assert sorted(set(moments_s)) == moments_s and moments_s[-1] - moments_s[0] >= 3 * compute_s - 0.001


def test_both_accelerators_compute_in_the_same_steps():
    from odsgd.training import emulate
    torchs = (Path(run.__file__).parent / "ddp.py").read_text()  # imports torch
    assert float(re.search(r"^STEP_S = (.*)$", torchs, re.M)[1]) == emulate.STEP_S


def test_as_many_iterations_as_fill_the_time_asked_for():
    asked = config("--systems", "ssgd", "--rates", "1gbit", "--compute", "wire/5,0", "--seconds", "2")
    wire_ms = 2 * run.nbytes("cnn") / 1e8 * 1000
    short, exchange = (run.Case.of(asked, "cnn", compute, 2, 1e8) for compute in asked.compute)
    assert short.compute_ms == pytest.approx(wire_ms / 5)
    assert short.iterations == round(2000 / (1.2 * wire_ms)) and exchange.iterations == round(2000 / wire_ms)
    assert run.Case.of(config("--systems", "ssgd", "--compute", "9s"), "cnn", asked.compute[1], 2, 1e8).iterations >= 8


def a_worker(moments_s, cpu_s_per_s):
    return {"moments_s": moments_s, "usage": [
        {"at_s": at_s, "cpu_s": 7 + cpu_s_per_s * at_s, "memory_mb": 10.0 + at_s} for at_s in (0.0, 10.0)]}


def test_what_counts_is_the_time_in_which_all_workers_are_measured():
    log = [{"at_s": at_s, "cpu_s": at_s ** 2, "memory_mb": 100 + at_s} for at_s in range(10)]
    late = a_worker([2.0, 2.1, 2.2, 2.3, 4.0, 4.1], 1.0)  # four iterations, and one that it has to itself
    early = a_worker([1.0, 2.0, 3.0, 4.0], 0.5)           # one per second, two while both are measured
    iteration_ms, times_ms, worker_cpu_ms, worker_mb, server_cpu_ms, server_mb = run._merged([late, early], [log])
    assert iteration_ms == 666.667                        # 2 s for three on average
    assert times_ms == [pytest.approx([100, 100, 100, 1700, 100]), [1000] * 3]
    assert (worker_cpu_ms, worker_mb) == (500, 14)        # 2 s and 1 s
    assert (server_cpu_ms, server_mb) == (4000, 104)      # from 4 to 16


def test_workers_that_are_not_measured_at_once_are_a_failed_job():
    with pytest.raises(run.JobFailed, match="raise `seconds`"):
        run._merged([a_worker([1.0, 2.0], 1), a_worker([3.0, 4.0], 1)], [])


# --- what is said -----------------------------------------------------------------------------------------------------

@pytest.fixture()
def measured():
    """Two systems, three jobs each; B = 1e8 bytes per second, so the wires need 20.2 ms with servers beside workers."""
    runs = [a_run("ssgd", [base, base + 20], server_cpu_ms=3.0) for base in (30.0, 90.0, 40.0)]
    runs += [a_run("odsgd@1", [50.0, 50.0]) for _ in range(3)]
    return run.Measured(runs, {"1gbit": [0.9e8, 1e8, 1.1e8]}, [])


ASKED = ("--systems", "odsgd@1,ssgd", "--compute", "20ms", "--rates", "1gbit", "--repeat", "3")


def test_a_row_is_the_median_of_the_jobs_means(measured):
    odsgd, ssgd = results.rows(config(*ASKED, "--baseline", "ssgd"), measured)
    assert (ssgd.iteration_ms, min(ssgd.iterations_ms), max(ssgd.iterations_ms)) == (50.0, 40.0, 100.0)
    assert ssgd.limit_ms == pytest.approx(20.20232)    # 2 (M-1)/M N / B, above T_cop
    assert odsgd.limit_ms == pytest.approx(40.40464)   # M N / B
    assert odsgd.share == pytest.approx(40.40464 / 50)
    assert (ssgd.speedup, odsgd.speedup) == (1.0, 1.0)


def test_the_table_has_the_columns_asked_for(measured):
    asked = config(*ASKED, "--batch-size", "10", "--columns", "cpu,memory,size", "--baseline", "ssgd")
    lines = report.table(asked, results.rows(asked, measured), measured).splitlines()
    assert lines[0] == ("cnn (0.51 M parameters in 10 tensors), 2 workers, T_cop 20.0 ms, links of 1gbit "
                        "(B = 800 Mbit/s)")
    assert lines[2].split() == ["odsgd@1", "50.0", "50.0", "–", "50.0", "40.4", "0.81", "200.0", "+0", "%", "99.00",
                                "5.0", "3.0", "200", "100"]
    assert lines[3].split()[:5] == ["ssgd", "50.0", "40.0", "–", "100"]


def test_what_was_not_measured_is_a_dash(measured):
    asked = config("--systems", "dsync", "--columns", "cpu,memory")
    runs = [a_run("dsync", [5.0], compute_ms=0.0, rate="none", server_cpu_ms=None)._replace(compute="0")]
    loopback = run.Measured(runs, {"none": [math.inf]}, [])
    line = report.table(asked, results.rows(asked, loopback), loopback).splitlines()[-1]
    assert line.split() == ["dsync", "5.0", "5.0", "–", "5.0", "–", "–", "5.0", "–", "200", "–"]


def test_the_page_has_the_numbers_the_reference_and_the_configuration(measured):
    asked = config(*ASKED)
    object.__setattr__(asked, "reference", "the paper")
    object.__setattr__(asked, "reference_values", {"1gbit/2/cnn/ssgd": 47.5})
    page = report.markdown(asked, results.rows(asked, measured), measured, {"machine": "2 cores"},
                           ["odsgd", "bench", "--title", "two words"])
    assert "| ssgd | 50.0 | 40.0 – 100 | 20.2 | 0.40 | 47.5 |" in page
    assert "| odsgd@1 | 50.0 | 50.0 – 50.0 | 40.4 | 0.81 | – |" in page
    assert "| machine | 2 cores |" in page and "| repeat | 3 |" in page and "--title 'two words'" in page
    assert "| systems | odsgd@1, ssgd |" in page


def test_the_picture_has_a_bar_for_every_row(measured, tmp_path):
    pytest.importorskip("matplotlib")
    from odsgd.lab.bench import figure
    figure.draw(results.rows(config(*ASKED), measured), "title", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_process_knows_what_it_used():
    from odsgd.lab.bench import usage
    before = usage.now()
    sum(range(3_000_000))
    after = usage.now()
    assert after["cpu_s"] >= before["cpu_s"] and after["memory_mb"] > 1
    assert after["cpu_s"] <= sum(os.times()[:2]) + 0.05
