"""Damaged input meets the library as users run it, without the type checks of other tests, which would come first."""

import pytest
from jaxtyping import config


@pytest.fixture(autouse=True, scope="module")
def no_type_checks():
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)
