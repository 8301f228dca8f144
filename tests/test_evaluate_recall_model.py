"""The evaluation script: what it calibrates on, the methods it compares, the files it writes, and the model card."""

import importlib
import itertools
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

import tca_jax
from tca_jax import TCAConfig, methods
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.rows import densest_within, kept_share
from tca_jax.engine.scoring import Scores
from tca_jax.loading import checkpoint_folder
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.recall import PROTOCOLS, TASKS
from tca_jax.recall.evaluation import Asked, draw_documents

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIG = TCAConfig(window=128)
ROWS = CONFIG.num_candidates  # the dense row


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("evaluate_recall_model")


@pytest.fixture(scope="module")
def card(script):
    return importlib.import_module("recall_card")


@pytest.fixture(scope="module")
def profile():
    """Two layers of two heads; one of the four is dense in the cache."""
    scores = np.linspace(0.1, 0.9, 4 * (ROWS + 1), dtype=np.float32).reshape(2, 2, ROWS + 1)
    return Profile(
        candidates=np.array([[0, ROWS], [2, 1]]),
        prefill_candidates=np.array([[0, 3], [2, 0]]),
        scores=scores,
        probe_scores=scores,
        probes={"kind": "pairs", "tokens": 100, "need": 25.0, "rounds": 2, "fallback": False, "kept": 0.5},
        config=CONFIG,
        fingerprint=None,
        model_name="tiny",
    )


@pytest.fixture
def folder(script, profile, tmp_path):
    """A random model of that shape with its profile and a training log, as training leaves them."""
    from tca_jax.models.config import ModelConfig
    from tca_jax.models.decoder import Decoder

    shipped = json.loads((checkpoint_folder("recall-tiny") / "config.json").read_text())
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    config = ModelConfig.from_hf({**shipped, **small, "num_attention_heads": 2, "num_key_value_heads": 2})
    decoder = Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    importlib.import_module("recall_artifacts").save_checkpoint(tmp_path, decoder)
    shutil.copy(checkpoint_folder("recall-tiny") / "train_log.jsonl", tmp_path)
    profile.save(tmp_path / "profile")
    Profile.uniform(TCAConfig.paper(window=128), 2, 2, 5).save(tmp_path / "profile-paper")
    return tmp_path


@pytest.fixture
def asked(script, profile, monkeypatch):
    """Stands in for the model: full attention is right, any other method is wrong on "hex" asked late."""
    calls = []

    def ask(lm, documents, protocol):
        calls.append((lm.method, documents, protocol))
        full = lm.method == methods.BASELINE
        right = full or (documents[0].questions[0].task, protocol) != ("hex", "late")
        return Asked(["..."] * len(documents), [right] * len(documents), 1.0 if full else 0.25)

    monkeypatch.setattr(script, "ask", ask)
    monkeypatch.setattr(script, "calibrate", lambda *args, **options: profile)
    return calls


def run(script, *options):
    done = CliRunner().invoke(script.app, list(map(str, options)), catch_exceptions=False)
    assert done.exit_code == 0, done.output


# --- calibration ---


def test_calibration_asks_one_question_behind_each_text_in_the_form_it_will_be_asked(script, folder, monkeypatch):
    seen = {}
    monkeypatch.setattr(tca_jax, "calibrate", lambda lm, texts, config, **options: seen.update(texts=texts, **options))
    plan = script.Plan(tokens=4096, texts=3)
    script.calibrate(folder, plan, TCAConfig(window=512))
    assert len(seen["texts"]) == len(seen["probes"]) == 3
    decode = tca_jax.load(folder).tokenizer.decode
    for number, (text, pairs) in enumerate(zip(seen["texts"], seen["probes"], strict=True)):
        document, question, answer = map(decode, (text, *pairs[0]))
        assert len(pairs) == 1
        assert document.startswith("<|bos|>" if number == 2 else "<|bos|><|user|>")
        assert question.endswith(" is " if number == 2 else "<|eos|><|assistant|>")
        assert answer.endswith(".<|eos|>")
        value = answer.removesuffix(".<|eos|>").rsplit(" is ", 1)[-1]
        assert value in document


def test_other_probes_are_passed_on_and_the_paper_has_none(script, folder, monkeypatch):
    seen = []
    monkeypatch.setattr(tca_jax, "calibrate", lambda lm, texts, config, **options: seen.append(options["probes"]))
    plan = script.Plan(tokens=4096, texts=1)
    script.calibrate(folder, plan, TCAConfig(window=512), kind="copy")
    script.calibrate(folder, plan, TCAConfig.paper(window=512))
    assert seen == ["copy", None]


