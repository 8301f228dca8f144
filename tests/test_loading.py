"""Loading: names, files, dtypes, tokenizers, profiles, and every error a user can make."""

import dataclasses
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import mesh_of, needs_8_devices
from profiles import make_worth_profile
from tiny import CONFIG, TCA, random_prompt, tiny_lm, write_checkpoint

import tca_jax
from tca_jax import methods
from tca_jax.calibration.profile import Profile
from tca_jax.loading import open_checkpoint
from tca_jax.models.aliases import ALIASES
from tca_jax.models.decoder import Decoder
from tca_jax.models.params import save_decoder

OPTIONS = {"max_new_tokens": 60, "stop_token_ids": ()}


def test_a_folder_gives_the_saved_models_answers(written, tmp_path, monkeypatch):
    prompt, seen = random_prompt(0, 5), []
    expected = tca_jax.generate(tiny_lm(), prompt, **OPTIONS).tokens
    assert written.params["embedding"][...].dtype == jnp.float32  # the CPU's default
    assert tca_jax.generate(written, prompt, **OPTIONS).tokens == expected
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "recall-tiny", tokenizer=False)  # folders go before shipped names
    plain = tca_jax.load("recall-tiny", progress=lambda done, total: seen.append((done, total)))
    assert plain.tokenizer is None
    assert tca_jax.generate(plain, prompt, **OPTIONS).tokens == expected
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 10


def test_generation_ends_at_the_checkpoints_stop_tokens(checkpoint, tmp_path):
    free = tca_jax.generate(tca_jax.load(checkpoint), "hello", **OPTIONS)
    other = write_checkpoint(tmp_path, eos_token_id=[free.tokens[0][4], 96])
    lm = tca_jax.load(other)
    assert lm.eos_token_ids == (free.tokens[0][4], 96)
    out = tca_jax.generate(lm, "hello", max_new_tokens=OPTIONS["max_new_tokens"])
    assert out.tokens[0] == free.tokens[0][: free.tokens[0].index(free.tokens[0][4]) + 1]


def test_a_profile_is_applied_and_taken_off(checkpoint, written, tmp_path):
    profile = tca_jax.calibrate(written, [random_prompt(1, 200)], TCA)
    profile.save(tmp_path / "profile")
    with_tca = tca_jax.load(checkpoint, profile=tmp_path / "profile")
    assert with_tca.method == methods.get("tca", candidates=profile.candidates, config=profile.config)
    assert tca_jax.load(checkpoint, profile=profile).method == with_tca.method
    other = tca_jax.calibrate(tiny_lm(seed=5), [random_prompt(1, 200)], TCA)
    with pytest.raises(ValueError, match="profile"):
        tca_jax.load(checkpoint, profile=other)
    with pytest.raises(FileNotFoundError, match=r"profile = 'shipped': .* holds no profile folder"):
        tca_jax.load(checkpoint, profile="shipped")
    prompt = random_prompt(2, 150)
    full = tca_jax.generate(written, prompt, max_new_tokens=5)
    assert tca_jax.generate(with_tca.with_profile(None), prompt, max_new_tokens=5).tokens == full.tokens


def test_an_unreachable_hub_names_the_model(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"Qwen/Qwen2.5-7B could not be downloaded and is not in the local Hub cache"
    ):
        tca_jax.load("qwen2.5-7b")


def test_an_alias_downloads_its_repository_once(checkpoint, monkeypatch):
    asked, alias = [], "qwen2.5-7b"

    def snapshot_download(hub_id, *, revision, allow_patterns):
        asked.append((hub_id, revision))
        assert "*.safetensors" in allow_patterns
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert tca_jax.load(alias, revision="abc").name == alias
    assert asked == [("Qwen/Qwen2.5-7B", "abc")]
    assert len(set(ALIASES.values())) == len(ALIASES) == 10 + 14 + 11 + 6 + 12
    others = ("llama3.2-1b-instruct", "qwen3-8b-base", "smollm2-135m")
    wanted = ["meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-8B-Base", "HuggingFaceTB/SmolLM2-135M"]
    assert [ALIASES[each] for each in others] == wanted


def test_an_adapter_is_not_ignored_silently(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="holds an adapter, which is ignored: merge it"):
        open_checkpoint(tmp_path / "model")


def test_the_compilation_cache_is_on_by_default(checkpoint, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        tca_jax.load(checkpoint)
        assert jax.config.jax_compilation_cache_dir == "/nowhere/tca_jax/jax"
        jax.config.update("jax_compilation_cache_dir", "/mine")
        tca_jax.load(checkpoint)
        assert jax.config.jax_compilation_cache_dir == "/mine"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.integration
def test_loading_needs_no_torch():
    script = "import sys; sys.modules['torch'] = None; import tca_jax; tca_jax.load('recall-tiny')"
    subprocess.run([sys.executable, "-c", script], check=True)  # importing torch is an error


@needs_8_devices
def test_heads_are_read_where_the_profile_wants_them(tmp_path):
    # On two devices, one would have both dense heads of a layer.
    rows, worth = np.array([[14, 14, 0, 0], [0, 3, 14, 14]], np.int32), make_worth_profile(2, 4, CONFIG.hidden_size)
    config = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=4, max_positions=2**14)
    save_decoder(tmp_path, Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)), jnp.float32)
    alone = tca_jax.load(tmp_path)
    profile = dataclasses.replace(Profile.uniform(TCA, 2, 4, 0), candidates=rows, fingerprint=alone.fingerprint)
    worth = dataclasses.replace(worth, maps=dataclasses.replace(worth.maps, shares=np.float32(rows / 15)))
    lm, by_worth = (tca_jax.load(tmp_path, profile=each, mesh=mesh_of((1, 2))) for each in (profile, worth))
    assert lm.fingerprint == alone.fingerprint
    assert lm.head_orders == by_worth.head_orders
    for layer, order in enumerate(lm.head_orders):
        dense = rows[layer][list(order)] == 14
        assert dense[:2].sum() == dense[2:].sum() == 1  # one on each device
        kernel, whole = (x.decoder.layers[layer].attention.qkv.kernel[...] for x in (lm, alone))
        np.testing.assert_array_equal(kernel, whole[:, list(order)])
