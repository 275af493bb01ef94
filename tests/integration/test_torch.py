"""PyTorch scripts as jobs: the one of the documentation, and one whose workers differ."""
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import pytest

pytest.importorskip("torch")  # before what also skips itself without it

# isort: split
from kvstore.transports.in_process import Stage
from tests.contract.test_algorithms import CLOSE
from tests.contract.test_torch import NAMES, by_torch
from tests.jobs import ROOT, environment, load

SCRIPT = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/pytorch.md").read_text(encoding="utf-8"), re.DOTALL)[0]


def launched(folder: Path, code: str, *flags: str, words: Sequence[str] = ()) -> Any:
    return started(folder, code, str(ROOT / "scripts" / "launch.py"), "-n", "2", *flags, "train.py", *words)


def started_by_torchrun(folder: Path, code: str, *words: str) -> Any:
    """It looks every 3 s: a worker's last words come before torchrun ends it, since another has died."""
    return started(folder, code, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--monitor-interval", "3",
                   "train.py", *words)


def started(folder: Path, code: str, *command: str) -> Any:
    (folder / "train.py").write_text(code, encoding="utf-8")
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment(), capture_output=True, text=True,
                          timeout=300)


@pytest.mark.slow
def test_the_script_of_the_documentation_trains_also_with_a_loader_that_forks(tmp_path: Path) -> None:
    import torch
    done = launched(tmp_path, SCRIPT.replace("drop_last=True", "drop_last=True, num_workers=1, "
                                             "persistent_workers=True"), "-s", "1")
    assert done.returncode == 0, done.stderr
    found = re.search(r"worker 0 \| accuracy ([\d.]+) after 560 iterations", done.stdout)
    assert found and float(found.group(1)) > 0.97, done.stdout
    assert "2.weight" not in torch.load(tmp_path / "weights.pt") and "3.weight" in torch.load(tmp_path / "weights.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "sharded"])
def test_under_torchrun_workers_of_its_own_walk_the_path_of_one_process(kind: str, tmp_path: Path) -> None:
    """Nothing of ours is started beside it."""
    code = ("import os, odsgd, numpy as np\nfrom tests.torch_scenarios import run_all\nrank = int(os.environ['RANK'])\n"
            f"np.savez(f'{{rank}}.npz', **run_all(rank, {NAMES[kind]}, '{kind}'))\n")
    done = started_by_torchrun(tmp_path, code)
    assert done.returncode == 0, done.stderr
    for m, expected in enumerate(by_torch("in process 2", kind)):
        found = load(tmp_path / f"{m}.npz")
        for part, array in expected.items():
            np.testing.assert_allclose(found[part], array, err_msg=f"{part}, worker {m}", **CLOSE)


@pytest.mark.slow
def test_an_island_of_fsdp2_is_one_worker_with_the_weights_of_a_run_without_shards(tmp_path: Path) -> None:
    """Two islands of two ranks, each of which exchanges its shard with the same rank of the other island."""
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this PyTorch has no FSDP2")
    from tests import torch_islands
    done = started(tmp_path, "from tests.torch_islands import main\nmain()\n", "-m", "torch.distributed.run",
                   "--nproc-per-node", "4", "train.py")
    assert done.returncode == 0, done.stderr
    ranks = [load(tmp_path / f"{rank}.npz") for rank in range(4)]
    for case in torch_islands.CASES:
        stage = Stage(2)
        islands = stage.run(lambda ring: torch_islands.train(case, torch_islands.model, transport=ring),  # noqa: B023
                            stage.ring_worker)
        for rank, found in enumerate(ranks):
            for part, expected in islands[rank // 2].items():
                np.testing.assert_allclose(found[part], expected, err_msg=f"{part}, rank {rank}", **CLOSE)


@pytest.mark.slow
def test_ranks_of_one_island_as_several_workers_are_refused(tmp_path: Path) -> None:
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this PyTorch has no FSDP2")
    done = started_by_torchrun(tmp_path, "from tests.torch_islands import refused\nrefused()\n")
    assert done.returncode == 0, done.stderr


SAMPLER = """
import torch, torch.distributed
from torch.utils.data import DistributedSampler
import odsgd.torch as od
try:
    DistributedSampler(range(8))
except (RuntimeError, ValueError) as error:
    assert "process group has not been initialized" in str(error), error
else:
    raise AssertionError("a sampler that knows of nobody else")
torch.distributed.init_process_group("gloo")
store = od.create("ssgd")
assert list(DistributedSampler(range(8), shuffle=False)) == list(range(8))[store.rank::store.num_workers]
"""


def test_a_sampler_without_arguments_divides_the_data_or_refuses(tmp_path: Path) -> None:
    done = launched(tmp_path, SAMPLER, "-s", "1")
    assert done.returncode == 0, done.stderr


def test_workers_with_different_models_are_told_what_differs(tmp_path: Path) -> None:
    code = SCRIPT.replace("Linear(64, 128)", "Linear(64, 128, bias=rank == 0)").replace(
        "Norm1d(128)", "Norm1d(128, dtype=[torch.float32, torch.float16][rank])").replace(
        "Linear(128, 10)", "Linear(128, 10 + rank)")
    done = launched(tmp_path, code, "-s", "1")
    assert done.returncode == 70
    assert "workers 0 and 1 differ in the model and its settings; all workers must run the same" in done.stderr
    for line in (r"-0\.bias shape \(128,\) torch\.float32", r"-1\.weight shape \(128,\) torch\.float32",
                 r"\+1\.weight shape \(128,\) torch\.float16", r"-3\.weight shape \(10, 128\)",
                 r"\+3\.weight shape \(11, 128\)"):
        assert re.search(line, done.stderr), line


BEGUN = """
import sys, torch
import odsgd.torch as od
alone = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
torch.distributed.init_process_group("gloo", **(alone if "alone" in sys.argv else {}))
store = od.create("dsync", codec="quantize")
optimizer = od.Optimizer(torch.optim.SGD((model := torch.nn.Linear(8, 4)).parameters(), 0.1), model, store)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize("words, line", [
    ("alone", r"the process group's rank is 0 of 1, .* is worker [01] of 2 of the job; begin the group by .*"),
    ("", "codec `quantize` over torch.distributed, .* make the store before `init_process_group` where mpi4py .*")])
def test_a_group_that_the_script_has_begun_is_the_job_and_sends_plain_floats(words: str, line: str,
                                                                             tmp_path: Path) -> None:
    done = launched(tmp_path, BEGUN, "-s", "0", words=[words])
    assert done.returncode and re.search(f"^worker [01] \\| {line}", done.stderr, re.M), done.stderr


WRONG = """
import os, sys, time, torch
words = sys.argv[1:]
rank = int(os.environ.get("ODSGD_WORKER_RANK", os.environ.get("RANK", 0)))
if "version" in words and rank:
    import kvstore._version
    kvstore._version.VERSION = "0.3.9"
if "unreachable" in words:
    os.environ.update(DMLC_PS_ROOT_URI="host.invalid", DMLC_LOCAL="0")
if "late" in words and rank:
    time.sleep(1000)
import odsgd.torch as od
options = {"timeout_s": 5.0 if "late" in words else 90.0, **dict.fromkeys({"on_non"} & {*words}, "skip")}
store = od.create("dsync" if "TORCHELASTIC_RUN_ID" in os.environ else "ssgd", **options)
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo")  # puts its own hook around ours
od.Optimizer(torch.optim.SGD((model := torch.nn.Linear(8, 4 + rank)).parameters(), 0.1), model, store)
"""


@pytest.mark.slow
@pytest.mark.parametrize("by, words, line", [
    ("torchrun", "version", r"worker [01]: the processes of this job run different versions of odsgd; install the same "
                            r"on all hosts \(train\.py, line 14\)"),
    ("torchrun", "late", "worker 0: not all workers made a store within 5 s; check that all are alive and run the "
                         "same script"),
    ("launch", "model", r"worker [01] \| workers 0 and 1 differ in the model and its settings; all "
                        r"workers must run the same script with the same settings \(train\.py, line 17\)"),
    ("launch", "on_non", r"worker [01] \| unknown option of store ssgd `on_non`; did you mean `on_nan`\? "
                         r"Known: .* \(train\.py, line 14\)"),
    ("torchrun", "on_non", r"worker [01]: unknown option of store dsync `on_non`; .* \(train\.py, line 14\)"),
    ("launch", "unreachable", r"worker [01] \| no connection to the scheduler at host\.invalid:\d+: .*; "
                              r"check that this host can reach it \(.*\) \(train\.py, line 14\)"),
    ("ps-lite", "", r".* \| this job is on ps-lite, and this process has no MXNet, which that is a part "
                    "of; start the job with --wire sockets, or .*"),
    ("python", "", r"kvstore.errors.ConfigError: this store needs a job of several processes and this is one alone "
                   r"\(DMLC_PS_ROOT_URI is not set\); start the script with `odsgd launch .* by torchrun\), or .*")])
def test_what_is_wrong_in_a_job_is_a_line_without_a_traceback_of_ours(by: str, words: str, line: str,
                                                                      tmp_path: Path) -> None:
    if by == "ps-lite" and importlib.util.find_spec("mxnet"):
        pytest.skip("MXNet is here")
    done = started_by_torchrun(tmp_path, WRONG, words) if by == "torchrun" else \
        started(tmp_path, WRONG, "train.py", words) if by == "python" else \
        launched(tmp_path, WRONG, "-s", "1", "--wire", "sockets" if by == "launch" else by, words=[words])
    assert done.returncode and re.search(f"^{line}$", done.stderr, re.MULTILINE), done.stderr
    assert by == "python" or f"{ROOT}/kvstore" not in done.stderr, done.stderr


@pytest.mark.parametrize("its, line", [
    ("__version__ = '2.0.1'\nclass Tensor: pass", "PyTorch 2.1 or newer is not installed; .*; here is 2.0.1"),
    ("__version__ = '2.2.2'\nclass Tensor: register_post_accumulate_grad_hook = None\n"
     "def from_numpy(array): raise RuntimeError('Numpy is not available')",
     r"PyTorch 2.2.2 was not made for NumPy [\d.]+; install PyTorch 2.3 or newer, or take pip install .*")])
def test_a_pytorch_that_is_too_old_is_told_what_to_install(its: str, line: str, tmp_path: Path) -> None:
    """A stand-in: no index has such an old one for this Python."""
    (tmp_path / "torch.py").write_text(its)
    done = started(tmp_path, "import odsgd.torch", "train.py")
    assert done.returncode == 1 and re.search(f"^ImportError: {line}$", done.stderr, re.MULTILINE), done.stderr


TWO_MODELS = """
import os
import signal
import sys
import time

import torch

import tests.lean
import odsgd.torch as od


class Descent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3000,), 4.0))

    def forward(self, target):
        return ((self.w - target) ** 2).sum() / 2


