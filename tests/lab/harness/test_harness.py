"""lm_eval measures models of this library: through its own evaluation, on local tasks."""

import json
import string

import numpy as np
import pytest
from tiny import write_checkpoint

import tca_jax
from tca_jax.lab import recall
from tca_jax.lab.recall.tasks import completion

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'lm-eval[ruler,longbench]'")
datasets = pytest.importorskip("datasets")

import lm_eval  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from tca_jax.lab.harness.model import HarnessLM, generation_options  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
LETTERS = np.array(list(string.ascii_lowercase + " "))


def text(seed, length):
    return "".join(np.random.default_rng(seed).choice(LETTERS, length)).replace("  ", " x").strip() + "z"


def requests(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def generations(prompts, **options):
    return requests("generate_until", *((prompt, {"max_gen_toks": 8, **options}) for prompt in prompts))


@pytest.mark.slow
def test_shipped_model_answers_through_lm_eval():
    document = recall.build_document(np.random.default_rng(3), 700, ("digits", "words"))
    rows = [{"text": completion(document.text, q), "answer": q.answer} for q in document.questions]
    answers = {
        "task": "answers",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    results = lm_eval.simple_evaluate(
        "tca_jax",
        model_args={"pretrained": "recall-tiny", "profile": "shipped", "batch_size": 2},
        tasks=[answers],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert results["results"]["answers"]["exact_match,none"] == 1
    assert results["config"]["attention_method"] == "worth"
    assert results["config"]["attention_method_options"]["cache"]["window"] == 256
    assert results["config"]["kv_cache_share"] > 0
    json.dumps(results["config"])


def test_long_prompts_lose_their_beginning(written, caplog):
    model = HarnessLM(written, max_length=40)
    prompt = text(0, 60)
    (answer,) = model.generate_until(generations([prompt]))
    assert answer == tca_jax.generate(written, prompt[-32:], max_new_tokens=8).text[0]
    assert "1 of 1 prompts lost their beginning" in caplog.text
    with pytest.raises(ValueError, match="max_gen_toks = 40: must be less than max_length = 40"):
        model.generate_until(generations([prompt], max_gen_toks=40))
    with pytest.raises(ValueError, match="a continuation has 41 tokens: must have from 1 to 40"):
        model.loglikelihood(requests("loglikelihood", (prompt, prompt[:41])))


def theirs(folder, **options):
    """The class that lm_eval has for PyTorch."""
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1, **options)


@pytest.mark.parametrize("max_length", [32, pytest.param(None, marks=pytest.mark.slow)])
def test_cuts_match_lm_evals_own_model(checkpoint, written, max_length):
    """None: all positions, of which a text takes one token more."""
    positions = max_length or written.config.max_context
    models = HarnessLM(written, max_length=max_length, batch_size=2), theirs(checkpoint, max_length=max_length)
    long = text(0, positions + 38)
    rolling = [("abc",), (long[:positions],), (long,)]
    asked = [(long, " what follows"), ("abc", "d"), (long[: positions - 1], "xy"), ("", long[: positions - 2])]
    for kind, some in (("loglikelihood_rolling", rolling), ("loglikelihood", asked)):
        found, expected = (getattr(model, kind)(requests(kind, *some), disable_tqdm=True) for model in models)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4)


def test_repetition_penalty_of_the_checkpoint_applies(tmp_path):
    folder = write_checkpoint(tmp_path)
    file = folder / "generation_config.json"
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**held, "repetition_penalty": 1.7}))
    asked = generations([text(seed, 30) for seed in range(3)], max_gen_toks=16, until=[])
    without = HarnessLM(str(folder), repetition_penalty=1).generate_until(asked)
    expected = theirs(folder).generate_until(asked, disable_tqdm=True)
    assert HarnessLM(str(folder)).generate_until(asked) == expected != without
    given = generations([text(0, 30)], max_gen_toks=16, until=[], repetition_penalty=1.0)
    assert HarnessLM(str(folder)).generate_until(given) == without[:1]


def test_answers_end_and_begin_as_asked(written):
    prompt, model = text(0, 30), HarnessLM(written)
    (said,) = model.generate_until(generations([prompt]))
    assert said == tca_jax.generate(written, prompt, max_new_tokens=8).text[0]
    assert model.generate_until(generations([prompt], until=[said[3]])) == [said[: said.index(said[3])]]
    thinking = HarnessLM(written, think_end_token=said[2])
    assert thinking.generate_until(generations([prompt])) == [said.split(said[2])[-1].lstrip()]
    assert model.tok_encode("abc") == written.tokenizer("abc")["input_ids"]
    without = written.tokenizer("abc", add_special_tokens=False)["input_ids"]
    assert HarnessLM(written, add_bos_token=False).tok_encode("abc") == without


def test_repeated_questions_get_other_samples(written):
    asked = generations([text(0, 30)] * 4, do_sample=True, temperature=5.0)
    first, again = (HarnessLM(written, batch_size=2).generate_until(asked) for _ in range(2))
    assert len(set(first)) == 4
    assert first == again


def test_chat_template_is_the_models():
    model = HarnessLM(tca_jax.load("recall-tiny"))
    chat = [{"role": "user", "content": "Who?"}]
    assert model.apply_chat_template(chat) == "<|bos|><|user|>Who?<|eos|><|assistant|>"
    begun = [*chat, {"role": "assistant", "content": "It is "}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("<|assistant|>It is ")
    assert model.tok_encode("<|bos|>a") == model.tok_encode("a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "auto"}, "batch_size = 'auto': must be an integer of at least 1"),
        ({"max_length": 5000}, "max_length = 5000: must be at most 4096"),
        ({"windw": 256}, r"model arguments \['windw'\]: unknown, and options of a method need method="),
        ({"method": "snapv"}, "method 'snapv' is not registered"),
    ],
)
def test_wrong_model_arguments_are_refused(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        HarnessLM(checkpoint, **options)


# --- options and arguments ---


def test_task_options_become_generate_arguments():
    given = {"until": ["\n", ""], "max_new_tokens": 32, "do_sample": True, "top_p": 0.9, "num_beams": 1}
    expected = {"max_new_tokens": 32, "stop": ["\n"], "temperature": 1.0, "top_p": 0.9}
    assert generation_options(given, 256) == expected
    assert generation_options({"until": "Q:"}, 256) == {"max_new_tokens": 256, "stop": ["Q:"], "temperature": 0.0}
    for do_sample, temperature, used in (
        *((None, None, 0), (None, 0.7, 0.7), (False, 0.7, 0)),
        *((True, None, 1), (True, 0.7, 0.7), (True, 0.0, 0)),
    ):
        given = {"do_sample": do_sample, "temperature": temperature}
        assert generation_options(given, 8)["temperature"] == used
    for name, value, wanted in (
        ("num_beams", 4, "1"),
        ("max_length", 9, "one of .*'max_gen_toks'"),
        ("temperature", "hot", "a number"),
    ):
        with pytest.raises(ValueError, match=f"generation option {name} = {value!r}: must be {wanted}"):
            generation_options({name: value}, 8)
