"""What users import."""

from tensorrt_llm.executor.params.sampling import SamplingParams
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import (
    CudaGraphConfig,
    KvCacheConfig,
    MoeConfig,
    SchedulerConfig,
    TorchLlmArgs,
)

__all__ = [
    "LLM",
    "CudaGraphConfig",
    "KvCacheConfig",
    "MoeConfig",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchLlmArgs",
]
