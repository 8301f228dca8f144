"""LM: a loaded model with its tokenizer and its attention method, as one pytree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from tca_jax import programs
from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.mesh import STATIC, HeadShards, Orders, mesh_name
from tca_jax.engine.prompts import TokenizerWording
from tca_jax.errors import UserTypeError, require, require_type
from tca_jax.methods.base import Heads, Method
from tca_jax.methods.full import BASELINE
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder, DecoderLayer
from tca_jax.models.names import MODEL
from tca_jax.models.rope import fixed_frequencies
from tca_jax.models.sharding import axis_size, check_mesh, device_graphdef, parameter_specs, shard_decoder, whole_mesh
from tca_jax.pallas_kernels.backends import Backend, can_run, resolve_backend
from tca_jax.pallas_kernels.kv import CODES, num_bytes

#: What keys and values may be stored in, and prompts attend in, beside the model's own dtype, by the users' name.
KV = MappingProxyType({"fp8": CODES})


@runtime_checkable
class ProfileLike(Protocol):
    """The part of a profile that an LM uses; `tca_jax.Profile` implements it."""

    def validate_for(self, model_config: ModelConfig, fingerprint: str | None, name: str) -> None: ...

    def method(self) -> Method: ...

    def settings(self) -> Any: ...


@jax.tree_util.register_dataclass
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
        mesh: The devices that share the model, of axes "data" and "model"; None for one device.
        head_orders: On a mesh, the KV heads of each layer as they lie on its devices, `[layers][H_kv]`. Weights and
            caches are in this order; what users see is in the model's own.
        kv: What keys and values are stored in: "fp8", or None for `dtype`.
        attention: What prompts attend in: "fp8", or None for `dtype`.
        layer_graphdef: Static part of a decoder layer, the same for all; on a mesh, of a device.
        settings: Arrays of the method, whose first axis is the layers; None for methods without.
    """

    params: Any
    graphdef: Any = dataclasses.field(metadata=STATIC)
    config: ModelConfig = dataclasses.field(metadata=STATIC)
    method: Method = dataclasses.field(default=BASELINE, metadata=STATIC)
    name: str = dataclasses.field(default="model", metadata=STATIC)
    tokenizer: Any = dataclasses.field(default=None, metadata=STATIC)
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), metadata=STATIC)
    pad_token_id: int = dataclasses.field(default=0, metadata=STATIC)
    checkpoint_fingerprint: str | None = dataclasses.field(default=None, metadata=STATIC)
    mesh: Mesh | None = dataclasses.field(default=None, metadata=STATIC)
    head_orders: Orders | None = dataclasses.field(default=None, metadata=STATIC)
    kv: str | None = dataclasses.field(default=None, metadata=STATIC)
    attention: str | None = dataclasses.field(default=None, metadata=STATIC)
    layer_graphdef: Any = dataclasses.field(default=None, metadata=STATIC)
    settings: Any = None

    def __repr__(self) -> str:
        mesh = "" if self.mesh is None else f", mesh {mesh_name(self.mesh)}"
        stored = "".join(f", {name} {value}" for name in ("kv", "attention") if (value := getattr(self, name)))
        layers = f"{self.config.num_layers} layers, {self.method.name}"
        return f"LM({self.name!r}, {self.config.family}, {layers}{mesh}{stored})"

    @classmethod
    def from_decoder(
        cls, decoder: Decoder, *, mesh: Mesh | None = None, head_orders: Orders | None = None, **fields: Any
    ) -> LM:
        """Wraps a decoder, for example one that was just trained.

        Args:
            decoder: The model, on one device, or on the mesh already.
            mesh: Devices that share it, with axes "data" and "model", in any order, or one of them.
            head_orders: Orders that the KV heads of a model for a mesh are in already; None for its own.
            **fields: Further attributes.

        Raises:
            ValueError: the mesh does not fit the model, or `kv` or `attention` is not allowed.
        """
        config = decoder.config
        kv = fields.get("kv")
        require(kv in (None, *KV), f"kv = {kv!r}: must be one of {list(KV)}, or None")
        check_attention(fields.get("attention"), config, decoder.dtype)
        if mesh is not None:
            check_mesh(mesh, config, fields.get("name", "the model"))
            mesh = whole_mesh(mesh)
            decoder = shard_decoder(decoder, mesh)
            fields["head_orders"] = head_orders or (tuple(range(config.num_kv_heads)),) * config.num_layers
        graphdef, params = nnx.split(decoder)
        lm = cls(params=params, graphdef=graphdef, config=config, mesh=mesh, **fields)
        of_device = lm if mesh is None else lm.on_device(params)
        return lm._with(layer_graphdef=nnx.split(of_device.decoder.layers[0])[0])

    @property
    def decoder(self) -> Decoder:
        """The Flax NNX module over this LM's weights, with KV heads in the order of `head_orders`."""
        return nnx.merge(self.graphdef, self.params)

    def layer(self, weights: Any) -> DecoderLayer:
        """A layer over its weights."""
        return nnx.merge(self.layer_graphdef, weights)

    def layer_params(self, layer: int) -> Any:
        """Weights of a layer."""
        return self.params["layers"][layer]

    def heads(self, layer: int | Array) -> Heads:
        """The KV heads of a layer that a program sees: all, or over a mesh those of its device."""
        return Heads.all(self.config.num_kv_heads) if self.head_shards is None else self.head_shards.heads(layer)

    def scores(self, layer: int | Array, normed: Array, positions: Array) -> Any:
        """Scores [R, H, n] of tokens [R, n] by a layer's inputs after the norm; None if the method gives none."""
        policy: Any = self.method.cache
        return policy.score(self.scored_settings(layer), normed, positions) if policy.by_scores else None

    def scored_settings(self, layer: int | Array) -> Any:
        """Settings of a scored cache for the heads of a layer that a program sees."""
        policy: Any = self.method.cache
        return policy.of_heads(self.settings_of(layer), self.heads(layer))

    def settings_of(self, layer: int | Array) -> Any:
        """The method's arrays of a layer."""
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), self.settings)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of architecture and weights, which profiles carry; computed once, from all weights."""
        from tca_jax.models.fingerprint import fingerprint

        return self.checkpoint_fingerprint or fingerprint(self.decoder, self.head_orders)

    @property
    def head_shards(self) -> HeadShards | None:
        """How KV heads are dealt out over the mesh; None on one device."""
        if self.mesh is None or self.head_orders is None:
            return None
        return HeadShards(axis_size(self.mesh, MODEL), self.head_orders)

    @property
    def parameter_specs(self) -> Any:
        """Partition spec of each weight, in the structure of `params`."""
        if self.graphdef is None:  # `without_weights`
            return self.params
        return parameter_specs(self.config, self.weights_dtype)

    def in_model_order(self, layer: int, values: np.ndarray) -> np.ndarray:
        """Values for each KV head of a layer, axis 0, reordered from the mesh's order to the model's."""
        return values if self.head_orders is None else values[np.argsort(self.head_orders[layer])]

    def head_numbers(self, layer: int) -> Int32[np.ndarray, " Hkv"]:
        """The KV heads of a layer in the mesh's order."""
        order = range(self.config.num_kv_heads) if self.head_orders is None else self.head_orders[layer]
        return np.asarray(order, np.int32)

    def on_device(self, params: Any) -> LM:
        """The model as each device of its mesh runs it, under `jax.shard_map`, over its own part of the weights."""
        if self.graphdef is None:
            return self
        graphdef = device_graphdef(self.config, self.dtype, self.weights_dtype, axis_size(self.mesh, MODEL))
        return dataclasses.replace(self, graphdef=graphdef, params=params)

    @functools.cached_property
    def dtype(self) -> jnp.dtype:
        """Dtype of the model's computation."""
        return self.decoder.dtype

    @functools.cached_property
    def weights_dtype(self) -> jnp.dtype:
        """Dtype of its stored projections; in eight bits they have scales."""
        return self.decoder.param_dtype

    @property
    def cache_dtype(self) -> jnp.dtype:
        """Dtype of its cache."""
        return self.dtype if self.kv is None else KV[self.kv]

    def kernels(self, backend: str) -> Backend:
        """The backend of the model's programs, by the name that a call gives."""
        return resolve_backend("mosaic_fp8" if self.attention and backend == "auto" else backend)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of its cache, keys and values."""
        return 2 * num_bytes(self.method.cache.block_size, self.config.head_dim, self.cache_dtype)

    def with_method(self, method: Method | str, **options: Any) -> LM:
        """The same weights under another attention method. On a mesh KV heads stay where they are.

        Args:
            method: A method, or the name of a registered one, such as "streaming" or "full+streaming".
            **options: Options of a method that is given by its name.

        Raises:
            ValueError: the name or an option is unknown, or the method does not fit the model's shape.
            TypeError: `method` is neither, or options come with a method that is made already.
        """
        if isinstance(method, str):
            from tca_jax.methods.registry import get

            method = get(method, **options)
        else:
            require_type("method", method, Method, "a tca_jax.methods.Method or a name")
            made = f"go with a method's name; {method.name!r} is made already"
            require(not options, f"options {sorted(options)} {made}", UserTypeError)
        method.validate_for(self.config.num_layers, self.config.num_kv_heads)
        frequencies = fixed_frequencies(self.config.head_dim, self.config.rope)
        wording = None if self.tokenizer is None else TokenizerWording(self)
        method = method.for_model(self.config.num_layers, frequencies, wording)
        return self._with(method=method, settings=None)

    def with_profile(self, profile: ProfileLike | None) -> LM:
        """The same weights under a profile's method; None is exact full attention.

        Raises:
            ValueError: the profile belongs to another model or shape.
            TypeError: it is no profile, such as the name of its folder.
        """
        if profile is None:
            return self.with_method(BASELINE)
        require_type("profile", profile, ProfileLike, "a Profile, as tca_jax.Profile.load gives it, or None")
        profile.validate_for(self.config, self.fingerprint, self.name)
        return self.with_method(profile.method())._with(settings=profile.settings())

    @property
    def for_programs(self) -> LM:
        """The model without the fields that programs ignore, so that another tokenizer or name compiles nothing."""
        return self if "is_for_programs" in vars(self) else self._for_programs

    @functools.cached_property
    def _for_programs(self) -> LM:
        method = dataclasses.replace(self.method, cache=self.method.cache.for_programs())
        lm = self._with(name="", tokenizer=None, eos_token_ids=(), checkpoint_fingerprint=None, method=method)
        if lm.mesh is None and isinstance(lm.params, nnx.State):
            lm = lm._with(params=nnx.to_pure_dict(lm.params))  # whose leaves are found faster
        vars(lm)["is_for_programs"] = True  # the model itself would be a cycle, which keeps the weights
        return lm

    # A program looks at all weights that it gets, which takes milliseconds for those of a deep model.

    @functools.cached_property
    def signature(self) -> Any:
        """Structure and shapes of the model as an argument of programs. ValueError where JAX computes elsewhere."""
        default, leaves = jax.device_put(0).devices(), jax.tree.leaves(self.params) if self.mesh is None else []
        elsewhere = [x.devices() for x in leaves if getattr(x, "committed", False) and x.devices() != default]
        remedy = 'load with mesh=jax.make_mesh((1, 1), ("data", "model"), devices=[...]), or set jax_default_device'
        require(not elsewhere, f"weights lie on {elsewhere[:1]}, and JAX's default device is {default}: {remedy}")
        return programs.signature(self)

    @functools.cached_property
    def without_weights(self) -> LM:
        """The model for programs that compute with none of its weights."""
        if self is not self.for_programs:
            return self.for_programs.without_weights
        return self._with(params=(), graphdef=None)

    @functools.cached_property
    def without_layers(self) -> LM:
        """The model for programs that need embedding, final norm and head; on a mesh, all of it."""
        if self is not self.for_programs:
            return self.for_programs.without_layers
        if self.mesh is not None:
            return self
        decoder = self.decoder
        decoder.layers = nnx.List([])
        graphdef, params = nnx.split(decoder)
        return self._with(graphdef=graphdef, params=params)

    def _with(self, **changes: Any) -> LM:
        """A copy over the same weights, with the cached properties of this one, which take long."""
        other = dataclasses.replace(self, **changes)
        known = ("fingerprint", "dtype", "weights_dtype")
        vars(other).update({name: vars(self)[name] for name in known if name in vars(self)})
        return other

    @functools.cached_property
    def cache_layout(self) -> Callable[..., CacheLayout]:
        """Sizes of the cache of prompts and their continuation, or of this alone, by the rest of `CacheLayout.plan`."""
        sizes = self.config.num_layers, self.config.num_kv_heads
        plan = functools.partial(CacheLayout.plan, self.method.cache, *sizes, shards=self.head_shards)
        return functools.lru_cache(maxsize=256)(plan)


def require_lm(lm: Any) -> None:
    """Raises UserTypeError unless it is a model."""
    require_type("lm", lm, LM, "an LM, from tca_jax.load")


def check_attention(attention: str | None, config: ModelConfig | None = None, dtype: Any = None) -> None:
    """Raises ValueError unless prompts may attend in it on this device, and those of a model, if it is known."""
    require(attention in (None, *KV), f"attention = {attention!r}: must be one of {list(KV)}, or None")
    lack = "needs an NVIDIA GPU of compute capability 9.x (Hopper); leave it out"
    require(attention is None or can_run("mosaic_fp8"), f"attention = {attention!r} {lack}")
    if config is None:
        return
    fits = config.head_dim in (64, 128) and jnp.dtype(dtype).itemsize == 2
    given = f"this model has {config.head_dim} in {jnp.dtype(dtype)}"
    remedy = "pass dtype='bfloat16', or leave attention out"
    takes = f"attention = {attention!r} takes heads of 64 or 128 in bfloat16 or float16, {given}; {remedy}"
    require(attention is None or fits, takes)
