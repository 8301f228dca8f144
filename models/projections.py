"""How projections are computed: those of long prompts in chunks of tokens, in preallocated buffers; a row as two."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

_FEW_WEIGHTS = 10_000_000  # with fewer, XLA computes a vector's product as a sum of elementwise products


def by_chunks(function: Callable[..., Any], sizes: tuple[int, ...], buffers: Any, *inputs: Array) -> Any:
    """`function(buffers, *inputs)`, where the function treats every token independently, a chunk of tokens at a time.

    At 128K tokens the intermediates of the MLP would outweigh the weights. Results overwrite `buffers`, in place if
    nothing else needs their values: with fresh buffers the compiler allocates those of all layers at the start, and a
    model of 32 layers takes 90 GB more than it needs.

    Args:
        function: Takes and returns arrays with any leading token axes; its results have the shapes of `buffers`.
        sizes: Tokens of the chunks in one step of the loop. No chunk of a step depends on another, so the compiler may
            overlap them.
        buffers: Pytree of `[B, L, ...]`, also an input of the function; None for fresh buffers, and the function then
            gets None.
        inputs: `[B, L, ...]`.
    """
    batch, length = inputs[0].shape[:2]
    tokens, step = batch * length, sum(sizes)
    if tokens <= max(sizes):
        return function(buffers, *inputs)
    flatten = functools.partial(jax.tree.map, lambda x: x.reshape(-1, *x.shape[2:]))
    flat_inputs = flatten(inputs)

    def cut(arrays: Any, start: Any, size: int) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), arrays)

    def write(start: Any, sizes: Sequence[int], results: Any) -> Any:
        """The results with those of the chunks of one step, which begins at token `start`."""
        starts = list(itertools.accumulate(sizes[:-1], initial=start))
        chunks = list(zip(starts, sizes, strict=True))
        old = [None if buffers is None else cut(results, *chunk) for chunk in chunks]
        new = [function(x, *cut(flat_inputs, *chunk)) for chunk, x in zip(chunks, old, strict=True)]
        for start, chunk in zip(starts, new, strict=True):
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
            results = jax.tree.map(put, results, chunk)
        return results

    if buffers is None:
        # The first token's results are dead code: `full_like` needs only their types. Under `jax.shard_map` these say
        # over which mesh axes the results vary, and a loop must start from values of the types that it ends with.
        first = function(None, *cut(flat_inputs, 0, 1))
        results = jax.tree.map(lambda x: jax.lax.full_like(x, 0, shape=(tokens, *x.shape[1:])), first)
    else:
        results = flatten(buffers)
    steps = tokens // step
    results = jax.lax.fori_loop(0, steps, lambda i, results: write(i * step, sizes, results), results)
    if rest := tokens - steps * step:
        whole = list(itertools.takewhile(lambda end: end < rest, itertools.accumulate(sizes)))
        results = write(steps * step, [*sizes[: len(whole)], rest - sum(sizes[: len(whole)])], results)
    return jax.tree.map(lambda x: x.reshape(batch, length, *x.shape[1:]), results)


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: Any,
    *,
    finish: Callable[[Array], Array] = lambda product: product,
    few_weights: int = _FEW_WEIGHTS,
    **options: Any,
) -> Array:
    """`jax.lax.dot_general` without batch axes; on an NVIDIA GPU, one row times few weights is computed as two rows.

    XLA computes a vector times a small matrix as a sum of elementwise products: it rounds each product to the result's
    dtype and writes all of them to memory before it adds them. This affects the projections of models of up to three
    billion parameters, and those of larger models that are split over devices. Two rows stay a matrix product, which
    reads the weights once and adds in float32; the second row costs nothing, because a tile has sixteen.

    Args:
        lhs: The rows.
        rhs: The weights.
        dimension_numbers: As for `jax.lax.dot_general`; no batch axes.
        finish: Applied to the product while it still has both rows.
        few_weights: Weights from which on a row stays one.
        **options: Of `jax.lax.dot_general`.
    """
    (contracted, _), _ = dimension_numbers
    free = [i for i in range(lhs.ndim) if i not in contracted]

    def product(lhs: Array, rhs: Array) -> Array:
        return finish(jax.lax.dot_general(lhs, rhs, dimension_numbers, **options))

    def of_two_rows(lhs: Array, rhs: Array) -> Array:
        return product(jnp.repeat(lhs, 2, free[0]), rhs)[:1]

    if not free or any(lhs.shape[i] > 1 for i in free) or rhs.size >= few_weights:
        return product(lhs, rhs)
    return jax.lax.platform_dependent(lhs, rhs, cuda=of_two_rows, default=product)


def precision_of(dtype: DTypeLike) -> jax.lax.Precision | None:
    """float32 means float32, not the TF32 that GPUs default to."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
