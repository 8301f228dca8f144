"""Generation options and model arguments; none of this needs lm_eval's models."""

import pytest
from tiny import TCA, tiny_lm

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'lm-eval[ruler,longbench]'")

from tca_jax.calibration.profile import Profile
from tca_jax.cli.app import app
from tca_jax.lab.harness.loading import load_model
from tca_jax.lab.harness.model import generation_options
from tca_jax.methods.streaming import streaming

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
PROFILE = Profile.uniform(TCA, 2, 2, 6)


def test_task_options_become_generate_arguments():
    given = {"until": ["\n", ""], "max_new_tokens": 32, "do_sample": True, "top_p": 0.9, "num_beams": 1}
    expected = {"max_new_tokens": 32, "stop": ["\n"], "temperature": 1.0, "top_p": 0.9}
    assert generation_options(given, 256) == expected
    assert generation_options({"until": "Q:"}, 256) == {"max_new_tokens": 256, "stop": ["Q:"], "temperature": 0.0}


@pytest.mark.parametrize(
    ("do_sample", "temperature", "expected"),
    [(None, None, 0), (None, 0.7, 0.7), (False, 0.7, 0), (True, None, 1), (True, 0.7, 0.7), (True, 0.0, 0)],
)
def test_sampling_follows_do_sample_and_temperature(do_sample, temperature, expected):
    given = {"do_sample": do_sample, "temperature": temperature}
    assert generation_options(given, 8)["temperature"] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, "generation option num_beams = 4: must be 1"),
        ({"max_length": 9}, "generation option max_length = 9: must be one of .*'max_gen_toks'"),
        ({"temperature": "hot"}, "generation option temperature = 'hot': must be a number"),
    ],
)
def test_unknown_options_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        generation_options(given, 8)


class Opened:
    """The checkpoint interface of `load_model`: the tiny model, whose every profile is `PROFILE`."""

    def read_profile(self, profile):
        return None if profile is None else PROFILE

    def load(self, profile, **stored):
        return tiny_lm().with_profile(profile)


@pytest.fixture
def load(monkeypatch):
    monkeypatch.setattr("tca_jax.lab.harness.loading.open_checkpoint", lambda name, revision: Opened())
    return lambda profile, method, options: load_model("name", profile, method, options, None)


def test_profile_sets_budgets_of_its_part(load):
    own = load("folder", "streaming+tca", {"streaming": {"sinks": 8}})
    assert own.method.cache == PROFILE.method().cache
    assert own.method.prefill == streaming(sinks=8).prefill
    for method in (None, "tca"):
        assert load("folder", method, {}).method == PROFILE.method()
    assert load(None, "streaming", {"sinks": 8}).method == streaming(sinks=8)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("streaming", {}, "the profile's method, 'tca', must be one of its parts"),
        ("tca", {"window": 64}, "options of method 'tca': got an unexpected keyword argument 'window'"),
        (None, {"window": 64}, "need method="),
    ],
)
def test_contradicting_arguments_are_refused(load, method, options, message):
    with pytest.raises(ValueError, match=message):
        load("folder", method, options)


def test_loaded_model_is_taken():
    loaded = tiny_lm()
    assert load_model(loaded, None, None, {}, None) is loaded
    with pytest.raises(ValueError, match="pretrained is a loaded model"):
        load_model(loaded, "folder", None, {}, None)


def test_command_passes_its_arguments(monkeypatch, capsys):
    given = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("tca_jax.lab.commands.harness.run", given.extend)
    arguments = ["--model_args", "pretrained=recall-tiny,window=64", "--tasks", "mmlu", "gsm8k", "-b", "8", "-L", "2"]
    with pytest.raises(SystemExit) as end:
        app(["lm-eval", *arguments])
    assert not end.value.code
    assert given == arguments
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        app(["lm-eval", "--tasks", "mmlu"])
    assert "pip install 'lm-eval[ruler,longbench]'" in capsys.readouterr().err
