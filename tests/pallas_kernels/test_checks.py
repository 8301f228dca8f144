"""Argument checks: each message names the argument, what was given and what is allowed."""

import jax
import numpy as np
import pytest

from tca_jax.pallas_kernels.checks import check_blocks, check_range, check_shapes, check_whole_blocks


def test_sizes_are_bound_in_order():
    sizes = check_shapes({"q": (np.zeros((2, 5, 4, 8)), "B L Hq d"), "lengths": ([5, 3], "B")})
    assert sizes == {"B": 2, "L": 5, "Hq": 4, "d": 8}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 5, 2), r"k has shape \(2, 5, 2\): must be \[B = 2, L = 5, Hkv, d = 8\]"),
        ((2, 5, 2, 4), r"k has shape \(2, 5, 2, 4\): must be"),
        ((2, 5, 3, 8), "4 query heads and 3 KV heads"),
        ((2, 5, 0, 8), "4 query heads and 0 KV heads"),
    ],
)
def test_misfit_is_named(shape, message):
    q = (np.zeros((2, 5, 4, 8)), "B L Hq d")
    with pytest.raises(ValueError, match=message):
        check_shapes({"q": q, "k": (np.zeros(shape), "B L Hkv d")})


def test_blocks_and_windows():
    check_blocks(8, window=16)
    with pytest.raises(ValueError, match="block_size = 0: must be at least 1"):
        check_blocks(0)
    for window in (0, 12):
        with pytest.raises(ValueError, match=f"window = {window}: must be a positive multiple of block_size = 8"):
            check_blocks(8, window=window)
    with pytest.raises(ValueError, match=r"budgets has 3 blocks: must be L // block_size = 17 // 8 = 2"):
        check_whole_blocks("budgets", {"L": 17, "nb": 3}, 8)


def test_range_is_checked_where_values_are_known():
    check_range("lengths", np.array([1, 5]), 1, 5)
    check_range("lengths", np.array([], np.int32), 1, 5)
    with pytest.raises(ValueError, match=r"lengths = \[0, 5\]: must lie in \[1, 5\]"):
        check_range("lengths", np.array([0, 5]), 1, 5)

    @jax.jit
    def traced(values):
        check_range("lengths", values, 1, 5)
        return values

    traced(np.array([7]))
