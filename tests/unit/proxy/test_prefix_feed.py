"""What the proxy makes of what workers tell of their caches."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from cluster.messages import PROTOCOL_VERSION, CacheEvents, EngineFacts, WorkerHello
from proxy.prefixes.prefix_feed import ASK_AGAIN_AFTER_S, PrefixFeed
from proxy.prefixes.prefix_metrics import PrefixMetrics
from proxy.scheduling.prompt_hashes import PromptHashes
from proxy.workers.roster import Worker

FACTS = EngineFacts("m", 100, 2, 50, 8, 512, 1, "bfloat16", ["generate"], prefix_events=True)
HELLO = WorkerHello(PROTOCOL_VERSION, "prefill-0", "prefill", "epoch", 0, 1, "here", FACTS, [], "f", {})
WORKER = Worker(HELLO, b"identity", 0, 0.0)
PROMPT = PromptHashes([1, 2, 3, 4, 5])
FIRST, SECOND = PROMPT.of_size(2)
ALL = CacheEvents("epoch", 0, [FIRST], [], cleared=True)


class Feed(PrefixFeed):
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        super().__init__(PrefixMetrics(self.registry))
        self.now_s = 100.0

    def hear(self, *messages: CacheEvents) -> list[bool]:
        return [self.take(WORKER, message, self.now_s) for message in messages]

    @property
    def cached_tokens(self) -> int:
        return self.index.cached_tokens(PROMPT).get("prefill-0", 0)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"twinpool_{name}", labels)


@pytest.fixture
def feed() -> Feed:
    return Feed()


def test_a_worker_is_unknown_until_it_has_told_everything(feed: Feed) -> None:
    assert feed.state(WORKER) == "unknown"
    assert feed.hear(ALL, CacheEvents("epoch", 1, [SECOND], [])) == [False, False]
    assert feed.state(WORKER) == "known"
    assert feed.cached_tokens == 4
    assert feed.metric("prefix_index_blocks") == 2
    assert feed.metric("prefix_events_total", worker="prefill-0", kind="stored") == 2


def test_a_worker_that_tells_nothing_is_off_and_not_known_to_be_empty(feed: Feed) -> None:
    facts = msgspec.structs.replace(FACTS, prefix_events=False)
    worker = Worker(msgspec.structs.replace(HELLO, engine=facts), b"identity", 0, 0.0)
    assert feed.state(worker) == "off"
    assert not feed.index.is_known("prefill-0")


def test_a_missed_message_makes_it_unknown_and_everything_is_asked_for_once(feed: Feed) -> None:
    gap = CacheEvents("epoch", 2, [SECOND], [])
    assert feed.hear(ALL, gap, msgspec.structs.replace(gap, seq=3)) == [False, True, False]
    assert feed.state(WORKER) == "unknown"
    assert feed.cached_tokens == 0
    assert feed.metric("prefix_events_unknown", worker="prefill-0") == 1
    feed.now_s += ASK_AGAIN_AFTER_S
    assert feed.hear(msgspec.structs.replace(gap, seq=4)) == [True]
    assert feed.hear(ALL) == [False]
    assert feed.state(WORKER) == "known"
    assert feed.cached_tokens == 2
    assert feed.metric("prefix_events_unknown", worker="prefill-0") == 0


def test_news_of_an_earlier_worker_count_no_more_when_it_is_gone(feed: Feed) -> None:
    feed.hear(ALL)
    feed.forget("prefill-0")
    assert feed.metric("prefix_index_blocks") == 0
    assert feed.hear(CacheEvents("epoch", 1, [SECOND], [])) == [True]
    assert feed.cached_tokens == 0


def test_what_a_worker_missed_of_its_engine_is_unknown_here_too(feed: Feed) -> None:
    feed.hear(ALL, CacheEvents("epoch", 1, [FIRST], [], cleared=True, known=False, oddities={"missed": 1, "x" * 9: 3}))
    assert feed.state(WORKER) == "unknown"
    assert feed.cached_tokens == 2, "what is listed is there, more may be"
    assert feed.metric("prefix_events_total", worker="prefill-0", kind="missed") == 1
    assert feed.metric("prefix_events_total", worker="prefill-0", kind="x" * 9) is None
    feed.hear(CacheEvents("epoch", 2, [], [], cleared=True))
    assert feed.state(WORKER) == "known"
