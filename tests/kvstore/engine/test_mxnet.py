"""How MXNet is imported in processes that are ours alone."""
import subprocess
import sys

from tests.jobs import ROOT, environment

LEAN = """
import sys
from kvstore.job import environment
environment.lean = {lean}
from kvstore.engine._mxnet import mx
print(sorted({{"scipy", "pandas", "sklearn"}} & set(sys.modules)))
import scipy.stats, pandas, sklearn.base
print(float(mx.nd.ones(3).sum().asscalar()))
"""


def said(lean: bool) -> "list[str]":
    return subprocess.run([sys.executable, "-c", LEAN.format(lean=lean)], cwd=ROOT, env=environment(), text=True,
                          capture_output=True, timeout=300, check=True).stdout.splitlines()


def test_what_only_extras_of_mxnet_use_is_left_out_and_can_be_imported_later() -> None:
    assert said(lean=True) == ["[]", "3.0"]
    assert said(lean=False) == ["['pandas', 'scipy', 'sklearn']", "3.0"]  # there is something to leave out
