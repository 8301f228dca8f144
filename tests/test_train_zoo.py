"""The zoo's script: shapes of its models, what their batches hold, and a tiny run of one member."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import tca_jax
from tca_jax.lab.recall import TASKS
from tca_jax.lab.recall.facts import draw_keys

pytest.importorskip("optax", reason="the training script's optimizer is no dependency of the library")
EXAMPLES = Path(__file__).parent.parent / "examples"
BOS, EOS = 256, 257
NAMES = ("recall-4x", "grouped", "deep-qknorm", "biases-nocopy", "hops", "large-32k")
# family, layers, query heads, KV heads, head dim, most and fewest parameters in millions
SHAPES = {
    "recall-4x": ("llama", 6, 8, 4, 64, 5, 7),
    "grouped": ("llama", 6, 8, 2, 64, 5, 6),
    "deep-qknorm": ("qwen3", 10, 4, 2, 64, 5, 6),
    "biases-nocopy": ("qwen2", 8, 8, 2, 64, 5, 6),
    "hops": ("llama", 8, 8, 4, 64, 7, 8.5),
    "large-32k": ("llama", 8, 8, 2, 64, 23, 26),
}


def loaded(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # train_zoo sets it: taken back here
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def zoo():
    return loaded("train_zoo")


@pytest.fixture(scope="module")
def tasks(zoo):
    return loaded("zoo_tasks")


@pytest.fixture(scope="module")
def data(zoo):
    return loaded("recall_data")


def text_of(tokens):
    """Bytes as text, every special token as one character that no text holds."""
    return "".join(chr(token) if token < 128 else "\0" for token in tokens)


# --- members ---


@pytest.mark.parametrize("name", NAMES)
def test_a_member_has_the_shape_that_it_stands_for(zoo, name):
    family, layers, heads, kv_heads, head_dim, fewest, most = SHAPES[name]
    recipe = zoo.ZOO[name].recipe
    config = recipe.model_config()
    assert (config.family, config.num_layers, config.head_dim) == (family, layers, head_dim)
    assert (config.num_heads, config.num_kv_heads) == (heads, kv_heads)
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")
    assert config.max_positions >= recipe.stages[-1].length + (0 if name == "recall-4x" else 2048)
    script = loaded("train_recall_model")
    shapes = jax.eval_shape(lambda: script.nnx.state(script.Decoder(config, rngs=script.nnx.Rngs(0))))
    assert fewest * 1e6 < sum(leaf.size for leaf in jax.tree.leaves(shapes)) < most * 1e6


def test_the_zoo_is_complete_and_its_members_differ(zoo, tasks):
    assert tuple(zoo.ZOO) == NAMES
    assert set(tasks.ZOO_TASKS) == {"recall-tiny", *NAMES}
    assert len({member.seed for member in zoo.ZOO.values()} | {0}) == len(NAMES) + 1
    for name, member in zoo.ZOO.items():
        assert set(member.recipe.tasks) == set(tasks.ZOO_TASKS[name])
    shipped = loaded("train_recall_model").Recipe()
    assert zoo.ZOO["recall-4x"].recipe == shipped.times(4)
    assert [stage.length for stage in zoo.ZOO["large-32k"].recipe.stages][-1] == 32768
    assert not set(tasks.ZOO_TASKS["biases-nocopy"]) & set(TASKS)


def test_only_and_workers_reach_training_and_a_trained_member_is_skipped(zoo, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    trained = []
    monkeypatch.setattr(zoo, "train", lambda recipe, out, **options: trained.append((recipe, out, options)))
    (tmp_path / "hops").mkdir()
    (tmp_path / "hops" / "model.safetensors").touch()
    options = ["--out", str(tmp_path), "--only", "grouped", "--only", "hops", "--workers", "3"]
    done = CliRunner().invoke(zoo.app, options)
    assert done.exit_code == 0, done.output
    assert trained == [(zoo.ZOO["grouped"].recipe, tmp_path / "grouped", {"seed": 2, "workers": 3})]
    assert CliRunner().invoke(zoo.app, ["--out", str(tmp_path), "--only", "nobody"]).exit_code == 2


# --- data ---


@pytest.mark.parametrize("name", NAMES)
def test_a_members_batches_ask_its_own_tasks_about_facts_that_stand_before(zoo, data, name):
    recipe, stage = zoo.ZOO[name].recipe, data.Stage(4096, 12, 1)
    batch = data.make_batch((zoo.ZOO[name].seed, 0), stage, "train", recipe.recall_share, recipe.tasks)
    assert batch.tokens.shape == batch.answers.shape == (12, 4097)
    assert batch.tokens.dtype == np.int16
    assert all(batch.tokens[:, 0] == BOS)
    assert {task for row in batch.tasks for task in row} == set(recipe.tasks)
    for tokens, answers, asked in zip(*batch, strict=True):
        assert set(answers.tolist()) == {*range(len(asked) + 1)}
        assert not asked or tokens[-1] == EOS
        for number in range(1, len(asked) + 1):
            answer = text_of(tokens[answers == number])
            assert answer.endswith(".\0")
            first = re.split(r", the | and the ", answer.removesuffix(".\0"))[0]
            assert first in text_of(tokens[: np.flatnonzero(answers == number)[0]])


def test_tasks_may_be_weighted_and_unknown_ones_are_refused(data, tasks):
    rows = [
        data.recall_row(np.random.default_rng(seed), 1024, "train", ("hex", "alias", "alias")) for seed in range(60)
    ]
    asked = [task for row in rows for task in row[2]]
    assert asked.count("alias") > 1.2 * asked.count("hex") > 0
    with pytest.raises(ValueError, match="'nothing': must be one of"):
        tasks.draw_question(np.random.default_rng(0), "nothing", draw_keys(np.random.default_rng(0)))


@pytest.mark.parametrize(("task", "hops"), [("alias", 1), ("alias-2", 2)])
def test_the_text_read_downwards_gives_the_answer_of_an_alias(tasks, task, hops):
    """Every line refers to one above it, no line about an asked key has the value, and none gives two."""
    line_of = re.compile(r"is that of (\w+ \w+), which is (\d{4}|given above)\.$")
    for document in tasks.draw_documents(5, 12, 6000, "hops", task):
        assert len(tasks.completion(document.text, document.questions[0])) == 6000
        values, depth = {}, {}
        for fact, offset in document.places:
            assert document.text[offset:].startswith(fact.line)
            line = fact.line.removesuffix("\n")
            about = (fact.kind, fact.key)
            if (found := line_of.search(line)) is None:
                values[about], depth[about] = fact.value, 0
                continue
            other = (fact.kind, found[1])
            values[about], depth[about] = values[other], depth[other] + 1  # the other one stands above
            assert found[2] in (values[about], "given above")
        question = document.questions[0]
        asked = next(about for about in values if question.lead == f"The {about[0]} for {about[1]} is ")
        assert asked[1] in question.text
        assert (values[asked], depth[asked]) == (question.answer, hops)
        assert re.fullmatch(r"\d{4}", question.answer)
        lines = [line for line in document.text.splitlines() if asked[1] in line]
        assert len(lines) == 1
        assert question.answer not in lines[0]


def test_hiding_other_facts_is_as_in_the_package_and_aliases_only_change_places(tasks):
    keys = draw_keys(np.random.default_rng(1))
    plain = [tasks.draw_question(np.random.default_rng(2), task, keys) for task in ("keys", "tracking")]
    assert tasks.hide(np.random.default_rng(3), 3000, plain, "train") == tasks.hide_anywhere(
        np.random.default_rng(3), 3000, plain, "train"
    )
    hops = [tasks.draw_question(np.random.default_rng(seed), "alias-2", keys) for seed in range(4)]
    ordered = tasks.hide(np.random.default_rng(4), 6000, hops, "train")
    anywhere = tasks.hide_anywhere(np.random.default_rng(4), 6000, hops, "train")
    assert ordered.text != anywhere.text
    assert sorted(ordered.text.splitlines()) == sorted(anywhere.text.splitlines())
    assert all(ordered.place(fact.of) < offset for fact, offset in ordered.places if isinstance(fact, tasks.Alias))


# --- a run of every step ---


@pytest.mark.slow
def test_the_smoke_run_trains_a_member_to_a_model_that_loads(zoo, tmp_path):
    command = [sys.executable, str(EXAMPLES / "train_zoo.py"), "--out", str(tmp_path), "--smoke", "--only", "hops"]
    done = subprocess.run([*command, "--workers", "1"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run, *_, last = map(json.loads, (tmp_path / "hops" / "train_log.jsonl").read_text().splitlines())
    recipe = zoo.ZOO["hops"].recipe
    assert (run["seed"], run["recipe"]["tasks"]) == (5, list(recipe.tasks))
    assert set(last["held_out"]["right"]) <= set(recipe.tasks)
    config = tca_jax.load(tmp_path / "hops").decoder.config
    assert (config.num_heads, config.num_kv_heads, config.num_layers) == (8, 4, 2)
