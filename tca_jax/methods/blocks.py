"""Blocks of a prompt: how many are ranked, and how many leave the window of a growing sequence (docs/method.md)."""

from __future__ import annotations

from typing import Any, TypeVar

from tca_jax.pallas_kernels.integers import cdiv

#: A number of tokens: a Python integer, or an array of them, traced or not.
Tokens = TypeVar("Tokens", int, Any)


def num_ranked_blocks(tokens: Tokens, block_size: int, window: int) -> Tokens:
    """n = max(0, L // b - w // b): blocks that are global for some query of L tokens or for the one that follows."""
    blocks = tokens // block_size - window // block_size
    return blocks * (blocks > 0)


def num_leaving_blocks(prompt_tokens: int, new_tokens: int, block_size: int, window: int) -> int:
    """Most blocks that leave the window while `new_tokens` are fed behind a prompt of at most `prompt_tokens`."""
    return min(cdiv(new_tokens, block_size), num_ranked_blocks(prompt_tokens + new_tokens, block_size, window))
