"""calibrate: how every KV head reads a prompt and what its cache keeps, by the loss that a head's missing costs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.calibration.probes import Probes, probe_kinds, probed_texts
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.scores import calibration_scores, choose_candidates
from tca_jax.calibration.worth import Keeping, Reading, choose_keeping, choose_reading
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import SAME, on_host
from tca_jax.engine.prompts import Encoder, Prompt, encode_prompts
from tca_jax.errors import is_finite_number, least_share, require, require_type
from tca_jax.layer_passes import HEADS, TextPass, attention_program
from tca_jax.methods.candidates import kept_share
from tca_jax.methods.config import Criterion, TCAConfig
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.progress import progress as show_progress

_DEFAULT_CONFIG = TCAConfig()
Progress = Callable[[int, int], None]


def calibrate(
    lm: LM,
    texts: Prompt | Sequence[Prompt],
    config: TCAConfig = _DEFAULT_CONFIG,
    *,
    probes: Probes = None,
    kept: float | None = None,
    attended: float | None = None,
    criterion: Criterion | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Finds a reading and a cache row for every KV head: a head is worth the loss that its missing costs.

    Two searches of one form (docs/method.md, "What a head is worth"). First the heads that must read blocks for the
    loss inside the texts to stay within `config.read_tolerance`; then those that must keep more than row 0 for answers
    behind the texts to stay within `config.keep_tolerance`. With another criterion: Algorithm 1, one row a head.

    Args:
        lm: The model, from `tca_jax.load`. Its own profile, if it has one, plays no part.
        texts: One or several texts or sequences of token ids, each longer than the window. Best are some as
            long as the prompts to come, and of their kind. All are averaged.
        config: Hyperparameters, of calibration and of inference with the profile.
        probes: "facts": facts of the library's own making, hidden in the texts and asked for; "copy": passages of the
            texts again; both, a list, which is the default; or for each text a list of (question, answer) pairs, as
            text or as token ids. Tokens of answers count that full attention knows and row 0 loses.
        kept: The largest mean share of the cache's tokens, in (0, 1], behind the longest text without its last tokens,
            which are a probe: heads become denser in the order of their worth as long as they fit.
        attended: The same for the share of the texts' pairs (query, key) that heads attend to while they are read.
        criterion: "worth", "retained_mass" or "column_mean"; None for `config.criterion`.
        progress: Called with (layers done, layers in all), summed over all passes, first with 0 done; the second number
            is an estimate that grows where searches take longer. None writes to standard error: a bar on a terminal,
            lines in a log.

    Returns:
        The profile: readings, rows, what heads are worth, the losses, and what they were measured on.

    Raises:
        ValueError: a text is empty, not UTF-8, too short for the window or longer than the model's context,
            holds ids outside the vocabulary, or is text where the model has no tokenizer; the probes are not allowed or
            pass the model's positions; a bound is not in (0, 1], is less than row 0 in every head takes, or comes
            with a criterion that has no searches; or the model computes NaN or infinity.
        TypeError: `texts` or `probes` hold something else than text and token ids.

    Warns:
        UserWarning: a text has fewer than 2 (window + block_size) tokens, so few queries measured anything; no probe is
            informative, so heads that read blocks keep all tokens, as far as `kept` allows; or a search ends above
            its tolerance.
    """
    require_lm(lm)
    require_type("config", config, TCAConfig, "a TCAConfig")
    config = config if criterion is None else dataclasses.replace(config, criterion=criterion)
    require_bounds(config, probes=probes, kept=kept, attended=attended)
    sequences = encode_prompts(lm, texts, "texts")
    for index, ids in enumerate(sequences):
        require_length(f"texts[{index}]", len(ids), lm, config)
    if short := _short_text([len(ids) for ids in sequences], config):
        warnings.warn(short, stacklevel=2)
    found: dict[str, Any] = {"config": config, "fingerprint": lm.fingerprint, "model_name": lm.name}
    found["sources"] = tuple(_source(ids) for ids in sequences)
    if config.criterion != "worth":
        with _counted(lm, len(sequences), progress) as steps:
            return _by_scores(lm, sequences, config, steps, found)
    probed, kinds = probed_texts(lm, sequences, probes, config), probe_kinds(probes)
    if kept is not None:
        require_fit(kept, max(len(text.ids) for text in probed), config)
    with _counted(lm, _LIKELY_PASSES * len(sequences), progress) as steps:
        reading = choose_reading(lm, sequences, config, attended=attended, step=steps.step)
        blocks = reading.found.more
        keeping = choose_keeping(lm, probed, blocks, config, kinds=kinds, kept=kept, step=steps.step)
        steps.finish()
    bounds = {"kept": kept, "attended": attended}
    for text in _unexplained(lm, reading, keeping, kinds, bounds):
        warnings.warn(text, stacklevel=2)
    return _profile_of(reading, keeping, max(map(len, sequences)), bounds, found)


def _profile_of(
    reading: Reading, keeping: Keeping, tokens: int, bounds: dict[str, float | None], found: dict[str, Any]
) -> Profile:
    """The profile of both searches' results; `tokens` of the longest text."""
    config, blocks = found["config"], reading.found.more
    losses = {"inside": reading.losses, "answers": keeping.answers, "following": keeping.following}
    return Profile(
        candidates=keeping.rows,
        scores=np.full((*blocks.shape, config.num_candidates + 1), np.nan, np.float32),
        readings=np.where(blocks, "blocks" if config.num_ranked_blocks(tokens) > config.fetch else "dense", "sparse"),
        prefill_candidates=np.where(blocks, keeping.rows, 0),
        reading_worth=reading.found.worth,
        keeping_worth=keeping.found.worth,
        losses={name: dataclasses.asdict(of_name) for name, of_name in losses.items() if of_name is not None},
        probes={"counted": keeping.counted, **bounds},
        **found,
    )


