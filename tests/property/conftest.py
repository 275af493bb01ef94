"""How many examples: a few in the suite, more by ``scripts/maintain/fuzz --examples N``, then many from one seed."""
import pytest
from hypothesis import HealthCheck, settings

from tests.property import nasty

FEW, AT_ONCE = 30, 100


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=FEW, help="examples per property")


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported, which take over the settings of that moment."""
    examples = config.getoption("examples", FEW)
    nasty.at_once = AT_ONCE if examples >= AT_ONCE else 1
    settings.register_profile("property", max_examples=examples // nasty.at_once, deadline=None, database=None,
                              print_blob=True, suppress_health_check=list(HealthCheck))
    settings.load_profile("property")
