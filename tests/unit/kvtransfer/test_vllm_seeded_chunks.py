"""Seeded requests in chunks on CPUs."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvtransfer.connector.vllm_seeded_chunks import spare_generators_of_discarded_samples


def runner_class() -> Any:
    """A model runner that draws one number per generator and then does to discarded ones what vLLM does."""

    class Runner:
        def __init__(self, num_requests: int, discarded: list[int]) -> None:
            generators = {index: torch.Generator().manual_seed(index) for index in range(num_requests)}
            self.input_batch = SimpleNamespace(generators=generators, num_reqs=num_requests)
            mask = np.zeros(8, dtype=bool)
            mask[discarded] = True
            self.discard_request_mask = SimpleNamespace(np=mask)

        def sample_tokens(self, grammar_output: str) -> tuple[str, dict[int, float]]:
            generators = self.input_batch.generators
            drawn = {index: float(torch.rand(1, generator=it)) for index, it in generators.items()}
            for index in self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]:
                if (generator := generators.get(int(index))) is not None:
                    generator.set_offset(generator.get_offset() - 4)
            if grammar_output == "fail":
                raise ValueError("sampling failed")
            return grammar_output, drawn

    return Runner


def test_without_the_change_a_discarded_sample_of_a_cpu_generator_raises() -> None:
    with pytest.raises(RuntimeError, match="does not use offset"):
        runner_class()(2, [1]).sample_tokens("grammar")


def test_generators_of_discarded_samples_stay_as_they_were_and_others_are_used() -> None:
    changed = runner_class()
    spare_generators_of_discarded_samples(changed)
    runner = changed(3, [1])

    grammar, drawn = runner.sample_tokens("grammar")

    assert grammar == "grammar"
    assert sorted(drawn) == [0, 2]
    fresh = float(torch.rand(1, generator=torch.Generator().manual_seed(1)))
    assert float(torch.rand(1, generator=runner.input_batch.generators[1])) == fresh


def test_generators_are_put_back_when_sampling_fails() -> None:
    changed = runner_class()
    spare_generators_of_discarded_samples(changed)
    runner = changed(2, [0, 1])

    with pytest.raises(ValueError, match="sampling failed"):
        runner.sample_tokens("fail")

    assert sorted(runner.input_batch.generators) == [0, 1]


def test_a_second_change_changes_nothing() -> None:
    changed = runner_class()
    spare_generators_of_discarded_samples(changed)
    once = changed.sample_tokens
    spare_generators_of_discarded_samples(changed)
    assert changed.sample_tokens is once


def test_vllm_still_turns_generators_back_in_sample_tokens_and_shares_the_dict() -> None:
    assert "gen.set_offset(gen.get_offset() - 4)" in inspect.getsource(GPUModelRunner._bookkeeping_sync)
    source = inspect.getsource(GPUModelRunner.sample_tokens)
    assert source.index("self._sample(") < source.index("self._bookkeeping_sync(")
    assert "generators=self.generators" in inspect.getsource(InputBatch)
    assert "self.discard_request_mask.np[:num_reqs] =" in inspect.getsource(GPUModelRunner._prepare_inputs)