fault, options = sys.argv[1], {"warmup": 0, "lr_local": 0.25, "transport": "".join(sys.argv[2:]) or None}
if fault == "silent":
    options["timeout_s"] = 8.0
models, stores = [Descent(), Descent()], [od.create("odsgd", **options) for _ in range(2)]
optimizers = [od.Optimizer(torch.optim.SGD(model.parameters(), lr), model, store)
              for model, store, lr in zip(models, stores, (0.5, 0.125))]
rank = stores[0].rank
for t in range(1, 7):
    if (t, rank) == (4, 1):
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit":
            sys.exit(3)
        if fault == "silent":
            time.sleep(600)
    for number in (0, 1):
        optimizers[number].zero_grad()
        loss = models[number](2.0 * rank)
        if (t, rank, number, fault) == (4, 1, 1, "nan"):
            loss = loss * float("nan")
        loss.backward()
        optimizers[number].step()
for model, store in zip(models, stores):
    with store.global_weights():
        assert (model.w == model.w[0]).all()
        print("W %.6f" % model.w[0].item())
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torchrun", "torchrun sharded", "launch sharded", "sockets", "ps-lite of mxnet"])
def test_several_models_train_in_one_script_each_by_its_store(how: str, tmp_path: Path) -> None:
    wire, *transport = how.split()
    if wire == "ps-lite":
        pytest.importorskip("kvstore.engine._mxnet")
    done = started_by_torchrun(tmp_path, TWO_MODELS, "none", *transport) if wire == "torchrun" else \
        launched(tmp_path, TWO_MODELS, "-s", "0", words=["none", *transport]) if wire == "launch" else \
        launched(tmp_path, TWO_MODELS, "-s", "2", "--wire", wire, words=["none"])
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for lr in (0.5, 0.125):
        W, w = 4.0, [4.0, 4.0]
        for _ in range(6):
            grads = [w[0], w[1] - 2]
            w = [W - 0.25 * grad for grad in grads]
            W -= lr * sum(grads) / 2
        assert done.stdout.count(f"W {W:.6f}") == 2, done.stdout


