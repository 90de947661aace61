"""`rolltape info` and `rolltape show`: what a person or a script reads off a tape."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from rolltape.replay import diff_tapes
from rolltape.store import Masked, TapeWriter, UsageError, seal
from rolltape.store.cli import info, show
from rolltape.store.jsonable import jsonable
from tests.builders import random_samples, write_tape


@pytest.fixture
def samples():
    return random_samples(3, response=[24, 24, 0], sites=("layers.1.out",))


@pytest.fixture
def tape(tmp_path, samples):
    samples[2].finish = "abort"
    return write_tape(tmp_path / "tape", samples)


def run(command, *arguments: object):
    return CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)


def output(command, *arguments: object) -> list[str]:
    result = run(command, *arguments)
    assert result.exception is None, result.exception
    return result.output.splitlines()


def read_json(command, *arguments: object) -> dict:
    text = run(command, *arguments, "--json").output
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# -- info ---------------------------------------------------------------------------------


def test_info_counts_what_is_there(tape):
    facts = read_json(info, tape.path)
    assert facts["sequences"]["by_finish"] == {"stop": 2, "abort": 1}
    assert facts["tokens"] == {"prompt": 18, "response": 48, "loss": 48}
    assert facts["engines"][0]["effective"] == {"attention": "sdpa"}
    assert facts["weights"][0]["digest"] == f"{7:016x}"
    assert facts["tables"]["sequences"]["rows"] == 3
    assert facts["bytes"] == sum(
        p.stat().st_size for p in tape.path.rglob("*.arrow") if p.is_file()
    )
    assert facts["coverage"]["activations"] == {"layers.1.out": 2 * 30 + 6}
    assert facts["problems"] == []


def test_info_gives_the_share_of_response_tokens_with_each_column(tmp_path, samples):
    samples[0].processed.valid[12:24] = False
    samples[1].raw.values[20] = np.nan
    for sample in samples:
        sample.scaled = Masked.empty(sample.length, np.float32)
    samples[0].raw.valid[0] = True  # a prompt token is no response token
    coverage = read_json(info, write_tape(tmp_path / "t", samples).path)["coverage"]["logprobs"]
    assert coverage == {
        "processed": {"tokens": 36, "share": 0.75, "non_finite": 0},
        "raw": {"tokens": 48, "share": 1.0, "non_finite": 1},
    }


def test_info_gives_the_share_of_positions_with_a_route_by_layer(tmp_path, samples):
    samples[0].used.valid[:, 1] = False
    samples[1].used.valid[10:20] = False
    samples[1].used.missing = [[10, 10, None, "dropped"]]
    routes = read_json(info, write_tape(tmp_path / "t", samples).path)["coverage"]["routes"]
    positions = 29 + 29 + 5
    assert {n: r["positions"] for n, r in routes["used"]["layers"].items()} == {
        "1": positions - 10,
        "2": positions - 10 - 29,
        "3": positions - 10,
    }
    assert routes["used"]["layers"]["1"]["share"] == pytest.approx(1 - 10 / positions)
    assert routes["missing"]["dropped"] == 30


def test_info_gives_the_states_of_the_kept_sets(tmp_path, samples):
    samples[0].kept[10] = None
    samples[1].kept = None
    supports = read_json(info, write_tape(tmp_path / "t", samples).path)["coverage"]["supports"]
    assert {k: supports[k] for k in ("explicit", "full", "unrecorded")} == {
        "explicit": 23,
        "full": 1,
        "unrecorded": 24,
    }


def test_info_tells_dense_from_not_recorded(tmp_path):
    dense = write_tape(tmp_path / "dense", random_samples(1, layers=()))
    assert any("a dense model" in line for line in output(info, dense.path))
    blind = random_samples(1)
    blind[0].used = None
    unknown = write_tape(tmp_path / "blind", blind, facts={"moe_layers": [[1, 2, 3]]})
    lines = output(info, unknown.path)
    assert not any("a dense model" in line for line in lines)
    assert "routes      none" in lines


def test_info_lists_gaps_and_hook_errors(tape):
    with TapeWriter(tape.path) as writer:
        for kind, detail in (("gap", {"reason": "full"}), ("hook_error", "not json")):
            text = json.dumps(detail) if isinstance(detail, dict) else detail
            row = {"writer": writer.id, "t_ns": 1, "kind": kind, "detail": text}
            writer.append("events", row)
    facts = read_json(info, tape.path)
    assert facts["events"]["by_kind"] == {"gap": 1, "hook_error": 1}
    assert [f["detail"] for f in facts["events"]["faults"]] == [{"reason": "full"}, "not json"]
    assert any(line.startswith("  gap: ") for line in output(info, tape.path))


def test_info_says_what_a_fault_was_and_cuts_no_remedy(tape):
    remedy = "do this and then that " * 8 + "and it works"
    details = {
        "gap": {"reason": "the queue was full", "steps": [3, 9]},
        "hook_error": {"hook": "h", "error": "E: boom", "trace": "Traceback " * 200},
        "finding": {"code": "RT001", "message": "something", "remedy": remedy},
    }
    with TapeWriter(tape.path) as writer:
        for kind, detail in details.items():
            row = {"writer": writer.id, "t_ns": 1, "kind": kind, "detail": json.dumps(detail)}
            writer.append("events", row)
    text = "\n".join(output(info, tape.path))
    assert "  gap: the queue was full, steps [3, 9]" in text
    assert "  hook_error: h: E: boom\n" in text and "Traceback" not in text
    assert f"RT001: something: {remedy}" in " ".join(text.split())


def test_info_says_whether_weights_are_in_place_and_known(tmp_path, samples):
    tape = write_tape(tmp_path / "t", samples, digests={0: 0xABC})
    with TapeWriter(tape.path) as writer:
        engine = next(iter(tape.engines))
        for version, state, reason in ((1, "complete", "packed"), (2, "dirty", None)):
            row = {"engine": engine, "version": version, "state": state, "group": ""}
            writer.append("weights", {**row, "reason": reason})
    lines = [line for line in output(info, tape.path) if line.startswith(("weights ", " " * 12))]
    text = " ".join(" ".join(lines).split())
    assert "in place, digest 0000000000000abc" in text
    assert "version 1 of a1a1a1a1: in place, without a digest" in text and "(packed)" in text
    assert "version 2 of a1a1a1a1: an update began that is not known to have ended" in text


def test_info_says_what_a_row_of_a_table_is(tape):
    lines = [" ".join(line.split()) for line in output(info, tape.path)]
    rows = read_json(info, tape.path)["tables"]["tokens"]["rows"]
    assert any(line.startswith(f"tokens {rows} fragments ") for line in lines), lines
    assert any(line.startswith("engines 1 process ") for line in lines)


def test_info_of_a_tape_that_is_not_sealed_says_so(tmp_path, samples):
    tape = write_tape(tmp_path / "t", samples, sealed=False)
    assert read_json(info, tape.path)["seal"] is None
    assert any("not sealed" in line for line in output(info, tape.path))


def test_info_reads_the_rest_of_a_damaged_tape_names_the_shard_and_exits_2(tape):
    shard = next((tape.path / "routes").iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    result = run(info, tape.path)
    assert result.return_value == 2
    assert f"{shard}" in next(x for x in result.output.splitlines() if x.startswith("PROBLEM"))
    assert "2 stop, 1 abort" in result.output


def test_info_notices_a_shard_that_is_gone(tape):
    shard = next((tape.path / "supports").iterdir())
    shard.unlink()
    result = run(info, tape.path)
    assert result.return_value == 2
    assert shard.name in result.output


def test_rows_that_came_before_a_killed_jobs_sequence_are_no_damage(tmp_path):
    tape = write_tape(tmp_path / "tape", random_samples(1, response=4), sealed=False)
    with TapeWriter(tape.path) as writer:
        row = {"engine": "e" * 32, "request": "lost", "sample": 0, "pass": 0, "start": 0, "n": 1}
        writer.append("tokens", {**row, "ids": [[1]]})
    seal(tape.path)
    result = run(info, tape.path)
    assert result.exception is None and result.return_value == 0
    facts = read_json(info, tape.path)
    assert facts["damaged"] is False and "have no row in the sequences" in facts["problems"][0]


def test_info_of_an_empty_tape_is_no_error(tmp_path):
    lines = output(info, write_tape(tmp_path / "t", []).path)
    assert "sequences   0" in lines


def test_info_of_a_report_repeats_its_verdict(tmp_path, samples):
    a = write_tape(tmp_path / "a", samples)
    samples[0].processed.values[9] += 1
    b = write_tape(tmp_path / "b", samples, replays=a)
    diff_tapes(a, b, out=tmp_path / "report")
    lines = output(info, tmp_path / "report")
    assert any(line.startswith("verdict     divergent: ") for line in lines)
    assert any("max 1 at a1a1a1a1.0-0.0 position 9" in line for line in lines)
    assert read_json(info, tmp_path / "report")["summary"]["verdict"] == "divergent"


# -- show ---------------------------------------------------------------------------------


def test_show_lists_the_sequences_one_a_line(tape):
    head, *rows, foot = output(show, tape.path)
    assert head.split() == ["sequence", "finish", "prompt", "response", "version", "group"]
    assert [row.split() for row in rows] == [
        ["a1a1a1a1.0-0.0", "stop", "6", "24", "0", "prompt-0"],
        ["a1a1a1a1.0-0.1", "stop", "6", "24", "0", "prompt-0"],
        ["a1a1a1a1.0-1.0", "abort", "6", "0", "-", "prompt-1"],
    ]
    assert foot.startswith("3 sequences")


def test_show_prints_a_position_with_all_that_was_recorded_of_it(tape, samples):
    lines = output(show, tape.path, "0-0.1", "--tokens", "9:11")
    sample = samples[1]
    assert lines[0] == "a1a1a1a1.0-0.1: 6 prompt + 24 response tokens, stop"
    assert "logprobs 0:30: T=0.7, top_p=0.9, 1000 logits, float32, engine" in lines
    head = next(i for i, line in enumerate(lines) if line.split()[0] == "pos")
    assert lines[head].split() == [
        "pos", "token", "m", "processed", "scaled", "raw", "kept", "step", "ver",
    ]  # fmt: skip
    first = lines[head + 1].split()
    assert first == [
        "9",
        str(sample.ids[9]),
        "x",
        f"{sample.processed.values[9]:.6f}",
        f"{sample.scaled.values[9]:.6f}",
        f"{sample.raw.values[9]:.6f}",
        str(len(sample.kept[9])),
        "9",
        "0",
    ]
    routes = dict(part.split(":") for part in lines[head + 2].split())
    assert routes == {
        str(layer): ",".join(map(str, sample.used.ids[9, column]))
        for column, layer in enumerate((1, 2, 3))
    }
    assert lines[head + 3].split()[0] == "10"


def test_show_marks_what_is_missing_and_keeps_what_is_not_finite(tmp_path, samples):
    samples[0].processed.valid[9] = False
    samples[0].raw.values[9] = -np.inf
    samples[0].loss_mask.values[9] = False
    samples[0].loss_mask.valid[10] = False
    tape = write_tape(tmp_path / "t", samples)
    rows = [x.split() for x in output(show, tape.path, "0-0.0", "--tokens", "9:11",
                                      "--routes", "none")][-2:]  # fmt: skip
    assert rows[0][2:6] == [".", "-", f"{samples[0].scaled.values[9]:.6f}", "-Infinity"]
    assert rows[1][2] == "-"
    whole = read_json(show, tape.path, "0-0.0", "--tokens", "9:11")
    assert whole["positions"]["processed"][0] is None
    assert whole["positions"]["raw"][0] == "-Infinity"


def test_show_gives_the_last_position_no_route(tape):
    lines = output(show, tape.path, "0-0.0", "--tokens", "28:")
    assert [line.split()[0] for line in lines[-3:]] == ["28", lines[-2].split()[0], "29"]
    assert lines[-2].startswith("       1:")


def test_show_fits_80_columns_whatever_the_number_of_layers(tmp_path):
    samples = random_samples(1, layers=tuple(range(40)), experts=128, k=8)
    tape = write_tape(tmp_path / "t", samples)
    for options in ([], ["--routes", "all"]):
        lines = output(show, tape.path, "0-0.0", *options)
        assert max(map(len, lines)) <= 80
    assert any(
        line.endswith("layers") and "+3" in line for line in output(show, tape.path, "0-0.0")
    )
    chosen = output(show, tape.path, "0-0.0", "--tokens", "9:10", "--routes", "7,39")
    assert [part.split(":")[0] for part in chosen[-1].split()] == ["7", "39"]


def test_show_cuts_routes_at_the_same_layer_everywhere(tmp_path):
    tape = write_tape(tmp_path / "t", random_samples(1, layers=tuple(range(40)), experts=128, k=8))
    lines = [line for line in output(show, tape.path, "0-0.0") if line.startswith("       0:")]
    assert len(lines) > 20
    assert len({line.partition("+")[2] for line in lines}) == 1


def test_show_says_what_its_columns_are(tape, tmp_path, samples):
    lines = output(show, tape.path, "0-0.0", "--tokens", "9:10")
    head = next(i for i, line in enumerate(lines) if line.split()[0] == "pos")
    legend = " ".join(lines[:head])
    for word in ("m: ", "kept: ", "-: ", "step, ver: ", "LAYER:EXPERTS"):
        assert word in legend
    bare = " ".join(output(show, tape.path, "0-0.0", "--tokens", "9:10", "--routes", "none"))
    assert "LAYER" not in bare


@pytest.mark.parametrize("layers", ["99", "1,99", "x", "1-3"])
def test_show_says_which_layers_have_routes(tape, layers):
    result = run(show, tape.path, "0-0.0", "--routes", layers)
    assert isinstance(result.exception, UsageError) and result.output == ""
    assert "layers 1-3" in str(result.exception.hint)


def test_show_of_routes_that_nobody_recorded(tmp_path, samples):
    samples[0].used = None
    tape = write_tape(tmp_path / "t", samples)
    result = run(show, tape.path, "0-0.0", "--routes", "1")
    assert "no routes of this sequence" in str(result.exception)


def test_show_tells_the_live_choice_from_the_forced_one(tmp_path, samples):
    samples[0].live = samples[1].used
    tape = write_tape(tmp_path / "t", samples)
    lines = output(show, tape.path, "0-0.0", "--tokens", "9:10")
    assert lines[-2].startswith("       1:")
    assert lines[-1].startswith("  live 1:")


@pytest.mark.parametrize("span", ["30:40", "7:7", "9:3", "x", "-3:", "1:2:3", "5"])
def test_show_refuses_a_range_without_positions(tape, span):
    result = run(show, tape.path, "0-0.0", f"--tokens={span}")
    assert isinstance(result.exception, UsageError)
    assert span in str(result.exception)


def test_show_says_which_sequences_there_are_when_a_name_is_wrong(tape):
    result = run(show, tape.path, "nobody")
    assert isinstance(result.exception, UsageError)
    assert "rolltape show" in str(result.exception)


def test_show_of_a_report_points_to_info(tmp_path, samples):
    a = write_tape(tmp_path / "a", samples)
    diff_tapes(a, a, out=tmp_path / "report")
    result = run(show, tmp_path / "report")
    assert "rolltape info" in str(result.exception)


def test_json_values_are_strings_where_json_has_no_number():
    values = [np.float32(0.1), np.nan, -np.inf, np.int64(3), np.bool_(True), "x", None]
    assert jsonable(values) == [0.1, "NaN", "-Infinity", 3, True, "x", None]
    masked = Masked(np.array([1, 2], np.uint8), np.array([True, False]))
    assert jsonable({"a": masked, 3: (1,)}) == {"a": [1, None], "3": [1]}
