"""Trains recall-tiny, the model that ships: a byte-level LLaMA that finds facts in long text and answers in chats.

    pip install optax
    python examples/train_recall_model.py --out recall-tiny          # one GPU, three minutes
    python examples/train_recall_model.py --out smoke --smoke        # any machine, a minute: runs every step

The schedule is fixed: training does not stop when the tasks are learned, so that heads get as sharp as they will.
`evaluate_zoo.py` then calibrates the model and asks it questions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from recall_artifacts import save_checkpoint
from recall_data import DEFAULT_TASKS, Stage, make_batch, training_batches
from recall_tokens import VOCAB_SIZE

from tca_jax.lab.recall.corpus import corpus
from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides what is trained and how it is evaluated.

    Attributes:
        model_type: Family of the model: "llama", "qwen2" (biases on queries, keys and values) or "qwen3" (QK norm).
        tasks: What is asked, names that `zoo_tasks` knows; one that stands there twice is asked twice as often.
        stages: The curriculum, shortest sequences first.
        peak_lr: Learning rate behind the warm-up and for the first half of all steps; then it falls along a cosine.
        least_lr: Share of `peak_lr` at the end.
        warmup_steps: Steps of linear warm-up.
        answer_weight: Loss weight of an answer's byte (any other byte: 1); answers are a tenth of the text.
        recall_share: Share of a batch's rows that are documents with questions; the others are plain text.
        log_every: Steps between log lines.
        held_out_rows: Documents of the longest stage's length that are answered at the end.
    """

    model_type: str = "llama"
    tasks: tuple[str, ...] = DEFAULT_TASKS
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    max_positions: int = 16384
    stages: tuple[Stage, ...] = (Stage(1024, 64, 2250), Stage(4096, 16, 900), Stage(16384, 4, 900))
    peak_lr: float = 2e-3
    least_lr: float = 0.02
    warmup_steps: int = 200
    answer_weight: float = 10.0
    recall_share: float = 0.85
    log_every: int = 100
    held_out_rows: int = 16

    def times(self, factor: int) -> Recipe:
        """The same recipe with `factor` times the steps."""
        stages = tuple(dataclasses.replace(stage, steps=factor * stage.steps) for stage in self.stages)
        return dataclasses.replace(self, stages=stages)

    def learning_rate(self, step: int) -> float:
        """At a step: linear warm-up, level to the half, then a cosine."""
        done = step / sum(stage.steps for stage in self.stages)
        cosine = 0.5 * (1 + math.cos(math.pi * max(0.0, 2 * done - 1)))
        return self.peak_lr * min(1.0, (step + 1) / self.warmup_steps) * (self.least_lr + (1 - self.least_lr) * cosine)

    def model_config(self) -> ModelConfig:
        return ModelConfig.from_hf(
            {
                "model_type": self.model_type,
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
    max_positions=8192,  # a calibration text and all its questions
    stages=(Stage(1024, 2, 4), Stage(2048, 1, 4)),
    warmup_steps=4,
    log_every=4,
    held_out_rows=1,
)


def causal_attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, state: None) -> tuple[jax.Array, None]:
    """Exact attention for the decoder: cuDNN's flash attention on a GPU."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation), state


class Trainer:
    """Weights, optimizer and the compiled steps of each stage."""

    def __init__(self, recipe: Recipe, seed: int, workers: int | None = None) -> None:
        self.recipe = recipe
        self.seed = seed
        self.workers = workers
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

    def _outcome(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Loss of each next byte, in nats, and whether it is the most probable one."""
        decoder = nnx.merge(self.graphdef, params)
        inputs, targets = tokens[:, :-1].astype(jnp.int32), tokens[:, 1:].astype(jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        hidden, _ = decoder(inputs, positions, causal_attention, (None,) * decoder.config.num_layers)
        logits = decoder.logits(hidden)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses, jnp.argmax(logits, axis=-1) == targets

    def _loss(self, params: Any, tokens: jax.Array, answers: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Weighted next-byte loss, in nats, and what is logged."""
        losses, right = self._outcome(params, tokens)
        answer = (answers[:, 1:] > 0).astype(jnp.float32)
        weights = 1 + (self.recipe.answer_weight - 1) * answer
        num_bytes = jnp.maximum(answer.sum(), 1)
        metrics = {
            "text_loss": jnp.sum(losses * (1 - answer)) / jnp.sum(1 - answer),
            "answer_loss": jnp.sum(losses * answer) / num_bytes,
            "answer_accuracy": jnp.sum(right * answer) / num_bytes,
        }
        return jnp.sum(losses * weights) / jnp.sum(weights), metrics

    def _step(self, params: Any, opt_state: Any, tokens: jax.Array, answers: jax.Array, lr: jax.Array) -> Any:
        gradients, metrics = jax.grad(self._loss, has_aux=True)(params, tokens, answers)
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
        return params, opt_state, metrics

    def _compile(self, stage: Stage, params: Any, opt_state: Any) -> Any:
        """The training step of a stage."""
        batch = (jax.ShapeDtypeStruct((stage.rows, stage.length + 1), jnp.int16),) * 2
        lr = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.jit(self._step, donate_argnums=(0, 1)).lower(params, opt_state, *batch, lr).compile()

    def run_stage(self, index: int, first: int, log: Log) -> int:
        """Trains one stage.

        Args:
            index: Of the stage.
            first: Steps done so far.
            log: Gets a line every `log_every` steps and at the end.

        Returns:
            Steps done so far, this stage included.
        """
        recipe, stage = self.recipe, self.recipe.stages[index]
        train_step = self.compiled[index].result()
        counted, since, end = first, time.monotonic(), first + stage.steps
        drawn = training_batches(self.seed, stage, recipe.recall_share, first, recipe.tasks, self.workers)
        with contextlib.closing(drawn) as batches:
            for step in range(first, end):
                batch, lr = next(batches), recipe.learning_rate(step)
                self.params, self.opt_state, metrics = train_step(
                    self.params, self.opt_state, batch.tokens, batch.answers, np.float32(lr)
                )
                if (step + 1) % recipe.log_every == 0 or step + 1 == end:
                    jax.block_until_ready(metrics)
                    rate = (step + 1 - counted) * stage.rows * stage.length / (time.monotonic() - since)
                    log.write(step + 1, stage, lr, metrics, rate)
                    counted, since = step + 1, time.monotonic()
        return end

    def answered(self, stage: Stage) -> dict[str, Any]:
        """Share of held-out questions of each task whose whole answer is right, at a stage's length, and the loss."""
        batch = make_batch((self.seed, 0, 1), stage, "held-out", 1.0, self.recipe.tasks)
        outcome = jax.jit(self._outcome)
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


class Log:
    """Progress on the terminal and, line by line, in a JSON-lines file."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.start = time.monotonic()
        self.path = path
        path.write_text(json.dumps(run) + "\n")

    def write(self, step: int, stage: Stage, lr: float, metrics: Any, tokens_per_second: float) -> None:
        """Writes one line."""
        entry = {
            "step": step,
            "seconds": round(time.monotonic() - self.start, 1),
            "length": stage.length,
            "lr": lr,
            **{name: float(value) for name, value in metrics.items()},
            "tokens_per_second": round(tokens_per_second),
        }
        self.note(entry)
        print(
            f"{entry['seconds']:6.1f} s  step {step:5d}  length {stage.length:5d}  lr {lr:.1e}  "
            f"text {entry['text_loss']:.3f}  answers {entry['answer_loss']:.4f}  "
            f"bytes right {entry['answer_accuracy']:6.1%}  {tokens_per_second / 1e3:.0f}k tokens/s",
            flush=True,
        )

    def note(self, entry: dict[str, Any]) -> None:
        """Appends anything to the file."""
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def train(recipe: Recipe, out: Path, *, seed: int, workers: int | None = None) -> None:
    """Trains all stages, answers held-out questions and saves the model.

    Args:
        recipe: What is trained.
        out: Folder for the model and its log; made if it does not exist.
        seed: Draws weights and data.
        workers: Processes that make batches; see `training_batches`.
    """
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe, seed, workers)
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
    print(f"trained {step} steps in {time.monotonic() - start:.0f} s", flush=True)
    save_checkpoint(out, trainer.decoder)
    answered = trainer.answered(dataclasses.replace(recipe.stages[-1], rows=recipe.held_out_rows))
    log.note({"held_out": answered})
    print(
        f"held out, {answered['questions']} questions at {answered['length']} bytes, text loss "
        f"{answered['text_loss']:.3f}; whole answers right by teacher forcing:"
    )
    print("  ".join(f"{task} {share:.1%}" for task, share in answered["right"].items()), flush=True)


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for the model and its log.")],
    seed: Annotated[int, typer.Option(help="Draws weights and data.")] = 0,
    times: Annotated[int, typer.Option(min=1, help="Times the recipe's steps.")] = 1,
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model and a few steps: checks that all runs.")] = False,
) -> None:
    """Train recall-tiny on a fixed schedule."""
    train((SMOKE if smoke else Recipe()).times(times), out, seed=seed)


if __name__ == "__main__":
    app()
