"""Python functions as operations of MXNet's engine."""
import os
import subprocess
import sys
import threading
import time
from typing import Callable, List

import numpy as np
import pytest

from kvstore.engine import engine
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import EXIT_FAILURE


def later(function: Callable[[], None]) -> Callable[[engine.Done], None]:
    """An operation's start: `function` runs after a while on a thread of its own."""
    def start(done: engine.Done) -> None:
        def run() -> None:
            time.sleep(0.2)
            function()
            done()
        threading.Thread(target=run).start()
    return start


def set_to(array: NDArray, value: float) -> Callable[[], None]:
    def function() -> None:
        engine.view(array)[:] = value
    return function


def test_operations_run_in_the_order_that_their_arrays_ask_for() -> None:
    first, second = mx.nd.ones(10), mx.nd.zeros(10)

    def double() -> None:
        engine.view(second)[:] = engine.view(first) * 2

    engine.push_async(later(set_to(first, 3)), [], [first])
    engine.push(double, [first], [second])  # reads what comes later
    engine.push(set_to(first, 5), [], [first])  # waits for the reader
    np.testing.assert_array_equal(second.asnumpy(), 6)
    np.testing.assert_array_equal(first.asnumpy(), 5)


def test_the_caller_does_not_wait() -> None:
    array = mx.nd.zeros(10)
    go = threading.Event()
    went: List[bool] = []

    def hold() -> None:
        went.append(go.wait(300))

    engine.push(hold, [], [array])
    other = mx.nd.ones(10) + 1  # and other operations go on
    other.wait_to_read()
    assert not went
    go.set()
    array.wait_to_read()
    assert went == [True]


def test_an_array_that_was_never_written_can_be_viewed() -> None:
    array = mx.nd.empty(10)
    engine.push(set_to(array, 4), [], [array])
    np.testing.assert_array_equal(array.asnumpy(), 4)


def test_a_view_is_the_memory_itself() -> None:
    array = mx.nd.zeros(10)
    engine.memory(array)[3] = 7
    assert array.asnumpy().tolist() == [0, 0, 0, 7, 0, 0, 0, 0, 0, 0]


def test_of_arrays_that_are_others_every_time_few_are_kept_alive() -> None:
    """As those of a method that returns a new array in each iteration."""
    views, arrays = engine.CachedById(8), [mx.nd.full(5, number) for number in range(100)]
    mx.nd.waitall()  # a view does not wait for what is written
    for number, array in enumerate(arrays):
        assert views.of(array, engine.view).tolist() == [number] * 5
        assert len(views._kept) <= 8
    assert views.of(arrays[-1], engine.view) is views.of(arrays[-1], engine.view) and views.get(arrays[0]) is None


def test_an_array_that_nobody_else_has_goes_with_the_next_new_one() -> None:
    """As those of a method that makes an array for each exchange, beside those that come again."""
    again, views = [mx.nd.zeros(5) for _ in range(3)], engine.CachedById(8)
    kept = [views.of(array, engine.view) for array in again]
    for _ in range(100):
        views.of(mx.nd.zeros(5), engine.view)
        assert len(views._kept) <= len(again) + 1
    assert all(views.of(array, engine.view) is view for array, view in zip(again, kept))


@pytest.mark.parametrize("start_child", ["fork", "subprocess"])
def test_a_child_starts_while_an_operation_is_under_way(start_child: str) -> None:
    """MXNet waits for it inside the fork, with Python's lock held, unless somebody has waited before."""
    array = mx.nd.zeros(10)
    engine.push_async(later(set_to(array, 1)), [], [array])
    if start_child == "subprocess":
        assert subprocess.run([sys.executable, "-c", ""], timeout=300).returncode == 0
    else:
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitpid(child, 0)[1] >> 8 == 7
    np.testing.assert_array_equal(array.asnumpy(), 1)


@pytest.mark.parametrize("push", ["push(lambda: 1 / 0, [], [array])", "push_async(lambda done: 1 / 0, [], [array])"])
def test_an_error_ends_the_process_and_is_told(push: str) -> None:
    script = ("from kvstore.engine import engine, _mxnet\n"
              f"array = _mxnet.mx.nd.zeros(1)\nengine.{push}\narray.wait_to_read()")
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == EXIT_FAILURE and "ZeroDivisionError" in done.stderr


def test_the_end_of_a_process_waits_for_operations() -> None:
    script = """if True:
        import queue, threading, time
        from kvstore.engine import _mxnet
        from kvstore.engine import engine
        array, under_way = _mxnet.mx.nd.zeros(1), queue.Queue()
        def end():
            done = under_way.get()
            time.sleep(0.3)
            print("over", flush=True)
            done()
        threading.Thread(target=end, daemon=True).start()  # now: Python 3.12 starts no thread while it ends
        engine.push_async(under_way.put, [], [array])
    """
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "over\n")


@pytest.mark.parametrize("hybridize", [False, True])
def test_the_gradient_of_the_last_layer_does_not_wait_for_the_first_layers(hybridize: bool) -> None:
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(4), mx.gluon.nn.Dense(3))
    net.initialize()
    net.hybridize(hybridize)
    x = mx.nd.ones((2, 5))
    net(x).wait_to_read()
    goes_on, appeared = threading.Event(), threading.Event()

    def hold() -> None:
        goes_on.wait(300)

    with mx.autograd.record():
        loss = net(x).sum()
    loss.wait_to_read()
    engine.push(hold, [], [x])  # the first layer's gradient is computed from it
    loss.backward()
    engine.push(appeared.set, [net[1].weight.grad()], [])
    try:
        assert appeared.wait(300)
    finally:
        goes_on.set()
        mx.nd.waitall()
