"""Loading: names, files, dtypes, tokenizers, profiles, and every error a user can make."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tiny import CONFIG, TCA, random_prompt, tiny_lm, write_checkpoint

import tca_jax
from tca_jax import methods
from tca_jax.calibration.profile import Profile
from tca_jax.engine.prompts import encode_prompts
from tca_jax.loading import open_checkpoint
from tca_jax.models.aliases import ALIASES
from tca_jax.models.decoder import Decoder
from tca_jax.models.fingerprint import fingerprint
from tca_jax.models.params import save_decoder

OPTIONS = {"max_new_tokens": 60, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def lm(folder):
    return tca_jax.load(folder)


def test_a_folder_gives_the_saved_models_answers(lm):
    prompt = random_prompt(0, 5)
    assert lm.params["embedding"][...].dtype == jnp.float32  # the CPU's default
    assert tca_jax.generate(lm, prompt, **OPTIONS).tokens == tca_jax.generate(tiny_lm(), prompt, **OPTIONS).tokens


def test_generation_ends_at_the_checkpoints_stop_tokens(folder, tmp_path):
    free = tca_jax.generate(tca_jax.load(folder), "hello", **OPTIONS)
    other = write_checkpoint(tmp_path, eos_token_id=[free.tokens[0][4], 96])
    lm = tca_jax.load(other)
    assert lm.eos_token_ids == (free.tokens[0][4], 96)
    out = tca_jax.generate(lm, "hello", max_new_tokens=OPTIONS["max_new_tokens"])
    assert out.tokens[0] == free.tokens[0][: free.tokens[0].index(free.tokens[0][4]) + 1]


def test_a_profile_is_applied_and_taken_off(folder, lm, tmp_path):
    profile = tca_jax.calibrate(lm, [random_prompt(1, 200)], TCA, criterion="retained_mass")
    profile.save(tmp_path / "profile")
    with_tca = tca_jax.load(folder, profile=tmp_path / "profile")
    assert with_tca.method == methods.configured(profile.config, profile.candidates)
    assert tca_jax.load(folder, profile=profile).method == with_tca.method
    prompt = random_prompt(2, 150)
    full = tca_jax.generate(lm, prompt, max_new_tokens=5)
    assert tca_jax.generate(with_tca.with_profile(None), prompt, max_new_tokens=5).tokens == full.tokens


def test_profiles_of_other_models_are_refused(folder, lm, tmp_path):
    profile = tca_jax.calibrate(tiny_lm(seed=5), [random_prompt(1, 200)], TCA, criterion="retained_mass")
    with pytest.raises(ValueError, match="profile"):
        tca_jax.load(folder, profile=profile)
    with pytest.raises(ValueError, match=r"3 layers"):
        tca_jax.load(folder, profile=Profile.uniform(TCA, 3, 2, 0))
    assert tca_jax.load(folder, profile=Profile.uniform(TCA, 2, 2, 0)).method == methods.configured(
        TCA, [[0, 0], [0, 0]]
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_profiles_fit_in_every_dtype(folder, lm, dtype):
    profile = dataclasses.replace(Profile.uniform(TCA, 2, 2, 0), fingerprint=fingerprint(lm.decoder))
    loaded = tca_jax.load(folder, profile=profile, dtype=dtype)
    assert loaded.fingerprint == profile.fingerprint
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype(dtype)}


def test_folders_go_before_shipped_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "recall-tiny")
    assert tca_jax.load("recall-tiny").config.vocab_size == 97


def test_a_folder_without_tokenizer_takes_ids(tmp_path):
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


def test_a_folder_without_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds neither config.json nor a GGUF file"):
        tca_jax.load(tmp_path)


def test_files_are_not_hub_ids(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for file in (folder / "model.safetensors", folder / "config.json", "weights/nosuch.safetensors"):
        with pytest.raises(ValueError, match=rf"name_or_path = '{file}' is a file: pass its folder"):
            tca_jax.load(file)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos", ["</s>", [1, "2"], True, [0, 97]])
def test_wrong_stop_tokens_name_their_file(file, eos, folder, tmp_path):
    for name in ("config.json", file):
        entries = json.loads((folder / "config.json").read_text())
        (tmp_path / name).write_text(json.dumps(entries | ({"eos_token_id": eos} if name == file else {})))
    with pytest.raises(ValueError, match=rf"{file}: eos_token_id = .*: must be a token id in \[0, 97\), or a list"):
        open_checkpoint(tmp_path)


def test_weights_are_read_last(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tca_jax.loading.load_checkpoint", lambda *args: pytest.fail("the weights were read"))
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.name, checkpoint.config.vocab_size) == (folder.name, 97)
    assert encode_prompts(checkpoint, "hello") == [[72, 69, 76, 76, 79]]
    with pytest.raises(ValueError, match="3 layers"):
        checkpoint.load(Profile.uniform(TCA, 3, 2, 0))
    with pytest.raises(FileNotFoundError, match=r"profile directory .*nosuch does not exist"):
        checkpoint.load(tmp_path / "nosuch")
    with pytest.raises(ValueError, match="dtype = int8: must be float32, bfloat16 or float16"):
        checkpoint.load(dtype="int8")


def test_an_unreachable_hub_names_the_model(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"Qwen/Qwen2.5-7B could not be downloaded and is not in the local Hub cache"
    ):
        tca_jax.load("qwen2.5-7b")


@pytest.mark.parametrize("alias", ["qwen2.5-7b"])
def test_an_alias_downloads_its_repository_once(alias, folder, monkeypatch):
    asked = []

    def snapshot_download(hub_id, *, revision, allow_patterns):
        asked.append((hub_id, revision))
        assert "*.safetensors" in allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    lm = tca_jax.load(alias, revision="abc")
    assert lm.name == alias
    assert asked == [("Qwen/Qwen2.5-7B", "abc")]
    assert len(set(ALIASES.values())) == len(ALIASES) == 10 + 14 + 11 + 6 + 12
    others = ("llama3.2-1b-instruct", "qwen3-8b-base", "smollm2-135m")
    wanted = ["meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-8B-Base", "HuggingFaceTB/SmolLM2-135M"]
    assert [ALIASES[each] for each in others] == wanted


def test_a_corrupt_tokenizer_is_named(tmp_path):
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be loaded"):
        tca_jax.load(folder)


def test_a_chat_needs_a_template(tmp_path):
    plain = tca_jax.load(write_checkpoint(tmp_path, chat_template=None))
    with pytest.raises(ValueError, match=r"is a chat, but .* has no chat template"):
        tca_jax.generate(plain, [{"role": "user", "content": "hello"}])


def test_heads_need_not_divide_the_hidden_size(tmp_path):
    config = dataclasses.replace(CONFIG, hidden_size=56, num_heads=6, num_kv_heads=2, head_dim=16)
    decoder = Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    save_decoder(write_checkpoint(tmp_path), decoder, jnp.float32)
    lm = tca_jax.load(tmp_path)
    assert tca_jax.generate(lm, "hello", max_new_tokens=2).stats.new_tokens == [2]


def test_an_adapter_is_not_ignored_silently(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="holds an adapter, which is ignored: merge it"):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_lfs_pointers_are_named(name, tmp_path):
    (write_checkpoint(tmp_path) / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match=rf"{name} is a Git LFS pointer and not the file itself: run `git lfs pull`"):
        tca_jax.load(tmp_path)


def test_the_compilation_cache_is_on_by_default(folder, monkeypatch):
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
