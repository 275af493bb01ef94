"""How MXNet is imported in processes that are ours alone."""
import signal
import subprocess
import sys
import time

from tests.jobs import ROOT, environment

BULK = "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD"

LEAN = """
import os
import sys
import time
from kvstore.job import lean
{begin}
{imported}
print(sorted({{"cv2", "scipy", "pandas", "sklearn", "numpy.testing", "setuptools", "urllib3"}} & set(sys.modules)))
import scipy.stats, pandas, sklearn.base
a, b, c = mx.nd.ones((2, 3)), mx.nd.ones((3, 2)), mx.sym.Variable("c")
print(mx.nd.dot(a, b, transpose_b=False).asnumpy().tolist(), mx.nd.dot(b, a).sum().asscalar())
print(mx.sym.dot(c, c, name="twice").eval(c=mx.nd.ones((1, 1)))[0].asscalar(), mx.np.ones(2).sum().item())
print(mx.nd.dot.__name__, mx.nd.dot.__module__, len(dir(mx.nd)), len(dir(mx.sym)), len(dir(mx.np)))
print(os.environ["{bulk}"], mx.test_utils.same(a.asnumpy(), b.asnumpy().T), mx.contrib.text.utils.__name__)
print(mx.nd.dot.__code__.co_varnames[:2])
"""


def said(begin: str, imported: str) -> "list[str]":
    program = LEAN.format(begin=begin, imported=imported, bulk=BULK)
    without = {name: value for name, value in environment().items() if name != BULK}
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=without, text=True, capture_output=True,
                          timeout=300, check=True).stdout.splitlines()


def test_what_only_scripts_ask_of_mxnet_is_left_out_and_operators_are_compiled_when_called_to_the_same() -> None:
    """And either way gradients appear one by one."""
    (extras, *results, variables), (all_extras, *all_results, all_variables) = (
        said("lean.begin()", "import odsgd, mxnet as mx"), said("", "from kvstore.engine._mxnet import mx"))
    needed = "[]" if sys.version_info < (3, 12) else "['setuptools']"  # MXNet imports distutils, which is there now
    assert (extras, all_extras) == (  # there is something to leave out
        needed, "['cv2', 'numpy.testing', 'pandas', 'scipy', 'setuptools', 'sklearn', 'urllib3']")
    assert (variables, all_variables) == ("('arguments', 'options')", "('lhs', 'rhs')")  # and to compile later
    assert results == all_results and results[:2] == ["[[3.0, 3.0], [3.0, 3.0]] 18.0", "[[1.]] 2.0"]


CRASHES = """
import resource
from kvstore.engine._mxnet import mx
a = mx.nd.ones((3000, 3000))
mx.nd.dot(a, a).wait_to_read()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print("waits", flush=True)
while True:
    mx.nd.dot(a, a).wait_to_read()
"""


def test_a_process_that_crashes_while_it_waits_for_the_engine_ends_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", CRASHES], cwd=ROOT, env=environment(), text=True,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGSEGV)
        try:
            assert process.wait(60) == -signal.SIGSEGV
        finally:
            process.kill()
