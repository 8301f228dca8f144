"""Lowering for CUDA on any host: every kernel at real sizes, and how many kernels a call launches."""

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import kernels
from implementations import implementation
from operations import call

from tca_jax.pallas_kernels import rounding
from tca_jax.pallas_kernels.block_scores.triton import BlockScoresConfig
from tca_jax.pallas_kernels.kv import CODES

LLAMA = {"L": 131072, "Hq": 32, "Hkv": 8}
QWEN = {"L": 2**20 + 64, "Hq": 28, "Hkv": 4}  # a million tokens, off the block
LARGE = {"B": 4, "L": 2**20, "Hq": 32, "Hkv": 8, "dtype": jnp.float16}  # indices past 2^31
FLOAT32 = {"B": 3, "L": 9000, "Hq": 8, "Hkv": 8, "d": 64, "dtype": jnp.float32}
SHORT = {"L": 1000, "Hq": 4, "Hkv": 1, "d": 256}
PAGED = {"Hq": 32, "Hkv": 8, "P": 1600}
EIGHT_BITS = {"q": jnp.bfloat16, "caches.k": CODES, "caches.v": CODES}

CASES = [
    *(("select_tokens", "triton", 2, sizes) for sizes in (QWEN, LARGE, FLOAT32)),
    # Two kernels round to int8. A program has few tiles of a group of 7 and of small strides, several of a group of 4.
    ("block_scores", "triton", 3, {**LLAMA, "stride": 8}),
    ("block_scores", "triton", 3, {**LLAMA, "stride": 32, "config": BlockScoresConfig(2, 64, 4, 3)}),
    ("block_scores", "triton", 1, {**LLAMA, "dtype": jnp.float32}),
    ("block_scores", "triton", 3, QWEN),
    ("block_scores", "triton", 1, {**SHORT, "dtype": jnp.float16}),
    ("prefill_attention", "triton", 1, {**LLAMA, "P": 2**20}),
    ("prefill_attention", "triton", 1, {**QWEN, "dtype": jnp.float16, "P": 2**20}),
    ("prefill_attention", "triton", 1, {"L": 5000, "Hq": 14, "d": 64, "block_size": 64}),
    ("prefill_attention", "triton", 1, {"L": 4096, "Hkv": 4, "d": 256, "block_size": 256, "dtype": jnp.float32}),
    ("prefill_attention", "triton", 1, {**LLAMA, "Hkv": 32, "block_size": 64, "window": 0, "far": True}),
    ("prefill_attention", "mosaic", 1, {**LLAMA, "B": 2}),
    ("prefill_attention", "mosaic", 1, {**LLAMA, "Hkv": 32, "window": 0, "far": True}),
    ("prefill_attention", "mosaic", 1, {**LLAMA, "window": 256, "far": True}),
    ("prefill_attention", "mosaic", 1, {"L": 1000, "Hq": 14, "d": 64, "block_size": 256, "window": 256, "far": True}),
    ("prefill_attention", "mosaic", 1, {"B": 2, "L": 1000, "Hq": 28, "Hkv": 4, "d": 64, "block_size": 256}),
    ("prefill_attention", "mosaic", 1, {"B": 2, "L": 1000, "Hq": 7, "Hkv": 1, "d": 64, "window": 1024}),
    ("prefill_attention", "mosaic_fp8", 1, {**LLAMA, "window": 256, "far": True}),
    ("prefill_attention", "mosaic_fp8", 1, {"B": 2, "L": 1000, "Hq": 7, "Hkv": 1, "d": 64, "dtype": jnp.float16}),
    ("paged_attention", "triton", 2, PAGED),
    ("paged_attention", "triton", 2, {**PAGED, "m": 128}),
    ("paged_attention", "triton", 2, {**PAGED, "P": 8200, "T": 1025, "kept_columns": 0}),  # full attention
    # Past 2^31, and rows that share a cache.
    ("paged_attention", "triton", 2, {**PAGED, "B": 16, "R": 1, "P": 2**18, "T": 8225, "kept_columns": 8192}),
    ("paged_attention", "triton", 2, {"B": 2, "m": 33, "d": 64, "T": 9, "kept_columns": 4, "dtype": jnp.float32}),
    ("paged_attention", "triton", 2, {"m": 128, "Hq": 1, "Hkv": 1, "d": 256, "T": 9, "kept_columns": 4}),
    ("paged_attention", "triton", 2, {**PAGED, "dtype": EIGHT_BITS}),
    ("paged_attention", "triton", 2, {**PAGED, "m": 128, "dtype": {**EIGHT_BITS, "q": jnp.float32}}),
]


@pytest.mark.parametrize(("operation", "backend", "launched", "sizes"), CASES)
def test_lowers_for_cuda(operation, backend, launched, sizes):
    sizes, options = dict(sizes), {}
    if "config" in sizes:
        options["config"] = sizes.pop("config")
    function, arguments = call(operation, **sizes, function=implementation(operation, backend, interpret=False))
    assert kernels(backend, lambda x: function(**x, **options), arguments) == launched


def test_bytes_past_2_gib():
    """Pallas-Triton would index them in int32: queries are rounded in two parts, others are refused."""
    q = jax.ShapeDtypeStruct((1, 2**19 + 64, 32, 128), jnp.bfloat16)
    assert kernels("triton", rounding.round_queries, q) == 2
    tiles = rounding.tiles_of_prompt(jnp.ones((1, 32), jnp.int32), q.shape[1], 128)
    with pytest.raises(NotImplementedError, match="2 to 4 GiB of bytes cannot be indexed"):
        jax.eval_shape(lambda v: rounding.round_values(v, tiles, jnp.ones(32), 128), q)
