"""A small HTTP server that answers as vLLM does: completions with the prompt's logprobs, by token id.

Of every position but the first (null) it sends the K best tokens and, on top, the prompt's own where it is not among
them; minus infinity as -9999. ``change`` may alter an answer before it goes out, ``status`` what comes with it.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Scores = Callable[[list[int]], list[list[float]]]  # ids [T] to logprobs [T, V], row q of the token behind q
Change = Callable[[dict[str, Any], dict[str, Any]], Any]  # request, answer: the answer to send


class ServedTeacher:
    """What the server knows and what it was asked. ``encode`` is its tokenizer, for prompts of text."""

    def __init__(self, scores: Scores, encode: Callable[[str], list[int]]) -> None:
        self.scores, self.encode = scores, encode
        self.teachers: list[dict[str, Any]] = []
        self.change: Change = lambda request, answer: answer
        self.statuses: list[int] = []  # of the next answers; 200 behind them
        self.key: str | None = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]
        ids: list[int] = self.encode(prompt) if isinstance(prompt, str) else prompt
        logprobs = self.scores(ids)
        positions = [
            None,
            *(_position(logprobs[q - 1], ids[q], request["prompt_logprobs"]) for q in range(1, len(ids))),
        ]
        choice = {"index": 0, "text": "", "prompt_logprobs": positions, "finish_reason": "length"}
        if request.get("return_token_ids"):
            choice["prompt_token_ids"] = ids
        return {"id": "cmpl-1", "object": "text_completion", "model": request["model"], "choices": [choice]}


def _position(logprobs: list[float], own: int, top_k: int) -> dict[str, dict[str, Any]]:
    best = sorted(range(len(logprobs)), key=lambda number: -logprobs[number])[:top_k]
    ranks = {own: sum(other >= logprobs[own] for other in logprobs)} | {number: at for at, number in enumerate(best, 1)}
    return {
        str(number): {
            "logprob": max(logprobs[number], -9999.0),
            "rank": rank,
            "decoded_token": f"<{number}>",
        }
        for number, rank in ranks.items()
    }


@contextmanager
def serving(teacher: ServedTeacher) -> Iterator[ServedTeacher]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """The tests' output is not the place for it."""

        def do_GET(self) -> None:
            self._answer({"teachers": teacher.teachers})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            teacher.requests.append(request)
            self._answer(None, request)

        def _answer(self, answer: Any, request: dict[str, Any] | None = None) -> None:
            teacher.headers.append(dict(self.headers))
            status = teacher.statuses.pop(0) if teacher.statuses else 200
            sent = self.headers.get("Authorization")
            if teacher.key is not None and sent != f"Bearer {teacher.key}":
                status, answer = 401, {"error": f"no such key: {sent}"}
            elif status != 200:
                answer = {"error": f"status {status} for {sent}"}
            elif request is not None:
                answer = teacher.change(request, teacher.answer(request))
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode("utf-8")
            self.send_response(status)
            if status in (301, 302, 307):
                self.send_header("Location", "http://localhost:9/elsewhere")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    teacher.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield teacher
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def log_softmax(logits: list[float]) -> list[float]:
    """In float64, whatever comes in."""
    top = max(logits)
    total = math.log(math.fsum(math.exp(each - top) for each in logits))
    return [each - top - total for each in logits]
