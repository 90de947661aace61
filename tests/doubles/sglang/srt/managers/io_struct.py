"""What the tokenizer manager and the scheduler send each other; only the fields that matter."""

from __future__ import annotations

import uuid
from array import array
from dataclasses import dataclass
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(kw_only=True)
class GenerateReqInput:
    """A request of a caller."""

    rid: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    return_logprob: Any = None
    return_sampling_mask: Any = None
    stream: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0

    def regenerate_rid(self) -> str:
        """A new id, as each sample of a request gets."""
        self.rid = uuid.uuid4().hex
        return str(self.rid)


@dataclass(kw_only=True)
class TokenizedGenerateReqInput:
    """A request on its way to the scheduler."""

    rid: str
    input_ids: array[int] | None
    input_embeds: Any = None
    mm_inputs: Any = None
    sampling_params: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None = None
    stream: bool = False
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    session_params: Any = None
    custom_logit_processor: str | None = None


@dataclass(kw_only=True)
class BatchTokenIDOutput:
    """A batch of answers without text: lists with an entry a request."""

    rids: list[str]
    finished_reasons: list[Any]
    output_ids: list[Any]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    output_token_logprobs_val: Any
    output_token_logprobs_idx: Any
    output_token_sampling_mask: Any
    routed_experts: Any
    retraction_counts: Any = None
    beam_search_output: Any = None
    weight_versions: Any = None


@dataclass(kw_only=True)
class BatchStrOutput:
    """A batch of answers with text."""

    rids: list[str]
    finished_reasons: list[Any]
    output_strs: list[str]
    output_ids: list[Any]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    output_token_logprobs_val: Any
    output_token_logprobs_idx: Any
    output_token_sampling_mask: Any
    routed_experts: Any
    retraction_counts: Any = None
    beam_search_output: Any = None
    weight_versions: Any = None


@dataclass(kw_only=True)
class AbortReq:
    """A request that ended before it had run."""

    rid: str = ""
    abort_all: bool = False
    finished_reason: Any = None
    abort_message: str | None = None
    weight_versions: Any = None


@dataclass(kw_only=True)
class UpdateWeightFromDiskReqInput:
    """Load other weights."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


@dataclass(kw_only=True)
class UpdateWeightVersionReqInput:
    """Give the weights another name."""

    new_version: str
