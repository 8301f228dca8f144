"""Tiny models with random weights, and the dense reference that generation is tested against."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from flax import nnx
from random_decoders import causal
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import tca_jax
from tca_jax.engine.prompts import bucket_length
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.params import save_decoder
from tca_jax.models.rope import RopeConfig
from tca_jax.pallas_kernels.kv import decode, empty, encode

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
SIZES |= {"num_kv_heads": 2, "head_dim": 16, "max_positions": 4096}
WITHOUT = dict.fromkeys(("tie_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False)
ROPE = RopeConfig(type="default", theta=10000.0)
CONFIG = ModelConfig("llama", rms_norm_eps=1e-5, dtype_name="float32", rope=ROPE, **SIZES, **WITHOUT)
TCA = tca_jax.TCAConfig(block_size=8, window=16)
#: Budget rows that differ from head to head: the sparsest, dense, and two between.
UNEQUAL = [[0, 6], [TCA.num_candidates, 3]]


def tiny_lm(seed: int = 0, sharpness: float = 6.0, config: ModelConfig = CONFIG, **fields) -> tca_jax.LM:
    """A random model. Weights are scaled up so that attention is peaked and answers vary with the prompt."""
    lm = tca_jax.LM.from_decoder(nnx.merge(*_random_weights(config, seed)), name="tiny", **fields)
    params = jax.tree.map(lambda x: jnp.asarray(np.float32(sharpness) * x if x.ndim >= 2 else x), lm.params)
    return dataclasses.replace(lm, params=params)


@functools.lru_cache
def _random_weights(config: ModelConfig, seed: int):
    """A decoder's structure and its weights, on the host."""
    decoder = Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(seed))
    graphdef, params = nnx.split(decoder)
    return graphdef, jax.tree.map(np.asarray, params)


def with_candidates(lm: tca_jax.LM, candidates=UNEQUAL, config: tca_jax.TCAConfig = TCA) -> tca_jax.LM:
    """The model under given budget rows, `[layers][H_kv]`, without a profile on disk."""
    return lm.with_method(tca_jax.methods.get("tca", candidates=candidates, config=config))


def random_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, CONFIG.vocab_size, length).tolist()


