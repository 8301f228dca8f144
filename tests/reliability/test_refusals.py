"""What fuzzing found: damage that once came out as a raw error, or as another answer."""

import dataclasses
import json
import re

import pytest
from tiny import CONFIG, random_prompt, tiny_lm, write_checkpoint

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.engine.prompts import encode_prompt
from tca_jax.loading import open_checkpoint
from tca_jax.methods import CachePolicy, FullCache, FullPrefill, Method
from tca_jax.methods.registry import describe_method, unknown_types

INDEX = "model.safetensors.index.json"
NESTED = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("intact"), eos_token_id=[95])


@pytest.fixture
def folder(intact, tmp_path):
    for file in intact.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
def test_deeply_nested_json_names_its_file(file, folder):
    if file == INDEX:
        (folder / "model.safetensors").unlink()
    (folder / file).write_text(NESTED)
    with pytest.raises(ValueError, match=rf"{re.escape(file)} is not valid JSON: "):
        tca_jax.load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname", "sub/model.safetensors", "model.bin", "", 3])
def test_an_index_beyond_the_folder_is_corrupt(name, folder):
    (folder / "model.safetensors").rename(folder / "moved.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    message = rf"{INDEX} is corrupt: weight_map\['model.norm.weight'\] = .*the name of a shard"
    with pytest.raises(ValueError, match=message):
        tca_jax.load(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "chat_template.jinja", "model.safetensors", "config.json"])
def test_a_dangling_link_is_not_absent(file, folder):
    (folder / file).unlink()
    (folder / file).symlink_to("../../blobs/0123")  # as in the Hub's cache
    with pytest.raises(FileNotFoundError, match=rf"{file} is a link, and the file it leads to is missing"):
        tca_jax.load(folder)


def test_a_folder_as_generation_config_is_named(folder):
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").mkdir()
    with pytest.raises(OSError, match=r"generation_config.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("entry", "value"), [("model_max_length", "4096"), ("model_max_length", [1]), (None, None)])
def test_an_unusable_tokenizer_is_named_on_loading(entry, value, folder):
    file = folder / ("tokenizer_config.json" if entry else "tokenizer.json")
    if entry:
        file.write_text(json.dumps({**json.loads(file.read_text()), entry: value}))
    else:
        file.unlink()
    with pytest.raises(ValueError, match=r"^the tokenizer in [^\n]* cannot be loaded: (Type|Value)Error: [^\n]*$"):
        open_checkpoint(folder)


def test_a_tokenizer_beyond_the_vocabulary_is_named(folder):
    """JAX clamps indices: the model would read another token."""
    entries = json.loads((folder / "tokenizer.json").read_text())
    entries["model"]["vocab"]["é"] = CONFIG.vocab_size
    (folder / "tokenizer.json").write_text(json.dumps(entries))
    checkpoint = open_checkpoint(folder)
    assert encode_prompt(checkpoint, "hello")
    with pytest.raises(ValueError, match=r"prompt: the tokenizer of .* makes token 97 of this text, and the model has"):
        encode_prompt(checkpoint, "café")


def test_a_failing_tokenizer_names_the_argument(folder):
    class PanicException(BaseException):  # what Rust's panics are in Python: no Exception
        pass

    def panic(*args, **options):
        raise PanicException("index out of bounds")

    checkpoint = dataclasses.replace(open_checkpoint(folder), tokenizer=panic)
    with pytest.raises(ValueError, match=r"prompts\[0\]: the tokenizer of .* does not take this text: index out of"):
        encode_prompt(checkpoint, "hello", "prompts[0]")


@pytest.mark.parametrize("kind", [Profile, tca_jax.Context])
def test_missing_folders_and_files_are_told_apart(kind, tmp_path):
    name = kind.__name__.lower()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match=rf"{name} directory {tmp_path}/nosuch does not exist"):
        kind.load(tmp_path / "nosuch")
    for place, message in (("file", f"file is a file, not a {name} directory"), ("", f"holds no {name}")):
        with pytest.raises(ValueError, match=message):
            kind.load(tmp_path / place)


class OfAnotherVersion(FullCache):
    """Registered nowhere; a test takes it away."""


def test_a_context_of_an_unknown_class_is_refused():
    lm = tiny_lm()
    theirs = lm.with_method(Method("full", FullPrefill(), OfAnotherVersion()))
    assert unknown_types(describe_method(theirs.method)) == []
    context = tca_jax.prefill(lm, random_prompt(0, 20))
    described = describe_method(theirs.method).replace("OfAnotherVersion", "OfTheNextVersion")
    identity = dataclasses.replace(context.identity, method_description=described)
    message = r"under method 'full', whose .*OfTheNextVersion is not known here: .* another version of tca_jax"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(context, identity=identity).require_made_by(lm)


def test_local_types_are_not_unknown():
    class Local(CachePolicy):
        block_size, window = 8, 16

        def capacities(self, layer, prompt_tokens):
            return 0

        def select(self, *args):
            raise NotImplementedError

    assert unknown_types(describe_method(Method("local", FullPrefill(), Local()))) == []
    assert unknown_types("no description") == []
    described = '{"type": "tca_jax.nosuch.Cache", "inner": [{"type": "nosuch.Cache"}]}'
    assert unknown_types(described) == ["nosuch.Cache", "tca_jax.nosuch.Cache"]
