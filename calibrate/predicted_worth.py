"""Predicted worth: a linear map of the hidden state for each KV head, fitted in closed form (docs/worth.md)."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from tca_jax.calibration import repetition
from tca_jax.calibration.repetition import CHUNK, TARGETS, LayerInputs, LayerTargets, chat_frame
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import Encoder, encode_verbatim
from tca_jax.errors import UserError, require

RIDGE = 3e-3  # of the Gram matrix's diagonal
FLOOR = 1e-7  # of targets, before their logarithms
SHARES = np.geomspace(1e-3, 1, 301)  # kept shares whose thresholds a fit holds
_NOTHING = -1e9  # prediction of a head without a map: it selects nothing
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class WorthMaps:
    """Maps of hidden states to predicted logarithms of a target, for each KV head."""

    maps: Float32[np.ndarray, "layers Hkv D1"]  # the last entry is the constant
    thresholds: Float32[np.ndarray, " 301"]  # of predictions that the share `SHARES` of all heads' tokens reach
    head_weights: Float32[np.ndarray, "layers Hkv"]  # mean of |dm/do| |v|, geometric mean 1
    correlation: Float32[np.ndarray, "layers Hkv"]  # of predictions and targets, on texts that were not fitted
    shares: Float32[np.ndarray, "layers Hkv"]  # of each head's tokens above the threshold of share 0.2

    def threshold(self, share: float) -> float:
        """The prediction that `share` of all heads' tokens reach, on texts that were not fitted; -inf for 1."""
        return -np.inf if share == 1 else float(np.interp(np.log(share), np.log(SHARES), self.thresholds))


def pack_texts(lm: Encoder, texts: Iterable[str | Sequence[int]], count: int, tokens: int) -> list[list[int]]:
    """Token ids of `count` texts of `tokens` each: shorter texts are packed, longer ones cut.

    Each one begins as a user's text in the chat template does. ValueError if tokens are missing, with their number.
    """
    opening, packed, text = chat_frame(lm)[0], list[list[int]](), list[int]()
    size = tokens - len(opening)
    require(size > 0, f"the chat template of {lm.name} takes {len(opening):,} of tokens = {tokens:,}: raise tokens")
    for each in texts:
        ids = encode_verbatim(lm, each, "texts") if isinstance(each, str) else each
        text = [*text, *ids][:size]
        if len(text) == size:
            packed.append([*opening, *text])
            text = []
        if len(packed) == count:
            return packed
    missing = (count - len(packed)) * size - len(text)
    few = f"texts have {missing:,} tokens too few for {count} texts of {tokens:,}"
    raise UserError(f"{few}: pass more text, or lower count or tokens")


