"""What operations refuse before compilation, by name, and what backends decline, so that "auto" moves on."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import unchecked
from implementations import implementation
from operations import call

from tca_jax.pallas_kernels.checks import as_int32, check_blocks, check_heads, check_range

FLOAT8 = jnp.float8_e4m3fn
SMALL = {"L": 20, "Hq": 2, "Hkv": 1, "d": 16, "block_size": 16, "window": 32}
LISTED = {"L": 512, "Hq": 4}
PAGED = {"B": 4, "b": 16, "T": 6, "kept_columns": 3, "P": 40, "window": 32}
REFUSED = [
    ("block_mass", {"shapes": {"k": (1, 20, 1, 8)}}, r"k has shape \(1, 20, 1, 8\): must be \[B = 1, L = 20, Hkv, d ="),
    ("block_mass", {"shapes": {"k": (1, 20, 1)}}, r"k has shape \(1, 20, 1\): must be"),
    ("block_mass", {"shapes": {"lengths": (2,)}}, r"lengths has shape \(2,\)"),
    ("block_mass", {"Hq": 3, "Hkv": 2}, "3 query heads and 2 KV heads: the former must be a positive multiple"),
    ("block_mass", {"Hkv": 0}, "2 query heads and 0 KV heads"),
    ("block_mass", {"block_size": 0, "stride": 8}, "block_size = 0: must be at least 1"),
    *(("block_mass", {"stride": n}, f"stride = {n}: must divide block_size = 16") for n in (0, 3, 32)),
    ("block_mass", {"stride": 8, "backend": "cudnn"}, "backend = 'cudnn'"),
    ("observation_scores", {"o": 0}, r"q_last has shape \(1, 0, 2, 16\): must hold at least one query"),
    ("observation_scores", {"spread": 0}, "spread = 0: must be at least 1"),
    *(("observation_scores", {"decay": n}, rf"decay = {n}: must lie in \(0, 1\]") for n in (0.0, 1.1)),
    ("reserve_tokens", {"shapes": {"ranked_tokens": (2,)}}, r"ranked_tokens has shape \(2,\): must be \[B = 1\]"),
    ("reserve_tokens", {"reserve": -1}, "reserve = -1: must be at least 0"),
    ("select_tokens", {"nb": 3}, r"budgets has 3 blocks: must be L // block_size = 20 // 16 = 1"),
    ("token_scores", {"block_size": 0}, "block_size = 0"),
    *(
        ("prefill_attention", {"window": n}, f"window = {n}: must be a positive multiple of block_size = 16")
        for n in (0, 24)
    ),
    ("prefill_attention", {"nb": 2}, r"budgets has 2 blocks: must be L // block_size = 20 // 16 = 1"),
    ("prefill_attention", {"shapes": {"pool.v": (9, 16)}}, r"pool\.v has shape \(9, 16\): must be \[P = 4096, d = 16"),
    ("paged_attention", {**PAGED, "window": 24}, "window = 24: must be a positive multiple of the page size, 16"),
    ("paged_attention", {**PAGED, "m": 17}, "q has 17 queries per row: must be at most the page size, 16"),
    ("paged_attention", {**PAGED, "Hq": 3, "Hkv": 2}, "3 query heads and 2 KV heads"),
    ("paged_attention", {**PAGED, "R": 3}, r"caches\[0\] has 3 rows: must divide the 4 rows of queries"),
    ("paged_attention", {**PAGED, "shapes": {"caches.v": (9, 16, 16)}}, r"caches\[0\].v has shape .*: must be \[P ="),
    (
        "block_sparse_attention",
        {**LISTED, "tile_size": 24},
        "tile_size = 24: must be a positive multiple",
    ),
    ("block_sparse_attention", {**LISTED, "tile_size": 32, "N": 32}, r"has 32 tiles: must be ceil\(L / tile_size\) ="),
    ("block_sparse_attention", {**LISTED, "shapes": {"blocks.distances": (1, 4, 3, 4)}}, "has 3 tiles: must be 32, or"),
    ("block_sparse_attention", {**LISTED, "C": 0}, "must have room for one block and one"),
    ("block_sparse_attention", {**LISTED, "shapes": {"blocks.counts": (1, 2, 32)}}, r"must be \[B = 1, Hq = 4, N\]"),
    (
        "block_sparse_attention",
        {**LISTED, "columns": True, "shapes": {"blocks.distances": (1, 4, 32, 4)}},
        "columns beside blocks.distances of 32 tiles",
    ),
    ("block_sparse_attention", {**LISTED, "columns": True, "V": 0}, "one column at least"),
]
TILES = "must be a power of two from 16 to 256"
DECLINED = [
    *(
        (operation, "triton", {"d": 80}, f"head dimension 80: {TILES}")
        for operation in ("block_mass", "block_sparse_attention", "observation_scores", "prefill_attention")
    ),
    *((name, "triton", {"d": 80}, f"head dimension 80: {TILES}") for name in ("token_scores", "paged_attention")),
    ("prefill_attention", "triton", {"dtype": FLOAT8}, "must be one of bfloat16, float16 and float32"),
    ("block_mass", "triton", {"dtype": {"q": jnp.float32}}, r"types \['bfloat16', 'float32'\]"),
    ("select_tokens", "triton", {"dtype": {"k": jnp.float16, "v": jnp.float32}}, r"types \['float16', 'float32'\]"),
    *(
        (operation, "triton", {"block_size": 8}, "block_size = 8: must be a multiple of 16")
        for operation in ("block_mass", "block_sparse_attention", "prefill_attention")
    ),
    ("block_mass", "triton", {"stride": 1}, "128 queries of a tile times 4 heads: at most 256"),
    ("select_tokens", "triton", {"block_size": 512}, "block_size = 512: must be a power of two, at most"),
    ("token_scores", "triton", {"block_size": 6}, "block_size = 6: must be a power of two"),
    ("paged_attention", "triton", {"b": 8}, "pages of 8: must be a power of two from 16"),
    ("prefill_attention", "mosaic", {"dtype": jnp.float32}, "takes bfloat16 and float16, not float32"),
    ("prefill_attention", "mosaic", {"d": 256}, "not d = 256 and block_size = 128"),
    ("prefill_attention", "mosaic", {"block_size": 64}, "a multiple of 128, not d = 128 and block_size = 64"),
    ("block_sparse_attention", "mosaic", {"dtype": jnp.float32, "aligned": True}, "takes bfloat16 and float16, not fl"),
    ("block_sparse_attention", "mosaic", {"d": 256, "aligned": True}, "not d = 256 and block_size = 128"),
    ("block_sparse_attention", "mosaic", {}, "takes aligned blocks, and no columns"),
    ("block_sparse_attention", "mosaic", {"aligned": True, "columns": True}, "takes aligned blocks, and no columns"),
]


@pytest.mark.parametrize(("operation", "change", "message"), REFUSED)
def test_misfit_is_refused_by_name(operation, change, message):
    public = getattr(importlib.import_module(f"tca_jax.pallas_kernels.{operation}"), operation)
    change, sizes = dict(change), {**SMALL, "stride": 8}
    options = {name: change.pop(name) for name in ("decay", "backend") if name in change}
    function, arguments = call(operation, **(sizes | change), function=unchecked(public))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: function(**x, **options), arguments)


@pytest.mark.parametrize(("operation", "backend", "change", "message"), DECLINED)
def test_backend_declines(operation, backend, change, message):
    function, arguments = call(operation, **change, function=_function(operation, backend))
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda x: function(**x), arguments)


def _function(operation, backend):
    return unchecked(implementation(operation, backend, interpret=False))


def test_range_is_checked_where_values_are_known():
    check_range("lengths", np.array([1, 5]), 1, 5)
    check_range("lengths", np.array([], np.int32), 1, 5)
    with pytest.raises(ValueError, match=r"lengths = \[0, 5\]: must lie in \[1, 5\]"):
        check_range("lengths", np.array([0, 5]), 1, 5)
    jax.jit(lambda values: [check_range("lengths", values, 1, 5), values][1])(np.array([7]))


def test_integers_of_any_type_become_int32():
    assert as_int32("lengths", np.array([1], np.uint8)).dtype == jnp.int32
    with pytest.raises(TypeError, match="lengths has dtype float32: must be integers"):
        as_int32("lengths", np.ones(1, np.float32))


def test_least_sizes_are_taken():
    check_blocks(1, window=1)
    check_heads({"Hq": 1, "Hkv": 1})
