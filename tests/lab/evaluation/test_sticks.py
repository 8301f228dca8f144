"""Measuring sticks: their texts and documents, the methods that are named, records, whole runs."""

import functools
import hashlib
import lzma

import numpy as np
import pytest
from profiles import make_worth_profile
from tiny import tiny_lm
from word_pieces import write_with_bytes

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.common import append
from tca_jax.lab.equal_bytes import held_share
from tca_jax.lab.evaluation import late_documents, late_facts, reading_loss, sticks, texts
from tca_jax.lab.evaluation.late_documents import late_document, repeating_document
from tca_jax.lab.recall.facts import NOUNS

TOKENS, FREE_END = 1_200, 200
HALVES = ("calibration", "test")
METHOD = "window=32,block_size=16"
SMALL = tca_jax.TCAConfig(block_size=16, window=32, reserve=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four files of each kind, two in each half."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for kind in texts.KINDS:
        (folder / kind).mkdir(parents=True)
        for half in HALVES:
            names = [name for name in (f"{kind}{i}.txt" for i in range(40)) if texts.half_of(name) == half]
            for name in names[:2]:
                lines = [" ".join(rng.choice(NOUNS, rng.integers(3, 12))) for _ in range(1_000)]
                (folder / kind / name).write_text("\n".join((f"first line of {name}", *lines)))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_with_bytes(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def lm(checkpoint):
    return tca_jax.load(checkpoint)


@pytest.fixture(autouse=True)
def small_documents(monkeypatch):
    """A tokenizer of few words makes long rows, and a short document needs a short end."""
    monkeypatch.setattr(late_documents, "FREE_END", FREE_END)
    monkeypatch.setattr(late_documents, "ROW", 192)


# --- texts and documents ---


def test_draws_are_complete_lines_of_a_half(folder, tmp_path):
    for half in HALVES:
        text = texts.read_half("manual", half, folder)
        assert "\n" + texts.draw(np.random.default_rng(1), "manual", half, 5_000, folder) in text
        names = [path.name for path in texts.files("manual", folder) if f"first line of {path.name}" in text]
        assert [texts.half_of(name) for name in names] == [half, half]
    with pytest.raises(UserError, match=r"the test half of manual texts has [\d,]+ characters: 2[\d,]+ are needed"):
        texts.draw(np.random.default_rng(0), "manual", "test", 10**6, folder)
    with pytest.raises(FileNotFoundError, match=f"no manual texts in {tmp_path}/manual: install Debian's vim-runtime"):
        texts.files("manual", tmp_path)


def digest(ids, *arrays):
    """Digest of a document: sticks compare figures of the same ones."""
    parts = (np.asarray(ids, np.int32), *arrays)
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:12]


def test_late_documents_hide_what_is_asked(lm, folder):
    document = late_document(lm, 3, TOKENS, folder=folder)
    answered = [np.asarray([*each.question, *each.answer], np.int32) for each in document.asked]
    assert digest(document.ids, *answered) == "0acab4b6a1eb"
    assert [each.kind for each in document.asked] == ["fact"] * 12 + ["copy"] * 4 + ["next"]
    opening, _ = late_documents.chat_frame(lm)
    assert lm.tokenizer.decode(opening) == "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
    assert document.ids[: len(opening)] == opening
    text, end = lm.tokenizer.decode(document.ids), lm.tokenizer.decode(document.ids[-FREE_END:])
    for _, *asked in document.asked[:12]:
        question, answer = map(lm.tokenizer.decode, asked)
        line = f"{question.split('<|end_header_id|>')[1].strip()}{answer}."
        assert text.count(f"\n{line}\n") == 1
        assert line not in end


def test_repeating_documents_repeat_what_counts(lm, folder):
    document = repeating_document(lm, 1, 2_400, folder=folder, repeats=4)
    assert digest(document.ids, document.weights) == "8cdf2cc9c5de"
    np.testing.assert_allclose(document.weights.sum(axis=1), 1, rtol=1e-5)
    copied = np.flatnonzero(document.weights[1]) + 1
    for passage in copied.reshape(4, 48):  # 16 tokens more are repeated before them
        wanted = document.ids[passage[0] - 16 : passage[-1] + 1]
        assert any(document.ids[i : i + 64] == wanted for i in range(1_200))


# --- methods, records, intervals ---


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """One of the paper's rule and one of predicted worth."""
    folders = {name: tmp_path_factory.mktemp("profiles") / name for name in ("paper", "worth")}
    Profile.uniform(SMALL, 2, 2, 3).save(folders["paper"])
    make_worth_profile().save(folders["worth"])
    return folders


def test_methods_are_named_by_share_and_profile(profiles):
    methods = ["full", f"snapkv:{METHOD}", "duoattention"]
    written = [f"{name}={path}" for name, path in profiles.items()]
    found = list(sticks.named_methods(tiny_lm(), ",".join(methods), [0.7], sticks.parse_profiles(written), TOKENS))
    assert [each.method for each in found] == [*methods, "tca, paper", "worth, worth"]
    assert [each.share for each in found] == [None, 0.7, 0.7, None, None]
    assert 0.6 < held_share(found[1].lm, TOKENS) <= 0.7
    duoattention = found[2].lm.method
    weights = make_worth_profile().maps.head_weights.ravel()
    assert np.ravel(duoattention.cache.retrieval).tolist() == (weights == weights.max()).tolist()  # half is too many
    assert duoattention.prefill == tca_jax.methods.BASELINE.prefill
    with pytest.raises(UserError, match="--profile 'a=': must be NAME=FOLDER"):
        sticks.parse_profiles(["a="])


def test_later_records_of_a_document_win(tmp_path):
    plain, packed = tmp_path / "new" / "records.jsonl", tmp_path / "records.jsonl.xz"
    common = {"model": "tiny", "device": "cpu", "tokens": 2_000, "method": "full", "share": None, "seed": 0}
    for stick, figure in (("a", 1), ("b", 2), ("a", 3)):
        append(plain, {**common, "stick": stick, "figure": figure})
    packed.write_bytes(lzma.compress(plain.read_bytes().replace(b'"cpu"', b'"gpu"')))
    found = sticks.records_by_stick([plain, packed])["a"]
    assert [(each["device"], each["figure"]) for each in found] == [("cpu", 3), ("gpu", 3)]


def test_intervals_resample_documents():
    right = np.random.default_rng(1).binomial(10, 0.6, 50)
    middle, low, high = sticks.interval(right.tolist(), [10] * 50)
    error = 1.96 * (right / 10).std() / np.sqrt(50)
    assert [low, high] == pytest.approx([middle - error, middle + error], abs=0.01)
    assert np.isnan(sticks.interval([0, 0], [0, 0])).all()


def test_facts_are_unknown_lost_or_right():
    known = {"facts": [True, True, False], "copied": 2, "next": 1.0}
    found = late_facts.compared({"facts": [False, True, True], "copied": 1, "next": 1.5}, known)
    assert found == {"facts": [1, 2, 0], "copied": 1, "copied_by_full": 2, "next": 1.5, "next_by_full": 1.0}


# --- complete runs ---


@pytest.mark.integration
def test_late_facts_and_reading_losses_of_a_model(checkpoint, folder, tmp_path, capsys, monkeypatch, profiles):
    monkeypatch.setattr(reading_loss, "repeating_document", functools.partial(repeating_document, repeats=2))
    out = tmp_path / "records.jsonl"
    options = {"documents": 1, "texts": folder, "profile": [f"small={profiles['paper']}"]}
    late_facts.main(str(checkpoint), out, methods="full,streaming", shares="0.01,0.5", tokens=TOKENS, **options)
    printed = capsys.readouterr().out
    assert "streaming at 1% is left out" in printed
    assert f"tiny, {TOKENS:,} tokens, cpu: full attention answers" in printed
    reading_loss.main(str(checkpoint), out, methods=f"streaming:{METHOD},full", tokens=TOKENS, **options)
    assert f"| streaming:{METHOD} | 1 |" in capsys.readouterr().out
    late = {(each["method"], each["share"]): each for each in sticks.records_by_stick([out])[late_facts.STICK]}
    read = {each["method"]: each for each in sticks.records_by_stick([out])[reading_loss.STICK]}
    assert list(late) == [("full", None), ("streaming", 0.5), ("tca, small", None)]
    assert list(read) == [f"streaming:{METHOD}", "full", "tca, small"]
    kept, attended, taken = ([each[name] for each in late.values()] for name in ("kept", "attended", "kv_share"))
    assert kept[0] == taken[0] == attended[0] == pytest.approx(1)
    assert all(0 < share < 0.6 for share in (*kept[1:], *taken[1:]))
    assert all(each["attended"] < 0.9 for name, each in read.items() if name != "full")
