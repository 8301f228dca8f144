"""What CAKE and DuoAttention need to know of a model: how much cache layers want, and how far back heads look."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from tca_jax.calibration.layer_programs import attention_program
from tca_jax.calibration.passes import ForwardPass
from tca_jax.calibration.profile import Profile
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, on_host
from tca_jax.engine.prompts import Prompt, encode_prompts
from tca_jax.errors import UserError
from tca_jax.methods.cake import layer_preference, observed_spread
from tca_jax.methods.checks import check_integer, check_number
from tca_jax.methods.queries import last_queries
from tca_jax.pallas_kernels.causal_attention import causal_attention


def layer_preferences(
    lm: LM, texts: Prompt | Sequence[Prompt], *, observation: int = 32, tau1: float = 1.0, tau2: float = 1.0
) -> Float32[np.ndarray, " layers"]:
    """CAKE's layer preferences, measured on texts of the user's, for `methods.cake`.

    One forward pass with full attention over each text. The paper tunes the temperatures for each model and budget
    (0.4 to 1.9); its code takes 1 where nothing is tuned.

    Args:
        lm: The model; its method plays no part.
        texts: One or several texts or sequences of token ids; best as long as the prompts to come, and of their kind.
        observation: Last queries of each text that are looked at, at least 2.
        tau1: Temperature of the entropy over tokens, in (0, 100].
        tau2: Temperature of the variance over queries, in (0, 100].

    Returns:
        Each layer's share of all preferences, the mean over texts; sums to 1.

    Raises:
        ValueError: a number is not allowed, a text is not longer than `observation` tokens or longer than the model's
            context, or the model computes NaN or infinity.
        TypeError: `texts` holds something else than text and token ids.
    """
    check_integer("observation", observation, at_least=2)
    for name, tau in (("tau1", tau1), ("tau2", tau2)):
        check_number(name, tau, above=0, at_most=100)
    sequences = encode_prompts(lm, texts, "texts")
    for i, ids in enumerate(sequences):
        if not observation < len(ids) <= lm.config.max_context:
            raise UserError(
                f"texts[{i}] has {len(ids)} tokens: must have more than observation = {observation} and at most the "
                f"{lm.config.max_context} positions of model {lm.name!r}"
            )
    shares = []
    for ids in sequences:
        layers = ForwardPass(lm, ids).layers(_spread_layer, observation=observation)
        preferences = np.array([layer_preference(on_host(each)[0], tau1, tau2) for each in layers], np.float64)
        if not np.isfinite(preferences).all():
            layer = int(np.argmin(np.isfinite(preferences)))
            raise UserError(f"model {lm.name!r} computes NaN or infinity in the attention of layer {layer}")
        shares.append(preferences / preferences.sum())
    return np.mean(shares, axis=0).astype(np.float32)


def head_gates(profile: Profile) -> Float32[np.ndarray, "layers Hkv"]:
    """Gates for `methods.duoattention` from a profile: what each head is worth to answers, over the largest worth.

    Raises:
        ValueError: the profile does not know what heads are worth.
    """
    worth = profile.keeping_worth
    if np.isnan(worth).any():
        raise UserError(
            f"profile of {profile.model_name!r} does not know what heads are worth: calibrate with criterion 'worth', "
            "or pass published gates"
        )
    return np.clip(worth / max(float(worth.max()), np.finfo(np.float32).tiny), 0, 1)


@functools.partial(attention_program, static=("observation",), donate=True, outputs=(SAME, SECOND_HEADS))
def _spread_layer(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    lengths: Int32[Array, " 1"],
    observation: int,
) -> tuple[Float[Array, "1 L Hq d"], Float32[Array, "1 Hkv 2"]]:
    """Full attention, and how it is spread."""
    spread = observed_spread(last_queries(q, lengths, observation), k, lengths)
    return causal_attention(q, k, v, lengths), spread
