"""Rollout dumps of slime, miles, NeMo-RL and verl become tapes that say what they are not.

The dumps are built as the frameworks write them; the field names are those of their sources, which
the readers in rolltape.store name by commit and file.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from rolltape.store import SchemaError, TapeExistsError, UsageError, token_digest
from rolltape.store import open as open_tape
from rolltape.store.exchange import Meaning, export_tape, import_dumps
from rolltape.store.exchange.cli import import_
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_UNRECORDED

LAYERS, K, EXPERTS = 4, 2, 32


def routes_of(rng, tokens, *, layers=LAYERS, experts=EXPERTS, dense=(0,)):
    """[tokens - 1, layers, k] as SGLang returns them: layers without experts are zeros."""
    scores = rng.random((max(tokens - 1, 0), layers, experts))
    ids = np.argsort(scores, -1)[..., :K].astype(np.int32)
    ids[:, list(dense)] = 0
    return ids


def slime_sample(rng, index, *, prompt=5, response=7, **changes):
    """`Sample.to_dict()` with every field of the dataclass."""
    sample = {
        "group_index": index // 2,
        "index": index,
        "rollout_id": None,
        "prompt": [{"role": "user", "content": "1+1?"}],
        "tokens": rng.integers(0, 1000, prompt + response).tolist(),
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "multimodal_train_input_id": None,
        "apply_chat_template_kwargs": {},
        "response": "2",
        "response_length": response,
        "label": "2",
        "reward": 1.0,
        "loss_mask": None,
        "weight_versions": ["3"],
        "rollout_log_probs": (-rng.exponential(1.0, response)).tolist(),
        "rollout_top_p_token_ids": None,
        "rollout_top_p_token_offsets": None,
        "rollout_routed_experts": None,
        "remove_sample": False,
        "teacher_log_probs": None,
        "status": "completed",
        "metadata": {},
        "generate_function_path": None,
        "custom_rm_path": None,
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 0, "spec_draft_token_num": 0},
        "prefix_cache_info": {"cached_tokens": 2, "total_prompt_tokens": 5},
    }
    unknown = set(changes) - set(sample)
    assert not unknown, unknown
    return {**sample, **changes}


def save_torch(path, value):
    pytest.importorskip("torch").save(value, path)
    return path


def save_slime(path, samples, rollout_id=11):
    return save_torch(path, {"rollout_id": rollout_id, "samples": samples})


def imported(tmp_path, *files, framework, **options):
    carried = import_dumps(files, tmp_path / "tape", framework=framework, **options)
    return open_tape(tmp_path / "tape"), list(open_tape(tmp_path / "tape")), carried


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# -- slime and miles ----------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_a_dump_becomes_a_sealed_tape_with_everything_in_its_place(tmp_path, rng, framework):
    torch = pytest.importorskip("torch")
    samples = [slime_sample(rng, i, reward=float(i)) for i in range(4)]
    arrays = [routes_of(rng, len(s["tokens"])) for s in samples]
    for sample, array in zip(samples, arrays, strict=True):
        # slime keeps tensors, miles arrays
        sample["rollout_routed_experts"] = (
            torch.from_numpy(array) if framework == "slime" else array
        )
    path = save_slime(tmp_path / "0.pt", samples)
    tape, sequences, carried = imported(tmp_path, path, framework=framework, experts=EXPERTS)
    assert tape.seal is not None and not tape.problems
    engine = tape.engine(sequences[0].key.engine)
    assert engine["adapter"] == f"import:{framework}"
    assert (engine["moe_layers"], engine["num_experts"]) == ([1, 2, 3], EXPERTS)
    for sequence, sample, array in zip(sequences, samples, arrays, strict=True):
        response = sample["response_length"]
        assert sequence.tokens.values.tolist() == sample["tokens"]
        assert sequence.prompt_len == len(sample["tokens"]) - response
        assert sequence.info["group"] == f"11-{sample['group_index']}"
        assert sequence.info["group_derived"] is False
        assert sequence.info["digest"] == token_digest(
            sequence.prompt_len, np.array(sample["tokens"])
        )
        assert sequence.finish == "stop"
        logprobs = sequence.logprob("processed")
        assert logprobs.valid.tolist() == [False] * 5 + [True] * 7
        np.testing.assert_array_equal(
            logprobs.values[5:], np.array(sample["rollout_log_probs"], np.float32)
        )
        assert sequence.loss_mask.values.tolist() == [False] * 5 + [True] * 7
        routes = sequence.routes()
        assert routes.layers == (1, 2, 3)
        assert routes.valid.tolist() == [[True] * 3] * 11 + [[False] * 3]
        np.testing.assert_array_equal(routes.ids[:-1], array[:, 1:])
        assert sequence.weight_version.values[5:].tolist() == [3] * 7
        assert not sequence.weight_version.valid[:5].any()
        assert sequence.annotations["reward"] == sample["reward"]
        assert sequence.annotations["label"] == "2"
        assert sequence.annotations["prefix_cache_info.cached_tokens"] == 2.0
    assert carried.kept["tokens"] == {"into": "tokens.ids", "sequences": 4, "values": 48}
    assert carried.kept["rollout_log_probs"]["into"] == "tokens.processed"
    assert carried.dropped["prompt"] == {"sequences: text; the token ids are carried": 4}
    assert carried.dropped["rollout_routed_experts"]["layers: no sequence has a route there"] == 1


@pytest.mark.engine
def test_logprobs_that_nobody_explains_claim_nothing_and_do_not_compare(tmp_path, rng):
    path = save_slime(tmp_path / "0.pt", [slime_sample(rng, 0)])
    _, (sequence,), carried = imported(tmp_path, path, framework="slime")
    ((_, _, meaning),) = sequence.semantics
    assert meaning["source"] == "engine"
    assert all(meaning[name] is None for name in set(meaning) - {"source"})
    assert any("--semantics" in note for note in carried.notes)
    from rolltape.replay.semantics import disagreements

    told = {**meaning, "temperature": 1.0, "edits": [], "truncation": []}
    fields = {name for name, _, _ in disagreements("processed", meaning, told)}
    assert fields == {"temperature", "edits", "truncation"}


@pytest.mark.engine
def test_logprobs_stand_where_the_user_says_with_what_the_user_says(tmp_path, rng):
    path = save_slime(tmp_path / "0.pt", [slime_sample(rng, 0)])
    cases = {
        "raw": (Meaning("raw"), (None, None, None)),
        "scaled": (Meaning("scaled", 0.7, ("bias",)), (0.7, ["bias"], None)),
        "processed": (Meaning("processed", 1.0, (), ("top_p=0.9",)), (1.0, [], ["top_p=0.9"])),
    }
    for column, (meaning, expected) in cases.items():
        out = tmp_path / column
        carried = import_dumps([path], out, framework="slime", meaning=meaning)
        (sequence,) = open_tape(out)
        for name in cases:
            assert sequence.logprob(name).valid.any() == (name == column)
        ((_, _, cell),) = sequence.semantics
        assert (cell["temperature"], cell["edits"], cell["truncation"]) == expected
        assert carried.kept["rollout_log_probs"]["into"] == f"tokens.{column}"
        assert not any("--semantics" in note for note in carried.notes)


@pytest.mark.parametrize(
    "meaning",
    [
        {"temperature": 1.0},
        {"truncation": ("top_p=0.9",)},
        {"column": "scaled"},
        {"column": "raw", "temperature": 0.7},
        {"column": "scaled", "temperature": 1.0, "truncation": ("top_k=5",)},
    ],
)
def test_half_a_meaning_is_refused(meaning):
    with pytest.raises(UsageError, match="--semantics"):
        Meaning(**meaning)


@pytest.mark.engine
def test_tool_tokens_have_no_logprob_and_no_loss(tmp_path, rng):
    mask = [1, 1, 0, 0, 1, 1, 1]
    logprobs = [-0.5, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0]
    path = save_slime(
        tmp_path / "0.pt", [slime_sample(rng, 0, loss_mask=mask, rollout_log_probs=logprobs)]
    )
    _, (sequence,), carried = imported(tmp_path, path, framework="slime")
    assert sequence.loss_mask.values[5:].tolist() == [bool(m) for m in mask]
    # a generated token may well be certain
    assert sequence.logprob("processed").valid[5:].tolist() == [
        True, True, False, False, True, True, True
    ]  # fmt: skip
    ((why, count),) = carried.dropped["rollout_log_probs"].items()
    assert count == 2 and "0.0 where no token was generated" in why


@pytest.mark.engine
def test_aborted_and_empty_samples_are_kept_with_what_they_have(tmp_path, rng):
    samples = [
        slime_sample(rng, 0, response=0, rollout_log_probs=[], status="truncated"),
        slime_sample(rng, 1, status="aborted", response=3, rollout_log_probs=[-1.0, -2.0, -3.0]),
        slime_sample(rng, 2, prompt=0, response=0, rollout_log_probs=None, status="aborted"),
        slime_sample(rng, 3, status="failed", rollout_log_probs=None),
        slime_sample(rng, 4, status="pending"),
        slime_sample(rng, 5, remove_sample=True),
    ]
    path = save_slime(tmp_path / "0.pt", samples)
    _, sequences, carried = imported(tmp_path, path, framework="slime")
    assert [s.finish for s in sequences] == ["length", "abort", "abort", "error", "open", "stop"]
    assert [s.info["length"] for s in sequences] == [5, 8, 0, 12, None, 12]
    assert [s.length for s in sequences] == [5, 8, 0, 12, 12, 12]
    assert [int(s.loss_mask.values.sum()) for s in sequences] == [0, 3, 0, 7, 7, 0]
    assert not sequences[0].logprob("processed").valid.any()
    assert not sequences[3].logprob("processed").valid.any()
    assert any("remove_sample" in note for note in carried.notes)
    assert carried.kept["tokens"]["sequences"] == 6


@pytest.mark.engine
def test_missing_routes_and_mixed_pieces_and_many_experts(tmp_path, rng):
    torch = pytest.importorskip("torch")
    samples = [slime_sample(rng, i) for i in range(3)]
    whole = [routes_of(rng, 12, experts=300, dense=()) for _ in samples]
    whole[0][2] = -1
    whole[1][3:5] = -1
    samples[0]["rollout_routed_experts"] = torch.from_numpy(whole[0])
    samples[1]["rollout_routed_experts"] = [whole[1][:3].tolist(), None, whole[1][5:]]
    path = save_slime(tmp_path / "0.pt", samples)
    _, sequences, carried = imported(tmp_path, path, framework="slime", experts=300)
    for sequence, ids, hole in ((sequences[0], whole[0], {2}), (sequences[1], whole[1], {3, 4})):
        routes = sequence.routes()
        assert routes.num_experts == 300 and routes.ids.dtype == np.uint16
        valid = [p not in hole for p in range(11)]
        assert routes.valid[:11].all(1).tolist() == valid == routes.valid[:11].any(1).tolist()
        np.testing.assert_array_equal(routes.ids[:11][valid], ids[valid])
        assert {reason for _, _, _, reason in routes.missing} == {"missing (-1)"}
    assert sequences[2].routes() is None
    assert carried.dropped["rollout_routed_experts"] == {"rows: missing (-1)": 3 * LAYERS}


@pytest.mark.engine
def test_suspect_routes_are_counted_and_not_carried(tmp_path, rng):
    samples = [slime_sample(rng, i) for i in range(5)]
    samples[0]["rollout_routed_experts"] = routes_of(rng, 12)
    samples[1]["rollout_routed_experts"] = np.zeros((11, LAYERS, K), np.int32)
    samples[2]["rollout_routed_experts"] = routes_of(rng, 12, layers=LAYERS - 1)
    samples[3]["rollout_routed_experts"] = routes_of(rng, 12).reshape(11, -1)
    samples[4]["rollout_routed_experts"] = routes_of(rng, 20)
    path = save_slime(tmp_path / "0.pt", samples)
    _, sequences, carried = imported(tmp_path, path, framework="miles")
    assert [s.routes() is not None for s in sequences] == [True] + [False] * 4
    reasons = carried.dropped["rollout_routed_experts"]
    assert reasons["sequences: no row of the array is a route"] == 1
    assert reasons[f"sequences: another shape than {LAYERS} layers x {K} experts"] == 1
    assert reasons["sequences: shape [11, 8] instead of [tokens, layers, k]"] == 1
    assert reasons["sequences: rows do not match"] == 1


@pytest.mark.engine
def test_options_that_do_not_fit_the_routes_are_refused_and_leave_nothing(tmp_path, rng):
    sample = slime_sample(rng, 0, rollout_routed_experts=routes_of(rng, 12))
    path = save_slime(tmp_path / "0.pt", [sample])
    with pytest.raises(UsageError, match=r"--experts 4: rollout_routed_experts holds"):
        imported(tmp_path, path, framework="slime", experts=4)
    with pytest.raises(UsageError, match=r"2 layers, rollout_routed_experts has 4 columns"):
        imported(tmp_path, path, framework="slime", layers="0:2")
    assert [p.name for p in tmp_path.iterdir()] == ["0.pt"]
    _, (sequence,), _ = imported(tmp_path, path, framework="slime", layers="2:6")
    assert sequence.routes().layers == (3, 4, 5)


@pytest.mark.engine
def test_the_number_of_experts_is_not_passed_off_as_known(tmp_path, rng):
    sample = slime_sample(rng, 0, rollout_routed_experts=routes_of(rng, 12))
    path = save_slime(tmp_path / "0.pt", [sample])
    tape, (sequence,), carried = imported(tmp_path, path, framework="slime")
    largest = int(sample["rollout_routed_experts"].max())
    assert tape.engine(sequence.key.engine)["num_experts"] == largest + 1
    assert any("largest id + 1" in note for note in carried.notes)


@pytest.mark.engine
def test_all_files_of_an_import_have_one_number_of_experts(tmp_path, rng):
    files = []
    for ordinal, largest in enumerate((5, 9, 7)):
        routes = routes_of(rng, 12, experts=5)
        routes[3, 1] = [0, largest]
        sample = slime_sample(rng, ordinal, rollout_routed_experts=routes)
        files.append(save_slime(tmp_path / f"{ordinal}.pt", [sample], rollout_id=ordinal))
    tape, sequences, carried = imported(tmp_path, *files, framework="slime")
    assert [s.routes().num_experts for s in sequences] == [10, 10, 10]
    assert tape.engine(sequences[0].key.engine)["num_experts"] == 10
    assert [s.routes().ids[3, 0].tolist() for s in sequences] == [[0, 5], [0, 9], [0, 7]]
    (note,) = [note for note in carried.notes if "largest id + 1" in note]
    assert "largest id + 1, 10" in note
    rows = 3 * 11 * (LAYERS - 1)  # counted once, though the files are looked at twice
    assert carried.kept[next(f for f in carried.kept if "routed" in f)]["values"] == rows


@pytest.mark.engine
def test_kept_sets_of_top_p_replay_become_supports(tmp_path, rng):
    ids = [9, 4, 7, 1, 2, 30, 20]
    offsets = [0, 2, 3, 3, 5, 5, 6, 7]
    torch = pytest.importorskip("torch")
    sample = slime_sample(
        rng,
        0,
        rollout_top_p_token_ids=torch.tensor(ids, dtype=torch.int32),
        rollout_top_p_token_offsets=offsets,
    )
    _, (sequence,), carried = imported(
        tmp_path, save_slime(tmp_path / "0.pt", [sample]), framework="slime"
    )
    supports = sequence.supports()
    kept = [None if supports.at(p) is None else supports.at(p).tolist() for p in range(12)]
    assert kept == [None] * 5 + [[4, 9], [7], None, [1, 2], None, [30], [20]]
    assert set(supports.state.tolist()) == {SUPPORT_EXPLICIT, SUPPORT_UNRECORDED}
    assert carried.kept["rollout_top_p_token_ids"]["values"] == 7


@pytest.mark.engine
def test_several_or_nameless_weight_versions_are_not_spread_over_tokens(tmp_path, rng):
    versions = [["3", "4"], ["default"], [], ["5", "5"]]
    samples = [slime_sample(rng, i, weight_versions=v) for i, v in enumerate(versions)]
    _, sequences, carried = imported(
        tmp_path, save_slime(tmp_path / "0.pt", samples), framework="slime"
    )
    seen = [s.weight_version.values[s.weight_version.valid].tolist() for s in sequences]
    assert seen == [[], [], [], [5] * 7]
    assert [s.annotations.get("weight_versions") for s in sequences] == [
        "3,4", "default", None, "5,5"
    ]  # fmt: skip
    assert sum(carried.dropped["weight_versions"].values()) == 2


@pytest.mark.engine
def test_every_field_of_a_sample_is_accounted_for(tmp_path, rng):
    sample = slime_sample(
        rng,
        0,
        metadata={"round": 2, "tags": ["a"], "raw_reward": 0.5},
        teacher_log_probs=[-1.0] * 7,
        multimodal_train_inputs={"pixel_values": [1.0]},
        generate_function_path="a.b",
        reward={"score": 1.0, "acc": True},
        session_id="s",
    )
    sample["of_a_plugin"] = [1, 2]
    _, (sequence,), carried = imported(
        tmp_path, save_slime(tmp_path / "0.pt", [sample]), framework="slime"
    )
    assert sequence.annotations["reward.score"] == 1.0
    assert sequence.annotations["reward.acc"] == 1.0
    assert sequence.annotations["metadata.raw_reward"] == 0.5
    for name in ("teacher_log_probs", "multimodal_train_inputs", "of_a_plugin", "metadata.tags"):
        assert name in carried.dropped, name
    named = {n.partition(".")[0] for n in [*carried.kept, *carried.dropped]}
    silent = {
        n for n, v in sample.items() if n not in named and v not in (None, {}, [], False, 0.0)
    }
    assert silent == {"response_length"}  # how the tokens are divided


@pytest.mark.engine
def test_files_with_the_same_groups_do_not_mix(tmp_path, rng):
    paths = [
        save_slime(tmp_path / f"{i}.pt", [slime_sample(rng, j) for j in range(2)], rollout_id=7)
        for i in range(2)
    ]
    _, sequences, _ = imported(tmp_path, *paths, framework="slime")
    assert len({s.key for s in sequences}) == 4
    assert {s.info["group"] for s in sequences} == {"7-0"}


@pytest.mark.engine
def test_a_damaged_sample_is_left_out_by_name(tmp_path, rng):
    samples = [slime_sample(rng, 0), slime_sample(rng, 1)]
    samples[1]["response_length"] = 50
    path = save_slime(tmp_path / "0.pt", samples)
    _, sequences, carried = imported(tmp_path, path, framework="slime")
    assert len(sequences) == 1
    assert any("0.pt: sample 1: left out" in note for note in carried.notes)


@pytest.mark.engine
def test_something_else_than_a_dump_is_refused(tmp_path, rng):
    with pytest.raises(SchemaError, match=r"--save-debug-rollout-data"):
        imported(tmp_path, save_torch(tmp_path / "a.pt", {"model": {}}), framework="slime")
    with pytest.raises(SchemaError, match=r"sample 0 has no field 'tokens'"):
        imported(tmp_path, save_slime(tmp_path / "b.pt", [{"x": 1}]), framework="slime")
    with pytest.raises(SchemaError, match=r"no sequence that a tape can hold"):
        imported(tmp_path, save_slime(tmp_path / "c.pt", []), framework="slime")


# -- NeMo-RL ------------------------------------------------------------------------------


def nemo_batch(rng, *, lengths=(9, 6), prompts=(4, 3), width=12):
    """`train_data` of GRPO: arrays [batch, width], padded on the right."""
    size = len(lengths)
    batch = {
        "input_ids": np.full((size, width), 151643, np.int64),
        "input_lengths": np.array(lengths, np.int32),
        "generation_logprobs": np.zeros((size, width), np.float32),
        "token_mask": np.zeros((size, width), np.int64),
        "sample_mask": np.ones(size, np.float32),
        # padding and the last token have the placeholder
        "routed_experts": np.tile(np.arange(4, dtype=np.int16), (size, width, LAYERS, 1)),
    }
    for i, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        batch["input_ids"][i, :length] = rng.integers(0, 1000, length)
        batch["token_mask"][i, prompt:length] = 1
        batch["generation_logprobs"][i, prompt:length] = -rng.exponential(1.0, length - prompt)
        scores = rng.random((length - 1, LAYERS, EXPERTS))
        batch["routed_experts"][i, : length - 1] = np.argsort(scores, -1)[..., :4]
    return batch


@pytest.mark.engine
def test_a_nemo_batch_loses_its_padding_and_keeps_its_routes(tmp_path, rng):
    torch = pytest.importorskip("torch")
    batch = nemo_batch(rng)
    batch["routed_experts"][0, 2] = -1
    batch["token_mask"][1, 4] = 0  # a token of the environment
    batch["generation_logprobs"][1, 4] = 0.0
    batch["routed_experts"][1, 4] = np.arange(4)
    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    tensors["advantages"] = torch.full((2, 12), 0.25)
    tensors["prev_logprobs"] = torch.zeros(2, 12)
    tensors["truncated"] = torch.tensor([False, True])
    path = save_torch(tmp_path / "batch.pt", tensors)
    tape, sequences, carried = imported(tmp_path, path, framework="nemo-rl")
    assert [s.length for s in sequences] == [9, 6] and [s.prompt_len for s in sequences] == [4, 3]
    assert [s.finish for s in sequences] == ["stop", "length"]
    for i, sequence in enumerate(sequences):
        n = sequence.length
        assert sequence.tokens.values.tolist() == batch["input_ids"][i, :n].tolist()
        assert sequence.loss_mask.values.tolist() == (batch["token_mask"][i, :n] == 1).tolist()
        logprobs = sequence.logprob("processed")
        assert logprobs.valid.tolist() == (batch["token_mask"][i, :n] == 1).tolist()
        assert sequence.annotations["advantage"] == 0.25
        hole = {2, 8} if i == 0 else {4, 5}
        routes = sequence.routes()
        assert routes.valid.all(1).tolist() == [p not in hole for p in range(n)]
        np.testing.assert_array_equal(
            routes.ids[routes.valid.all(1)],
            batch["routed_experts"][i, :n][routes.valid.all(1)],
        )
    reasons = carried.dropped["routed_experts"]
    assert reasons == {"rows: missing (-1)": LAYERS, "rows: placeholder 0..k-1": LAYERS}
    assert "prev_logprobs" in carried.dropped
    # the dump has only the order of the MoE layers
    assert tape.engine(sequences[0].key.engine)["moe_layers"] is None
    assert any("--layers names them" in note for note in carried.notes)


@pytest.mark.engine
def test_the_output_of_a_generation_says_where_its_prompt_ends(tmp_path, rng):
    torch = pytest.importorskip("torch")
    path = save_torch(
        tmp_path / "out.pt",
        {
            "output_ids": torch.tensor([[1, 2, 3, 4, 5, 0], [1, 2, 0, 0, 0, 0]]),
            "generation_lengths": torch.tensor([2, 0]),
            "unpadded_sequence_lengths": torch.tensor([5, 2]),
            "logprobs": torch.tensor([[0, 0, 0, -1.5, 0, 0], [0.0] * 6]),
            "truncated": torch.tensor([False, False]),
        },
    )
    _, sequences, _ = imported(tmp_path, path, framework="nemo-rl")
    assert [(s.prompt_len, s.length) for s in sequences] == [(3, 5), (2, 2)]
    assert sequences[0].logprob("processed").valid.tolist() == [False] * 3 + [True] * 2
    assert sequences[0].logprob("processed").values[3:].tolist() == [-1.5, 0.0]
    assert not sequences[0].loss_mask.valid.any()


def nemo_lines(path, batch, **more):
    """`log_batched_dict_as_jsonl`: a line a sequence, everything a list of one."""
    names = {
        "input_ids": "token_ids",
        "token_mask": "token_loss_mask",
        "sample_mask": "sample_loss_mask",
    }
    with path.open("w") as file:
        for i in range(len(batch["input_lengths"])):
            row = {names.get(n, n): [v[i].tolist()] for n, v in batch.items()}
            row.pop("routed_experts")
            row |= {name: [values[i]] for name, values in more.items()}
            file.write(json.dumps({**row, "idx": i}) + "\n")
    return path


def test_the_log_of_nemo_is_read_without_torch(tmp_path, rng, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    batch = nemo_batch(rng, lengths=(9, 6, 6), prompts=(4, 6, 3))
    batch["sample_mask"][2] = 0.0
    batch["input_ids"][2, :3] = batch["input_ids"][0, :3]
    batch["generation_logprobs"][0, 5] = np.nan
    path = nemo_lines(
        tmp_path / "train_data_step1.jsonl",
        batch,
        rewards=[1.0, 0.0, 0.5],
        content=[["hi"], ["hi"], ["hi"]],
        advantages=[[0.5] * 12, [0.1] * 12, list(range(12))],
        prev_logprobs=[[0.0] * 12] * 3,
    )
    _, sequences, carried = imported(tmp_path, path, framework="nemo-rl")
    # without one generated token all of it is prompt
    assert [(s.prompt_len, s.length) for s in sequences] == [(4, 9), (6, 6), (3, 6)]
    assert [s.annotations.get("reward") for s in sequences] == [1.0, 0.0, 0.5]
    assert [s.annotations.get("advantage") for s in sequences] == [0.5, None, None]
    assert [s.finish for s in sequences] == ["unknown"] * 3
    assert all(s.info["group_derived"] for s in sequences)
    assert not sequences[2].loss_mask.values.any() and sequences[2].loss_mask.valid.all()
    logprobs = sequences[0].logprob("processed")
    assert logprobs.valid[5] and np.isnan(logprobs.values[5])
    assert carried.dropped["finish reason"] and carried.dropped["content"]


def test_rewards_of_another_order_are_not_taken(tmp_path, rng):
    path = nemo_lines(
        tmp_path / "a.jsonl", nemo_batch(rng), rewards=[9.0, 9.0], filtered_rewards=[1.0, 0.0]
    )
    _, sequences, carried = imported(tmp_path, path, framework="nemo-rl")
    assert [s.annotations["reward"] for s in sequences] == [1.0, 0.0]
    assert "rewards" in carried.dropped


def test_a_log_without_ids_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"content": ["x"], "rewards": [1.0]}) + "\n")
    with pytest.raises(SchemaError, match=r"a\.jsonl:1: no input_ids or token_ids"):
        imported(tmp_path, path, framework="nemo-rl")


def test_arrays_of_another_batch_are_refused(tmp_path, rng):
    torch = pytest.importorskip("torch")
    batch = nemo_batch(rng)
    batch["token_mask"] = batch["token_mask"][:1]
    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    with pytest.raises(SchemaError, match=r"token_mask does not have 2 rows"):
        imported(tmp_path, save_torch(tmp_path / "a.pt", tensors), framework="nemo-rl")


# -- verl ---------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_verl_batch_is_padded_left_and_right(tmp_path, rng):
    torch = pytest.importorskip("torch")
    width, response = 6, 5
    prompts, responses = [[1, 2, 3], [4, 5, 6, 7]], [[10, 11, 12, 13], []]
    size = len(prompts)
    batch = {
        "prompts": torch.zeros(size, width, dtype=torch.long),
        "responses": torch.zeros(size, response, dtype=torch.long),
        "attention_mask": torch.zeros(size, width + response, dtype=torch.long),
        "response_mask": torch.zeros(size, response, dtype=torch.long),
        "rollout_log_probs": torch.zeros(size, response),
        "routed_experts": torch.zeros(size, width + response, LAYERS, K, dtype=torch.int32),
        "rm_scores": torch.zeros(size, response),
        "old_log_probs": torch.zeros(size, response),
    }
    whole = []
    for i, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        start = width - len(p)
        batch["prompts"][i, start:] = torch.tensor(p)
        batch["responses"][i, : len(r)] = torch.tensor(r)
        batch["attention_mask"][i, start : width + len(r)] = 1
        batch["response_mask"][i, : len(r)] = 1
        batch["rollout_log_probs"][i, : len(r)] = -1.0 - i
        routes = routes_of(rng, len(p) + len(r), dense=())
        batch["routed_experts"][i, start : start + len(routes)] = torch.from_numpy(routes)
        whole.append(routes)
    batch["response_mask"][0, 2] = 0  # a tool's token
    batch["rollout_log_probs"][0, 2] = 0.0
    batch["rm_scores"][0, 3] = 0.75
    path = save_torch(tmp_path / "batch.pt", batch)
    _, sequences, carried = imported(tmp_path, path, framework="verl", layers="0:4")
    for sequence, p, r, routes in zip(sequences, prompts, responses, whole, strict=True):
        assert sequence.tokens.values.tolist() == p + r and sequence.prompt_len == len(p)
        np.testing.assert_array_equal(sequence.routes().ids[:-1], routes)
        assert sequence.routes().valid[:-1].all() and not sequence.routes().valid[-1].any()
    scored = sequences[0].logprob("processed").valid.tolist()
    assert scored == [False] * 3 + [True, True, False, True]
    assert sequences[0].annotations["reward"] == 0.75
    assert {"old_log_probs"} <= set(carried.dropped)

    batch["attention_mask"][0, width] = 0
    _, sequences, carried = imported(
        tmp_path / "b", save_torch(tmp_path / "holes.pt", batch), framework="verl"
    )
    assert len(sequences) == 1
    assert carried.dropped["attention_mask"] == {"sequences: holes between tokens": 1}


def verl_lines(path, **more):
    """`_dump_generations`."""
    rows: list[dict[str, object]] = [
        {"input": "ab", "output": "c", "gts": "c", "score": 1.0, "step": 3, "acc": True},
        {"input": "ab", "output": "ba", "gts": None, "score": 0.0, "step": 3, "acc": False},
    ]
    path.write_text("".join(json.dumps({**row, **more}, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_text_without_ids_is_refused_with_the_way_out(tmp_path):
    path = verl_lines(tmp_path / "3.jsonl")
    with pytest.raises(UsageError, match=r"3\.jsonl: line 1.*--tokenizer"):
        imported(tmp_path, path, framework="verl")
    assert [p.name for p in tmp_path.iterdir()] == ["3.jsonl"]


def test_ids_of_a_tokenizer_are_marked_as_derived(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")])
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tape, sequences, carried = imported(
        tmp_path,
        verl_lines(tmp_path / "3.jsonl"),
        framework="verl",
        tokenizer=tmp_path / "tokenizer.json",
    )
    assert [s.tokens.values.tolist() for s in sequences] == [[3, 2], [3, 1, 0]]
    assert [s.prompt_len for s in sequences] == [1, 1]
    assert len({s.info["group"] for s in sequences}) == 1 and sequences[0].info["group_derived"]
    assert all(s.annotations["tokens"] == "derived" for s in sequences)
    assert [s.annotations["reward"] for s in sequences] == [1.0, 0.0]
    assert sequences[0].annotations["gts"] == "c" and sequences[0].annotations["acc"] == 1.0
    assert tape.engine(sequences[0].key.engine)["effective"] == {"tokens": "derived from text"}
    assert not sequences[0].loss_mask.valid.any()
    assert any("derived" in note for note in carried.notes)
    assert any("logprobs: not in the JSONL" in note for note in carried.notes)


def test_ids_that_are_there_are_taken(tmp_path):
    path = verl_lines(tmp_path / "3.jsonl", prompt_ids=[5, 6], response_ids=[7])
    _, sequences, carried = imported(tmp_path, path, framework="verl")
    assert [s.tokens.values.tolist() for s in sequences] == [[5, 6, 7]] * 2
    assert "tokens" not in sequences[0].annotations
    assert carried.dropped["input"] == {"sequences: text; the token ids are carried": 2}


@pytest.mark.engine
def test_a_data_proto_pickle_is_refused_with_the_way_out(tmp_path):
    pytest.importorskip("torch")
    import pickle

    path = tmp_path / "proto.pkl"
    path.write_bytes(pickle.dumps({"batch": b"", "non_tensor_batch": {}}))
    with pytest.raises(SchemaError, match=r"proto\.pkl.*plain pickles.*torch\.save\(dict"):
        imported(tmp_path, path, framework="verl")


# -- all ----------------------------------------------------------------------------------


def test_nothing_is_overwritten(tmp_path, rng):
    path = nemo_lines(tmp_path / "a.jsonl", nemo_batch(rng))
    (tmp_path / "tape").mkdir()
    imported(tmp_path, path, framework="nemo-rl")  # an empty folder is fine
    with pytest.raises(TapeExistsError, match="not empty"):
        imported(tmp_path, path, framework="nemo-rl")
    with pytest.raises(UsageError, match="slime"):
        imported(tmp_path, path, framework="nobody")


def test_a_second_file_that_fails_leaves_no_tape(tmp_path, rng):
    path = nemo_lines(tmp_path / "a.jsonl", nemo_batch(rng))
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(SchemaError, match=r"b\.jsonl"):
        imported(tmp_path, path, tmp_path / "b.jsonl", framework="nemo-rl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_import_and_export_give_back_what_went_in(tmp_path, rng):
    batch = nemo_batch(rng)
    path = nemo_lines(tmp_path / "a.jsonl", batch)
    tape, _, _ = imported(tmp_path, path, framework="nemo-rl")
    export_tape(tape, tmp_path / "out", to="parquet")
    table = pq.read_table(tmp_path / "out" / "sequences.parquet")
    expected = pa.array(
        [batch["input_ids"][i, :n].tolist() for i, n in enumerate(batch["input_lengths"])],
        pa.list_(pa.uint32()),
    )
    assert table.column("ids").combine_chunks().equals(expected)
    for i, cell in enumerate(table.column("processed").to_pylist()):
        n = batch["input_lengths"][i]
        wanted = [
            float(x) if m else None
            for x, m in zip(
                batch["generation_logprobs"][i, :n], batch["token_mask"][i, :n], strict=True
            )
        ]
        assert cell == wanted


def test_the_command_prints_what_was_carried_and_what_not(tmp_path, rng):
    path = nemo_lines(tmp_path / "a.jsonl", nemo_batch(rng), content=["x", "y"])
    run = CliRunner().invoke
    ran = run(import_, [str(path), "-o", str(tmp_path / "a"), "--from", "nemo-rl"])
    assert ran.exit_code == 0, ran.output
    kept, _, rest = ran.output.partition("not carried")
    assert "token_ids" in kept and "15 values -> tokens.ids" in kept
    assert "content" in rest and "note: " in rest
    arguments = f"{path} -o {tmp_path}/b --from nemo-rl --semantics scaled --temperature 0.8 --json"
    ran = run(import_, arguments.split())
    said = json.loads(ran.output)
    assert said["kept"]["generation_logprobs"]["into"] == "tokens.scaled"
    assert said["dropped"]["content"]
    (first, *_) = open_tape(tmp_path / "b")
    assert first.semantics[0][2]["temperature"] == 0.8


@pytest.mark.engine
def test_a_field_that_is_something_else_is_said_of_its_file(tmp_path, rng):
    path = save_slime(tmp_path / "0.pt", [slime_sample(rng, 0, tokens="notalist")])
    with pytest.raises(SchemaError, match=r"0\.pt: .*notalist"):
        import_dumps([path], tmp_path / "tape", framework="slime")
    assert not (tmp_path / "tape").exists()
