"""Operands of every operation with kernels: their dimensions, shapes without data, and how they are packed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tca_jax.pallas_kernels.kv import CODES, Pages, Pool, empty
from tca_jax.pallas_kernels.prefill_attention import FarBlocks

TOKENS = {"q": "B L Hq d", "k": "B L Hkv d", "v": "B L Hkv d"}
POOL = {"pool.k": "P d", "pool.v": "P d", "pool.offsets": "B Hkv", "pool.lengths": "B Hkv"}
PAGES = {"caches.k": "P b d", "caches.v": "P b d", "caches.table": "R Hkv T", "caches.kept": "R Hkv"}
PAGES |= {"caches.start": "R", "caches.end": "R"}
FAR = {"far.blocks": "B Hkv N C", "far.counts": "B Hkv N", "far.selected": "B Hkv L", "far.mean_k": "B N Hkv d"}
FAR |= {"far.mean_v": "B N Hkv d", "far.mean_bias": "B Hkv N N", "far.mean_counts": "B Hkv N"}
INTEGERS = {"lengths", "budgets", "offsets", "first", "newest"}
INTEGERS |= {"far.blocks", "far.counts", "far.mean_counts"}
INTEGERS |= {name for name in (*POOL, *PAGES) if not name.endswith((".k", ".v"))}
FIXED = {"scores": jnp.float32, "far.selected": jnp.bool_, "far.mean_bias": jnp.float32}  # types that no call changes
#: Dimensions of the operands and of the results, then the static options. P is a pool, of tokens or of pages of b.
OPERATIONS = {
    "select_tokens": (
        {"scores": "B Hkv L", "budgets": "B Hkv nb", "k": "B L Hkv d", "v": "B L Hkv d", "offsets": "B Hkv"},
        tuple(POOL.values()),
        ("block_size", "pool_tokens"),
    ),
    "prefill_attention": (
        {**TOKENS, **POOL, "budgets": "B Hkv nb", "lengths": "B", **FAR},
        ("B L Hq d",),
        ("block_size", "window"),
    ),
    "paged_attention": ({"q": "B m Hq d", **PAGES, "first": "B", "newest": "B"}, ("B m Hq d", "B m Hq"), ("window",)),
    "block_scores": ({"q": "B L Hq d", "k": "B L Hkv d", "lengths": "B"}, ("B Hkv N N",), ("block_size", "stride")),
    "causal_attention": ({**TOKENS, "lengths": "B"}, ("B L Hq d",), ()),
}


def packed(operands, kept_columns):
    """Arguments of an operation, from operands by name: a pool, pages and lists become one."""
    groups = {}
    for name, operand in operands.items():
        groups.setdefault(name.split(".")[0], []).append(operand)
    pages = functools.partial(Pages, kept_columns=kept_columns)
    whole = {"pool": Pool, "caches": lambda *x: (pages(*x),), "far": FarBlocks}
    return {name: whole.get(name, lambda x: x)(*group) for name, group in groups.items()}


def call(operation, dtype=jnp.bfloat16, shapes=(), far=False, *, function, **sizes):
    """A call without data: a function of shapes, and these; `sizes` are dimensions and static options.

    `dtype` is that of floating-point operands, or of some by name; `shapes` replace those that follow from the sizes.
    With `far`, prefill has far blocks.
    """
    names, _, options = OPERATIONS[operation]
    b = sizes.get("block_size", 128)
    usual = {"B": 1, "L": 1024, "Hq": 8, "Hkv": 2, "d": 128, "block_size": 128, "window": 4096}
    usual |= {"stride": 16, "pool_tokens": 2**19, "b": 128, "m": 1, "T": 193}
    usual |= {"P": 4096, "kept_columns": 160}
    sizes = usual | sizes
    length, blocks = sizes["L"], -(-sizes["L"] // max(1, b))
    sizes = {"nb": length // max(1, b), "N": blocks, "C": blocks} | sizes
    sizes.setdefault("R", sizes["B"])
    dtypes = dtype if isinstance(dtype, dict) else dict.fromkeys(names, dtype)
    operands = {}
    for name, dims in names.items():
        if name in FAR and not far:
            continue
        shape = dict(shapes).get(name, tuple(sizes[dim] for dim in dims.split()))
        kind = jnp.int32 if name in INTEGERS else FIXED.get(name, dtypes.get(name, jnp.bfloat16))
        operands[name] = jax.ShapeDtypeStruct(shape, kind)
        if kind == CODES:
            operands[name] = jax.eval_shape(lambda shape=shape: empty(shape, CODES))
    static = {name: sizes[name] for name in options}
    return functools.partial(function, **static), packed(operands, sizes["kept_columns"])
