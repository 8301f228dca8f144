"""The training script: what its batches hold, and a tiny run of every step to a folder transformers loads."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tca_jax

pytest.importorskip("optax", reason="the training script's optimizer is no dependency of the library")
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("train_recall_model")


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


# --- batches ---


@pytest.mark.parametrize("length", [256, 1024, 16384])
def test_needle_row_fills_its_length_and_marks_exactly_the_answers_digits(script, length):
    rng = np.random.default_rng(0)
    for _ in range(5):
        tokens, answer = script.needle_row(rng, length, "train")
        assert tokens.shape == answer.shape == (length + 1,)
        assert tokens[0] == script.BOS
        assert tokens[-1] == script.EOS
        text = "".join(chr(token) if token < 128 else "\0" for token in tokens)
        questions = re.findall(r"\n# What is the access code for (.+)\?\n# .+ \1 is (\d{6})\.\0", text)
        assert len(questions) >= 1
        for key, code in questions:
            assert text.count(f"# The access code for {key} is {code}.\n") == 1
        assert "".join(text[i] for i in np.flatnonzero(answer)) == "".join(code for _, code in questions)


def test_long_rows_ask_more_questions_and_every_number_of_them_occurs(script):
    rng = np.random.default_rng(1)
    counts = {int(script.needle_row(rng, 1024, "train")[1].sum()) // 6 for _ in range(100)}
    assert counts == set(range(1, 7))
    assert max(int(script.needle_row(rng, 16384, "train")[1].sum()) // 6 for _ in range(100)) == 32


def test_text_row_is_a_passage_without_answers(script):
    tokens, answer = script.text_row(np.random.default_rng(2), 500, "train")
    assert tokens[0] == script.BOS
    assert bytes(tokens[1:].astype(np.uint8)) in script.corpus("train")
    assert tokens.shape == answer.shape == (501,)
    assert not answer.any()


def test_batch_mixes_rows_and_depends_on_nothing_but_its_arguments(script):
    stage = script.Stage(length=512, rows=8, steps=1)
    tokens, answer = script.make_batch((0, 7), stage, "train", 0.5)
    again, _ = script.make_batch((0, 7), stage, "train", 0.5)
    other, _ = script.make_batch((0, 8), stage, "train", 0.5)
    assert tokens.shape == answer.shape == (8, 513)
    assert answer.any(axis=1).sum() == 4
    np.testing.assert_array_equal(tokens, again)
    assert not np.array_equal(tokens, other)


def test_batches_built_ahead_come_in_the_order_of_their_steps(script):
    stage = script.Stage(length=256, rows=4, steps=1)
    batches = script.training_batches(3, stage, 0.5, first=10)
    for step in range(10, 30):
        tokens, _ = next(batches)
        np.testing.assert_array_equal(tokens, script.make_batch((3, step), stage, "train", 0.5)[0])
    batches.close()


def test_learning_rate_warms_up_and_falls_to_two_percent(script):
    recipe = script.Recipe(peak_lr=1e-3, warmup_steps=10)
    assert recipe.learning_rate(0, 0.0) == pytest.approx(1e-4)
    assert recipe.learning_rate(9, 0.0) == pytest.approx(1e-3)
    assert recipe.learning_rate(500, 0.5) == pytest.approx(1e-3 * 0.51)
    assert recipe.learning_rate(1000, 1.0) == pytest.approx(2e-5)


def test_loss_weighs_an_answers_digits_as_much_as_the_recipe_says(script):
    recipe = script.SMOKE
    trainer = script.Trainer(recipe, seed=0)
    tokens, answer = script.make_batch((0, 0), recipe.stages[0], "train", 1.0)
    loss, metrics = jax.jit(trainer._loss)(trainer.params, tokens, answer)
    digits = answer[:, 1:].sum()
    others = answer[:, 1:].size - digits
    weight = recipe.answer_weight * digits
    expected = (weight * metrics["answer_loss"] + others * metrics["text_loss"]) / (weight + others)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_shipped_recipe_fits_the_package_and_the_issue(script):
    config = script.Recipe().model_config()
    assert config.head_dim == 64
    assert config.num_layers >= 4
    assert config.num_kv_heads < config.num_heads
    assert config.max_positions >= 8192
    shapes = jax.eval_shape(lambda: script.nnx.state(script.Decoder(config, rngs=script.nnx.Rngs(0))))
    assert 2 * sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 11.3e6  # bytes in bfloat16


# --- a run of every step ---


def test_smoke_run_learns_and_logs_every_stage(script, folder):
    run, *log = training_log(folder)
    assert run["recipe"]["hidden_size"] == script.SMOKE.hidden_size
    assert [entry["length"] for entry in log] == sorted(entry["length"] for entry in log)
    assert {entry["length"] for entry in log} == {stage.length for stage in script.SMOKE.stages}
    assert log[-1]["step"] == 12
    assert log[-1]["held_out_text_loss"] < log[0]["held_out_text_loss"] < 5.6  # ln 264 = 5.58


def test_folder_holds_what_ships(folder):
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert names >= {"tokenizer_config.json", "README.md", "train_log.jsonl", "evaluation.json", "profile"}
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 257
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 257


def test_card_has_command_log_and_accuracy(folder):
    card = (folder / "README.md").read_text()
    result = json.loads((folder / "evaluation.json").read_text())
    assert "python examples/train_recall_model.py --out" in card
    assert f"| full | {result['full_accuracy']:.1%} |" in card
    assert f"{result['kept_share']:.1%}" in card
    assert f"| {training_log(folder)[-1]['step']} |" in card
    assert str(folder) not in card
    assert "{" not in card


def test_profile_beside_the_model_loads_for_it(folder):
    lm = tca_jax.load(folder, profile="shipped")
    assert lm.method.cache.window == 128


def test_evaluation_counts_right_answers(script, folder, monkeypatch):
    profile = tca_jax.Profile.load(folder / "profile")
    options = {"num_questions": 3, "num_tokens": 600, "batch": 2, "seed": 5}
    asked = []

    def answer(lm, prompts, max_new_tokens):
        """Right with full attention, wrong under TCA."""
        asked.extend(prompts)
        keys = [prompt.rsplit(" for ", 1)[1].removesuffix(" is ") for prompt in prompts]
        codes = [re.search(f"{key} is ([0-9]+)", text)[1] for key, text in zip(keys, prompts, strict=True)]
        texts = [f"{code}." if lm.method == tca_jax.methods.BASELINE else f"{code}0." for code in codes]
        stats = type("Stats", (), {"kept_share": 0.25, "kv_cache_bytes": 3, "full_kv_cache_bytes": 10})
        return type("Output", (), {"text": texts, "stats": stats})

    monkeypatch.setattr(script.tca_jax, "generate", answer)
    result = script.evaluate(folder, profile, **options)
    assert result["full_accuracy"] == 1.0
    assert result["tca_accuracy"] == 0.0
    assert result["kept_share"] == 0.25
    assert result["kv_cache_share"] == 0.3
    assert len(asked) == 6
    assert len(set(asked)) == 3
    assert {len(prompt) for prompt in asked} == {599}  # and the bos token


# --- tokenizer ---


def test_token_ids_are_bos_and_the_bytes(tokenizer):
    assert tokenizer("abc")["input_ids"] == [256, 97, 98, 99]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == [256, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_byte_has_its_own_id(tokenizer):
    text = "".join(map(chr, range(0x800))) + "\uffff\U0010ffff\U00040000"
    assert tokenizer(text)["input_ids"][1:] == list(text.encode())


def test_special_tokens_are_left_out_of_text(tokenizer):
    assert tokenizer.decode([256, 52, 50, 46, 257, 258], skip_special_tokens=True) == "42."


# --- transformers ---


def test_transformers_gives_the_same_logits(script, folder):
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, _ = script.needle_row(np.random.default_rng(0), 300, "held-out")
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens[None]).long()).logits.numpy()
    decoder = tca_jax.load(folder, dtype=jnp.float32).decoder
    positions = jnp.arange(tokens.size)[None]
    layers = decoder.config.num_layers
    hidden, _ = decoder(jnp.asarray(tokens)[None], positions, script.causal_attention, (None,) * layers)
    np.testing.assert_allclose(decoder.logits(hidden), expected, atol=2e-4)
    assert model.generation_config.eos_token_id == 257
