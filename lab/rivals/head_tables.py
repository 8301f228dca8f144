"""Tables with an entry for each head of each layer: how they are checked, and the entries of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float64

from tca_jax.errors import UserError

Entry = TypeVar("Entry")


def numbers_by_head(
    name: str,
    value: Any,
    shape: str,
    fits: Callable[[Float64[np.ndarray, "layers H"]], Bool[np.ndarray, "layers H"]],
    must: str,
    *,
    otherwise: str = "",
) -> Float64[np.ndarray, "layers H"]:
    """A table of numbers `[layers, H]`.

    Args:
        name: The argument's, for messages.
        value: What was given.
        shape: How messages write the table's shape.
        fits: Which entries are allowed.
        must: What messages say of those that are not.
        otherwise: What else the argument may be, for messages.

    Raises:
        ValueError: it is no such table, or an entry is not allowed.
    """
    try:
        table = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        allowed = otherwise or "numbers "
        raise UserError(f"{name}: must be {allowed}{shape}, with as many in every layer") from None
    if table.ndim != 2 or not table.size:
        raise UserError(f"{name} has shape {table.shape}: must be {otherwise}{shape}")
    for layer, head in np.argwhere(~fits(table)):
        raise UserError(f"{name}[{layer}, {head}] = {table[layer, head]}: {must}")
    return table


def check_query_heads(name: str, table: Sequence[Sequence[Any]], num_layers: int, num_kv_heads: int) -> None:
    """Raises ValueError unless a table by query heads fits a model of so many layers and KV heads."""
    heads = len(table[0])
    if len(table) != num_layers or heads % num_kv_heads:
        raise UserError(
            f"{name} has {len(table)} layers of {heads} query heads: must be {num_layers} of a multiple of "
            f"{num_kv_heads}, the KV heads"
        )


def of_layer(name: str, table: Sequence[Sequence[Entry]], layer: int, heads: int) -> Sequence[Entry]:
    """A layer's entries.

    Raises:
        ValueError: the table is of another number of heads.
    """
    entries = table[layer]
    if len(entries) != heads:
        raise UserError(f"{name} has {len(entries)} query heads: must be {heads}, as the model has")
    return entries
