"""What fuzzing and reviews found, one by one: damage that once came out as a raw error, or as another answer."""

import dataclasses
import json
import re

import pytest
from tiny import CONFIG, random_prompt, tiny_lm, write_checkpoint
from tokenizers import Tokenizer

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.engine.prompts import encode_prompt
from tca_jax.loading import open_checkpoint
from tca_jax.methods import CachePolicy, FullCache, FullPrefill, Method
from tca_jax.methods.registry import describe_method, unknown_types

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("intact"), eos_token_id=[95])


@pytest.fixture
def folder(intact, tmp_path):
    for file in intact.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(file, change):
    entries = json.loads(file.read_text())
    change(entries)
    file.write_text(json.dumps(entries))


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("depth", [40, 900, 100_000])
def test_deeply_nested_json_names_its_file(file, depth, folder):
    if file == INDEX:
        (folder / "model.safetensors").unlink()
    (folder / file).write_text('{"a":' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ValueError, match=rf"{re.escape(file)} is not valid JSON: its values are nested"):
        tca_jax.load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname", "sub/model.safetensors", "model.bin", "", 3])
def test_an_index_beyond_the_folder_is_corrupt(name, folder):
    (folder / "model.safetensors").rename(folder / "moved.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(
        ValueError, match=rf"{INDEX} is corrupt: weight_map\['model.norm.weight'\] = .*the name of a shard"
    ):
        tca_jax.load(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "chat_template.jinja", "model.safetensors", "config.json"])
def test_a_dangling_link_is_not_absent(file, folder):
    """Files of the Hub's cache are links."""
    (folder / file).unlink()
    (folder / file).symlink_to("../../blobs/0123")
    with pytest.raises(FileNotFoundError, match=rf"{file} is a link, and the file it leads to is missing"):
        tca_jax.load(folder)


def test_a_folder_as_generation_config_is_named(folder):
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").mkdir()
    with pytest.raises(OSError, match=r"generation_config.json"):
        open_checkpoint(folder)


# --- tokenizers -----------------------------------------------------------------------------------


def test_a_tokenizer_beyond_the_vocabulary_is_named(folder):
    """JAX clamps indices: the model would have read another token."""

    def add_one(entries):
        entries["model"]["vocab"]["é"] = CONFIG.vocab_size

    edit(folder / "tokenizer.json", add_one)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("é").ids == [97]
    checkpoint = open_checkpoint(folder)
    assert encode_prompt(checkpoint, "hello")
    with pytest.raises(ValueError, match=r"prompt: the tokenizer of .* makes token 97 of this text, and the model has"):
        encode_prompt(checkpoint, "café")


@pytest.mark.parametrize("value", ["4096", [1], {}])
def test_an_unusable_tokenizer_is_named_on_loading(value, folder):
    edit(folder / "tokenizer_config.json", lambda entries: entries.update(model_max_length=value))
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be loaded: TypeError: [^\n]*$"):
        open_checkpoint(folder)


def test_a_missing_tokenizer_json_is_one_line(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^the tokenizer in [^\n]* cannot be loaded: ValueError: [^\n]*$"):
        open_checkpoint(folder)


def test_a_failing_tokenizer_names_the_argument(folder):
    class PanicException(BaseException):  # what Rust's panics are in Python: no Exception
        pass

    def panic(*args, **options):
        raise PanicException("index out of bounds")

    checkpoint = dataclasses.replace(open_checkpoint(folder), tokenizer=panic)
    with pytest.raises(ValueError, match=r"prompts\[0\]: the tokenizer of .* does not take this text: index out of"):
        encode_prompt(checkpoint, "hello", "prompts[0]")


# --- profiles and contexts ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Profile, tca_jax.Context])
def test_missing_folders_and_files_are_told_apart(kind, tmp_path):
    name = kind.__name__.lower()
    with pytest.raises(FileNotFoundError, match=rf"{name} directory {tmp_path}/nosuch does not exist"):
        kind.load(tmp_path / "nosuch")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"{tmp_path}/file is a file, not a {name} directory"):
        kind.load(tmp_path / "file")
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no {name}"):
        kind.load(tmp_path)


class OfAnotherVersion(FullCache):
    """Registered nowhere; a test takes it away."""


def test_a_context_of_an_unknown_class_is_refused(monkeypatch):
    lm = tiny_lm()
    theirs = lm.with_method(Method("full", FullPrefill(), OfAnotherVersion()))
    assert unknown_types(describe_method(theirs.method)) == []
    context = tca_jax.prefill(lm, random_prompt(0, 20))
    described = describe_method(theirs.method).replace("OfAnotherVersion", "OfTheNextVersion")
    identity = dataclasses.replace(context.identity, method_description=described)
    with pytest.raises(
        ValueError,
        match=r"under method 'full', whose .*OfTheNextVersion is not known here: .* another version of tca_jax",
    ):
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
    assert unknown_types('{"type": "tca_jax.nosuch.Cache", "inner": [{"type": "nosuch.Cache"}]}') == [
        "nosuch.Cache",
        "tca_jax.nosuch.Cache",
    ]