ONE_BACKWARD = """
import sys

import torch

import tests.lean
import odsgd.torch as od


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u = (torch.nn.Parameter(torch.zeros(8)) for _ in range(2))

    def forward(self, whole):
        return self.w.sum() + (self.u.sum() if whole else 0)


models = [Two(), Two()]
stores = [od.create(sys.argv[1], "".join(sys.argv[2:]) or None, bucket_nbytes=32) for _ in models]
optimizers = [od.Optimizer(torch.optim.SGD(model.parameters(), 1.0), model, store)
              for model, store in zip(models, stores)]
for t in range(3):
    for optimizer in optimizers:
        optimizer.zero_grad()
    whole = t == 0 or stores[0].rank == 0
    (models[0](whole) + 100 * models[1](True)).backward()  # worker 1 sends `u` of the first when it takes the step
    assert (stores[0].allreduce(torch.full((8,), 1000.0)) == 2000).all()
    for optimizer in optimizers:
        optimizer.step()
x = torch.arange(6.0).view(2, 3).t()
assert (stores[0].allreduce(x.contiguous() if stores[0].rank else x) == 2 * x).all()
for optimizer in optimizers:
    optimizer.synchronize()
print("W " + " ".join(str(one[0].item()) for model in models for one in (model.w, model.u)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torchrun dsync", "torchrun ssgd", "launch dsync", "launch ssgd sharded"])
def test_what_two_stores_send_in_one_backward_does_not_meet(how: str, tmp_path: Path) -> None:
    by, *words = how.split()
    done = started_by_torchrun(tmp_path, ONE_BACKWARD, *words) if by == "torchrun" \
        else launched(tmp_path, ONE_BACKWARD, "-s", "0", words=words)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.count("W -3.0 -2.0 -300.0 -300.0") == 2, done.stdout


ONE_AFTER_ANOTHER = """
import sys
import time

