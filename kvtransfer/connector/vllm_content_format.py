"""How the attention backends of vLLM 0.32 fill a block: what the registered tensors' shapes and strides do not tell.

Relies on `vllm.v1.attention.backends.cpu_attn`: `_get_attn_isa`, and what the kernels behind it do with a block.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend

from kvtransfer.resharding.forms import CPU_PLANES, TOKEN_ROWS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_TOKEN_ROWS_BACKENDS = frozenset(
    {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"}
)
"""Those whose kernels address [block, head, token, content] by the strides of the tensor."""


def content_format(config: "VllmConfig", spec: Any) -> str:
    """One of `resharding.forms`, or a name of its own for contents of which only the heads can be told apart.

    On CPUs it depends on the processor, so that workers on unlike machines do not mistake each other's keys.
    """
    backend: str = get_current_attn_backend(config).get_name()
    if backend != "CPU_ATTN":
        return TOKEN_ROWS if backend in _TOKEN_ROWS_BACKENDS else backend
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = config.cache_config.cache_dtype
    isa = _get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype)
    return CPU_PLANES if isa == "vec" and not cache_dtype.startswith("fp8") else f"cpu {isa}"
