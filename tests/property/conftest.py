"""How many examples: a few in the suite, more by ``scripts/fuzz --examples N``."""
import pytest
from hypothesis import HealthCheck, settings

FEW = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=FEW, help="examples per property")


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported, which take over the settings of that moment."""
    settings.register_profile("property", max_examples=config.getoption("examples", FEW), deadline=None, database=None,
                              print_blob=True, suppress_health_check=list(HealthCheck))
    settings.load_profile("property")