import torch

import tests.lean
import odsgd.torch as od


def trained(timeout_s):
    store, model = od.create("dsync", timeout_s=timeout_s), torch.nn.Linear(4, 2)
    optimizer = od.Optimizer(torch.optim.SGD(model.parameters(), 0.1), model, store)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    return store


first, second = trained(60.0), trained(3.0)
if "unlike" not in sys.argv or first.rank == 0:
    first.close()
third = trained(3.0)
for store in (first, second, third):
    store.close()
if third.rank == 0:
    time.sleep(5)
    print("worker 0 has written its report")
"""


@pytest.mark.slow
def test_a_worker_that_works_on_alone_keeps_no_other_from_its_end(tmp_path: Path) -> None:
    """It does so for longer than its stores wait."""
    done = started_by_torchrun(tmp_path, ONE_AFTER_ANOTHER)
    assert done.returncode == 0 and "worker 0 has written its report" in done.stdout, done.stderr


@pytest.mark.slow
def test_stores_that_one_worker_has_not_closed_are_told_before_sums_could_meet(tmp_path: Path) -> None:
    done = started_by_torchrun(tmp_path, ONE_AFTER_ANOTHER, "unlike")
    assert done.returncode
    assert "the workers have not closed the same stores; close them in the same order" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ring", "sharded"])
def test_under_torchrun_the_last_words_about_a_dead_worker_are_one_line(transport: str, tmp_path: Path) -> None:
    done = started_by_torchrun(tmp_path, TWO_MODELS, "killed", transport)
    assert done.returncode and re.search(r"^worker 0: an exchange of torch\.distributed failed: .*; another worker has "
                                         "died, or taken other steps than this one: see what it ended with$",
                                         done.stderr, re.MULTILINE), done.stderr


@pytest.mark.slow
def test_under_torchrun_an_exit_status_is_kept_and_the_others_end(tmp_path: Path) -> None:
    done = started_by_torchrun(tmp_path, TWO_MODELS, "exit")
    assert re.search(r"^worker 1: ended with exit status 3$", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"exitcode *: 3 ", done.stderr), done.stderr


SPAWNED = """
import tempfile
import torch
import odsgd.torch as od


