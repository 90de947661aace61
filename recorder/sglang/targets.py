"""The places in SGLang that the adapter patches or reads."""

from __future__ import annotations

from rolltape.recorder.targets import Target

_MANAGER = "sglang.srt.managers.tokenizer_manager"
_STRUCT = "sglang.srt.managers.io_struct"
_UPDATES = ("disk", "tensor", "distributed", "ipc")

TARGETS: tuple[Target, ...] = (
    Target(
        module=_MANAGER,
        symbol="TokenizerManager._send_one_request",
        parameters=("tokenized_obj",),
        gives="tokens, lifecycle",
        instead="nothing is recorded",
    ),
    Target(
        module=_MANAGER,
        symbol="TokenizerManager._send_batch_request",
        parameters=("tokenized_objs",),
        gives="tokens, lifecycle",
        instead="batches that are tokenized as one are not recorded",
    ),
    Target(
        module=_MANAGER,
        symbol="TokenizerManager._handle_batch_output",
        parameters=("recv_obj",),
        gives="tokens, logprobs, routes, supports, weights, lifecycle",
        instead="nothing is recorded",
    ),
    Target(
        module=_MANAGER,
        symbol="TokenizerManager._handle_abort_req",
        parameters=("recv_obj",),
        gives="lifecycle",
        instead="requests that are aborted before they run stay open",
    ),
    Target(
        module=_STRUCT,
        symbol="TokenizedGenerateReqInput",
        parameters=("rid", "input_ids", "sampling_params", "return_logprob"),
        gives="tokens",
        instead="nothing is recorded",
    ),
    Target(
        module=_STRUCT,
        symbol="BatchStrOutput",
        parameters=(
            "rids",
            "output_ids",
            "finished_reasons",
            "output_token_logprobs_val",
            "output_token_logprobs_idx",
        ),
        gives="tokens, logprobs",
        instead="nothing is recorded",
    ),
    Target(
        module=_STRUCT,
        symbol="BatchStrOutput",
        parameters=("routed_experts",),
        gives="routes",
        instead="routes are missing, reason not-captured",
    ),
    Target(
        module=_STRUCT,
        symbol="BatchStrOutput",
        parameters=("output_token_sampling_mask",),
        gives="supports",
        instead="kept sets are known only where nothing is cut, or for greedy requests",
    ),
    Target(
        module=_STRUCT,
        symbol="BatchStrOutput",
        parameters=("weight_versions",),
        gives="weights",
        instead="all tokens of a request get the version in force when it ended",
    ),
    Target(
        module=_STRUCT,
        symbol="BatchStrOutput",
        parameters=("retraction_counts", "cached_tokens"),
        gives="lifecycle",
        instead="retracted requests and cached prefixes are not told apart",
    ),
    *(
        Target(
            module=_MANAGER,
            symbol=f"TokenizerManager.update_weights_from_{kind}",
            parameters=("obj",),
            gives="weights",
            instead=f"updates from {kind} are not noticed",
        )
        for kind in _UPDATES
    ),
    Target(
        module=_MANAGER,
        symbol="TokenizerManager.update_weight_version",
        parameters=("obj",),
        gives="weights",
        instead="a version that is only given a name is noticed with the next answer",
    ),
    Target(
        module=_MANAGER,
        symbol="TokenizerManager.resolved_config_dict",
        gives="settings",
        instead="settings are those of the server's arguments, not as resolved",
    ),
)
