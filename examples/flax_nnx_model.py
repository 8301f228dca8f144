"""TCA in a Flax NNX model: its `MultiHeadAttention` layers get another attention function.

python examples/flax_nnx_model.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from flax import nnx
from jax import Array

import tca_jax
from tca_jax.calibration import choose_candidates

KEYS, VALUES = 32, 8
FEATURES, HEADS, BATCH = 64, 2, 32


# The model, without this library: it reads pairs of a key and a value, then answers for the last key.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(FEATURES, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=rngs)
        self.up = nnx.Linear(FEATURES, 2 * FEATURES, rngs=rngs)
        self.down = nnx.Linear(2 * FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x += self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Lookup(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.keys, self.values = (nnx.Embed(n, FEATURES, rngs=rngs) for n in (KEYS, VALUES + 1))
        self.blocks = nnx.List([Block(rngs)])
        self.head = nnx.Linear(FEATURES, VALUES, rngs=rngs)

    def __call__(self, keys: Array, values: Array) -> Array:
        """Logits of the value of the last key, whose own place holds no value."""
        x = self.keys(keys) + self.values(values)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1])


def draw(key: Array, batch: int, length: int) -> tuple[Array, Array, Array]:
    """Keys, values, and the answer: the value beside the last key's earlier place."""
    of_keys, of_table, of_place = jax.random.split(key, 3)
    keys = jax.random.randint(of_keys, (batch, length), 0, KEYS)
    values = jnp.take_along_axis(jax.random.randint(of_table, (batch, KEYS), 0, VALUES), keys, axis=1)
    asked = jax.random.randint(of_place, (batch, 1), 0, length // 2)  # far back
    key, answer = (jnp.take_along_axis(x, asked, axis=1)[:, 0] for x in (keys, values))
    # The key has one earlier place.
    keys = jnp.where((keys == key[:, None]) & (jnp.arange(length) != asked), (key[:, None] + 1) % KEYS, keys)
    return keys.at[:, -1].set(key), values.at[:, -1].set(VALUES), answer


def train(model: Lookup, steps: int, length: int) -> float:
    """Trains with full attention; the last loss."""
    graphdef, params = nnx.split(model)
    optimizer = optax.adam(1e-2)

    def loss(params: nnx.State, key: Array) -> Array:
        keys, values, answer = draw(key, BATCH, length)
        logits = nnx.merge(graphdef, params)(keys, values)
        return optax.softmax_cross_entropy_with_integer_labels(logits, answer).mean()

    def step(state: tuple, key: Array) -> tuple[tuple, Array]:
        params, momenta = state
        value, gradients = jax.value_and_grad(loss)(params, key)
        updates, momenta = optimizer.update(gradients, momenta, params)
        return (optax.apply_updates(params, updates), momenta), value

    keys = jax.random.split(jax.random.key(0), steps)
    (params, _), losses = jax.jit(lambda params: jax.lax.scan(step, (params, optimizer.init(params)), keys))(params)
    nnx.update(model, params)
    return float(losses[-1])


# TCA: the layers' attention function is a field, which is replaced.


def attention_layers(model: nnx.Module) -> Iterator[nnx.MultiHeadAttention]:
    """Every attention layer of a model, however deep."""
    return (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.MultiHeadAttention))


def tca_attention(candidates: Array, config: tca_jax.TCAConfig) -> Callable[..., Array]:
    """An attention function as `MultiHeadAttention` calls it; it is causal, so it needs no mask."""

    def attend(query: Array, key: Array, value: Array, **_: Any) -> Array:
        lengths = jnp.full(query.shape[0], query.shape[1])
        return tca_jax.attend(query, key, value, candidates, lengths, config)

    return attend


def calibrate(model: Lookup, inputs: tuple[Array, Array], config: tca_jax.TCAConfig) -> list[Array]:
    """For every layer the sparsest candidate of each head that keeps enough of its last query's attention.

    `tca_jax.calibration_scores` takes the mean over all queries, as in a language model; here only the last one counts.
    """
    layers, rows = list(attention_layers(model)), []

    def watched(query: Array, key: Array, value: Array, **given: Any) -> Array:
        lengths = jnp.full(query.shape[0], query.shape[1])
        scores = []
        for row in range(config.num_candidates + 1):
            candidates = jnp.full(key.shape[2], row)
            dropped = tca_jax.diagnostics.dropped_mass(query, key, candidates, lengths, config)
            scores.append(1 - dropped[:, :, -1].mean(axis=0))
        rows.append(choose_candidates(jnp.stack(scores, axis=-1), config.tau))
        return nnx.dot_product_attention(query, key, value, mask=given["mask"])

    for layer in layers:
        layer.attention_fn = watched
    model(*inputs)  # not jitted, so that every layer runs
    for layer in layers:
        layer.attention_fn = nnx.dot_product_attention
    return rows


def accuracy(model: Lookup, length: int) -> float:
    keys, values, answer = draw(jax.random.key(10**6), 64, length)
    return float((nnx.jit(lambda model: model(keys, values))(model).argmax(axis=-1) == answer).mean())


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 300,
    length: Annotated[int, typer.Option(min=64, help="Pairs in a sequence; fewer fit into the window.")] = 128,
) -> None:
    """Train with full attention, calibrate, and compare the answers."""
    config = tca_jax.TCAConfig(block_size=16, window=32, reserve=8)
    model = Lookup(nnx.Rngs(0))
    print(f"trained on {length} pairs with full attention: loss {train(model, steps, length):.3f}")
    rows = calibrate(model, draw(jax.random.key(2), 4, length)[:2], config)
    sparsest = [jnp.zeros_like(row) for row in rows], dataclasses.replace(config, reserve=0)
    print(f"{'attention':<18}{'right':>8}   candidates by layer")
    print(f"{'full':<18}{accuracy(model, length):>8.0%}")
    for name, (chosen, used) in {"tca, calibrated": (rows, config), "tca, sparsest": sparsest}.items():
        for candidates, layer in zip(chosen, attention_layers(model), strict=True):
            layer.attention_fn = tca_attention(candidates, used)
        print(f"{name:<18}{accuracy(model, length):>8.0%}   {'  '.join(str(row.tolist()) for row in chosen)}")


if __name__ == "__main__":
    typer.run(main)
