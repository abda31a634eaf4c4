"""What an engine may not be combined with when its KV cache is handed over.

Relies on vLLM 0.32: `VllmConfig.speculative_config` is None without speculative decoding;
`ParallelConfig.{pipeline,decode_context,prefill_context}_parallel_size`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_untested(config: "VllmConfig") -> None:
    """Raises `ValueError` for an engine whose hand-overs could come out wrong without anybody noticing."""
    if config.speculative_config is not None:
        raise ValueError(
            "twinpool cannot hand over between engines with speculative decoding: a prompt ends in draft tokens there, "
            "where a hand-over has the first token. Remove speculative_config."
        )
    groups = {
        "pipeline_parallel_size": "holds the cache of some layers only",
        "decode_context_parallel_size": "holds every n-th token",
        "prefill_context_parallel_size": "holds every n-th token",
    }
    for name, holds in groups.items():
        size = getattr(config.parallel_config, name)
        if size > 1:
            raise ValueError(
                f"twinpool cannot hand over with {name}={size}: each rank {holds}, and a hand-over takes its blocks "
                "for whole ones. Use tensor_parallel_size instead."
            )
