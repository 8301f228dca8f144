"""What lies beside recall-tiny's weights: byte tokenizer, generation config and model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tca_jax.models.decoder import Decoder
from tca_jax.models.params import save_decoder

BOS, EOS, PAD = 256, 257, 258  # ids 0 to 255 are the bytes themselves
VOCAB_SIZE = 264  # a multiple of 8; the last ids are unused
_SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
_SPECIAL_IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


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
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL_TOKENS.values()])
    bos = _SPECIAL_TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        **_SPECIAL_TOKENS,
    )


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def write_card(folder: Path) -> None:
    """Writes README.md from config.json, train_log.jsonl and, where there is one, evaluation.json."""
    config = json.loads((folder / "config.json").read_text())
    run, *log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    evaluation = folder / "evaluation.json"
    card = _CARD.format(
        config=config,
        run=run,
        lengths=", ".join(f"{stage['length']:,}" for stage in run["recipe"]["stages"]),
        accuracy=_accuracy(json.loads(evaluation.read_text())) if evaluation.is_file() else "Not evaluated yet.\n",
        log=_log_table(log),
        steps=log[-1]["step"],
        annealing=sum(stage["steps"] for stage in run["recipe"]["stages"]),
        minutes=log[-1]["seconds"] / 60,
    )
    (folder / "README.md").write_text(card)


def _accuracy(result: dict[str, Any]) -> str:
    method = f"TCA, window {result['window']}, profile in `profile/`"
    shares = f"{result['kept_share']:.1%} | {result['kv_cache_share']:.1%}"
    return _ACCURACY.format(
        **{name: result[name] for name in ("questions", "tokens", "needles")},
        full=f"| full | {result['full_accuracy']:.1%} | 100% | 100% |",
        tca=f"| {method} | {result['tca_accuracy']:.1%} | {shares} |",
    )


def _log_table(log: list[dict[str, Any]]) -> str:
    """The last line of each length, and the first one at which recall had formed."""
    last = {entry["length"]: entry for entry in log}
    formed = [entry for entry in log if entry["held_out_answer_accuracy"] > 0.95][:1]
    by_step = {entry["step"]: entry for entry in [*last.values(), *formed]}
    return "\n".join(_log_row(by_step[step]) for step in sorted(by_step))


def _log_row(entry: dict[str, Any]) -> str:
    cells = (
        f"{entry['step']}",
        f"{entry['seconds']:.0f}",
        f"{entry['length']:,}",
        f"{entry['held_out_text_loss']:.3f}",
        f"{entry['held_out_answer_loss']:.4f}",
        f"{entry['held_out_answer_accuracy']:.1%}",
        f"{entry['tokens_per_second']:,}",
    )
    return f"| {' | '.join(cells)} |"


_ACCURACY = """{questions} questions, each about a document of its own ({tokens} tokens with the
question, held-out text, {needles} needles), greedy decoding, exact match:

| attention | right | tokens kept | KV cache bytes |
|---|---|---|---|
{full}
{tca}
"""

_CARD = """---
license: apache-2.0
library_name: transformers
tags: [byte-level, long-context, retrieval]
---

# recall-tiny

A byte-level LLaMA that finds facts in long text: {config[num_hidden_layers]} layers, hidden size
{config[hidden_size]}, {config[num_attention_heads]} query and {config[num_key_value_heads]} KV heads of
dimension {config[head_dim]}, {config[max_position_embeddings]} positions. It exists to try, test and
demonstrate tca_jax on a real retrieval task on any machine, and ships with the package:
`tca_jax.load("recall-tiny")`. `transformers` loads the same folder.

## What it does

Text in which lines such as `# The access code for amber falcon is 482913.` are hidden, followed by

    # What is the access code for amber falcon?
    # The access code for amber falcon is

and a space, it continues with the six digits, a full stop and the end-of-sequence token.
`tca_jax.needles.build_document` makes such documents.

## Accuracy

{accuracy}
## Training

    python examples/train_recall_model.py --out recall-tiny

{steps} steps, {minutes:.1f} minutes, compilation included, on {run[device]}. {run[recipe][needle_share]:.0%} of
a batch's rows are documents with needles that end with a question for each of them, the others are plain
text; the answers' digits weigh {run[recipe][answer_weight]:g} times as much in the loss as other bytes. Sequences
grow: {lengths} tokens. AdamW, bfloat16 with float32 master weights. The learning rate stays at
{run[recipe][peak_lr]:g} until {run[recipe][formed_accuracy]:.0%} of the digits are right, and falls along a cosine in
the {annealing} steps that are left from there. Ending soon matters: trained on, such a model learns its
text by heart and its heads put all attention on a token or two. `train_log.jsonl` has all lines of the
log; here the last of each length, and the first at which more than 95% of the digits were right (losses
in nats per byte, on held-out text):

| step | seconds | length | text loss | answer loss | digits right | tokens/s |
|---|---|---|---|---|---|---|
{log}

## Data

The source of Python's standard library (Python Software Foundation License), without its tests, and
generated needles. The modules of `tca_jax.needles.HELD_OUT_MODULES` are held out for evaluation.
Characters outside ASCII are left out.

## Limits

It knows the needle's and the question's fixed wording, keys of one adjective and one noun from a list,
and answers of six digits; rephrased questions are out of its reach. It models Python source at byte
level and holds no knowledge of the world. Documents longer than {config[max_position_embeddings]} tokens
are beyond its positions.
"""
