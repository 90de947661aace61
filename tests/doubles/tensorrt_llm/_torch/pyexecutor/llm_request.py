"""Requests of the loop and their results, the Python side of them."""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from tensorrt_llm import _double_bindings as bindings
from tensorrt_llm.executor.params.sampling import LogprobMode


class LogProbStorage:
    def __init__(self) -> None:
        self.log_probs: list[list[Any]] = [[]]
        self.cum_log_probs: list[float] = [0.0]

    def append(self, new_probs: list[list[Any]], cum_log_probs: list[float] | None = None) -> None:
        for probs in new_probs:
            self.log_probs[0].extend(probs)
            for prob in probs:  # of a dict the first entry: the sampler puts the drawn token there
                drawn = next(iter(prob.values())).logprob if isinstance(prob, dict) else prob
                self.cum_log_probs[0] += drawn


@dataclass(kw_only=True)
class PyResult:
    """What one sequence has produced besides its tokens."""

    prompt_len: int
    max_new_tokens: int
    streaming: bool = False
    return_log_probs: bool = False
    return_context_logits: bool = False
    additional_outputs: list[str] | None = None
    _double_context: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._log_probs = LogProbStorage() if self.return_log_probs else None
        names = self.additional_outputs
        self._additional_generation_outputs: dict[str, list[torch.Tensor]] | None
        self._additional_generation_outputs = {n: [] for n in names} if names else None

    def append_context_logits(self, context_logits: torch.Tensor) -> None:
        if self.return_context_logits:
            self._double_context.append(context_logits.clone())

    def append_log_probs(
        self, log_probs: list[list[Any]], cum_log_probs: list[float] | None = None
    ) -> None:
        if self._log_probs is not None:
            self._log_probs.append(log_probs, cum_log_probs)

    def append_additional_generation_outputs(
        self, name: str, additional_generation_outputs: torch.Tensor
    ) -> None:
        self._additional_generation_outputs[name].append(additional_generation_outputs.cpu())

    @property
    def context_logits(self) -> torch.Tensor | None:
        return torch.cat(self._double_context) if self._double_context else None

    @property
    def generation_logits(self) -> None:
        return None

    @property
    def log_probs(self) -> list[list[Any]] | None:
        return None if self._log_probs is None else self._log_probs.log_probs

    @property
    def cum_log_probs(self) -> list[float] | None:
        return None if self._log_probs is None else self._log_probs.cum_log_probs

    @property
    def additional_context_outputs(self) -> None:
        return None

    @property
    def additional_generation_outputs(self) -> dict[str, torch.Tensor] | None:
        found = self._additional_generation_outputs
        return (
            None if found is None else {n: torch.cat(parts) for n, parts in found.items() if parts}
        )


class LlmResult:
    """A serialized result of the C++ side, and beside it what Python holds."""

    py_result_properties = frozenset(
        (
            "context_logits",
            "generation_logits",
            "log_probs",
            "cum_log_probs",
            "additional_context_outputs",
            "additional_generation_outputs",
        )
    )

    def __init__(
        self,
        result: Any,
        py_result: PyResult,
        is_final: bool = False,
        time_breakdown_metrics: dict[str, Any] | None = None,
    ) -> None:
        self._result = result
        self._py_result = py_result
        self.is_final = is_final
        self.cached_tokens = 0

    def __getattr__(self, item: str) -> Any:
        if item.startswith("__") or item in ("_result", "_py_result"):
            raise AttributeError(item)  # unpickling asks before anything is there
        if item in self.py_result_properties:
            return getattr(self._py_result, item)
        return getattr(self._result, item)

    def deserialize(self) -> None:
        self._result = bindings.deserialize_result(self._result)

    def get_result(self) -> Any:
        return bindings.deserialize_result(self._result)


@dataclass
class LlmResponse:
    request_id: int
    error_msg: str | None = None
    result: LlmResult | None = None
    client_id: int | None = None

    def has_error(self) -> bool:
        return self.error_msg is not None

    def clear_context_logits(self) -> None:
        if self.result is not None:
            self.result._py_result._double_context = []


