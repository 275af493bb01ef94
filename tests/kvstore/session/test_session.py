"""A session by itself, as another front end than Gluon's would use it: flat arrays in, flat arrays out."""
from typing import Any, List

import numpy as np
import pytest

from kvstore import methods
from kvstore.engine._mxnet import mx
from kvstore.messages.buckets import Parameter
from kvstore.messages.seam import Transport
from kvstore.session.session import Session
from kvstore.transports.in_process import Stage

LR, STEPS = 0.25, 4
SHAPES = {"first": (3, 2), "last": (5,)}


def targets(worker_rank: int, size: int) -> np.ndarray:
    return np.arange(size, dtype=np.float32) + worker_rank


def trained(transport: Transport, name: str, **options: Any) -> List[np.ndarray]:
    """The weights, bucket by bucket, after some steps towards the workers' targets."""
    method = methods.find(name)
    session = Session(method, method.Options(bucket_nbytes=16, **options), transport)
    session.use(mx.optimizer.SGD())
    buckets = session.plan([Parameter(key, key, shape) for key, shape in SHAPES.items()])
    assert len(buckets) > 2
    session.begin(lambda bucket: mx.nd.zeros(bucket.size))
    w = {bucket.id: mx.nd.zeros(bucket.size) for bucket in buckets}
    for _ in range(STEPS):
        step = session.next_step(LR, None)
        for bucket in buckets:
            grad = w[bucket.id] - mx.nd.array(targets(transport.worker_rank, bucket.size))
            w[bucket.id] = session.iterate(bucket, grad, step)
    session.wait()
    return [session.global_weights(bucket).asnumpy() for bucket in buckets]


@pytest.mark.parametrize("name, ring", [("ssgd", False), ("dsync", True)])
def test_flat_arrays_go_in_and_the_papers_weights_come_out(name: str, ring: bool) -> None:
    stage = Stage(2)
    for weights in stage.run(lambda transport: trained(transport, name), stage.ring_worker if ring else stage.worker):
        for flat in weights:
            mean = (targets(0, flat.size) + targets(1, flat.size)) / 2
            np.testing.assert_allclose(flat, mean * (1 - (1 - LR) ** STEPS), rtol=1e-6)
