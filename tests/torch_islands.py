"""Islands of FSDP2 as workers: what each rank of a 2 x 2 mesh trains, and two workers without shards beside it."""
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import odsgd.torch as od
from kvstore.errors import ConfigError
from tests.jobs import Result

CASES: Dict[str, Dict[str, Any]] = {
    "dsync": {}, "odsgd": {"lr_local": 0.02, "warmup": 1}, "diloco": {"H": 2, "lr_outer": 0.5}, "dsync, clipped": {},
    "diloco, skips": {"H": 2, "lr_outer": 0.5, "on_nan": "skip"}}


def model() -> Any:
    """Its shards are uneven, and the last one's empty."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def batch(island: int, t: int) -> Any:
    random = torch.Generator().manual_seed(10 * t + island)
    return torch.randn(8, 6, generator=random), torch.randn(8, 1, generator=random)


def whole(net: Any) -> np.ndarray:
    return np.concatenate([(one.full_tensor() if hasattr(one, "full_tensor") else one).detach().reshape(-1).numpy()
                           for one in net.parameters()])


def begin(case: str, make: Callable[[], Any], **where: Any) -> Any:
    net, store = make(), od.create(case.split(",")[0], **where, **CASES[case])
    kind: Callable[..., Any] = torch.optim.AdamW if store.takes_weights else torch.optim.SGD
    return net, store, od.Optimizer(kind(net.parameters(), lr=0.05), net, store)


def train(case: str, make: Callable[[], Any], part: slice = slice(None), saved: str = "", **where: Any) -> Result:
    """This worker's weights after each step, and the global ones after the last; `part`: of the island's batch. On the
    way the run is `saved`, and another one goes on.
    """
    net, store, optimizer = begin(case, make, **where)
    path: List[np.ndarray] = []
    for t in range(6):
        x, y = (one[part] for one in batch(store.rank, t))
        optimizer.zero_grad()
        if case.endswith("clipped"):
            with optimizer.no_sync():
                ((net(x) - y) ** 2).mean().backward()
            optimizer.synchronize_grads()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        else:
            ((net(x) - y) ** 2).mean().backward()
        if case.endswith("skips") and (store.rank, t) == (1, 1) and not part.start:  # on one rank of the island
            grad = net[0].weight.grad
            (grad.to_local() if hasattr(grad, "to_local") else grad)[0, 0] = float("nan")
        optimizer.step()
        optimizer.synchronize()
        path.append(whole(net))
        if t == 2:
            with store.global_weights(), torch.no_grad():
                net(x)  # FSDP's root keeps what it has gathered here
        if t == 3 and saved:
            dcp.save({"store": store}, checkpoint_id=saved)
            net, store, optimizer = begin(case, make, **where)
            dcp.load({"store": store}, checkpoint_id=saved)
    with store.global_weights():
        final = whole(net)
    return {f"{case}/path": np.array(path), f"{case}/final": final}


def main() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    shard = mesh.get_local_rank("shard")
    found: Result = {}

    def make() -> Any:
        net = model()
        for module in (net[0], net):
            fully_shard(module, mesh=mesh["shard"])
        return net

    for case in CASES:
        found.update(train(case, make, slice(4 * shard, 4 * shard + 4), case, group=mesh["island"].get_group()))
    np.savez(f"{torch.distributed.get_rank()}.npz", **found)
    torch.distributed.destroy_process_group()


def refused() -> None:
    """Two ranks: the workers are those of one island, by a group left out or the wrong one; and FSDP reduces gradients
    between islands, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    island, islands = (init_device_mesh("cpu", shape, mesh_dim_names=("island", "shard")) for shape in ((1, 2), (2, 1)))
    for mesh, group in ((island["shard"], None), (island["shard"], island["shard"].get_group()),
                        (islands, islands["island"].get_group())):
        with pytest.raises(ConfigError, match=r'0.weight is on the mesh of ranks \[0, 1\].* group=mesh\["island"\]'):
            begin("dsync", lambda: fully_shard(torch.nn.Sequential(torch.nn.Linear(2, 2)), mesh=mesh),  # noqa: B023
                  group=group)
    begin("dsync", lambda: fully_shard(model(), mesh=island["shard"]), group=island["island"].get_group())
    with pytest.raises(ConfigError, match="`group` and transport server, which has no process group"):
        od.create("odsgd", transport="server", group=island["island"].get_group())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
