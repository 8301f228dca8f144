"""Trains recall-tiny, the model that ships, and the zoo: small byte-level models of other shapes, steps and tasks.

    pip install optax
    python examples/train_recall_model.py --out recall-tiny          # one GPU, three minutes
    python examples/train_recall_model.py --out zoo --zoo            # a folder for each other member
    python examples/train_recall_model.py --out smoke --smoke        # any machine, a minute: runs every step

The schedule is fixed. `evaluate_zoo.py` calibrates the models and asks them questions; nothing is tuned on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Annotated, Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from recall_data import BOS, EOS, PAD, SPECIAL_TOKENS, VOCAB_SIZE, Stage, make_batch, training_batches
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast
from zoo_tasks import MIXTURES

from tca_jax.lab.recall.corpus import corpus
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.params import save_decoder

_SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
_SPECIAL_IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
# Roles are tokens, and every turn but the one to be answered ends with eos.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of a model, its training and its evaluation."""

    model_type: str = "llama"  # or "qwen2" (biases on queries, keys and values), "qwen3" (QK norm)
    tasks: tuple[str, ...] = MIXTURES["recall-tiny"]  # a name that is repeated is asked more often
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    max_positions: int = 16384
    stages: tuple[Stage, ...] = (Stage(1024, 64, 2250), Stage(4096, 16, 900), Stage(16384, 4, 900))
    peak_lr: float = 2e-3  # after the warm-up, for the first half of all steps; then a cosine
    least_lr: float = 0.02  # share of `peak_lr` at the end
    warmup_steps: int = 200
    answer_weight: float = 10.0  # loss weight of an answer's byte; any other byte: 1
    recall_share: float = 0.85  # of a batch's rows that have questions; the others are plain text
    log_every: int = 100  # steps
    held_out_rows: int = 16  # documents of the last stage's length that are answered at the end
    seed: int = 0  # of weights and data

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, constant to the half of all steps, then a cosine."""
        done = step / sum(stage.steps for stage in self.stages)
        cosine = 0.5 * (1 + math.cos(math.pi * max(0.0, 2 * done - 1)))
        return self.peak_lr * min(1.0, (step + 1) / self.warmup_steps) * (self.least_lr + (1 - self.least_lr) * cosine)

    def model_config(self) -> ModelConfig:
        fields = {
            **{name: getattr(self, name) for name in ("model_type", "hidden_size", "intermediate_size", "head_dim")},
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.max_positions,
        }
        fixed = {"vocab_size": VOCAB_SIZE, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        return ModelConfig.from_hf(fields | fixed)

    def smoke(self) -> Recipe:
        """The family, heads and tasks in a tiny model, a few steps."""
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "head_dim": 32, "max_positions": 8192}
        stages = (Stage(1024, 2, 4), Stage(2048, 1, 4))
        return dataclasses.replace(self, **sizes, stages=stages, warmup_steps=4, log_every=4, held_out_rows=1)


def _stages(first: int, second: int, third: int, *more: Stage) -> tuple[Stage, ...]:
    """Steps of each length."""
    return Stage(1024, 64, first), Stage(4096, 16, second), Stage(16384, 4, third), *more


# Positions: a text of 16,384 or 32,768 tokens, questions about it and their answers.
_MEMBER: dict[str, Any] = {"max_positions": 20480, "held_out_rows": 8}
_SMALL: dict[str, Any] = {"intermediate_size": 512, "num_kv_heads": 2, **_MEMBER}
RECIPES: dict[str, Recipe] = {
    "recall-tiny": Recipe(),
    "recall-4x": Recipe(stages=_stages(9000, 3600, 3600), seed=1),
    "grouped": Recipe(num_kv_heads=2, stages=_stages(2000, 600, 400), seed=2, **_MEMBER),
    "deep-qknorm": Recipe(
        "qwen3", num_layers=10, num_heads=4, stages=_stages(2000, 450, 250), peak_lr=1.5e-3, seed=3, **_SMALL
    ),
    "biases-nocopy": Recipe(
        "qwen2", MIXTURES["biases-nocopy"], num_layers=8, stages=_stages(2200, 500, 300), seed=4, **_SMALL
    ),
    "hops": Recipe(tasks=MIXTURES["hops"], num_layers=8, stages=_stages(3000, 500, 300), seed=5, **_MEMBER),
    "large-32k": Recipe(
        hidden_size=512,
        intermediate_size=1536,
        num_layers=8,
        num_kv_heads=2,
        max_positions=36864,
        stages=_stages(1600, 400, 200, Stage(32768, 2, 200)),
        peak_lr=1e-3,
        held_out_rows=8,
        seed=6,
    ),
}


def causal_attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: None) -> tuple[jax.Array, None]:
    """Exact attention for the decoder: cuDNN's flash attention on a GPU."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation), state


