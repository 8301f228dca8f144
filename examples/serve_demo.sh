#!/bin/sh
# The shipped model on a CPU: a document is uploaded, and three questions about it are asked at once.
# Usage: serve_demo.sh TCA_JAX PYTHON
set -eu
port=${PORT:-8123}
url=http://127.0.0.1:$port
JAX_PLATFORMS=cpu "$1" serve recall-tiny --profile shipped --port "$port" --max-rows 4 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" || true' EXIT
until curl -sf "$url/health" >/dev/null; do
    kill -0 "$server"
    sleep 0.5
done
"$2" - "$url" <<'PYTHON'
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import numpy as np

from tca_jax.lab.recall import build_document


def post(path, text, kind):
    return json.load(urlopen(Request(sys.argv[1] + path, text.encode(), {"Content-Type": kind})))


def ask(question):
    body = {"document": uploaded, "temperature": 0, "max_tokens": 256}
    body["messages"] = [{"role": "user", "content": question.text}]
    (choice,) = post("/v1/chat/completions", json.dumps(body), "application/json")["choices"]
    cut = "" if choice["finish_reason"] == "stop" else " [cut at 256 tokens]"
    return f"{question.text} -> {choice['message']['content']}{cut}"


document = build_document(np.random.default_rng(0), 6000, ("digits", "words", "hex"))
uploaded = post("/v1/documents", document.text, "text/plain")["id"]
print(f"uploaded {len(document.text)} bytes as {uploaded}; the first questions wait while programs compile", flush=True)
with ThreadPoolExecutor() as pool:
    print(*pool.map(ask, document.questions), sep="\n")
PYTHON
