"""The demonstration that `make run` ends with: one streamed chat, and what moved for it."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
from rich.console import Console

from cluster.status import ClusterStatus, LastRequest

_TIMEOUT_S = 120.0
_STATUS_WAIT_S = 5.0
_STATUS_RETRY_S = 0.2
_MAX_TOKENS = 96

# Long enough that computing it is worth a worker of its own.
_NOTES = """\
A language model answers in two phases. In the first one, called prefill, it reads the whole prompt at once and \
computes keys and values for every token of it, in every layer. This keeps the arithmetic units busy: thousands of \
tokens go through the same weights together. In the second one, called decode, it writes the answer, one token \
after the other. Each step needs all the weights again, and all the keys and values so far, for a single new \
token, so memory bandwidth decides how fast it is. When one engine does both, a long prompt that arrives holds up \
everybody who is in the middle of an answer: their text stops for as long as the prompt takes, and then goes on. \
Cutting the prompt into chunks makes each pause shorter, but there are more of them, and the new request waits \
longer for its first word. Separate pools take the other way. Prefill workers do nothing but read prompts, decode \
workers do nothing but write answers, and each pool is sized and tuned for its own work. The price is that keys \
and values have to move from one worker to the other. They are kept in blocks of a fixed number of tokens, and \
while the prefill worker is still busy with a later chunk, the blocks of the earlier ones are already on their \
way. The first word of the answer comes from the prefill worker, so it does not wait for the move. By the time the \
decode worker has the last block, it goes on with the second word and computes nothing twice."""
_QUESTION = "In two or three sentences: why do separate pools make the text come out more steadily?"


class DemoError(Exception):
    """The demonstration got no answer; the text says what came instead."""


async def run_demo(url: str, model: str, api_key: str, console: Console, certificate: str | None = None) -> None:
    """Streams one chat to the terminal, then says what it cost. Raises `DemoError`.

    `certificate`: file with the server's own one, which is trusted whoever signed it.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    console.print(
        f"\n[bold]> {_QUESTION}[/bold] [dim](with {len(_NOTES.split())} words of notes before it)[/dim]", soft_wrap=True
    )
    try:
        connector = aiohttp.TCPConnector(ssl=_trusting(certificate) if certificate else True)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
            sent_s = time.monotonic()
            first_s: float | None = None
            async for text in _stream_chat(session, url, model):
                first_s = first_s or time.monotonic() - sent_s
                console.out(text, end="", highlight=False)
            console.print()
            last = await _last_request(session, url)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise DemoError(f"no answer from {url}: {error or type(error).__name__}") from error
    console.print(describe(first_s, last), style="green", highlight=False, soft_wrap=True)


def _trusting(certificate: str) -> ssl.SSLContext:
    """For calls to this machine's own server, whose certificate is for the name that others call it by."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def describe(first_s: float | None, last: LastRequest | None) -> str:
    """One line about the request: what the client saw, and what moved between the workers."""
    parts = [f"TTFT {first_s:.2f} s" if first_s is not None else "no text came"]
    if last is None:
        return f"{parts[0]} · answered by the decode worker alone"
    parts.append(f"prompt {last.prompt_tokens:,} tokens")
    if last.handover_s is not None:
        parts.append(f"hand-off {last.handover_s * 1000:.1f} ms after the prefill's end")
    if last.bytes_moved is not None:
        parts.append(f"moved {last.bytes_moved / 1e6:.1f} MB")
    if last.link:
        parts.append(f"link {last.link}")
    return " · ".join(parts)


async def _stream_chat(session: aiohttp.ClientSession, url: str, model: str) -> AsyncIterator[str]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{_NOTES}\n\n{_QUESTION}"}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise DemoError(f"{url}/v1/chat/completions answered {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise DemoError(f"the stream ended with an error: {event['error']}")
            for choice in event["choices"]:
                if content := choice["delta"].get("content"):
                    yield content


async def _last_request(session: aiohttp.ClientSession, url: str) -> LastRequest | None:
    """What the proxy says about the request, as soon as it knows how its hand-over went."""
    deadline_s = time.monotonic() + _STATUS_WAIT_S
    while True:
        async with session.get(f"{url}/twinpool/status") as response:
            last = msgspec.json.decode(await response.read(), type=ClusterStatus).last_request
        if last is None or last.handover_s is not None or time.monotonic() > deadline_s:
            return last
        await asyncio.sleep(_STATUS_RETRY_S)


SERVING = "Serving "
"""What the line with the URL begins with; `twinpool up` waits for it."""


def invitation(url: str, model: str, api_key: str) -> str:
    """How to talk to the cluster: the URL, a curl line and a Python line."""
    auth = ' -H "Authorization: Bearer $API_KEY"' if api_key else ""
    key = 'os.environ["API_KEY"]' if api_key else '"none"'
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    imports = "import openai, os" if api_key else "import openai"
    python = (
        f'{imports}; c = openai.OpenAI(base_url="{url}/v1", api_key={key}); print(c.chat.completions.create('
        f'model="{model}", messages=[{{"role": "user", "content": "Hello!"}}]).choices[0].message.content)'
    )
    return f"""
{SERVING}{model} at {url}/v1 (Ctrl-C stops)

  curl {url}/v1/chat/completions{auth} -H 'Content-Type: application/json' -d '{body}'

  python -c '{python}'

  twinpool status --url {url}"""
