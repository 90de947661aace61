"""What front ends and workers have in common."""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from queue import Queue
from types import SimpleNamespace
from typing import Any

from tensorrt_llm._double_queues import RequestError
from tensorrt_llm.executor.request import GenerationRequest
from tensorrt_llm.executor.result import GenerationResult


class GenerationExecutor(ABC):
    def __init__(
        self,
        num_postprocess_workers: int = 0,
        postprocess_tokenizer_dir: str | None = None,
        is_llm_executor: bool | None = None,
    ) -> None:
        atexit.register(self.shutdown)
        self._error_queue: Queue[Exception] = Queue()
        self.doing_shutdown = False
        self._last_client_id = 1
        self._is_llm_executor = is_llm_executor

    @abstractmethod
    def submit(self, request: GenerationRequest) -> GenerationResult: ...

    @abstractmethod
    def abort_request(self, request_id: int) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    def generate_async(
        self,
        prompt_token_ids: list[int],
        sampling_params: Any,
        streaming: bool = False,
    ) -> GenerationResult:
        request = GenerationRequest(
            prompt_token_ids, sampling_params=sampling_params, streaming=streaming
        )
        return self.submit(request)

    def _get_next_client_id(self) -> int:
        self._last_client_id = (self._last_client_id + 1) & ((1 << 64) - 1)
        return self._last_client_id

    def _get_logprob_params(self, request: GenerationRequest) -> Any:
        params = request.sampling_params
        if params.prompt_logprobs is None:
            return None
        return SimpleNamespace(
            prompt_logprobs=params.prompt_logprobs,
            simple=params.prompt_logprobs_simple_format,
            drop_context_logits=not params.return_context_logits,
        )

    def _handle_background_error(self, error: Exception | str | None = None) -> None:
        if isinstance(error, str):
            raise RequestError(error)
        if error is not None:
            self.shutdown()
            raise error
        if not self._error_queue.empty():
            self.shutdown()
            raise self._error_queue.get()

    @staticmethod
    def create(
        engine: Any,
        executor_config: Any = None,
        batched_logits_processor: Any = None,
        model_world_size: int = 1,
        world_size: int = 0,
        mpi_session: Any = None,
        **worker_kwargs: Any,
    ) -> GenerationExecutor:
        """A worker in this process, or a proxy of one in a process of its own.

        The engine does the latter unless TLLM_WORKER_USE_SINGLE_PROCESS is 1; the double does it
        only where that is set to something else.
        """
        from tensorrt_llm.executor.proxy import GenerationExecutorProxy
        from tensorrt_llm.executor.worker import GenerationExecutorWorker

        kwargs = {"engine": engine, **worker_kwargs}
        if os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS", "1") == "1":
            return GenerationExecutorWorker(**kwargs, is_llm_executor=True)
        return GenerationExecutorProxy(kwargs, mpi_session=mpi_session, is_llm_executor=True)