class Trainer:
    """Weights, optimizer and the compiled steps of each stage."""

    def __init__(self, recipe: Recipe, workers: int | None = None) -> None:
        self.recipe, self.workers = recipe, workers
        dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        decoder = Decoder(recipe.model_config(), dtype=dtype, param_dtype=jnp.float32, rngs=nnx.Rngs(recipe.seed))
        self.graphdef, self.params = nnx.split(decoder)
        self.optimizer = optax.apply_if_finite(  # one bad batch must not end the run
            optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.scale_by_adam(b1=0.9, b2=0.95),
                optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
            ),
            max_consecutive_errors=100,
        )
        self.opt_state = self.optimizer.init(self.params)

    def outcome(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Loss of each next byte, in nats, and whether it is the likeliest one."""
        decoder = nnx.merge(self.graphdef, params)
        inputs, targets = tokens[:, :-1].astype(jnp.int32), tokens[:, 1:].astype(jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        hidden, _ = decoder(inputs, positions, causal_attention, (None,) * decoder.config.num_layers)
        logits = decoder.logits(hidden)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses, jnp.argmax(logits, axis=-1) == targets

    def loss(self, params: Any, tokens: jax.Array, answers: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Weighted next-byte loss, in nats, and metrics."""
        losses, right = self.outcome(params, tokens)
        answer = (answers[:, 1:] > 0).astype(jnp.float32)
        weights = 1 + (self.recipe.answer_weight - 1) * answer
        num_bytes = jnp.maximum(answer.sum(), 1)
        metrics = {
            "text_loss": jnp.sum(losses * (1 - answer)) / jnp.sum(1 - answer),
            "answer_loss": jnp.sum(losses * answer) / num_bytes,
            "answer_accuracy": jnp.sum(right * answer) / num_bytes,
        }
        return jnp.sum(losses * weights) / jnp.sum(weights), metrics

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def _step(self, params: Any, opt_state: Any, tokens: jax.Array, answers: jax.Array, lr: jax.Array) -> Any:
        gradients, metrics = jax.grad(self.loss, has_aux=True)(params, tokens, answers)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        return jax.tree.map(lambda p, u: p - lr * u, params, updates), opt_state, metrics

    def run_stage(self, index: int, first: int, log: Path) -> int:
        """Trains a stage from step `first` on; returns the steps so far."""
        recipe, stage = self.recipe, self.recipe.stages[index]
        counted, since, end = first, time.monotonic(), first + stage.steps
        drawn = training_batches(recipe.seed, stage, recipe.recall_share, first, recipe.tasks, self.workers)
        with contextlib.closing(drawn) as batches:
            for step in range(first, end):
                batch, lr = next(batches), recipe.learning_rate(step)
                self.params, self.opt_state, metrics = self._step(
                    self.params, self.opt_state, batch.tokens, batch.answers, np.float32(lr)
                )
                if (step + 1) % recipe.log_every == 0 or step + 1 == end:
                    values = {name: float(value) for name, value in metrics.items()}
                    rate = (step + 1 - counted) * stage.rows * stage.length / (time.monotonic() - since)
                    entry = {"step": step + 1, "length": stage.length, "lr": lr, **values}
                    _note(log, {**entry, "tokens_per_second": round(rate)})
                    counted, since = step + 1, time.monotonic()
        return end

    def answered(self, stage: Stage) -> dict[str, Any]:
        """Share of held-out questions of each task with a right answer, at a stage's length, and the loss."""
        batch = make_batch((self.recipe.seed, 0, 1), stage, "held-out", 1.0, self.recipe.tasks)
        outcome = jax.jit(self.outcome)
        parts = [jax.device_get(outcome(self.params, batch.tokens[i : i + 1])) for i in range(stage.rows)]
        losses, right = (np.concatenate(part) for part in zip(*parts, strict=True))
        answers = batch.answers[:, 1:]
        found: dict[str, list[bool]] = {}
        for row, tasks in enumerate(batch.tasks):
            for number, task in enumerate(tasks, start=1):
                found.setdefault(task, []).append(bool(right[row][answers[row] == number].all()))
        return {
            "length": stage.length,
            "text_loss": float(losses[answers == 0].mean()),
            "questions": sum(map(len, found.values())),
            "right": {task: float(np.mean(found[task])) for task in sorted(found)},
        }


def _note(log: Path, entry: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(json.dumps(entry), flush=True)


def train(recipe: Recipe, out: Path, workers: int | None = None) -> None:
    """Trains all stages, answers held-out questions, and saves the model and its log."""
    out.mkdir(parents=True, exist_ok=True)
    trainer, log, step = Trainer(recipe, workers), out / "train_log.jsonl", 0
    log.unlink(missing_ok=True)
    run = {
        "device": jax.devices()[0].device_kind,
        "parameters": sum(p.size for p in jax.tree.leaves(trainer.params)),
        "text_bytes": len(corpus("train")),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "seed": recipe.seed,
        "recipe": dataclasses.asdict(recipe),
    }
    _note(log, run)
    for index in range(len(recipe.stages)):
        step = trainer.run_stage(index, step, log)
    save_decoder(out, nnx.merge(trainer.graphdef, trainer.params), jnp.bfloat16, _SPECIAL_IDS)
    GenerationConfig(**_SPECIAL_IDS, do_sample=False).save_pretrained(out)
    build_tokenizer(recipe.max_positions).save_pretrained(out)
    held_out = trainer.answered(dataclasses.replace(recipe.stages[-1], rows=recipe.held_out_rows))
    _note(log, {"held_out": held_out})


def build_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the bytes of UTF-8, with bos in front."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]  # GPT-2's table
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
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


def main(
    out: Annotated[Path, typer.Option(help="Folder of the model; with --zoo, of all members.")],
    zoo: Annotated[bool, typer.Option("--zoo", help="Train the zoo's members; trained ones are skipped.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Of the zoo, this member; may be repeated.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that make batches.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny models, a few steps.")] = False,
) -> None:
    """Train recall-tiny, or the zoo's other members, on fixed schedules."""
    if unknown := sorted({*(only or ())} - {*RECIPES}):
        raise SystemExit(f"--only {', '.join(unknown)}: must be one of {', '.join(RECIPES)}")
    names = [name for name in RECIPES if name in (only or list(RECIPES)[1:])] if zoo else ["recall-tiny"]
    for name in names:
        folder, recipe = out / name if zoo else out, RECIPES[name]
        if zoo and (folder / "model.safetensors").exists():
            continue
        train(recipe.smoke() if smoke else recipe, folder, workers)


if __name__ == "__main__":
    typer.run(main)
