"""EASGD and EAMSGD, elastic averaging.

Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, Algorithms 1 and 2, asynchronous.

Every worker explores with weights of its own, x; an elastic force pulls them and a centre X on the server towards each
other every T local steps.

    paper     code    meaning
    x^i       x       one worker's weights
    x~        X       the centre; what is evaluated
    alpha     alpha   strength of the force in one exchange; beta / M
    v, delta  v       momentum of EAMSGD's local steps (Nesterov), and its factor

    e = alpha (x - X),    x <- x - e,    X <- X + e

One round trip is enough and keeps it atomic: the worker sends x, the server answers X' = X + alpha (x - X), and since
x - X' = (1 - alpha)(x - X) the worker finds e = alpha / (1 - alpha) (x - X').

Reading: an exchange follows every Tth local step (the paper's precedes the step; the sequence is the same but for
its first element). Reading: the trainer's learning rate and weight decay are those of the local steps.
"""
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import numpy as np

from kvstore.algorithms.asynchronous import ASGD, Asynchronous, AsyncUpdate
from kvstore.algorithms.program import Options, check_iterations, check_plain_sgd
from kvstore.buckets import Bucket
from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError
from kvstore.wire.interfaces import Pending, Transport


class Elastic(Asynchronous):
    """The worker, for one bucket. With delta = 0 this is EASGD."""

    def __init__(self, bucket: Bucket, transport: Transport, arriving: Pending, options: Any, alpha: float,
                 rates: "Rates") -> None:
        super().__init__(bucket, transport, arriving)
        self.T, self.alpha, self.delta, self.rates = options.T, alpha, options.delta, rates
        self.x = arriving.result().copy()
        self.v = mx.nd.zeros_like(self.x)
        self.ahead = self.x.copy()  # x + delta v, where the next gradient is taken

    def iterate(self, grad: NDArray) -> NDArray:
        """One local step, then, every T of them, the elastic force."""
        self.t += 1
        lr, wd = self.rates.lr * self.bucket.first.lr_mult, self.rates.wd * self.bucket.first.wd_mult
        self.v[:] = self.delta * self.v - lr * (grad + wd * self.ahead)      # v <- delta v - lr g(x + delta v)
        self.x += self.v
        if self.t % self.T == 0:
            self.arriving = self.transport.exchange(self.bucket, self.x)
            centre = self.arriving.result()
            self.x -= self.alpha / (1 - self.alpha) * (self.x - centre)
        self.ahead[:] = self.x + self.delta * self.v
        return self.ahead

    def memory(self) -> List[NDArray]:
        return [self.x, self.v]

    def resume(self, t: int, w_local: NDArray, memory: List[NDArray]) -> None:
        self.t = t
        for saved, mine in zip([w_local, *memory], [self.ahead, self.x, self.v]):
            saved.copyto(mine)


class Rates:
    """Learning rate and weight decay of all buckets' local steps."""

    def __init__(self, wd: float) -> None:
        self.lr, self.wd = 0.0, wd


class Centre(AsyncUpdate):
    """The server: X <- X + alpha (x - X)."""

    def __init__(self, *arguments: Any, alpha: float) -> None:
        super().__init__(*arguments)
        self.alpha = np.float32(alpha)

    def update(self, grad: NDArray, w: NDArray) -> None:
        x, centre = engine.memory(grad), engine.memory(w)
        centre += self.alpha * (x - centre)
        self.version += 1


class EASGD(ASGD):
    """``kvstore.create("easgd")``."""

    rule = Centre

    @dataclass(frozen=True)
    class Options(Options):
        """Options of elastic averaging."""

        T: int = 4
        """Local steps between exchanges."""
        alpha: Optional[float] = None
        """Strength of the force in one exchange; None: beta / number of workers."""
        beta: float = 0.9
        """Strength of the force of all workers together."""

        delta = 0.0

        def __post_init__(self) -> None:
            super().__post_init__()
            check_iterations(self, 1, "T")
            for name in ("alpha", "beta", "delta"):
                if getattr(self, name) is not None and not 0 <= getattr(self, name) < 1:
                    raise ConfigError(f"`{name}` is {getattr(self, name)}, expected 0 or more and below 1")

    def __init__(self, options: Any, optimizer: mx.optimizer.Optimizer) -> None:
        super().__init__(options, optimizer)
        check_plain_sgd(optimizer, "elastic averaging (momentum: store `eamsgd`, option `delta`)")
        self.rates = Rates(optimizer.wd)

    def worker(self, bucket: Bucket, transport: Transport, arriving: Pending) -> Elastic:
        return Elastic(bucket, transport, arriving, self.options, self._alpha(transport.num_workers), self.rates)

    def _alpha(self, num_workers: int) -> float:
        return self.options.beta / num_workers if self.options.alpha is None else self.options.alpha

    def rule_options(self, num_workers: int) -> Dict[str, Any]:
        return {"alpha": self._alpha(num_workers)}

    def begin_iteration(self, lr: float, lr_local: float) -> None:
        self.rates.lr = lr


class EAMSGD(EASGD):
    """``kvstore.create("eamsgd")``."""

    @dataclass(frozen=True)
    class Options(EASGD.Options):
        """Options of elastic averaging with Nesterov's momentum."""

        delta: float = 0.9
        """Momentum of the local steps."""
