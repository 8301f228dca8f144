"""Tiny checkpoints whose tokenizers are built as those of published models: byte-level BPE, and SentencePiece's BPE."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from tiny import CONFIG
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tca_jax.models.decoder import Decoder
from tca_jax.models.params import save_decoder

_TEXT = [
    "The grass is green. The sky is blue. The special magic number for wet-fox is: 1234567. Who is here? Answer:"
] * 4
_LLAMA_3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_LLAMA_3_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_LLAMA_2_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


def write_with_bytes(folder: Path) -> Path:
    """A checkpoint with `tokenizer_of_bytes`."""
    tokenizer = tokenizer_of_bytes()
    config = dataclasses.replace(CONFIG, vocab_size=len(tokenizer))
    save_decoder(folder, Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)), jnp.float32)
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """As LLaMA 3 and Qwen: BPE over bytes, a first token, headers in the chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(backend, trainers.BpeTrainer(vocab_size=360, special_tokens=list(_LLAMA_3), initial_alphabet=alphabet))
    return _finished(backend, _LLAMA_3[0], _LLAMA_3[-1], _LLAMA_3_CHAT)


def tokenizer_of_pieces() -> PreTrainedTokenizerFast:
    """As LLaMA 2: SentencePiece's BPE, in which a word begins with its space and what is not known is bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(backend, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    return _finished(backend, "<s>", "</s>", _LLAMA_2_CHAT)


def _train(backend: Tokenizer, trainer: trainers.BpeTrainer) -> None:
    trainer.show_progress = False
    backend.train_from_iterator(_TEXT, trainer)


def _finished(backend: Tokenizer, bos: str, eos: str, template: str) -> PreTrainedTokenizerFast:
    first = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=first
    )
    options = {"bos_token": bos, "eos_token": eos, "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
