"""Arguments of the engine, as far as the double heeds them; sizes are smaller than the engine's."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class KvCacheConfig(BaseModel):
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    tokens_per_block: int = 4
    max_tokens: int | None = None


class CudaGraphConfig(BaseModel):
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


class MoeConfig(BaseModel):
    backend: str = "CUTLASS"
    max_num_tokens: int | None = None
    disable_finalize_fusion: bool = False


class SchedulerConfig(BaseModel):
    capacity_scheduler_policy: str = "MAX_UTILIZATION"


class TorchLlmArgs(BaseModel):
    """What an `LLM` was made with, and what that leaves in force."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: str
    tokenizer: Any = None
    skip_tokenizer_init: bool = False
    backend: str = "pytorch"
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    max_batch_size: int = 8
    max_num_tokens: int = 64
    max_seq_len: int = 128
    attn_backend: str = "TRTLLM"
    sampler_type: str = "auto"
    disable_overlap_scheduler: bool = False
    enable_chunked_prefill: bool = False
    enable_autotuner: bool = True
    enable_attention_dp: bool = False
    allreduce_strategy: str = "AUTO"
    stream_interval: int = 1
    cuda_graph_config: CudaGraphConfig | None = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    enable_return_routed_experts: bool = False
    lora_config: Any = None
    sleep_config: Any = None
