"""A real OpenAI server of vLLM on 127.0.0.1, and clients for it that know nothing of rolltape."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 180.0
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
FLAGS = (
    *("--dtype", "float32"),
    *("--max-model-len", "512"),
    *("--max-num-seqs", "16"),
    *("--max-num-batched-tokens", "256"),
    *("--num-gpu-blocks-override", "12"),
    *("--seed", "7"),
    *("--chat-template", TEMPLATE),
    *("--generation-config", "vllm"),  # no defaults of the model
    "--enforce-eager",
)
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def serving(
    python: str, log: Path, command: Sequence[str], prefix: Sequence[str] = ()
) -> Iterator[int]:
    """A server for as long as the context lasts.

    Args:
        python: interpreter that has vLLM.
        log: file for what it says.
        command: arguments of Python that start a server.
        prefix: what stands in front of it all, for example `rolltape record --`.

    Yields:
        Its port.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    where = ["--host", "127.0.0.1", "--port", str(port)]
    job = [*prefix, python, *command, *FLAGS, *where]
    with log.open("w") as file:
        server = subprocess.Popen(job, stdout=file, stderr=file, env={**os.environ, **ENV})
        try:
            _wait(server, port, log)
            yield port
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                raise


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            if ask(port, "GET", "/health")[0] == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no server: {log.read_text()[-4000:]}")


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """(status, JSON or text) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read().decode()
        kind = response.getheader("Content-Type", "")
        return response.status, json.loads(data) if kind.startswith("application/json") else data
    finally:
        connection.close()


def stream(port: int, path: str, body: Any, most: int | None = None) -> list[Any]:
    """The events of a streamed answer; the client is gone after `most` of them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    events: list[Any] = []
    try:
        text = json.dumps({**body, "stream": True})
        connection.request("POST", path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while (line := response.readline()) and (most is None or len(events) < most):
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                events.append(json.loads(line[6:]))
    finally:
        connection.close()
    return events


# -- what is asked ------------------------------------------------------------------------


def prompts() -> dict[str, list[int]]:
    """Token ids of the prompts by name; the long one is a chunk and a bit, and two KV blocks."""
    rng = random.Random(1)
    sizes = {"a": 20, "b": 33, "c": 47, "d": 61, "long": 300, "stream": 25, "gone": 30, "four": 22}
    return {name: [rng.randrange(2, 4000) for _ in range(n)] for name, n in sizes.items()}


def body(model: Path, prompt: list[int], **how: Any) -> dict[str, Any]:
    """A completion of 20 tokens whose ids and logprobs come back."""
    return {
        "model": str(model),
        "prompt": prompt,
        "temperature": 0.0,
        "max_tokens": 20,
        "logprobs": 1,
        "return_token_ids": True,
        "ignore_eos": True,
        **how,
    }


def complete(port: int, model: Path, prompt: list[int], **how: Any) -> list[dict[str, Any]]:
    """What came back for each sample: `id`, `prompt`, `ids`, `logprobs`, `sample`, `finish`."""
    status, answer = ask(port, "POST", "/v1/completions", body(model, prompt, **how))
    assert status == 200, answer
    return [
        {
            "id": answer["id"],
            "prompt": prompt,
            "ids": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "sample": choice["index"],
            "finish": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]


def streamed(
    port: int, model: Path, prompt: list[int], most: int | None = None, **how: Any
) -> dict[str, Any]:
    """The same of one sample by server-sent events."""
    events = stream(port, "/v1/completions", body(model, prompt, **how), most)
    choices = [event["choices"][0] for event in events if event["choices"]]
    return {
        "id": events[0]["id"],
        "prompt": prompt,
        "ids": [t for choice in choices for t in choice["token_ids"]],
        "logprobs": [x for choice in choices for x in choice["logprobs"]["token_logprobs"]],
        "sample": 0,
        "finish": choices[-1]["finish_reason"],
    }


def chat(port: int, model: Path, text: str) -> dict[str, Any]:
    """The same of a chat."""
    asked = {
        "model": str(model),
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.0,
        "max_tokens": 20,
        "logprobs": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    status, answer = ask(port, "POST", "/v1/chat/completions", asked)
    assert status == 200, answer
    choice = answer["choices"][0]
    return {
        "id": answer["id"],
        "prompt": answer["prompt_token_ids"],
        "ids": choice["token_ids"],
        "logprobs": [part["logprob"] for part in choice["logprobs"]["content"]],
        "sample": 0,
        "finish": choice["finish_reason"],
    }


def greedy(port: int, model: Path) -> dict[str, dict[str, Any]]:
    """Answers that a second run may repeat, some of them asked for at once."""
    given = prompts()
    # the first forward has more than four rows: else oneDNN may end a process that has no AMX yet
    first = complete(port, model, given["long"])[0]
    names = ("a", "b", "c", "d")
    with ThreadPoolExecutor(len(names)) as pool:
        several = list(pool.map(lambda name: complete(port, model, given[name])[0], names))
    return {
        "long": first,
        **dict(zip(names, several, strict=True)),
        "again": complete(port, model, given["long"])[0],
        "stream": streamed(port, model, given["stream"]),
        "chat": chat(port, model, "def read(path):\n    return open(path).read()\n"),
    }
