"""A server of known timing: `python -m lab.load_check.server PORT TOKENS_PER_S`. Light: the standard library alone.

Every `POST` is a stream of as many tokens as it asks for, the first one interval after the request was read.
`GET /sent` tells when each token was written: a list per stream of seconds from the request, in order of their ends.
"""

import asyncio
import json
import sys

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_TOKEN = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}]}\n\n'
_END = b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n'


class Server:
    """Writes tokens on time, and keeps when it did."""

    def __init__(self, tokens_per_s: float) -> None:
        self._interval_s = 1 / tokens_per_s
        self._sent: list[list[float]] = []

    async def serve(self, port: int) -> None:
        """Until it is ended."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", port, backlog=1024)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                body = json.dumps(self._sent if b"/sent" in head else []).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            else:
                await self._stream(head, reader, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()

    async def _stream(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        num_tokens = json.loads(await reader.readexactly(int(length.partition(b":")[2])))["max_tokens"]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        sent: list[float] = []
        writer.write(_HEAD)
        for number in range(1, num_tokens + 1):
            await asyncio.sleep(began_s + number * self._interval_s - loop.time())
            writer.write(_TOKEN)
            sent.append(loop.time() - began_s)
        writer.write(_END % num_tokens)
        self._sent.append(sent)


if __name__ == "__main__":
    asyncio.run(Server(float(sys.argv[2])).serve(int(sys.argv[1])))
