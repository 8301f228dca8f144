"""KVzip (arXiv 2505.23416): the cache keeps the tokens that the model attends to while it repeats the prompt.

A prompt is read in full; then a request to repeat it and a chunk of it are fed, chunk after chunk, and forgotten. A
token's score is the most attention that it gets while its chunk is repeated (Algorithm 1); the highest scores of all
layers and KV heads stay. Follows snu-mllab/KVzip at 5d84729 (`level` "pair" and "uniform", 0.3 of the pairs); `sinks`
and "layer" are those of `KVzipPress` (NVIDIA/kvpress at 8bb29b9). What differs: the first `sinks` tokens take the part
of the system prompt and count in the budget; `generate` repeats all of its prompt, a context only the document, as in
the code; `share` is rounded per head, where the code cuts at a threshold; probabilities are float32; the answer's
header is the chat template's, without one a line break.

All keys and values of the prompt are held until the repetition ends, as in the paper. It has twice the attention of
reading, at positions behind the prompt, which may pass the model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from tca_jax.engine.read import ReadRows
from tca_jax.errors import UserError, check_integer, require_name
from tca_jax.lab.rivals.compression import GrowingCache, PromptCompression, divided, without_subnormals
from tca_jax.lab.rivals.repetition import CARRIED, Repetition, read_and_repeat
from tca_jax.methods.base import Frequencies, Heads, Method, Wording
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.regions import Selection

#: What shares a budget: all layers and KV heads; the heads of each layer; nothing, each head having its own.
LEVELS = ("pair", "layer", "uniform")
OPENING = "\n\nRepeat the previous context exactly."
CONTINUING = "\n\nRepeat the part of the previous context exactly, starting with "


@dataclasses.dataclass(frozen=True)
class KVzipCache(PromptCompression):
    level: str = "pair"
    repetition: Repetition = dataclasses.field(default_factory=lambda: Repetition(2000, 4))  # of the prompt

    def __post_init__(self) -> None:
        super().__post_init__()
        require_name(f"level = {self.level!r}", self.level, LEVELS)

    @property
    def reader(self) -> Callable[..., ReadRows]:  # type: ignore[override]
        return read_and_repeat

    def for_model(self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None) -> KVzipCache:
        ids = () if wording is None else (wording.ids(OPENING), wording.ids(CONTINUING), wording.before_answer())
        return dataclasses.replace(self, repetition=Repetition(self.repetition.chunk, self.repetition.sinks, *ids))

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return (PromptCompression if self.level == "uniform" else GrowingCache).capacities(self, layer, prompt_tokens)

    def shared_capacities(self, prompt_tokens: int, num_layers: int, num_kv_heads: int) -> tuple[int, ...] | None:
        of_layer = num_kv_heads * super().capacities(0, prompt_tokens)
        return {"uniform": None, "layer": (of_layer,) * num_layers, "pair": (of_layer * num_layers,)}[self.level]

    def score(self, q: Array, k: Array, v: Array, lengths: Array) -> Array:
        raise UserError("kvzip scores a prompt by what a model attends to while it repeats it: use lm.with_method")

    def select_repeated(
        self, heads: Sequence[Heads], scores: Float32[Array, "layers B Hkv L"], lengths: Int[Array, " B"]
    ) -> Selection:
        """As `select`, of all layers at once, whose number is the first axis, by scores of `repetition.repeat`."""
        layers, batch, kv_heads, length = scores.shape
        together = layers if self.level == "pair" else 1
        mean, ranked = self.mean_of_heads(0, lengths, length), self.ranked(lengths, length)  # of all layers
        scores = without_subnormals(scores)

        def counts(first: int) -> Int[Array, "layers B Hkv"]:
            """Tokens that heads keep, of the layers that share a budget from the first on."""
            if self.level == "uniform":
                return jnp.broadcast_to(mean[:, None], (1, batch, kv_heads))
            joint = Heads.of_layers(heads[first : first + together])
            flat = jnp.moveaxis(scores[first : first + together], 0, 1).reshape(batch, -1, length)
            found = divided(flat, ranked, mean * joint.of_model, joint, jnp.zeros_like(mean))
            return jnp.moveaxis(found.reshape(batch, together, kv_heads), 1, 0)

        of_layers = [of_layer for first in range(0, layers, together) for of_layer in counts(first)]
        found: Selection = jax.lax.map(
            lambda each: self.selection(each[0], each[1], lengths), (scores, jnp.stack(of_layers))
        )
        return found


def kvzip(
    share: float = 0.3,  # of the tokens left of the window, the mean over layers and KV heads; the code's `ratio`
    level: str = "pair",  # one of `LEVELS`: what shares a budget
    chunk: int = 2000,  # tokens that are repeated at a time, at least 8
    sinks: int = 4,  # tokens at the start of the sequence that are kept first and repeated in no chunk
    window: int = 128,  # least number of local tokens, a multiple of `block_size`
    block_size: int = 128,  # tokens in a block, a power of two
) -> Method:
    """Full attention in prefill, KVzip's selection in the cache."""
    check_integer("chunk", chunk, at_least=CARRIED)
    check_integer("sinks", sinks, at_least=0)
    return Method("kvzip", FullPrefill(), KVzipCache(None, share, window, block_size, level, Repetition(chunk, sinks)))
