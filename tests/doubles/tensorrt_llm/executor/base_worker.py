"""A worker: hands requests to the loop, and its responses to whoever waits."""

from __future__ import annotations

import datetime
import weakref
from typing import Any

import torch
from tensorrt_llm._double_bindings import Request
from tensorrt_llm._double_queues import ErrorResponse, RequestError
from tensorrt_llm.executor.executor import GenerationExecutor
from tensorrt_llm.executor.request import GenerationRequest
from tensorrt_llm.executor.result import (
    GenerationResult,
    Logprob,
    LogProbsResult,
    ResponseWrapper,
)


class BaseWorker(GenerationExecutor):
    def __init__(
        self,
        engine: Any,
        batched_logits_processor: Any = None,
        postproc_worker_config: Any = None,
        is_llm_executor: bool | None = None,
        hf_model_dir: Any = None,
        tokenizer: Any = None,
        llm_args: Any = None,
    ) -> None:
        super().__init__(is_llm_executor=is_llm_executor)
        self._engine, self._hf_model_dir, self._tokenizer = engine, hf_model_dir, tokenizer
        self.llm_args = llm_args
        self.engine: Any = None
        self.result_queue: Any = None
        self.postproc_queues: Any = None
        self.frontend_result_queues: Any = None
        self.rank = self.global_rank = 0
        self.device_id = 0
        self._results: dict[int, GenerationResult] = {}
        self._client_id_to_request_id: dict[int, int] = {}
        self._await_response_helper = AwaitResponseHelper(weakref.proxy(self))

    def setup_engine(self) -> None:
        from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor

        self.engine = create_py_executor(
            llm_args=self.llm_args, checkpoint_dir=self._hf_model_dir, tokenizer=self._tokenizer
        )

    def await_responses(self, timeout: float | None = None) -> list[Any]:
        limit = None if timeout is None else datetime.timedelta(seconds=timeout)
        return list(self.engine.await_responses(timeout=limit))

    def set_result_queue(self, queue: Any) -> None:
        self.result_queue = queue

    def return_queue(self, client_id: int) -> Any:
        return self.result_queue or self._results[client_id].queue

    def abort_request(self, client_id: int) -> None:
        name = self._client_id_to_request_id.get(client_id)
        if name is not None and self.engine.can_enqueue_requests():
            self.engine.cancel_request(name)

    def start(self) -> None:
        raise NotImplementedError("start method is not implemented in BaseWorker")

    def _enqueue_request(self, request: GenerationRequest, result_wait_queue: Any = None) -> int:
        params, tokens = request.sampling_params, list(request.prompt_token_ids)
        longest = self.engine.max_seq_len - len(tokens)
        if longest <= 0:
            raise RequestError(f"a prompt of {len(tokens)} tokens is too long")
        try:
            executor_request = Request(
                client_id=request.id,
                input_token_ids=tokens,
                max_tokens=min(params.max_tokens or longest, longest),
                streaming=request.streaming,
                sampling_config=params._get_sampling_config(),
                end_id=-1 if params.ignore_eos else params.end_id,
                stop_words=[] if params.ignore_eos else params._get_stop_words(),
                return_log_probs=params.logprobs is not None,
                return_context_logits=(
                    params.return_context_logits or params.prompt_logprobs is not None
                ),
                py_num_logprobs=params.logprobs,
                py_logprobs_mode=params.logprobs_mode,
                py_logprobs_simple_format=params.logprobs_simple_format,
                py_return_routed_experts=params.return_routed_experts,
                py_additional_outputs=params.additional_model_outputs,
            )
            processors = params.logits_processor
            if processors:
                listed = processors if isinstance(processors, list) else [processors]
                executor_request.py_logits_post_processors = listed
            return int(self.engine.enqueue_request(executor_request))
        except Exception as error:
            raise RequestError(str(error)) from error

    def submit(self, request: GenerationRequest) -> GenerationResult:
        self.start()
        client = request.id if request.id is not None else self._get_next_client_id()
        if request.id is None:
            request.set_id(client)
        result = GenerationResult(
            request,
            background_error_handler=self._handle_background_error,
            executor=self,
            disaggregated_params=request.disaggregated_params,
            logprob_params=self._get_logprob_params(request),
        )
        self._results[client] = result
        self._client_id_to_request_id[client] = self._enqueue_request(request)
        self._handle_background_error()
        return result

    def _pop_result(self, client_id: int) -> None:
        self._results.pop(client_id, None)
        self._client_id_to_request_id.pop(client_id, None)