def train(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    model = torch.nn.Linear(8, 2)
    optimizer = od.Optimizer(torch.optim.SGD(model.parameters(), 0.1), model, od.create("odsgd", timeout_s=60.0))
    for t in range(4):
        if (t, rank) == (2, 1):
            raise ValueError("bad batch")
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (folder,), nprocs=2)
"""


@pytest.mark.slow
def test_an_error_in_a_process_that_pytorch_has_spawned_ends_the_others(tmp_path: Path) -> None:
    """PyTorch makes an exit status of the error."""
    done = started(tmp_path, SPAWNED, "train.py")
    assert done.returncode and "ended with exit status 1, after ValueError: bad batch" in done.stderr, done.stderr
    assert "within 60 s" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault, code, said", [
    ("killed", 137, r"^odsgd launch: worker 1 .*SIGKILL"),
    ("killed sharded", 137, r"^odsgd launch: worker 1 .*SIGKILL"),
    ("nan", 70, r"^worker 1 \| iteration 4: \d+ elements of the gradient of w are infinite or not a number"),
    ("silent", 75, r"^worker 0 \| the wait for the answers of iteration 5 was not over within 8 s: ")])
def test_a_fault_of_a_worker_ends_the_job_with_its_name(fault: str, code: int, said: str, tmp_path: Path) -> None:
    words = fault.split()
    done = launched(tmp_path, TWO_MODELS, "-s", "10"[len(words) - 1], words=words)
    assert done.returncode == code, done.stderr
    assert re.search(said, done.stderr, re.MULTILINE), done.stderr


CHECKPOINTED = """
import sys
import threading
import torch
import torch.distributed.checkpoint as dcp
import tests.lean
import odsgd.torch as od

SEEN = set()


class Watched(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        SEEN.add(threading.current_thread().name)
        return torch.Tensor.__torch_function__.__func__(cls, function, types, args, kwargs or {})


first = "go on" not in sys.argv
torch.distributed.init_process_group("gloo")
store = od.create("odsgd", warmup=1, lr_local=0.02)
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 1))
for layer in model:
    for its, parameter in list(layer.named_parameters(recurse=False)):
        setattr(layer, its, Watched(parameter.detach()))
optimizer = od.Optimizer(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model, store)
if not first:
    dcp.load({"store": store}, checkpoint_id="saved")
    assert store.iteration == 4
while store.iteration < 8:
    random = torch.Generator().manual_seed(10 * store.iteration + store.rank)
    optimizer.zero_grad()
    model(torch.randn(16, 40, generator=random)).square().mean().backward()
    optimizer.step()
    if first and store.iteration == 4:
        saving = dcp.async_save({"store": store}, checkpoint_id="saved")  # while training goes on
if first:
    saving.result()
optimizer.synchronize()
torch.save([one.detach().as_subclass(torch.Tensor) for one in model.parameters()], f"{store.rank}{first}.pt")
assert SEEN == {"MainThread"}, SEEN
looks = threading.Thread(target=model[0].weight.sum, name="another")
looks.start(), looks.join()
assert "another" in SEEN
store.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["launch", "torchrun"])
def test_a_run_goes_on_from_a_distributed_checkpoint_and_no_thread_but_the_scripts_touches_a_parameter(
        how: str, tmp_path: Path) -> None:
    """Saved while training went on, and loaded by new processes: the same bits."""
    import torch
    for words in ([], ["go on"]):
        done = started_by_torchrun(tmp_path, CHECKPOINTED, *words) if how == "torchrun" else \
            launched(tmp_path, CHECKPOINTED, "-s", "1", words=words)
        assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        through, broken = (torch.load(tmp_path / f"{rank}{first}.pt") for first in (True, False))
        assert all(map(torch.equal, through, broken))


SHORT = """
import time
import tests.lean
import odsgd.torch as od

stores = [od.create("dsync", timeout_s=timeout_s) for timeout_s in (2000.0, 3.0)]
stores[1].barrier()
if stores[0].rank == 1:
    time.sleep(1000)
stores[1].barrier()
"""


@pytest.mark.slow
def test_under_torchrun_each_store_waits_as_long_as_it_says(tmp_path: Path) -> None:
    done = started_by_torchrun(tmp_path, SHORT)
    assert done.returncode != 0 and "a sum over the workers was not over within 3 s: " in done.stderr, done.stderr


UNEVEN = """
import torch
import tests.lean
import odsgd.torch as od

store = od.create("ssgd", uneven="join")
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = od.Optimizer(torch.optim.SGD(model.parameters(), 0.125), model, store)
for _ in range([7, 3][store.rank]):
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
print("ends at %.3f" % model.state_dict()["weight"].item())
"""


@pytest.mark.slow
def test_a_worker_that_has_ended_joins_by_itself(tmp_path: Path) -> None:
    """Every gradient is 1, and so is the mean of those that there are."""
    done = launched(tmp_path, UNEVEN, "-s", "1")
    assert done.returncode == 0, done.stderr
    assert "worker 0 | ends at 0.125\n" in done.stdout and "worker 1 | ends at 0.625\n" in done.stdout
    assert "worker 1 ends after iteration 3, and joins until the others have ended" in done.stderr
