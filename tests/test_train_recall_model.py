"""Training recipes of recall-tiny and the zoo: batches, tasks, recipes, and a tiny run of every step."""

import hashlib
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tca_jax.lab.recall import TASKS
from tca_jax.lab.recall.corpus import corpus
from tca_jax.lab.recall.facts import draw_keys
from tca_jax.loading import load

pytest.importorskip("optax", reason="the training script's optimizer is no dependency of the library")
EXAMPLES = Path(__file__).parent.parent / "examples"
BOS, EOS, USER, ASSISTANT = 256, 257, 259, 260
#: Of 30 questions each, with their facts: the zoo was trained on these.
DIGESTS = {
    "alias": "10ee018c36c6",
    "alias-2": "8f6223be6fdc",
    "memo-number": "04196856f09e",
    "memo-date": "1e2edf12039f",
    "memo-name": "daad34717d8f",
    "memo-keys": "62447b941412",
    "memo-pair": "0287ad0be1cf",
}
MEMBERS = ("recall-tiny", "recall-4x", "grouped", "deep-qknorm", "biases-nocopy", "hops", "large-32k")


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the script sets it: taken back here
        yield importlib.import_module("train_recall_model")


@pytest.fixture(scope="module")
def data(script):
    return importlib.import_module("recall_data")


@pytest.fixture(scope="module")
def tasks(script):
    return importlib.import_module("zoo_tasks")


def text_of(tokens):
    """Bytes as text, every special token as one character that no text holds."""
    return "".join(chr(token) if token < 128 else "\0" for token in tokens)


@pytest.mark.parametrize("name", MEMBERS)
def test_batches_mark_answers_found_before(script, data, name):
    recipe, stage = script.RECIPES[name], data.Stage(4096, 12, 1)
    batch = data.make_batch((recipe.seed, 0), stage, "train", recipe.recall_share, recipe.tasks)
    assert batch.tokens.shape == batch.answers.shape == (12, 4097)
    assert (batch.tokens.dtype, set(batch.tokens[:, 0].tolist())) == (np.int16, {BOS})
    assert {task for row in batch.tasks for task in row} == set(recipe.tasks)
    assert [bool(asked) for asked in batch.tasks] == [True] * 10 + [False] * 2
    for tokens, answers, asked in zip(*batch, strict=True):
        assert set(answers.tolist()) == {*range(len(asked) + 1)}
        assert tokens[-1] == EOS or bytes(tokens[1:].astype(np.uint8)) in corpus("train")
        for number in range(1, len(asked) + 1):
            answer = text_of(tokens[answers == number])
            assert answer.endswith(".\0")
            first = re.split(r", the | and the ", answer.removesuffix(".\0"))[0]
            assert first in text_of(tokens[: np.flatnonzero(answers == number)[0]])


@pytest.mark.parametrize("task", DIGESTS)
def test_zoo_questions_keep_their_text(tasks, task):
    found = hashlib.sha256()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        question = tasks.DRAWS[task](rng, task, draw_keys(rng))
        lines = (*(fact.line for fact in question.facts), question.text, question.lead, question.answer)
        found.update("\0".join(lines).encode())
    assert found.hexdigest()[:12] == DIGESTS[task]


@pytest.mark.slow
def test_smoke_run_learns_and_writes_its_files(script, tmp_path):
    command = [sys.executable, str(EXAMPLES / "train_recall_model.py"), "--smoke", "--workers", "1", "--out"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run, *log, last = [json.loads(line) for line in (tmp_path / "train_log.jsonl").read_text().splitlines()]
    stages = script.Recipe().smoke().stages
    assert run["recipe"]["stages"] == [script.dataclasses.asdict(stage) for stage in stages]
    assert [(entry["length"], entry["step"]) for entry in log] == [(1024, 4), (2048, 8)]
    assert log[-1]["text_loss"] < log[0]["text_loss"] < 5.6  # ln 264 = 5.58
    assert set(last["held_out"]["right"]) <= set(TASKS)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text())["eos_token_id"] == EOS
    tokenizer, text = AutoTokenizer.from_pretrained(tmp_path), "naïve"
    assert tokenizer(text)["input_ids"] == [BOS, *text.encode()]
    assert load(tmp_path).config.num_layers == script.Recipe().smoke().num_layers
