"""Where requests come from, and where what happens to them goes: vLLM's front end of one API server process."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class FrontEnd(Protocol):
    """One API server process, as the dispatcher sees it. Neither call waits."""

    def take(self, outputs: Any) -> None:
        """`EngineCoreOutputs` of one engine step, for requests of this front end only."""

    def fail(self, request_id: str, status: int, message: str, retry_after_s: float | None) -> object:
        """A request has failed, and its siblings with it; they are not told of one by one.

        `retry_after_s`: when it is worth trying again, if that is known.
        """


class LocalFrontEnd:
    """The API server of this very process; its core client reads `outputs`.

    `on_failure(request_id, status, message, retry_after_s)` tells it that a request failed.
    """

    def __init__(self, on_failure: Callable[[str, int, str, float | None], object]) -> None:
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        """`EngineCoreOutputs`, or the exception that ends the front end."""
        self.fail = on_failure

    def take(self, outputs: Any) -> None:
        self.outputs.put_nowait(outputs)
