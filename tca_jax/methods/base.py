"""The interface of methods: attention of a prompt's queries (prefill policy), tokens of the cache (cache policy).

Both are handed the KV heads that they are asked about (`Heads`).

Policies are frozen dataclasses: hashable, and static under `jax.jit`. What they compute may depend on the layer and on
data; only capacities are static. The two parts of a method combine freely.
"""

from __future__ import annotations

import abc
import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Shaped

from tca_jax.errors import require
from tca_jax.methods.regions import Regions, Selected, Selection
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.kv import Pages
from tca_jax.pallas_kernels.numerics import cdiv

PerHead = int | tuple[int, ...]  # one number for every KV head, or one for all of them
UNBOUNDED = 2**30  # a window that no sequence fills: nothing ever leaves it. A multiple of every block size
#: Radians a position by which RoPE turns each pair (i, i + d / 2) of a head's dimensions, `[d / 2]`.
Frequencies = tuple[float, ...]
Layer = int | Array  # the number of a layer: a Python integer, or data where layers share a program
Tokens = TypeVar("Tokens", int, Any)  # a number of tokens: a Python integer, or an array of them, traced or not


@runtime_checkable
class Wording(Protocol):
    """How a model is asked for something, in token ids."""

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a text of the user's."""

    def before_answer(self) -> tuple[int, ...]:
        """Token ids between the user's text and the answer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Heads:
    """KV heads of a layer, in the order in which queries, keys and values have them.

    What a policy knows of each of the model's heads, `of` gives for these. Shapes are static and the same on all
    devices of a mesh: `widest` and `places` heed the heads of the others.

    Attributes:
        numbers: Of each head, its number in the model, `[Hkv]`: a NumPy array where it is known before a program runs,
            data where devices of a mesh run the program with heads of their own.
        of_devices: The same of every device, `[devices][Hkv]`, static; one of them has these heads.
        axis: Mesh axis of these devices; None where one device has all heads.
    """

    numbers: Int[Array | np.ndarray, " Hkv"]
    of_devices: tuple[tuple[int, ...], ...]
    axis: str | None = None

    @classmethod
    def all(cls, num_kv_heads: int) -> Heads:
        """All of a model's heads, in its own order: those of one device."""
        return cls(np.arange(num_kv_heads), (tuple(range(num_kv_heads)),))

    @property
    def of_model(self) -> int:
        """KV heads of the model."""
        return sum(map(len, self.of_devices))

    @classmethod
    def of_layers(cls, layers: Sequence[Heads]) -> Heads:
        """The heads of several layers as if they were those of one, layer after layer; of as many heads each."""
        shift, first = layers[0].of_model, layers[0]
        numbers = [np.int32(i * shift) + heads.numbers for i, heads in enumerate(layers)]
        together = np.concatenate if all(isinstance(each, np.ndarray) for each in numbers) else jnp.concatenate
        of_devices = [i * shift + np.asarray(heads.of_devices) for i, heads in enumerate(layers)]
        return cls(together(numbers), tuple(map(tuple, np.concatenate(of_devices, axis=1).tolist())), first.axis)

    def of(self, values: Shaped[Array | np.ndarray, "H ..."]) -> Shaped[Array | np.ndarray, "Hkv ..."]:
        """Of something for each of the model's KV heads, that of these."""
        return values[self.numbers] if isinstance(self.numbers, np.ndarray) else jnp.asarray(values)[self.numbers]

    def mean(self, values: Float[Array, "B Hkv ..."]) -> Float[Array, "B ..."]:
        """The mean `[B, ...]` over all of the model's KV heads of a layer, of `values` `[B, Hkv, ...]` of these."""
        own = values.mean(axis=1)
        return own if self.axis is None else jax.lax.pmean(own, self.axis)

    def total(self, values: Int[Array, "B Hkv"]) -> Int[Array, " B"]:
        """The sum `[B]` over all of the model's KV heads of a layer, of `values` `[B, Hkv]` of these."""
        own = values.sum(axis=1, dtype=values.dtype)
        return own if self.axis is None else jax.lax.psum(own, self.axis)

    def total_before(self, values: Int[Array, "B Hkv"]) -> Int[Array, "B Hkv"]:
        """The sum over the model's KV heads of lower numbers, for each of these, of `values` `[B, Hkv]` of these."""
        numbers = jnp.asarray(self.numbers)
        others, their_numbers = values, numbers
        if self.axis is not None:
            others = jax.lax.all_gather(values, self.axis, axis=1, tiled=True)
            their_numbers = jax.lax.all_gather(numbers, self.axis, axis=0, tiled=True)
        return jnp.where(their_numbers < numbers[:, None], others[:, None], 0).sum(axis=-1, dtype=values.dtype)

    def widest(self, values: Sequence[int]) -> tuple[int, ...]:
        """Of a number for each of the model's KV heads, the largest that any device has at each place."""
        return tuple(np.asarray(values)[np.asarray(self.of_devices)].max(axis=0).tolist())


