"""A server for tests, in a thread of theirs."""

import socket
import threading
import time

import httpx
import openai
import uvicorn
from tiny import random_prompt

from tca_jax.programs import Compiled, Program
from tca_jax.serve.server import Server, Settings


class Watched(Program):
    """A program, and what is called before it compiles and, with its arguments, before it runs."""

    def __init__(self, program, compiling=lambda: None, running=lambda *args: None):
        self.program, self.compiling, self.running = program, compiling, running

    def start(self, *args, **static):
        self.compiling()
        return WatchedCompiled(self.program.start(*args, **static), self.running)


class WatchedCompiled(Compiled):
    def __init__(self, compiled, running):
        self.__dict__.update(vars(compiled), running=running)

    def __call__(self, *args):
        self.running(*args)
        return super().__call__(*args)


KEY = "a-key"
MODEL = "tiny"
QUESTION = [{"role": "user", "content": "Who jumps?"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def question(number):
    """Token ids of one of many questions of few lengths."""
    return random_prompt(100 + number, 1 + 5 * number % 8)


class Running:
    """A server on a free port of this machine, in a thread, as `tca-jax serve` runs it."""

    def __init__(self, engine, **settings):
        self.server = Server(engine, Settings(MODEL, **settings))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(self.server.app, log_level="warning", lifespan="off", ws="none")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def __enter__(self):
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.uvicorn.should_exit = True
        self.thread.join(20)
        self.server.close()

    def client(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def http(self, key=KEY):
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
