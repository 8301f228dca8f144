"""LM: a loaded model with its tokenizer and its head budgets, as one pytree."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from tca_jax.engine.cache import CacheLayout
from tca_jax.methods.config import TCAConfig
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import fingerprint
from tca_jax.pallas_kernels.integers import round_up

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["graphdef", "config", "tca", "candidates", "name", "tokenizer", "eos_token_ids", "pad_token_id"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class LM:
    """A language model ready to generate. Its weights are data, all else is static, so it passes through `jax.jit`.

    Attributes:
        params: Weights, the state of `Decoder`.
        graphdef: The decoder's static part.
        config: Architecture.
        tca: Hyperparameters of the profile, or None for exact full attention.
        candidates: Budget row of each KV head, `[layers][H_kv]`, or None for exact full attention.
        name: What it was loaded as; used in messages and in profiles.
        tokenizer: A transformers tokenizer, or None where the checkpoint has none.
        eos_token_ids: Tokens that end an answer.
        pad_token_id: Fills answers behind their end.
    """

    params: Any
    graphdef: Any
    config: ModelConfig
    tca: TCAConfig | None = None
    candidates: tuple[tuple[int, ...], ...] | None = None
    name: str = "model"
    tokenizer: Any = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0

    def __repr__(self) -> str:
        method = "full attention" if self.tca is None else repr(self.tca)
        return f"LM({self.name!r}, {self.config.family}, {self.config.num_layers} layers, {method})"

    @classmethod
    def from_decoder(cls, decoder: Decoder, **fields: Any) -> LM:
        """Wraps a decoder, for example one that was just trained."""
        graphdef, params = nnx.split(decoder)
        return cls(params=params, graphdef=graphdef, config=decoder.config, **fields)

    @property
    def decoder(self) -> Decoder:
        """The Flax NNX module over this LM's weights."""
        return nnx.merge(self.graphdef, self.params)

    def with_profile(self, profile: Profile | None) -> LM:
        """The same weights under another profile; None is exact full attention.

        Raises:
            ValueError: the profile belongs to another model or shape.
        """
        if profile is None:
            return dataclasses.replace(self, tca=None, candidates=None)
        profile.validate_for(self.config, fingerprint(self.decoder), self.name)
        candidates = tuple(tuple(int(c) for c in layer) for layer in profile.candidates)
        return dataclasses.replace(self, tca=profile.config, candidates=candidates)

    def cache_layouts(self, batch: int, prompt_tokens: int, max_new_tokens: int) -> tuple[CacheLayout, ...]:
        """Static cache shape of every layer. Full attention is TCA whose window holds prompt and answer."""
        if self.tca is None or self.candidates is None:
            b = TCAConfig().block_size
            tca = TCAConfig(block_size=b, window=round_up(prompt_tokens + max_new_tokens, b))
            candidates = ((tca.num_candidates,) * self.config.num_kv_heads,) * self.config.num_layers
        else:
            tca, candidates = self.tca, self.candidates
        return tuple(CacheLayout.plan(tca, row, batch, prompt_tokens, max_new_tokens) for row in candidates)
