"""What public functions refuse before any work: each wrong argument or file once, by its name, with what is allowed."""

import dataclasses
import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_prompt, tiny_lm, with_candidates, write_checkpoint
from transformers import AutoTokenizer

import tca_jax
from tca_jax import Context, Profile, Sampling, TCAConfig, methods
from tca_jax.engine.contexts import encode_appended
from tca_jax.engine.placement import parse_mesh
from tca_jax.engine.prompts import encode_prompt, encode_prompts
from tca_jax.engine.score import score_answers
from tca_jax.errors import UserTypeError
from tca_jax.loading import open_checkpoint
from tca_jax.methods.registry import with_known
from tca_jax.methods.written import joined, parse_parts

pytestmark = pytest.mark.usefixtures("no_type_checks")
CONFIG = TCAConfig(block_size=8, window=16, num_candidates=4)
Q, K = np.zeros((1, 32, 2, 8), np.float32), np.zeros((1, 32, 1, 8), np.float32)
ROWS, LENGTHS = np.array([0]), np.array([32])
USER = {"role": "user", "content": "hello"}
HALF = "random:share=0.5"
CALLS = tca_jax.generate, tca_jax.stream, tca_jax.calibrate, functools.partial(score_answers, answers=[["x"]])
TCA = functools.partial(methods.get, "tca", config=CONFIG)


@functools.cache
def lm(**fields):
    return tiny_lm(**fields)


_FOLDER = tempfile.TemporaryDirectory(prefix="tca_jax-tests-")


@functools.cache
def folder():
    """A checkpoint."""
    return write_checkpoint(Path(_FOLDER.name) / "tiny", eos_token_id=[95])


@functools.cache
def written(template=None):
    """A model with a tokenizer, and perhaps a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder())
    tokenizer.chat_template = template
    return lm(tokenizer=tokenizer)


@functools.cache
def sparse(candidates=((0, 6), (14, 3)), **fields):
    return with_candidates(lm(**fields), candidates)


@functools.cache
def context(length=20, rows=1, **fields):
    return tca_jax.prefill(sparse() if not fields else lm(**fields), [random_prompt(i, length) for i in range(rows)])


def attend(q=Q, k=K, v=K, rows=ROWS, lengths=LENGTHS, config=CONFIG, **options):
    return tca_jax.attend(q, k, v, rows, lengths, config, **options)


def select(q=Q[:, -1], k=K, config=CONFIG):
    return tca_jax.select(q, k, ROWS, LENGTHS, config)


def tokens(tokens=((1, 2, 3, 4),), lengths=(4,), **options):
    arrays = {"tokens": np.array(tokens), "lengths": np.array(lengths), "key": jax.random.key(0)}
    return tca_jax.generate_tokens(**{"lm": lm(), **arrays, "max_new_tokens": 2, **options})


def generate(prompt="abc", model=None, **options):
    return tca_jax.generate(model or written(), prompt, **options)


def go_on(model, **fields):
    return generate([1], model, context=context(**fields))


def encode(prompts, template="{{ messages[0]['content'] }}"):
    return encode_prompts(written(template), prompts, "texts")


def unread():
    """A model whose tokenizer makes nothing of any text."""
    return dataclasses.replace(lm(), tokenizer=lambda text, **_: {"input_ids": []})


class PanicException(BaseException):
    """What Rust's panics are in Python: no Exception."""


def panic(*args, **options):
    raise PanicException("index out of bounds")


