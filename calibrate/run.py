"""calibrate: score every candidate on full attention over the texts, and choose one for each KV head."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.calibration.profile import Profile
from tca_jax.calibration.scores import calibration_scores, choose_candidates
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import Encoder, Prompt, encode_prompts, pad_tokens
from tca_jax.methods.config import TCAConfig
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.causal_attention import causal_attention

_DEFAULT_CONFIG = TCAConfig()


def calibrate(
    lm: LM,
    texts: Prompt | Sequence[Prompt],
    config: TCAConfig = _DEFAULT_CONFIG,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Finds the token budget of every KV head (Algorithm 1): the sparsest candidate whose score reaches tau.

    Args:
        lm: The model, from `tca_jax.load`. Its own profile, if it has one, plays no part.
        texts: One or several texts or sequences of token ids, each longer than the window. Best are a few as
            long as the prompts to come, and of their kind. Scores are averaged over the texts.
        config: Hyperparameters, of calibration and of inference with the profile.
        progress: Called with (layers done, layers in all), summed over the texts, first with 0 done.

    Returns:
        The profile: candidates, all scores and what they were measured on.

    Raises:
        ValueError: a text is empty, not UTF-8, too short for the window or longer than the model's context,
            holds ids outside the vocabulary, or is text where the model has no tokenizer; or the model computes
            NaN or infinity.
        TypeError: `texts` holds something else than text and token ids.

    Warns:
        UserWarning: a text has fewer than 2 (window + block_size) tokens, so few queries measured anything.
    """
    sequences = encode_prompts(lm, texts, "texts")
    for index, ids in enumerate(sequences):
        require_length(f"texts[{index}]", len(ids), lm, config)
    if short := _short_text([len(ids) for ids in sequences], config):
        warnings.warn(short, stacklevel=2)
    scores = _mean_scores(lm, sequences, config, progress or (lambda done, total: None))
    return Profile(
        candidates=np.asarray(choose_candidates(jnp.asarray(scores), config.tau)),
        scores=scores,
        config=config,
        fingerprint=lm.fingerprint,
        model_name=lm.name,
        sources=tuple(
            {"tokens": len(ids), "sha256": hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()}
            for ids in sequences
        ),
    )


def _mean_scores(
    lm: LM, sequences: list[list[int]], config: TCAConfig, progress: Callable[[int, int], None]
) -> Float32[np.ndarray, "layers Hkv rows"]:
    """Scores averaged over the sequences, in float64."""
    num_layers, steps = lm.config.num_layers, lm.config.num_layers * len(sequences)
    mean = np.zeros((num_layers, lm.config.num_kv_heads, config.num_candidates + 1), np.float64)
    progress(0, steps)
    for text, ids in enumerate(sequences):
        for layer, scores in enumerate(_layer_scores(lm.decoder, ids, config)):
            if not np.isfinite(scores).all():
                raise ValueError(f"model {lm.name!r} computes NaN or infinity in the attention of layer {layer}")
            mean[layer] += scores
            progress(text * num_layers + layer + 1, steps)
    return (mean / len(sequences)).astype(np.float32)


def _layer_scores(decoder: Decoder, ids: list[int], config: TCAConfig) -> Iterator[Float32[np.ndarray, "Hkv rows"]]:
    """Scores of one layer after the other from a forward pass with exact full attention, in O(L) memory.

    One program serves all layers, so that a deep model compiles as fast as a shallow one.
    """
    padded, true_lengths = pad_tokens([ids])
    tokens, lengths = jnp.asarray(padded), jnp.asarray(true_lengths)
    graphdef, weights = nnx.split(decoder)
    x, cos, sin = _embed(graphdef, weights, tokens, lengths)
    for layer in decoder.layers:
        x, scores = _score_layer(*nnx.split(layer), x, cos, sin, lengths, config)
        yield np.asarray(scores)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _embed(
    graphdef: Any, weights: Any, tokens: Int32[Array, "1 L"], lengths: Int32[Array, " 1"]
) -> tuple[Float[Array, "1 L D"], Float[Array, "1 L half"], Float[Array, "1 L half"]]:
    """What the first layer gets: the residual stream, and the angles of RoPE."""
    decoder = nnx.merge(graphdef, weights)
    positions = jnp.minimum(jnp.arange(tokens.shape[1], dtype=jnp.int32), lengths[:, None] - 1)
    return decoder.embed(tokens), *decoder.angles(positions)


@functools.partial(jax.jit, static_argnames=("graphdef", "config"), donate_argnames=("x",))
def _score_layer(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    cos: Float[Array, "1 L half"],
    sin: Float[Array, "1 L half"],
    lengths: Int32[Array, " 1"],
    config: TCAConfig,
) -> tuple[Float[Array, "1 L D"], Float32[Array, "Hkv rows"]]:
    """The residual stream behind a layer, and the layer's scores: NaN where a query or key is not finite."""

    def attend(q: Array, k: Array, v: Array, _: None) -> tuple[Array, Array]:
        scores = calibration_scores(q, k, lengths, config)[0]
        finite = jnp.isfinite(q).all() & jnp.isfinite(k).all()  # a selection among NaNs may score well
        return causal_attention(q, k, v, lengths), jnp.where(finite, scores, jnp.nan)

    x, scores, _ = nnx.merge(graphdef, weights)(x, cos, sin, attend, None)
    return x, scores


def require_length(name: str, tokens: int, lm: Encoder, config: TCAConfig) -> None:
    """Raises ValueError if a text is too short or too long for any result; `name` is the text's in the message."""
    fewest, most = config.window + config.block_size, lm.config.max_context
    if tokens < fewest:
        raise ValueError(
            f"{name} has {tokens} tokens: calibration needs at least window + block_size = "
            f"{config.window} + {config.block_size} = {fewest}; pass a longer text or a smaller window"
        )
    if tokens > most:
        raise ValueError(f"{name} has {tokens} tokens, model {lm.name!r} has {most} positions: split the text")


def _short_text(lengths: list[int], config: TCAConfig) -> str | None:
    """What to say of texts that give a result which says little."""
    reach, shortest = config.window + config.block_size, min(lengths)
    if shortest >= 2 * reach:
        return None
    return (
        f"texts[{lengths.index(shortest)}] has {shortest} tokens, fewer than 2 (window + block_size) = {2 * reach}: "
        "few of its queries look past the window, so the budgets are uncertain"
    )
