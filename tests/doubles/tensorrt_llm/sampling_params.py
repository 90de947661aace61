"""The old home of the sampling parameters."""

from tensorrt_llm.executor.params.sampling import LogprobMode, SamplingParams

__all__ = ["LogprobMode", "SamplingParams"]
