"""A session's sums over the workers."""
from typing import Any, Callable

import numpy as np
import pytest

from kvstore import methods
from kvstore.engine import engine
from kvstore.errors import ConfigError
from kvstore.messages.buckets import Parameter
from kvstore.methods import fit
from kvstore.optimizers import formulas
from kvstore.session.session import Session
from kvstore.transports.in_process import Stage
from kvstore.transports.sockets import SocketsJoined


class Losing(SocketsJoined):
    """The place of one of two workers that bring the same; the other is lost after one piece of a sum."""

    def __init__(self) -> None:
        self.timeout_s, self.num_workers, self._present = 60.0, 2, 2

    def _ask_sum(self, part: np.ndarray) -> Callable[[], np.ndarray]:
        total, self._present = part * self._present, 1
        return lambda: total


def test_a_mean_is_one_of_those_who_were_there_at_each_piece() -> None:
    session: Any = Session.__new__(Session)
    session.transport = Losing()
    array = np.arange(2 * Losing.piece_floats + 5, dtype=np.float32).reshape(1, -1)
    np.testing.assert_array_equal(session.mean(array), array)


def begun(name: str, optimizer: Any, **options: Any) -> Session:
    """A session of one worker, with a weight that begins as 1."""
    method = methods.find(name)
    session = Session(method, fit.options_of(method, options), Stage(1).worker(0))
    session.use(optimizer)
    session.plan([Parameter("w", "w", (1,))])
    session.begin(lambda _: engine.array(np.ones(1, np.float32), None))
    return session


def test_after_a_step_that_was_left_out_a_gradient_is_compensated_by_what_it_was_taken_at() -> None:
    """g = w - 3; the second is none. W: the global weights; w: the worker's, of Eq. 4."""
    session = begun("odsgd", formulas.SGD(learning_rate=0.5), warmup=0, optimizer_local="dcasgd_c", lamda=1.0,
                    lr_local=0.25, on_nan="skip")
    [bucket], W, w = session.buckets, 1.0, 1.0
    for t in range(6):
        g = np.nan if t == 1 else w - 3
        room = session.room(bucket)
        engine.view(room)[:] = g
        found = session.iterate(bucket, room, session.next_step(0.5, 0.25)).asnumpy()
        before, W = W, W if t == 1 else W - 0.5 * g
        w = before if t == 1 else before - 0.25 * (g + g * g * (before - w))
        np.testing.assert_allclose(found, w, rtol=1e-6)


def test_an_optimizer_that_compensates_a_delay_takes_no_steps_between_exchanges_of_weights() -> None:
    with pytest.raises(ConfigError, match="`diloco` moves weights between two steps, and `dcasgd_c` takes that"):
        begun("diloco", formulas.DCASGD_C(learning_rate=0.25), H=2)
