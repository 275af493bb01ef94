"""Methods that a test adds are gone after it."""
from typing import Iterator

import pytest

from tests import methods


@pytest.fixture
def own_methods() -> Iterator[None]:
    """Methods may be added."""
    with methods.as_they_were():
        yield
