"""lm_eval measures models of this library: through its own evaluation, on local tasks."""

import json
import string

import numpy as np
import pytest
from tiny import write_checkpoint

import tca_jax
from tca_jax.lab import recall
from tca_jax.lab.recall.protocols import completion

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'lm-eval[ruler,longbench]'")
datasets = pytest.importorskip("datasets")

import lm_eval  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from tca_jax.lab.commands import harness as command  # noqa: E402
from tca_jax.lab.harness.model import HarnessLM  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
LETTERS = np.array(list(string.ascii_lowercase + " "))


def text(seed, length):
    return "".join(np.random.default_rng(seed).choice(LETTERS, length)).replace("  ", " x").strip() + "z"


def requests(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def generations(prompts, **options):
    return requests("generate_until", *((prompt, {"max_gen_toks": 8, **options}) for prompt in prompts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def tiny(folder):
    return tca_jax.load(folder)


@pytest.mark.slow
def test_shipped_model_answers_and_chooses():
    document = recall.build_document(np.random.default_rng(3), 700, ("digits", "words"))
    rows = [{"text": completion(document.text, q), "answer": q.answer} for q in document.questions]
    shared = {
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    answers = {
        **shared,
        "task": "answers",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    choices = {
        **shared,
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": lambda row: ["000000", row["answer"]],
        "doc_to_target": 1,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    results = lm_eval.simple_evaluate(
        "tca_jax",
        model_args={"pretrained": "recall-tiny", "profile": "shipped", "batch_size": 2},
        tasks=[answers, choices],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert results["results"]["answers"]["exact_match,none"] == 1
    assert results["results"]["choices"]["acc,none"] == 1
    assert results["config"]["attention_method"] == "tca"
    assert results["config"]["attention_method_options"]["cache"]["config"]["window"] == 512
    assert results["config"]["kv_cache_share"] > 0
    json.dumps(results["config"])


@pytest.mark.parametrize(
    ("given", "tokenizer"), [([], None), (["--metadata", "tokenizer=gpt2"], "gpt2"), (["--model", "hf"], None)]
)
def test_command_names_model_and_tokenizer(folder, given, tokenizer, monkeypatch):
    parsed = {}
    monkeypatch.setattr("lm_eval.__main__.HarnessCLI.execute", lambda _, arguments: parsed.update(vars(arguments)))
    monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda: None)
    monkeypatch.setattr("sys.argv", [])
    command.run(["--model_args", f"pretrained={folder},method=streaming", "--tasks", "ruler", *given])
    assert parsed["tasks"] == ["ruler"]
    assert parsed["model_args"] == {"pretrained": folder, "method": "streaming"}
    if given == ["--model", "hf"]:
        assert (parsed["model"], parsed["metadata"]) == ("hf", None)
    else:
        assert (parsed["model"], parsed["metadata"]) == ("tca_jax", {"tokenizer": tokenizer or folder})


def test_long_prompts_lose_their_beginning(tiny, caplog):
    model = HarnessLM(tiny, max_length=40)
    prompt = text(0, 60)
    (answer,) = model.generate_until(generations([prompt]))
    assert answer == tca_jax.generate(tiny, prompt[-32:], max_new_tokens=8).text[0]
    assert "1 of 1 prompts lost their beginning" in caplog.text
    with pytest.raises(ValueError, match="max_gen_toks = 40: must be less than max_length = 40"):
        model.generate_until(generations([prompt], max_gen_toks=40))
    with pytest.raises(ValueError, match="a continuation has 41 tokens: must have from 1 to 40"):
        model.loglikelihood(requests("loglikelihood", (prompt, prompt[:41])))


def test_rolling_windows_count_each_token_once(tiny):
    long, model = text(0, 70), HarnessLM(tiny, max_length=32, batch_size=2)  # windows of one token more
    ids = tiny.tokenizer(long)["input_ids"]
    seen = [[tiny.eos_token_ids[0], *ids[:32]], ids[31:64], ids[-33:]]
    counts = [32, 32, len(ids) - 64]
    logprobs = [tca_jax.score(tiny, row).logprobs[0][-n:] for row, n in zip(seen, counts, strict=True)]
    (total,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (long,)))
    assert total == pytest.approx(sum(float(row.sum()) for row in logprobs), abs=1e-3)


@pytest.mark.parametrize("max_length", [32, 41, pytest.param(None, marks=pytest.mark.slow)])
def test_cuts_match_lm_evals_own_model(folder, tiny, max_length):
    """The class that lm_eval has for PyTorch; None: all positions, of which a text takes one token more."""
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    positions = max_length or tiny.config.max_context
    theirs = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=1, max_length=max_length)
    ours = HarnessLM(tiny, max_length=max_length)
    long = text(0, positions + 38)
    rolling = [("abc",), (long[:positions],), (long,)]
    asked = [(long, " what follows"), ("abc", "d"), (long[: positions - 1], "xy"), ("", long[: positions - 2])]
    for kind, some in (("loglikelihood_rolling", rolling), ("loglikelihood", asked)):
        found, expected = (getattr(model, kind)(requests(kind, *some), disable_tqdm=True) for model in (ours, theirs))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4)


def test_repetition_penalty_of_the_checkpoint_applies(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    folder = write_checkpoint(tmp_path)
    file = folder / "generation_config.json"
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**held, "repetition_penalty": 1.7}))
    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
    asked = generations([text(seed, 30) for seed in range(3)], max_gen_toks=16, until=[])
    without = HarnessLM(str(folder), repetition_penalty=1).generate_until(asked)
    expected = theirs.generate_until(asked, disable_tqdm=True)
    assert HarnessLM(str(folder)).generate_until(asked) == expected != without
    given = generations([text(0, 30)], max_gen_toks=16, until=[], repetition_penalty=1.0)
    assert HarnessLM(str(folder)).generate_until(given) == without[:1]


def test_answer_follows_the_thinking(tiny):
    prompt = text(0, 30)
    (said,) = tca_jax.generate(tiny, prompt, max_new_tokens=8).text
    assert HarnessLM(tiny, think_end_token=said[2]).generate_until(generations([prompt])) == [
        said.split(said[2])[-1].lstrip()
    ]


def test_special_tokens_may_be_left_out(tiny):
    default, without = HarnessLM(tiny), HarnessLM(tiny, add_bos_token=False)
    assert default.tok_encode("abc") == tiny.tokenizer("abc")["input_ids"]
    assert without.tok_encode("abc") == tiny.tokenizer("abc", add_special_tokens=False)["input_ids"]


def test_repeated_questions_get_other_samples(tiny):
    prompts = [text(0, 30)] * 4
    first, again = (
        HarnessLM(tiny, batch_size=2).generate_until(generations(prompts, do_sample=True, temperature=5.0))
        for _ in range(2)
    )
    assert len(set(first)) == 4
    assert first == again


def test_answer_ends_before_a_stop_string(tiny):
    prompt = text(0, 30)
    model = HarnessLM(tiny)
    (whole,) = model.generate_until(generations([prompt]))
    (cut,) = model.generate_until(generations([prompt], until=[whole[3]]))
    assert cut == whole[: whole.index(whole[3])]


def test_chat_template_is_the_models():
    model = HarnessLM(tca_jax.load("recall-tiny"))
    chat = [{"role": "user", "content": "Who?"}]
    assert model.apply_chat_template(chat) == "<|bos|><|user|>Who?<|eos|><|assistant|>"
    begun = [*chat, {"role": "assistant", "content": "It is "}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("<|assistant|>It is ")
    assert model.tok_encode("<|bos|>a") == model.tok_encode("a")
    assert model.tokenizer_name == "recall-tiny"
    assert model.chat_template(True) == model.tokenizer.chat_template


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "auto"}, "batch_size = 'auto': must be an integer of at least 1"),
        ({"max_batch_size": 8}, "max_batch_size = 8: must be None"),
        ({"max_length": 5000}, "max_length = 5000: must be at most 4096"),
        ({"windw": 256}, r"model arguments \['windw'\]: unknown, and options of a method need method="),
        ({"method": "snapv"}, "method 'snapv' is not registered"),
    ],
)
def test_wrong_model_arguments_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        HarnessLM(folder, **options)


def test_model_without_tokenizer_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, tokenizer=False)
    with pytest.raises(ValueError, match="has no tokenizer, and lm_eval asks in text"):
        HarnessLM(str(folder))
