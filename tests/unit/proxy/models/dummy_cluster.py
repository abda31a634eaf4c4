"""A process that behaves as `twinpool serve` does towards the front: `dummy_cluster.py CONFIG.yaml`.

The first word of the configuration's `model` says what it does: serve, die with a sentence, or never get ready.
"""

import re
import signal
import socketserver
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """Orders to sleep and to wake; the model `insomniac` cannot sleep."""
        self.rfile.read(int(self.headers["Content-Length"]))
        awake = Path(sys.argv[1]).read_text().count("model: insomniac") and self.path == "/twinpool/sleep"
        body = b'{"error": {"message": "a transfer is open", "code": 409}}' if awake else b"{}"
        key = self.headers.get("Authorization") == "Bearer k"
        self.send_response(409 if awake else 200 if key else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    text = Path(sys.argv[1]).read_text()
    what = re.search(r"model: (\S+)", text)
    path = re.search(r"uds: (\S+)", text)
    assert what is not None
    assert path is not None
    if what[1] == "die":
        sys.stdout.write("twinpool: the configuration cannot be used:\n  model: it died. Repair it.\n")
        sys.stdout.write("twinpool: the logs are in /somewhere\n")
        sys.exit(2)
    if what[1] == "hang":
        signal.pause()
    with socketserver.ThreadingUnixStreamServer(path[1], Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
