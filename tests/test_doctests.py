"""The examples in docstrings (`>>>`), of every module that has some and of no other."""
import doctest
import importlib
import re

import pytest

from tests.jobs import ROOT

MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for package in ("kvstore", "odsgd")
                 for path in (ROOT / package).rglob("*.py") if re.search("^ *>>> ", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_come_out_as_written(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted and not done.failed, done
