"""The front end of a worker in a process of its own."""

from __future__ import annotations

import threading
from queue import Queue
from typing import Any

from tensorrt_llm._double_queues import ErrorResponse
from tensorrt_llm.executor.executor import GenerationExecutor
from tensorrt_llm.executor.request import CancellingRequest, GenerationRequest
from tensorrt_llm.executor.result import GenerationResult
from tensorrt_llm.executor.worker import GenerationExecutorWorker, worker_main
from tensorrt_llm.llmapi.mpi_session import MpiPoolSession


class GenerationExecutorProxy(GenerationExecutor):
    READY_SIGNAL = b"READY"
    doing_shutdown: bool

    def __init__(
        self,
        worker_kwargs: dict[str, Any],
        model_world_size: int = 1,
        mpi_session: Any = None,
        *,
        worker_cls: type = GenerationExecutorWorker,
        postproc_worker_config: Any = None,
        is_llm_executor: bool | None = None,
    ) -> None:
        super().__init__(is_llm_executor=is_llm_executor)
        self.workers_started = False
        self.worker_cls = worker_cls
        self.mpi_session = mpi_session or MpiPoolSession(n_workers=model_world_size)
        self._results: dict[int, GenerationResult] = {}
        self._double_answers: Queue[Any] = Queue()
        self._start_executor_workers(worker_kwargs)

    def _start_executor_workers(self, worker_kwargs: dict[str, Any]) -> None:
        self.request_queue = self.mpi_session._double_start(
            worker_main,
            {
                **worker_kwargs,
                "log_level": "error",
                "worker_cls": self.worker_cls,
                "is_llm_executor": False,
                "ready_signal": self.READY_SIGNAL,
            },
        )
        self.result_queue = self.request_queue  # one connection for both directions
        signal = self.request_queue.recv()
        if signal != self.READY_SIGNAL:
            self.mpi_session.shutdown()
            raise RuntimeError("Executor worker returned error") from signal
        self.workers_started = True
        self.dispatch_result_thread = threading.Thread(target=self._double_dispatch, daemon=True)
        self.dispatch_result_thread.start()

    def abort_request(self, request_id: int) -> None:
        self.request_queue.send(CancellingRequest(request_id))

    def dispatch_result_task(self) -> bool:
        message = self.request_queue.recv()
        if message is None:
            return False
        if isinstance(message, tuple) and message[0] in ("submitted", "called"):
            self._double_answers.put(message[1])
            return True
        for response in message:
            queue = self._results[response.client_id].queue
            if isinstance(response, ErrorResponse) or response.result.is_final:
                self._results.pop(response.client_id)
            queue.put(response)
        return True

    def submit(self, request: GenerationRequest) -> GenerationResult:
        request.set_id(self._get_next_client_id())
        result = GenerationResult(
            request,
            background_error_handler=self._handle_background_error,
            executor=self,
            disaggregated_params=request.disaggregated_params,
            logprob_params=self._get_logprob_params(request),
        )
        self._results[request.id] = result
        self.request_queue.send(request)
        error = self._double_answers.get()
        if isinstance(error, Exception):
            raise error
        return result

    def pre_shutdown(self) -> None:
        if self.workers_started and not self.doing_shutdown:
            self.doing_shutdown = True
            for result in list(self._results.values()):
                result.abort()
            self.request_queue.send(None)

    def shutdown(self) -> None:
        if not self.workers_started:
            return
        self.pre_shutdown()
        self.dispatch_result_thread.join()
        self.workers_started = False
        self.mpi_session.shutdown()

    def _double_call(self, function: Any, *args: Any) -> Any:
        """What `function(worker, *args)` gives in the worker; both have to be importable there."""
        self.request_queue.send((function, args))
        return self._double_answers.get()

    def _double_dispatch(self) -> None:
        try:
            while self.dispatch_result_task():
                pass
        except EOFError:
            self._error_queue.put(RuntimeError("Executor worker died"))
