"""A worker that sends by MPI, without MXNet: it joins as ours do, sums its rank over the workers, acts and leaves.

Its deed is its first argument, or MEMBER_WORKER_<RANK> in the environment:

    ok | late (waits before it asks for the others) | spawn (asks for something that the launcher does not serve)
    stop (stops before it asks for the others) | sums (sums for ever) | stall (likewise; rank 1 stops after a while)
    parts (a store whose workers own parts trains for ever) | stall parts (likewise; rank 1 stops after a while)
"""
import itertools
import os
import signal
import sys
import time

from kvstore.transports import mpi

RANK = int(os.environ["ODSGD_WORKER_RANK"])
ACTION = os.environ.get(f"MEMBER_WORKER_{RANK}", [*sys.argv, "ok"][1])
TIMEOUT_S = float(os.environ.get("MEMBER_TIMEOUT_S", 60))
ROUND_TIMEOUT_S = float(os.environ.get("MEMBER_ROUND_TIMEOUT_S", 60))


def sum_for_ever(world: mpi.World) -> None:
    import numpy

    from kvstore.transports.rounds import Rounds
    rounds = Rounds(world.comm, world.mpi, ROUND_TIMEOUT_S)
    for number in itertools.count():
        rounds.total(numpy.ones(1000, numpy.float32))
        if ACTION == "stall" and number == 100 and RANK == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def train_for_ever() -> None:
    import kvstore
    from kvstore.engine._mxnet import mx
    kvstore.create("ssgd", transport="sharded", timeout_s=TIMEOUT_S).barrier()  # a job takes its time to come up
    store = kvstore.create("ssgd", transport="sharded", timeout_s=ROUND_TIMEOUT_S)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1e-3, momentum=0.9))
    weight, grad = mx.nd.ones(300_000), mx.nd.ones(300_000)
    store.broadcast(0, weight, weight)
    for number in itertools.count():
        store.pushpull(0, grad, weight)
        weight.wait_to_read()
        if number == 20:
            print("training")
        if ACTION == "stall parts" and number == 20 and RANK == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    if ACTION.endswith("parts"):
        train_for_ever()
    if ACTION == "late":
        print("late")
        time.sleep(600)
    if ACTION == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    world = mpi.World(TIMEOUT_S)
    total = world.comm.allreduce(RANK + 1)
    print(f"rank {world.worker_rank} of {world.num_workers}, sum {total}, "
          f"by {os.environ.get('UCX_NET_DEVICES')}")
    if ACTION == "spawn":
        world.mpi.COMM_SELF.Spawn(sys.executable)
    if ACTION in ("sums", "stall"):
        sum_for_ever(world)
    world.comm.Barrier()
    world.close()


if __name__ == "__main__":
    main()
