"""Checkpoints in eight bits as they are published: which formats are read, and where their codes and scales are.

A projection's `weight` holds e4m3 codes `[out, in]`. Beside it lie its scales, by which codes are multiplied: one, one
for each output channel, or one for each block of outputs and inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tca_jax.errors import require

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
        given, name, is_read, block = method, "weight_block_size", False, None
        if method == "fp8":  # of Qwen3, DeepSeek and vLLM
            given, block = f"fp8, fmt {entries.get('fmt')!r}", entries.get(name)
            is_read = entries.get("fmt", "e4m3") == "e4m3"
        elif method == "compressed-tensors":  # of llm-compressor
            groups = entries.get("config_groups")
            found = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
            weights = found[0] if len(found) == 1 and isinstance(found[0], Mapping) else {}
            wanted = {"format": "float-quantized", "num_bits": 8, "type": "float", "symmetric": True}
            described = {key: weights.get(key, value) for key, value in wanted.items()}
            described |= {"format": entries.get("format"), "strategy": weights.get("strategy")}
            given, name = f"compressed-tensors, {described}", "block_structure"
            is_read = any(described == wanted | {"strategy": each} for each in ("tensor", "channel", "block"))
            block = weights.get(name, ()) if described["strategy"] == "block" else None
        require(is_read, f"quantization_config ({given!r}) is not supported: must be {_READ}")
        if block is not None:
            fits = isinstance(block, list | tuple) and len(block) == 2 and all(type(x) is int and x > 0 for x in block)
            require(fits, f"quantization_config: {name} = {block!r}, not two positive integers, is not supported")
        return cls(None if block is None else (block[0], block[1]))

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes that the scales of codes `[out, in]` may have."""
        if self.block is None:
            return [(shape[0], 1), (shape[0],), (1,), (1, 1), ()]
        return [tuple(-(-size // of_block) for size, of_block in zip(shape, self.block, strict=True))]
