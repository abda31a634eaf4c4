"""vLLM's real scheduler with our order, driven step by step without a model."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from prefill.vllm_chunk_scheduler import AsyncChunkScheduler, ChunkScheduler

BLOCK = 16
BUDGET = 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def make_config(directory: Path, **scheduling: Any) -> VllmConfig:
    (directory / "config.json").write_text(json.dumps(MODEL))
    settings = {name: scheduling.pop(name) for name in ("chunk_order", "itl_s") if name in scheduling}
    model = ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192)
    return VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            **{"max_num_seqs": 16, "max_num_batched_tokens": BUDGET, **scheduling},
            max_model_len=8192,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="TwinpoolConnector",
            kv_connector_module_path="kvtransfer.vllm_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings,
        ),
        device_config=DeviceConfig("cpu"),
    )


@dataclass
class FakeEngine:
    """Its model samples token 7 whenever a prompt ends or a request decodes."""

    scheduler: ChunkScheduler
    num_made: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """Output tokens by request id."""

    @classmethod
    def start(cls, config: VllmConfig, *, asynchronous: bool = False, num_blocks: int = 1000) -> "FakeEngine":
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        init_none_hash(sha256)
        scheduler = (AsyncChunkScheduler if asynchronous else ChunkScheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        return cls(scheduler)

    @property
    def free_blocks(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def add(
        self,
        request_id: str,
        num_tokens: int,
        ttft_s: float | None = None,
        *,
        priority: int = 0,
        max_tokens: int = 1,
        transfer: dict[str, Any] | None = None,
        prompt: list[int] | None = None,
        urgency: Any = None,
    ) -> Request:
        """Prompts share nothing unless `prompt` is given."""
        self.num_made += 1
        said = urgency if urgency is not None else {"ttft_left_s": ttft_s, "priority": priority}
        extra_args = {"twinpool": said, **({"kv_transfer_params": transfer} if transfer else {})}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args)
        params.update_from_generation_config({}, None)
        made = Request(
            request_id,
            prompt or [self.num_made % 90 + 1] * num_tokens,
            params,
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(made)
        return made

    def step(self) -> dict[str, int]:
        """One step; tokens by request id."""
        output = self.scheduler.schedule()
        self.answer(output)
        return dict(output.num_scheduled_tokens)

    def answer(self, output: SchedulerOutput, connector_output: KVConnectorOutput | None = None) -> None:
        """The model has computed a step."""
        ids = list(output.num_scheduled_tokens)
        samples = [[] if self._is_in_prompt(request_id, output) else [7] for request_id in ids]
        for request_id, sampled in zip(ids, samples, strict=True):
            self.tokens[request_id] = self.tokens.get(request_id, 0) + len(sampled)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
                sampled_token_ids=samples,
                kv_connector_output=connector_output,
            ),
        )

    def _is_in_prompt(self, request_id: str, output: SchedulerOutput) -> bool:
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return True
        new = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before = {**new, **dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))}[request_id]
        return bool(before + output.num_scheduled_tokens[request_id] < request.num_prompt_tokens)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def run(self, steps: int = 100) -> list[dict[str, int]]:
        """Steps until nothing is left, at most `steps`."""
        done = []
        for _ in range(steps):
            if not self.scheduler.requests:
                break
            done.append(self.step())
        return done
