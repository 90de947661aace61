"""The places in transformers that `rolltape.recorder.transformers` relies on."""

from __future__ import annotations

from rolltape.recorder.targets import Target

_UTILS = "transformers.generation.utils"

TARGETS: tuple[Target, ...] = (
    Target(
        module=_UTILS,
        symbol="GenerationMixin._sample",
        parameters=("input_ids", "logits_processor", "stopping_criteria", "generation_config"),
        gives="tokens, logprobs, supports, routes, schedule, weights",
        instead="generate() is not recorded",
    ),
    Target(
        module=_UTILS,
        symbol="GenerationMixin._prefill",
        gives="schedule",
        instead="forwards that a streamer or a stopping criterion runs are taken for its own",
    ),
    Target(
        module=_UTILS,
        symbol="GenerationMixin._has_unfinished_sequences",
        gives="schedule",
        instead="forwards that a streamer or a stopping criterion runs are taken for its own",
    ),
    Target(
        module=_UTILS,
        symbol="GenerationMixin._valid_auto_compile_criteria",
        gives="routes",
        instead="a compiled decode is not noticed: its routes are missing as not-captured",
    ),
    Target(
        module=_UTILS,
        symbol="GenerationMixin._beam_search",
        gives="lifecycle",
        instead="this version has no beam search under that name; a call leaves no gap",
    ),
    Target(
        module=_UTILS,
        symbol="GenerationMixin._assisted_decoding",
        gives="lifecycle",
        instead="this version has no assisted decoding under that name; its drafts are recorded",
    ),
    Target(
        module=_UTILS,
        symbol="GenerationMixin.generate_batch",
        gives="lifecycle",
        instead="this version has no continuous batching; nothing is lost",
    ),
    Target(
        module="transformers.generation.logits_process",
        symbol="LogitsProcessorList",
        gives="logprobs, supports",
        instead="generate() is not recorded",
    ),
)
