"""Digests of tensor groups: shards, fused tensors and files add up to the same numbers."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import rolltape  # noqa: E402
from rolltape import store  # noqa: E402
from rolltape.recorder.canonical import Region, contiguous, gate_up, place  # noqa: E402
from rolltape.recorder.digest import (  # noqa: E402
    GroupDigest,
    Part,
    group_digests,
    sum_shards,
    weights_digest,
    weights_stamp,
)
from rolltape.recorder.parts import (  # noqa: E402
    digests_of_transformers,
    parts_of_files,
    parts_of_transformers,
)

pytestmark = pytest.mark.engine

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MOE = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
DEEP = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**MOE, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": DEEP,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


def make(family: str, dtype: Any = torch.bfloat16) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_()
    return model.eval()


def by_group(rows: Any) -> dict[str, GroupDigest]:
    return {row.group: row for row in rows if row.group != "derived"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_boxes_of_any_split_sum_to_the_whole(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int8, torch.bool]))
    tensor = torch.randint(-9, 9, shape).to(dtype)
    whole = group_digests([Part(name="w", tensor=tensor, group="g")])
    cuts = [sorted(data.draw(st.sets(st.integers(1, n), max_size=2)) | {0, n}) for n in shape]
    region = Region(name="w", start=(0,) * len(shape), stop=tuple(shape), strides=contiguous(shape))
    boxes: list[list[slice]] = [[]]
    for edges in cuts:
        pairs = list(itertools.pairwise(edges))
        boxes = [[*box, slice(a, b)] for box in boxes for a, b in pairs]
    shards = [
        group_digests(
            place(region, tensor[tuple(box)], group="g", origin=[part.start for part in box])
        )
        for box in boxes
    ]
    assert sum_shards(shards) == whole


def test_a_fused_tensor_is_the_sum_of_its_parts_in_either_order() -> None:
    gates, ups = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    apart = group_digests(
        Part(name=f"e.{i}.{n}.weight", tensor=t[i], group="g")
        for n, t in (("gate", gates), ("up", ups))
        for i in range(3)
    )
    for order, names in (((gates, ups), ("gate", "up")), ((ups, gates), ("up", "gate"))):
        fused = torch.cat(order, 1)
        regions = gate_up("e", names, range(3), fused.shape)
        parts = [p for region in regions for p in place(region, fused, group="g")]
        assert group_digests(parts) == apart
    swapped = gate_up("e", ("gate", "up"), range(3), fused.shape)
    wrong = group_digests(p for region in swapped for p in place(region, fused, group="g"))
    assert wrong[-1].value != apart[-1].value


def test_a_transposed_tensor_and_one_larger_than_a_chunk() -> None:
    tensor = torch.randn(700, 900)
    (row, _) = group_digests([Part(name="w", tensor=tensor, group="g")])
    turned = Part(name="w", tensor=tensor.T, group="g", strides=(1, 900))
    assert group_digests([turned])[0] == row
    assert group_digests([Part(name="w", tensor=tensor.T, group="g")])[0].value != row.value


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_digests_of_its_files(family: str, tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    rows = by_group(group_digests(parts_of_transformers(model)))
    assert rows == by_group(group_digests(parts_of_files(tmp_path)))
    assert not [row for row in rows.values() if row.reason]
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] += 1
    after = by_group(group_digests(parts_of_transformers(model)))
    moved = {g for g in rows if rows[g] != after[g]}
    assert moved == {"", "layers.1.norm"}


def test_a_dense_model_has_the_digest_of_older_tapes() -> None:
    model = make("llama")
    old, new = weights_digest(model), group_digests(parts_of_transformers(model))[-1]
    assert (old.value, old.tensors, old.elements) == (new.value, new.tensors, new.elements)


def test_masters_in_float32_are_digested_as_what_they_become() -> None:
    model = make("qwen3_moe", torch.float32)
    masters = by_group(group_digests(parts_of_transformers(model), dtype=torch.bfloat16))
    cast = by_group(group_digests(parts_of_transformers(model.bfloat16())))
    assert masters == cast


def _rank(rank: int, port: int, queue: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        model = make("qwen3_moe")
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        parts = group_digests(parts_of_transformers(model))
        reason = digests_of_transformers(model)[-1].reason
        stamps = [weights_stamp(model), weights_stamp(model)]
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1)
        queue.put((rank, (parts, reason, [*stamps, weights_stamp(model)])))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_shards_of_fsdp_sum_to_the_model() -> None:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, port, queue)) for r in range(2)]
    for process in ranks:
        process.start()
    shards = dict(queue.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    want = by_group(group_digests(parts_of_transformers(make("qwen3_moe"))))
    assert by_group(sum_shards(parts for parts, _, _ in shards.values())) == want
    assert 0 < shards[0][0][-1].elements < want[""].elements
    for _, reason, (first, again, moved) in shards.values():
        assert reason.endswith("a shard: the digests of all processes add up to the model's")
        assert first == again != moved


@pytest.fixture
def two(tmp_path: Path) -> Any:
    models = [make("qwen3_moe", torch.float32), make("llama", torch.float32)]
    prompts = torch.arange(2, 42).reshape(20, 2)
    with rolltape.record(tmp_path / "t", sample_rate=0.4):
        for model in models:
            for half in (prompts[:10], prompts[10:]):
                model.generate(half, do_sample=True, max_new_tokens=3, num_return_sequences=2)
    return rolltape.open(tmp_path / "t")


def test_groups_are_kept_whole_in_every_engine_of_a_process(two: Any) -> None:
    kept: dict[str, dict[tuple[int, ...], int]] = {}
    for sequence in two:
        prompt = tuple(sequence.tokens.values[: sequence.prompt_len].tolist())
        counts = kept.setdefault(sequence.key.engine, {})
        counts[prompt] = counts.get(prompt, 0) + 1
    assert len(kept) == 2
    first, second = kept.values()
    assert first == second and 2 <= len(first) < 20 and set(first.values()) == {2}
    notices = [e for e in two.rows("events") if e["kind"] == "notice"]
    assert len(notices) == 2 and not [e for e in two.rows("events") if e["kind"] == "gap"]
    assert all(f'"sequences": {2 * (20 - len(first))}' in e["detail"] for e in notices)
    assert not two.problems


def _replica(tape: str) -> None:
    from rolltape.recorder import session, transformers
    from rolltape.recorder.options import Options

    torch.set_num_threads(1)
    session.start(tape, Options())
    transformers.bind()
    make("qwen3_moe").generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=3)
    session.stop()


def test_processes_that_use_the_same_ids_stay_apart(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "t", role="rollout", provenance={})
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_replica, args=(str(root),)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    tape = store.open(root)
    first, second = list(tape)
    assert first.key.engine != second.key.engine and first.key.request == second.key.request
    assert first.tokens.values.tolist() == second.tokens.values.tolist()
    whole = [r for r in tape.rows("weights") if r["group"] == ""]
    assert len({r["engine"] for r in whole}) == 2 and len({r["digest"] for r in whole}) == 1


def test_what_cannot_be_read_has_no_digest_and_what_cannot_be_compared_says_why() -> None:
    rows = group_digests(
        [
            Part(name="a", tensor=torch.empty(0), group="gone", reason="emptied"),
            Part(name="b", tensor=torch.empty(3, device="meta"), group="meta"),
            Part(name="c", tensor=torch.ones(3), group="packed", reason="repacked"),
            Part(name="d", tensor=torch.ones(3), group="plain"),
        ]
    )
    assert [(r.group, r.value is None, r.reason) for r in rows[:-1]] == [
        ("gone", True, "emptied"),
        ("meta", True, "not in memory"),
        ("packed", False, "repacked"),
        ("plain", False, None),
    ]
    assert rows[-1].value is None and rows[-1].reason.startswith("3 of 4 groups")


def adapted() -> Any:
    """A model with two adapters, the first in force, which also brings a head of its own."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def config(**more: Any) -> Any:
        return peft.LoraConfig(r=2, target_modules=["q_proj"], **more)

    model = peft.get_peft_model(make("qwen3_moe"), config(modules_to_save=["lm_head"]))
    model.add_adapter("other", config())
    return model


