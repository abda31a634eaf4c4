"""Prometheus metrics of the proxy, prefixed `twinpool_`. vLLM's own `/metrics` shows them beside its own."""

from collections.abc import Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from cluster.config import ROLES
from cluster.messages import HandoverClosed, WorkerLoad
from proxy.prefixes.prefix_metrics import PrefixMetrics, forget_worker
from proxy.scheduling.place import REASONS
from proxy.slo.metrics import SloMetrics
from proxy.trips.lifetime import FirstTokenParts, SecondTokenParts

STAGES = ("waiting", "prefilling", "handing_over", "decoding", "local")
QUEUES = ("waiting", "prefilling", "handing_over")
"""Where a request may wait for others."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BYTES = (0.0, *(float(1 << power) for power in range(14, 37, 2)))
"""16 KiB to 64 GiB, and nothing at all."""


class ProxyMetrics:
    """All of them. One per registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"twinpool_{name}", help_, labels, registry=registry)

        def gauge(name: str, help_: str, *labels: str) -> Gauge:
            # With several API servers, each shows what this process wrote last.
            return Gauge(f"twinpool_{name}", help_, labels, registry=registry, multiprocess_mode="mostrecent")

        def histogram(name: str, help_: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(f"twinpool_{name}", help_, labels, registry=registry, buckets=buckets)

        self.remote_prefill_tokens = counter("remote_prefill_tokens", "Prompt tokens of requests prefilled remotely.")
        self.local_prefill_tokens = counter("local_prefill_tokens", "Prompt tokens of requests served by one worker.")
        self.decisions = counter("decisions", "Placements, by what decided them.", "placement", "reason")
        self.replacements = counter("replacements", "Requests started over after a worker was lost.")
        self.migrations = counter(
            "migrations", "Answers continued at other workers after one was lost, by the kind of loss.", "cause"
        )
        self.failed = counter("requests_failed", "Requests answered with an error of the cluster.", "status", "cause")
        self.rate_limited = counter(
            "rate_limited", "Requests over a limit of server.rate_limits, by the name of the limits.", "limits", "limit"
        )
        self.handovers = counter("handovers", "Hand-overs ended, by outcome.", "outcome")
        self.handover_failures = counter(
            "handover_failures", "Hand-overs that ended in recompute, by the kind of failure that rank 0 saw.", "kind"
        )
        self.handover_seconds = histogram(
            "handover_seconds", "Seconds from the end of the prefill until rank 0 of the decode worker held its blocks."
        )
        self.handover_wait_seconds = histogram(
            "handover_wait_seconds", "Seconds from a decode worker's attach to the end of the prefill."
        )
        self.handover_copy_seconds = histogram(
            "handover_copy_seconds", "Seconds that rank 0 spent copying the blocks of a hand-over.", "link"
        )
        self.handover_bytes = counter(
            "handover_bytes", "Bytes of KV blocks moved, the share of rank 0 (all ranks: worker_bytes_in).", "link"
        )
        self.handover_bytes_left = histogram(
            "handover_bytes_left",
            "Bytes that rank 0 still had to copy when the prefill of a hand-over ended.",
            buckets=BYTES,
        )
        self.handover_gap_seconds = histogram(
            "handover_gap_seconds",
            "Hand-off gap: seconds from token 1, of a prefill worker, to token 2, of a decode worker, at the proxy.",
        )
        self.ttft_seconds = histogram("ttft_seconds", "Seconds to the first token at the proxy.")
        self.ttft_part_seconds = histogram("ttft_part_seconds", "Its parts in seconds, which add up to it.", "part")
        self.second_token_part_seconds = histogram(
            "second_token_part_seconds", "Parts in seconds of handover_gap_seconds, which add up to it.", "part"
        )
        self.second_token_seconds = histogram(
            "second_token_seconds", "Seconds from the first to the second output of a request, handed over or local."
        )
        self.worker_losses = counter("worker_losses", "Workers given up.", "kind")
        self.worker_restarts = counter("worker_restarts", "New processes of workers that had joined before.", "worker")
        self.bad_frames = counter("bad_frames", "Frames from workers that were dropped.")
        self.api_server_losses = counter("api_server_losses", "API server processes given up.")
        self.api_server_bad_frames = counter("api_server_bad_frames", "Frames from API servers that were dropped.")
        self.illegal_transitions = counter("illegal_transitions", "Events that no request should have met.")
        self.workers_alive = gauge("workers_alive", "Living workers, also those that drain.", "role")
        self.workers_draining = gauge("workers_draining", "Living workers that take no new requests.", "role")
        self.workers_simulated = gauge(
            "workers_simulated", "Living workers without an engine: if not 0, times come from a cost model."
        )
        self.requests_open = gauge("requests_open", "Requests in the proxy.", "stage")
        self.queue_age_seconds = gauge(
            "queue_age_seconds", "Seconds that the request has waited which has been longest in this queue.", "stage"
        )
        self.kv_blocks = gauge("kv_blocks", "KV blocks of a worker; free + used + leased = total.", "worker", "state")
        self.worker_requests = gauge("worker_requests", "Requests in a worker's engine.", "worker", "state")
        self.transfers_open = gauge(
            "transfers_open", "Transfers open at a worker, on the rank that has the most.", "worker", "side"
        )
        self.leases = gauge(
            "leases", "Leases of a worker's open exports: one per transfer and rank.", "worker", "state"
        )
        self.worker_bytes_in = gauge(
            "worker_bytes_in", "Bytes all ranks of a worker have fetched since its start.", "worker", "link"
        )
        self.worker_copies_in = gauge(
            "worker_copies_in",
            "Messages or reads in which worker_bytes_in came: bytes per copy say whether a link moves large pieces.",
            "worker", "link",
        )  # fmt: skip
        self.worker_without_progress = gauge(
            "worker_without_progress_seconds",
            "Seconds for which a worker that has work has got nowhere; /health fails from liveness.stalled_after_s on.",
            "worker",
        )
        self.expected_output_tokens = gauge(
            "expected_output_tokens",
            "Tokens kept free for an answer without a shorter max_tokens, from how long answers were.",
        )
        self.worker_copy_seconds = gauge(
            "worker_copy_seconds", "Seconds they spent on that, added up over ranks.", "worker", "link"
        )
        self.worker_bytes_out = gauge(
            "worker_bytes_out",
            "Bytes fetched from all ranks of a worker since its start, as told by those who released them.",
            "worker", "link",
        )  # fmt: skip
        self.worker_copy_out_seconds = gauge(
            "worker_copy_out_seconds", "Seconds these spent on that, added up over ranks.", "worker", "link"
        )
        self.worker_gigabytes_per_second = gauge(
            "worker_gigabytes_per_second",
            "1e9 bytes per second of copying, a rank's mean, between the last two reports of a worker that moved any.",
            "worker", "link", "direction",
        )  # fmt: skip
        self.workers_wanted = gauge("workers_wanted", "Workers that the autoscaler wants, by role.", "role")
        self.worker_tokens_computed = gauge(
            "worker_tokens_computed", "Prompt and output tokens that a worker computed since its start.", "worker"
        )
        self.transfer_failures = gauge(
            "transfer_failures", "Transfers that ranks of a worker saw fail since its start.", "worker", "kind"
        )
        self.worker_bad_frames = gauge(
            "worker_bad_frames", "Frames that a worker's host and ranks dropped since its start.", "worker"
        )
        self.connections_refused = gauge(
            "connections_refused",
            "Connections that the ranks of a worker, or `proxy`, turned away since its start, by reason.",
            "worker", "reason",
        )  # fmt: skip
        self.prefixes = PrefixMetrics(registry)
        self.slo = SloMetrics(registry)
        self._paced: set[str] = set()  # workers of the last `observe_pace`
        self._copied: dict[tuple[str, str, str], tuple[int, float]] = {}  # bytes and seconds at the last report
        for role in ROLES:
            self.workers_alive.labels(role).set(0)

    def observe_decision(self, placement: str, reason: str) -> None:
        """Counts a placement."""
        self.decisions.labels(placement, reason if reason in REASONS else "other").inc()

    def observe_first_token(self, parts: FirstTokenParts) -> None:
        """Notes where the time to the first token went."""
        self.ttft_seconds.observe(parts.total_s)
        for part, seconds in parts.by_name().items():
            self.ttft_part_seconds.labels(part).observe(seconds)

    def observe_handover_gap(self, gap_s: float, parts: SecondTokenParts | None) -> None:
        """Notes what a hand-over cost between token 1 and token 2."""
        self.handover_gap_seconds.observe(gap_s)
        if parts is not None:
            for part in ("hand_off", "decode_queue", "decode_step"):
                self.second_token_part_seconds.labels(part).observe(getattr(parts, part))

    def observe_handover(self, closed: HandoverClosed) -> None:
        """Notes an ended hand-over."""
        self.handovers.labels(closed.outcome).inc()
        if closed.outcome == "recompute":
            self.handover_failures.labels(closed.failure_kind or "unknown").inc()
        if closed.outcome == "loaded":
            self.handover_seconds.observe(max(0.0, closed.done_to_loaded_s))
            self.handover_wait_seconds.observe(max(0.0, closed.attached_to_done_s))
            self.handover_bytes_left.observe(max(0, closed.bytes_left_at_done))
        if closed.link:
            self.handover_copy_seconds.labels(closed.link).observe(max(0.0, closed.copy_s))
            self.handover_bytes.labels(closed.link).inc(max(0, closed.bytes_moved))

    def observe_load(self, worker_id: str, load: WorkerLoad) -> None:
        """Shows a worker's report."""
        for state, blocks in (
            ("total", load.blocks_total),
            ("free", load.blocks_free),
            ("used", load.blocks_used),
            ("leased", load.blocks_leased),
        ):
            self.kv_blocks.labels(worker_id, state).set(blocks)
        self.worker_requests.labels(worker_id, "running").set(load.num_running)
        self.worker_requests.labels(worker_id, "waiting").set(load.num_waiting)
        self.transfers_open.labels(worker_id, "export").set(load.exports_open)
        self.transfers_open.labels(worker_id, "import").set(load.imports_open)
        self.worker_bad_frames.labels(worker_id).set(load.bad_frames)
        self.worker_tokens_computed.labels(worker_id).set(load.tokens_computed)
        for link, num_copies in load.copies_in.items():
            self.worker_copies_in.labels(worker_id, link).set(num_copies)
        for state, count in load.leases.items():
            self.leases.labels(worker_id, state).set(count)
        self._observe_copies(worker_id, "in", load.bytes_in, load.copy_s)
        self._observe_copies(worker_id, "out", load.bytes_out, load.copy_out_s)
        for kind, count in load.transfer_failures.items():
            self.transfer_failures.labels(worker_id, kind).set(count)

    def _observe_copies(
        self, worker_id: str, direction: str, bytes_: Mapping[str, int], copy_s: Mapping[str, float]
    ) -> None:
        is_in = direction == "in"
        moved = self.worker_bytes_in if is_in else self.worker_bytes_out
        spent = self.worker_copy_seconds if is_in else self.worker_copy_out_seconds
        for link, num_bytes in bytes_.items():
            seconds = copy_s.get(link, 0.0)
            moved.labels(worker_id, link).set(num_bytes)
            spent.labels(worker_id, link).set(seconds)
            before = self._copied.get((worker_id, link, direction), (0, 0.0))
            if num_bytes < before[0]:
                before = (0, 0.0)  # the worker was restarted
            if num_bytes > before[0] and seconds > before[1]:
                rate = (num_bytes - before[0]) / (seconds - before[1]) / 1e9
                self.worker_gigabytes_per_second.labels(worker_id, link, direction).set(rate)
                self._copied[worker_id, link, direction] = (num_bytes, seconds)

    def forget_worker(self, worker_id: str) -> None:
        """A worker was removed: nothing is shown of it any more."""
        self.prefixes.forget_worker(worker_id)
        self._paced.discard(worker_id)
        self._copied = {key: copied for key, copied in self._copied.items() if key[0] != worker_id}
        for metric in vars(self).values():
            if isinstance(metric, Counter | Gauge | Histogram):
                forget_worker(metric, worker_id)

    def observe_rate_limited(self, limits: str, limit: str) -> None:
        """Counts a request over a limit; `limits`: their name, never a key."""
        self.rate_limited.labels(limits, limit).inc()

    def observe_refused(self, refused: Mapping[str, Mapping[str, int]]) -> None:
        """Connections that were turned away, by listener and reason."""
        for listener, reasons in refused.items():
            for reason, count in reasons.items():
                self.connections_refused.labels(listener, reason).set(count)

    def observe_stages(self, ages_s: Sequence[tuple[str, float]]) -> None:
        """The stage of each request in the proxy, and for how long nothing has happened to it there."""
        stages = [stage for stage, _ in ages_s]
        for stage in STAGES:
            self.requests_open.labels(stage).set(stages.count(stage))
        for stage in QUEUES:
            self.queue_age_seconds.labels(stage).set(max((age_s for s, age_s in ages_s if s == stage), default=0.0))

    def observe_alive(self, alive: Mapping[str, int], draining: Sequence[str] = (), num_simulated: int = 0) -> None:
        """Living workers by role, the role of each that drains, and how many have no engine."""
        self.workers_simulated.set(num_simulated)
        for role, count in alive.items():
            self.workers_alive.labels(role).set(count)
            self.workers_draining.labels(role).set(draining.count(role))

    def observe_pace(self, without_progress_s: Mapping[str, float], expected_output_tokens: int) -> None:
        """How long each worker that has work has got nowhere, and how long an answer is expected to get."""
        for worker_id in self._paced - without_progress_s.keys():
            self.worker_without_progress.labels(worker_id).set(0)
        self._paced = set(without_progress_s)
        for worker_id, seconds in without_progress_s.items():
            self.worker_without_progress.labels(worker_id).set(seconds)
        self.expected_output_tokens.set(expected_output_tokens)

    def unregister(self) -> None:
        """Takes them out of the registry, for the next proxy of this process."""
        self.slo.unregister()
        self.prefixes.unregister()
        for metric in vars(self).values():
            if isinstance(metric, Counter | Gauge | Histogram):
                self._registry.unregister(metric)