_LIKELY_PASSES = 10  # over each text, in both searches


@contextlib.contextmanager
def _counted(lm: LM, passes: int, progress: Progress | None) -> Iterator[_Steps]:
    """Counts layers for the caller's `progress`, or on standard error."""
    if progress is not None:
        yield _Steps(passes * lm.config.num_layers, progress)
        return
    with show_progress(log=True) as report:
        yield _Steps(passes * lm.config.num_layers, functools.partial(report, f"calibrating {lm.name}"))


class _Steps:
    """Tells how many layers have run, of how many."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.done, self.total, self._progress = 0, total, progress
        self._progress(0, total)

    def step(self) -> None:
        self.done += 1
        self.total = max(self.total, self.done)
        self._progress(self.done, self.total)

    def finish(self) -> None:
        """All has run, if fewer layers than was thought."""
        self._progress(self.done, self.done)


def _by_scores(
    lm: LM, sequences: Sequence[list[int]], config: TCAConfig, steps: _Steps, found: dict[str, Any]
) -> Profile:
    """Algorithm 1: the sparsest candidate of every head whose score reaches tau."""
    scores = np.zeros((lm.config.num_layers, lm.config.num_kv_heads, config.num_candidates + 1))

    def numbers(layer: int) -> tuple[Array]:
        return (jnp.asarray(lm.head_numbers(layer)),)

    for ids in sequences:
        layers = TextPass(lm, ids, steps.step).layers(_score_layer, numbers, config=config)
        for layer, of_layer in enumerate(layers):
            of_layer = on_host(of_layer)  # all texts' and layers' would crowd the device
            where = f"the attention of layer {layer}"
            require(np.isfinite(of_layer).all(), f"model {lm.name!r} computes NaN or infinity in {where}")
            scores[layer] += lm.in_model_order(layer, of_layer)
    scores = (scores / len(sequences)).astype(np.float32)
    rows = np.asarray(choose_candidates(jnp.asarray(scores), config.tau))
    return Profile(candidates=rows, scores=scores, **found)


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


def _source(ids: Sequence[int]) -> dict[str, Any]:
    return {"tokens": len(ids), "sha256": hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()}


def _unexplained(
    lm: LM, reading: Reading, keeping: Keeping, kinds: tuple[str, ...], bounds: dict[str, float | None]
) -> Iterator[str]:
    """Warnings of searches that end above their tolerance or have no probes to measure."""
    kept = "" if bounds["kept"] is None else f", those of most worth first, up to kept = {bounds['kept']}"
    if not any(keeping.counted.values()):
        yield (
            f"no probe is informative for {lm.name!r}: of {keeping.known} answers ({', '.join(kinds)}) that full "
            f"attention knows, the smallest budget loses {keeping.lost} (5 needed), so heads that read blocks keep all "
            f"tokens{kept}; pass (question, answer) pairs that the model answers from the text"
        )
    ends = (
        ("inside the texts", reading.found.excess, reading.losses),
        ("of answers and of what follows a text", keeping.found.excess, keeping.answers or keeping.following),
    )
    for where, excess, losses in ends:
        if excess > 1 and losses is not None and bounds == {"kept": None, "attended": None}:
            yield f"the loss {where} stays above its tolerance: {losses}; no single head gives more of it back"


def require_length(name: str, tokens: int, lm: Encoder, config: TCAConfig) -> None:
    """Raises ValueError if a text is too short or too long for any result; `name` is the text's in the message."""
    fewest, most = config.window + config.block_size, lm.config.max_context
    needed = f"{fewest} (window + block_size = {config.window} + {config.block_size})"
    must = f"calibration needs {needed}, at most {most} (positions of {lm.name!r})"
    require(fewest <= tokens <= most, f"{name} has {tokens} tokens: {must}")


def require_bounds(config: TCAConfig, *, probes: Any, kept: float | None, attended: float | None) -> None:
    """Raises ValueError if a bound is neither None nor a share, or the criterion takes neither bounds nor probes."""
    for name, given in (("probes", probes), ("kept", kept), ("attended", attended)):
        is_share = name == "probes" or given is None or (is_finite_number(given) and 0 < given <= 1)
        require(is_share, f"{name} = {given!r}: must lie in (0, 1]")
        fits = given is None or config.criterion == "worth"
        require(fits, f"{name} goes with criterion 'worth', not with {config.criterion!r}, which has no search")


def require_fit(kept: float, tokens: int, config: TCAConfig) -> None:
    """Raises ValueError if the smallest budget in every head exceeds a kept share of a cache of `tokens` tokens."""
    row0 = np.zeros(1, np.int32)
    least = kept_share(config, tokens, row0, row0).mean()
    must = f"must be at least {least_share(least)}, which window, reserve and candidate 0 take"
    require(least <= kept, f"kept = {kept}: {must} of the cache of {tokens} tokens; a smaller window takes less")


def _short_text(lengths: list[int], config: TCAConfig) -> str | None:
    """A warning about texts that are too short for a certain result."""
    reach, shortest = config.window + config.block_size, min(lengths)
    if shortest >= 2 * reach:
        return None
    return (
        f"texts[{lengths.index(shortest)}] has {shortest} tokens, fewer than 2 (window + block_size) = {2 * reach}: "
        "few of its queries look past the window, so what is found is uncertain"
    )
