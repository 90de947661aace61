"""Arguments of the engine."""

from tensorrt_llm._double_args import (
    CudaGraphConfig,
    KvCacheConfig,
    MoeConfig,
    SchedulerConfig,
    TorchLlmArgs,
)

__all__ = ["CudaGraphConfig", "KvCacheConfig", "MoeConfig", "SchedulerConfig", "TorchLlmArgs"]
