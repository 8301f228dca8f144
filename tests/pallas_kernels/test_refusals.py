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
from tca_jax.pallas_kernels.observation_scores import observation_scores
from tca_jax.pallas_kernels.reserve_tokens import reserve_tokens

SMALL = {"L": 20, "Hq": 2, "Hkv": 1, "d": 16, "block_size": 16, "window": 32, "stride": 8}
PAGED = {"B": 4, "b": 16, "T": 6, "kept_columns": 3, "P": 40, "window": 32}
#: Of an operation: sizes, shapes and options of a call, and what the message says.
REFUSED = {
    "block_scores": [
        ({"shapes": {"k": (1, 20, 1, 8)}}, r"k has shape \(1, 20, 1, 8\): must be \[B = 1, L = 20, Hkv, d = 16\]"),
        ({"Hq": 3, "Hkv": 2}, "3 query heads and 2 KV heads: the former must be a positive multiple"),
        ({"block_size": 0}, "block_size = 0: must be an integer of at least 1"),
        *(({"stride": n}, f"stride = {n}: must divide block_size = 16") for n in (0, 3, 32)),
        ({"backend": "cudnn"}, "backend = 'cudnn'"),
    ],
    "select_tokens": [({"nb": 3}, r"budgets has 3 blocks: must be L // block_size = 20 // 16 = 1")],
    "prefill_attention": [
        *(({"window": n}, f"window = {n}: must be 0 or a multiple of block_size = 16") for n in (-16, 24)),
        ({"shapes": {"pool.v": (9, 16)}}, r"pool\.v has shape \(9, 16\): must be \[P = 4096, d = 16"),
    ],
    "paged_attention": [
        ({**PAGED, "window": 24}, "window = 24: must be a positive multiple of the page size, 16"),
        ({**PAGED, "m": 17}, "q has 17 queries per row: must be at most the page size, 16"),
        ({**PAGED, "R": 3}, r"caches\[0\] has 3 rows: must divide the 4 rows of queries"),
        ({**PAGED, "shapes": {"caches.v": (9, 16, 16)}}, r"caches\[0\].v has shape .*: must be \[P ="),
    ],
}
NARROW = ({"d": 80}, "head dimension 80: must be a power of two from 16 to 256")
SHORT = ({"block_size": 8}, "block_size = 8: must be a multiple of 16")
MOSAIC = "on mosaic takes bfloat16 and float16, d 64 or 128 and block_size a multiple of 128, not "
DECLINED = {
    ("block_scores", "triton"): [
        NARROW,
        SHORT,
        ({"dtype": {"q": jnp.float32}}, r"types \['bfloat16', 'float32'\]: must be one of bfloat16"),
        ({"stride": 1}, "128 queries of a tile times 4 heads: at most 256"),
    ],
    ("prefill_attention", "triton"): [NARROW, SHORT],
    ("select_tokens", "triton"): [
        ({"dtype": {"k": jnp.float16, "v": jnp.float32}}, r"types \['float16', 'float32'\]"),
        ({"block_size": 512}, "block_size = 512: must be a power of two, at most"),
    ],
    ("paged_attention", "triton"): [NARROW, ({"b": 8}, "pages of 8: must be a power of two from 16")],
    ("prefill_attention", "mosaic"): [
        ({"dtype": jnp.float32}, f"{MOSAIC}float32, d = 128 and block_size = 128"),
        ({"d": 256, "far": True}, f"{MOSAIC}bfloat16, d = 256"),
    ],
}


def cases(table):
    return [(key, *case) for key, of_key in table.items() for case in of_key]


@pytest.mark.parametrize(("operation", "change", "message"), cases(REFUSED))
def test_misfit_is_refused_by_name(operation, change, message):
    public = getattr(importlib.import_module(f"tca_jax.pallas_kernels.{operation}"), operation)
    options = {name: change[name] for name in ("backend",) if name in change}
    sizes = SMALL | {name: value for name, value in change.items() if name not in options}
    function, arguments = call(operation, **sizes, function=unchecked(public))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: function(**x, **options), arguments)


def test_scores_refuse_misfits_by_name():
    lengths, ranked, scores = jnp.array([20]), jnp.array([7, 7]), jnp.ones((1, 1, 20))
    given = observed, keys, _ = jnp.ones((1, 3, 2, 16)), jnp.ones((1, 20, 1, 16)), lengths
    for function, operands, options, message in (
        (observation_scores, (observed[:, :0], keys, lengths), {"spread": 4}, "must hold at least one query"),
        (observation_scores, given, {"spread": 0}, "spread = 0: must be an integer of at least 1"),
        (observation_scores, given, {"spread": 4, "decay": 1.1}, r"decay = 1.1: must lie in \(0, 1\]"),
        (reserve_tokens, (scores, ranked), {"reserve": 1}, r"ranked_tokens has shape \(2,\): must be \[B = 1\]"),
        (reserve_tokens, (scores, lengths), {"reserve": -1}, "reserve = -1: must be an integer of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            unchecked(function)(*operands, **options)


@pytest.mark.parametrize(("operation", "change", "message"), cases(DECLINED))
def test_backend_declines(operation, change, message):
    name, backend = operation
    function, arguments = call(name, **change, function=unchecked(implementation(name, backend, interpret=False)))
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda x: function(**x), arguments)


def test_integers_are_checked_where_known():
    check_range("lengths", np.array([1, 5]), 1, 5)
    check_range("lengths", np.array([], np.int32), 1, 5)
    with pytest.raises(ValueError, match=r"lengths = \[0, 5\]: must lie in \[1, 5\]"):
        check_range("lengths", np.array([0, 5]), 1, 5)
    jax.jit(lambda values: [check_range("lengths", values, 1, 5), values][1])(np.array([7]))
    assert as_int32("lengths", np.array([1], np.uint8)).dtype == jnp.int32
    with pytest.raises(TypeError, match="lengths has dtype float32: must be integers"):
        as_int32("lengths", np.ones(1, np.float32))
    check_blocks(1, window=1)  # the least that is taken
    check_heads({"Hq": 1, "Hkv": 1})
