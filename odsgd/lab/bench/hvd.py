"""One worker of a measured job, on Horovod's MXNet build over gloo: ``hvd.py SPEC.json``.

The loop and the emulated accelerator are those of worker.py; the step is that of Horovod's own trainer, which sums the
gradients of all workers and then updates. Run by path, with the interpreter that has Horovod; it brings its own MXNet
and NumPy, and this file shows it our package.
"""
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Sequence

sys.path[0] = str(Path(__file__).parents[3])

from horovod.runner.common.util.hosts import SlotInfo  # type: ignore[import-not-found]  # noqa: E402
from horovod.runner.http.http_server import RendezvousServer  # type: ignore[import-not-found]  # noqa: E402

from kvstore.engine._mxnet import mx  # noqa: E402
from odsgd.lab.bench import worker  # noqa: E402

LATE_S = 60.0
"""How long workers may take to come."""


class TrainerLoop(worker.Loop):
    """The training loop of one model, by Horovod's trainer."""

    def __init__(self, number: int, shapes: Sequence[Sequence[int]]) -> None:
        import horovod.mxnet as hvd  # type: ignore[import-not-found]  # after `join`
        names = [f"{layer:06}" for layer in range(len(shapes))]  # the trainer takes them by name
        parameters = {name: mx.gluon.Parameter(name, shape=shape, init="ones") for name, shape in zip(names, shapes)}
        for parameter in parameters.values():
            parameter.initialize()
        hvd.broadcast_parameters(parameters, root_rank=0, prefix=f"{number}_")
        self.weights = [parameter.data() for parameter in parameters.values()]
        self.grads = [parameter.grad() for parameter in parameters.values()]
        self.trainer = hvd.DistributedTrainer(parameters, worker.optimizer(), prefix=f"{number}_")

    def step(self) -> None:
        for weight in self.weights:
            weight._fresh_grad = True  # or the trainer takes the gradient for an old one
        self.trainer.step(1)


def join(folder: Path, rank: int, num_workers: int) -> None:
    """Meet the others as workers of `horovodrun --gloo` do, each on a host of its own; worker 0 is the launcher."""
    address = os.environ["DMLC_NODE_HOST"]
    file = folder / "rendezvous"
    if rank == 0:
        server = RendezvousServer()
        port = server.start()
        server.init([SlotInfo(f"host{one}", one, 0, one, num_workers, 1, num_workers) for one in range(num_workers)])
        (folder / "rendezvous.new").write_text(f"{address} {port}", encoding="utf-8")
        (folder / "rendezvous.new").rename(file)
    deadline_s = time.monotonic() + LATE_S
    while not file.exists():
        if time.monotonic() > deadline_s:
            sys.exit(f"hvd.py, worker {rank}: worker 0 has not written {file} within {LATE_S:g} s")
        time.sleep(0.01)
    host, port_text = file.read_text(encoding="utf-8").split()
    settings: Any = {"HOSTNAME": f"host{rank}", "RANK": rank, "SIZE": num_workers, "LOCAL_RANK": 0, "LOCAL_SIZE": 1,
                     "CROSS_RANK": rank, "CROSS_SIZE": num_workers, "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo",
                     "GLOO_RENDEZVOUS_ADDR": host, "GLOO_RENDEZVOUS_PORT": port_text,
                     "GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", ""),
                     "GLOO_TIMEOUT_SECONDS": int(LATE_S)}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in settings.items()})
    import horovod.mxnet as hvd
    hvd.init()


def main(file: str) -> None:
    spec = json.loads(Path(file).read_text(encoding="utf-8"))
    join(Path(spec["folder"]), int(os.environ["ODSGD_WORKER_RANK"]), int(os.environ["DMLC_NUM_WORKER"]))
    worker.measure(spec, TrainerLoop)
    import horovod.mxnet as hvd
    mx.nd.waitall()
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