class DenseReference:
    """Decoding from docs/method.md, one row, without a cache: all keys and values of every layer are kept, and a
    mask of each KV head says which of them a query may see."""

    def __init__(self, lm: tca_jax.LM, prompt: list[int]) -> None:
        self.lm, self.prompt = lm, len(prompt)
        self.config = getattr(lm.method.cache, "config", None)
        self.candidates = getattr(lm.method.cache, "candidates", None)
        self.keys = [None] * CONFIG.num_layers
        self.values = [None] * CONFIG.num_layers
        self.kept = [set() for _ in range(CONFIG.num_layers * CONFIG.num_kv_heads)]
        self.logits = self._prefill(prompt)

    def _prefill(self, prompt):
        tokens = np.zeros((1, bucket_length(len(prompt))), np.int32)
        tokens[0, : len(prompt)] = prompt
        rows = None if self.config is None else jnp.array(self.candidates, jnp.int32)
        lengths = jnp.array([len(prompt)], jnp.int32)
        layers, logits = _read_densely(self.lm.graphdef, self.config, self.lm.params, tokens, lengths, rows)
        for layer, (k, v, mask) in enumerate(layers):
            self.keys[layer], self.values[layer] = (self._stored(x[0])[: len(prompt)] for x in (k, v))
            if mask is not None:
                for head, kept in enumerate(np.asarray(mask)[0]):
                    self.kept[layer * CONFIG.num_kv_heads + head] = set(np.flatnonzero(kept).tolist())
        return np.asarray(logits)[len(prompt) - 1]

    def _stored(self, x):
        """Keys or values as a cache gives them back."""
        return np.asarray(decode(encode(x, empty((1, 1), self.lm.cache_dtype)), jnp.float32), np.float64)

    def step(self, token: int, position: int) -> np.ndarray:
        """Feeds one token; returns the logits that follow it."""

        def attention(layer, q, k, v, state):
            self.keys[layer] = np.concatenate([self.keys[layer], self._stored(k[0])])
            self.values[layer] = np.concatenate([self.values[layer], self._stored(v[0])])
            heads = [self._attend(layer, h, np.asarray(q[0, 0], np.float64), position) for h in range(CONFIG.num_heads)]
            return jnp.asarray(np.stack(heads), jnp.float32)[None, None], None

        decoder = self.lm.decoder
        hidden, _ = decoder(jnp.array([[token]]), jnp.array([[position]]), attention, (None,) * CONFIG.num_layers)
        return np.asarray(decoder.logits(hidden[0, 0]))

    def _attend(self, layer, query_head, queries, position):
        group = CONFIG.num_heads // CONFIG.num_kv_heads
        head = query_head // group
        keys, values = self.keys[layer][:, head], self.values[layer][:, head]
        logits = keys @ queries[head * group : (head + 1) * group].T / np.sqrt(CONFIG.head_dim)  # [tokens, group]
        if self.config is None:
            visible = np.arange(position + 1)
        else:
            b, w = self.config.block_size, self.config.window
            kept = self.kept[layer * CONFIG.num_kv_heads + head]
            edge = max(0, position // b * b - w)
            starts_block = position % b == 0 and edge > 0 and position > self.prompt
            if starts_block and query_head % group == 0:  # once for the group: the oldest window block leaves
                block = np.arange(edge - b, edge)
                held = np.array(sorted(kept | set(range(edge - b, position + 1))))
                weights = np.exp(logits - logits[held].max(axis=0))
                scores = (weights / weights[held].sum(axis=0)).mean(axis=1)[block]
                shares = oracle.distributions(self.config)[self.candidates[layer][head]]
                budget = max(1, int(np.dot(shares, oracle.sizes(self.config))))
                kept |= set(block[np.argsort(-scores, kind="stable")[:budget]].tolist())
            visible = np.array(sorted(kept | set(range(edge, position + 1))))
        return oracle.softmax(logits[visible, query_head % group]) @ values[visible]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read_densely(graphdef, config, params, tokens, lengths, candidates):
    """Of each layer keys, values and what is kept of them, and the logits of all positions of one prompt [1, L]."""
    decoder = nnx.merge(graphdef, params)

    def attention(layer, q, k, v, state):
        if config is None:
            return causal(layer, q, k, v, (k, v, None))
        observed = jnp.maximum(0, lengths[0] - config.observation + jnp.arange(config.observation))
        mask = tca_jax.select(q[:, observed], k, candidates[layer], lengths, config)
        return tca_jax.attend(q, k, v, candidates[layer], lengths, config), (k, v, mask)

    positions = jnp.arange(tokens.shape[1])[None]
    hidden, layers = decoder(tokens, positions, attention, (None,) * CONFIG.num_layers)
    return layers, decoder.logits(hidden[0])


def greedy_reference(lm: tca_jax.LM, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy answer of the dense reference."""
    reference = DenseReference(lm, prompt)
    tokens = [int(np.argmax(reference.logits))]
    for position in range(len(prompt), len(prompt) + new_tokens - 1):
        tokens.append(int(np.argmax(reference.step(tokens[-1], position))))
    return tokens


def write_checkpoint(
    folder: Path,
    *,
    tokenizer: bool = True,
    chat_template: str | None = "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    eos_token_id: list[int] | None = None,
) -> Path:
    """Saves the tiny model as a Hugging Face folder, with a tokenizer of one id per printable character."""
    save_decoder(folder, tiny_lm().decoder, jnp.float32)
    if eos_token_id is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    if tokenizer:
        characters = {chr(32 + i): i for i in range(95)} | {"<eos>": 95, "<unk>": 96}
        backend = Tokenizer(models.BPE(vocab=characters, merges=[], unk_token="<unk>"))
        backend.decoder = decoders.Fuse()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", chat_template=chat_template
        )
        fast.save_pretrained(folder)
    return folder


#: Tokens that `masked_greedy` computes for, so that one compiled program serves all prompts.
_MASKED_TOKENS = 128


@functools.partial(jax.jit, static_argnums=0)
def _logits_by_masks(graphdef, params, tokens, masks):
    """Logits of every position [L, vocabulary] where masks [layers, H_kv, L, L] say what is attended to."""
    group, decoder = CONFIG.num_heads // CONFIG.num_kv_heads, nnx.merge(graphdef, params)

    def attention(layer, q, k, v, state):
        return jax.nn.dot_product_attention(q, k, v, mask=jnp.repeat(masks[layer], group, axis=0)[None]), None

    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = decoder(tokens, positions, attention, (None,) * CONFIG.num_layers)
    return decoder.logits(hidden[0])


def masked_greedy(lm: tca_jax.LM, prompt: list[int], new_tokens: int, visible, visible_in_prompt=None) -> list[int]:
    """Greedy answer under attention by masks alone, every step a whole forward pass.

    Args:
        visible: (layer, KV head, query position) -> positions that the query sees.
        visible_in_prompt: The same for the prompt's queries, where that differs.
    """
    total = len(prompt) + new_tokens
    masks = np.zeros((CONFIG.num_layers, CONFIG.num_kv_heads, _MASKED_TOKENS, _MASKED_TOKENS), bool)
    masks[:, :, range(total, _MASKED_TOKENS), range(total, _MASKED_TOKENS)] = True  # padding sees itself
    for layer, head, i in np.ndindex(*masks.shape[:2], total):
        rule = visible_in_prompt if visible_in_prompt and i < len(prompt) else visible
        masks[layer, head, i, sorted(rule(layer, head, i))] = True
    tokens = np.zeros((1, _MASKED_TOKENS), np.int32)
    tokens[0, : len(prompt)] = prompt
    for i in range(len(prompt), total):
        tokens[0, i] = np.argmax(_logits_by_masks(lm.graphdef, lm.params, tokens, masks)[i - 1])
    return tokens[0, len(prompt) : total].tolist()
