"""Measuring sticks: their texts and documents, the methods that are named, records and tables, whole runs."""

import dataclasses
import functools
import hashlib
import lzma

import numpy as np
import pytest
from tiny import tiny_lm
from word_pieces import write_with_bytes

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.errors import UserError
from tca_jax.lab.equal_bytes import CallSizes, held_share
from tca_jax.lab.evaluation import first_answer, late_documents, late_facts, reading_loss, sticks, texts
from tca_jax.lab.evaluation.by_layers import Answers, FullRead, MaskedRead
from tca_jax.lab.evaluation.late_documents import LateDocument, late_document, repeating_document
from tca_jax.lab.recall.facts import NOUNS

TOKENS, FREE_END, ROW = 1_200, 200, 192
HALVES = ("calibration", "test")
METHOD = "window=32,block_size=16"


def write_texts(folder):
    """Four files of each kind, two in each half."""
    rng = np.random.default_rng(0)
    for kind in texts.KINDS:
        (folder / kind).mkdir(parents=True)
        for half in HALVES:
            names = [name for name in (f"{kind}{i}.txt" for i in range(40)) if texts.half_of(name) == half]
            for name in names[:2]:
                lines = [" ".join(rng.choice(NOUNS, rng.integers(3, 12))) for _ in range(1_000)]
                (folder / kind / name).write_text("\n".join((f"first line of {name}", *lines)))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


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
    monkeypatch.setattr(late_documents, "ROW", ROW)


# --- texts ----------------------------------------------------------------------------------------


def test_halves_divide_the_files_by_name(folder):
    for kind in texts.KINDS:
        names = [path.name for path in texts.files(kind, folder)]
        assert names == sorted(names)
        assert len(names) == 4
        for name in names:
            halves = [half for half in HALVES if f"first line of {name}" in texts.read_half(kind, half, folder)]
            assert halves == [texts.half_of(name)]


def test_draws_are_whole_lines_and_repeat(folder):
    drawn = [texts.draw(np.random.default_rng(seed), "manual", "test", 5_000, folder) for seed in (1, 1, 2)]
    text = texts.read_half("manual", "test", folder)
    assert drawn[0] == drawn[1] != drawn[2]
    for each in drawn:
        assert len(each) == 5_000
        assert "\n" + each in text


def test_short_texts_are_refused(tmp_path):
    (tmp_path / "python").mkdir()
    for number in range(4):
        (tmp_path / "python" / f"python{number}.txt").write_text("a line\n" * 100)
    with pytest.raises(UserError, match=r"the test half of python texts has [\d,]+ characters: 1[\d,]+ are needed"):
        texts.draw(np.random.default_rng(0), "python", "test", 2_000, tmp_path)