class CachePolicy(abc.ABC):
    """Tokens of the cache: a window of the latest ones, and kept tokens of the blocks left of it.

    A query at position i has the local tokens [max(0, (i // b) b - w), i]. When a position enters a new block, the
    oldest block of the window leaves it, and `evict` says what stays of that.

    Attributes:
        block_size: Tokens in a block, b: a power of two, from 16 to 256 for the Triton kernels ("auto" takes XLA
            below).
        window: Least number of local tokens, w, a positive multiple of b; `UNBOUNDED` for all of them.
        num_queries: Prompt queries, counted from the last, that `select` looks at; None for all of them.
        layers_differ: Whether it does something else in another layer; otherwise layers share a program.
        by_scores: Whether tokens stay by scores of the hidden states, as in `methods.worth.WorthCache`; `select` and
            `evict` are not called.
        reader: Reads prompts that can have ranked blocks, in place of `engine.read.read`, with its arguments and its
            `Calls`, for policies that select once the whole model has run; then `select` is not called. None for
            most policies.
    """

    block_size: int
    window: int
    num_queries: int | None = 1
    layers_differ: ClassVar[bool] = True
    by_scores: ClassVar[bool] = False
    reader: Callable[..., Any] | None = None

    @abc.abstractmethod
    def capacities(self, layer: int, prompt_tokens: int) -> PerHead:
        """Most tokens that a KV head keeps of the ranked blocks of any prompt of at most `prompt_tokens`; static."""

    def shared_capacities(self, prompt_tokens: int, num_layers: int, num_kv_heads: int) -> tuple[int, ...] | None:
        """Most tokens of the ranked blocks that heads keep together, where heads share a budget; static.

        None, the default: each has its own, `capacities`. Otherwise the prompt says how heads divide a budget, and
        `capacities` how many one of them may keep at most.

        Returns:
            A budget for each layer's heads, or one for all layers of the model together: for policies with a `reader`,
            which know all layers before anything is kept.
        """
        return None

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> PerHead:
        """Most tokens that a KV head keeps of the blocks that leave the window after a prompt; static. By default 0.

        `num_leaving_blocks` of the same numbers of tokens gives the number of these blocks.
        """
        return 0

    @abc.abstractmethod
    def select(
        self,
        layer: Layer,
        heads: Heads,
        q: Float[Array, "B O Hq d"],
        k: Float[Array, "B L Hkv d"],
        v: Float[Array, "B L Hkv d"],
        lengths: Int[Array, " B"],
    ) -> Selection:
        """Scores a prompt's tokens and gives its ranked blocks their budgets. Called if there can be ranked blocks.

        Args:
            heads: The layer's KV heads that `k` has: over a mesh, those of a device.
            q: The last `num_queries` prompt queries after RoPE, `q[:, -1]` the last; all L of them for None.
            k: Keys after RoPE, right-padded; `v` the values.
            lengths: Prompt lengths `[B]`, traced.
        """

    def evict(
        self, layer: Layer, heads: Heads, attention: Float32[Array, "B Hkv G b"], blocks: Int[Array, " B"]
    ) -> Selection:
        """Kept tokens of the block that leaves the window of each row; by default none.

        Args:
            heads: The layer's KV heads, as for `select`.
            attention: The current query's attention probabilities on the block's tokens, by head of the group.
            blocks: Number of the leaving block, `[B]`.

        Returns:
            A selection from one block: scores `[B, Hkv, b]`, budgets `[B, Hkv, 1]`.
        """
        return Selection.of_block(attention, 0)

    def summarize(self, layer: Layer, pages: Pages) -> Any:
        """Summary of a layer's cache for `attended`, computed once for many steps: a pytree, by default None."""
        return None

    def attended(
        self, layer: Layer, q: Float[Array, "B Hq d"], caches: tuple[Pages, ...], summaries: tuple[Any, ...]
    ) -> tuple[Pages, ...]:
        """Pages that a step of decoding attends to; by default all of them.

        Args:
            q: The new tokens' queries after RoPE `[B, Hq, d]`.
            caches: What is held, as `paged_attention` takes it.
            summaries: Of each, from `summarize`.
        """
        return caches

    def for_programs(self) -> CachePolicy:
        """The policy without the options that decide sizes alone: equal ones share programs."""
        return self

    @property
    def chooses_pages(self) -> bool:
        """Whether a step attends to some of the pages alone (`attended`)."""
        return type(self).attended is not CachePolicy.attended

    def for_model(self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None) -> CachePolicy:
        """The policy for a model; arguments and errors are those of `Method.for_model`."""
        return self

    def num_ranked_blocks(self, tokens: Tokens) -> Tokens:
        """n = max(0, L // b - w // b): blocks of a prompt that are ranked."""
        return num_ranked_blocks(tokens, self.block_size, self.window)

    def num_leaving_blocks(self, prompt_tokens: int, new_tokens: int) -> int:
        """Most blocks that leave the window while `new_tokens` are fed after a prompt of at most `prompt_tokens`."""
        return min(cdiv(new_tokens, self.block_size), self.num_ranked_blocks(prompt_tokens + new_tokens))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:  # noqa: B027 (most fit every model)
        """Raises ValueError if the policy does not fit a model of that shape."""


