"""Checkpoints in eight bits as they are published: which formats are read, and where their codes and scales are.

A projection's `weight` holds e4m3 codes `[out, in]`. Beside it lie its scales, by which codes are multiplied: one, one
for each output channel, or one for each block of outputs and inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tca_jax.errors import UserError

_READ = (
    "weights in e4m3 of quant_method 'compressed-tensors' (format 'float-quantized') or 'fp8', with a scale for each "
    "tensor, output channel or block"
)


@dataclasses.dataclass(frozen=True)
class StoredQuantization:
    """Scales of a checkpoint's eight-bit weights, from its `quantization_config`."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None where all inputs do

    @classmethod
    def from_hf(cls, entries: Any) -> StoredQuantization:
        """Reads a `quantization_config`; ValueError where it is another format."""
        method = entries.get("quant_method") if isinstance(entries, Mapping) else entries
        if method == "fp8":
            return _fine_grained(entries)
        if method == "compressed-tensors":
            return _compressed_tensors(entries)
        return _refuse(method)

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes that the scales of codes `[out, in]` may have."""
        if self.block is None:
            return [(shape[0], 1), (shape[0],), (1,), (1, 1), ()]
        return [tuple(-(-size // of_block) for size, of_block in zip(shape, self.block, strict=True))]


def _fine_grained(entries: Mapping[str, Any]) -> StoredQuantization:
    """Of Qwen3, DeepSeek and vLLM."""
    block = entries.get("weight_block_size")
    if entries.get("fmt", "e4m3") != "e4m3":
        _refuse(f"fp8, fmt {entries['fmt']!r}")
    return StoredQuantization(None if block is None else _checked_block(block, "weight_block_size"))


def _compressed_tensors(entries: Mapping[str, Any]) -> StoredQuantization:
    """Of llm-compressor."""
    groups = entries.get("config_groups")
    found = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    weights = found[0] if len(found) == 1 and isinstance(found[0], Mapping) else {}
    wanted = {"num_bits": 8, "type": "float", "symmetric": True}
    described = {"format": entries.get("format")} | {key: weights.get(key, value) for key, value in wanted.items()}
    strategy = weights.get("strategy")
    if described != {"format": "float-quantized"} | wanted or strategy not in ("tensor", "channel", "block"):
        _refuse(f"compressed-tensors, {described | {'strategy': strategy}}")
    block = _checked_block(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    return StoredQuantization(block)


def _checked_block(block: Any, name: str) -> tuple[int, int]:
    if isinstance(block, list | tuple) and len(block) == 2 and all(type(x) is int and x > 0 for x in block):
        return block[0], block[1]
    return _refuse(f"{name} = {block!r}, not two positive integers")


def _refuse(given: Any) -> Any:
    raise UserError(f"quantization_config ({given!r}) is not supported: must be {_READ}")
