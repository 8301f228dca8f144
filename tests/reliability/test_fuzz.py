"""Damaged checkpoints, tokenizers, profiles and contexts: a clear error, or what the files say."""

import json
import struct
from pathlib import Path

import jax
import numpy as np
import pytest
from profiles import make_profile
from reliability.fuzzing import fuzz
from safetensors.numpy import load_file, save_file
from tiny import TCA, random_prompt, tiny_lm, with_candidates, write_checkpoint
from tokenizers import Tokenizer

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.engine.prompts import encode_prompt, encode_prompts, render_chat
from tca_jax.loading import open_checkpoint
from tca_jax.models.names import parameters

TEXTS = ("hello", "The answer (42) is ~ not here!", "two\nlines", "übrigens 日本")
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "?"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint in one file, without a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("whole"), tokenizer=False, eos_token_id=[95, 96])


@pytest.fixture(scope="module")
def shards(whole, tmp_path_factory):
    """The same in two shards."""
    folder, tensors = tmp_path_factory.mktemp("shards"), load_file(whole / WEIGHTS)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: x for name, x in tensors.items() if places[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((whole / name).read_bytes())
    return folder


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Tensors of the files, read without a library. They have no checksum: the model must be what the file says."""
    found, single = {}, folder / WEIGHTS
    for file in [single] if single.is_file() else sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        for name, entry in json.loads(content[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + place for place in entry["data_offsets"])
                found[name] = np.frombuffer(content[begin:end], np.float32).reshape(entry["shape"])
    return found


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)  # NaN is no NaN's equal


def use_checkpoint(folder: Path, intact: tca_jax.LM) -> str:
    """Loads and answers. Every entry of the config must count for what it says."""
    lm = tca_jax.load(folder)
    entries = json.loads((folder / "config.json").read_text())
    entries["architectures"] = entries.get("architectures") or None  # an empty list says nothing
    counted = lm.config.to_hf()
    for key, value in intact.config.to_hf().items():
        said = entries.get(key)
        if said not in (None, {}, value) and key != "torch_dtype":
            said = float(said) if isinstance(value, float) else said
            assert said == counted[key], f"{key} is {said!r} in the file and {counted[key]!r} in the model"
    stored = stored_tensors(folder)
    for parameter in parameters(lm.decoder):
        for name, x in zip(parameter.names, parameter.layout.split(np.asarray(parameter.variable[...])), strict=True):
            loaded = x.T if parameter.transposed else x
            np.testing.assert_array_equal(bits(loaded), bits(stored[name]), err_msg=name)
    if lm.config != intact.config:
        return "another config"
    same = jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(bits(x), bits(y)), lm.params, intact.params))
    try:
        answers = answer(lm)
    except ValueError as error:
        if same or "NaN or infinity" not in str(error):
            raise
        return "not finite"
    assert not same or answers == answer(intact)
    return "the same" if same else "other weights"


def answer(lm: tca_jax.LM) -> list[list[int]]:
    return tca_jax.generate(lm, random_prompt(0, 20), max_new_tokens=4, stop_token_ids=()).tokens


@pytest.mark.parametrize("layout", ["whole", "shards"])
def test_a_damaged_checkpoint_loads_as_its_files_say(layout, request, tmp_path):
    intact = request.getfixturevalue(layout)
    lm = tca_jax.load(intact)
    outcomes = fuzz(layout, intact, tmp_path / "c", lambda folder: use_checkpoint(folder, lm))
    assert outcomes["error"] > 0.2 * outcomes.total()


def use_tokenizer(folder: Path, intact: Path) -> str:
    """Encodes, decodes and renders a chat. Merges and names have no checksum: what loads must work."""
    for name in ("config.json", WEIGHTS):
        (folder / name).write_bytes((intact / name).read_bytes())
    checkpoint = open_checkpoint(folder)
    if checkpoint.tokenizer is None:
        assert not any(path.name.startswith("tokenizer") for path in folder.iterdir()), "the tokenizer was overlooked"
        return "no tokenizer"
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert encode_prompt(checkpoint, text) == plain.encode(text).ids
        for ids in (encode_prompt(checkpoint, text), *encode_prompts(checkpoint, [text, text])):
            assert all(type(i) is int and 0 <= i < 97 for i in ids)
            assert isinstance(checkpoint.tokenizer.decode(ids, skip_special_tokens=True), str)
    assert isinstance(render_chat(checkpoint, CHAT, "prompts[0]"), str)
    return "usable"


def test_a_damaged_tokenizer_can_be_used(tmp_path):
    intact, files = write_checkpoint(tmp_path / "intact", chat_template=TEMPLATE), tmp_path / "files"
    files.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (files / name).write_bytes((intact / name).read_bytes())
    outcomes = fuzz("tokenizer", files, tmp_path / "c", lambda folder: use_tokenizer(folder, intact))
    assert outcomes["error"]


# TensorStore reports reads of damaged files to an event loop that Orbax has closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["profile", "context"])
def test_a_damaged_folder_loads_or_is_refused(kind, tmp_path):
    saved = make_profile()
    if kind == "context":
        lm = with_candidates(tiny_lm(), [[0, 6], [TCA.num_candidates, 3]])
        saved = tca_jax.prefill(lm, [random_prompt(0, 100), random_prompt(1, 61)])
    saved.save(tmp_path / "saved")

    def use(folder: Path) -> str:
        loaded = (Profile if kind == "profile" else tca_jax.Context).load(folder)
        assert kind == "profile" or isinstance(loaded.stats.kept_share, float)
        return "loads"

    assert fuzz(kind, tmp_path / "saved", tmp_path / "c", use)["error"]