WRONG_TYPES = [
    (lambda: attend(q=Q.astype(np.int32)), "q has dtype int32: must be floating point"),
    (lambda: attend(v=K.astype(jnp.bfloat16)), "dtypes differ: q float32, k float32, v bfloat16"),
    (lambda: attend(k=None), "k is of type NoneType: must be a JAX or NumPy array"),
    (lambda: attend(config={}), "config is of type dict: must be a TCAConfig"),
    (lambda: select(q=[[0.0]]), "q_last is of type list: must be a JAX or NumPy array"),
    *((functools.partial(f, None, "x"), "lm is of type NoneType: must be an LM, from tca_jax.load") for f in CALLS),
    (lambda: context().on("x"), "lm is of type str: must be an LM, from tca_jax.load"),
    (lambda: score_answers(lm(), [1, 2], [["b"], ["c"]]), "prompts is a single one: must be a list of texts, chats or"),
    (
        lambda: score_answers(lm(), [[1]], [[[{"role": "user"}]]]),
        r"answers\[0\]\[0\] is a chat: must be a string or",
    ),
    (lambda: score_answers(lm(), ["q: "], ["yes"]), r"answers\[0\] is a single one: must be a list of texts, chats or"),
    (lambda: tca_jax.diagnostics.dropped_mass(Q, K, ROWS, LENGTHS, None), "config is of type NoneType: must be a TCAC"),
    (lambda: tokens(key=0), "key is of type int: must be a single key of jax.random.key or jax.random.PRNGKey: "),
    (lambda: tokens(stop_tokens=5), "stop_tokens = 5: must be a sequence of token ids, or None"),
    (lambda: tokens(sampling=0.7), "sampling is of type float: must be a Sampling"),
    (lambda: tokens([[1.0] * 4]), "tokens has dtype float32: must be integers"),
    (lambda: tca_jax.load(b"recall-tiny"), "name_or_path is of type bytes: must be a string or a path"),
    (lambda: tca_jax.load("recall-tiny", profile=5), "profile is of type int: must be a Profile, a folder"),
    (lambda: Profile.load(None), "directory is of type NoneType"),
    (lambda: generate(context="context"), "context is of type str: must be a Context, from tca_jax.prefill"),
    (lambda: generate(stop=5), "stop = 5: must be a string or a sequence of strings"),
    (lambda: generate(stop_token_ids=5), "stop_token_ids = 5: must be a sequence of token ids, or None"),
    (lambda: generate(temprature=1.0), r"unknown option 'temprature': must be one of \[.*\(nearest: temperature"),
    (lambda: generate(config={"seed": 1}), "config is of type dict: must be a GenerationConfig, or None"),
    (lambda: generate(temperature=1.0, top_p=[0.5]), r"top_p = \[0.5\]: must be a number, or None"),
    (lambda: encode(None), r"texts is None: must be text, a chat \(a list of messages\), token ids, or a list"),
    (lambda: encode(USER), "texts is of type dict: must be"),
    (lambda: encode(["x", None]), r"texts\[1\] is None: must be"),
    (lambda: encode([[1, "x"]]), r"texts\[0\] is of type list: .* holds str"),
    (lambda: encode([1, True]), r"texts\[0\] is of type list: .* holds bool"),
    (lambda: encode(np.array([1.0])), r"texts\[0\] is an array \[1\] of float64"),
    (lambda: encode([USER | {"role": 3}]), r"texts\[0\]\[0\]\['role'\] = 3: must be a string"),
    (lambda: encode([USER | {"content": 3}]), r"\['content'\] is of type int: must be a string, or a list of parts"),
    (lambda: lm().with_method(methods.get("full"), sinks=3), r"options \['sinks'\] go with a method's name"),
    (lambda: lm().with_profile("shipped"), "profile is of type str: must be a Profile, as tca_jax.Profile.load"),
]
WRONG_VALUES = [
    (lambda: tca_jax.load("recall-tiny", "shipped", kept=1.5), r"kept = 1\.5: must be in \(0, 1\]"),
    (lambda: tca_jax.load("recall-tiny", kept=0.5), r"kept = 0\.5: goes with a profile of predicted worth"),
    (
        lambda: tca_jax.load("recall-tiny", Profile.uniform(CONFIG, 6, 4, 0), kept=0.5),
        r"kept = 0\.5: goes with a profile of predicted worth, not with one of the paper's rule",
    ),
    # arrays
    (lambda: attend(rows=np.array([5])), r"candidates = \[5\]: must lie in \[0, 4\]"),
    (lambda: attend(rows=np.array([0, 0])), r"candidates has shape \(2,\): must be \[Hkv = 1\]"),
    (lambda: attend(lengths=np.array([33])), r"lengths = \[33\]: must lie in \[1, 32\]"),
    (lambda: attend(lengths=np.array([0])), r"lengths = \[0\]: must lie in \[1, 32\]"),
    (lambda: attend(k=np.zeros((1, 32, 3, 8), np.float32)), "v has shape"),
    (lambda: attend(k=K.repeat(3, 2), v=K.repeat(3, 2), rows=np.zeros(3, int)), "2 query heads and 3 KV heads"),
    (lambda: attend(backend="cuda"), r"backend = 'cuda': must be one of \['auto', "),
    (lambda: attend(Q[:0], K[:0], K[:0], lengths=LENGTHS[:0]), "q, k, v have 0 rows: at least one is needed"),
    (lambda: select(q=Q[:, :0]), r"q_last has shape \(1, 0, 2, 8\): must hold at least one query"),
    (lambda: tca_jax.diagnostics.dropped_mass(Q, K, np.array([5]), LENGTHS, CONFIG), r"candidates = \[5\]"),
    (lambda: tca_jax.candidate_budgets(CONFIG, -1), "num_blocks = -1: must be an integer of at least 0"),
    (lambda: tokens(lengths=[99]), r"lengths = \[99\]: must lie in \[1, 4\]"),
    (lambda: tokens(np.ones((1, 4096), int), [4095]), r"lengths = \[4095\]: must lie in \[1, 4094\]"),
    (lambda: tokens(np.ones((1, 0), int), [1]), "an empty prompt; at least one token is needed"),
    (lambda: tokens(np.ones((0, 4), int), ROWS[:0]), r"\(0, 4\): no prompt or an empty prompt; at least one token is"),
    (lambda: tokens(stop_tokens=[10**12]), r"stop_tokens holds token id 1000000000000: ids of tiny lie in \[0, 97\)"),
    (lambda: tokens(np.ones((2, 8), int), [8]), r"lengths has shape \(1,\): must be \[B = 2\]"),
    (lambda: tokens([[1, 2, 97, 300]], [3]), r"tokens\[0, 2\] is token id 97: ids of tiny lie in \[0, 97\)"),
    (lambda: tokens(max_new_tokens=4096), "max_new_tokens = 4096: must leave room for a prompt in the 4096 positions"),
    # hyperparameters
    *(
        (functools.partial(TCAConfig, **{field: value}), rf"TCAConfig.{field} = .*: must {allowed}")
        for field, value, allowed in (
            ("block_size", 96, "be a power of two"),
            ("block_size", True, "be an integer"),
            ("window", 4000, "be a positive multiple of block_size = 128"),
            ("window", 2**31, "be an integer from 1 to 2147483647"),
            ("num_candidates", 1, "be an integer from 2 to 1024"),
            ("num_candidates", 1025, "be an integer from 2 to 1024"),
            ("sigma", 0.0, r"lie in \(0, 1e"),
            ("sigma", 10**400, "be a finite number"),
            ("alpha", 1.5, r"lie in \[0, 1\]"),
            ("tau", 0.0, r"lie in \(0, 1\]"),
            ("seed", 2**32, r"lie in \[0, 2\^32\)"),
            ("reserve", -1, "be an integer from 0 to"),
            ("observation", 0, "be an integer from 1 to"),
            ("spread", 0, "be an integer from 1 to"),
            ("density", "best", r"be one of \["),
        )
    ),
    # methods
    (lambda: TCA(candidates=[[1, 5]]), r"candidates\[0\]\[1\] = 5: must lie in \[0, 4\]"),
    (lambda: TCA(candidates=[[1, 2]]).validate_for(1, 3), "has 1 layers of 2 KV heads: must be 1 of 3"),
    (lambda: TCA(candidates=[[1, 2], [3]]).validate_for(2, 2), "candidates: .*inhomogeneous"),
    (lambda: methods.get("fulll"), r"method 'fulll' is not registered: must be one of \[.*\(nearest: full"),
    (lambda: methods.get("full", sinks=3), r"options of method 'full': .* 'sinks'; it takes \(\)"),
    (lambda: methods.get("full+full+full"), "at most two methods can be joined"),
    (lambda: methods.get("full+streaming", streaming=3), "streaming = 3: options of a part of .* must be a mapping"),
    (lambda: with_known("full+random", {}, {"window": 8}), r"has no part \['window'\]"),
    (lambda: methods.register("full", methods.get), "name = 'full' is registered already; pass replace=True"),
    (lambda: methods.register("a+b", methods.get), r"name = 'a\+b': must be a non-empty string without '\+'"),
    (
        lambda: parse_parts("nosuch", "--method", {"mine": ()}),
        r"^--method nosuch: 'nosuch' is not registered: .*'mine'",
    ),
    (lambda: parse_parts("random:share", "--method"), r"^--method random:share: 'share' must be written as option=va"),
    (lambda: parse_parts("random:bytes=1", "--method"), r"random has no option 'bytes': must be one of \[.*'share'"),
    (lambda: parse_parts("mine:a=1", "--method", {"mine": ()}), r"mine has no option 'a': must be one of \[\]$"),
    (lambda: joined(parse_parts(f"{HALF}+random", "-m"), "-m x"), "^-m x: joins a method with itself under other"),
    # models and files
    (lambda: tca_jax.load("x" * 3000), "name_or_path has 3,000 characters: must have at most 1,024"),
    (lambda: tca_jax.load("recall-tiny", revision="main"), "revision = 'main' goes with a model of the Hub"),
    (lambda: tca_jax.load("qwen9-7b"), r"'qwen9-7b': no such folder, Hub id \(owner/name\) or alias.*qwen2.5-7b"),
    (lambda: tca_jax.load("llama-3.1-8b"), "Nearest aliases: llama3.1-8b, llama3.1-70b, .* All: recall-tiny"),
    (lambda: tca_jax.load(folder() / "model.safetensors"), "model.safetensors' is a file: pass its folder"),
    (lambda: open_checkpoint(folder()).load(dtype="int8"), "dtype = int8: must be float32, bfloat16 or float16"),
    (lambda: tiny_lm(kv="int8"), r"kv = 'int8': must be one of \['fp8'\], or None"),
    (lambda: tiny_lm(attention="fp8"), "attention = 'fp8' (needs an NVIDIA GPU of compute capability 9|takes heads)"),
    (lambda: tca_jax.load("recall-tiny", attention="int8"), r"attention = 'int8': must be one of \['fp8'\], or None"),
    (lambda: Profile.uniform(CONFIG, 2, 2, 0).save(""), "directory = '': must name a folder"),
    (lambda: parse_mesh("four", "--mesh"), "--mesh four: must be devices on 'data' x devices on 'model', such as 1x4"),
    (lambda: parse_mesh("1x999", "--mesh"), "--mesh 1x999: needs 999 devices, there"),
    # options of an answer
    (lambda: generate(seed=2**32), r"seed = 4294967296: must lie in \[0, 2\^32\)"),
    (lambda: generate(seed=1.0), "seed = 1.0: must be an integer"),
    (lambda: generate(stop=""), r"stop = \[''\]: must be non-empty strings"),
    (lambda: generate(logprobs=0), "logprobs = 0: must be True, False, or a positive number of tokens"),
    (lambda: generate(logprobs=98), "logprobs = 98: .* from 1 to 97"),
    (lambda: generate(stop_token_ids=[True]), "stop_token_ids holds True"),
    (lambda: generate(stop_token_ids=[97]), r"stop_token_ids holds 97: must be token ids of tiny, in \[0, 97\)"),
    (lambda: generate(max_new_tokens=2.5), "max_new_tokens = 2.5: must be an integer of at least 1"),
    (lambda: generate(min_new_tokens=9, max_new_tokens=8), "min_new_tokens = 9: must be at most max_new_tokens = 8"),
    (lambda: generate(num_samples=0), "num_samples = 0: must be an integer of at least 1"),
    (lambda: generate(temperature=jnp.float32(-1)), "temperature = -1.0: must be a number of at least 0"),
    (lambda: Sampling(temperature=float("nan")), "temperature = nan"),
    (lambda: Sampling(temperature=10**400), "temperature = 10+: must be a number"),
    (lambda: Sampling(top_k=0), "top_k = 0: must be an integer of at least 1"),
    (lambda: Sampling(top_p=0.0), r"top_p = 0.0: must be in \(0, 1\]"),
    (lambda: Sampling(min_p=1.5), r"min_p = 1.5: must be in \[0, 1\]"),
    (lambda: Sampling(repetition_penalty=0.0), "repetition_penalty = 0.0: must be a positive number"),
    # prompts
    (lambda: generate("text", lm()), r"prompts\[0\]: tiny was loaded without a tokenizer; pass token ids"),
    (lambda: generate([1], lm(), stop="x"), "stop: tiny was loaded without a tokenizer; use stop_token_ids"),
    (lambda: generate([1], lm(), max_new_tokens=1).text, "out.text: .* without a tokenizer; use out.tokens"),
    (lambda: tca_jax.stream(lm(), [1, 2, 3]), "stream: tiny was loaded without a tokenizer; use generate"),
    (lambda: encode(np.ones((0, 4), int)), "texts is empty: at least one is needed"),
    (lambda: encode(["x", []]), r"texts\[1\] is empty: at least one token is needed"),
    (lambda: encode([97]), r"texts\[0\] holds token id 97: ids of tiny lie in \[0, 97\)"),
    (lambda: encode(np.array([2**64 - 1], np.uint64)), r"texts\[0\] holds token id 18446744073709551615"),
    (lambda: encode(["x", "\ud800"]), r"texts\[1\] is not valid UTF-8 text"),
    (lambda: encode([[USER, {"role": "user"}]]), r"texts\[0\]\[1\] has no \['content'\]"),
    (lambda: encode([USER], None), r"texts\[0\] is a chat, but tiny has no chat template"),
    (lambda: encode(["x", [USER]], "{{ raise_exception('no\n dogs') }}"), r"texts\[1\]: the chat template .* no dogs$"),
    (lambda: encode([USER], "{% if %}"), "the chat template of tiny does not take this chat: .*Expected an expr"),
    (lambda: encode_appended(unread(), " ", list), "prompt is empty: at least one token"),
    (
        lambda: encode_prompt(dataclasses.replace(lm(), tokenizer=panic), "hello"),
        "prompt: the tokenizer of tiny does not take this text: PanicException: index out of bounds",
    ),
    # lengths
    (lambda: generate([1] * 4000, max_new_tokens=97), r"\[0\] has 4000 tokens; .* 4097, and tiny has 4096 positions"),
    (lambda: tca_jax.prefill(lm(), [1] * 4097), r"prompts\[0\] has 4097 tokens, and tiny has 4096 positions"),
    (lambda: tca_jax.score(lm(), [[1]]), r"texts\[0\] has 1 tokens: must have from 2 to 4097"),
    (lambda: tca_jax.score(lm(), [[1] * 4098]), r"texts\[0\] has 4098 tokens: must have from 2 to 4097"),
    (lambda: tca_jax.score(lm(), [[1, 2]], top_logprobs=98), "top_logprobs = 98: must be an integer from 0 to 97"),
    (lambda: score_answers(lm(), [[1], [2]], [[[1]], [[]]]), r"answers\[1\]\[0\] is empty"),
    (
        lambda: score_answers(written(), ["q"], [[[{"role": "user", "content": "x"}]]]),
        r"answers\[0\]\[0\] is a chat: must",
    ),
    (lambda: score_answers(lm(), [[1], [2]], [[[1]], [[1], [2]]]), r"answers has \[1, 2\] entries: must have as many"),
    (lambda: score_answers(lm(), [[1] * 61], [[[1] * 4090]]), r"prompts\[0\] has 61 tokens; .* 4096 positions"),
    # contexts
    (
        lambda: score_answers(sparse(), [[1], [2]], [[[1]]] * 2, context=context(rows=2)),
        "context has 2 rows: must have one",
    ),
    (lambda: generate([[1]] * 3, sparse(), context=context(rows=2)), "prompts has 3 entries: must have 2, one for"),
    (
        lambda: generate([1] * 50, lm(), context=context(4000, eos_token_ids=()), max_new_tokens=47),
        r"prompts\[0\] has 50 tokens behind a context of 4000; with max_new_tokens = 47 that is 4097",
    ),
    (lambda: go_on(sparse(seed=1)), "context was made by model 'tiny', whose weights .* of 'tiny'"),
    (lambda: go_on(lm()), "made under method 'tca', and 'tiny' runs under 'full'"),
    (lambda: go_on(sparse(((0, 0),) * 2)), "method 'tca' with other options or budgets, and 'tiny' runs under"),
    (lambda: go_on(sparse(kv="fp8")), "holds float32 and the cache of 'tiny' float8_e4m3fn: .*without kv"),
    (lambda: go_on(lm(), kv="fp8"), "holds float8_e4m3fn and the cache of 'tiny' float32: .*with kv='fp8'"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [(call, UserTypeError, message) for call, message in WRONG_TYPES]
    + [(call, tca_jax.UserError, message) for call, message in WRONG_VALUES],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_cache_beyond_memory_is_refused():
    huge = dataclasses.replace(lm(), config=dataclasses.replace(lm().config, max_positions=2**31 - 1))
    with pytest.raises(ValueError, match=r"answers of up to 2000000000 tokens need [\d,.]+ GB of KV cache: the device"):
        tca_jax.generate(huge, [1, 2], max_new_tokens=2_000_000_000)


INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
NESTED = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


def write(file, text):
    """Damage: a file of this text."""
    return lambda path: (path / file).write_text(text)


def link(file):
    def damage(path):
        (path / file).unlink(missing_ok=True)
        (path / file).symlink_to("../../blobs/0123")  # as in the Hub's cache

    return damage


def index(text):
    def damage(path):
        (path / "model.safetensors").unlink()
        (path / INDEX).write_text(text)

    return damage


def entry(file, **entries):
    return lambda path: (path / file).write_text(json.dumps({**json.loads((path / file).read_text()), **entries}))


def make_folder(path):
    (path / GENERATION).unlink()
    (path / GENERATION).mkdir()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
UNLOADABLE = r"^the tokenizer in [^\n]* cannot be loaded: \w+: [^\n]*$"
DAMAGES = [
    (shutil.rmtree, r"no such folder, Hub id \(owner/name\) or alias"),
    (lambda path: (path / "config.json").unlink(), "holds neither config.json nor a GGUF file"),
    *((write(file, NESTED), rf"{file} is not valid JSON: ") for file in ("config.json", GENERATION)),
    (index(NESTED), rf"{INDEX} is not valid JSON: "),
    *(
        (index(json.dumps({"weight_map": {"model.norm.weight": name}})), rf"{INDEX} is corrupt: .*the name of a shard")
        for name in ("../model.safetensors", "/etc/hostname", "sub/model.safetensors", "model.bin", "", 3)
    ),
    *(
        (link(file), rf"{file} is a link, and the file it leads to is missing")
        for file in (GENERATION, "chat_template.jinja", "model.safetensors", "config.json")
    ),
    (make_folder, GENERATION),
    *((entry("tokenizer_config.json", model_max_length=value), UNLOADABLE) for value in ("4096", [1])),
    (lambda path: (path / "tokenizer.json").unlink(), UNLOADABLE),
    *(
        (write(file, POINTER), rf"{file} is a Git LFS pointer and not the file itself: run `git lfs pull`")
        for file in ("model.safetensors", "tokenizer.json")
    ),
    *(
        (entry(file, eos_token_id=eos), rf"{file}: eos_token_id = .*: must be a token id in \[0, 97\), or a list")
        for file, eos in ((GENERATION, "</s>"), (GENERATION, True), (GENERATION, [0, 97]), (GENERATION, [1, "2"]))
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_damaged_checkpoint_is_named(damage, message, tmp_path):
    shutil.copytree(folder(), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises((ValueError, OSError), match=message):
        tca_jax.load(tmp_path / "model")


def test_a_tokenizer_beyond_the_vocabulary_is_named(tmp_path):
    """JAX clamps indices: the model would read another token."""
    shutil.copytree(folder(), tmp_path / "model")
    model = json.loads((tmp_path / "model/tokenizer.json").read_text())["model"]
    entry("tokenizer.json", model={**model, "vocab": {**model["vocab"], "é": 97}})(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    assert encode_prompt(checkpoint, "hello")
    with pytest.raises(ValueError, match=r"prompt: the tokenizer of model makes of this text token id 97: ids of"):
        encode_prompt(checkpoint, "café")


@pytest.mark.parametrize("kind", [Profile, Context])
def test_missing_folders_and_files_are_told_apart(kind, tmp_path):
    name = kind.__name__.lower()
    (tmp_path / "file").write_text("")
    for place, error, message in (
        ("nosuch", FileNotFoundError, rf"{name} directory {re.escape(str(tmp_path))}/nosuch does not exist"),
        ("file", ValueError, f"file is a file, not a {name} directory"),
        ("", ValueError, f"holds no {name}"),
    ):
        with pytest.raises(error, match=message):
            kind.load(tmp_path / place)
