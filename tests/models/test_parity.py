"""The logits of transformers: every family and RoPE type, prefill and step by step; and trained GGUF files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tca_jax
from tca_jax.engine.prompts import encode_prompts
from tca_jax.lab.models import find
from tca_jax.models.config import ModelConfig, read_config
from tca_jax.models.decoder import Decoder
from tca_jax.models.params import load_checkpoint, save_decoder

torch = pytest.importorskip("torch", reason="parity is measured against the torch models of transformers")

import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: E402

TOLERANCE = 2e-4
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
LENGTHS, PADDED, STEPS = (29, 7, 37), 40, 4  # around the 32 positions that dynamic RoPE grows from


def reference_model(entries, seed=0):
    """A torch model with every parameter drawn large enough that each one shows in the logits."""
    config = AutoConfig.for_model(**entries)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "embed" in name else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    return model


def reference_logits(model, tokens, length):
    """Logits of one row: its prompt of `length` tokens at once, the others step by step: `[tokens, V]`."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config)  # it remembers the longest row that it saw
    cache = DynamicCache(config=model.config)  # the fourth argument of all models, by a name that changed in 5.24
    pieces = [tokens[:length], *tokens[length:, None]]
    with torch.no_grad():
        logits = [model(torch.tensor(piece[None]), None, None, cache, use_cache=True).logits[0] for piece in pieces]
    return torch.cat(logits).numpy()


def attention_of(positions, valid):
    """Exact attention over caches `(k, v)` of `[B, S, H_kv, d]`, given `positions [B, L]` and `valid [B, L]`."""

    def attention(layer, q, k, v, state):
        rows, size = jnp.arange(len(q))[:, None], state[0].shape[1]
        slots = jnp.where(valid, positions, size)  # padding is dropped
        keys = state[0].at[rows, slots].set(k, mode="drop")
        values = state[1].at[rows, slots].set(v, mode="drop")
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        exact = {"precision": jax.lax.Precision.HIGHEST}
        scores = jnp.einsum("blhgd,bshd->bhgls", grouped, keys, **exact) / q.shape[-1] ** 0.5
        visible = jnp.arange(size) <= positions[:, :, None]
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf))
        return jnp.einsum("bhgls,bshd->blhgd", weights, values, **exact).reshape(q.shape), (keys, values)

    return attention


def check_logits(decoder, model, tolerance=TOLERANCE):
    """Of a ragged batch that is right-padded with another token, prefill and step by step."""
    graphdef, weights = nnx.split(decoder)
    config, lengths = decoder.config, np.asarray(LENGTHS, np.int32)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (len(LENGTHS), PADDED + STEPS), np.int32)

    @jax.jit
    def forward(weights, tokens, positions, valid, states):
        decoder = nnx.merge(graphdef, weights)
        hidden, states = decoder(tokens, positions, attention_of(positions, valid), states)
        return decoder.logits(hidden), states

    cache = jnp.zeros((len(tokens), PADDED + STEPS, config.num_kv_heads, config.head_dim), decoder.dtype)
    place = jnp.arange(PADDED)[None, :]
    valid = place < lengths[:, None]
    positions = jnp.minimum(place, lengths[:, None] - 1)
    prompt = jnp.where(valid, tokens[:, :PADDED], 5)
    logits, states = forward(weights, prompt, positions, valid, ((cache, cache),) * config.num_layers)
    rows = [[np.asarray(row[:length])] for row, length in zip(logits, lengths, strict=True)]
    for step in range(STEPS):
        positions = jnp.asarray(lengths[:, None] + step)
        token = jnp.asarray(np.take_along_axis(tokens, np.asarray(positions), axis=1))
        logits, states = forward(weights, token, positions, jnp.ones_like(token, bool), states)
        for row, new in zip(rows, np.asarray(logits), strict=True):
            row.append(new)
    for row, row_tokens, length in zip(rows, tokens, LENGTHS, strict=True):
        expected = reference_logits(model, row_tokens[: length + STEPS], length)
        np.testing.assert_allclose(np.concatenate(row), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("family", "rope_type", "options"),
    [
        *(("llama", kind, {}) for kind in ROPE_TYPES),
        ("llama", "default", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", "default", {"head_dim": 6, "num_key_value_heads": None}),
        ("llama", "default", {"num_key_value_heads": 1, "rms_norm_eps": 0.1}),
        ("qwen2", "dynamic", {}),
        ("qwen2", "default", {"tie_word_embeddings": False, "num_key_value_heads": 4, "torch_dtype": "bfloat16"}),
        ("qwen3", "yarn", {}),
        ("qwen3", "default", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_logits_equal_transformers(family, rope_type, options, config_entries, tmp_path):
    entries = config_entries(family, rope_type, **options)
    dtype = entries["torch_dtype"]
    reference_model(entries).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    config = read_config(tmp_path)  # as transformers 5 wrote it
    assert config == ModelConfig.from_hf(entries)  # as 4.x wrote it
    assert config.dtype_name == dtype
    check_logits(load_checkpoint(tmp_path, config, jnp.float32).decoder, model)


@pytest.mark.parametrize(("family", "rope_type"), [("llama", "llama3"), ("qwen3", "yarn")])
def test_transformers_loads_what_we_save(family, rope_type, config_entries, tmp_path):
    config = ModelConfig.from_hf(config_entries(family, rope_type))
    decoder = Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(3))
    save_decoder(tmp_path, decoder, jnp.float32, {"eos_token_id": 11})
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert model.config.eos_token_id == 11
    assert ModelConfig.from_hf(model.config) == config
    check_logits(decoder, model.eval())


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside other processes two are ten times as slow
    yield
    torch.set_num_threads(threads)


PROMPTS = (
    *("The capital of France is", "def fibonacci(n):\n    ", "1, 1, 2, 3, 5, 8, 13,", "Ein naïve 値段 e=mc²"),
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "Water boils at 100 degrees Celsius because " + "of the pressure of the air. " * 6 + "In short,",
    *(
        [{"role": "user", "content": text}]
        for text in ("Hi!", "Name three primary colours.", "Reverse 'abc' in Python.")
    ),
    [{"role": "user", "content": "Summarize: " + "the river rose, the bridge fell, and the village waited. " * 4}],
)


@pytest.mark.integration
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["smollm2", "qwen-0.5b"])
def test_gguf_files_answer_as_transformers(name):
    if (path := find(name)) is None:
        pytest.skip(f"{name}.gguf is missing: python -m tca_jax.lab.models fetch {name}")
    lm = tca_jax.load(path, dtype=jnp.float32)
    options = {"gguf_file": path.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # before transformers 5.24 it always dequantized
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    check_logits(lm.decoder, model, tolerance=2e-3)
    prompts = encode_prompts(lm, list(PROMPTS))
    answers = tca_jax.generate(lm, list(PROMPTS), max_new_tokens=64, stop_token_ids=()).tokens
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(axis=-1).values - logits[range(64), list(answer)]
        assert behind.max() < 1e-3  # a tie between two tokens at most
        assert (behind > 0).sum() <= 1
