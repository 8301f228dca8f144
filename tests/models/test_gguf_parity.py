"""Trained GGUF files give the logits and greedy answers of transformers' own reader of GGUF."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tca_jax
from tca_jax.engine.prompts import encode_prompts
from tca_jax.lab.models import find

torch = pytest.importorskip("torch", reason="parity is measured against the torch models of transformers")

import transformers  # noqa: E402

pytestmark = pytest.mark.integration

TOLERANCE = 2e-3
TIE = 1e-3  # between the two best logits
WORDS = (
    *("the", "Ein", "пять", "値段", "def", "return", "+=", "{}", "3.14", "1999", "\n\n", "quick-brown", "foxes;"),
    *("naïve", "'quoted'", "<tag>", "\t", "e=mc²"),
)
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at 100 degrees Celsius because " + "of the pressure of the air. " * 6 + "In short,",
    "import numpy as np\n\n\ndef softmax(x):\n    " + '"""Numerically stable softmax."""\n    ',
)
QUESTIONS = (
    "Hi!",
    "Name three primary colours.",
    "Write a Python function that reverses a string.",
    "Summarize in one sentence: " + "the river rose, the bridge fell, and the village waited. " * 4,
)
CHATS = tuple([{"role": "user", "content": question}] for question in QUESTIONS)


@pytest.fixture(scope="module", params=["smollm2", "qwen-0.5b"])
def models(request: pytest.FixtureRequest) -> Iterator[tuple[tca_jax.LM, Any]]:
    """A file, read by this package and by transformers, in float32."""
    path = find(request.param)
    if path is None:
        pytest.skip(f"{request.param}.gguf is missing: python -m tca_jax.lab.models fetch {request.param}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside other processes two are ten times as slow
    yield tca_jax.load(path, dtype=jnp.float32), reference(path)
    torch.set_num_threads(threads)


def reference(path: Path) -> Any:
    options = {"gguf_file": path.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # before transformers 5.24 it always dequantized
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()


def random_tokens(lm: tca_jax.LM, count: int) -> list[int]:
    """Of random text."""
    text = " ".join(random.Random(0).choices(WORDS, k=count))
    return lm.tokenizer.encode(text)[:count]


def test_logits_equal_those_of_transformers(models: tuple[tca_jax.LM, Any], cached_attention: Any) -> None:
    lm, model = models
    tokens = np.array([random_tokens(lm, 256)], np.int32)
    graphdef, weights = nnx.split(lm.decoder)

    @jax.jit
    def logits(weights: Any, tokens: Any) -> Any:
        decoder, positions = nnx.merge(graphdef, weights), jnp.arange(tokens.shape[1])[None]
        cache = jnp.zeros((1, tokens.shape[1], lm.config.num_kv_heads, lm.config.head_dim))
        attention = cached_attention(positions, jnp.ones_like(positions, bool))
        hidden, _ = decoder(tokens, positions, attention, ((cache, cache),) * lm.config.num_layers)
        return decoder.logits(hidden[0])

    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits[0].numpy()
    error = np.abs(np.asarray(logits(weights, tokens)) - expected).max()
    print(f"largest error {error:.1e} of logits up to {np.abs(expected).max():.1f}")  # shown by pytest -rP
    assert tokens.shape == (1, 256)
    assert error < TOLERANCE


def test_greedy_answers_equal_those_of_transformers(models: tuple[tca_jax.LM, Any]) -> None:
    lm, model = models
    prompts = encode_prompts(lm, [*TEXTS, *CHATS])
    ours = tca_jax.generate(lm, [*TEXTS, *CHATS], max_new_tokens=64, stop_token_ids=()).tokens
    ties = 0
    for prompt, answer, expected in zip(prompts, ours, answers_of(model, prompts, 64), strict=True):
        if list(answer) != expected:
            assert gap_at_difference(model, prompt, list(answer), expected) < TIE
            ties += 1
    print(f"{ties} ties among {len(prompts)} answers to {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
    assert len(prompts) == 10
    assert ties <= 1


def answers_of(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy answers of `count` tokens, in one batch that is padded on the left."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    options = {"attention_mask": mask, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return model.generate(tokens, **options)[:, longest:].tolist()


def gap_at_difference(model: Any, prompt: list[int], answer: list[int], expected: list[int]) -> float:
    """Between the two best logits of the reference, at the first token in which two answers differ."""
    same = next(i for i, pair in enumerate(zip(answer, expected, strict=True)) if pair[0] != pair[1])
    with torch.no_grad():
        best = model(torch.tensor([prompt + expected[:same]])).logits[0, -1].topk(2)
    assert answer[same] in best.indices
    return float(best.values[0] - best.values[1])
