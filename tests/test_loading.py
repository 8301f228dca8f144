"""Loading: names, files, dtypes, tokenizers, profiles, and every error a user can make."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TCA, random_prompt, tiny_lm, write_checkpoint

import tca_jax
from tca_jax import methods
from tca_jax.calibration.profile import Profile
from tca_jax.engine.prompts import encode_prompts
from tca_jax.loading import open_checkpoint
from tca_jax.models.fingerprint import fingerprint

OPTIONS = {"max_new_tokens": 60, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def lm(folder):
    return tca_jax.load(folder)


def test_a_local_folder_gives_the_same_answers_as_the_model_it_was_saved_from(lm):
    prompt = random_prompt(0, 5)
    assert lm.params["embedding"][...].dtype == jnp.float32  # the CPU's default
    assert tca_jax.generate(lm, prompt, **OPTIONS).tokens == tca_jax.generate(tiny_lm(), prompt, **OPTIONS).tokens


def test_text_chats_and_ids_are_the_same_prompt(lm):
    ids = lm.tokenizer("hello")["input_ids"]
    by_text = tca_jax.generate(lm, "hello", **OPTIONS)
    for prompt in (ids, b"hello", [{"role": "user", "content": "hello"}]):
        assert tca_jax.generate(lm, prompt, **OPTIONS).tokens == by_text.tokens
    assert by_text.text == [lm.tokenizer.decode(by_text.tokens[0], skip_special_tokens=True)]
    batch = tca_jax.generate(lm, ["hello", "hi", np.array(ids)], **OPTIONS)
    assert batch.tokens[0] == batch.tokens[2] == by_text.tokens[0]


def test_streamed_pieces_join_to_the_text_of_generate(lm, monkeypatch):
    monkeypatch.setattr("tca_jax.engine.generation._STREAM_SECONDS", 0.0)  # a piece a token
    pieces = list(tca_jax.stream(lm, "hello", **OPTIONS))
    assert len(pieces) > 50
    assert "".join(pieces) == tca_jax.generate(lm, "hello", **OPTIONS).text[0]


def test_a_stop_string_ends_the_answer_and_never_shows_in_text_or_stream(lm):
    text = tca_jax.generate(lm, "hello", **OPTIONS).text[0]
    stop = text[20:23]
    out = tca_jax.generate(lm, "hello", stop=stop, **OPTIONS)
    assert out.text[0] == text[: text.index(stop)]
    assert out.finish_reasons == ["stop"]
    assert stop in lm.tokenizer.decode(out.tokens[0])
    assert stop not in lm.tokenizer.decode(out.tokens[0][:-1])
    assert "".join(tca_jax.stream(lm, "hello", stop=[stop], **OPTIONS)) == out.text[0]


def test_generation_ends_at_the_checkpoints_own_stop_tokens(folder, tmp_path):
    free = tca_jax.generate(tca_jax.load(folder), "hello", **OPTIONS)
    other = write_checkpoint(tmp_path, eos_token_id=[free.tokens[0][4], 96])
    lm = tca_jax.load(other)
    assert lm.eos_token_ids == (free.tokens[0][4], 96)
    out = tca_jax.generate(lm, "hello", max_new_tokens=OPTIONS["max_new_tokens"])
    assert out.tokens[0] == free.tokens[0][: free.tokens[0].index(free.tokens[0][4]) + 1]


def test_dtype_is_that_of_the_weights_and_of_the_cache(folder):
    lm = tca_jax.load(folder, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(lm.params)} == {jnp.dtype(jnp.bfloat16)}
    stats = tca_jax.generate(lm, [1, 2, 3], max_new_tokens=2).stats
    assert (
        stats.kv_cache_bytes * 2
        == tca_jax.generate(tca_jax.load(folder), [1, 2, 3], max_new_tokens=2).stats.kv_cache_bytes
    )


def test_a_profile_is_applied_and_can_be_taken_off(folder, lm, tmp_path):
    profile = tca_jax.calibrate(lm, [random_prompt(1, 200)], TCA, criterion="retained_mass")
    profile.save(tmp_path / "profile")
    with_tca = tca_jax.load(folder, profile=tmp_path / "profile")
    assert with_tca.method == methods.configured(profile.config, profile.candidates)
    assert tca_jax.load(folder, profile=profile).method == with_tca.method
    prompt = random_prompt(2, 150)
    full = tca_jax.generate(lm, prompt, max_new_tokens=5)
    assert tca_jax.generate(with_tca.with_profile(None), prompt, max_new_tokens=5).tokens == full.tokens


def test_a_profile_of_other_weights_or_shape_is_refused(folder, lm, tmp_path):
    profile = tca_jax.calibrate(tiny_lm(seed=5), [random_prompt(1, 200)], TCA, criterion="retained_mass")
    with pytest.raises(ValueError, match="profile"):
        tca_jax.load(folder, profile=profile)
    with pytest.raises(ValueError, match=r"3 layers"):
        tca_jax.load(folder, profile=Profile.uniform(TCA, 3, 2, 0))
    assert tca_jax.load(folder, profile=Profile.uniform(TCA, 2, 2, 0)).method == methods.configured(
        TCA, [[0, 0], [0, 0]]
    )


def test_the_fingerprint_does_not_depend_on_the_dtype_that_weights_are_loaded_in(folder, lm):
    assert fingerprint(tca_jax.load(folder, dtype=jnp.bfloat16).decoder) == fingerprint(lm.decoder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_shipped_profile_fits_its_model_in_every_dtype(dtype):
    lm = tca_jax.load("recall-tiny", profile="shipped", dtype=dtype)
    assert lm.method.name == "tca"
    assert lm.method.cache.window == 512


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_profile_of_a_float32_checkpoint_fits_it_in_every_dtype(folder, lm, dtype):
    profile = tca_jax.calibrate(lm, [random_prompt(1, 200)], TCA, criterion="retained_mass")
    loaded = tca_jax.load(folder, profile=profile, dtype=dtype)
    assert (
        tca_jax.calibrate(loaded, [random_prompt(1, 200)], TCA, criterion="retained_mass").fingerprint
        == profile.fingerprint
    )


def test_a_folder_of_the_users_own_is_not_hidden_by_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "recall-tiny")
    assert tca_jax.load("recall-tiny").config.vocab_size == 97


def test_a_folder_without_a_tokenizer_loads_and_takes_token_ids(tmp_path):
    lm = tca_jax.load(write_checkpoint(tmp_path, tokenizer=False))
    assert lm.tokenizer is None
    assert len(tca_jax.generate(lm, [5, 6], max_new_tokens=3).tokens[0]) == 3
    with pytest.raises(ValueError, match="was loaded without a tokenizer, so text cannot be used; pass token ids"):
        tca_jax.generate(lm, "text")


def test_progress_counts_bytes(folder):
    seen = []
    tca_jax.load(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 10
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_unknown_alias_lists_the_aliases():
    with pytest.raises(
        ValueError, match=r"name_or_path = 'qwen9-7b': no such folder, Hub id \(owner/name\) or alias.*qwen2.5-7b"
    ):
        tca_jax.load("qwen9-7b")
    with pytest.raises(ValueError, match=r"Nearest aliases: llama3.1-8b, llama3.1-70b, .* All: recall-tiny"):
        tca_jax.load("llama-3.1-8b")


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds neither config.json nor a GGUF file"):
        tca_jax.load(tmp_path)


def test_a_path_to_a_file_is_not_taken_for_a_hub_id(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for file in (folder / "model.safetensors", folder / "config.json", "weights/nosuch.safetensors"):
        with pytest.raises(ValueError, match=rf"name_or_path = '{file}' is a file: pass its folder"):
            tca_jax.load(file)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos", [1.0, "</s>", [[1]], [1, "2"], True, -1, [0, 97]])
def test_stop_tokens_of_a_wrong_kind_name_their_file(file, eos, folder, tmp_path):
    for name in ("config.json", file):
        entries = json.loads((folder / "config.json").read_text())
        (tmp_path / name).write_text(json.dumps(entries | ({"eos_token_id": eos} if name == file else {})))
    with pytest.raises(ValueError, match=rf"{file}: eos_token_id = .*: must be a token id in \[0, 97\), or a list"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2]", "holds a list: must be a JSON object"), ("{", "not valid JSON"), ("\udcff", "not valid JSON")],
)
def test_a_damaged_generation_config_is_named(text, message, tmp_path):
    file = write_checkpoint(tmp_path) / "generation_config.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=rf"generation_config.json.*{message}"):
        tca_jax.load(tmp_path)


def test_all_but_the_weights_is_checked_before_they_are_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tca_jax.loading.load_checkpoint", lambda *args: pytest.fail("the weights were read"))
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.name, checkpoint.config.vocab_size) == (folder.name, 97)
    assert encode_prompts(checkpoint, "hello") == [[72, 69, 76, 76, 79]]
    with pytest.raises(ValueError, match="3 layers"):
        checkpoint.load(Profile.uniform(TCA, 3, 2, 0))
    with pytest.raises(FileNotFoundError, match=r"profile directory .*nosuch does not exist"):
        checkpoint.load(tmp_path / "nosuch")
    with pytest.raises(ValueError, match="dtype = int8"):
        checkpoint.load(dtype="int8")


def test_a_long_text_makes_the_tokenizer_warn_of_nothing(folder, caplog):
    checkpoint = open_checkpoint(folder)
    checkpoint.tokenizer.model_max_length = 10
    logger = logging.getLogger("transformers")  # its records go no further than to its own handlers
    logger.addHandler(caplog.handler)
    try:
        assert len(encode_prompts(checkpoint, "x" * 100)[0]) == 100
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_an_unreachable_hub_names_the_model(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"Qwen/Qwen2.5-7B could not be downloaded and is not in the local Hub cache"
    ):
        tca_jax.load("qwen2.5-7b")


@pytest.mark.parametrize("alias", ["qwen2.5-7b", "llama3.1-8b-instruct", "qwen3-8b"])
def test_an_alias_downloads_its_repository_once_and_loads_it(alias, folder, monkeypatch):
    asked = []

    def snapshot_download(hub_id, *, revision, allow_patterns):
        asked.append((hub_id, revision))
        assert "*.safetensors" in allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    lm = tca_jax.load(alias, revision="abc")
    assert lm.name == alias
    assert asked == [(tca_jax.models.aliases.ALIASES[alias], "abc")]


def test_a_wrong_dtype_is_named(folder):
    with pytest.raises(ValueError, match="dtype = int8: must be float32, bfloat16 or float16"):
        tca_jax.load(folder, dtype="int8")


def test_an_unsupported_architecture_is_named(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )
    with pytest.raises(ValueError, match="mamba"):
        tca_jax.load(tmp_path)


def test_a_corrupt_weight_file_is_named(tmp_path):
    folder = write_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors is corrupt or incomplete"):
        tca_jax.load(folder)


def test_a_corrupt_tokenizer_is_named(tmp_path):
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be loaded"):
        tca_jax.load(folder)


def test_text_that_is_not_utf8_is_named(lm):
    with pytest.raises(ValueError, match=r"prompts\[0\] is not valid UTF-8 text"):
        tca_jax.generate(lm, b"\xff\xfe")
    with pytest.raises(ValueError, match=r"prompts\[1\] is not valid UTF-8 text"):
        tca_jax.generate(lm, ["fine", "\udcff"])


def test_an_empty_text_is_named(lm):
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty: at least one token is needed"):
        tca_jax.generate(lm, ["fine", ""])


def test_a_chat_needs_roles_and_a_template(lm, tmp_path):
    with pytest.raises(ValueError, match=r"prompts\[0\]\[0\] has no \['role'\]"):
        tca_jax.generate(lm, [{"content": "hello"}])
    plain = tca_jax.load(write_checkpoint(tmp_path, chat_template=None))
    with pytest.raises(ValueError, match=r"is a chat, but .* has no chat template"):
        tca_jax.generate(plain, [{"role": "user", "content": "hello"}])


def test_the_compilation_cache_is_on_by_default_and_a_users_own_choice_stands(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        tca_jax.load(folder)
        assert jax.config.jax_compilation_cache_dir == "/nowhere/tca_jax/jax"
        jax.config.update("jax_compilation_cache_dir", "/mine")
        tca_jax.load(folder)
        assert jax.config.jax_compilation_cache_dir == "/mine"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
