"""calibrate: what every KV head needs of its candidates, measured on full attention over texts and their probes."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int32

from tca_jax.calibration.needs import Found, ReadProbe, find_needed
from tca_jax.calibration.passes import ForwardPass, score_layer, worst_layer
from tca_jax.calibration.probes import ProbedText, Probes, probe_kind, probed_texts
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.rows import choose_cache_rows, choose_candidates, densest_within, require_fit
from tca_jax.engine.buckets import bucket_length
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import Encoder, Prompt, encode_prompts
from tca_jax.methods.checks import is_finite_number
from tca_jax.methods.config import TCAConfig

_DEFAULT_CONFIG = TCAConfig()
# Nats a probe token below which a probe tells nothing. The small changes that a sparse reading makes to plain text come
# to 0.03 on a model of a few million weights; one answer token of a hundred adds up to 0.05; copies give more than 0.1.
_LEAST_NEED = 0.05


def calibrate(
    lm: LM,
    texts: Prompt | Sequence[Prompt],
    config: TCAConfig = _DEFAULT_CONFIG,
    *,
    probes: Probes = "copy",
    kept: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Finds two rows of budgets for every KV head (Algorithm 1 and probes).

    The prefill row is the sparsest candidate whose calibration score reaches `config.tau`. The cache row is the
    sparsest at or above it whose probe score reaches `config.tau_probe`: a probe is a passage behind the text that the
    model answers from far back. What it loses when all heads hold the sparsest row's tokens alone tells which of its
    tokens need more, and the derivative of these losses which heads would give that back (docs/method.md, "Probes").

    Args:
        lm: The model, from `tca_jax.load`. Its own profile, if it has one, plays no part.
        texts: One or several texts or sequences of token ids, each longer than the window. Best are some as
            long as the prompts to come, and of their kind, several for each kind of question. All are averaged.
        config: Hyperparameters, of calibration and of inference with the profile.
        probes: "copy": passages of the text again (any text will do); "text": the text's own last quarter; for each
            text a list of (question, answer) pairs, as text or as token ids; or None: the cache row is the prefill row.
            With `config.tau_probe` 0 nothing asks for copies, and none are read.
        kept: The largest mean share of the cache's tokens, in (0, 1], at the length of the longest text. As many heads
            are dense as fit, those of the worst probe scores first, beside the rows that reach `config.tau_probe`; if
            these alone do not fit, the others keep their prefill rows.
        progress: Called with (layers done, layers in all), summed over all passes, first with 0 done; the second number
            grows where texts must be read again, and where probes prove to tell nothing.

    Returns:
        The profile: both rows, all scores and what they were measured on.

    Raises:
        ValueError: a text is empty, not UTF-8, too short for the window or longer than the model's context,
            holds ids outside the vocabulary, or is text where the model has no tokenizer; the probes are not allowed or
            pass the model's positions; `kept` is not in (0, 1], comes without probes, or is less than window, reserve
            and prefill rows take, which are known once full attention has read the texts; or the model computes NaN or
            infinity.
        TypeError: `texts` or `probes` hold something else than text and token ids.

    Warns:
        UserWarning: a text has fewer than 2 (window + block_size) tokens, so few queries measured anything; or the
            probes do not matter to the model (it does not copy, does not know, or nothing far is asked for): the worst
            1% of the texts' queries take their place, which is safer and keeps more.
    """
    require_kept(kept, probes)
    if probe_kind(probes) == "copy" and config.tau_probe == 0 and kept is None:
        probes = None
    sequences = encode_prompts(lm, texts, "texts")
    for index, ids in enumerate(sequences):
        require_length(f"texts[{index}]", len(ids), lm, config)
    probed = probed_texts(lm, sequences, probes, config)
    tokens = max(text.text_tokens for text in probed)
    if kept is not None:
        require_fit(kept, tokens, config)
    if short := _short_text([text.text_tokens for text in probed], config):
        warnings.warn(short, stacklevel=2)
    steps = _Steps(sum(2 if text.num_probe else 1 for text in probed) * lm.config.num_layers, progress)
    measured = _measure(lm, probed, config, steps, kept=kept)
    counted = int(sum(text.counted.sum() for text in probed))
    found = measured.found
    fallback = found is not None and not found.enough
    if found is not None and fallback:
        warnings.warn(_useless_probes(lm, found.need, counted), stacklevel=2)
        worst = 1 - _worst_queries(lm, probed, config, steps)
        measured = dataclasses.replace(measured, probe_scores=worst)
    rows = _choose_rows(measured, config, kept, tokens)
    return Profile(
        **rows,
        scores=measured.scores.astype(np.float32),
        probes=None
        if found is None
        else {
            "kind": probe_kind(probes),
            "tokens": sum(text.num_probe for text in probed),
            "need": found.need,
            "rounds": found.rounds,
            "fallback": fallback,
            "kept": None if kept is None else float(kept),
        },
        config=config,
        fingerprint=lm.fingerprint,
        model_name=lm.name,
        sources=tuple(_source(text.ids[: text.text_tokens]) for text in probed),
    )


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What the passes over all texts measured.

    Attributes:
        scores: Calibration scores, the mean over the texts.
        prefill_rows: What these choose.
        probe_scores: Of every row; all 1 without probes.
        found: What the probes found; None without any.
    """

    scores: Float64[np.ndarray, "layers Hkv M1"]
    prefill_rows: Int32[np.ndarray, "layers Hkv"]
    probe_scores: Float64[np.ndarray, "layers Hkv M1"]
    found: Found | None


class _Steps:
    """Tells how many layers have run, of how many."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.done, self.total, self._progress = 0, total, progress or (lambda done, total: None)
        self._progress(0, total)

    def step(self) -> None:
        self.done += 1
        self.total = max(self.total, self.done)
        self._progress(self.done, self.total)


