"""TCA in a transformer of plain JAX: a LLaMA of functions and a dictionary of arrays, with attention as an argument.

python examples/plain_jax_transformer.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.numpy import load_file

import tca_jax
from tca_jax.calibration import choose_candidates
from tca_jax.lab import recall
from tca_jax.lab.recall.protocols import completion
from tca_jax.loading import checkpoint_folder

BOS = 256  # the shipped model's tokens are bytes, and a few more
Attention = Callable[[int, Array, Array, Array], Array]


# The model, without this library.


def read_weights(folder: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Arrays by their names in the checkpoint, and its config."""
    weights = {name: jnp.asarray(x, jnp.float32) for name, x in load_file(folder / "model.safetensors").items()}
    return weights, json.loads((folder / "config.json").read_text())


def hidden_states(weights: dict[str, Array], config: dict[str, Any], tokens: Array, attention: Attention) -> Array:
    """The last hidden state of every token, [B, L, D]."""
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    x = weights["model.embed_tokens.weight"][tokens]
    angles = rotary_angles(tokens.shape[1], head_dim, config["rope_theta"])
    for layer in range(config["num_hidden_layers"]):
        part = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in LAYER}
        y = norm(x, part["input_layernorm"])
        q, k, v = (y @ part[f"self_attn.{name}_proj"].T for name in "qkv")
        q, k, v = (z.reshape(*z.shape[:2], n, head_dim) for z, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        out = attention(layer, rotate(q, angles), rotate(k, angles), v)
        x += out.reshape(*x.shape[:2], -1) @ part["self_attn.o_proj"].T
        y = norm(x, part["post_attention_layernorm"])
        gate, up = (y @ part[f"mlp.{name}_proj"].T for name in ("gate", "up"))
        x += (jax.nn.silu(gate) * up) @ part["mlp.down_proj"].T
    return norm(x, weights["model.norm.weight"])


LAYER = (
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def norm(x: Array, weight: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def rotary_angles(length: int, head_dim: int, theta: float) -> Array:
    return jnp.arange(length)[:, None] * theta ** -(jnp.arange(0, head_dim, 2) / head_dim)


def rotate(x: Array, angles: Array) -> Array:
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def full(layer: int, q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


# TCA: a score of every candidate, computed once, and an attention function.


def calibrate(model: Callable[[Array, Attention], Array], tokens: Array, config: tca_jax.TCAConfig) -> list[Array]:
    """For every layer the sparsest candidate of each KV head that keeps enough of full attention's mass."""

    @jax.jit
    def scores_by_layer(tokens: Array) -> list[Array]:
        scores = []

        def scored(layer: int, q: Array, k: Array, v: Array) -> Array:
            scores.append(tca_jax.calibration_scores(q, k, jnp.array([tokens.shape[1]]), config)[0])
            return full(layer, q, k, v)

        model(tokens, scored)
        return scores

    return [choose_candidates(scores, config.tau) for scores in scores_by_layer(tokens)]


def tca(rows: list[Array], config: tca_jax.TCAConfig, length: Array) -> Attention:
    """Attention of a prompt of `length` tokens under calibrated candidates."""
    return lambda layer, q, k, v: tca_jax.attend(q, k, v, rows[layer], length[None], config)


# One question under both.


def answer(
    model: Callable[..., Array], prompt: str, attention_for: Callable[[Array], Attention], new_tokens: int
) -> str:
    """A greedy answer, a forward pass for each token: the model has no cache."""
    ids = [BOS, *prompt.encode()]
    tokens = np.full((1, len(ids) + new_tokens), BOS, np.int32)
    tokens[0, : len(ids)] = ids

    @jax.jit
    def next_token(tokens: Array, length: Array) -> Array:
        return jnp.argmax(model(tokens, attention_for(length))[0, length - 1])

    for place in range(len(ids), len(ids) + new_tokens):
        tokens[0, place] = next_token(jnp.asarray(tokens), jnp.int32(place))
    return bytes(min(token, 255) for token in tokens[0, len(ids) :].tolist()).decode(errors="replace")


def main(num_bytes: int, window: int) -> None:
    config = tca_jax.TCAConfig(window=window)
    weights, shape = read_weights(checkpoint_folder("recall-tiny"))
    document = recall.build_document(np.random.default_rng(7), num_bytes, ("digits",))
    question = document.questions[0]
    prompt = completion(document.text, question)
    embedding = weights["model.embed_tokens.weight"]  # tied: it makes the logits, too

    def model(tokens: Array, attention: Attention) -> Array:
        return hidden_states(weights, shape, tokens, attention) @ embedding.T

    rows = calibrate(model, jnp.array([[BOS, *prompt.encode()]]), config)
    print("candidates by layer:", "  ".join(str(row.tolist()) for row in rows))
    print(f"question: {question.text}")
    for name, attention_for in (("full", lambda length: full), ("tca", partial(tca, rows, config))):
        said = answer(model, prompt, attention_for, len(question.answer))
        print(f"{name:<5} {said}  {'right' if said == question.answer else f'wrong: it is {question.answer}'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1500, help="length of the document (default: %(default)s)")
    parser.add_argument("--window", type=int, default=512, help="local tokens of every query (default: %(default)s)")
    options = parser.parse_args()
    main(options.bytes, options.window)
