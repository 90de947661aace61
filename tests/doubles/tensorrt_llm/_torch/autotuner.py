"""The tuner: in tuning mode it fills its cache, outside it answers from it.

As in the engine, the answer outside of tuning mode depends on the cache and the shapes alone, and
a miss gives the first runner with tactic -1. Costs are not timed but made of the tactic and the
shape, so that a test has the same tactics each time and different ones for different buckets.
"""

from __future__ import annotations

import contextlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, unsafe_hash=True)
class DynamicTensorSpec:
    input_idx: int
    dim_idx: int
    gen_tuning_buckets: Any
    map_to_tuning_buckets: Any


@dataclass(slots=True, unsafe_hash=True)
class ConstraintSpec:
    input_idx: int
    dim_idx: int
    infer_shape: Any


@dataclass(kw_only=True, unsafe_hash=True)
class TuningConfig:
    dynamic_tensor_specs: tuple[DynamicTensorSpec, ...] = ()
    constraint_specs: tuple[ConstraintSpec, ...] = ()


class TunableRunner(ABC):
    @abstractmethod
    def get_valid_tactics(self, inputs: Any, profile: Any) -> list[Any]: ...

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        return self.forward(inputs, **kwargs)

    @abstractmethod
    def forward(self, /, inputs: Any, *, tactic: Any = -1, do_preparation: bool = False) -> Any: ...


class AutoTuner:
    _instance: AutoTuner | None = None

    def __init__(self, warmup: int = 3, repeat: int = 10, stream_delay_micro_secs: int = 1000):
        self.warmup, self.repeat = warmup, repeat
        self.stream_delay_micro_secs = stream_delay_micro_secs
        #: key -> (index of the runner, tactic, milliseconds), as later versions hold it
        self.profiling_cache = _double_Cache()
        self.is_tuning_mode = False

    @classmethod
    def get(cls) -> AutoTuner:
        if cls._instance is None:
            cls._instance = AutoTuner()
        return cls._instance

    def search_cache(
        self, custom_op: str, runners: Any, input_shapes: Any, tuning_config: Any
    ) -> tuple[bool, int, Any, Any]:
        for index, runner in enumerate(runners):
            key = self._get_cache_key(custom_op, runner, input_shapes, tuning_config)
            if key in self.profiling_cache.cache:
                _, tactic, cost = self.profiling_cache.cache[key]
                return True, index, tactic, cost
        return False, 0, -1, None

    def choose_one(
        self, custom_op: str, runners: Any, tuning_config: Any, inputs: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        shapes = tuple(self._get_input_sizes(inputs))
        if self.is_tuning_mode:
            for profile in self._optimization_profiles(tuning_config, inputs):
                if not self.search_cache(custom_op, runners, profile, tuning_config)[0]:
                    self._double_tune(custom_op, runners, profile, tuning_config, inputs)
        _, index, tactic, _ = self.search_cache(custom_op, runners, shapes, tuning_config)
        return runners[index], tactic

    def _double_tune(
        self, custom_op: str, runners: Any, profile: Any, tuning_config: Any, inputs: Any
    ) -> None:
        timed = []
        for index, runner in enumerate(runners):
            for tactic in runner.get_valid_tactics(inputs, profile):
                runner(inputs, tactic=tactic)
                cost = zlib.crc32(repr((custom_op, tactic, profile[0])).encode()) % 1000 / 1000
                timed.append((cost, index, tactic))
        cost, index, tactic = min(timed)
        key = self._get_cache_key(custom_op, runners[index], profile, tuning_config)
        self.profiling_cache.cache[key] = (index, tactic, cost)

    def _get_input_sizes(self, inputs: Any) -> list[tuple[int, ...]]:
        return [tuple(t.shape) if hasattr(t, "shape") else (0,) for t in inputs]

    def _optimization_profiles(self, tuning_config: Any, inputs: Any) -> list[Any]:
        shapes = self._get_input_sizes(inputs)
        spec = tuning_config.dynamic_tensor_specs[0]
        first = shapes[spec.input_idx]
        return [((size, *first[1:]), *shapes[1:]) for size in spec.gen_tuning_buckets]

    @classmethod
    def _find_nearest_profile(cls, shapes: Any, tuning_config: Any) -> Any:
        nearest = [list(shape) for shape in shapes]
        for spec in tuning_config.dynamic_tensor_specs:
            size = nearest[spec.input_idx][spec.dim_idx]
            nearest[spec.input_idx][spec.dim_idx] = spec.map_to_tuning_buckets(size)
        for spec in tuning_config.constraint_specs:  # follows from the others
            nearest[spec.input_idx][spec.dim_idx] = -1
        return tuple(tuple(shape) for shape in nearest)

    @classmethod
    def _get_cache_key(
        cls, custom_op: str, runner: Any, input_shapes: Any, tuning_config: Any
    ) -> tuple[Any, ...]:
        nearest = cls._find_nearest_profile(input_shapes, tuning_config)
        identity = str(tuple(runner.__dict__.values()))
        return (custom_op, type(runner).__name__, identity, nearest)

    def clear_cache(self) -> None:
        self.profiling_cache.cache.clear()


class _double_Cache:
    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.cache)


@contextlib.contextmanager
def autotune(tune_mode: bool = True) -> Iterator[None]:
    tuner = AutoTuner.get()
    old, tuner.is_tuning_mode = tuner.is_tuning_mode, tune_mode
    try:
        yield
    finally:
        tuner.is_tuning_mode = old
