"""LM: a loaded model with its tokenizer and its attention method, as one pytree."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from tca_jax.engine.layouts import CacheLayout
from tca_jax.methods import BASELINE, Method, get
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.rope import fixed_frequencies


@runtime_checkable
class ProfileLike(Protocol):
    """What an LM needs of a profile; `tca_jax.Profile` has it."""

    def validate_for(self, model_config: ModelConfig, fingerprint: str | None, name: str) -> None: ...

    def method(self) -> Method: ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=[
        "graphdef",
        "config",
        "method",
        "name",
        "tokenizer",
        "eos_token_ids",
        "pad_token_id",
        "checkpoint_fingerprint",
    ],
)
@dataclasses.dataclass(frozen=True, repr=False)
class LM:
    """A language model ready to generate. Its weights are data, all else is static, so it passes through `jax.jit`.

    Attributes:
        params: Weights, the state of `Decoder`.
        graphdef: The decoder's static part.
        config: Architecture.
        method: Attention method; exact full attention until another one is given.
        name: What it was loaded as; used in messages and in profiles.
        tokenizer: A transformers tokenizer, or None where the checkpoint has none.
        eos_token_ids: Tokens that end an answer.
        pad_token_id: Fills answers behind their end.
        checkpoint_fingerprint: Fingerprint of the weights as stored, where the loaded ones no longer tell it.
    """

    params: Any
    graphdef: Any
    config: ModelConfig
    method: Method = BASELINE
    name: str = "model"
    tokenizer: Any = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    checkpoint_fingerprint: str | None = None

    def __repr__(self) -> str:
        return f"LM({self.name!r}, {self.config.family}, {self.config.num_layers} layers, {self.method.name})"

    @classmethod
    def from_decoder(cls, decoder: Decoder, **fields: Any) -> LM:
        """Wraps a decoder, for example one that was just trained."""
        graphdef, params = nnx.split(decoder)
        return cls(params=params, graphdef=graphdef, config=decoder.config, **fields)

    @property
    def decoder(self) -> Decoder:
        """The Flax NNX module over this LM's weights."""
        return nnx.merge(self.graphdef, self.params)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of architecture and weights, which profiles carry; reads all weights where they lie, once."""
        return self.checkpoint_fingerprint or fingerprint(self.decoder)

    @functools.cached_property
    def dtype(self) -> jnp.dtype:
        """What the model computes in, and its cache holds."""
        return self.decoder.dtype

    def with_method(self, method: Method | str, **options: Any) -> LM:
        """The same weights under another attention method.

        Args:
            method: A method, or the name of a registered one, such as "streaming" or "full+streaming".
            **options: Options of a method that is given by its name.

        Raises:
            ValueError: the name or an option is unknown, or the method does not fit the model's shape.
            TypeError: `method` is neither, or options come with a method that is made already.
        """
        if isinstance(method, str):
            method = get(method, **options)
        elif not isinstance(method, Method):
            raise TypeError(f"method is a {type(method).__name__}: must be a tca_jax.methods.Method or a name")
        elif options:
            raise TypeError(f"options {sorted(options)} go with a method's name; {method.name!r} is made already")
        method.validate_for(self.config.num_layers, self.config.num_kv_heads)
        method = method.for_rope(fixed_frequencies(self.config.head_dim, self.config.rope))
        return self._beside(method=method)

    def with_profile(self, profile: ProfileLike | None) -> LM:
        """The same weights under a profile's method; None is exact full attention.

        Raises:
            ValueError: the profile belongs to another model or shape.
        """
        if profile is None:
            return self.with_method(BASELINE)
        profile.validate_for(self.config, self.fingerprint, self.name)
        return self.with_method(profile.method())

    def for_programs(self) -> LM:
        """The model without what programs do not depend on, so that another tokenizer or name compiles nothing."""
        return self._beside(name="", tokenizer=None, eos_token_ids=(), checkpoint_fingerprint=None)

    def for_contexts(self) -> LM:
        """The model under its method with a cache that any number of tokens can follow; see `Context`."""
        cache = self.method.cache.for_contexts()
        return self._beside(method=dataclasses.replace(self.method, cache=cache))

    def _beside(self, **changes: Any) -> LM:
        """Another one over the same weights, which knows of them what this one has found out.

        A fingerprint takes a read of all weights; to merge a deep model takes milliseconds.
        """
        other = dataclasses.replace(self, **changes)
        vars(other).update({name: vars(self)[name] for name in ("fingerprint", "dtype") if name in vars(self)})
        return other

    def cache_layouts(self, batch: int, prompt_tokens: int, new_tokens: int | None) -> tuple[CacheLayout, ...]:
        """Static cache shape of every layer, for padded prompts and answers of at most so many tokens; None for a
        context, which any number of tokens can follow."""
        sizes = self.config.num_kv_heads, batch, prompt_tokens, new_tokens
        return tuple(CacheLayout.plan(self.method.cache, layer, *sizes) for layer in range(self.config.num_layers))