def test_missing_texts_are_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=f"no manual texts in {tmp_path}/manual: install Debian's vim-runtime"):
        texts.files("manual", tmp_path)
    monkeypatch.setattr(texts, "_MANUALS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"no manual texts in {tmp_path}"):
        texts.files("manual")


def test_collecting_copies_both_kinds(tmp_path, monkeypatch):
    for name in ("vim90/doc/usr.txt", "vim91/doc/usr.txt", "vim91/doc/map.txt", "vim91/doc/tags"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    sources = {"train": (tmp_path / "long.py",), "held-out": (tmp_path / "short.py",)}
    (tmp_path / "long.py").write_text("#" * 3_000)
    (tmp_path / "short.py").write_text("pass")
    monkeypatch.setattr(texts, "_MANUALS", str(tmp_path))
    monkeypatch.setattr(texts, "source_files", sources.get)
    to = tmp_path / "to"
    assert texts.collect(to) == 5
    copied = sorted(path.name for path in to.rglob("*.*"))
    assert copied == ["long.py", "map.txt", "short.py", "usr.txt", "usr.txt"]  # names decide the half: they stay
    assert {path.read_text() for path in to.rglob("usr.txt")} == {"vim90/doc/usr.txt", "vim91/doc/usr.txt"}
    assert [path.name for path in texts.files("python", to)] == ["long.py", "short.py"]
    with pytest.raises(UserError, match="is not empty: pass a new folder"):
        texts.main(to)


# --- documents ------------------------------------------------------------------------------------


@pytest.fixture
def document(lm, folder):
    return late_document(lm, 3, TOKENS, folder=folder)


def test_a_late_document_is_as_long_as_asked(lm, folder, document):
    for seed in (0, 3):
        again = late_document(lm, seed, TOKENS, folder=folder)
        assert len(again.ids) == TOKENS
        assert (again.ids == document.ids) == np.array_equal(again.rows, document.rows) == (seed == 3)
    opening, _ = late_documents.chat_frame(lm)
    assert lm.tokenizer.decode(opening) == "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
    assert document.ids[: len(opening)] == opening
    assert document.kinds == ("fact",) * 12 + ("copy",) * 4 + ("next",)
    assert digest(document.ids, document.rows, document.counted) == "877e87d3d433"
    text, end = lm.tokenizer.decode(document.ids), lm.tokenizer.decode(document.ids[-FREE_END:])
    for row, counted in zip(document.rows[:12], document.counted[:12], strict=True):  # facts
        places = np.flatnonzero(counted) + 1
        question, answer = lm.tokenizer.decode(row[: places[0]]), lm.tokenizer.decode(row[places])
        line = f"{question.split('<|end_header_id|>')[1].strip()}{answer}."
        assert text.count(f"\n{line}\n") == 1
        assert line not in end
    with pytest.raises(UserError, match=f"tokens = 300: must be at least {2 * FREE_END}"):
        late_document(lm, 0, 300, folder=folder)


def test_repeating_documents_repeat_what_counts(lm, folder):
    document = repeating_document(lm, 1, 2_400, folder=folder, repeats=4)
    again, other = (repeating_document(lm, seed, 2_400, folder=folder, repeats=4) for seed in (1, 2))
    assert document.ids == again.ids != other.ids
    assert digest(document.ids, document.weights) == "8cdf2cc9c5de"
    assert len(document.ids) == 2_400
    assert document.weights.shape == (3, 2_399)
    np.testing.assert_allclose(document.weights.sum(axis=1), 1, rtol=1e-5)
    assert ((document.weights > 0).sum(axis=0) <= 1).all()
    plain, copy, fact = document.weights > 0
    assert not plain[:600].any()
    assert copy.sum() == 4 * 48
    for start, end in runs(copy):  # tokens after these; 16 more stand before them
        passage = document.ids[start + 1 - 16 : end + 1]
        assert start > 1_600
        assert find(passage, document.ids) < 1_200
    values = [lm.tokenizer.decode(document.ids[start + 1 : end + 1]) for start, end in runs(fact)]
    first = lm.tokenizer.decode(document.ids[:1_200])
    assert len(values) == 4
    assert all(f"is{value}.\n" in first for value in values)


def test_documents_without_room_are_refused(lm, folder, monkeypatch):
    for tokens in (700, 1_100):
        with pytest.raises(UserError, match=f"tokens = {tokens}: "):
            repeating_document(lm, 0, tokens, folder=folder)
    monkeypatch.setattr(late_documents, "ROW", 60)
    with pytest.raises(UserError, match=r"a fact and its answer have \d+ tokens: at most 60 fit"):
        late_document(lm, 0, TOKENS, folder=folder)


def digest(ids, *arrays):
    """Digest of a document: sticks compare figures of the same ones."""
    parts = (np.asarray(ids, np.int32), *arrays)
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:12]


def runs(marked):
    """First and one past the last of each run of marks."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marked, [0]]).astype(int)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def find(part, ids):
    return next(i for i in range(len(ids)) if ids[i : i + len(part)] == part)


# --- methods --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """One of the paper's criterion, which does not know what heads are worth, and one by worth."""
    config = tca_jax.TCAConfig(block_size=16, window=32, reserve=0)
    uniform = Profile.uniform(config, 2, 2, 3)
    worth = np.array([[0.1, 2.0], [0.0, 0.5]], np.float32)
    folders = {name: tmp_path_factory.mktemp("profiles") / name for name in ("paper", "worth")}
    for name, known in (("paper", uniform.keeping_worth), ("worth", worth)):
        dataclasses.replace(uniform, keeping_worth=known, fingerprint=None).save(folders[name])
    return folders


def named(lm, methods, shares=(None,), profiles=None):
    return list(sticks.named_methods(lm, methods, shares, profiles or {}, TOKENS))


def test_methods_are_named_by_share_and_profile(profiles):
    lm = tiny_lm()
    found = named(lm, ["full", f"snapkv:{METHOD}", "duoattention"], [0.7], profiles)
    assert [each[:2] for each in found] == [
        ("full", None),
        (f"snapkv:{METHOD}", 0.7),
        ("duoattention", 0.7),
        ("tca, paper", None),
        ("tca, worth", None),
    ]
    shares = [sticks.kv_share(each.lm, TOKENS) for each in found]
    assert shares == [held_share(each.lm, CallSizes(TOKENS)) for each in found]
    assert shares[0] == 1
    assert 0.6 < shares[1] <= 0.7
    duoattention = found[2].lm.method
    assert duoattention.cache.retrieval == ((False, True), (False, False))  # half of the heads were too many
    assert duoattention.prefill == tca_jax.methods.BASELINE.prefill


def test_methods_that_cannot_be_made_are_refused(profiles):
    for given in ({}, {"paper": profiles["paper"]}):
        with pytest.raises(UserError, match=r"duoattention needs gates: .* \(--profile NAME=FOLDER\)"):
            named(tiny_lm(), ["duoattention"], [0.5], given)
    with pytest.raises(UserError, match="'fool' is not registered"):
        named(tiny_lm(), ["fool"])


def test_profiles_are_written_with_their_names(tmp_path):
    assert sticks.parse_profiles(["a=x", "b=y=z"]) == {"a": sticks.Path("x"), "b": sticks.Path("y=z")}
    for wrong in ("x", "=x", "a="):
        with pytest.raises(UserError, match=f"--profile '{wrong}': must be NAME=FOLDER"):
            sticks.parse_profiles([wrong])


# --- records and tables ---------------------------------------------------------------------------


def record(stick, method="full", share=None, seed=0, **figures):
    common = {"stick": stick, "model": "tiny", "device": "cpu", "tokens": 2_000}
    return {**common, "method": method, "share": share, "seed": seed, **figures}


def test_later_records_of_a_document_win(tmp_path):
    plain, packed = tmp_path / "new" / "records.jsonl", tmp_path / "records.jsonl.xz"
    for each in (record("a", figure=1), record("a", seed=1, figure=2), record("b", figure=3), record("a", figure=4)):
        sticks.append(plain, each)
    packed.write_bytes(lzma.compress(plain.read_bytes().replace(b'"cpu"', b'"gpu"')))
    found = sticks.read_records([plain, packed], "a")
    assert [(each["device"], each["seed"], each["figure"]) for each in found] == [
        ("cpu", 0, 4),
        ("cpu", 1, 2),
        ("gpu", 0, 4),
        ("gpu", 1, 2),
    ]


def test_intervals_resample_documents():
    rng = np.random.default_rng(1)
    right = rng.binomial(10, 0.6, 50)
    middle, low, high = sticks.interval(right.tolist(), [10] * 50)
    assert middle == pytest.approx(right.sum() / 500)
    error = 1.96 * (right / 10).std() / np.sqrt(50)
    assert [low, high] == pytest.approx([middle - error, middle + error], abs=0.01)
    assert sticks.interval([3, 3], [4, 4]) == (0.75, 0.75, 0.75)
    assert np.isnan(sticks.interval([0, 0], [0, 0])).all()
    assert np.isfinite(sticks.interval([0, 1], [0, 1])).all()


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Measures a document of two facts, a passage and what follows, of which each method answers as it is given."""
    monkeypatch.setattr(MaskedRead, "kept_share", 0.5)
    read, counted = MaskedRead([1], [], [], 1.0), np.tile(np.float32([0, 1, 1, 0]), (4, 1))
    document = LateDocument([1], np.zeros((4, 4), np.int32), counted, ("fact", "fact", "copy", "next"))

    def measure(methods, answers):
        scores, given, answers = iter("ABC"), [], iter(answers)
        monkeypatch.setattr(late_facts, "read_full", lambda lm, ids: FullRead(ids, []))
        monkeypatch.setattr(late_facts, "repetition_scores", lambda lm, full: next(scores))
        monkeypatch.setattr(late_facts, "read_by", lambda lm, full, scores=None: given.append(scores) or read)
        monkeypatch.setattr(late_facts, "ask", lambda lm, read, rows: next(answers))
        return late_facts.measure(tiny_lm(), named(tiny_lm(), methods), document), given

    return measure


def answers(right, loss=1.0):
    """Answers whose first counted tokens are right, and so many second ones, by row."""
    of_rows = [[False, True, second, False] for second in right]
    return Answers(np.full((4, 4), loss, np.float32), np.array(of_rows))


def test_facts_are_unknown_lost_or_right(measured):
    known = answers([True, False, True, True])
    found, _ = measured(["keydiff", "snapkv"], [known, answers([False, True, False, True], 1.5), known])
    assert [each["facts"] for each in found] == [[1, 0], [2, 0]]
    assert [(each["copied"], each["copied_by_full"]) for each in found] == [(1, 2), (2, 2)]
    assert [(each["next"], each["next_by_full"]) for each in found] == [(1.5, 1.0), (1.0, 1.0)]
    assert {(each["kept"], each["attended"]) for each in found} == {(0.5, 1.0)}


def test_methods_of_one_repetition_share_its_scores(measured):
    methods = ["snapkv", "kvzip", "kvzip:chunk=20", "kvzip:share=0.1"]
    _, given = measured(methods, [answers([True] * 4)] * 5)
    assert given == [None, None, "A", "B", "A"]  # full attention first


@pytest.mark.integration
def test_late_facts_and_reading_losses_of_a_model(checkpoint, folder, tmp_path, capsys, monkeypatch, profiles):
    monkeypatch.setattr(reading_loss, "repeating_document", functools.partial(repeating_document, repeats=2))
    out = tmp_path / "records.jsonl"
    options = {"documents": 1, "texts": folder, "profile": [f"small={profiles['worth']}"]}
    late_facts.main(str(checkpoint), out, methods="full,streaming", shares="0.01,0.5", tokens=TOKENS, **options)
    printed = capsys.readouterr().out
    assert "streaming at 1% is left out" in printed
    assert f"tiny, {TOKENS:,} tokens, cpu: full attention answers" in printed
    reading_loss.main(str(checkpoint), out, methods=f"streaming:{METHOD},full", tokens=TOKENS, **options)
    assert f"| streaming:{METHOD} | 1 |" in capsys.readouterr().out
    late = {(each["method"], each["share"]): each for each in sticks.read_records([out], late_facts.STICK)}
    read = {each["method"]: each for each in sticks.read_records([out], reading_loss.STICK)}
    assert list(late) == [("full", None), ("streaming", 0.5), ("tca, small", None)]
    assert list(read) == [f"streaming:{METHOD}", "full", "tca, small"]
    kept, attended, taken = ([each[name] for each in late.values()] for name in ("kept", "attended", "kv_share"))
    assert kept[0] == taken[0] == attended[0] == pytest.approx(1)
    assert all(0 < share < 0.6 for share in (*kept[1:], *taken[1:]))
    assert all(each["attended"] < 0.9 for name, each in read.items() if name != "full")


def test_calibrations_are_recorded(checkpoint, folder, tmp_path, capsys, monkeypatch):
    given = []
    uniform = Profile.uniform(tca_jax.TCAConfig(block_size=16, window=32, reserve=0), 2, 2, 3)
    monkeypatch.setattr(tca_jax, "calibrate", lambda lm, texts, **options: given.append((texts, options)) or uniform)
    out, settings = tmp_path / "records.jsonl", "default,kept=0.25,paper:0.9"
    first_answer.calibrate(
        str(checkpoint), tmp_path / "to", out, settings, count=2, tokens=200, window=128, texts=folder
    )
    assert [(len(texts), len(texts[0])) for texts, _ in given] == [(2, 200)] * 3
    assert [options.get("kept") for _, options in given] == [None, 0.25, None]
    assert given[2][1]["config"] == tca_jax.TCAConfig.paper(window=128, tau=0.9)
    found = sticks.read_records([out], first_answer.CALIBRATION)
    assert [record["method"] for record in found] == settings.split(",")
    assert (tmp_path / "to" / "kept-0.25").is_dir()
    assert "| tiny, cpu | 2 of 200 tokens | paper:0.9 |" in capsys.readouterr().out
    with pytest.raises(UserError, match="--settings 'half': must be default, kept=SHARE, paper or paper:TAU"):
        first_answer.calibrate(str(checkpoint), tmp_path / "to", out, "half", texts=folder)