def _measure(lm: LM, texts: Sequence[ProbedText], config: TCAConfig, steps: _Steps, *, kept: float | None) -> _Measured:
    """A pass of full attention over each text, then rounds of reading the probes over what the rows so far keep."""
    shape = lm.config.num_layers, lm.config.num_kv_heads, config.num_candidates + 1
    scores, probes = np.zeros(shape), []
    longest = max(text.num_probe for text in texts)
    most = bucket_length(longest) if longest else 0  # one bucket for all: each is a program
    for text in texts:
        tokens, starts = jnp.array([text.text_tokens], jnp.int32), jnp.array([text.probe_start], jnp.int32)
        full = ForwardPass(lm, text.ids)
        masses = []
        for layer, (of_layer, mass) in enumerate(full.layers(score_layer, tokens, starts, config, most)):
            of_layer, mass = on_host((of_layer, mass))  # all texts' and layers' would crowd the device
            if not np.isfinite(of_layer).all():
                raise ValueError(f"model {lm.name!r} computes NaN or infinity in the attention of layer {layer}")
            scores[layer] += lm.own_heads(layer, of_layer)
            masses.append(lm.own_heads(layer, mass))
            steps.step()
        if text.num_probe:
            probes.append(ReadProbe(text, full.losses(text.probe_start, most), masses))
    scores /= len(texts)
    prefill = np.asarray(choose_candidates(jnp.asarray(scores, jnp.float32), config.tau))
    if kept is not None:  # said before the probes are read
        require_fit(kept, max(text.text_tokens for text in texts), config, prefill.ravel())
    if not probes:
        return _Measured(scores, prefill, np.ones(shape), None)
    found = find_needed(lm, probes, prefill, config, least=_LEAST_NEED, step=steps.step)
    return _Measured(scores, prefill, 1 - found.blame, found)


def _worst_queries(
    lm: LM, texts: Sequence[ProbedText], config: TCAConfig, steps: _Steps
) -> Float64[np.ndarray, "layers Hkv M1"]:
    """Mean dropped mass of the worst 1% of each text's queries behind a selection in its middle."""
    shape = lm.config.num_layers, lm.config.num_kv_heads, config.num_candidates + 1
    dropped, weight = np.zeros(shape), 0
    steps.total += lm.config.num_layers * len(texts)
    for text in texts:
        # A selection needs a ranked block to choose from.
        start = min(max(text.text_tokens // 2, config.window + config.block_size), text.text_tokens - 1)
        queries = text.text_tokens - start
        starts = jnp.array([start], jnp.int32)
        run = ForwardPass(lm, text.ids[: text.text_tokens])
        for layer, worst in enumerate(run.layers(worst_layer, starts, config, bucket_length(queries))):
            dropped[layer] += lm.own_heads(layer, on_host(worst)) * np.float64(queries)
            steps.step()
        weight += queries
    return dropped / weight


def _choose_rows(measured: _Measured, config: TCAConfig, kept: float | None, tokens: int) -> dict[str, Any]:
    """The fields of a profile that say what each head keeps, and by which probe scores."""
    prefill = measured.prefill_rows
    if measured.found is None:
        return {"candidates": prefill}
    scores = measured.probe_scores.astype(np.float32)
    cache = choose_cache_rows(scores, prefill, config.tau_probe)
    if kept is not None:
        cache = densest_within(kept, tokens, scores, prefill, config, cache)
    return {"candidates": cache, "prefill_candidates": prefill, "probe_scores": scores}


def _source(ids: list[int]) -> dict[str, Any]:
    return {"tokens": len(ids), "sha256": hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()}


def _useless_probes(lm: LM, need: float, tokens: int) -> str:
    """What to say of probes whose answers do not need the far context."""
    return (
        f"the probes do not matter to {lm.name!r}: without the far context the loss of their {tokens} "
        f"tokens rises by {need / max(1, tokens):.4f} nats each, less than {_LEAST_NEED}, so they "
        "cannot tell which heads look far. The worst 1% of the texts' queries take their place, and more is kept; "
        "(question, answer) pairs that the model answers from the text are better probes"
    )


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


def require_kept(kept: float | None, probes: Any) -> None:
    """Raises ValueError if `kept` is neither None nor a share, or there are no probes to rank heads by."""
    if kept is None:
        return
    if not is_finite_number(kept) or not 0 < kept <= 1:
        raise ValueError(f"kept = {kept!r}: must lie in (0, 1]")
    if probes is None:
        raise ValueError(f"kept = {kept}: needs probes, which say what heads are dense first; probes is None")


def _short_text(lengths: list[int], config: TCAConfig) -> str | None:
    """What to say of texts that give a result which says little."""
    reach, shortest = config.window + config.block_size, min(lengths)
    if shortest >= 2 * reach:
        return None
    return (
        f"texts[{lengths.index(shortest)}] has {shortest} tokens, fewer than 2 (window + block_size) = {2 * reach}: "
        "few of its queries look past the window, so the budgets are uncertain"
    )
