"""A double of TensorRT-LLM's PyTorch back end; importable as `tensorrt_llm` on its own path.

It follows what the engine's source and documentation say, computes with a small model on the CPU,
and keeps a log of what it did, see `_double_truth`. Names that it adds begin with `_double`.

Not modelled: several ranks, beams, speculative decoding, penalties, guided decoding, LoRA,
multimodal input, disaggregated serving, Ray, post-processing workers, statistics.
"""

from tensorrt_llm.executor.params.sampling import LogprobMode, SamplingParams
from tensorrt_llm.llmapi.llm import LLM, RequestOutput

__all__ = ["LLM", "LogprobMode", "RequestOutput", "SamplingParams"]
