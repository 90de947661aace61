"""The batch of one iteration."""

from __future__ import annotations

from typing import Any


class ScheduledRequests:
    def __init__(self) -> None:
        self.encoder_requests: list[Any] = []
        self.context_requests_chunking: list[Any] = []
        self.context_requests_last_chunk: list[Any] = []
        self.generation_requests: list[Any] = []
        self.paused_requests: list[Any] = []

    @property
    def is_generation_only(self) -> bool:
        return self.num_context_requests == 0 and bool(self.generation_requests)

    @property
    def can_run_cuda_graph(self) -> bool:
        return self.num_context_requests == 0

    @property
    def batch_size(self) -> int:
        return self.num_context_requests + len(self.generation_requests)

    @property
    def num_context_requests(self) -> int:
        return len(self.context_requests_chunking) + len(self.context_requests_last_chunk)

    @property
    def num_generation_requests(self) -> int:
        return len(self.generation_requests)

    @property
    def context_requests(self) -> list[Any]:
        return self.context_requests_chunking + self.context_requests_last_chunk

    def all_requests(self) -> list[Any]:
        return self.context_requests + self.generation_requests

    def append_context_request(self, request: Any) -> None:
        last = request.is_last_context_chunk
        (self.context_requests_last_chunk if last else self.context_requests_chunking).append(
            request
        )

    def append_generation_request(self, request: Any) -> None:
        self.generation_requests.append(request)

    def reset_context_requests(self, context_requests: list[Any] | None = None) -> None:
        self.context_requests_chunking, self.context_requests_last_chunk = [], []
        for request in context_requests or ():
            self.append_context_request(request)
