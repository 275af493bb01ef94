"""The engine without MXNet: order, errors, the end."""
import os
import random
import subprocess
import sys
import threading
from typing import Any, Callable, List

import numpy as np
import pytest

from kvstore.engine import engine
from kvstore.engine.on_numpy import AT_ONCE, Array
from kvstore.errors import EXIT_FAILURE
from tests.jobs import ROOT, environment

SIZES = (1, 7, AT_ONCE + 1, 50_000)


def held(writes: List[Array]) -> "tuple[threading.Event, Callable[[], None]]":
    """An operation that is under way, and what ends it."""
    began, asked = threading.Event(), []  # type: threading.Event, List[Callable[[], None]]

    def start(done: Callable[[], None]) -> None:
        asked.append(done)
        began.set()

    engine.push_async(start, [], writes)
    return began, lambda: (began.wait(300), asked[0]())[1]


@pytest.mark.parametrize("seed", range(5))
def test_any_program_comes_to_what_one_thread_makes_of_it(seed: int) -> None:
    draw = random.Random(seed)
    size = SIZES[seed % len(SIZES)]
    ours = [engine.array(np.arange(size) % 5 + number) for number in range(4)]
    numpys = [one.asnumpy() for one in ours]
    for _ in range(300):
        i, j = draw.sample(range(4), 2)
        kind = draw.randrange(6)
        if kind == 0:
            ours[i] += ours[j] * 0.5
            numpys[i] += numpys[j] * 0.5
        elif kind == 1:
            ours[i][:] = 1 - ours[j] / 3.0
            numpys[i][:] = 1 - numpys[j] / np.float32(3)
        elif kind == 2:
            ours[i][size // 2:].copyto(ours[j][size // 2:])
            numpys[j][size // 2:] = numpys[i][size // 2:]
        elif kind == 3:
            ours[i], numpys[i] = ours[j].copy(), numpys[j].copy()
        else:
            def double(read: Array = ours[i], written: Array = ours[j]) -> None:
                engine.view(written)[:] = engine.view(read) * np.float32(0.25) - engine.view(written)
            engine.push(double, [ours[i]], [ours[j]])
            numpys[j][:] = numpys[i] * np.float32(0.25) - numpys[j]
    for one, other in zip(ours, numpys):
        np.testing.assert_array_equal(one.asnumpy(), other)


def test_an_operation_waits_for_what_it_reads_and_for_who_reads_what_it_writes() -> None:
    first, second = engine.zeros(3), engine.zeros(3)
    began, end = held([first])
    second += first  # reads what is on its way
    first[:] = 5     # and this waits for the reader
    other = engine.zeros(3) + 1
    assert other.asnumpy().tolist() == [1, 1, 1]  # what has nothing to do with it goes on
    threading.Timer(0.1, end).start()
    assert second.asnumpy().tolist() == [0, 0, 0] and first.asnumpy().tolist() == [5, 5, 5]
    engine.wait_to_write(first)
    assert began.is_set()


@pytest.mark.parametrize("push", [engine.push, engine.push_async])
def test_an_error_comes_to_whoever_waits_for_what_it_should_have_made(push: Any) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of this operation")

    first, ran = engine.zeros(3), []  # type: Array, List[int]
    push(fail, [], [first])
    second = first * 2
    engine.push(lambda: ran.append(1), [second], [])
    for wait in (second.wait_to_read, first.asnumpy, lambda: engine.wait_to_write(first)):
        with pytest.raises(ZeroDivisionError, match="of this operation"):
            wait()
    engine.wait_all()  # it has been told
    assert not ran and (engine.zeros(2) + 1).asnumpy().tolist() == [1, 1]


@pytest.mark.parametrize("status", [0, EXIT_FAILURE])
@pytest.mark.parametrize("more", ["", "import kvstore.session.session\n"])  # whose own end waits for operations, too
def test_the_end_of_a_process_waits_and_tells_an_error_that_nobody_has_waited_for(more: str, status: int) -> None:
    script = (more + "import time\nfrom kvstore.engine import engine\none, two = engine.zeros(1), engine.zeros(1)\n"
              "engine.push(lambda: (time.sleep(0.2), print('over', flush=True)), [], [one])\n"
              + ("engine.push(lambda: 1 / 0, [one], [two])\n" if status else ""))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=ROOT,
                          env=environment())
    assert (done.returncode, done.stdout) == (status, "over\n") and ("ZeroDivisionError" in done.stderr) == bool(status)


def test_a_child_has_an_engine_of_its_own() -> None:
    array = engine.zeros(10)
    _, end = held([array])
    child = os.fork()
    if child == 0:
        os._exit(int((engine.zeros(2) + 3).asnumpy()[1]))
    end()
    assert os.waitpid(child, 0)[1] >> 8 == 3 and array.asnumpy().tolist() == [0] * 10


def test_an_array_differs_from_every_other_and_not_from_itself() -> None:
    array = engine.zeros(2)
    assert (array != array) is False and (array != engine.zeros(2)) is True


def test_a_view_is_the_memory_itself() -> None:
    array = engine.zeros(10)
    engine.memory(array)[3] = 7
    engine.view(array)[5] = 8
    assert array.asnumpy().tolist() == [0, 0, 0, 7, 0, 8, 0, 0, 0, 0]
