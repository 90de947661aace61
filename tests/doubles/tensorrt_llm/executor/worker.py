"""The worker of the PyTorch back end, and what a worker process runs."""

from __future__ import annotations

import threading
from typing import Any

from tensorrt_llm._double_truth import TRUTH
from tensorrt_llm.executor.base_worker import BaseWorker
from tensorrt_llm.executor.request import CancellingRequest, GenerationRequest


class GenerationExecutorWorker(BaseWorker):
    doing_shutdown: bool
    engine: Any

    def __init__(
        self,
        engine: Any,
        executor_config: Any = None,
        batched_logits_processor: Any = None,
        postproc_worker_config: Any = None,
        is_llm_executor: bool | None = None,
        hf_model_dir: Any = None,
        tokenizer: Any = None,
        llm_args: Any = None,
    ) -> None:
        super().__init__(
            engine,
            is_llm_executor=is_llm_executor,
            hf_model_dir=hf_model_dir,
            tokenizer=tokenizer,
            llm_args=llm_args,
        )
        self.setup_engine()
        self._double_stop = threading.Event()
        self.await_response_thread = threading.Thread(target=self._double_await, daemon=True)

    def await_response_task(self) -> bool:
        return self._await_response_helper(timeout=0.02)

    def start_thread(self, thread: threading.Thread) -> None:
        if self.engine.can_enqueue_requests() and not thread.is_alive():
            thread.start()

    def start(self) -> None:
        self.start_thread(self.await_response_thread)

    def shutdown(self) -> None:
        if self.doing_shutdown:
            return
        self.doing_shutdown = True
        self._double_stop.set()
        if self.await_response_thread.is_alive():
            self.await_response_thread.join()
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None

    def _double_await(self) -> None:
        while not self._double_stop.is_set() and self.await_response_task():
            pass


def worker_main(
    engine: Any,
    worker_queues: Any,
    log_level: str,
    worker_cls: type = GenerationExecutorWorker,
    ready_signal: Any = None,
    is_llm_executor: bool | None = True,
    hf_model_dir: Any = None,
    tokenizer: Any = None,
    llm_args: Any = None,
) -> None:
    """Serve one front end: `worker_queues` is the connection to it."""
    try:
        worker = worker_cls(
            engine,
            is_llm_executor=is_llm_executor,
            hf_model_dir=hf_model_dir,
            tokenizer=tokenizer,
            llm_args=llm_args,
        )
    except Exception as error:
        worker_queues.send(error)
        return
    results = _double_Sender(worker_queues)
    worker.set_result_queue(results)
    worker_queues.send(ready_signal)
    while (request := _double_next(worker_queues)) is not None:
        if isinstance(request, CancellingRequest):
            worker.abort_request(request.id)
        elif isinstance(request, GenerationRequest):
            try:
                worker.submit(request)
                results.put(("submitted", None))
            except Exception as error:
                results.put(("submitted", error))
        else:
            function, args = request
            results.put(("called", function(worker, *args)))
    worker.shutdown()
    TRUTH.save()
    results.put(None)


def _double_next(connection: Any) -> Any:
    try:
        return connection.recv()
    except EOFError:  # the front end died
        return None


class _double_Sender:
    """Several threads send."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def put(self, item: Any) -> None:
        with self._lock:
            self._connection.send(item)
