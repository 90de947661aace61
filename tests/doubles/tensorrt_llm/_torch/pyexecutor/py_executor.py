"""The loop that schedules, runs and answers, in a thread of its own.

Without overlap each iteration applies its own tokens. With it the tokens of iteration i are applied
while i + 1 has been launched: a request that ends by a stop token has run one step more by then,
one that ends by its length has not, since that is known beforehand; one that is cancelled is still
part of the batch that was launched.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tensorrt_llm._double_bindings import FinishReason, LlmRequestState
from tensorrt_llm._double_truth import TRUTH
from tensorrt_llm._torch.pyexecutor.llm_request import (
    LlmResponse,
    executor_request_to_llm_request,
)
from tensorrt_llm._torch.pyexecutor.scheduler.scheduler import ScheduledRequests
from tensorrt_llm._torch.route_capture import RouteCapture


class PyExecutor:
    """`kv_connector_manager`, if a test sets one, may drop context requests of a scheduled batch.

    `_double_peer_steps(n)` says that another attention-DP rank has work for n more iterations.
    """

    def __init__(
        self,
        resource_manager: Any,
        scheduler: Any,
        model_engine: Any,
        sampler: Any,
        dist: Any,
        disable_overlap_scheduler: bool = False,
        max_input_len: int = 2048,
        max_batch_size: int = 8,
        max_draft_tokens: int = 0,
        start_worker: bool = True,
    ) -> None:
        self.resource_manager, self.scheduler = resource_manager, scheduler
        self.model_engine, self.sampler, self.dist = model_engine, sampler, dist
        self.llm_args = model_engine.llm_args
        self.enable_attention_dp = model_engine.enable_attention_dp
        self.disable_overlap_scheduler = disable_overlap_scheduler
        self.max_input_len, self.max_batch_size = max_input_len, max_batch_size
        self.max_seq_len = model_engine.max_seq_len
        self.stream_interval = self.llm_args.stream_interval
        self.kv_cache_manager = resource_manager.get_resource_manager("kv_cache_manager")
        self.kv_connector_manager: Any = None
        self.request_queue: queue.Queue[Any] = queue.Queue()
        self.next_req_id = max_batch_size  # those below are kept for dummies
        self.active = True
        self.is_warmup = False
        self.is_shutdown = False
        self.active_requests: list[Any] = []
        self.waiting_queue: list[Any] = []
        self.canceled_req_ids: list[int] = []
        self.control_requests: list[bool] = []
        self.control_request_barrier = threading.Event()
        self.control_action_done = threading.Event()
        self.previous_batch: Any = None
        self.iter_counter = 0
        self.responses: dict[int, list[LlmResponse]] = {}
        self.response_cv = threading.Condition()
        self.enqueue_lock = threading.Lock()
        self.shutdown_event = threading.Event()
        self._event_loop_error: Exception | None = None
        self._double_peer = 0
        overlapped = not disable_overlap_scheduler
        self.event_loop = self._executor_loop_overlap if overlapped else self._executor_loop
        self.worker_started = False
        if start_worker:
            self.start_worker()

    @property
    def is_warmup(self) -> bool:
        return getattr(self, "_is_warmup", False)

    @is_warmup.setter
    def is_warmup(self, value: bool) -> None:
        self._is_warmup = value
        self.model_engine.is_warmup = value

    # -- called by others ------------------------------------------------------------------

    def start_worker(self) -> None:
        if not self.worker_started:
            target = self._event_loop_wrapper
            self.worker_thread = threading.Thread(target=target, daemon=True, name="py_executor")
            self.worker_started = True
            self.worker_thread.start()

    def enqueue_requests(self, requests: list[Any]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    def enqueue_request(self, request: Any) -> int:
        """Its samples take ids of their own, which follow."""
        with self.enqueue_lock:
            if not self.active:
                raise RuntimeError("PyExecutor has already been shutdown.")
            name = self.next_req_id
            self.next_req_id += request.sampling_config.num_return_sequences
            self.request_queue.put((name, request))
        return name

    def await_responses(self, id: Any = None, timeout: Any = None) -> list[Any]:
        seconds = None if timeout is None else timeout.total_seconds()
        if id is None:
            return self._await_any_response(timeout=seconds)
        if isinstance(id, int):
            return self._await_single_response(id, seconds)
        return [self._await_single_response(name, seconds) for name in id]

    def _await_any_response(self, timeout: float | None = None) -> list[Any]:
        with self.response_cv:
            self.response_cv.wait_for(lambda: self.responses or self.is_shutdown, timeout=timeout)
            taken, self.responses = self.responses, {}
        return [response for responses in taken.values() for response in responses]

    def _await_single_response(self, id: int, timeout: float | None = None) -> list[Any]:
        with self.response_cv:
            self.response_cv.wait_for(lambda: id in self.responses, timeout=timeout)
            return self.responses.pop(id, [])

    def cancel_request(self, id: int) -> None:
        self.request_queue.put(("cancel", id))  # behind the request itself

    def can_enqueue_requests(self) -> bool:
        return self.active

    def shutdown(self) -> None:
        with self.enqueue_lock:
            self.active = False
            self.request_queue.put("shutdown")
        if self.worker_started:
            self.shutdown_event.wait()
            self.worker_thread.join()
            self.worker_started = False
        for manager in self.resource_manager.resource_managers.values():
            manager.shutdown()

    def wait_shutdown(self) -> None:
        self.shutdown_event.wait()

    @contextlib.contextmanager
    def control_action(
        self, *, drain: bool = True, control_id: str | None = None
    ) -> Iterator[PyExecutor]:
        """The loop stands still inside; drained first, or between two iterations."""
        self.request_queue.put(drain)
        self.control_request_barrier.wait()
        try:
            yield self
        finally:
            self.control_request_barrier.clear()
            self.control_action_done.set()

    def reset_prefix_cache(self) -> None:
        self.kv_cache_manager.reset_reuse_state()
        RouteCapture.clear_shared()

    def _double_peer_steps(self, steps: int) -> None:
        self._double_peer += steps
        self.request_queue.put(None)

    # -- the loop --------------------------------------------------------------------------

    def _event_loop_wrapper(self) -> None:
        try:
            self.event_loop()
        except Exception as error:
            self._event_loop_error = error
        finally:
            with self.response_cv:
                self.is_shutdown = True
                self.response_cv.notify_all()
            self.shutdown_event.set()

    def _executor_loop(self) -> None:
        while True:
            batch = self._double_prepare()
            if batch is None:
                break
            self._terminate_requests(batch.paused_requests)
            self._pause_requests(batch.paused_requests)
            if batch.batch_size:
                self._double_resources(batch)
            if batch.batch_size:
                outputs = self._forward_step(batch)
                state = self._sample_async(batch, outputs)
                self._update_request_states(batch)
                self._update_requests(state)
                self._handle_cancelled_requests()
                self._handle_responses()
                self.resource_manager.update_resources(batch)
            else:
                self._handle_cancelled_requests()
                self._handle_responses()
            self.iter_counter += 1

    def _executor_loop_overlap(self) -> None:
        while True:
            batch = self._double_prepare()
            if batch is None:
                break
            self._terminate_requests(batch.paused_requests)
            if batch.batch_size:
                self._double_resources(batch)
            ran = batch.batch_size > 0
            previous = self.previous_batch
            if ran:
                batch.generation_requests = sorted(
                    batch.generation_requests, key=lambda r: int(r.py_batch_idx is not None)
                )
                device = previous and previous.device
                outputs = self._forward_step(batch, device)
            if previous is not None:
                self._update_requests(previous)
            self._pause_requests(batch.paused_requests)
            state = None
            if ran:
                state = self._sample_async(batch, outputs)
                self._update_request_states(batch)
            if previous is not None:
                self._process_previous_batch()
            else:
                self._handle_cancelled_requests()
                self._handle_responses()
            self.previous_batch = state
            self.iter_counter += 1

    def _double_prepare(self) -> Any:
        """Take what arrived, schedule, and stand still if somebody asked for it."""
        self._fetch_and_activate_new_requests()
        if self.is_shutdown and not self.active_requests:
            return None
        self._pad_attention_dp_dummy_request()
        batch, _, _ = self._schedule()
        if self.control_requests:
            drain = self.control_requests[0]
            idle = not (self.active_requests or self.waiting_queue)
            if not drain or idle:
                self.control_requests.pop(0)
                self.control_action_done.clear()
                self.control_request_barrier.set()
                self.control_action_done.wait()
        return batch

    def _fetch_and_activate_new_requests(self) -> list[Any]:
        idle = not (self.active_requests or self.waiting_queue or self.control_requests)
        idle = idle and self.previous_batch is None and not self._double_peer
        # what was handed in after a control action waits until that is over
        while not self.control_requests and (idle or not self.request_queue.empty()):
            item = self.request_queue.get()
            idle = False
            if item == "shutdown":
                self.is_shutdown = True
            elif isinstance(item, bool):
                self.control_requests.append(item)
            elif item is not None and item[0] == "cancel":
                self.canceled_req_ids.append(item[1])
            elif item is not None:
                self.waiting_queue.append(item)
        new = self._merge_requests(self.waiting_queue)
        self.waiting_queue = []
        self.active_requests += new
        return new

    def _merge_requests(self, new_requests: list[Any]) -> list[Any]:
        found = []
        for name, executor_request in new_requests:
            samples = executor_request.sampling_config.num_return_sequences
            children = [name + i for i in range(1, samples)]
            request = executor_request_to_llm_request(name, executor_request, children)
            found += [request, *request.child_requests]
        return found

    def _schedule(self) -> tuple[ScheduledRequests, list[Any], int]:
        batch = self.scheduler.schedule_request(self.active_requests)
        idle = not batch.batch_size and not batch.paused_requests and self.previous_batch is None
        if idle and self.active_requests:  # nothing that could still end stands in the way
            text = "fail to schedule any pending request, probably run out of resource."
            self._handle_errors(text)
        return batch, [], batch.batch_size

    def _pad_attention_dp_dummy_request(self) -> None:
        """A rank without requests runs a dummy while another rank has some."""
        if not self.enable_attention_dp or not self._double_peer:
            return
        self._double_peer -= 1
        if not self.active_requests:
            dummy = self.kv_cache_manager.add_dummy_requests(request_ids=[0], is_gen=True)[0]
            dummy.is_attention_dp_dummy = True
            self.active_requests.append(dummy)

    def _double_resources(self, batch: Any) -> None:
        """Blocks and slots; between them and the forward requests may be dropped."""
        self.resource_manager.prepare_resources(batch)
        if self.kv_connector_manager is not None:
            self.kv_connector_manager.take_scheduled_requests_pending_load(batch)

    def _forward_step(
        self,
        scheduled_requests: Any,
        new_tensors_device: Any = None,
        num_accepted_tokens_device: torch.Tensor | None = None,
    ) -> Any:
        """Outputs of the model; None if it failed, and then all requests have an error."""
        gather = any(r.py_return_context_logits for r in scheduled_requests.context_requests)
        try:
            RouteCapture.prepare(scheduled_requests, self.kv_cache_manager.tokens_per_block)
            outputs = self.model_engine.forward(
                scheduled_requests,
                self.resource_manager,
                new_tensors_device,
                gather_context_logits=gather,
            )
            RouteCapture.finish_forward()
            return outputs
        except Exception as error:
            self._handle_errors(str(error))
            return None

    def _sample_async(self, scheduled_batch: Any, batch_outputs: Any) -> Any:
        if batch_outputs is None:
            return None
        gather = any(r.py_return_context_logits for r in scheduled_batch.context_requests)
        return self.sampler.sample_async(scheduled_batch, batch_outputs["logits"], gather)

    def _update_request_states(self, scheduled_requests: Any) -> None:
        self._update_request_states_tp(scheduled_requests)

    def _update_request_states_tp(self, scheduled_requests: Any) -> None:
        overlap = not self.disable_overlap_scheduler
        for request in scheduled_requests.context_requests:
            if request.is_finished:
                continue
            start = request.context_current_position
            request.py_last_context_chunk = (start, start + request.context_chunk_size)
            request.move_to_next_context_chunk()
            if request.context_remaining_length == 0:
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
                if overlap and request.will_complete_next_iteration():
                    request.state = LlmRequestState.GENERATION_TO_COMPLETE
        for request in scheduled_requests.generation_requests:
            if request.is_attention_dp_dummy:
                request.state = LlmRequestState.GENERATION_COMPLETE
            elif not request.is_finished and overlap and request.will_complete_next_iteration():
                request.state = LlmRequestState.GENERATION_TO_COMPLETE

    def _update_requests(self, sample_state: Any, resource_manager: Any = None) -> None:
        if sample_state is not None:
            self.sampler.update_requests(sample_state)

    def _process_previous_batch(self) -> None:
        self._handle_cancelled_requests()
        self._handle_responses()
        self.resource_manager.update_resources(self.previous_batch.scheduled_requests)

    # -- ends ------------------------------------------------------------------------------

    def _handle_cancelled_requests(self) -> None:
        names, self.canceled_req_ids = set(self.canceled_req_ids), []
        if not names:
            return
        for request in self.active_requests:
            name = request.parent_request_id if request.is_child else request.py_request_id
            if name in names:
                TRUTH.events.append(("cancel", request.py_request_id))
                request.finish_by_reason(FinishReason.CANCELLED)
                request.decoding_iter = request.py_decoding_iter

    def _handle_responses(self) -> list[Any]:
        answers: list[Any] = []
        over: list[Any] = []
        left: list[Any] = []
        for request in self.active_requests:
            if request.is_attention_dp_dummy:
                (over if request.is_finished else left).append(request)
                continue
            request.decoding_iter = count = request.py_decoding_iter
            due = count == 1 or request.is_finished or count % self.stream_interval == 0
            if request.is_finished:
                RouteCapture.attach_routes(request)
            response = request.create_response(False, 0) if due else None
            if response is not None:
                response.result.cached_tokens = request.cached_tokens
                answers.append((request.py_request_id, response))
            (over if request.is_finished else left).append(request)
        self.active_requests[:] = left
        self._enqueue_responses(answers)
        self._terminate_requests(over)
        return over

    def _handle_errors(self, error_msg: str | None = None) -> None:
        failed, answers = list(self.active_requests), []
        for request in failed:
            request.finish_by_reason(FinishReason.NOT_FINISHED)
            name, client = request.py_request_id, request.py_client_id
            answers.append((name, LlmResponse(name, error_msg or "error", client_id=client)))
        self.active_requests.clear()
        self._enqueue_responses(answers)
        self._terminate_requests(failed)

    def _enqueue_responses(self, responses: Iterable[tuple[int, Any]]) -> None:
        with self.response_cv:
            for name, response in responses:
                self.responses.setdefault(name, []).append(response)
            self.response_cv.notify_all()

    def _terminate_requests(self, requests_to_terminate: Iterable[Any]) -> None:
        for request in requests_to_terminate:
            self._terminate_request(request)

    def _terminate_request(self, request: Any) -> None:
        """Take its blocks and slot; also of one that is paused and will come back."""
        self.resource_manager.free_resources(request)

    def _pause_requests(self, requests_to_pause: Iterable[Any]) -> None:
        for request in requests_to_pause:
            if not request.is_finished:
                TRUTH.events.append(("pause", request.py_request_id))
                request.pause(self.max_input_len)
