"""The places in tuners where the observers stand."""

from __future__ import annotations

from rolltape.recorder.targets import Target

_CHOOSE = ("custom_op", "runners", "tuning_config", "inputs")

TARGETS: tuple[Target, ...] = (
    Target(
        module="flashinfer.autotuner",
        symbol="AutoTuner.choose_one",
        parameters=_CHOOSE,
        gives="tactics",
        instead="choices of FlashInfer's tuner are not recorded",
    ),
    Target(
        module="flashinfer.autotuner",
        symbol="AutoTuner._find_nearest_profile",
        parameters=("shapes", "tuning_config"),
        gives="tactics",
        instead="a choice is not joined to its cache entry: no time_ms, chosen shows as cached",
    ),
    Target(
        module="tensorrt_llm._torch.autotuner",
        symbol="AutoTuner.choose_one",
        parameters=_CHOOSE,
        gives="tactics",
        instead="choices of TensorRT-LLM's tuner are not recorded",
    ),
    Target(
        module="tensorrt_llm._torch.autotuner",
        symbol="AutoTuner._find_nearest_profile",
        parameters=("shapes",),  # then a configuration, or what is in one
        gives="tactics",
        instead="a choice is not joined to its cache entry: no time_ms, chosen shows as cached",
    ),
    Target(
        module="triton.runtime.autotuner",
        symbol="Autotuner.run",
        gives="tactics",
        instead="choices of @triton.autotune are not recorded",
    ),
    Target(
        module="torch._inductor.select_algorithm",
        symbol="AlgorithmSelectorCache.__call__",
        parameters=("name", "choices", "input_nodes"),
        gives="tactics",
        instead="choices of torch.compile are not recorded",
    ),
    Target(
        module="torch._inductor.select_algorithm",
        symbol="AlgorithmSelectorCache.add_feedback_saver",
        gives="tactics",
        instead="choices of torch.compile are recorded without timings",
    ),
)