class Attended(NamedTuple):
    """Attention of prompts.

    Attributes:
        out: `[B, L, Hq, d]`; rows past a length are zero.
        pairs: Causal pairs (query, key) of each row's prompt that were attended to, as the kernels are told, mean over
            the query heads that the program sees; float32 `[B]`. `causal_pairs` counts all that there are.
    """

    out: Float[Array, "B L Hq d"]
    pairs: Float32[Array, " B"]


class PrefillPolicy(abc.ABC):
    """How the queries of a prompt attend.

    Attributes:
        layers_differ: As for `CachePolicy`.
        by_scores: Whether they attend by the cache's scores, as in `methods.worth.WorthPrefill`, in place of `attend`.
    """

    layers_differ: ClassVar[bool] = True
    by_scores: ClassVar[bool] = False

    @abc.abstractmethod
    def attend(
        self,
        layer: Layer,
        heads: Heads,
        q: Float[Array, "B L Hq d"],
        k: Float[Array, "B L Hkv d"],
        v: Float[Array, "B L Hkv d"],
        lengths: Int[Array, " B"],
        selected: Selected | None,
        backend: Backend,
    ) -> Attended:
        """Causal attention of prompts, right-padded.

        Args:
            heads: The layer's KV heads that `k` has: over a mesh, those of a device.
            q: Queries after RoPE; query head h belongs to KV head h // (Hq // Hkv).
            k: Keys after RoPE; `v` the values.
            lengths: Prompt lengths `[B]`, traced.
            selected: What the cache policy selects for the prompt's queries, if this policy `reads` it and there are
                ranked blocks.
            backend: Kernel backend, to be handed on.

        Returns:
            The attention, and how many pairs of a query and a key it took.
        """

    def reads(self, cache: CachePolicy) -> bool:
        """Whether queries attend to exactly the tokens of `cache`: its window and its selection left of that.

        Then the selection is made once, and the last layer of a prefill computes its last query alone.
        """
        return False

    def for_model(self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None) -> PrefillPolicy:
        """As `CachePolicy.for_model`."""
        return self

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:  # noqa: B027
        """Raises ValueError if the policy does not fit a model of that shape."""


