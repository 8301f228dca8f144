"""Two replicas under Ray Serve on one machine, routed by the document's id."""

import importlib.util
import shutil
import tempfile

import httpx
import openai
import pytest
from processes import free_port
from serving import QUESTION, TEMPLATE
from tiny import write_checkpoint

from tca_jax.errors import UserError

SECONDS = 180  # most that anything may take

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ray[serve]'"),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field` is deprecated"),  # by Ray
    pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning"),  # by Ray, for a program of its own
]


@pytest.fixture
def url(tmp_path):
    """The address of two replicas on this machine."""
    import ray
    from ray import serve

    from tca_jax.serve.ray import app

    model = write_checkpoint(tmp_path / "model", chat_template=TEMPLATE, eos_token_id=[95])
    folder = tempfile.mkdtemp(prefix="ray-")  # not the test's own: names of sockets must be short
    port = free_port()
    options = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    ray.init("local", log_to_driver=False, _temp_dir=folder, **options)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"model": str(model), "replicas": 2, "gpus": 0, "pages": 1200, "max_rows": 2, "grace": 20}))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_requests_reach_the_replica_of_their_document(url):
    with (
        httpx.Client(base_url=url, timeout=SECONDS) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client,
    ):
        texts = [f"{number:02} jumps over the lazy dog. " * 6 for number in range(6)]
        ids = [http.post("/v1/documents", json={"text": text}).json()["id"] for text in texts]
        answers = []
        for id_ in [*ids, *ids]:
            asked = {"model": "model", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
            asked |= {"extra_body": {"document": id_}, "extra_headers": {"serve_multiplexed_model_id": id_}}
            whole = client.chat.completions.create(**asked).choices[0].message.content
            chunks = list(client.chat.completions.create(stream=True, **asked))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
            answers.append(whole)
        assert answers[:6] == answers[6:]
        held = {frozenset(each["id"] for each in http.get("/v1/documents").json()["data"]) for _ in range(40)}
        assert len(held) == 2  # each replica has some of the documents
        assert sorted(id_ for of_replica in held for id_ in of_replica) == sorted(ids)
        assert http.post("/v1/chat/completions", json={"messages": QUESTION, "document": "doc-none"}).status_code == 404


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model is missing"),
        ({"model": "m", "replicas": "2", "disk": "d"}, "disk = .*: belongs to one engine"),
        ({"model": "m", "replicas": "0"}, "--replicas.*greater than or equal to 1"),
        ({"model": "m", "port": "80"}, "No such option: --port"),
        ({"model": "m", "api_key": ""}, "--api-key"),
        ({"model": "m"}, "TCA_JAX_API_KEY: must not be blank"),
    ],
)
def test_options_that_are_not_allowed_are_named(monkeypatch, options, message):
    from tca_jax.serve.ray import app

    monkeypatch.setenv("TCA_JAX_API_KEY", " " if list(options) == ["model"] else "key")
    with pytest.raises(UserError, match=message):
        app(options)
