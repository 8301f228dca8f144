"""Tables with numbers of each layer and head: how they are checked, read, and measured on texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float, Float64

from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import Prompt, encode_prompts
from tca_jax.errors import check_number, explaining, require

Entry = TypeVar("Entry")


def numbers_by_head(
    name: str, value: Any, shape: str = "numbers [layers, H_kv]", *, above: float = -math.inf, at_most: float = math.inf
) -> Float64[np.ndarray, "layers H"]:
    """A table of finite numbers in (above, at_most]."""
    with explaining(f"{name}: must be {shape}, with as many in every layer", TypeError, ValueError):
        table = np.asarray(value, np.float64)
    require(table.ndim == 2 and table.size, f"{name} has shape {table.shape}: must be {shape}")
    for (layer, head), number in np.ndenumerate(table):
        check_number(f"{name}[{layer}, {head}]", float(number), above=above, at_most=at_most)
    return table


def check_shape(name: str, table: Sequence[Sequence[Any]], layers: int, kv_heads: int, kind: str = "KV heads") -> None:
    """Raises ValueError unless a table by KV heads, or by query heads, may be of a model's shape."""
    given, heads = len(table), len(table[0])
    wanted, fits = f"{layers} of {kv_heads}", (given, heads) == (layers, kv_heads)
    if kind == "query heads":
        wanted, fits = f"{layers} of a multiple of {kv_heads}, the KV heads", given == layers and heads % kv_heads == 0
    require(fits, f"{name} has {given} layers of {heads} {kind}: must be {wanted}")


def of_layer(name: str, table: Sequence[Sequence[Entry]], layer: Any, heads: int) -> Sequence[Entry]:
    """A layer's entries by query heads, of which policies first learn the number in prefill."""
    given = len(table[layer])
    require(given == heads, f"{name} has {given} query heads: must be {heads}, as the model has")
    return table[layer]


def encode_texts(lm: LM, texts: Prompt | Sequence[Prompt], **least: int) -> list[list[int]]:
    """Token ids of texts that fit the model, each of more tokens than the option in `least`."""
    ((option, count),) = least.items()
    most, sequences = lm.config.max_context, encode_prompts(lm, texts, "texts")
    limits = f"must have more than {option} = {count} and at most the {most} positions of model {lm.name!r}"
    for i, ids in enumerate(sequences):
        require(count < len(ids) <= most, f"texts[{i}] has {len(ids)} tokens: {limits}")
    return sequences


def check_finite(lm: LM, measured: Float[np.ndarray, "layers ..."]) -> None:
    """Raises ValueError unless everything that was measured of each layer is finite."""
    for layer, found in enumerate(measured):
        message = f"model {lm.name!r} computes NaN or infinity in the attention of layer {layer}"
        require(np.isfinite(found).all(), message)
