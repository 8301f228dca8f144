"""Trains recall-tiny, the model that ships: a byte-level LLaMA that finds facts in long text.

Then it calibrates the model, compares full attention with TCA on fresh questions and writes the model card.

    pip install optax
    python examples/train_recall_model.py --out recall-tiny          # one GPU, under 10 minutes
    python examples/train_recall_model.py --out smoke --smoke        # any machine, a minute: runs every step
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from recall_artifacts import BOS, EOS, VOCAB_SIZE, save_checkpoint, write_card

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.needles import (
    CODE_DIGITS,
    NEEDLE_BYTES,
    QUESTION_BYTES,
    build_document,
    corpus,
    is_correct,
)

ANSWER_TOKENS = CODE_DIGITS + 2  # the digits, the full stop, end of sequence
TURN_TOKENS = QUESTION_BYTES + ANSWER_TOKENS
EVAL_NEEDLES = 8


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum: `steps` of `rows` sequences of `length` tokens. The first stage's count from the
    moment at which recall has formed."""

    length: int
    rows: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides what is trained and how it is evaluated.

    Attributes:
        stages: The curriculum, shortest sequences first.
        peak_lr: Learning rate after the warm-up and until recall has formed; then it falls along a cosine to 2%.
        warmup_steps: Steps of linear warm-up.
        formed_accuracy: Share of right digits on held-out text at which recall counts as formed. Training ends soon
            after that: a model trained on puts nearly all attention of a head on a token or two, and learns its
            six megabytes of text by heart.
        most_steps: Steps without recall after which training gives up.
        answer_weight: Loss weight of an answer's digit (any other byte: 1); digits are under 1% of long text.
        needle_share: Share of a batch's rows that are needle documents; the others are plain text.
        log_every: Steps between log lines.
        eval_tokens: Prompt tokens of the calibration and evaluation documents.
        eval_questions: Questions asked under full attention and under TCA.
        eval_batch: Prompts in one call of `generate`.
        window: TCA's window at that length.
    """

    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 16384
    stages: tuple[Stage, ...] = (Stage(1024, 64, 200), Stage(4096, 16, 250), Stage(16384, 4, 120))
    peak_lr: float = 2e-3
    warmup_steps: int = 200
    formed_accuracy: float = 0.98
    most_steps: int = 10000
    answer_weight: float = 10.0
    needle_share: float = 0.8
    log_every: int = 100
    eval_tokens: int = 8192
    eval_questions: int = 200
    eval_batch: int = 20
    calibration_texts: int = 8
    window: int = 512

    def learning_rate(self, step: int, share: float) -> float:
        """At a step, when `share` of what follows the forming of recall is over."""
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return self.peak_lr * min(1.0, (step + 1) / self.warmup_steps) * (0.02 + 0.98 * cosine)

    def model_config(self) -> ModelConfig:
        return ModelConfig.from_hf(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": VOCAB_SIZE,
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "max_position_embeddings": self.max_positions,
                "rope_theta": 500_000.0,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
            }
        )


SMOKE = Recipe(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_positions=1024,
    stages=(Stage(256, 4, 4), Stage(512, 2, 4)),
    warmup_steps=4,
    formed_accuracy=0.0,
    log_every=4,
    eval_tokens=640,
    eval_questions=4,
    eval_batch=2,
    calibration_texts=2,
    window=128,
)


# --- data: numpy, in background threads ---


def needle_row(rng: np.random.Generator, length: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """A needle document that ends with all of its questions and their answers.

    Returns:
        `[length + 1]` token ids, and bool of the same shape: which of them are digits of an answer.
    """
    most = max(1, min(32, length // (TURN_TOKENS + NEEDLE_BYTES + 20)))
    num_needles = int(rng.integers(1, most + 1))
    text_bytes = length - num_needles * TURN_TOKENS
    document = build_document(rng, text_bytes + QUESTION_BYTES, num_needles, split)
    turns = [q.prompt.encode() + q.answer.encode() + b"." for q in document.questions]
    tokens = np.empty(length + 1, np.int32)
    answer = np.zeros(length + 1, bool)
    tokens[0] = BOS
    tokens[1 : 1 + text_bytes] = np.frombuffer(document.text.encode(), np.uint8)
    # Every answer is closed with eos, so that a model which is asked one question stops by itself.
    table = tokens[1 + text_bytes :].reshape(num_needles, TURN_TOKENS)
    table[:, :-1] = np.frombuffer(b"".join(turns), np.uint8).reshape(num_needles, -1)
    table[:, -1] = EOS
    answer[1 + text_bytes :].reshape(num_needles, TURN_TOKENS)[:, QUESTION_BYTES:-2] = True
    return tokens, answer


def text_row(rng: np.random.Generator, length: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """A passage of plain text; the shapes are those of `needle_row`."""
    text = corpus(split)
    start = int(rng.integers(len(text) - length + 1))
    passage = np.frombuffer(text, np.uint8, length, start)
    return np.concatenate([[BOS], passage]).astype(np.int32), np.zeros(length + 1, bool)


def make_batch(seed: tuple[int, ...], stage: Stage, split: str, needle_share: float) -> tuple[np.ndarray, ...]:
    """`[rows, length + 1]` token ids and which of them are answer digits; decided by the arguments alone."""
    rng = np.random.default_rng(seed)
    needles = round(needle_share * stage.rows)
    rows = [(needle_row if i < needles else text_row)(rng, stage.length, split) for i in range(stage.rows)]
    return np.stack([tokens for tokens, _ in rows]), np.stack([answer for _, answer in rows])


def training_batches(seed: int, stage: Stage, needle_share: float, first: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Endless batches of a stage, built ahead of their use."""
    with ThreadPoolExecutor(4) as pool:
        ahead: collections.deque[Any] = collections.deque()
        step = first
        try:
            while True:
                while len(ahead) < 16:
                    ahead.append(pool.submit(make_batch, (seed, step), stage, "train", needle_share))
                    step += 1
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


