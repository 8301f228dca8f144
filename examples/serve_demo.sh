#!/bin/sh
# The shipped model on a CPU: a document is uploaded, and three questions about it are asked at once.
# Usage: serve_demo.sh TCA_JAX PYTHON
set -eu
tca_jax=$1 python=$2
port=${PORT:-8123}
url=http://127.0.0.1:$port
folder=$(mktemp -d)
JAX_PLATFORMS=cpu "$tca_jax" serve recall-tiny --profile shipped --port "$port" --max-rows 4 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" || true; rm -rf "$folder"' EXIT
until curl -sf "$url/health" >"$folder/health"; do
    kill -0 "$server"
    sleep 0.5
done

"$python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import numpy as np

from tca_jax.lab.recall import build_document

document = build_document(np.random.default_rng(0), 6000, ("digits", "words", "hex"))
Path(sys.argv[1], "document.txt").write_text(document.text)
Path(sys.argv[1], "questions.txt").write_text("".join(f"{question.text}\n" for question in document.questions))
PYTHON

field() { # of a JSON object on standard input
    "$python" -c "import json, sys; print(json.load(sys.stdin)$1)"
}

document=$(curl -sS --fail-with-body "$url/v1/documents" -H "Content-Type: text/plain" \
    --data-binary @"$folder/document.txt" | field '["id"]')
echo "uploaded $(wc -c <"$folder/document.txt") bytes as $document; the first questions wait while programs compile"

asked=
number=0
while read -r question; do
    number=$((number + 1))
    curl -sS --fail-with-body "$url/v1/chat/completions" -H "Content-Type: application/json" \
        -d "{\"document\": \"$document\", \"temperature\": 0, \"max_tokens\": 256,
             \"messages\": [{\"role\": \"user\", \"content\": \"$question\"}]}" >"$folder/answer-$number" &
    asked="$asked $!"
done <"$folder/questions.txt"
for each in $asked; do wait "$each"; done

number=0
while read -r question; do
    number=$((number + 1))
    cut=
    [ "$(field '["choices"][0]["finish_reason"]' <"$folder/answer-$number")" = stop ] || cut=" [cut at 256 tokens]"
    echo "$question -> $(field '["choices"][0]["message"]["content"]' <"$folder/answer-$number")$cut"
done <"$folder/questions.txt"
