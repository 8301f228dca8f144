"""Requests are read, grouped and put together as they say; none of this needs lm_eval."""

import pytest
from tiny import TCA, tiny_lm

from tca_jax.calibration.profile import Profile
from tca_jax.cli.app import app
from tca_jax.lab.harness.loading import load_model
from tca_jax.lab.harness.options import GenerationOptions
from tca_jax.lab.harness.sharing import Shared, batches, filled, shared_prefixes
from tca_jax.methods.streaming import streaming

PROFILE = Profile.uniform(TCA, 2, 2, 6)


def test_options_of_a_task_are_those_of_generate():
    given = {"until": ["\n", ""], "max_new_tokens": 32, "do_sample": True, "top_p": 0.9, "num_beams": 1}
    assert GenerationOptions.of(given, 256) == GenerationOptions(32, ("\n",), 1.0, (("top_p", 0.9),))
    assert GenerationOptions.of({"until": "Q:"}, 256) == GenerationOptions(256, ("Q:",), 0.0, ())


@pytest.mark.parametrize(
    ("do_sample", "temperature", "expected"),
    [(None, None, 0), (None, 0.7, 0.7), (False, 0.7, 0), (True, None, 1), (True, 0.7, 0.7), (True, 0.0, 0)],
)
def test_sampling_follows_do_sample_and_temperature(do_sample, temperature, expected):
    given = {"do_sample": do_sample, "temperature": temperature}
    assert GenerationOptions.of(given, 8).temperature == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, "generation option num_beams = 4: must be 1"),
        ({"max_length": 9}, "generation option max_length = 9: must be one of .*'max_gen_toks'"),
        ({"temperature": "hot"}, "generation option temperature = 'hot': must be a number"),
    ],
)
def test_an_option_that_is_not_there_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        GenerationOptions.of(given, 8)


def test_sequences_share_what_all_of_a_group_begin_with_but_their_last_token():
    document, other = [1] * 10, [2] * 10
    sequences = [[*document, 3], [*other, 4], [*document, 5, 6], [9], [*other, 4], [*document]]
    groups = shared_prefixes(sequences, 8)
    assert sorted((g.length, sorted(g.members)) for g in groups) == [(0, [3]), (9, [0, 2, 5]), (10, [1, 4])]


def test_a_long_document_is_not_given_up_for_a_short_beginning_that_more_share():
    examples, documents = [1] * 8, [[2] * 30, [3] * 30]
    sequences = [[*examples, *document, n] for document in documents for n in (7, 8)]
    assert shared_prefixes(sequences, 4) == [Shared(38, (0, 1)), Shared(38, (2, 3))]


def test_nothing_is_shared_where_it_is_not_asked_for():
    assert shared_prefixes([[1, 2], [1, 2]], 0) == [Shared(0, (0,)), Shared(0, (1,))]


def test_the_longest_come_first_and_short_batches_are_filled():
    assert list(batches([3, 9, 1, 5, 4], 2, key=int)) == [[9, 5], [4, 3], [1]]
    assert filled([1], 3) == [1, 1, 1]


class Opened:
    """A checkpoint as far as `load_model` looks at it: the tiny model, whose every profile is `PROFILE`."""

    def read_profile(self, profile):
        return None if profile is None else PROFILE

    def load(self, profile, **stored):
        return tiny_lm().with_profile(profile)


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setattr("tca_jax.lab.harness.loading.open_checkpoint", lambda name, revision: Opened())


@pytest.mark.usefixtures("opened")
def test_with_a_profile_a_pair_takes_its_budgets_from_there():
    calibrated = PROFILE.method()
    own = load_model("name", "folder", "streaming+tca", {"streaming": {"sinks": 8}})
    assert own.method.cache == calibrated.cache
    assert own.method.prefill == streaming(sinks=8).prefill
    for method in (None, "tca"):
        assert load_model("name", "folder", method, {}).method == calibrated
    assert load_model("name", None, "streaming", {"sinks": 8}).method == streaming(sinks=8)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("streaming", {}, "the profile's method, 'tca', must be one of its parts"),
        ("tca", {"window": 64}, "options of method 'tca': got an unexpected keyword argument 'window'"),
        ("full+tca", {"streaming": {}}, "method 'full\\+tca' has no part 'streaming'"),
        ("streaming+tca", {"streaming": 8}, "streaming = 8: options of a part of 'streaming\\+tca' must be a mapping"),
        (None, {"window": 64}, "need method="),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(method, options, message):
    with pytest.raises(ValueError, match=message):
        load_model("name", "folder", method, options)


def test_a_loaded_model_is_taken_as_it_is():
    loaded = tiny_lm()
    assert load_model(loaded, None, None, {}) is loaded
    with pytest.raises(ValueError, match="pretrained is a loaded model"):
        load_model(loaded, "folder", None, {})


def test_the_command_hands_every_argument_on(monkeypatch):
    given = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("tca_jax.lab.commands.harness.run", given.extend)
    arguments = ["--model_args", "pretrained=recall-tiny,window=64", "--tasks", "mmlu", "gsm8k", "-b", "8", "-L", "2"]
    with pytest.raises(SystemExit) as end:
        app(["lm-eval", *arguments])
    assert not end.value.code
    assert given == arguments


def test_without_lm_eval_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        app(["lm-eval", "--tasks", "mmlu"])
    assert "pip install 'tca-jax[lab]'" in capsys.readouterr().err