class AwaitResponseHelper:
    """Takes responses from the loop; called again and again by a thread."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __call__(self, timeout: float | None = None) -> bool:
        limit = datetime.timedelta(seconds=timeout or 0.1)
        engine = self.worker.engine
        self.responses_handler(engine.await_responses(timeout=limit))
        if engine._event_loop_error is None:
            return True
        return self._broadcast_event_loop_error(engine._event_loop_error)

    def _broadcast_event_loop_error(self, error: BaseException) -> bool:
        """Wake all who wait for a loop that died; only those in this process can be."""
        text = f"Event loop terminated with error: {error}"
        if self.worker.result_queue is None:
            for client in list(self.worker._results):
                self.worker.return_queue(client).put(ErrorResponse(client, text, client))
                self.worker._pop_result(client)
        return False

    def responses_handler(self, responses: list[Any]) -> None:
        if self.worker.result_queue is None:
            self.handle_for_worker(responses)
        else:
            self.handle_for_ipc_batched(responses)

    def handle_for_worker(self, responses: list[Any]) -> None:
        for response in responses:
            queue = self.worker.return_queue(response.client_id)
            final = response.has_error() or response.result.is_final
            queue.put(_double_wrap(self.worker, response))
            if final:
                self.worker._pop_result(response.client_id)

    def handle_for_ipc_batched(self, responses: list[Any]) -> None:
        batch = []
        for response in responses:
            final = response.has_error() or response.result.is_final
            if response.has_error():
                error = (response.client_id, response.error_msg, response.request_id)
                batch.append(ErrorResponse(*error))
            else:
                batch.append(_double_wrap(self.worker, response))
            if final:
                self.worker._pop_result(response.client_id)
        if batch:
            self.worker.result_queue.put(batch)


def _double_wrap(worker: Any, response: Any) -> Any:
    """With prompt logprobs, where they were asked for: computed here, from logits, so raw ones."""
    result = worker._results.get(response.client_id)
    params = None if result is None else result._logprob_params
    if params is None or response.has_error():
        return response
    known = getattr(result, "_cached_prompt_logprobs", None)
    if known is None:
        first = response.result.get_result().output_token_ids[0][:1]
        scored = result._generation_request.prompt_token_ids[1:] + first
        known = _double_prompt_logprobs(response.result.context_logits, scored, params)
        result._cached_prompt_logprobs = known
    if params.drop_context_logits:
        response.clear_context_logits()
    return ResponseWrapper(response, LogProbsResult(prompt=known))


def _double_prompt_logprobs(logits: torch.Tensor, scored: list[int], params: Any) -> list[Any]:
    """Entry i scores token i + 1; the last one the first that was generated.

    Where a prefix was taken over there are logits of the rest only. They are paired from the front
    nevertheless, which is wrong, without a word.
    """
    if logits is None:  # cancelled before any of it ran
        return []
    values, found = logits.float().log_softmax(-1), []
    for row, token in zip(values, scored, strict=False):
        if params.simple:
            found.append(float(row[token]))
            continue
        top = row.topk(params.prompt_logprobs)
        ids = top.indices.tolist()
        entry = {i: Logprob(float(row[i]), rank + 1) for rank, i in enumerate(ids)}
        rank = int((row > row[token]).sum()) + 1
        entry.setdefault(token, Logprob(float(row[token]), rank))
        found.append(entry)
    return found
