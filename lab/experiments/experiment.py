"""What an experiment is: arms, the load that all of them get, and how often. Read from YAML."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lab.load.arrivals import Process
from lab.load.work import WorkClass, WorkError, parse_work

SHIPPED = Path(__file__).parent / "shipped"


class ExperimentError(ValueError):
    """An experiment that cannot be run; a sentence."""


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Arm(_Node):
    name: str = Field(min_length=1, description="As it is called in the report.")
    work: list[str] = Field(default=[], description="Classes of requests of this arm alone, instead of everybody's.")


class TeachingArm(_Arm):
    """Plain transformers on all cores, one of the first three rungs of the ladder."""

    kind: Literal["sequential", "static", "uncached"]


class ContinuousArm(_Arm):
    """Plain vLLM servers on equal shares of the cores or GPUs; requests go round robin."""

    kind: Literal["continuous"]
    replicas: int = Field(default=1, ge=1, le=64, description="How many servers share the machine.")
    engine: dict[str, Any] = Field(default={}, description="vLLM's flags by name.")


class DisaggregatedArm(_Arm):
    """A twinpool cluster. It is told the limits that its requests are judged by, a class of requests for each kind."""

    kind: Literal["disaggregated"]
    config: dict[str, Any] = Field(default={}, description="Its configuration, as in cluster.yaml, without the model.")


class SearchSettings(_Node):
    """How the highest rate within the limits is looked for."""

    attained: float = Field(default=0.9, gt=0, lt=1, description="Share of requests that must keep both limits.")
    lowest: float = Field(default=0.5, gt=0, description="Factor on the rates to begin with; all arms should hold it.")
    highest: float = Field(default=4.0, gt=0, description="Factor on the rates that no arm should hold.")
    steps: int = Field(default=4, ge=1, le=12, description="Rates tried between; each halves what is left between.")
    seeds: int = Field(default=2, ge=1, le=20, description="Runs per rate at most, where one leaves it open.")

    @model_validator(mode="after")
    def _ends_differ(self) -> "SearchSettings":
        if self.lowest >= self.highest:
            raise ValueError(f"lowest={self.lowest:g} must be below highest={self.highest:g}")
        return self


Arm = Annotated[TeachingArm | ContinuousArm | DisaggregatedArm, Field(discriminator="kind")]


class Experiment(_Node):
    """One experiment."""

    title: str
    about: str = Field(default="", description="What it shows; shown in the report.")
    model: str | None = Field(default=None, description="Directory of a model. Empty: the embedded one.")
    work: list[str] = Field(min_length=1, description="Classes of requests, as for `twinpool lab load --work`.")
    process: Process = "poisson"
    seconds: float = Field(default=60.0, gt=0, description="How long sessions begin, per run.")
    drain_s: float = Field(default=60.0, gt=0, description="Requests still open so long after that are cut off.")
    search: SearchSettings | None = Field(default=None, description="Look for each arm's goodput, in place of `rates`.")
    rates: list[Annotated[float, Field(gt=0)]] = Field(default=[1.0], description="Factors on every class's rate.")
    repeats: int = Field(default=1, ge=1, description="Runs per arm and rate, each with a seed of its own.")
    seed: int = Field(default=1, ge=0)
    warm_up_tokens: list[int] = Field(default=[64, 600], description="Prompts sent before anything is measured.")
    engine: dict[str, Any] = Field(default={}, description="vLLM's engine options of every arm that has an engine.")
    arms: list[Arm] = Field(min_length=1)

    @field_validator("work")
    @classmethod
    def _work_is_readable(cls, work: list[str]) -> list[str]:
        for text in work:
            parse_work(text)
        return work

    @model_validator(mode="after")
    def _names_differ(self) -> "Experiment":
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError("two arms have the same name")
        for arm in self.arms:
            for text in arm.work:
                parse_work(text)
        return self

    def classes(self, arm: Arm, rate: float) -> list[WorkClass]:
        """The load of an arm at a factor on its rates."""
        classes = [parse_work(text) for text in arm.work or self.work]
        return [replace(work, rate_per_s=work.rate_per_s * rate) for work in classes]


def shipped_names() -> list[str]:
    """Experiments that come with twinpool."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_experiment(name: str) -> Experiment:
    """By the name of a shipped one, or from a file. Raises `ExperimentError`."""
    path = SHIPPED / f"{name}.yaml" if name in shipped_names() else Path(name)
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        known = ", ".join(shipped_names())
        raise ExperimentError(f"cannot read {path}: {error.strerror}; there are also: {known}") from error
    except yaml.YAMLError as error:
        raise ExperimentError(f"{path} is no YAML: {error}") from error
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise ExperimentError(f"{path}: {problems}") from error
    except WorkError as error:
        raise ExperimentError(f"{path}: {error}") from error
