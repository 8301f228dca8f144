"""Aliases cover the published sizes, base and instruct, and cannot be changed by accident."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tca_jax.models.aliases import ALIASES


@pytest.mark.parametrize(
    ("alias", "repository"),
    [
        ("llama3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("llama3.1-70b-instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("llama3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("qwen3-8b-base", "Qwen/Qwen3-8B-Base"),
        ("qwen3-32b", "Qwen/Qwen3-32B"),
        ("qwen2.5-coder-1.5b-instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
    ],
)
def test_alias_names_its_repository(alias: str, repository: str) -> None:
    assert ALIASES[alias] == repository


def test_aliases_are_distinct_lower_case_and_read_only() -> None:
    assert len(set(ALIASES.values())) == len(ALIASES) == 10 + 14 + 11 + 6 + 12
    assert all(re.fullmatch(r"[a-z]+[\d.]+-(coder-)?[\d.]+[bm](-instruct|-base)?", alias) for alias in ALIASES)
    writable: Any = ALIASES
    with pytest.raises(TypeError):
        writable["mine"] = "me/mine"
