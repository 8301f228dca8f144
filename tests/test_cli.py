"""The command line in this process: help, results, JSON, one-line errors, progress."""

import dataclasses
import importlib.metadata
import json
import re
import shlex
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from commands import error, run
from tiny import TCA, write_checkpoint

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.cli.generate import describe
from tca_jax.cli.profiles import of_texts
from tca_jax.errors import UserTypeError
from tca_jax.loading import SHIPPED, shipped_profile

SCRIPT = Path(sys.executable).with_name("tca-jax")
SMALL = ["--window=16", "--block-size=8"]
COMMANDS = ["", "bench", "chat", "demo", "eval", "generate", "calibrate", "profile show"]


PAIR = '{"question": "q", "answer": "a", "text": 0}\n'
BAD_PAIRS = [
    (PAIR + "{", r"--probes bad0.jsonl, line 2 is no JSON: "),
    ("[1]", r"--probes bad1.jsonl, line 1: must be an object with \"question\", \"answer\""),
    (PAIR + '\n{"question": "q"}', r"--probes bad2.jsonl, line 3: must be an object with"),
    (PAIR.replace("text", "file"), r"--probes bad3.jsonl, line 1: must be an object with"),
    (PAIR.replace('"a"', '""'), r"--probes bad4.jsonl, line 1: answer = '': must be a string that is not empty"),
    (PAIR.replace('"q"', "7"), r"--probes bad5.jsonl, line 1: question = 7: must be a string that is not empty"),
    (PAIR.replace("0", "2"), r"--probes bad6.jsonl, line 1: text = 2: must be an integer in \[0, 1\]"),
    ('{"question": "q", "answer": "a"}', r"--probes bad7.jsonl, line 1: text = None: must be an integer in \[0, 1\]"),
    (PAIR, r"--probes bad8.jsonl holds no pair for text 1: every text needs one"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a model, texts good and bad, and profiles."""
    folder = tmp_path_factory.mktemp("work")
    write_checkpoint(folder / "model")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 6)
    (folder / "latin1.txt").write_bytes("déjà vu".encode("latin-1"))
    for i, (lines, _) in enumerate(BAD_PAIRS):
        (folder / f"bad{i}.jsonl").write_text(lines)
    Profile.uniform(TCA, 2, 2, 3).save(folder / "profile")
    Profile.uniform(TCA, 3, 2, 3).save(folder / "other")
    return folder


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_its_example_is_one_line_that_parses(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    example = re.search(rf"Example: (tca-jax {command}.*)", result.stdout).group(1)
    assert run(*shlex.split(example)[1:], "--help").exit_code == 0


def test_no_command_prints_the_help():
    assert run().stdout == run("--help").stdout


def test_version():
    assert run("--version").stdout == f"tca-jax {importlib.metadata.version('tca-jax')}\n"


def test_generate_prints_the_answer_and_on_standard_error_what_it_cost():
    options = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    expected = tca_jax.generate(tca_jax.load("model"), "hello", **options).text[0]
    result = run("generate", "model", "--prompt", "hello", *flags)
    assert (result.exit_code, result.stdout) == (0, expected + "\n")
    first, second, third = result.stderr.splitlines()
    assert re.fullmatch(r"5 tokens read, 12 new; first token after [\d.]+ s, then [\d.]+ ms per token.*", first)
    assert re.fullmatch(r"KV cache [\d.]+ MB, [\d.]+ MB under full attention; it holds 100.0% of the tokens", second)
    assert third == "while reading, 100.0% of all pairs of a token and one before it were attended to"


def test_the_cost_of_a_batch_counts_every_row():
    stats = tca_jax.Stats([1000, 5], [1, 1], 0.0, 0.5, 0.0, 2_000_000, 4_000_000, 0.25, 0.125)
    assert describe(stats).splitlines() == [
        "1,000 + 5 tokens read, 1 + 1 new; first token after 0.50 s",
        "KV cache 2.00 MB, 4.00 MB under full attention; it holds 25.0% of the tokens",
        "while reading, 12.5% of all pairs of a token and one before it were attended to",
    ]


def test_several_prompts_are_one_batch_with_a_heading_each(work):
    text = Path("text.txt").read_text()
    prompts = ["--prompt=hello", "--prompt-file=text.txt", "--prompt", text]
    result = run("generate", "model", *prompts, "--max-new-tokens=4")
    assert result.exit_code == 0, result.output
    lm = tca_jax.load("model")
    hello, long = tca_jax.generate(lm, ["hello", text], max_new_tokens=4).text
    headings = ["[1] hello", f"[2] {text[:59]}…", "[3] text.txt"]
    expected = [line for pair in zip(headings, [hello, long, long], strict=True) for line in pair]
    assert result.stdout == "".join(f"{line}\n" for line in expected)


def test_a_system_message_comes_before_the_users_and_implies_a_chat():
    answers = []
    for args in (["--prompt=be brief, hello", "--chat"], ["--prompt=hello", "--system=be brief, "]):
        answers.append(json.loads(run("generate", "model", *args, "--max-new-tokens=1", "--json").stdout))
    assert answers[0]["stats"]["prompt_tokens"] == answers[1]["stats"]["prompt_tokens"] == [15]
    assert answers[0]["answers"] == answers[1]["answers"]


def test_samples_least_tokens_and_log_probabilities_reach_the_answers():
    options = ["--prompt=hi", "--max-new-tokens=6", "--min-new-tokens=6", "--num-samples=2", "--temperature=1"]
    record = json.loads(run("generate", "model", *options, "--top-logprobs=2", "--json").stdout)
    lm = tca_jax.load("model")
    out = tca_jax.generate(lm, ["hi"], max_new_tokens=6, min_new_tokens=6, num_samples=2, temperature=1, logprobs=2)
    assert [(answer["prompt"], answer["sample"]) for answer in record["answers"]] == [(0, 0), (0, 1)]
    assert [answer["tokens"] for answer in record["answers"]] == out.tokens
    np.testing.assert_allclose([answer["logprobs"] for answer in record["answers"]], out.logprobs)
    likeliest = record["answers"][1]["top_logprobs"][0]
    assert [place["id"] for place in likeliest] == [token for token, _ in out.top_logprobs[1][0]]
    assert likeliest[0]["text"] == lm.tokenizer.decode([likeliest[0]["id"]])
    np.testing.assert_allclose([place["logprob"] for place in likeliest], [x for _, x in out.top_logprobs[1][0]])
    plain = json.loads(run("generate", "model", "--prompt=hi", "--max-new-tokens=2", "--logprobs", "--json").stdout)
    assert "top_logprobs" not in plain["answers"][0]
    assert len(plain["answers"][0]["logprobs"]) == 2
    headings = run("generate", "model", *options).stdout.splitlines()
    assert headings[0] == "[1, answer 1 of 2] hi"
    assert "[1, answer 2 of 2] hi" in headings


def test_generate_reads_a_file_or_stdin_and_applies_the_chat_template():
    prompts = (["--prompt-file=text.txt"], ["--prompt-file=-"], ["--prompt", Path("text.txt").read_text(), "--chat"])
    answers = []
    for prompt in prompts:  # the tiny model's template is the bare text
        result = run("generate", "model", *prompt, "--max-new-tokens=1", "--json", stdin=Path("text.txt").read_text())
        answers.append(json.loads(result.stdout))
    assert [answer["stats"]["prompt_tokens"] for answer in answers] == [[270]] * 3
    assert answers[0]["answers"] == answers[1]["answers"] == answers[2]["answers"]


def test_generate_json_is_one_object_with_the_statistics():
    result = run("generate", "model", "--prompt-file=text.txt", "--profile=profile", "--max-new-tokens=5", "--json")
    record = json.loads(result.stdout)
    assert result.stderr == ""
    out = tca_jax.generate(tca_jax.load("model", profile="profile"), Path("text.txt").read_text(), max_new_tokens=5)
    assert (record["model"], record["profile"]) == ("model", "profile")
    answer = {"text": out.text[0], "tokens": out.tokens[0], "finish_reason": "length"}
    assert record["answers"] == [{"prompt": 0, "sample": 0, **answer}]
    stats = record["stats"]
    assert stats["prompt_tokens"] == [270]
    assert stats["new_tokens"] == [5]
    assert stats["kv_cache_bytes"] == out.stats.kv_cache_bytes < stats["full_kv_cache_bytes"]
    assert stats["kept_share"] == out.stats.kept_share < 1
    assert stats["attended_share"] == out.stats.attended_share < 1
    assert stats["prefill_seconds"] > 0


@pytest.mark.filterwarnings("ignore:no probe is informative")
def test_calibrate_saves_the_profile_of_the_python_call_and_prints_it(tmp_path):
    config = [*SMALL, "--tau=0.4"]
    result = run("calibrate", "model", "--text=text.txt", "--text=text.txt", "--out", tmp_path / "new", *config)
    assert result.exit_code == 0, result.output
    text = Path("text.txt").read_text()
    settings = tca_jax.TCAConfig(block_size=8, window=16, tau=0.4)
    expected = tca_jax.calibrate(tca_jax.load("model"), [text, text], settings)
    assert Profile.load(tmp_path / "new") == expected
    assert "at 270 tokens" in result.stdout
    assert f"{expected.kept_share(270).mean():.1%}" in result.stdout

    Path("pairs.jsonl").write_text(
        '{"question": "What?", "answer": "The dog.", "text": 1}\n\n'
        '{"question": "Who?", "answer": "A fox.", "text": 0}\n'
    )
    options = ["--probes=pairs.jsonl", "--kept=0.9", *config]
    result = run("calibrate", "model", "--text=text.txt", "--text=text.txt", "--out", tmp_path / "pairs", *options)
    assert result.exit_code == 0, result.output
    pairs = [[("Who?", "A fox.")], [("What?", "The dog.")]]
    probed = tca_jax.calibrate(tca_jax.load("model"), [text, text], settings, probes=pairs, kept=0.9)
    assert Profile.load(tmp_path / "pairs") == probed

    options = ["--max-tokens=200", "--read-tolerance=0.2", "--keep-tolerance=0.5", "--probes=copy", "--attended=0.9"]
    cut = run("calibrate", "model", "--text=text.txt", "--out", tmp_path / "cut", *config, *options, "--json")
    record = json.loads(cut.stdout)
    assert record["tokens"] == record["sources"][0]["tokens"] == 200
    settings = [record["config"][name] for name in ("tau", "read_tolerance", "keep_tolerance", "criterion")]
    assert settings == [0.4, 0.2, 0.5, "worth"]
    assert (record["probes"]["kept"], record["probes"]["attended"]) == (None, 0.9)


@pytest.mark.parametrize("criterion", [None, "retained_mass"])
def test_paper_calibrates_with_the_papers_settings(tmp_path, criterion):
    options = [] if criterion is None else [f"--criterion={criterion}"]
    result = run("calibrate", "model", "--text=text.txt", "--out", tmp_path, "--paper", *SMALL, *options, "--json")
    assert result.exit_code == 0, result.output
    config = tca_jax.TCAConfig.paper(block_size=8, window=16)
    assert Profile.load(tmp_path).config == dataclasses.replace(config, criterion=criterion or "column_mean")
    record = json.loads(result.stdout)
    assert (record["probes"], record["losses"]) == (None, {})
    assert record["reading_worth"] == record["keeping_worth"] == [[None, None], [None, None]]


def test_profile_show_prints_a_table():
    result = run("profile", "show", "profile", "--tokens=1000")
    assert result.exit_code == 0, result.output
    share = Profile.load("profile").kept_share(1000)[0, 0]
    assert result.stdout.count(f"{share:.0%}/3") == 4
    assert "Candidates: 0 is the sparsest, 14 is dense and keeps every token" in result.stdout


def test_profile_show_json_is_one_object_and_writes_no_file():
    before = sorted(Path().iterdir())
    result = run("profile", "show", "profile", "--tokens=1000", "--json")
    record = json.loads(result.stdout)
    profile = Profile.load("profile")
    assert record["candidates"] == profile.candidates.tolist()
    assert record["dense_candidate"] == 14
    assert record["kept_share"] == profile.kept_share(1000).tolist()
    assert sorted(Path().iterdir()) == before


def test_the_table_numbers_candidates_as_json_does(tmp_path):
    cache, prefill = [[2, 14], [13, 1]], [[0, 14], [7, 1]]
    profile = two_rows(candidates=np.array(cache), prefill_candidates=np.array(prefill))
    profile.save(tmp_path)
    record = json.loads(run("profile", "show", tmp_path, "--json").stdout)
    assert (record["candidates"], record["prefill_candidates"]) == (cache, prefill)
    rows = [line.split() for line in run("profile", "show", tmp_path).stdout.splitlines()]
    shown = [[int(cell.partition("/")[2]) for cell in row[1:3]] for row in rows if row and row[0] in ("0", "1")]
    assert shown == [*cache, *prefill]


def two_rows(**fields) -> Profile:
    return dataclasses.replace(Profile.uniform(TCA, 2, 2, 0), model_name="two", **fields)


PROBES = {"counted": {"facts": 200, "copy": 1}, "kept": None, "attended": None}


@pytest.mark.parametrize(
    ("probes", "lines"),
    [
        (None, ["Probes: none"]),
        (
            PROBES,
            [
                "Probes, facts: 200 answers that full attention knows and row 0 loses",
                "Probes, copy: 1 answer that full attention knows and row 0 loses",
            ],
        ),
        (
            {"counted": {"pairs": 0}, "kept": 0.3, "attended": 0.25},
            [
                "Probes, pairs: say nothing of this model: of too few answers row 0 loses what full attention knows",
                "Bounds: kept at most 30.0%, attended at most 25.0%",
            ],
        ),
    ],
)
def test_profile_show_tells_both_shares_and_the_probes(tmp_path, probes, lines):
    profile = two_rows(candidates=np.full((2, 2), 14), prefill_candidates=np.zeros((2, 2), int), probes=probes)
    profile.save(tmp_path)
    shown = run("profile", "show", tmp_path, "--tokens=1000").stdout.splitlines()
    read = profile.prefill_kept_share(1000).mean()
    assert read < 0.3
    assert f"Mean kept share: 100.0% in the cache, {read:.1%} while a prompt is read" in shown
    assert set(lines) <= set(shown)
    record = json.loads(run("profile", "show", tmp_path, "--tokens=1000", "--json").stdout)
    assert (record["mean_kept_share"], record["mean_prefill_kept_share"]) == (1.0, read)
    assert record["prefill_kept_share"] == profile.prefill_kept_share(1000).tolist()
    assert record["probes"] == probes


def test_profile_show_tells_readings_losses_and_what_heads_are_worth(tmp_path):
    profile = two_rows(
        candidates=np.array([[14, 0], [2, 0]]),
        prefill_candidates=np.zeros((2, 2), int),
        readings=np.array([["blocks", "sparse"], ["sparse", "dense"]]),
        reading_worth=np.array([[0.5, 0.0], [0.0123, np.nan]]),
        keeping_worth=np.full((2, 2), np.nan),
        losses={
            "inside": {"full": 0.5, "row0": 0.75, "chosen": 0.5625},
            "following": {"full": 0.5, "row0": 0.5, "chosen": 0.5},
        },
    )
    profile.save(tmp_path)
    result = run("profile", "show", tmp_path, "--tokens=1000")
    assert result.exit_code == 0, result.output
    shown = result.stdout.splitlines()
    read = [[f"{share:.0%}" for share in of_layer] for of_layer in profile.prefill_kept_share(1000)]
    rows = [line.split() for line in shown]
    assert ["0", f"{read[0][0]}/b", f"{read[0][1]}/0"] in [row[:3] for row in rows]
    assert ["1", f"{read[1][0]}/0", "100%/d"] in [row[:3] for row in rows]
    assert {
        "Heads that read blocks: 1 of 4 (layer 0 head 0)",
        "Heads that read dense: 1 of 4 (layer 1 head 1)",
        "Loss inside the texts: 0.5000 full attention, 0.7500 row 0, 0.5625 chosen, 75% of the gap won back",
        "Loss of what follows a text: 0.5000 full attention, 0.5000 row 0, 0.5000 chosen",
        "Highest worth of reading blocks, in nats: 0.5 (layer 0 head 0), 0.012 (layer 1 head 0)",
    } <= set(shown)
    assert not any("keeping everything" in line for line in shown)
    record = json.loads(run("profile", "show", tmp_path, "--json").stdout)
    assert record["readings"] == profile.readings.tolist()
    assert record["reading_worth"][0] == [0.5, 0.0]
    assert record["reading_worth"][1][1] is None
    assert record["losses"]["inside"] == {**profile.losses["inside"], "won_back": 0.75}
    assert record["losses"]["following"]["won_back"] is None


@pytest.mark.parametrize("name", ["shipped", *SHIPPED])
def test_profile_show_knows_the_shipped_profile_unless_a_folder_has_its_name(name, work, tmp_path, monkeypatch):
    shipped = Profile.load(shipped_profile())
    assert json.loads(run("profile", "show", name, "--json").stdout)["candidates"] == shipped.candidates.tolist()
    monkeypatch.chdir(tmp_path)
    Profile.load(work / "profile").save(name)
    assert json.loads(run("profile", "show", name, "--json").stdout)["candidates"] == [[3, 3], [3, 3]]


def test_a_profile_of_many_heads_fits_80_columns_uncut(tmp_path):
    Profile.uniform(TCA, 32, 10, TCA.num_candidates - 1).save(tmp_path)
    for tokens in (16, 1000):  # everything is kept: the widest cells
        lines = run("profile", "show", tmp_path, f"--tokens={tokens}").stdout.splitlines()
        tables = [line for line in lines if line.lstrip().startswith(("layer", "0 ", "31 "))]
        assert max(map(len, tables)) <= 80
        assert "head 7" in tables[0]
        assert "head 9" in tables[3]
        assert not any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("generate nosuch --prompt x", r"name_or_path = 'nosuch': no such folder.*alias. Aliases: recall-tiny, .*qwen"),
        ("generate . --prompt x", r"holds neither config.json nor a GGUF file"),
        ("generate model/model.safetensors --prompt x", r"'model/model.safetensors' is a file: pass its folder"),
        ("generate model", r"give the prompt as --prompt or as --prompt-file; both may be repeated"),
        ("generate model --prompt ''", r"--prompt is empty"),
        ("generate model --prompt a --prompt ''", r"--prompt \(2\) is empty"),
        ("generate model --prompt x --logprobs", r"--logprobs needs --json"),
        ("generate model --prompt x --top-logprobs 2", r"--top-logprobs needs --json"),
        (
            "generate model --prompt x --min-new-tokens 300",
            r"--min-new-tokens 300: must be at most --max-new-tokens 256",
        ),
        ("generate model --prompt-file nosuch.txt", r"nosuch.txt: No such file or directory"),
        ("generate model --prompt-file model", r"model: Is a directory"),
        ("generate model --prompt-file latin1.txt", r"--prompt-file latin1.txt is not UTF-8 text"),
        ("generate model --prompt x --temperature -1", r"--temperature -1.0: must be a number of at least 0"),
        ("generate model --prompt x --top-p nan", r"--top-p nan: must be in \(0, 1\]"),
        ("generate model --prompt x --max-new-tokens 0", r"Invalid value for '--max-new-tokens'"),
        ("generate model --prompt x --max-new-tokens ten", r"Invalid value for '--max-new-tokens'"),
        ("generate model --prompt x --max-new-tokens 9999", r"--prompt has 1 tokens; .* model has 4096 positions"),
        ("generate model --prompt x --seed -1", r"Invalid value for '--seed'"),
        ("generate model --prompt x --temperature 1 --top-k 9999999999", r"Invalid value for '--top-k'"),
        ("generate model --prompt x --stop ''", r"--stop '': must be a string that is not empty"),
        ("generate model --prompt x --dtype int8", r"--dtype int8: must be float32, bfloat16 or float16"),
        ("generate model --prompt x --dtype nosuch", r"--dtype nosuch: must be float32, bfloat16 or float16"),
        ("generate model --prompt x --profile other", r"has 3 layers of 2 heads, but model 'model' has 2 of 2"),
        ("generate model --prompt x --profile nosuch", r"profile directory .*nosuch does not exist"),
        ("generate model --prompt x --profile shipped", r"profile = 'shipped': model holds no profile folder"),
        ("generate", r"Missing argument"),
        ("generate model --nosuch", r"No such option: --nosuch"),
        ("generat", r"No such command 'generat'. Did you mean 'generate'\?"),
        ("profile", r"Missing command"),
        ("profile show nosuch", r"profile directory .*nosuch does not exist"),
        ("profile show model", r"model holds no profile"),
        ("profile show profile --tokens 0", r"Invalid value for '--tokens'"),
        ("plot budgets profile --out text.txt/map.png", r"text.txt: (File exists|Not a directory)"),
        ("plot budgets profile --out map.jpg", r"--out map.jpg: pictures are PNG files; the name must end in .png"),
        ("plot budgets profile --out /dev/full", r"/dev/full: No space left on device"),
        ("calibrate model --text nosuch.txt --out new", r"nosuch.txt: No such file or directory"),
        ("calibrate model --text latin1.txt --out new", r"--text latin1.txt is not UTF-8 text"),
        ("calibrate model --text text.txt --out new", r"--text text.txt has 270 tokens: calibration needs .* 4224"),
        ("calibrate model --text text.txt --out new --window 100", r"--window 100: must be a positive multiple"),
        ("calibrate model --text text.txt --out new --tau 2", r"--tau 2.0: must lie in \(0, 1\]"),
        ("calibrate model --text text.txt --out new --max-tokens -5", r"Invalid value for '--max-tokens'"),
        ("calibrate model --text text.txt --out new --tau-probe 2", r"No such option: --tau-probe"),
        ("calibrate model --text text.txt --out new --read-tolerance 1", r"--read-tolerance 1.0: must lie in \[0, 1\)"),
        ("calibrate model --text text.txt --out new --keep-tolerance -1", r"--keep-tolerance -1.0: must be at least 0"),
        ("calibrate model --text text.txt --out new --criterion mass", r"Invalid value for '--criterion'"),
        ("calibrate model --text text.txt --out new --kept 2", r"--kept 2.0: must lie in \(0, 1\]"),
        ("calibrate model --text text.txt --out new --attended 0", r"--attended 0.0: must lie in \(0, 1\]"),
        ("calibrate model --text text.txt --out new --paper --kept 0.5", r"--kept goes with criterion 'worth', not"),
        (
            "calibrate model --text text.txt --out new --criterion retained_mass --probes facts",
            r"--probes goes with criterion 'worth', not with 'retained_mass'",
        ),
        ("calibrate model --text text.txt --out new --probes none", r"--probes none: must be both, facts, copy, or a"),
        ("calibrate model --text text.txt --out new --probes no.jsonl", r"no.jsonl: No such file or directory"),
        *(
            (f"calibrate model --text text.txt --text text.txt --out new --probes bad{i}.jsonl", message)
            for i, (_, message) in enumerate(BAD_PAIRS)
        ),
        ("demo --tokens 100", r"--tokens 100: must lie in \[3000, "),
        ("demo --tokens 100000", r"--tokens 100000: must lie in \[3000, "),
        ("demo --questions 0", r"--questions 0: must lie in \[1, "),
        ("demo --out text.txt", r"--out text.txt cannot be written: .*: Not a directory"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2_before_weights_are_read(args, message, monkeypatch):
    monkeypatch.setattr("tca_jax.loading.load_checkpoint", lambda *args: pytest.fail("the weights were read"))
    assert re.search(message, error(*shlex.split(args)))
    assert not list(Path().glob("new*"))


def test_calibrate_says_before_the_run_that_its_result_cannot_be_written(monkeypatch):
    monkeypatch.setattr("tca_jax.loading.open_checkpoint", lambda *args: pytest.fail("the model was looked for"))
    message = error("calibrate", "model", "--text=text.txt", "--out=text.txt/new")
    assert re.fullmatch(r"--out text.txt/new cannot be written: \S+text.txt: Not a directory", message)


def test_a_text_without_a_tokenizer_to_read_it_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tca_jax.loading.load_checkpoint", lambda *args: pytest.fail("the weights were read"))
    write_checkpoint(tmp_path, tokenizer=False)
    assert "without a tokenizer" in error("generate", tmp_path, "--prompt=x")
    assert "without a tokenizer" in error("calibrate", tmp_path, "--text=text.txt", "--out=new")


def test_a_chat_without_a_template_is_an_error_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tca_jax.loading.load_checkpoint", lambda *args: pytest.fail("the weights were read"))
    write_checkpoint(tmp_path, chat_template=None)
    assert "has no chat template" in error("generate", tmp_path, "--prompt=x", "--system=y")


def refuse(*args, **options):
    raise UserTypeError("prompts is an int: must be text")


@pytest.mark.parametrize("bug", [lambda *args, **options: {}["a bug"], lambda *args, **options: int("bug")])
def test_what_the_library_refuses_is_a_line_and_what_python_refuses_is_a_bug(bug, monkeypatch):
    monkeypatch.setattr(tca_jax, "generate", refuse)
    assert error("generate", "model", "--prompt=x", "--json") == "prompts is an int: must be text"
    monkeypatch.setattr(tca_jax, "generate", bug)
    assert isinstance(run("generate", "model", "--prompt=x", "--json").exception, KeyError | ValueError)


def test_running_out_of_memory_is_a_users_error_and_a_bug_is_not(monkeypatch):
    monkeypatch.setattr(tca_jax, "stream", lambda *args, **kwargs: jnp.zeros((2**30, 2**20)).block_until_ready())
    assert error("generate", "model", "--prompt=x").startswith("out of memory: RESOURCE_EXHAUSTED")
    monkeypatch.setattr(tca_jax, "stream", lambda *args, **kwargs: {}["a bug"])
    assert isinstance(run("generate", "model", "--prompt=x").exception, KeyError)


def test_the_traceback_of_a_users_error_is_there_for_the_asking():
    result = run("generate", "nosuch", "--prompt=x", TCA_JAX_TRACEBACK="1")
    assert isinstance(result.exception, ValueError)


@pytest.mark.filterwarnings("ignore:no probe is informative")
def test_progress_is_on_the_standard_error_of_a_terminal_only(tmp_path):
    args = ["calibrate", "model", "--text=text.txt", "--out", tmp_path, *SMALL, "--json"]
    terminal = run(*args, FORCE_COLOR="1")
    assert "loading model" in terminal.stderr
    assert "calibrating on 1 text" in terminal.stderr
    json.loads(terminal.stdout)
    assert run(*args).stderr == ""


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([700], "1 text of 700 tokens"),
        ([8192] * 3, "3 texts of 8,192 tokens"),
        ([9, 8100, 50], "3 texts of 9 to 8,100 tokens"),
    ],
)
def test_a_profile_says_how_many_texts_it_was_made_of_and_how_long_they_were(lengths, said):
    assert of_texts(lengths) == said
