"""The training script: what its batches hold, and a tiny run of every step to a folder transformers loads."""

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tca_jax
from tca_jax.lab.recall import TASKS
from tca_jax.lab.recall.corpus import corpus

pytest.importorskip("optax", reason="the training script's optimizer is no dependency of the library")
EXAMPLES = Path(__file__).parent.parent / "examples"
BOS, EOS, USER, ASSISTANT = 256, 257, 259, 260


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("train_recall_model")


@pytest.fixture(scope="module")
def data(script):
    return importlib.import_module("recall_data")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `--smoke` leaves."""
    out = tmp_path_factory.mktemp("smoke") / "recall-smoke"
    command = [sys.executable, str(EXAMPLES / "train_recall_model.py"), "--out", str(out), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def training_log(folder):
    return [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]


def text_of(tokens):
    """Bytes as text, every special token as one character that no text holds."""
    return "".join(chr(token) if token < 128 else "\0" for token in tokens)


def chat_rows(data, count):
    rows = (data.recall_row(np.random.default_rng(seed), 4096, "train") for seed in range(100))
    return [row for row in rows if row[0][1] == USER][:count]


# --- batches ---


@pytest.mark.parametrize("length", [1024, 16384])
def test_a_recall_row_fills_its_length_and_marks_exactly_its_answers(data, monkeypatch, length):
    drawn = []
    monkeypatch.setattr(data, "draw_question", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    draw = importlib.import_module("tca_jax.lab.recall.tasks").draw_question
    for seed in range(6):
        drawn.clear()
        tokens, answers, tasks = data.recall_row(np.random.default_rng(seed), length, "train")
        assert tokens.shape == answers.shape == (length + 1,)
        assert (tokens[0], tokens[-1]) == (BOS, EOS)
        assert set(answers.tolist()) == {*range(len(tasks) + 1)}
        marked = [text_of(tokens[answers == number]) for number in range(1, len(tasks) + 1)]
        fitting = iter(drawn)  # those that did not fit are left out
        for task, answer in zip(tasks, marked, strict=True):
            assert any((question.task, f"{question.answer}.\0") == (task, answer) for question in fitting)


def test_every_value_that_is_answered_stands_in_the_text_before(data):
    single = {"digits", "words", "hex", "keys", "copy"}
    tokens, answers, tasks = data.recall_row(np.random.default_rng(1), 16384, "train")
    for number in (number for number, task in enumerate(tasks, start=1) if task in single):
        value = text_of(tokens[answers == number]).removesuffix(".\0")
        before = tokens[: np.flatnonzero(answers == number)[0]]
        assert value in text_of(before)
    assert single & set(tasks)


def test_rows_come_with_and_without_a_chat_and_all_tasks_are_asked(data):
    rows = [data.recall_row(np.random.default_rng(seed), 4096, "train") for seed in range(40)]
    chats = [row[0][1] == USER for row in rows]
    assert 8 < sum(chats) < 32
    assert {task for row in rows for task in row[2]} == set(TASKS)


@pytest.mark.slow
def test_a_chat_row_is_what_the_chat_template_renders(data, tokenizer):
    """Turn by turn: the model is trained on the very ids that it is given later."""
    for tokens, _, tasks in chat_rows(data, 4):
        text = tokenizer.decode(tokens[1:])
        turns = [turn.split(">", 1) for turn in text.split("<|eos|>")[:-1]]
        messages = [{"role": role.removeprefix("<|").removesuffix("|"), "content": said} for role, said in turns]
        assert [message["role"] for message in messages] == ["user", "assistant"] * len(tasks)
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == tokens.tolist()
        assert all(message["content"].endswith(".") for message in messages[1::2])


def test_a_text_row_is_a_passage_without_answers(data):
    tokens, answers, tasks = data.text_row(np.random.default_rng(2), 500, "train")
    assert tokens[0] == BOS
    assert bytes(tokens[1:].astype(np.uint8)) in corpus("train")
    assert tokens.shape == answers.shape == (501,)
    assert not answers.any()
    assert not tasks


def test_a_batch_mixes_rows_and_depends_on_its_arguments_alone(data):
    stage = data.Stage(length=1024, rows=8, steps=1)
    batch = data.make_batch((0, 7), stage, "train", 0.5)
    again = data.make_batch((0, 7), stage, "train", 0.5)
    other = data.make_batch((0, 8), stage, "train", 0.5)
    assert batch.tokens.shape == batch.answers.shape == (8, 1025)
    assert batch.tokens.dtype == np.int16
    assert batch.answers.any(axis=1).sum() == 4
    assert [bool(tasks) for tasks in batch.tasks] == [True] * 4 + [False] * 4
    np.testing.assert_array_equal(batch.tokens, again.tokens)
    np.testing.assert_array_equal(batch.answers, again.answers)
    assert not np.array_equal(batch.tokens, other.tokens)


def test_batches_built_ahead_come_in_the_order_of_their_steps(data):
    stage = data.Stage(length=1024, rows=2, steps=1)
    batches = data.training_batches(3, stage, 0.5, first=10)
    for step in range(10, 16):
        expected = data.make_batch((3, step), stage, "train", 0.5)
        np.testing.assert_array_equal(next(batches).tokens, expected.tokens)
    batches.close()


# --- the recipe ---


def test_learning_rate_warms_up_stays_level_and_falls_to_its_least_share(script):
    recipe = script.Recipe(peak_lr=1e-3, least_lr=0.02, warmup_steps=10, stages=(script.Stage(8, 1, 1000),))
    rates = [recipe.learning_rate(step) for step in range(1001)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9:501] == pytest.approx([1e-3] * 492)
    assert rates[750] == pytest.approx(1e-3 * 0.51)
    assert rates[1000] == pytest.approx(2e-5)
    assert all(later < sooner for sooner, later in itertools.pairwise(rates[501:]))


def test_times_multiplies_the_steps_of_every_stage_and_nothing_else(script):
    recipe, longer = script.Recipe(), script.Recipe().times(2)
    assert [stage.steps for stage in longer.stages] == [2 * stage.steps for stage in recipe.stages]
    assert script.dataclasses.replace(longer, stages=recipe.stages) == recipe
    assert [(s.length, s.rows) for s in longer.stages] == [(s.length, s.rows) for s in recipe.stages]
    assert longer.learning_rate(5400 - 1) == pytest.approx(recipe.learning_rate(2700 - 1), rel=1e-3)


def test_times_reaches_training_from_the_command_line(script, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    trained = []
    monkeypatch.setattr(script, "train", lambda recipe, out, *, seed: trained.append((recipe, out, seed)))
    done = CliRunner().invoke(script.app, ["--out", str(tmp_path), "--times", "4", "--seed", "3"])
    assert done.exit_code == 0, done.output
    assert trained == [(script.Recipe().times(4), tmp_path, 3)]


def test_loss_weighs_an_answers_bytes_as_much_as_the_recipe_says(script, data):
    recipe = script.SMOKE
    trainer = script.Trainer(recipe, seed=0)
    tokens, answers, _ = data.make_batch((0, 0), script.Stage(1024, 1, 1), "train", 1.0)
    loss, metrics = jax.jit(trainer._loss)(trainer.params, tokens, answers)
    marked = (answers[:, 1:] > 0).sum()
    others = answers[:, 1:].size - marked
    weight = recipe.answer_weight * marked
    expected = (weight * metrics["answer_loss"] + others * metrics["text_loss"]) / (weight + others)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(metrics["answer_loss"]) != pytest.approx(float(metrics["text_loss"]), rel=1e-5)


def test_the_shipped_recipe_fits_the_package(script):
    config = script.Recipe().model_config()
    assert config.num_kv_heads < config.num_heads
    assert config.max_positions == max(stage.length for stage in script.Recipe().stages) == 16384
    shapes = jax.eval_shape(lambda: script.nnx.state(script.Decoder(config, rngs=script.nnx.Rngs(0))))
    assert 2 * sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 23e6  # bytes in bfloat16


# --- a run of every step ---


@pytest.mark.slow
def test_the_smoke_run_learns_and_logs_every_stage_of_its_fixed_schedule(script, folder):
    run, *log, last = training_log(folder)
    stages = script.SMOKE.stages
    assert run["recipe"]["stages"] == [script.dataclasses.asdict(stage) for stage in stages]
    assert [entry["length"] for entry in log] == [stage.length for stage in stages]
    assert log[-1]["step"] == sum(stage.steps for stage in stages)
    assert log[-1]["text_loss"] < log[0]["text_loss"] < 5.6  # ln 264 = 5.58
    held_out = last["held_out"]
    assert held_out["length"] == stages[-1].length
    assert held_out["questions"] >= len(held_out["right"]) >= 1
    assert set(held_out["right"]) <= set(TASKS)


@pytest.mark.slow
def test_the_folder_holds_what_ships(folder):
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert names >= {"tokenizer_config.json", "chat_template.jinja", "train_log.jsonl"}
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == EOS
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == EOS


@pytest.mark.slow
def test_transformers_gives_the_same_logits(script, data, folder):
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = data.recall_row(np.random.default_rng(0), 1024, "held-out")[0]
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens[None]).long()).logits.numpy()
    decoder = tca_jax.load(folder, dtype=jnp.float32).decoder
    positions = jnp.arange(tokens.size)[None]
    layers = decoder.config.num_layers
    hidden, _ = decoder(jnp.asarray(tokens, jnp.int32)[None], positions, script.causal_attention, (None,) * layers)
    np.testing.assert_allclose(decoder.logits(hidden), expected, atol=2e-4)
    assert model.generation_config.eos_token_id == EOS


# --- tokenizer ---


@pytest.mark.slow
def test_token_ids_are_bos_and_the_bytes(tokenizer):
    assert tokenizer("abc")["input_ids"] == [BOS, 97, 98, 99]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    assert tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"]) == [USER, ASSISTANT]


@pytest.mark.slow
@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_without_names_of_special_tokens_survives_the_tokenizer(tokenizer, text):
    assume(not any(name in text for name in tokenizer.all_special_tokens))
    ids = tokenizer(text)["input_ids"]
    assert ids == [BOS, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.slow
def test_every_byte_has_its_own_id(tokenizer):
    text = "".join(map(chr, range(0x800))) + "\uffff\U0010ffff\U00040000"
    assert tokenizer(text)["input_ids"][1:] == list(text.encode())


@pytest.mark.slow
def test_special_tokens_are_left_out_of_text(tokenizer):
    assert tokenizer.decode([BOS, ASSISTANT, 52, 50, 46, EOS, 258], skip_special_tokens=True) == "42."
