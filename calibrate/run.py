"""calibrate: score every candidate on full attention over the texts, and choose one for each KV head."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int

from tca_jax.calibration.profile import Profile
from tca_jax.calibration.scores import calibration_scores, choose_candidates
from tca_jax.engine.buckets import bucket_length
from tca_jax.methods.config import TCAConfig
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import fingerprint
from tca_jax.pallas_kernels.causal_attention import causal_attention

Text = str | bytes | Sequence[int | np.integer] | np.ndarray

_DEFAULT_CONFIG = TCAConfig()


@runtime_checkable
class CalibratedModel(Protocol):
    """What calibration needs of a loaded model; `tca_jax.engine.lm.LM` has it."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def name(self) -> str: ...


def calibrate(
    lm: CalibratedModel,
    texts: Text | Sequence[Text],
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
        progress: Called with (texts done, texts in all), first with 0 done.

    Returns:
        The profile: candidates, all scores and what they were measured on.

    Raises:
        ValueError: a text is empty, not UTF-8, too short for the window or longer than the model's context,
            holds ids outside the vocabulary, or is text where the model has no tokenizer.
        TypeError: `texts` holds something else than text and token ids.

    Warns:
        UserWarning: a text has fewer than 2 (window + block_size) tokens, so few queries measured anything.
    """
    sequences = _encode(lm, texts)
    _validate_lengths([len(ids) for ids in sequences], lm, config)
    scores = _mean_scores(lm, sequences, config, progress or (lambda done, total: None))
    if not np.isfinite(scores).all():
        layer = int(np.argwhere(~np.isfinite(scores))[0, 0])
        raise ValueError(f"model {lm.name!r} computes NaN or infinity in the attention of layer {layer}")
    return Profile(
        candidates=np.asarray(choose_candidates(jnp.asarray(scores), config.tau)),
        scores=scores,
        config=config,
        fingerprint=fingerprint(lm.decoder),
        model_name=lm.name,
        sources=tuple(
            {"tokens": len(ids), "sha256": hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()} for ids in sequences
        ),
    )


def score_tokens(
    decoder: Decoder, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], config: TCAConfig
) -> Float32[Array, "layers B Hkv rows"]:
    """Calibration scores of every layer from one forward pass with exact full attention.

    Args:
        decoder: The model.
        tokens: Right-padded token ids `[B, L]`.
        lengths: True lengths `[B]`; may be traced.
        config: Hyperparameters (static under jit).

    Returns:
        Scores of all candidates `[layers, B, H_kv, M + 1]`, NaN where a query or key is not finite. Memory is
        O(L).
    """

    def attention(layer: int, q: Any, k: Any, v: Any, state: None) -> tuple[Any, Any]:
        scores = calibration_scores(q, k, lengths, config)
        finite = jnp.isfinite(q).all(axis=(1, 2, 3)) & jnp.isfinite(k).all(axis=(1, 2, 3))
        scores = jnp.where(finite[:, None, None], scores, jnp.nan)  # a selection among NaNs may score well
        return causal_attention(q, k, v, lengths), scores

    positions = jnp.minimum(jnp.arange(tokens.shape[1], dtype=jnp.int32), lengths[:, None] - 1)
    _, scores = decoder(tokens, positions, attention, (None,) * decoder.config.num_layers)
    return jnp.stack(scores)


@functools.partial(jax.jit, static_argnames=("graphdef", "config"))
def _score_tokens(graphdef: Any, params: Any, tokens: Any, lengths: Any, config: TCAConfig) -> jax.Array:
    """`score_tokens` with the weights as arguments: closed over, they would be baked into the program."""
    return score_tokens(nnx.merge(graphdef, params), tokens, lengths, config)


def _mean_scores(
    lm: CalibratedModel, sequences: list[np.ndarray], config: TCAConfig, progress: Callable[[int, int], None]
) -> Float32[np.ndarray, "layers Hkv rows"]:
    """Scores averaged over the sequences, in float64."""
    graphdef, params = nnx.split(lm.decoder)
    shape = (lm.config.num_layers, lm.config.num_kv_heads, config.num_candidates + 1)
    total = np.zeros(shape, np.float64)
    progress(0, len(sequences))
    for done, ids in enumerate(sequences, start=1):
        tokens = np.zeros((1, bucket_length(len(ids))), np.int32)
        tokens[0, : len(ids)] = ids
        scores = _score_tokens(graphdef, params, tokens, np.array([len(ids)], np.int32), config)
        total += np.asarray(scores, np.float64)[:, 0]
        progress(done, len(sequences))
    return (total / len(sequences)).astype(np.float32)


def _validate_lengths(lengths: list[int], lm: CalibratedModel, config: TCAConfig) -> None:
    """Errors for texts too short or too long for any result, a warning for those that say little."""
    reach = config.window + config.block_size
    limit = lm.config.max_context
    for index, length in enumerate(lengths):
        if length < reach:
            raise ValueError(
                f"texts[{index}] has {length} tokens: calibration needs at least window + block_size = "
                f"{config.window} + {config.block_size} = {reach}; pass a longer text or a smaller window"
            )
        if length > limit:
            raise ValueError(
                f"texts[{index}] has {length} tokens, model {lm.name!r} has {limit} positions: split the text"
            )
    shortest = min(lengths)
    if shortest < 2 * reach:
        warnings.warn(
            f"texts[{lengths.index(shortest)}] has {shortest} tokens, fewer than 2 (window + block_size) = "
            f"{2 * reach}: few of its queries look past the window, so the budgets are uncertain",
            stacklevel=3,
        )


def _encode(lm: CalibratedModel, texts: Any) -> list[np.ndarray]:
    """Token ids of every text, int32."""
    if isinstance(texts, str | bytes) or (len(texts) and isinstance(texts[0], int | np.integer)):
        texts = [texts]
    if not len(texts):
        raise ValueError("texts is empty: calibration needs at least one text")
    return [_encode_text(lm, text, f"texts[{index}]") for index, text in enumerate(texts)]


def _encode_text(lm: CalibratedModel, text: Any, argument: str) -> np.ndarray:
    """Token ids of one text, int32; `argument` is its name in messages."""
    if isinstance(text, str | bytes):
        if lm.tokenizer is None:
            raise ValueError(f"{argument} is text, but model {lm.name!r} has no tokenizer: pass token ids")
        try:
            text = text.decode("utf-8") if isinstance(text, bytes) else text.encode("utf-8").decode("utf-8")
        except UnicodeError as error:
            raise ValueError(f"{argument} is not valid UTF-8 text: {error}") from None
        text = lm.tokenizer(text)["input_ids"] if text else []
    ids = np.asarray(text)
    if not ids.size:
        raise ValueError(f"{argument} is empty")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"{argument} must be text or a flat sequence of integer token ids")
    outside = ids[(ids < 0) | (ids >= lm.config.vocab_size)]
    if outside.size:
        raise ValueError(f"{argument} has token id {outside[0]}: must lie in [0, {lm.config.vocab_size})")
    return ids.astype(np.int32)