def test_calibration_texts_are_of_the_training_split_and_of_their_seed(script):
    plan = script.Plan(tokens=4096, texts=2)
    texts = [[document.text for document in script.calibration_documents(plan, seed)] for seed in (0, 0, 1)]
    assert texts[0] == texts[1]
    assert len({text for some in texts for text in some}) == 4
    held_out = draw_documents((0, 100, 0), 1, 4096, next(iter(TASKS)))[0].text
    assert held_out not in texts[0]


def test_the_ranked_share_counts_budgets_and_reserve_over_ranked_tokens(script):
    profile = Profile.uniform(CONFIG, 2, 2, 4)
    blocks = CONFIG.num_ranked_blocks(2500)
    kept = int(candidate_budgets(CONFIG, blocks)[4].sum()) + CONFIG.reserve_tokens
    assert script.ranked_share(profile, 2500) == pytest.approx(kept / (blocks * CONFIG.block_size))
    assert script.ranked_share(Profile.uniform(CONFIG, 2, 2, ROWS), 2500) == pytest.approx(1)


# --- methods ---


def test_each_method_of_the_ablation_differs_from_tca_in_what_its_name_says(script, folder, profile, asked):
    table = {name: make() for name, make in script.method_table(folder, script.SMOKE).items()}
    assert table["full"] == methods.BASELINE
    assert table["TCA"] == profile.method()
    quarter = densest_within(0.25, 2560, profile.probe_scores, profile.prefill_candidates, CONFIG)
    assert table["whole heads, 25% kept"] == methods.tca(quarter, CONFIG, prefill_candidates=profile.prefill_candidates)
    assert table["whole heads, 25% kept, one row"] == methods.tca(quarter, CONFIG)
    bare = table["whole heads, 25% kept, no reserve"]
    assert bare.cache.config.reserve_tokens == 0
    assert bare.cache.candidates == table["whole heads, 25% kept"].cache.candidates
    assert table["no probes"] == methods.tca(profile.prefill_candidates, CONFIG)
    uniform = np.unique(np.asarray(table["uniform budgets"].cache.candidates))
    assert uniform.size == 1
    shares = [Profile.uniform(CONFIG, 2, 2, row).kept_share(2560).mean() for row in range(ROWS + 1)]
    wanted = kept_share(CONFIG, 2560, quarter, profile.prefill_candidates).mean()
    assert abs(shares[int(uniform[0])] - wanted) == min(abs(share - wanted) for share in shares)
    assert table["paper()"] == Profile.load(folder / "profile-paper").method()


# --- parts ---


def test_a_chain_is_as_far_apart_as_its_closest_hop(script):
    for document in draw_documents(0, 8, 8192, "tracking"):
        question = document.questions[0]
        chain = [fact for fact in question.facts if f"for {fact.key} is" in question.sentence]
        places = [document.text.index(fact.line) for fact in chain]
        assert script._least_hop(document) == min(abs(a - b) for a, b in itertools.pairwise(places))


def test_the_table_is_written_with_what_was_planned_kept_and_answered(script, folder, profile, asked):
    run(script, folder, "--smoke")
    result = json.loads((folder / "evaluation.json").read_text())
    assert result["plan"] == script.dataclasses.asdict(script.SMOKE)
    assert (result["dense_heads"], result["heads"]) == (1, 4)
    assert result["kept_share"] == pytest.approx(profile.kept_share(2560).mean())
    by_name = {entry["method"]: entry for entry in result["methods"]}
    assert len(by_name) == len(asked) / len(TASKS) / len(PROTOCOLS) == 9
    for name, entry in by_name.items():
        assert set(entry["right"]) == set(PROTOCOLS)
        assert all(set(right) == set(TASKS) for right in entry["right"].values())
        assert entry["right"]["late"]["hex"] == (name == "full")
        assert entry["right"]["late"]["words"] == entry["right"]["prefix"]["hex"] == 1


def test_all_methods_answer_the_same_held_out_questions(script, folder, asked):
    run(script, folder, "--smoke", "--part", "short")
    by_method = {}
    for method, documents, protocol in asked:
        by_method.setdefault(method, []).append((documents, protocol))
    first, *others = by_method.values()
    assert others
    assert all(other == first for other in others)


