"""Results as the caller sees them; responses are handled where the caller waits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, NamedTuple

import torch
from tensorrt_llm._double_bindings import FinishReason
from tensorrt_llm._double_queues import AsyncQueue, ErrorResponse, has_event_loop


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


class LogProbsResult(NamedTuple):
    prompt: Any = None
    generation: Any = None


class ResponseWrapper:
    """A response with what the worker computed from it."""

    def __init__(
        self,
        response: Any,
        logprobs: LogProbsResult | None = None,
        request_perf_metrics: Any = None,
    ) -> None:
        self._response = response
        self.logprobs = logprobs
        self.request_perf_metrics = request_perf_metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_response"), name)

    def __getstate__(self) -> Any:
        return (self._response, self.logprobs, self.request_perf_metrics)

    def __setstate__(self, state: Any) -> None:
        self._response, self.logprobs, self.request_perf_metrics = state


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: torch.Tensor | None = None
    additional_context_outputs: dict[str, torch.Tensor] | None = None
    additional_generation_outputs: dict[str, torch.Tensor] | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]


_double_reasons = {
    FinishReason.END_ID: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timeout",
}


class GenerationResultBase:
    def __init__(
        self,
        id: int,
        sampling_params: Any,
        ray_queue: Any = None,
        background_error_handler: Callable[..., Any] | None = None,
        postproc_params: Any = None,
    ) -> None:
        self.id = id
        self.sampling_params = sampling_params
        self.disaggregated_params: Any = None
        self.decoding_iter = 0
        self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self._done = False
        self.aqueue = AsyncQueue() if has_event_loop() else None
        self.queue: Any = self.aqueue.sync_q if self.aqueue else Queue()
        self._outputs = [CompletionOutput(i) for i in range(sampling_params.best_of)]
        self._context_logits: torch.Tensor | None = None
        self._background_error_handler: Any = None
        if background_error_handler is not None:
            self._background_error_handler = weakref.WeakMethod(background_error_handler)

    @property
    def outputs(self) -> list[CompletionOutput]:
        n, all_of_them = self.sampling_params.n, self._outputs
        if n == self.sampling_params.best_of:
            return all_of_them[:n]
        lowest = float("-inf")
        ranked = sorted(
            all_of_them,
            key=lambda o: lowest if o.cumulative_logprob is None else o.cumulative_logprob,
            reverse=True,
        )
        for index, output in enumerate(ranked):
            output.index = index
        return ranked[:n]

    @property
    def context_logits(self) -> torch.Tensor | None:
        return self._context_logits

    def _handle_sequence(
        self,
        finish_reasons: Any,
        response_tensors: Any,
        sequence_index: int,
        logprobs_result: Any = None,
        req_perf_metrics_dict: Any = None,
    ) -> None:
        """Of several samples only the last one to end is told why here, unless it was cancelled."""
        output, reason = self._outputs[sequence_index], finish_reasons[0]
        output._last_token_ids_len = len(output.token_ids)
        output.token_ids.extend(response_tensors.output_token_ids[0])
        if response_tensors.cum_log_probs is not None:
            output.cumulative_logprob = response_tensors.cum_log_probs[0]
        if logprobs_result and logprobs_result.prompt is not None:
            output.prompt_logprobs = logprobs_result.prompt
        if response_tensors.log_probs is not None:
            self._double_logprobs(output, response_tensors.log_probs[0], reason)
        if response_tensors.additional_generation_outputs is not None:
            output.additional_generation_outputs = response_tensors.additional_generation_outputs
        if reason is FinishReason.CANCELLED:
            output.finish_reason = "cancelled"
        if not self._done:
            return
        if reason is FinishReason.STOP_WORDS:
            output.finish_reason = "stop"
            for stop_reason, ids in self.sampling_params._get_stop_reasons_and_words():
                if output.token_ids[-len(ids) :] == ids:
                    output.stop_reason = stop_reason
                    if not self.sampling_params.include_stop_str_in_output:
                        output.token_ids = output.token_ids[: -len(ids)]
                    break
        elif reason is not FinishReason.CANCELLED:
            output.finish_reason = _double_reasons[reason]

    def _double_logprobs(self, output: CompletionOutput, entries: list[Any], reason: Any) -> None:
        output._last_logprobs_len = before = len(output.logprobs)
        output.logprobs += entries if self._double_streams() else entries[before:]
        if reason is not FinishReason.CANCELLED:
            # the worker may have gone on meanwhile
            output.logprobs = output.logprobs[: output.length]

    def _double_streams(self) -> bool:
        return bool(getattr(self, "_streaming", False))

    def _handle_response(self, response: Any) -> None:
        logprobs_result, metrics = None, None
        if isinstance(response, ResponseWrapper):
            logprobs_result, metrics = response.logprobs, response.request_perf_metrics
            response = response._response
        if isinstance(response, ErrorResponse) or response.has_error():
            handler = self._background_error_handler and self._background_error_handler()
            if handler:
                handler(response.error_msg)
            return
        result = response.result
        if isinstance(result._result, bytes):
            result.deserialize()
        self._done = result.is_final
        self.decoding_iter = result.decoding_iter
        self.cached_tokens = result.cached_tokens
        self._handle_sequence(
            result.finish_reasons, result, result.sequence_index, logprobs_result, metrics
        )
        if result.context_logits is not None:
            self._context_logits = result.context_logits
        handler = self._background_error_handler and self._background_error_handler()
        if handler:
            handler()


class DetokenizedGenerationResultBase(GenerationResultBase):
    def __init__(
        self,
        id: int,
        sampling_params: Any,
        tokenizer: Any = None,
        streaming: bool = False,
        background_error_handler: Callable[..., Any] | None = None,
        postproc_params: Any = None,
    ) -> None:
        super().__init__(id, sampling_params, None, background_error_handler, postproc_params)
        self.tokenizer = tokenizer
        self._streaming = streaming

    def _handle_response(self, response: Any) -> None:
        """Also looks for stop strings in the text, and aborts the request when it finds one."""
        GenerationResultBase._handle_response(self, response)
        params = self.sampling_params
        if not params.detokenize or self.tokenizer is None:
            return
        for output in self.outputs:
            output._last_text_len = len(output.text)
            output.text = self.tokenizer.decode(output.token_ids)
            if self._done and output.finish_reason not in ("stop", "length"):
                continue
            for stop_reason, _ in params._get_stop_reasons_and_words():
                if isinstance(stop_reason, str) and stop_reason in output.text:
                    end = output.text.find(stop_reason)
                    kept = len(stop_reason) if params.include_stop_str_in_output else 0
                    output.text = output.text[: end + kept]
                    output.finish_reason, output.stop_reason = "stop", stop_reason
                    self.abort()
                    self._done = True
                    break


class GenerationResult(GenerationResultBase):
    """What a submitted request is waited for with; iterable and awaitable."""

    def __init__(
        self,
        generation_request: Any,
        background_error_handler: Callable[..., Any] | None = None,
        executor: Any = None,
        disaggregated_params: Any = None,
        logprob_params: Any = None,
    ) -> None:
        super().__init__(
            generation_request.id,
            generation_request.sampling_params,
            None,
            background_error_handler,
            postproc_params=generation_request.postproc_params,
        )
        self._generation_request = generation_request
        self._streaming = generation_request.streaming
        self._logprob_params = logprob_params
        self._executor: Any = weakref.ref(executor) if executor else None
        self._aborted = False

    @property
    def request_id(self) -> int:
        return int(self._generation_request.id)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self._generation_request.prompt_token_ids)

    def abort(self) -> None:
        self._executor().abort_request(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    @property
    def finished(self) -> bool:
        return self._done

    def _result_step(self, timeout: float | None = None) -> None:
        self._handle_response(self.queue.get())

    async def _aresult_step(self) -> None:
        self._handle_response(await self.aqueue.get())

    def result(self, timeout: float | None = None) -> GenerationResult:
        while not self._done:
            self._result_step(timeout)
        return self

    async def aresult(self) -> GenerationResult:
        while not self._done:
            await self._aresult_step()
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._done:
            raise StopIteration
        self._result_step()
        return self

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        if self._done:
            raise StopAsyncIteration
        await self._aresult_step()
        return self

    def __hash__(self) -> int:
        return hash(self.request_id)
