"""An HTTP server of which a test says what it answers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec


class Answering(BaseHTTPRequestHandler):
    """Answers with JSON, and logs nothing."""

    def answer(self, code: int, body: Any) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(msgspec.json.encode(body))

    def answer_in_turn(self, bodies: list[Any]) -> None:
        """With the next one; it stays with the last."""
        self.answer(200, bodies.pop(0) if len(bodies) > 1 else bodies[0])

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(server: HTTPServer) -> Iterator[None]:
    """While it answers, in a thread of its own."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield
        server.shutdown()
        thread.join()
