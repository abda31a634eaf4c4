"""Lets a CPU engine compute the prompt of a seeded request in several chunks.

vLLM 0.32 samples after every chunk and, for chunks that are not the last, turns the request's generator back with
`gen.set_offset(gen.get_offset() - 4)`. Generators of CPUs have no offset: the rank raises, and the engine dies of one
client's request. Here such a sample, which nobody will see, is drawn without the request's generator, so there is
nothing to turn back.

Internals of vLLM 0.32 this relies on: `GPUModelRunner.sample_tokens` samples and turns back; `input_batch.generators`
is the very dict that the sampler reads, by index in the batch; `discard_request_mask` is ready before sampling.
"""

import functools
from typing import Any

_MARK = "_twinpool_spares_generators"


def spare_generators_of_discarded_samples(runner_class: Any) -> None:
    """Changes `runner_class.sample_tokens`, a `GPUModelRunner`'s; doing it twice is doing it once."""
    if getattr(runner_class, _MARK, False):
        return
    sample_tokens = runner_class.sample_tokens

    @functools.wraps(sample_tokens)
    def sample_with_the_others(runner: Any, grammar_output: Any) -> Any:
        generators = runner.input_batch.generators
        discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
        spared = {index: generators.pop(index) for index in map(int, discarded) if index in generators}
        try:
            return sample_tokens(runner, grammar_output)
        finally:
            generators.update(spared)

    runner_class.sample_tokens = sample_with_the_others
    setattr(runner_class, _MARK, True)


def install() -> None:
    """In a rank, before its first step. Does nothing on devices whose generators can be turned back."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        spare_generators_of_discarded_samples(GPUModelRunner)
