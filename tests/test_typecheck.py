"""The checker that the tests run under: what is defined inside of a function is checked by every definition."""

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, TypeCheckError, jaxtyped
from typecheck import check


def adder(number, wrong=False):
    @jaxtyped(typechecker=check)
    def add(x: Float[Array, "B L"], y: Float[Array, " L"], times: int = number) -> Float[Array, "B L"]:
        return None if wrong else x + times * y

    return add


def test_inner_functions_are_checked_by_every_definition():
    for number in (1, 2):
        add = adder(number)
        x, y = jnp.ones((2, 3)), jnp.ones(3)
        assert (add(x, y) == 1 + number).all()  # its own default, not that of the one before
        with pytest.raises(TypeCheckError, match="parameters"):
            add(x, jnp.ones(4))
        with pytest.raises(TypeCheckError, match="parameters"):
            add(x, y, times="1")
        with pytest.raises(TypeCheckError, match="return value"):
            adder(number, wrong=True)(x, y)
