"""One sequence and one token: the recorded bits, what is missing and why, and the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.store import UsageError
from rolltape.store.schema import TOKEN_STATES
from rolltape.viewer.arrays import encode
from rolltape.viewer.columns import MAX_WINDOW
from rolltape.viewer.detail import ulp_distance
from rolltape.viewer.vocabulary import load_vocabulary
from tests.e2e import viewer_data
from tests.e2e.viewer_client import Api, Json
from tests.e2e.viewer_data import MODEL, PROMPT, Scene, build, diff_case, make_cases

# ---- one sequence -------------------------------------------------------------------------


def test_a_sequence_has_its_counts_and_its_place_in_the_list(api: Api, scene: Scene) -> None:
    case = scene.cases["0-1.1"]
    data = api.get(api.at("seqs", case.key_a.id), sort="id")
    states = np.bincount(diff_case(case)["state"], minlength=7).tolist()
    assert list(data["counts"].values()) == states
    ids = [row["id"] for row in api.rows(sort="id")]
    at = ids.index(case.key_a.id)
    assert data["neighbours"] == {
        "previous": ids[at - 1],
        "next": ids[at + 1],
        "rank": at + 1,
        "of": len(ids),
    }
    assert data["b"] == case.key_b.id


def test_the_minimap_never_hides_a_spike(api: Api, scene: Scene) -> None:
    case = scene.cases["0-2.1"]
    data = api.get(api.at("seqs", case.key_a.id))
    delta = diff_case(case)["delta"]
    sizes = np.where(delta.valid, np.abs(delta.values), -1)
    starts = data["minimap"]["starts"]
    assert len(starts) == 1024
    edges = [*starts, case.length]
    for low, high, value in zip(edges, edges[1:], data["minimap"]["max_abs"], strict=False):
        assert value == (None if sizes[low:high].max() < 0 else float(sizes[low:high].max()))


def test_unknown_and_malformed_names(api: Api, scene: Scene) -> None:
    assert api.fails(404, "/api/runs/nothing")["what"] == "run"
    assert api.fails(404, api.at("seqs", "1f0c29ab.9-9.9"))["what"] == "sequence"
    assert api.fails(400, api.at("seqs", "a%20b"))["field"] == "seq"
    assert api.fails(400, api.at("seqs", "..%5C..%5Cetc"))["field"] == "seq"
    assert api.raw("/api/nothing").status_code == 404


# ---- token window -------------------------------------------------------------------------


def test_a_window_holds_the_recorded_bits(api: Api, scene: Scene) -> None:
    case = scene.cases["0-1.0"]
    arrays, metadata = api.arrays(case.key_a.id, 0, case.length)
    expected = diff_case(case)
    assert [TOKEN_STATES[s] for s in arrays["state"]] == [
        TOKEN_STATES[s] for s in expected["state"]
    ]
    assert metadata["states"].split(",")[: len(TOKEN_STATES)] == list(TOKEN_STATES)
    for name, side in (("a", case.a), ("b", case.b)):
        bit = 1 << metadata["flags"].split(",").index(name)
        valid = (arrays["flags"] & bit).astype(bool)
        assert np.array_equal(valid, side.valid)
        assert arrays[name][valid].tobytes() == side.values[side.valid].tobytes()
    assert np.array_equal(arrays["ids"], case.ids)


def test_missing_is_a_flag_and_never_a_number(api: Api, scene: Scene) -> None:
    case = scene.cases["0-1.1"]
    arrays, metadata = api.arrays(case.key_a.id, 0, case.length)
    names = metadata["flags"].split(",")
    for name, side in (("a", case.a), ("b", case.b)):
        absent = (arrays["flags"] & (1 << names.index(name))) == 0
        assert np.array_equal(absent, ~side.valid)
        assert np.isnan(arrays[name][absent]).all()
    delta_there = (arrays["flags"] & (1 << names.index("delta"))) != 0
    assert not np.isnan(arrays["delta"][delta_there]).any()


def test_a_part_of_a_window_equals_that_part_of_the_whole(api: Api, scene: Scene) -> None:
    seq = scene.id("0-2.1")
    whole, _ = api.arrays(seq, 0, 4096)
    part, metadata = api.arrays(seq, 1000, 1100)
    assert metadata["start"] == "1000"
    for name in ("ids", "state", "flags", "a", "b", "delta", "flips"):
        assert whole[name][1000:1100].tobytes() == part[name].tobytes()


def test_text_is_the_bytes_of_the_tokens(api: Api, scene: Scene) -> None:
    case = scene.cases["0-1.0"]
    arrays, _ = api.arrays(case.key_a.id, 0, case.length)
    text = arrays["text_bytes"].tobytes()
    assert len(arrays["text_offsets"]) == case.length + 1
    whole = PROMPT + viewer_data.ODD + viewer_data.ANSWER
    assert text == whole.encode()
    low, high = arrays["text_offsets"][[case.prompt_len, case.length]]
    assert text[low:high].decode() == viewer_data.ODD + viewer_data.ANSWER


def test_flips_are_counted_and_absent_where_a_route_is(api: Api, scene: Scene) -> None:
    case = scene.cases["0-1.1"]
    arrays, _ = api.arrays(case.key_a.id, 0, case.length)
    flips = diff_case(case)["flips"]
    assert np.array_equal(arrays["flips"] != 0xFFFF, flips.valid)
    assert np.array_equal(arrays["flips"][flips.valid], flips.values[flips.valid])


def test_columns_can_be_chosen(api: Api, scene: Scene) -> None:
    seq = scene.id("0-0.0")
    arrays, _ = api.arrays(seq, 0, 10, cols="delta,state")
    assert set(arrays) == {"delta", "state"}
    path = api.at("seqs", seq, "tokens")
    assert api.fails(400, path, start=0, end=10, cols="colour")["field"] == "cols"


def test_a_window_has_a_limit_and_a_range(api: Api, scene: Scene) -> None:
    path = api.at("seqs", scene.id("0-2.1"), "tokens")
    problem = api.fails(413, path, start=0, end=MAX_WINDOW + 1)
    assert problem["limit"] == MAX_WINDOW
    assert api.fails(400, path, start=6034, end=6034)["field"] == "start"
    assert api.fails(400, path, start=6000, end=6034)["field"] == "end"
    assert api.fails(400, path, start=5, end=4)["field"] == "end"
    assert api.fails(400, path, start=-1, end=4)["field"] == "start"
    assert api.fails(400, path, end=4)["field"] == "start"


def test_without_a_report_the_tape_says_what_it_knows(small: Scene) -> None:
    api = Api(small.a)
    case = small.cases["0-0.1"]
    arrays, metadata = api.arrays(case.key_a.id, 0, case.length)
    states = metadata["states"].split(",")
    found = [states[s] for s in arrays["state"]]
    assert set(found[: case.prompt_len]) == {"masked"}
    assert set(found[case.prompt_len :]) == {"not_diffed"}
    assert np.array_equal(arrays["a"][case.prompt_len :], case.a.values[case.prompt_len :])


def test_safetensors_itself_reads_the_bytes() -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    arrays = {
        "b": np.arange(5, dtype=np.uint8),
        "a": np.arange(3, dtype=np.float32) / 3,
        "c": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "empty": np.zeros(0, np.uint32),
    }
    found = numpy.load(encode(arrays, metadata={"k": "v"}))
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


# ---- one token ----------------------------------------------------------------------------


def test_the_panel_has_both_logprobs_to_the_last_bit(api: Api, scene: Scene) -> None:
    detail = api.get(api.at("seqs", scene.id("0-0.1"), "tokens", "71"))
    assert (detail["a"]["text"], detail["a"]["hex"]) == ("-2.75", "0xc0300000")
    b = np.float32(-1.4600001)
    assert np.float32(detail["b"]["text"]) == b
    assert int(detail["b"]["hex"], 16) == int(b.view(np.uint32))
    assert np.float32(detail["delta"]) == np.float32(b - np.float32(-2.75))
    assert float(detail["ratio"]) == pytest.approx(np.exp(1.29), rel=1e-6)
    steps, at = 0, np.float32(-2.75)
    assert detail["ulp"] == int(at.view(np.int32)) - int(b.view(np.int32)) > steps
    assert detail["a"]["semantics"]["truncation"] == ["top_k=50"]
    assert (detail["state"], detail["part"]) == ("compared", "response")


def test_the_panel_has_the_step_and_what_ran_in_it(api: Api, scene: Scene) -> None:
    case = scene.cases["0-0.1"]
    detail = api.get(api.at("seqs", case.key_a.id, "tokens", "71"))
    side = detail["sides"]["a"]
    step = 71 - case.prompt_len
    assert side["step"]["step"] == step
    alive = {c.key_a.id for c in scene.cases.values() if c.length - c.prompt_len > step}
    assert {row["seq"] for row in side["step"]["batch"]} == alive
    (own,) = [row for row in side["step"]["batch"] if row["own"]]
    assert (own["start"], own["n"], own["kind"]) == (70, 1, "decode")
    assert side["weight_version"] == 3
    assert side["support"] == {
        "state": "explicit",
        "size": 50,
        "derived": False,
        "holds_token": True,
    }
    assert detail["sides"]["b"]["step"]["batch"][0]["kind"] == "score"


def test_the_panel_marks_the_layers_that_disagree(api: Api, scene: Scene) -> None:
    case = scene.cases["0-0.1"]
    flips = diff_case(case)["flips"]
    position = int(np.flatnonzero(flips.valid & (flips.values > 0))[0])
    detail = api.get(api.at("seqs", case.key_a.id, "tokens", str(position)))
    layers = detail["routes"]["layers"]
    assert [row["a"]["ids"] for row in layers] == case.routes[position].tolist()
    assert [row["b"]["ids"] for row in layers] == case.live[position].tolist()
    differing = [row["layer"] for row in layers if row["same"] is False]
    assert len(differing) == flips.values[position] == detail["flips"]
    assert np.float32(layers[2]["a"]["margin"]) == case.margin[position, 2]


def test_the_routes_that_drew_a_token_are_those_of_the_input_before_it(
    api: Api, scene: Scene
) -> None:
    case = scene.cases["0-0.1"]
    flips = diff_case(case)["flips"]
    position = int(np.flatnonzero(flips.valid & (flips.values > 0))[0]) + 1
    drawn_by = api.get(api.at("seqs", case.key_a.id, "tokens", str(position)))["drawn_by"]
    ids = [row["a"]["ids"] for row in drawn_by["layers"]]
    assert ids == case.routes[position - 1].tolist()
    assert drawn_by["differ"] == flips.values[position - 1]
    assert api.get(api.at("seqs", case.key_a.id, "tokens", "0"))["drawn_by"] is None


def test_a_missing_route_says_why(api: Api, scene: Scene) -> None:
    detail = api.get(api.at("seqs", scene.id("0-1.1"), "tokens", "4"))
    assert {row["a"]["reason"] for row in detail["routes"]["layers"]} == {"cached"}
    assert detail["flips"] is None
    assert all(row["same"] is None for row in detail["routes"]["layers"])


def test_the_panel_says_the_state_in_words(api: Api, scene: Scene) -> None:
    holes = scene.cases["0-1.1"]
    for offset, state in ((5, "missing_a"), (12, "missing_b"), (22, "masked")):
        path = api.at("seqs", holes.key_a.id, "tokens", str(holes.prompt_len + offset))
        detail = api.get(path)
        assert detail["state"] == state
        assert detail["delta"] is None
    odd = scene.cases["0-1.0"]
    detail = api.get(api.at("seqs", odd.key_a.id, "tokens", str(odd.prompt_len + 4)))
    assert (detail["state"], detail["a"]["text"], detail["ulp"]) == ("non_finite", "nan", None)
    assert api.get(api.at("seqs", odd.key_a.id, "tokens", "0"))["state"] == "not_scored"


def test_a_position_outside_the_sequence_is_named(api: Api, scene: Scene) -> None:
    path = api.at("seqs", scene.id("0-0.1"), "tokens")
    assert "0 to 156" in api.fails(400, f"{path}/157")["detail"]
    assert api.fails(400, f"{path}/first")["field"] == "position"


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(0, 50))
def test_ulp_distance_counts_steps(value: float, steps: int) -> None:
    at = np.float32(value)
    for _ in range(steps):
        at = np.nextafter(at, np.float32(np.inf))
    assert ulp_distance(np.float32(value), at) == steps
    assert ulp_distance(at, np.float32(value)) == steps


def test_ulp_distance_of_zeros_and_nan() -> None:
    assert ulp_distance(0.0, -0.0) == 0
    assert ulp_distance(np.nan, 1.0) is None


def test_walking_over_the_threshold_meets_every_such_token(api: Api, scene: Scene) -> None:
    case = scene.cases["0-1.0"]
    delta = diff_case(case)
    size = np.where(delta["delta"].valid, np.abs(delta["delta"].values), 0)
    non_finite = TOKEN_STATES.index("non_finite")
    expected = np.flatnonzero((size > 0.01) | (delta["state"] == non_finite)).tolist()
    assert case.prompt_len + 4 in expected
    path = api.at("seqs", case.key_a.id, "over")
    forth: list[int] = []
    answer = api.get(path, threshold=0.01, **{"from": -1})
    while answer["position"] is not None:
        forth.append(answer["position"])
        assert answer["rank"] == len(forth)
        answer = api.get(path, threshold=0.01, **{"from": forth[-1]})
    assert forth == expected
    back = api.get(path, threshold=0.01, back=True, **{"from": expected[-1]})
    assert back["position"] == expected[-2]


# ---- tokenizer ----------------------------------------------------------------------------


def test_bytes_agree_with_the_tokenizer_library() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    vocabulary = load_vocabulary(MODEL)
    text = PROMPT + viewer_data.ODD
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(vocabulary.pieces[i] for i in ids) == text.encode()
    assert len(vocabulary.pieces) == tokenizer.get_vocab_size(with_added_tokens=True)


def test_sentence_piece_and_word_piece_files(tmp_path: Path) -> None:
    def pieces(content: Json) -> dict[int, bytes]:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return load_vocabulary(tmp_path).pieces

    spaced = {"type": "BPE", "vocab": {"\u2581the": 0, "<0xE2>": 1, "n": 2}}
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}
    assert pieces({"model": spaced, "decoder": decoder}) == {0: b" the", 1: b"\xe2", 2: b"n"}
    scored = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581a", -1.5]]}
    assert pieces({"model": scored, "decoder": {"type": "Metaspace"}}) == {0: b"<unk>", 1: b" a"}
    words = {"type": "WordPiece", "vocab": {"un": 0, "##able": 1}}
    added = [{"id": 2, "content": "[SEP]"}]
    found = pieces({"model": words, "decoder": {"type": "WordPiece"}, "added_tokens": added})
    assert found == {0: b" un", 1: b"able", 2: b"[SEP]"}


def test_without_a_tokenizer_ids_are_given_and_the_reason(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=make_cases()[:1], model=tmp_path / "nowhere")
    api = Api(scene.a, scene.b, scene.report)
    seq = scene.id("0-0.0")
    reason = api.get(api.at("seqs", seq))["tokenizer"]["missing"]
    assert str(tmp_path / "nowhere") in reason
    assert "--tokenizer" in reason
    arrays, _ = api.arrays(seq, 0, 10)
    assert not len(arrays["text_bytes"])
    given_one = Api(scene.a, scene.b, scene.report, tokenizer=MODEL)
    assert len(given_one.arrays(seq, 0, 10)[0]["text_bytes"])


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_wrong_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path)