# --- training ---


def causal_attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: None) -> tuple[jax.Array, None]:
    """Exact attention for the decoder: cuDNN's flash attention on a GPU."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation), state


class Trainer:
    """Weights, optimizer and the compiled steps of each stage."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        self.seed = seed
        dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        decoder = Decoder(recipe.model_config(), dtype=dtype, param_dtype=jnp.float32, rngs=nnx.Rngs(seed))
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
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self.params, self.opt_state))
        # One worker: stages compile in their order, the later ones while the first one trains.
        with_one_worker = ThreadPoolExecutor(1)
        self.compiled = [with_one_worker.submit(self._compile, stage, *shapes) for stage in recipe.stages]
        with_one_worker.shutdown(wait=False)

    @property
    def decoder(self) -> Decoder:
        return nnx.merge(self.graphdef, self.params)

    def _loss(self, params: Any, tokens: jax.Array, answer: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Weighted next-byte loss, in nats, and what is logged."""
        decoder = nnx.merge(self.graphdef, params)
        inputs, targets, digits = tokens[:, :-1], tokens[:, 1:], answer[:, 1:].astype(jnp.float32)
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        hidden, _ = decoder(inputs, positions, causal_attention, (None,) * decoder.config.num_layers)
        logits = decoder.logits(hidden)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        weights = 1 + (self.recipe.answer_weight - 1) * digits
        right = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
        num_digits = jnp.maximum(digits.sum(), 1)
        metrics = {
            "text_loss": jnp.sum(losses * (1 - digits)) / jnp.sum(1 - digits),
            "answer_loss": jnp.sum(losses * digits) / num_digits,
            "answer_accuracy": jnp.sum(right * digits) / num_digits,
        }
        return jnp.sum(losses * weights) / jnp.sum(weights), metrics

    def _step(self, params: Any, opt_state: Any, tokens: jax.Array, answer: jax.Array, lr: jax.Array) -> Any:
        gradients, metrics = jax.grad(self._loss, has_aux=True)(params, tokens, answer)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
        return params, opt_state, metrics

    def _compile(self, stage: Stage, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """The training step and the held-out metrics of a stage."""
        shape = (stage.rows, stage.length + 1)
        batch = (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_))
        lr = jax.ShapeDtypeStruct((), jnp.float32)
        step = jax.jit(self._step, donate_argnums=(0, 1)).lower(params, opt_state, *batch, lr).compile()
        return step, jax.jit(lambda *args: self._loss(*args)[1]).lower(params, *batch).compile()

    def run_stage(self, index: int, step: int, log: Log) -> int:
        """Trains one stage.

        Args:
            index: Of the stage.
            step: Steps done so far.
            log: Gets a line every `log_every` steps and at the end; the first stage reads from it whether recall has
                formed.

        Returns:
            Steps done so far, this stage included.

        Raises:
            RuntimeError: recall has not formed within `most_steps`.
        """
        recipe, stage = self.recipe, self.recipe.stages[index]
        total = sum(s.steps for s in recipe.stages)
        before = sum(s.steps for s in recipe.stages[:index])
        train_step, held_out_metrics = self.compiled[index].result()
        held_out = make_batch((self.seed, index), stage, "held-out", 1.0)
        formed = step if index else None  # the step from which this stage's own steps count
        counted, since = step, time.monotonic()
        with contextlib.closing(training_batches(self.seed, stage, recipe.needle_share, step)) as batches:
            while formed is None or step < formed + stage.steps:
                share = 0.0 if formed is None else (before + step - formed) / total
                lr = recipe.learning_rate(step, share)
                self.params, self.opt_state, metrics = train_step(
                    self.params, self.opt_state, *next(batches), np.float32(lr)
                )
                step += 1
                last = formed is not None and step == formed + stage.steps
                if step % recipe.log_every == 0 or last:
                    jax.block_until_ready(metrics)
                    rate = (step - counted) * stage.rows * stage.length / (time.monotonic() - since)
                    accuracy = log.write(step, stage, lr, metrics, held_out_metrics(self.params, *held_out), rate)
                    counted, since = step, time.monotonic()
                    if formed is None and accuracy >= recipe.formed_accuracy:
                        formed = step
                if formed is None and step >= recipe.most_steps:
                    raise RuntimeError(f"recall has not formed within {step} steps: try another --seed")
        return step


class Log:
    """Progress on the terminal and, line by line, in a JSON-lines file."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.start = time.monotonic()
        self.path = path
        path.write_text(json.dumps(run) + "\n")

    def write(self, step: int, stage: Stage, lr: float, train: Any, held_out: Any, tokens_per_second: float) -> float:
        """Writes one line; returns the share of right answer digits on held-out text."""
        entry = {
            "step": step,
            "seconds": round(time.monotonic() - self.start, 1),
            "length": stage.length,
            "lr": lr,
            **{f"train_{name}": float(value) for name, value in train.items()},
            **{f"held_out_{name}": float(value) for name, value in held_out.items()},
            "tokens_per_second": round(tokens_per_second),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(
            f"{entry['seconds']:6.1f} s  step {step:5d}  length {stage.length:5d}  lr {lr:.1e}  "
            f"text {entry['train_text_loss']:.3f}  answers {entry['train_answer_loss']:.3f}  held out: "
            f"text {entry['held_out_text_loss']:.3f}  answers {entry['held_out_answer_loss']:.3f}  "
            f"digits right {entry['held_out_answer_accuracy']:6.1%}  {tokens_per_second / 1e3:.0f}k tokens/s",
            flush=True,
        )
        return entry["held_out_answer_accuracy"]


def train(recipe: Recipe, out: Path, *, seed: int) -> None:
    """Trains all stages and saves the model."""
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe, seed)
    run = {
        "device": jax.devices()[0].device_kind,
        "parameters": sum(p.size for p in jax.tree.leaves(trainer.params)),
        "text_bytes": len(corpus("train")),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "seed": seed,
        "recipe": dataclasses.asdict(recipe),
    }
    log = Log(out / "train_log.jsonl", run)
    print(f"{run['parameters']:,} parameters, {run['text_bytes']:,} bytes of text, {run['device']}", flush=True)

    step = 0
    for index in range(len(recipe.stages)):
        step = trainer.run_stage(index, step, log)
    save_checkpoint(out, trainer.decoder)
    print(f"trained {step} steps in {time.monotonic() - start:.0f} s; saved to {out}", flush=True)


# --- calibration and evaluation: the library's own path ---


def calibrate(folder: Path, recipe: Recipe, *, seed: int) -> Profile:
    """Head budgets from training text with needles and a question at the end; saved beside the model."""
    rng = np.random.default_rng((seed, 1))
    documents = [
        build_document(rng, recipe.eval_tokens - 1, EVAL_NEEDLES, "train") for _ in range(recipe.calibration_texts)
    ]
    texts = [document.prompt(document.questions[0]) for document in documents]
    lm = tca_jax.load(folder)
    profile = tca_jax.calibrate(lm, texts, tca_jax.TCAConfig(window=recipe.window))
    profile.save(folder / "profile")
    return profile


def evaluate(
    folder: Path,
    profile: Profile,
    *,
    num_questions: int = 200,
    num_tokens: int = 8192,
    batch: int = 20,
    seed: int = 0,
) -> dict[str, Any]:
    """Asks the same questions under full attention and under TCA; exact match, greedy.

    Args:
        folder: The checkpoint.
        profile: Head budgets for TCA.
        num_questions: Questions, each about a document of its own: held-out text with `EVAL_NEEDLES` needles.
        num_tokens: Prompt tokens: the document, its question and the bos token.
        batch: Prompts in one call of `generate`.
        seed: Draws the documents.

    Returns:
        Accuracy under "full" and "tca", and the shares of tokens and of cache bytes that TCA kept.
    """
    rng = np.random.default_rng((seed, 2))
    documents = [build_document(rng, num_tokens - 1, EVAL_NEEDLES, "held-out") for _ in range(num_questions)]
    questions = [document.questions[0] for document in documents]
    prompts = [document.prompt(question) for document, question in zip(documents, questions, strict=True)]
    full = tca_jax.load(folder)
    result: dict[str, Any] = {"questions": num_questions, "tokens": num_tokens, "needles": EVAL_NEEDLES}
    for method, lm in (("full", full), ("tca", full.with_profile(profile))):
        texts: list[str] = []
        for first in range(0, num_questions, batch):
            out = tca_jax.generate(lm, prompts[first : first + batch], max_new_tokens=ANSWER_TOKENS)
            texts += out.text
        right = [is_correct(question, text) for question, text in zip(questions, texts, strict=True)]
        result[f"{method}_accuracy"] = sum(right) / num_questions
        if method == "tca":
            result["kept_share"] = out.stats.kept_share
            result["kv_cache_share"] = out.stats.kv_cache_bytes / out.stats.full_kv_cache_bytes
            result["window"] = profile.config.window
        print(f"{method:>4}: {sum(right)} of {num_questions} right", flush=True)
    print(f"TCA kept {result['kept_share']:.1%} of tokens, {result['kv_cache_share']:.1%} of KV cache bytes")
    return result


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for the model, its profile, log and card.")],
    seed: Annotated[int, typer.Option(help="Draws weights and data.")] = 0,
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model and a few steps: checks that all runs.")] = False,
    training: Annotated[bool, typer.Option(help="Train; without, --out holds a trained model.")] = True,
    evaluation: Annotated[bool, typer.Option(help="Calibrate, evaluate and complete the card.")] = True,
) -> None:
    """Train recall-tiny, calibrate it, compare full attention with TCA and write the model card."""
    recipe = SMOKE if smoke else Recipe()
    if training:
        train(recipe, out, seed=seed)
        write_card(out)
    if evaluation:
        profile = calibrate(out, recipe, seed=seed)
        result = evaluate(
            out,
            profile,
            num_questions=recipe.eval_questions,
            num_tokens=recipe.eval_tokens,
            batch=recipe.eval_batch,
            seed=seed,
        )
        (out / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
        write_card(out)


if __name__ == "__main__":
    app()
