"""An engine under random requests, moves and restarts: answers are those of generate, and nothing is lost."""

import functools
import tempfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test
from tiny import random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.errors import UserError, require
from tca_jax.serve import Engine

SECONDS = 120
TOKENS = 6
#: Few lengths, so that few programs are compiled.
DOCUMENTS = [random_prompt(seed, 40) for seed in range(3)]
PROMPTS = [random_prompt(10, 12), random_prompt(11, 12)]
QUESTIONS = [random_prompt(12, 3), random_prompt(13, 3)]
MORE = [random_prompt(14, 3), random_prompt(15, 3)]
MOST_PARTS = 3
DRAWINGS = [{}, {"temperature": 0.9, "seed": 5}]


class Model:
    """A model, and what `generate` answers with it."""

    def __init__(self, lm):
        self.lm = lm
        layouts = lm.cache_layout(1, 48), lm.cache_layout(1, 48, 16, following=True)
        self.pages = sum(layout.num_pages for layout in layouts)  # documents push each other out

    @functools.cache  # noqa: B019 (one test)
    def context(self, parts):
        before = self.context(parts[:-1]) if parts[1:] else None
        return tca_jax.prefill(self.lm, [list(parts[-1])], context=before)

    @functools.cache  # noqa: B019 (one test)
    def answer(self, parts, prompt, drawing):
        context = self.context(parts) if parts else None
        options = {"max_new_tokens": TOKENS, "stop_token_ids": (), **DRAWINGS[drawing]}
        return tca_jax.generate(self.lm, [list(prompt)], context=context, **options).tokens[0]


class Serving(RuleBasedStateMachine):
    """Documents are named by the parts in which they were read."""

    model: Model
    documents = Bundle("documents")
    streams = Bundle("streams")

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="tca_jax-tests-")
        self.ids = {}  # of documents, by their parts; without those that were forgotten, or lost at a restart
        self.stored = set()
        self.open = []  # streams that have not been looked at since they ended, and what they should say
        self.start()

    def start(self):
        sizes = {"max_rows": 2, "answer_tokens": 32, "host_memory": 40_000}
        self.engine = Engine(self.model.lm, pages=self.model.pages, disk=self.folder.name, **sizes)

    @rule(target=documents, tokens=st.sampled_from(DOCUMENTS))
    def read(self, tokens):
        parts = (tuple(tokens),)
        self.ids[parts] = self.engine.read(tokens)
        return parts

    @rule(target=documents, parts=documents, more=st.sampled_from(MORE))
    def append(self, parts, more):
        if parts not in self.ids or len(parts) == MOST_PARTS:
            return multiple()
        longer = (*parts, tuple(more))
        self.ids[longer] = self.engine.append(self.ids[parts], more)
        return longer

    @rule(target=streams, parts=st.one_of(documents, st.just(())), number=st.integers(0, 1), drawing=st.integers(0, 1))
    def ask(self, parts, number, drawing):
        if parts and parts not in self.ids:
            return multiple()
        return self._ask(parts, (QUESTIONS if parts else PROMPTS)[number], drawing, keep=False)

    @rule(target=documents, parts=documents, question=st.sampled_from(QUESTIONS))
    def ask_and_keep(self, parts, question):
        if parts not in self.ids or len(parts) == MOST_PARTS:
            return multiple()
        asked = self._ask(parts, question, 0, keep=True)
        out = self.check(asked)
        if out is None or out.document is None:  # there was no room
            return multiple()
        longer = (*parts, (*question, *out.tokens[:-1]))
        self.ids[longer] = out.document
        return longer

    def _ask(self, parts, prompt, drawing, keep):
        options = {"max_new_tokens": TOKENS, "stop_token_ids": (), "keep": keep, **DRAWINGS[drawing]}
        stream = self.engine.ask(self.ids[parts] if parts else None, prompt, **options)
        asked = stream, parts, tuple(prompt), drawing
        self.open.append(asked)
        return asked

    @rule(asked=streams)
    def cancel(self, asked):
        asked[0].cancel()

    @rule(asked=streams)
    def result(self, asked):
        self.check(asked)

    def check(self, asked):
        stream, *what = asked
        try:
            out = stream.result(SECONDS)
        except UserError as error:
            require("no longer there" in str(error), str(error), AssertionError)  # its document was forgotten
            return None
        tokens = self.model.answer(*what)
        assert out.tokens == (tokens if out.finish_reason == "length" else tokens[: len(out.tokens)])
        assert out.finish_reason in ("length", "cancelled")
        return out

    @rule(parts=documents)
    def wait_until_stored(self, parts):
        if parts not in self.ids:
            return
        try:
            assert self.engine.wait(self.ids[parts], SECONDS, stored=True).stored
        except UserError as error:
            require("no longer there" in str(error), str(error), AssertionError)  # what it appends to was forgotten
        else:
            self.stored.add(parts)

    @rule(parts=documents)
    def forget(self, parts):
        if parts not in self.ids:
            return
        try:
            self.engine.forget(self.ids[parts])
        except UserError as error:
            require("in use" in str(error), str(error), AssertionError)
        else:
            del self.ids[parts]
            self.stored.discard(parts)

    @rule()
    def wait(self):
        assert self.engine.idle(SECONDS)
        self.no_page_leaks()
        for asked in self.open:
            self.check(asked)
        self.open.clear()

    def no_page_leaks(self):
        assert self.engine.answer_pages.free == self.engine.answer_pages.total
        held = [each for each in self.engine._documents.all() if each.here]
        assert not any(each.users for each in self.engine._documents.all())
        numbers = {number for each in held for number in np.concatenate(each.pages).tolist()}
        assert self.engine.document_pages.free == self.engine.document_pages.total - len(numbers)

    @rule()
    def restart(self):
        self.engine.close()
        for asked in self.open:
            self.check(asked)
        self.open.clear()
        self.start()
        found = {each.id for each in self.engine.documents()}
        assert {self.ids[parts] for parts in self.stored} <= found
        self.ids = {parts: id_ for parts, id_ in self.ids.items() if id_ in found}

    @invariant()
    def works(self):
        assert self.engine.failure is None

    def teardown(self):
        self.wait()
        self.engine.close()
        self.folder.cleanup()


def run(lm, examples, steps):
    """Random requests of a model; the same ones each time."""
    bounds = {"max_examples": examples, "stateful_step_count": steps, "deadline": None, "database": None}
    checks = {"phases": [hypothesis.Phase.generate], "suppress_health_check": list(hypothesis.HealthCheck)}
    settings = hypothesis.settings(**bounds, **checks, derandomize=True)
    machine = type("Serving", (Serving,), {"model": Model(lm)})
    run_state_machine_as_test(machine, settings=settings)


@pytest.mark.integration
def test_few_random_requests():
    run(with_candidates(tiny_lm(), [[0, 5], [9, 13]]), examples=3, steps=24)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "tca"])
def test_many_random_requests(method):
    lm = tiny_lm()
    run(lm if method == "full" else with_candidates(lm, [[0, 5], [9, 13]]), examples=25, steps=40)
