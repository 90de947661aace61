"""Stands for the C++ part: executor requests, results, and the state of a request."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class FinishReason(Enum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class LlmRequestState(Enum):
    UNKNOWN = 0
    CONTEXT_INIT = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_TO_COMPLETE = 4
    GENERATION_COMPLETE = 5


@dataclass
class SamplingConfig:
    """Holds a list of one value a beam, None where a value was not set."""

    beam_width: int = 1
    num_return_sequences: int = 1
    temperature: list[float] | None = None
    top_k: list[int] | None = None
    top_p: list[float] | None = None
    min_p: list[float] | None = None
    random_seed: list[int] | None = None
    min_length: list[int] | None = None


@dataclass
class Request:
    """`bindings.executor.Request`, and what Python attaches to it."""

    client_id: int
    input_token_ids: list[int]
    max_tokens: int
    streaming: bool
    sampling_config: SamplingConfig
    end_id: int | None
    stop_words: list[list[int]]
    return_log_probs: bool
    return_context_logits: bool
    py_num_logprobs: int | None = None
    py_logprobs_mode: Any = "raw"
    py_logprobs_simple_format: bool = False
    py_return_routed_experts: bool = False
    py_logits_post_processors: Any = None
    py_additional_outputs: list[str] | None = None


@dataclass
class Result:
    """`bindings.executor.Result` of one sequence."""

    is_final: bool
    is_sequence_final: bool
    sequence_index: int
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    decoding_iter: int
    context_phase_params: Any = None
    request_perf_metrics: Any = None
    avg_decoded_tokens_per_iter: float | None = None


@dataclass
class Family:
    """What the samples of one request share."""

    final: list[bool] = field(default_factory=lambda: [False])


class LlmRequest:
    """State of one sequence in the loop.

    A child's positions, tokens and state are its own; its client is the parent's.
    """

    def __init__(
        self,
        request_id: int,
        max_new_tokens: int,
        input_tokens: list[int],
        sampling_config: SamplingConfig,
        is_streaming: bool = False,
        end_id: int | None = None,
        **_: Any,
    ) -> None:
        self.request_id = request_id
        self.max_new_tokens = max_new_tokens
        self.sampling_config = sampling_config
        self.streaming = is_streaming
        self.end_id = end_id
        self.prompt_len = self.orig_prompt_len = len(input_tokens)
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_current_position = 0
        self.context_chunk_size = self.prompt_len
        self.prepopulated_prompt_len = 0
        self.decoding_iter = 0
        self.seq_slot: int | None = None
        self.draft_tokens: list[int] | None = None
        self.is_dummy_request = False
        self.is_child, self.parent_request_id, self.sequence_index = False, -1, 0
        self._tokens = list(input_tokens)
        self._sent = 0
        self._reason = FinishReason.NOT_FINISHED
        self._family = Family()

    @property
    def llm_request_type(self) -> str:
        return "LLMREQUEST_TYPE_CONTEXT_AND_GENERATION"

    @property
    def max_beam_num_tokens(self) -> int:
        return len(self._tokens)

    def get_num_tokens(self, beam: int) -> int:
        return len(self._tokens)

    def get_tokens(self, beam: int) -> list[int]:
        return list(self._tokens)

    def get_last_tokens(self, beam: int) -> int:
        return self._tokens[-1]

    def add_new_token(self, token: int, beam: int) -> None:
        self._tokens.append(token)

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self.context_chunk_size == self.prompt_len

    def move_to_next_context_chunk(self) -> None:
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = 0

    @property
    def is_finished(self) -> bool:
        return self.state is LlmRequestState.GENERATION_COMPLETE

    @property
    def generated(self) -> int:
        return len(self._tokens) - self.orig_prompt_len

    def will_complete_next_iteration(self) -> bool:
        """Whether one more token, which no one has applied yet, reaches the length."""
        return len(self._tokens) + 1 >= self.orig_prompt_len + self.limit

    @property
    def limit(self) -> int:
        return self.max_new_tokens + (self.prompt_len - self.orig_prompt_len)

    def finish_by_reason(self, reason: FinishReason) -> None:
        self.state, self._reason = LlmRequestState.GENERATION_COMPLETE, reason

    def pause(self, max_input_len: int) -> None:
        """Give up its place: what it generated becomes prompt, all of which is run again."""
        longer = min(max_input_len, len(self._tokens))
        self.max_new_tokens -= longer - self.prompt_len
        self.prompt_len = longer
        self.context_current_position = self.prepopulated_prompt_len = 0
        self.context_chunk_size = longer
        self.seq_slot = None
        self.state = LlmRequestState.CONTEXT_INIT

    def create_child_request(self, child_id: int) -> LlmRequest:
        config = SamplingConfig(**vars(self.sampling_config))
        index = len(self._family.final)
        seed = config.random_seed[0] if config.random_seed else 0
        config.random_seed = [seed + index]
        child = LlmRequest(
            child_id, self.max_new_tokens, self._tokens, config, self.streaming, self.end_id
        )
        child.is_child, child.parent_request_id = True, self.request_id
        child.sequence_index, child._family = index, self._family
        self._family.final.append(False)
        return child

    def create_serialized_result(
        self, use_fast_logits: bool, mpi_world_rank: int
    ) -> tuple[bytes, bool]:
        """Nothing until the end, unless it streams; then what is new."""
        if not (self.is_finished or self.streaming):
            return b"", False
        tokens = self._tokens[self.orig_prompt_len :]
        fresh, self._sent = tokens[self._sent :], len(tokens)
        if self.is_finished:
            self._family.final[self.sequence_index] = True
        elif not fresh:
            return b"", False
        result = Result(
            is_final=all(self._family.final),
            is_sequence_final=self.is_finished,
            sequence_index=self.sequence_index,
            output_token_ids=[fresh],
            finish_reasons=[self._reason],
            decoding_iter=self.decoding_iter,
        )
        return pickle.dumps(result), result.is_final


def deserialize_result(data: bytes) -> Any:
    return pickle.loads(data) if data else None
