"""Short names of the supported models and where they live on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_INSTRUCT = ("", "-Instruct")
_FAMILIES = (  # repository, sizes, ends of names
    ("meta-llama/Llama-3.1", "8B 70B 405B", _INSTRUCT),
    ("meta-llama/Llama-3.2", "1B 3B", _INSTRUCT),
    ("Qwen/Qwen2.5", "0.5B 1.5B 3B 7B 14B 32B 72B", _INSTRUCT),
    ("Qwen/Qwen3", "0.6B 1.7B 4B 8B 14B", ("", "-Base")),  # instruct: Qwen3 marks the base
    ("Qwen/Qwen3", "32B", ("",)),  # its base model was not published
    ("HuggingFaceTB/SmolLM2", "135M 360M 1.7B", _INSTRUCT),
    ("Qwen/Qwen2.5-Coder", "0.5B 1.5B 3B 7B 14B 32B", _INSTRUCT),
)
_IDS = [f"{name}-{size}{end}" for name, sizes, ends in _FAMILIES for size in sizes.split() for end in ends]
_BY_ALIAS = {hub_id.partition("/")[2].lower().replace("llama-", "llama"): hub_id for hub_id in _IDS}
ALIASES: Mapping[str, str] = MappingProxyType(_BY_ALIAS)
"""Alias -> Hub id, base and instruct models of LLaMA 3.1 and 3.2, Qwen2.5, Qwen2.5-Coder, Qwen3 (dense) and SmolLM2."""