class LlmRequest(bindings.LlmRequest):
    """A sequence of the loop."""

    def __init__(
        self,
        *args: Any,
        client_id: int | None = None,
        return_log_probs: bool = False,
        return_context_logits: bool = False,
        additional_outputs: list[str] | None = None,
        stop_words_list: list[list[int]] | None = None,
        llm_request: Any = None,
        seq_slot: int | None = None,
        num_logprobs: int = 0,
        logprobs_mode: LogprobMode = LogprobMode.RAW,
        logprobs_simple_format: bool = False,
        **kwargs: Any,
    ) -> None:
        if llm_request is not None:
            self.__dict__.update(vars(llm_request))
        else:
            super().__init__(*args, **kwargs)
        self.py_client_id = client_id
        self.py_request_id = self.request_id
        self.py_llm_request_type = self.llm_request_type
        self.py_end_id = self.end_id
        self.py_prompt_len = self.prompt_len
        self.py_orig_prompt_len = self.orig_prompt_len
        self.py_max_new_tokens = self.max_new_tokens
        self.py_min_length = self.sampling_config.min_length
        self.py_batch_idx: int | None = None
        self.py_draft_tokens = [] if self.draft_tokens is None else self.draft_tokens
        self.py_last_context_chunk: tuple[Any, Any] = (None, None)
        self.py_num_accepted_draft_tokens = 0
        self.py_decoding_iter = 0
        self.is_attention_dp_dummy = False
        self.is_cuda_graph_dummy = False
        self._cached_tokens, self._cached_tokens_set = 0, False
        self.py_num_logprobs = num_logprobs
        self.py_return_log_probs = return_log_probs
        self.py_logprobs_simple_format = logprobs_simple_format
        self.py_return_context_logits = return_context_logits
        self.py_additional_outputs = additional_outputs
        self.py_beam_width = self.sampling_config.beam_width
        self.py_is_draft = False
        self.py_seq_slot = seq_slot
        self.py_stop_words_list = stop_words_list
        self.py_logprobs_mode = LogprobMode(logprobs_mode)
        self.py_return_routed_experts = False
        self.py_logits_post_processors: Any = None
        self.py_result = PyResult(
            prompt_len=self.py_prompt_len,
            max_new_tokens=self.py_max_new_tokens,
            streaming=self.streaming,
            return_log_probs=return_log_probs,
            return_context_logits=return_context_logits,
            additional_outputs=additional_outputs,
        )
        self.child_requests: list[LlmRequest] = []

    @property
    def cached_tokens(self) -> int:
        return self._cached_tokens

    @cached_tokens.setter
    def cached_tokens(self, value: int) -> None:
        if not self._cached_tokens_set:
            self._cached_tokens, self._cached_tokens_set = value, True

    def create_response(
        self, use_fast_logits: bool = False, mpi_world_rank: int = 0
    ) -> LlmResponse | None:
        result, is_final = self.create_serialized_result(use_fast_logits, mpi_world_rank)
        if not result:
            return None
        py_result = self.py_result
        if self.streaming and py_result.log_probs:
            # the response takes the logprobs so far along, and new ones are collected
            py_result = copy(self.py_result)
            total = self.py_result.cum_log_probs
            self.py_result._log_probs = LogProbStorage()
            self.py_result._log_probs.cum_log_probs = list(total)
        return LlmResponse(
            request_id=self.parent_request_id if self.is_child else self.py_request_id,
            result=LlmResult(result, py_result, is_final),
            client_id=self.py_client_id,
        )

    @property
    def is_dummy(self) -> bool:
        return self.is_attention_dp_dummy or self.is_cuda_graph_dummy or self.is_dummy_request

    def create_child_request(self, child_id: int) -> None:
        child = super().create_child_request(child_id)
        py_request = LlmRequest(llm_request=child)
        for name, value in self.__dict__.items():
            if name.startswith("py_"):
                setattr(py_request, name, deepcopy(value))
        py_request.py_request_id = child.request_id
        py_request.py_batch_idx = py_request.py_seq_slot = None
        py_request.child_requests = []
        self.child_requests.append(py_request)


def executor_request_to_llm_request(
    req_id: int,
    executor_request: Any,
    child_req_ids: list[int],
    exclude_last_generation_logits: bool = False,
) -> LlmRequest:
    """A request of the loop from what the front end handed in."""
    r = executor_request
    request = LlmRequest(
        req_id,
        r.max_tokens,
        r.input_token_ids,
        r.sampling_config,
        r.streaming,
        r.end_id,
        client_id=r.client_id,
        return_log_probs=r.return_log_probs,
        return_context_logits=r.return_context_logits,
        additional_outputs=r.py_additional_outputs,
        stop_words_list=r.stop_words or None,
        num_logprobs=r.py_num_logprobs,
        logprobs_mode=r.py_logprobs_mode,
        logprobs_simple_format=r.py_logprobs_simple_format,
    )
    request.py_return_routed_experts = r.py_return_routed_experts
    request.py_logits_post_processors = r.py_logits_post_processors
    for child_id in child_req_ids:
        request.create_child_request(child_id)
    return request