def fit_worth(
    lm: LM,
    texts: Sequence[Sequence[int]],
    *,
    targets: Sequence[str] = TARGETS[:1],
    chunk: int = CHUNK,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, WorthMaps]:
    """Fits maps for each of `targets` on the first half of the texts; measures them on the others.

    Texts are of `pack_texts`, at least two, each of at least two chunks, with positions left for a chunk's repetition.
    """
    request, fitted = repetition.repetition_request(lm), len(texts) // 2
    width, columns = lm.config.hidden_size + 1, lm.config.num_kv_heads * len(targets)
    sums = [_Sums(jnp.zeros((width, width)), jnp.zeros((width, columns)))] * lm.config.num_layers
    weights = np.zeros((lm.config.num_layers, lm.config.num_kv_heads))
    places = np.array([TARGETS.index(name) for name in targets])

    def targets_of(ids: Sequence[int], layers: list[LayerInputs]) -> list[LayerTargets]:
        """Targets of a text in all layers."""
        rows = repetition.repetition_rows(ids, request, chunk)
        found = dict(repetition.text_targets(lm, ids, layers, rows))
        return [found[i]._replace(values=found[i].values[places, :, : len(ids)]) for i in range(len(layers))]

    for done, ids in enumerate(texts[:fitted]):
        layers = repetition.read_inputs(lm, ids)
        for number, (values, weight) in enumerate(targets_of(ids, layers)):
            sums[number] = _add(sums[number], layers[number].x[0, : len(ids)], values)
            weights[number] += on_host(weight)
        progress("fitting maps", done + 1, fitted)
    maps = _finite(on_host(jnp.stack([_solve(each) for each in sums])))
    maps = maps.reshape(len(sums), len(targets), -1, maps.shape[-1])
    # Of each text: [layers, targets, Hkv, L], and without the last axis.
    predictions, correlations = list[np.ndarray](), list[np.ndarray]()
    for done, ids in enumerate(texts[fitted:]):
        layers = repetition.read_inputs(lm, ids)
        logs = np.stack([on_host(_logs(values)) for values, _ in targets_of(ids, layers)])
        pairs = zip(maps, layers, strict=True)
        found = [[on_host(predict(each, x)) for each in of_layer] for of_layer, (x, *_) in pairs]
        predictions.append(np.array(found)[..., : len(ids)])
        correlations.append(_correlation(logs, predictions[-1]))
        progress("measuring maps", done + 1, len(texts) - fitted)
    predicted, correlation = np.concatenate(predictions, axis=-1), np.mean(correlations, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights /= np.exp(np.mean(np.log(weights[weights > 0])))
    weights, fits = weights.astype(np.float32), dict[str, WorthMaps]()
    for target, name in enumerate(targets):
        thresholds = np.quantile(predicted[:, target], 1 - SHARES).astype(np.float32)
        of_target = WorthMaps(maps[:, target], thresholds, weights, correlation[:, target], weights)
        shares = (predicted[:, target] >= of_target.threshold(0.2)).mean(axis=-1)
        fits[name] = dataclasses.replace(of_target, shares=shares.astype(np.float32))
    return fits


@jax.jit
def predict(maps: Float32[Array, "Hkv D1"], x: Float[Array, "1 L D"]) -> Float32[Array, "Hkv L"]:
    """Predictions of a layer's heads for hidden states."""
    return (x[0].astype(jnp.float32) @ maps[:, :-1].T + maps[:, -1]).T


class _Sums(NamedTuple):
    gram: Float32[Array, "D1 D1"]  # of hidden states and a column of ones
    right: Float32[Array, "D1 T"]  # their products with the logarithms of targets


def _logs(values: Float32[Array, "T Hkv L"]) -> Float32[Array, "T Hkv L"]:
    return jnp.log(jnp.maximum(values, FLOOR))


@jax.jit
def _add(sums: _Sums, x: Float[Array, "L D"], values: Float32[Array, "T Hkv L"]) -> _Sums:
    wide = jnp.concatenate([x.astype(jnp.float32), jnp.ones((len(x), 1))], axis=1)
    logs = _logs(values).reshape(-1, len(x)).T
    product = functools.partial(jnp.einsum, "lf,lg->fg", precision="highest")
    return _Sums(sums.gram + product(wide, wide), sums.right + product(wide, logs))


@jax.jit
def _solve(sums: _Sums) -> Float32[Array, "T D1"]:
    """Ridge regression; the constant is not shrunk, columns without variance are held by the mean of the diagonal."""
    diagonal = jnp.diag(sums.gram)
    ridge = jnp.append(RIDGE * diagonal[:-1] + 1e-6 * diagonal.mean(), 1e-6)
    return jax.scipy.linalg.solve(sums.gram + jnp.diag(ridge), sums.right, assume_a="pos").T


def _finite(maps: Float32[np.ndarray, "layers T D1"]) -> Float32[np.ndarray, "layers T D1"]:
    """Maps without those that are NaN or infinite; warns of them."""
    broken = ~np.isfinite(maps).all(axis=-1, keepdims=True)
    if broken.any():
        warnings.warn(f"{broken.sum()} of {broken.size} maps are not finite: their heads keep the window", stacklevel=3)
    nothing = np.append(np.zeros(maps.shape[-1] - 1, np.float32), np.float32(_NOTHING))
    return np.where(broken, nothing, maps)


def _correlation(
    logs: Float32[np.ndarray, "layers T Hkv L"], predicted: Float32[np.ndarray, "layers T Hkv L"]
) -> Float32[np.ndarray, "layers T Hkv"]:
    a, b = (each - each.mean(axis=-1, keepdims=True) for each in (logs, predicted))
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a * b).sum(axis=-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
