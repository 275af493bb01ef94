"""The scenarios of `tests.scenarios` through the front end for PyTorch: the same losses, batches and orders."""
import traceback
from typing import Any, Dict, List

import numpy as np
import torch

from kvstore.fronts.torch.optimizer import Optimizer
from kvstore.fronts.torch.store import create
from tests.scenarios import SCENARIOS_OF, SHAPES, Scenario, initial, target, turns


class Quadratic(torch.nn.Module):
    """1/2 sum c (w - a)^2 over all parameters."""

    def __init__(self) -> None:
        super().__init__()
        values = np.split(initial(), np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])[:-1])
        for (name, shape), value in zip(SHAPES.items(), values):
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value).reshape(shape)))

    def forward(self, c: Any, a: Any) -> Any:
        w = torch.cat([parameter.reshape(-1) for parameter in self.parameters()])
        return (c * (w - a) ** 2).sum() / 2

    def flat(self) -> np.ndarray:
        return np.concatenate([parameter.detach().reshape(-1).numpy() for parameter in self.parameters()])


def train(scenario: Scenario, worker_rank: int, transport: Any = None) -> Dict[str, np.ndarray]:
    """As `scenarios.train`, for scenarios of SGD."""
    options = dict(scenario.options)
    asked = options.pop("transport", None)
    store = create(str(scenario.store), transport or asked, **options)
    model = Quadratic()
    params = scenario.optimizer_params
    mults = [scenario.multipliers.get(name, (1.0, 1.0)) for name in SHAPES]
    groups = [{"params": [parameter], "lr": params["learning_rate"] * lr, "weight_decay": params.get("wd", 0.0) * wd}
              for parameter, (lr, wd) in zip(model.parameters(), mults)]
    sgd = torch.optim.SGD(groups, lr=params["learning_rate"], momentum=params.get("momentum", 0.0))
    optimizer = Optimizer(sgd, model, store)
    if scenario.order:  # the first step of any worker needs all of them
        (store.begin if store.takes_weights else optimizer._begin)()
    path = [model.flat()]
    for t in turns(scenario, worker_rank, store, lambda turn: None):
        for group, (lr, _) in zip(optimizer.param_groups, mults):
            group["lr"] = scenario.lr_at.get(str(t), group["lr"] / lr) * lr
        store.lr_local = scenario.lr_local_at.get(str(t), store.lr_local)
        optimizer.zero_grad()
        model(*map(torch.tensor, target(worker_rank, t))).backward()
        optimizer.step()
        optimizer.synchronize()
        path.append(model.flat())
    with store.global_weights():
        final = model.flat()
    np.testing.assert_array_equal(model.flat(), path[-1])  # its own are back
    store.close()
    return {"path": np.array(path), "final": final}


def run_all(worker_rank: int, names: List[str], kind: str) -> Dict[str, np.ndarray]:
    """As `scenarios.run_all`."""
    results: Dict[str, np.ndarray] = {}
    for name in names:
        try:
            for part, array in train(SCENARIOS_OF[kind][name], worker_rank).items():
                results[f"{name}/{part}"] = array
        except Exception:
            traceback.print_exc()
            results[f"{name}/error"] = np.array(traceback.format_exc())
    return results


def run_by_gloo(worker_rank: int, names: List[str], kind: str) -> Dict[str, np.ndarray]:
    """The same on a process group that the script has begun, whatever else is installed."""
    torch.distributed.init_process_group("gloo")
    return run_all(worker_rank, names, kind)
