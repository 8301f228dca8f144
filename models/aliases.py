"""Short names of the supported models and where they live on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _aliases() -> dict[str, str]:
    aliases = {}
    for version, sizes in (("3.1", ("8B", "70B", "405B")), ("3.2", ("1B", "3B"))):
        for size in sizes:
            aliases[f"llama{version}-{size.lower()}"] = f"meta-llama/Llama-{version}-{size}"
            aliases[f"llama{version}-{size.lower()}-instruct"] = f"meta-llama/Llama-{version}-{size}-Instruct"
    for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"):
        aliases[f"qwen2.5-{size.lower()}"] = f"Qwen/Qwen2.5-{size}"
        aliases[f"qwen2.5-{size.lower()}-instruct"] = f"Qwen/Qwen2.5-{size}-Instruct"
    for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B"):
        aliases[f"qwen3-{size.lower()}"] = f"Qwen/Qwen3-{size}"  # instruct: Qwen3 marks the base
        if size != "32B":  # its base model was not published
            aliases[f"qwen3-{size.lower()}-base"] = f"Qwen/Qwen3-{size}-Base"
    for size in ("135M", "360M", "1.7B"):
        aliases[f"smollm2-{size.lower()}"] = f"HuggingFaceTB/SmolLM2-{size}"
        aliases[f"smollm2-{size.lower()}-instruct"] = f"HuggingFaceTB/SmolLM2-{size}-Instruct"
    for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B"):
        aliases[f"qwen2.5-coder-{size.lower()}"] = f"Qwen/Qwen2.5-Coder-{size}"
        aliases[f"qwen2.5-coder-{size.lower()}-instruct"] = f"Qwen/Qwen2.5-Coder-{size}-Instruct"
    return aliases


ALIASES: Mapping[str, str] = MappingProxyType(_aliases())
"""Alias -> Hub id, base and instruct models of LLaMA 3.1 and 3.2, Qwen2.5, Qwen2.5-Coder, Qwen3 (dense) and SmolLM2."""
