"""calibrate: predicted worth, or the paper's scores of every candidate and the sparsest that reaches a threshold."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.calibration.predicted_worth import Progress
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.scores import calibration_scores, choose_candidates
from tca_jax.calibration.worth_profile import COUNT, TOKENS, WorthProfile, calibrate_worth, sources_of
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import SAME, on_host
from tca_jax.engine.prompts import Encoder, Prompt, encode_prompts
from tca_jax.errors import require, require_type
from tca_jax.layer_passes import HEADS, TextPass, attention_program
from tca_jax.methods.config import TCAConfig
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.progress import progress as show_progress


def calibrate(
    lm: LM,
    texts: Prompt | Sequence[Prompt],
    config: TCAConfig | None = None,
    *,
    count: int = COUNT,
    tokens: int = TOKENS,
    kept: float | None = None,
    progress: Progress | None = None,
) -> Profile | WorthProfile:
    """Calibrates predicted worth, or with a config the budgets of the paper's rule.

    Without a config: maps of hidden states to the worth of tokens are fitted on half of the texts; the other half
    measures answers and losses at several kept shares (docs/worth.md). With a config: Algorithm 1 of the paper, the
    sparsest candidate of every head whose mean score over the texts reaches `config.tau` (docs/method.md).

    Args:
        lm: The model, from `tca_jax.load`; for predicted worth on one device. Its own profile plays no part.
        texts: One or several texts or sequences of token ids, best of the kind of the prompts to come. Predicted worth
            packs short texts and cuts long ones, or splits them where there are fewer than `count`. The paper's rule
            takes them as they are, each longer than the window.
        config: Hyperparameters of the paper's rule, such as `TCAConfig.paper()`; None for predicted worth.
        count: Texts that predicted worth makes of them.
        tokens: Tokens of each; fewer where the model's positions do not hold a text and the repetition of a part.
        kept: Share of all heads' tokens that stays, in (0, 1]; None for the smallest measured one that holds 97% of the
            hidden facts (as the rule of succession expects) and keeps the following text's loss within 1%.
        progress: Called as `progress(stage, done, total)`. None writes to standard error: a bar on a terminal, lines in
            a log.

    Returns:
        A `WorthProfile`, or with a config a `Profile`.

    Raises:
        ValueError: a text is empty, not UTF-8, holds ids outside the vocabulary, or is text where the model has no
            tokenizer; the texts have too few tokens (with the number that is missing), or one has too few for the
            window or more than the model's positions; `count`, `tokens` or `kept` is not allowed, or comes with a
            config; the model is on a mesh, without a config; the model computes NaN or infinity.
        TypeError: `texts` hold something else than text and token ids.

    Warns:
        UserWarning: the measurements do not explain the kept share, or a text has few tokens behind the window.
    """
    require_lm(lm)
    with contextlib.nullcontext(progress) if progress else show_progress(log=True) as report:
        if config is None:
            return calibrate_worth(lm, texts, count, tokens, kept, report)
        require_type("config", config, TCAConfig, "a TCAConfig")
        for name, given, default in (("count", count, COUNT), ("tokens", tokens, TOKENS), ("kept", kept, None)):
            require(given == default, f"{name} = {given!r}: goes with predicted worth; leave out config")
        sequences = encode_prompts(lm, texts, "texts")
        for index, ids in enumerate(sequences):
            require_length(f"texts[{index}]", len(ids), lm, config)
        shortest, least = min(sequences, key=len), 2 * (config.window + config.block_size)
        if len(shortest) < least:
            short = f"texts[{sequences.index(shortest)}] has {len(shortest)} tokens, fewer than"
            few = "few of its queries look past the window, so scores are uncertain"
            warnings.warn(f"{short} 2 (window + block_size) = {least}: {few}", stacklevel=2)
        return _by_scores(lm, sequences, config, report)


def _by_scores(lm: LM, sequences: Sequence[list[int]], config: TCAConfig, progress: Progress) -> Profile:
    """Algorithm 1: the sparsest candidate of every head whose score reaches tau."""
    scores = np.zeros((lm.config.num_layers, lm.config.num_kv_heads, config.num_candidates + 1))
    total = len(sequences) * lm.config.num_layers
    progress(f"calibrating {lm.name}", 0, total)

    for done, ids in enumerate(sequences):
        layers = TextPass(lm, ids).layers(_score_layer, lambda n: (jnp.asarray(lm.head_numbers(n)),), config=config)
        for layer, of_layer in enumerate(layers):
            of_layer = on_host(of_layer)  # all texts' and layers' would crowd the device
            where = f"the attention of layer {layer}"
            require(np.isfinite(of_layer).all(), f"model {lm.name!r} computes NaN or infinity in {where}")
            scores[layer] += lm.in_model_order(layer, of_layer)
            progress(f"calibrating {lm.name}", done * lm.config.num_layers + layer + 1, total)
    scores = (scores / len(sequences)).astype(np.float32)
    rows = np.asarray(choose_candidates(jnp.asarray(scores), config.tau))
    return Profile(rows, scores, config, lm.fingerprint, lm.name, sources_of(sequences))


@functools.partial(attention_program, static=("config",), donate=True, inputs=(HEADS,), outputs=(SAME, HEADS))
def _score_layer(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    numbers: Int32[Array, " Hkv"],
    lengths: Int32[Array, " 1"],
    config: TCAConfig,
) -> tuple[Float[Array, "1 L Hq d"], Float32[Array, "Hkv M1"]]:
    """Full attention, and calibration scores; NaN where a query or key is not finite."""
    scores = calibration_scores(q, k, lengths, config, heads=numbers)[0]
    finite = jnp.isfinite(q).all() & jnp.isfinite(k).all()  # a selection among NaNs may score well
    return causal_attention(q, k, v, lengths), jnp.where(finite, scores, jnp.nan)


def require_length(name: str, tokens: int, lm: Encoder, config: TCAConfig) -> None:
    """Raises ValueError if a text is too short or too long for any result; `name` is the text's in the message."""
    fewest, most = config.window + config.block_size, lm.config.max_context
    needed = f"{fewest} (window + block_size = {config.window} + {config.block_size})"
    must = f"calibration needs {needed}, at most {most} (positions of {lm.name!r})"
    require(fewest <= tokens <= most, f"{name} has {tokens} tokens: {must}")
