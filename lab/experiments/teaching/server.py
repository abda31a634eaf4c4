"""A server around one of the teaching ways: `python -m lab.experiments.teaching.server WAY MODEL PORT`.

It knows streamed completions of token ids, which is what the load generator sends.
"""

import asyncio
import json
import queue
import sys
import threading
from typing import Any, cast, get_args

import msgspec
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.experiments.arms import SERVED_NAME
from lab.experiments.teaching.steps import Job, Steps, Way, work


class TeachingServer:
    """One model, one thread that computes."""

    def __init__(self, way: Way, model_path: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._steps = Steps(num_waiting=self._jobs.qsize)
        self._failure = ""
        self._thread = threading.Thread(target=self._work, args=(way, model), name="teaching", daemon=True)
        self._thread.start()

    def _work(self, way: Way, model: Any) -> None:
        try:
            work(way, model, self._jobs, self._steps)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/steps", self._shapes)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        alive = self._thread.is_alive()
        return web.Response(status=200 if alive else 503, text="" if alive else f"it cannot compute: {self._failure}")

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": SERVED_NAME, "object": "model"}]})

    async def _shapes(self, _request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._steps.shapes), content_type="application/json")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, max_tokens = body.get("prompt"), body.get("max_tokens", 16)
        if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
            message = "this server completes a list of token ids (`prompt`) and nothing else"
            return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=400)
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        gone = threading.Event()

        def emit(token: int | None) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, token)

        self._jobs.put(Job(prompt, max_tokens, emit, gone.is_set))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        count = 0
        try:
            while (token := await tokens.get()) is not None:
                if not answer.prepared:
                    await answer.prepare(request)
                count += 1
                choice = {"index": 0, "text": self._tokenizer.decode([token]), "token_ids": [token]}
                choice["finish_reason"] = "length" if count == max_tokens else None
                await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        finally:
            gone.set()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
        await answer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return answer


def main() -> None:
    """Serves on the loopback interface until it is ended."""
    if len(sys.argv) != 4 or sys.argv[1] not in get_args(Way):
        sys.exit(f"usage: python -m lab.experiments.teaching.server {'|'.join(get_args(Way))} MODEL PORT")
    server = TeachingServer(cast(Way, sys.argv[1]), sys.argv[2])
    web.run_app(server.app(), host="127.0.0.1", port=int(sys.argv[3]), print=None)


if __name__ == "__main__":
    main()
