"""Two replicas under Ray Serve on one machine: where requests go, and what a death and a restart leave."""

import importlib.util
import json
import re
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny import write_checkpoint

from tca_jax.errors import UserError
from tca_jax.serve.loop import EngineEnded

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOOKS = [f"{number:02} jumps over the lazy dog. " * 6 for number in range(20)]
QUESTION = [{"role": "user", "content": "Who jumps?"}]
CHATS, DOCUMENTS = "/v1/chat/completions", "/v1/documents"
KEY = "a-key"
SECONDS = 180  # most that anything may take
ENGINE = {"replicas": 2, "gpus": 0, "pages": 1200, "max_rows": 2, "answer_tokens": 512, "grace": 20}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'tca-jax[ray]'"),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field` is deprecated"),  # by Ray
    pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning"),  # by Ray, for a program of its own
]


@pytest.fixture(scope="module", autouse=True)
def unchecked():
    """Ray copies the source of a router to other processes, where the checks of this one's annotations are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [each for each in sys.meta_path if "jaxtyping" not in type(each).__module__])
        importlib.import_module("tca_jax.serve.ray")
        yield


class Cluster:
    """Ray on this machine, with a front on a free port and two replicas on two CPUs."""

    def __init__(self, model, disk):
        self.options = {"model": str(model), "disk": str(disk), "recognize_tokens": 64, "api_key": KEY, **ENGINE}
        self.folder = tempfile.mkdtemp(prefix="ray-")  # not the test's own: names of sockets must be short
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=SECONDS
        )

    def start(self):
        import ray
        from ray import serve

        options = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        ray.init("local", log_to_driver=False, _temp_dir=self.folder, **options)
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})
        self.deploy()

    def end(self):
        import ray
        from ray import serve

        self.http.close()
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def deploy(self, **options):
        from ray import serve

        from tca_jax.serve.ray import app

        serve.run(app({**self.options, **options}))

    def upload(self, text):
        response = self.http.post(DOCUMENTS, json={"text": text})
        assert response.status_code == 201, response.text
        return response.json()["id"]

    def ask(self, document, **fields):
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 12, "document": document, **fields}
        response = self.http.post(CHATS, json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    def documents(self):
        return {each["id"]: each for each in self.http.get(DOCUMENTS).json()["data"]}

    def metrics(self, name, **labels):
        """A metric by replica."""
        found = Counter()
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    found[sample.labels["replica"]] += int(sample.value)
        return found

    def replicas(self):
        return set(self.metrics("tca_jax_rows_max"))


def wait_until(holds):
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model = write_checkpoint(folder / "model", chat_template=TEMPLATE, eos_token_id=[95])
    cluster = Cluster(model, folder / "documents")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def answers(cluster):
    """Answers about documents, by their ids; each replica has some of them."""
    found = {}
    for number, book in enumerate(BOOKS):
        found[cluster.upload(book)] = None
        if number > 2 and len(cluster.metrics("tca_jax_requests_total", path=DOCUMENTS, status="201")) == 2:
            break
    for document in found:
        found[document] = cluster.ask(document)
    return found


@pytest.mark.slow
def test_requests_go_to_the_replica_that_holds_the_document(cluster, answers):
    asked = {"path": CHATS, "status": "200"}
    uploads = cluster.metrics("tca_jax_requests_total", path=DOCUMENTS, status="201")
    before = cluster.metrics("tca_jax_requests_total", **asked)
    assert len(uploads) == 2
    for document, answer in answers.items():
        assert cluster.ask(document) == answer
        assert cluster.http.get(f"{DOCUMENTS}/{document}").json()["state"] == "device"
    for book, (document, answer) in zip(BOOKS, answers.items(), strict=False):
        assert cluster.upload(book) == document
        chat = [{"role": "user", "content": f"{book}\n\nWho jumps?"}]
        assert cluster.ask(None, messages=chat) == answer
    assert cluster.metrics("tca_jax_requests_total", **asked) - before == {
        replica: 2 * number for replica, number in uploads.items()
    }
    assert cluster.metrics("tca_jax_documents", state="device") == uploads
    assert cluster.documents().keys() == answers.keys()


@pytest.mark.slow
def test_a_stream_comes_in_pieces_and_ends_with_its_connection(cluster, answers):
    document, answer = next(iter(answers.items()))
    with openai.OpenAI(base_url=f"{cluster.http.base_url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS) as client:
        asked = {"model": "model", "messages": QUESTION, "temperature": 0, "extra_body": {"document": document}}
        chunks = list(client.chat.completions.create(stream=True, max_tokens=12, **asked))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
        assert len(chunks) > 3
        cancelled = cluster.metrics("tca_jax_answers_total", finish_reason="cancelled").total()
        with client.chat.completions.create(stream=True, max_tokens=1000, **asked) as stream:
            next(stream)
            assert cluster.metrics("tca_jax_rows").total() == 1
    wait_until(lambda: cluster.metrics("tca_jax_answers_total", finish_reason="cancelled").total() == cancelled + 1)
    assert cluster.metrics("tca_jax_rows").total() == 0


@pytest.mark.slow
def test_what_is_refused_is_refused_as_by_one_server(cluster, answers):
    document = next(iter(answers))
    for method, path, fields, status in (
        ("POST", CHATS, {"messages": QUESTION, "document": "doc-none"}, 404),
        ("POST", CHATS, {"messages": QUESTION, "document": "../model"}, 404),
        ("POST", CHATS, {"messages": QUESTION, "document": document, "max_tokens": 0}, 400),
        ("POST", CHATS, [], 400),
        ("POST", DOCUMENTS, {"text": ""}, 400),
        ("GET", f"{DOCUMENTS}/doc-none", None, 404),
        ("GET", "/v1/nothing", None, 404),
    ):
        response = cluster.http.request(method, path, json=fields)
        assert (response.status_code, list(response.json())) == (status, ["error"])
    assert cluster.http.post(DOCUMENTS, content=b"x" * (64 * 10**6 + 1)).status_code == 413
    for path in (DOCUMENTS, "/metrics", f"{DOCUMENTS}/{document}"):
        assert cluster.http.get(path, headers={"Authorization": "Bearer other"}).status_code == 401
    assert httpx.get(f"{cluster.http.base_url}/health").json() == {"status": "ok"}


@pytest.mark.slow
def test_where_a_replica_dies_another_one_finds_its_documents(cluster, answers):
    import ray

    wait_until(lambda: all(each["stored"] for each in cluster.documents().values()))
    document, before = next(iter(answers)), cluster.replicas()
    body = {"messages": QUESTION, "document": document, "temperature": 0, "max_tokens": 1000, "stream": True}
    with cluster.http.stream("POST", CHATS, json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        (holder,) = +cluster.metrics("tca_jax_rows")
        ray.kill(ray.get_actor(f"SERVE_REPLICA::default#Engine#{holder}", namespace="serve"))
        *_, last = (line for line in lines if line)
    assert "its replica has ended" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert cluster.ask(document) == answers[document]
    assert cluster.documents().keys() == answers.keys()
    wait_until(lambda: len(cluster.replicas()) == 2)  # Ray has started another one
    assert len(cluster.replicas() & before) == 1
    assert {document: cluster.ask(document) for document in answers} == answers


@pytest.mark.slow
def test_a_rolling_restart_fails_no_request_and_loses_no_document(cluster, answers):
    before, late = cluster.replicas(), BOOKS[-1][::-1]
    restarted, failed, number = threading.Event(), [], 0

    def restart():
        try:
            cluster.deploy(max_waiting=100)
        except BaseException as error:
            failed.append(error)
        finally:
            restarted.set()

    uploaded = cluster.upload(late)  # it is read, and stored, while its replica may be told to end
    restarting = threading.Thread(target=restart)
    restarting.start()
    while not restarted.is_set():
        document = list(answers)[number % len(answers)]
        assert cluster.ask(document) == answers[document]
        number += 1
    restarting.join()
    assert not failed
    assert number > 2
    assert not cluster.replicas() & before
    assert cluster.documents().keys() == answers.keys() | {uploaded}
    assert {document: cluster.ask(document) for document in answers} == answers
    cluster.ask(uploaded)
    for document in (*answers, uploaded):
        assert cluster.http.delete(f"{DOCUMENTS}/{document}").json()["deleted"] is True
    assert cluster.documents() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model is missing"),
        ({"model": "m", "replicas": "2"}, "replicas = 2: needs disk"),
        ({"model": "m", "replicas": "0"}, "replicas = '0': .*greater than or equal to 1"),
        ({"model": "m", "max_rows": "many"}, "max_rows = 'many': .*integer"),
        ({"model": "m", "port": "80"}, "No such option: --port"),
        ({"model": "m", "api_key": ""}, "--api-key"),
        ({"model": "m", "mesh": "four"}, "mesh four: must be devices"),
    ],
)
def test_options_that_are_not_allowed_are_named(options, message):
    from tca_jax.serve.ray import app

    with pytest.raises(UserError, match=message):
        app(options)


def test_ray_replaces_an_engine_that_has_failed():
    from tca_jax.serve.ray import Replica

    replica = Replica.__new__(Replica)
    replica._engine = SimpleNamespace(failure=None)
    replica.check_health()
    replica._engine.failure = EngineEnded("the engine has failed: OSError: broken")
    with pytest.raises(RuntimeError, match="OSError: broken"):
        replica.check_health()


def test_relative_folders_are_those_of_the_caller(tmp_path, monkeypatch):
    from tca_jax.serve.ray import _parsed

    (tmp_path / "local").mkdir()
    monkeypatch.chdir(tmp_path)
    parsed = _parsed({"model": "local", "profile": "shipped", "disk": "documents"})
    assert (parsed.model, parsed.running.profile) == (str(tmp_path / "local"), "shipped")
    assert parsed.serving.disk == tmp_path / "documents"


def test_the_commands_of_the_page_have_their_options():
    from tca_jax.serve.ray import _parsed

    page = Path(__file__).parents[2] / "docs/serving.md"
    commands = re.findall(r"^serve run .*tca_jax.serve.ray:app (.*)$", page.read_text(), re.MULTILINE)
    options = [dict(each.split("=") for each in shlex.split(command, comments=True)) for command in commands]
    assert [_parsed(given).replicas for given in options] == [int(given.get("replicas", 1)) for given in options]
    assert len(options) > 3


def test_an_engine_has_the_gpus_of_its_mesh():
    from tca_jax.serve.ray import _parsed

    assert [_parsed({"model": "m", **given}).gpus for given in ({}, {"mesh": "1x4"}, {"gpus": "0"})] == [1, 4, 0]
