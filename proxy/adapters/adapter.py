"""One LoRA adapter, as every process of a cluster knows it.

An adapter's number is made of its name and its path, so that all workers and API servers use the same one, and a cache
block or a hand-over of one adapter is never taken for that of another. vLLM tells blocks apart by name and path, too.
Weights that are loaded again from a path may have changed, so each further load of a run names the directory in another
way (`/adapters/poet/.` is `/adapters/poet`).

`engine_argument` relies on vLLM 0.32: `LoRARequest` is written as an array of these fields, ids are at least 1 and fit
into 32 bits. `tests/unit/proxy/adapters/test_vllm_adapters.py` compares it with vLLM's own.
"""

from hashlib import blake2b

import msgspec

BASE_MODEL = 0
"""Stands for no adapter wherever an adapter's number is meant."""
_LARGEST_ID = (1 << 31) - 1


class Adapter(msgspec.Struct, frozen=True):
    """What a request with this adapter needs at an engine."""

    name: str
    """What clients call it: the `model` of their requests."""
    path: str
    """A directory that every worker can read, or a name on the hub."""
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False

    @property
    def adapter_id(self) -> int:
        """The same in every process, at least 1."""
        digest = blake2b(f"{self.name}\0{self.path}".encode(), digest_size=8).digest()
        return 1 + int.from_bytes(digest, "little") % _LARGEST_ID

    def loaded_again(self, times: int) -> "Adapter":
        """The same directory under another name, so that nothing of earlier loads is taken for this one's."""
        if not times or not self.path.startswith(("/", "~", ".")):
            return self
        return msgspec.structs.replace(self, path=self.path.rstrip("/") + "/." * times)

    def engine_argument(self) -> list[str | int | bool | None]:
        """The argument of the engine call `add_lora`. The engine reads the weights even if it knows the number."""
        load_inplace = True
        fields = (self.name, self.adapter_id, self.path, self.base_model_name, load_inplace, self.is_3d_lora_weight)
        return list(fields)
