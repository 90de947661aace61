"""An AutoTuner with the interface and the three cache layouts of the TensorRT-LLM family.

Written to the layouts in `LAYOUTS`; tests/integration runs the same scenarios on the real ones.
"""

from __future__ import annotations

import contextlib
import sys
import types
from dataclasses import dataclass
from typing import Any

LAYOUTS = (
    "tensorrt_llm",  # an object with `.cache`; tuple keys; (runner index, tactic, ms)
    "flashinfer",  # a dict; tuple keys with extras; (runner index, tactic, profile)
    "flashinfer_keys",  # a dict, one more for each store; key objects; (tactic, profile)
)


class TunableRunner:
    def get_valid_tactics(self, inputs: Any, profile: Any, **kwargs: Any) -> list[Any]:
        return [-1]

    def unique_id(self) -> tuple[Any, ...]:
        return tuple(self.__dict__.values())

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        return self.forward(inputs, **kwargs)


@dataclass(frozen=True, kw_only=True)
class DynamicTensorSpec:
    input_idx: Any
    dim_idx: Any
    gen_tuning_buckets: tuple[int, ...]
    map_to_tuning_buckets: Any


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    dynamic_tensor_specs: tuple[DynamicTensorSpec, ...] = ()
    constraint_specs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Key:
    custom_op: str
    runner_class_name: str
    runner_hash: int
    nearest_profile: tuple[Any, ...]
    extras: tuple[Any, ...]


class ProfilingCache:
    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.cache)


def load(layout: str) -> str:
    """Put a fresh module with an AutoTuner of one layout into `sys.modules`; its name."""

    class AutoTuner:
        _instance: Any = None

        def __init__(self) -> None:
            self.profiling_cache: Any = ProfilingCache() if layout == LAYOUTS[0] else {}
            if layout == LAYOUTS[2]:
                self._profiling_cache_selections: dict[Any, Any] = {}
                self._winner_partitions: dict[Any, Any] = {}
            self.is_tuning_mode = False

        @classmethod
        def get(cls) -> Any:
            cls._instance = cls._instance or cls()
            return cls._instance

        def choose_one(
            self, custom_op: str, runners: Any, tuning_config: Any, inputs: Any, **kwargs: Any
        ) -> Any:
            shapes = tuple(tuple(t.shape) if hasattr(t, "shape") else (0,) for t in inputs)
            if self.is_tuning_mode:
                spec = tuning_config.dynamic_tensor_specs[0]
                for size in spec.gen_tuning_buckets:
                    profile = ((size, *shapes[0][1:]), *shapes[1:])
                    if self._found(custom_op, runners, profile) is None:
                        self._tune(custom_op, runners, profile, inputs)
            profile = self._find_nearest_profile(shapes, tuning_config)
            found = self._found(custom_op, runners, profile)
            return (runners[0], -1) if found is None else found

        def _find_nearest_profile(self, shapes: Any, tuning_config: Any) -> Any:
            spec = tuning_config.dynamic_tensor_specs[0]
            first = (spec.map_to_tuning_buckets(shapes[0][0]), *shapes[0][1:])
            return (first, *shapes[1:])

        def _key(self, op: str, runner: Any, profile: Any) -> Any:
            name = type(runner).__name__
            if layout == LAYOUTS[0]:
                return (op, name, str(runner.unique_id()), profile)
            if layout == LAYOUTS[1]:
                return (op, name, hash(runner.unique_id()), profile, ("bfloat16",))
            return Key(op, name, hash(runner.unique_id()), profile, ("bfloat16",))

        def _cache(self) -> dict[Any, Any]:
            return getattr(self.profiling_cache, "cache", self.profiling_cache)

        def _found(self, op: str, runners: Any, profile: Any) -> Any:
            for runner in runners:
                value = self._cache().get(self._key(op, runner, profile))
                if value is not None:
                    return runner, value[-2]
            return None

        def _tune(self, op: str, runners: Any, profile: Any, inputs: Any) -> None:
            timed = [
                (self._profile_single_kernel(runner, inputs, tactic), index, tactic)
                for index, runner in enumerate(runners)
                for tactic in runner.get_valid_tactics(inputs, profile)
            ]
            ms, index, tactic = min(timed)
            key = self._key(op, runners[index], profile)
            if layout == LAYOUTS[0]:
                self._cache()[key] = (index, tactic, ms)
            elif layout == LAYOUTS[1]:
                self._cache()[key] = (index, tactic, object())
            else:
                self._cache()[key] = (tactic, object())
                self._profiling_cache_selections[(None, key)] = {"time_ms": ms}

        def _profile_single_kernel(self, runner: Any, inputs: Any, tactic: Any) -> float:
            raise NotImplementedError("the scenario times")

    @contextlib.contextmanager
    def autotune(tune_mode: bool = True) -> Any:
        tuner = AutoTuner.get()
        outer, tuner.is_tuning_mode = tuner.is_tuning_mode, tune_mode
        try:
            yield
        finally:
            tuner.is_tuning_mode = outer

    name = f"{layout}.double_of_autotuner"
    module = types.ModuleType(name)
    for symbol in (AutoTuner, TunableRunner, TuningConfig, DynamicTensorSpec, autotune):
        setattr(module, symbol.__name__, symbol)
    sys.modules[name] = module
    return name
