"""The model that ships: its files and figures, its answers under every protocol, parity with transformers."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tca_jax
from tca_jax import methods
from tca_jax.calibration.profile import Profile
from tca_jax.lab.recall import PROTOCOLS, TASKS, build_document
from tca_jax.lab.recall.evaluation import ask, draw_documents
from tca_jax.loading import checkpoint_folder

FOLDER = checkpoint_folder("recall-tiny")


@pytest.fixture(scope="module")
def full():
    return tca_jax.load("recall-tiny")


@pytest.fixture(scope="module")
def tca(full):
    return full.with_profile(Profile.load(FOLDER / "profile"))


@pytest.fixture(scope="module")
def documents():
    """About 1900 tokens each with a question, of several tasks; all that is asked stands far before the window."""
    return [next(filter(_asks_far_back, _documents(task))) for task in ("words", "hex")]


def _documents(task):
    return (draw_documents(seed, 1, 1900, task)[0] for seed in itertools.count())


def _asks_far_back(document):
    return max(document.place(fact) for fact in document.questions[0].facts) < 1200


def _full_hidden(lm, ids):
    """Hidden states under plain causal attention of JAX's own."""

    def attention(layer, q, k, v, state):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), None

    positions = jnp.arange(len(ids))[None]
    return lm.decoder(jnp.array([ids]), positions, attention, (None,) * lm.config.num_layers)[0]


# --- files and figures ---


def test_it_fits_24_megabytes_and_names_no_path_of_the_machine_that_trained_it():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 24e6
    for path in files:
        assert b"/recall-tiny" not in path.read_bytes(), path


def test_its_card_says_what_the_measured_file_says():
    card = (FOLDER / "README.md").read_text()
    for entry in json.loads((FOLDER / "evaluation.json").read_text())["methods"]:
        by_protocol = [list(entry["right"][protocol].values()) for protocol in PROTOCOLS]
        shares = [f"{share(right):.1%}" for right in by_protocol for share in (np.mean, min)]
        asked = [f"{entry['questions']}", f"{entry['prompt_bytes']:,}"]
        (row,) = [line for line in card.splitlines() if line.startswith(f"| {entry['method']} |")]
        cells = row.strip("| ").split(" | ")
        assert cells[1:] == [*shares, f"{entry['kv_cache_share']:.1%}", *asked]


@pytest.mark.parametrize("name", ["profile", "profile-paper"])
def test_its_profiles_name_it(name):
    assert Profile.load(FOLDER / name).model_name == "recall-tiny"


def test_it_was_trained_to_the_end_of_its_schedule():
    run, *log = [json.loads(line) for line in (FOLDER / "train_log.jsonl").read_text().splitlines()]
    assert log[-2]["step"] == sum(stage["steps"] for stage in run["recipe"]["stages"])
    assert set(log[-1]["held_out"]["right"]) == set(TASKS)


def test_full_attention_answers_every_task_under_every_protocol():
    result = json.loads((FOLDER / "evaluation.json").read_text())
    assert result["plan"]["tokens"] == 8192
    right = _right(result, "full")
    assert set(right) == set(itertools.product(PROTOCOLS, TASKS))
    assert min(right.values()) >= 0.97


def test_tca_answers_every_task_at_a_fifth_of_the_cache():
    result = json.loads((FOLDER / "evaluation.json").read_text())
    full, sparse = _right(result, "full"), _right(result, "TCA")
    assert min(sparse[cell] - full[cell] for cell in full) >= -0.0201
    assert next(entry["kv_cache_share"] for entry in result["methods"] if entry["method"] == "TCA") <= 1 / 5
    assert result["attended_share"] <= 0.20


def _right(result, method):
    """Shares of right answers by (protocol, task)."""
    right = next(entry["right"] for entry in result["methods"] if entry["method"] == method)
    return {(protocol, task): share for protocol, tasks in right.items() for task, share in tasks.items()}


# --- answers ---


@pytest.mark.slow
def test_late_questions_get_lost_without_probes(tca, documents):
    """The cache then holds what the prompt's own queries need, and nothing for a question that nobody has asked."""
    cache = tca.method.cache
    one_row = tca.with_method(methods.get("tca", candidates=0, config=cache.config))
    asked = ask(one_row, documents, "late", max_new_tokens=128)
    assert not all(asked.right), asked.texts


# --- the model itself ---


def test_transformers_loads_the_same_folder_and_gives_the_same_logits(full):
    torch = pytest.importorskip("torch", reason="parity with transformers needs PyTorch")
    from transformers import AutoModelForCausalLM

    ids = full.tokenizer(build_document(np.random.default_rng(3), 700, ["digits"]).text)["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    ours = full.decoder.logits(_full_hidden(full, ids))[0]
    assert float(jnp.abs(ours - expected).max()) < 2e-4


def test_theorem_1_bounds_the_error_of_every_layer_on_real_text(full):
    """|Att - Att~| <= 2 gamma max|V| with the model's own queries, keys and values."""
    ids = full.tokenizer(build_document(np.random.default_rng(4), 1500, ["digits", "words"]).text)["input_ids"]
    lengths, config = jnp.array([len(ids)], jnp.int32), tca_jax.TCAConfig(window=512)
    sparsest = jnp.zeros(full.config.num_kv_heads, jnp.int32)
    dense = jnp.full_like(sparsest, config.num_candidates)
    slack = []

    def attention(layer, q, k, v, state):
        exact = tca_jax.attend(q, k, v, dense, lengths, config)
        sparse = tca_jax.attend(q, k, v, sparsest, lengths, config)
        gamma = tca_jax.diagnostics.dropped_mass(q, k, sparsest, lengths, config)
        bounds = tca_jax.diagnostics.error_bounds(gamma, v, lengths)
        error = jnp.abs(exact - sparse).transpose(0, 2, 1, 3)  # [B, H_q, L, d]
        slack.append(float((bounds.max_norm - error.max(axis=-1)).min()))
        slack.append(float((bounds.l1_norm - error.sum(axis=-1)).min()))
        assert float(gamma.max()) > 0.01  # else the bound would hold for want of an error
        return exact, None

    positions = jnp.arange(len(ids))[None]
    full.decoder(jnp.array([ids]), positions, attention, (None,) * full.config.num_layers)
    assert min(slack) > -1e-4
