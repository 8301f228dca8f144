"""What lies beside recall-tiny's weights: its byte tokenizer with the chat template, and its generation config."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from recall_tokens import BOS, EOS, PAD, SPECIAL_TOKENS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tca_jax.models.decoder import Decoder
from tca_jax.models.params import save_decoder

_SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
_SPECIAL_IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
# Roles are tokens, and every turn but the one to be answered ends with eos.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_checkpoint(folder: Path, decoder: Decoder) -> None:
    """Writes the model in bfloat16 as a folder that transformers loads."""
    save_decoder(folder, decoder, jnp.bfloat16, _SPECIAL_IDS)
    GenerationConfig(**_SPECIAL_IDS, do_sample=False).save_pretrained(folder)
    build_tokenizer(decoder.config.max_positions).save_pretrained(folder)


def build_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the bytes of UTF-8, with bos in front."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in _byte_characters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    bos = _SPECIAL_TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        **_SPECIAL_TOKENS,
    )


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
