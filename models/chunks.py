"""Functions of tokens in chunks: results of a long prompt a few thousand tokens at a time, in preallocated buffers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array


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