def rows_of(model: Any) -> dict[str, int | None]:
    return {row.group: row.value for row in group_digests(parts_of_transformers(model))}


@pytest.mark.filterwarnings("ignore")  # of peft
def test_of_several_adapters_those_in_force_count() -> None:
    model, plain = adapted(), rows_of(make("qwen3_moe"))
    first = rows_of(model)
    with model.disable_adapter():
        assert rows_of(model) == plain  # with the head that the adapter replaces
    assert rows_of(model) == first
    assert first.keys() == (plain.keys() | {"lora"}) - {"lm_head"}
    model.set_adapter("other")
    other = rows_of(model)
    assert other["lora"] != first["lora"]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B.default" in name:
                weight.add_(1)  # sleeps
    assert rows_of(model) == other
    model.set_adapter("default")
    assert rows_of(model)["lora"] != first["lora"]


#: Kind of adapter -> what its configuration needs for a model that is this small.
KINDS: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 10},
    "BOFTConfig": {"boft_block_size": 4},
    "FourierFTConfig": {"n_frequency": 8},
    "IA3Config": {"feedforward_modules": []},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "LoHaConfig": {},
    "LoKrConfig": {},
    "LoraConfig": {"trainable_token_indices": [1, 2]},
    "OFTConfig": {"oft_block_size": 4},
    "PrefixTuningConfig": {"num_virtual_tokens": 3},
    "PromptTuningConfig": {"num_virtual_tokens": 3},
    "TrainableTokensConfig": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    "VBLoRAConfig": {"vector_length": 4, "num_vectors": 8},
    "VeraConfig": {},
}


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_any_kind_that_is_off_leaves_the_model_it_was_put_into(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = make("llama").eval()
    there, ids = rows_of(plain), torch.tensor([[1, 2, 3]])
    where = {} if "virtual" in str(KINDS[kind]) else {"target_modules": ["q_proj"]}
    given = {"task_type": "CAUSAL_LM", **where, **KINDS[kind]}
    model = peft.get_peft_model(plain, getattr(peft, kind)(**given)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:  # many begin as what changes nothing
                weight.add_(torch.randn_like(weight) * 0.3)
        on, rows, stamp = model(ids).logits, rows_of(model), weights_stamp(model)
        with model.disable_adapter():
            assert not torch.equal(model(ids).logits, on)  # so the switch matters
            assert rows_of(model) == there != rows
            assert weights_stamp(model) != stamp
        assert rows_of(model) == rows


@pytest.mark.filterwarnings("ignore")  # of peft
def test_what_chooses_among_adapters_is_not_comparable() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    model.base_model.chooser = torch.nn.Linear(2, 2)  # as X-LoRA has one, beside the model
    reasons = {p.name: p.reason for p in parts_of_transformers(model)}
    with model.disable_adapter():
        off = {p.name: p.reason for p in parts_of_transformers(model)}
    for found in (reasons, off):
        assert found["base_model.chooser.weight"] == (
            "of adapters as a whole: whether it takes part is not known"
        )
        assert found["model.embed_tokens.weight"] is None


@pytest.mark.filterwarnings("ignore")
def test_switching_an_adapter_is_seen_and_training_one_that_is_off_is_not() -> None:
    model = adapted()
    first = weights_stamp(model)
    model.set_adapter("other")
    other = weights_stamp(model)
    assert other != first
    with model.disable_adapter():
        off = weights_stamp(model)
        assert off not in (first, other)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.add_(1)
        assert weights_stamp(model) == off
    assert weights_stamp(model) != other