def test_probes_are_told_by_kind_and_seed_with_the_heads_that_lose_most(script, folder, profile, asked, monkeypatch):
    monkeypatch.setattr(script, "calibrate", lambda *args, kind, seed: profile)
    run(script, folder, "--smoke", "--part", "probes")
    results = json.loads((folder / "probes.json").read_text())
    assert [(e["probes"], e["seed"]) for e in results] == [(k, s) for k in script.PROBE_KINDS for s in range(5)]
    assert ["right" in entry for entry in results] == [True, False, False, False, False] * 3
    heads = results[0]["worst_heads"]
    assert [head["score"] for head in heads] == sorted(head["score"] for head in heads)
    assert [(head["layer"], head["head"]) for head in heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_sparser_prefill_is_asked_about_chains_with_far_hops_and_scored_on_prompts(
    script, folder, asked, monkeypatch
):
    scored = []
    logprobs = Scores([[0, 1, 2], [0, 1]], [np.array([-1.0, -2.0]), np.array([-6.0])])
    monkeypatch.setattr(tca_jax, "score", lambda lm, texts: scored.append((lm.method, texts)) or logprobs)
    plan = script.Plan(tokens=2560, window=128, questions=12)
    result = script.measure_prefill(folder, plan, 4)
    documents = draw_documents((0, 3), 12, 2560, "tracking")
    far = [document for document in documents if script._least_hop(document) > 256]
    config = TCAConfig(window=128, tau=plan.tau)
    method = methods.tca(np.full((2, 2), ROWS), config, prefill_candidates=np.full((2, 2), 4))
    assert 0 < len(far) < 12
    assert asked == [(method, far, "late")]
    assert scored == [(method, [document.text for document in documents[:8]])]
    assert result["questions"] == len(far)
    assert result["prompt_loss"] == 3
    assert 0 < result["prefill_kept_share"] < 1


def test_an_unknown_part_is_refused(script, folder):
    done = CliRunner().invoke(script.app, [str(folder), "--part", "all"])
    assert done.exit_code == 2
    assert "must be table, short, probes or prefill" in " ".join(done.output.replace("│", "").split())


# --- the card ---


def test_the_card_of_a_model_that_was_only_trained_has_no_empty_sections(card, folder):
    card.write_card(folder)
    text = (folder / "README.md").read_text()
    assert "Not evaluated yet." in text
    assert "python examples/train_recall_model.py --out recall-tiny" in text
    for absent in ("## Sharper heads", "## Probes", "## Hops inside", "{", "None", "nan"):
        assert absent not in text
    for task in TASKS:
        assert f"| {task} |" in text
    assert "spells out the hops of its chain one after another" in text


def test_the_card_has_every_table_that_was_measured(card, script, folder, profile, asked, monkeypatch):
    run(script, folder, "--smoke")
    for file in ("evaluation-2x.json", "evaluation-4x.json"):
        shutil.copy(folder / "evaluation.json", folder / file)
    tracking = [{"row": 0, "prefill_kept_share": 0.123, "questions": 7, "tracking": 0.875, "prompt_loss": 0.61234}]
    none = {"row": 14, "prefill_kept_share": 1.0, "questions": 0, "tracking": None, "prompt_loss": 0.5}
    (folder / "prefill.json").write_text(json.dumps([*tracking, none]))
    monkeypatch.setattr(script, "calibrate", lambda *args, kind, seed: profile)
    run(script, folder, "--smoke", "--part", "probes")
    text = (folder / "README.md").read_text()
    assert "| full | 100.0% | 100.0% | 100.0% | 100.0% | 100.0% | 100.0% | 100.0% |" in text
    assert "| TCA | 100.0% | 100.0% | 100.0% | 100.0% | 87.5% | 0.0% | 25.0% |" in text
    assert "| hex | 100.0% | 100.0% | 100.0% | 100.0% | 100.0% | 0.0% |" in text
    for steps in ("1x", "2x", "4x"):
        assert f"| {steps} | 100.0% | 100.0% | 100.0% | 100.0% | 100.0% | 0.0% | 1 of 4 | 25.0% |" in text
    share = f"{profile.kept_share(2560).mean():.1%}"
    for kind in script.PROBE_KINDS:
        assert f"| {kind} | 0.250 | {share} to {share} | 0.0, 0.1, 1.0, 1.1 | 87.5% | 0.0% |" in text
    assert "| 12.3% | 87.5% | 7 | 0.6123 |" in text
    assert "| 100.0% |  | 0 | 0.5000 |" in text
    assert "{" not in text
    assert str(folder) not in text


def test_heads_come_first_if_every_draw_names_them(card):
    draws = [[(1, 0, 0.2), (0, 3, 0.3)], [(0, 3, 0.1), (1, 0, 0.4)], [(0, 3, 0.0), (1, 0, 0.1), (2, 2, 0.2)]]
    entries = [{"worst_heads": [{"layer": a, "head": b, "score": c} for a, b, c in draw]} for draw in draws]
    assert card._first_heads(entries) == "0.3, 1.0"
    assert card._first_heads([*entries, {"worst_heads": []}]) == "none in every draw"