class BlockMeans(NamedTuple):
    """A mean of each block of a prompt, and an addition to its logit; -inf for blocks without one."""

    k: Float[Array, "B N H d"]
    v: Float[Array, "B N H d"]
    bias: Float32[Array, "B H N"]


@dataclasses.dataclass(frozen=True)
class Method:
    """An attention method.

    Attributes:
        name: For tables and messages.
        prefill: How a prompt's queries attend.
        cache: What stays in the cache.
    """

    name: str
    prefill: PrefillPolicy
    cache: CachePolicy

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        """Raises ValueError if the method does not fit a model of that shape."""
        self.prefill.validate_for(num_layers, num_kv_heads)
        self.cache.validate_for(num_layers, num_kv_heads)

    def for_model(self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None = None) -> Method:
        """The method for a model.

        Args:
            num_layers: Its layers.
            frequencies: Of its RoPE; None where they change with the length.
            wording: How it is asked for something; None where it has no tokenizer.

        Raises:
            ValueError: the method does not work with such a model.
        """
        model = num_layers, frequencies, wording
        other = dataclasses.replace(self, prefill=self.prefill.for_model(*model), cache=self.cache.for_model(*model))
        return self if other == self else other

    @property
    def layers_differ(self) -> bool:
        """Whether it does something else in another layer."""
        return self.prefill.layers_differ or self.cache.layers_differ

    @property
    def prefill_reads_cache(self) -> bool:
        """Whether a prompt's queries attend to exactly the tokens that the cache policy selects."""
        return self.prefill.reads(self.cache)


def per_head(value: Any, num_kv_heads: int, source: str) -> tuple[int, ...]:
    """A number for each KV head; ValueError, which names `source`, if there are not `num_kv_heads` of them."""
    values = (int(value),) * num_kv_heads if isinstance(value, numbers.Integral) else tuple(map(int, value))
    known = len(values) == num_kv_heads and all(v >= 0 for v in values)
    require(known, f"{source} = {value}: must be one number, or {num_kv_heads}, of at least 0")
    return values


def num_ranked_blocks(tokens: Tokens, block_size: int, window: int) -> Tokens:
    """n = max(0, L // b - w // b): blocks that are global for some query of L tokens or for the one that follows."""
    blocks = tokens // block_size - window // block_size
    return blocks * (blocks > 0)


def last_queries(q: Float[Array, "B L Hq d"], lengths: Int[Array, " B"], count: int | None) -> Float[Array, "B O Hq d"]:
    """The last `count` prompt queries of each row, in order; all of them for None.

    A row shorter than `count` repeats its first query in front; whoever looks at several must leave those out.
    """
    if count is None:
        return q
    positions = jnp.clip(lengths[:, None] + jnp.arange(-count, 0), 0, q.shape[1] - 1)
    return jnp.take_along_axis(q, positions[:, :, None, None], axis=1, mode="clip")


def compact(
    policy: CachePolicy, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
) -> Selected:
    """The tokens left of their windows that a policy selects for a prompt's queries, in a pool for this layer."""
    with jax.named_scope("select"):
        selection = policy.select(layer, heads, last_queries(q, lengths, policy.num_queries), k, v, lengths)
    batch, tokens, kv_heads, _ = k.shape
    capacities = (tokens,) * kv_heads
    if isinstance(layer, int):
        source = f"{type(policy).__name__}.capacities({layer}, {tokens})"
        capacities = heads.widest(per_head(policy.capacities(layer, tokens), heads.of_model, source))
    regions = Regions.plan(batch, capacities, policy.block_size)
    with jax.named_scope("select"):
        return regions.fill(selection, k, v, block_size=policy.block_size, backend=backend)
