"""Fails loudly when what `cluster.host.slumber` relies on in vLLM's sleep mode moves. Reads its source: the allocator
wants CUDA."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def methods(file: str) -> dict[str, str]:
    """The source of every method in a file of vLLM, by class and name."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / file).read_text()
    lines = text.splitlines()
    return {
        f"{kind.name}.{function.name}": "\n".join(lines[function.lineno - 1 : function.end_lineno]).strip()
        for kind in ast.parse(text).body
        if isinstance(kind, ast.ClassDef)
        for function in kind.body
        if isinstance(function, ast.FunctionDef)
    }


def test_the_calls_of_the_engine_core_are_those_that_hosts_make() -> None:
    core = methods("v1/engine/core.py")
    assert core["EngineCore.sleep"].startswith('def sleep(self, level: int = 1, mode: PauseMode = "abort")')
    wake = core["EngineCore.wake_up"]
    assert wake.startswith("def wake_up(self, tags: list[str] | None = None) -> bool")
    assert "return fully_awake" in wake


def test_level_one_keeps_weights_and_empties_the_prefix_cache_before_it_gives_memory_back() -> None:
    core = methods("v1/engine/core.py")
    sleep = core["EngineCore.sleep"]
    assert "clear_prefix_cache = level >= 1" in sleep
    assert sleep.index("self.pause_scheduler(") < sleep.index("model_executor.sleep(")
    assert "self._reset_caches()" in core["EngineCore._finish_pause"]
    backend = methods("device_allocator/sleep_mode_backend.py")
    assert 'offload_tags = ("weights"' in backend["CuMemBackend.suspend"]


def test_memory_comes_back_where_it_was_so_addresses_stay_right() -> None:
    allocator = methods("device_allocator/cumem.py")
    assert "unmap_and_release(handle)" in allocator["CuMemAllocator.sleep"]
    assert "handle = data.handle" in allocator["CuMemAllocator.wake_up"]
    assert "create_and_map(handle)" in allocator["CuMemAllocator.wake_up"]


def test_it_is_there_on_gpus_and_not_on_cpus() -> None:
    available = methods("platforms/interface.py")["Platform.is_sleep_mode_available"]
    assert "PlatformEnum.CUDA" in available
    assert "PlatformEnum.CPU" not in available
    assert not any(name.endswith("is_sleep_mode_available") for name in methods("platforms/cpu.py"))
