"""What is sent, and what one measurement of it says."""

from dataclasses import dataclass

PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Cell:
    """A closed loop of so many streams; each is followed by the next until all requests are sent."""

    streams: int
    tokens: int
    """Of each completion."""
    requests: int

    @property
    def name(self) -> str:
        """Short, for tables."""
        return f"{self.streams} x {self.tokens}"


CELLS = (Cell(32, 32, 256), Cell(32, 256, 32), Cell(128, 32, 256), Cell(128, 256, 128))


@dataclass(frozen=True)
class Answer:
    """One streamed completion, as its client saw it."""

    ttft_s: float
    tokens: int
    """As the server counts them."""
    events: int
    """Of the stream that carried tokens: a server that is behind puts several into one."""
    prompt_tokens: int


@dataclass(frozen=True)
class Sample:
    """One cell at one arm, once."""

    wall_s: float
    answers: tuple[Answer, ...]
    cpu_s: float
    """Of the process that clients talk to."""
    behind_cpu_s: float = 0.0
    """Of a further API server behind that one."""

    @property
    def tokens(self) -> int:
        """All together."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """From the first request sent until the last answer has ended."""
        return self.tokens / self.wall_s

    @property
    def cpu_ms_per_request(self) -> float:
        """Without what is behind it."""
        return self.cpu_s / len(self.answers) * 1e3
