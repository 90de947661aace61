"""The determinism suite: what is wrong with an engine fails the case that is about it, no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rolltape.cli import main
from rolltape.replay.bitwise import number
from rolltape.replay.verify import CASES, CaseResult, Comparison, Report, verify
from rolltape.replay.verify import transformers as on_transformers
from rolltape.replay.verify.output import print_report, write_junit
from rolltape.replay.verify.prompts import Workload
from rolltape.replay.verify.suite import judge
from rolltape.store.errors import UsageError
from tests.integration.conftest import BASE, DEVICE, ROOT, TINY_MOE, make_model

pytestmark = [pytest.mark.engine, pytest.mark.skipif(DEVICE != "cpu", reason="bits of the CPU")]

SMALL: dict[str, Any] = {"prompts": 5, "tokens": 6, "length": 12}
APPLIES = {"run-to-run", "batch", "slot", "prefill-decode", "chunked", "routes"}


def by_case(report: Report) -> dict[str, CaseResult]:
    return {case.case: case for case in report.cases}


def named(report: Report, verdict: str) -> set[str]:
    return {case.case for case in report.cases if case.verdict == verdict}


@pytest.fixture
def steady() -> Any:
    """Computes in float64, rounds to float32 at the end: the same bits however it is run."""
    model = make_model("qwen3_moe", torch.float64)
    model.set_experts_implementation("eager")
    return model


# -- engines with something wrong ----------------------------------------------------------

#: A change that no rounding hides, and that leaves the tokens likely.
FACTOR = 1 + 1e-3


@contextmanager
def scaled(model: Any, when: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """The MoE block of layer 1 is off for the rows [B] that `when` picks of its input [B, S, H]."""

    def hook(_: Any, args: Any, output: Any) -> Any:
        picked = torch.as_tensor(when(args[0])).expand(len(args[0]))
        return torch.where(picked[:, None, None], output * FACTOR, output)

    handle = model.model.layers[1].mlp.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def other_router_when_decoding(model: Any) -> Iterator[None]:
    """A decode step routes by other scores than a prefill does."""

    def hook(_: Any, args: Any) -> Any:
        if len(args[0]) <= SMALL["prompts"]:
            return (args[0] + 0.5 * args[0].flip(-1),)
        return None

    handle = model.model.layers[1].mlp.gate.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


#: Fault -> how to build it, and the cases that are about it.
FAULTS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    # alone, every prompt has the first slot
    "slot": (lambda m: scaled(m, lambda x: torch.arange(len(x)) == 0), {"slot", "batch"}),
    "batch size": (lambda m: scaled(m, lambda x: len(x) < 4), {"batch"}),
    "decode": (lambda m: scaled(m, lambda x: x.shape[1] == 1), {"prefill-decode"}),
    "chunk": (lambda m: scaled(m, lambda x: 1 < x.shape[1] < 12), {"chunked"}),
    "router": (other_router_when_decoding, {"prefill-decode", "routes"}),
}


@contextmanager
def noisy_attention(
    model: Any, *, layer: int, beyond: int = 0, rows: range = range(1000)
) -> Iterator[None]:
    """Attention of a layer has other bits each time, beyond so many tokens, for so many rows."""
    generator = torch.Generator().manual_seed(0)

    def forward(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
        if module.layer_idx == layer and key.shape[2] > beyond and len(key) in rows:
            noise = torch.rand(output.shape, generator=generator, dtype=torch.float64)
            output = output * (1 + 1e-3 * noise).to(output.dtype)
        return output, weights

    AttentionInterface.register("noisy", forward)
    AttentionMaskInterface.register("noisy", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("noisy")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def test_an_engine_with_nothing_wrong_passes_everything_that_applies(steady: Any) -> None:
    report = verify("transformers", steady, **SMALL)
    found = by_case(report)
    assert list(found) == list(CASES)
    assert named(report, "passed") == APPLIES, report.as_dict()
    assert named(report, "not-run") == set(CASES) - APPLIES
    assert report.exit_status == 0
    assert report.facts["self_test"]["control"] is True
    sampled = SMALL["prompts"] * SMALL["tokens"]
    inputs = SMALL["prompts"] * (SMALL["length"] + SMALL["tokens"] - 1)
    for name in APPLIES:
        for comparison in found[name].comparisons:
            assert comparison.compared == {
                "raw": sampled, "routes.ids": 3 * inputs, "routes.weights": 3 * inputs
            }  # fmt: skip
    sizes = [c.variant for c in found["batch"].comparisons]
    assert sizes == ["batch of 1", "batch of 2", "batch of 4"]
    assert len(found["run-to-run"].comparisons) == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_case_that_is_about_it(steady: Any, fault: str) -> None:
    build, cases = FAULTS[fault]
    with build(steady):
        report = verify("transformers", steady, **SMALL)
    assert named(report, "failed") == cases, report.as_dict()
    assert named(report, "passed") == APPLIES - cases
    assert report.exit_status == 1
    for name in cases:
        found = by_case(report)[name]
        token = found.first.token
        assert token["what"] == "raw" and token["recorded"]["hex"] != token["found"]["hex"]
        assert SMALL["length"] <= token["position"] < SMALL["length"] + SMALL["tokens"]
        assert token["sequence"] in {f"prompt-{row}" for row in range(SMALL["prompts"])}
        if name != "routes":
            where = "layers.1.router" if fault == "router" else "layers.1.out"
            assert found.site["site"] == where


def test_a_wrong_slot_is_traced_to_its_layer_and_its_prompts(steady: Any) -> None:
    with scaled(steady, lambda x: torch.arange(len(x)) == 0):
        report = verify("transformers", steady, cases=["slot"], **SMALL)
    found = by_case(report)["slot"]
    # the first and the last prompt change places
    assert found.first.sequences_differ == 2
    assert found.first.first["sequence"] in ("prompt-0", "prompt-4")
    assert found.site["site"] == "layers.1.out" and found.site["step"] == 0
    assert found.site["sequence"] == found.first.first["sequence"]


def test_noise_is_found_run_to_run_and_its_site_is_attention(steady: Any) -> None:
    with noisy_attention(steady, layer=2):
        report = verify("transformers", steady, **SMALL)
    assert named(report, "failed") == {"run-to-run"}
    assert report.exit_status == 1
    assert by_case(report)["run-to-run"].site["site"] == "layers.2.heads"
    assert by_case(report)["run-to-run"].first.first["step"] == 0
    assert report.facts["self_test"]["neutral"] is None
    # where the same run twice differs, a difference says nothing of another case
    for name in APPLIES - {"run-to-run", "routes"}:
        found = by_case(report)[name]
        assert found.verdict == "not-run" and "twice differs" in found.reason
    assert named(report, "passed") == set()


def test_noise_that_begins_late_does_not_hide_what_differs_before(steady: Any) -> None:
    beyond = SMALL["length"] + 2
    with noisy_attention(steady, layer=2, beyond=beyond):
        report = verify("transformers", steady, **SMALL)
    found = by_case(report)["run-to-run"]
    assert found.verdict == "failed" and found.first.step == 3
    assert (found.site["site"], found.site["step"]) == ("layers.2.heads", 3)
    assert found.site["position"] == beyond
    assert named(report, "failed") == {"run-to-run"}
    with ExitStack() as stack:
        stack.enter_context(noisy_attention(steady, layer=2, beyond=beyond))
        stack.enter_context(scaled(steady, lambda x: len(x) < 4))
        report = verify("transformers", steady, cases=["batch", "slot"], **SMALL)
    assert named(report, "failed") == {"run-to-run", "batch"}
    assert named(report, "not-run") == {"slot"}


def test_noise_of_another_composition_is_told_apart(steady: Any) -> None:
    with noisy_attention(steady, layer=0, rows=range(1, 2)):
        report = verify("transformers", steady, **SMALL)
    assert named(report, "failed") == {"batch"}
    found = by_case(report)["batch"]
    assert found.repeatable is False and "batch of 1 twice differs, too" in found.reason
    assert found.site["site"] == "layers.0.heads"
    with scaled(steady, lambda x: len(x) < 4):
        report = verify("transformers", steady, cases=["batch"], **SMALL)
    assert by_case(report)["batch"].repeatable is True


def test_a_case_that_breaks_is_no_pass_and_the_others_go_on(steady: Any) -> None:
    def chunk(_: Any, args: Any, kwargs: Any) -> None:
        if 1 < kwargs["input_ids"].shape[1] < SMALL["length"]:
            raise RuntimeError("no chunks here")

    handle = steady.register_forward_pre_hook(chunk, with_kwargs=True)
    report = verify("transformers", steady, **SMALL)
    handle.remove()
    found = by_case(report)["chunked"]
    assert (found.verdict, found.reason) == ("not-run", "RuntimeError: no chunks here")
    assert named(report, "passed") == APPLIES - {"chunked"}
    assert report.exit_status == 3


def test_a_dense_model_has_no_routes() -> None:
    torch.manual_seed(0)
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE)).double().eval()
    report = verify("transformers", dense, **SMALL)
    assert named(report, "passed") == APPLIES - {"routes"}, report.as_dict()
    assert by_case(report)["run-to-run"].comparisons[0].compared == {"raw": 30}
    assert report.exit_status == 0


def test_a_model_without_a_map_of_sites_says_so(steady: Any) -> None:
    steady.config.model_type = "unheard-of"
    with scaled(steady, lambda x: torch.arange(len(x)) == 0):
        found = by_case(verify("transformers", steady, cases=["slot"], **SMALL))["slot"]
    assert found.verdict == "failed"
    assert "not looked for: no map of sites" in found.site["reason"]


# -- the bundled model ----------------------------------------------------------------------


def alone(model: Any, tokens: torch.Tensor, prompt: int) -> np.ndarray:
    """Logprobs of the tokens behind a prompt, decoded by itself without rolltape."""
    out = []
    with torch.no_grad():
        result = model(tokens[None, :prompt], use_cache=True, logits_to_keep=1)
        for p in range(prompt, len(tokens)):
            logprobs = torch.log_softmax(result.logits[:, -1].float(), -1)
            out.append(logprobs[0, tokens[p]].item())
            cache = result.past_key_values
            result = model(tokens[None, p : p + 1], past_key_values=cache, logits_to_keep=1)
    return np.array(out, np.float32)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several, where a matrix product is cut depends on the row: `slot` fails in FP32."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_it_says_of_the_bundled_model_is_what_the_model_does(dtype: str) -> None:
    work = Workload(prompts=4, tokens=5, length=None, seed=1)
    bench = on_transformers.bench(str(TINY_MOE), work, dtype=dtype, device="cpu")
    try:
        assert [c.differ for c in bench.run("run-to-run")] == [{}, {}]
        assert [c.differ for c in bench.run("slot")] == [{}]
        one = bench.run("batch")[0]
        wrong = 0
        for row in bench.call.rows:
            sequence = bench.base.sequence(row.key)
            tokens = torch.from_numpy(sequence.tokens.values.astype(np.int64))
            recorded = sequence.logprob("raw").values[sequence.prompt_len :]
            found = alone(bench.model, tokens, sequence.prompt_len)
            wrong += int((found.view(np.uint32) != recorded.view(np.uint32)).sum())
        assert one.variant == "batch of 1" and one.compared["raw"] == 20
        assert one.differ.get("raw", 0) == wrong
        if dtype == "float32":
            assert wrong > 0, "these prompts are meant to show a difference"
            assert "site" in bench.site("batch", one)
    finally:
        bench.close()
    assert not bench.base.path.exists()


@pytest.mark.skipif(find_spec("accelerate") is None, reason="no accelerate to split a model with")
def test_two_ranks_are_compared_with_one() -> None:
    work = Workload(prompts=2, tokens=3, length=8, seed=0)
    bench = on_transformers.bench(str(TINY_MOE), work, dtype="float32", device="cpu")
    try:
        (found,) = bench.run("tp")
        site = bench.site("tp", found) if found.token is not None else None
    finally:
        bench.close()
    assert found.problem is None and found.compared["raw"] == 6
    assert found.compared["routes.ids"] == 2 * 10 * 6
    if found.token is not None:  # sums of two parts may be the same, they cannot be far off
        one, two = (float(found.token[side]["decimal"]) for side in ("recorded", "found"))
        assert one == pytest.approx(two, abs=1e-3)
        # what one rank sums up in one go is the sum of two parts first behind an output projection
        assert site is not None and site["replicas"] is None
        assert (site["site"], site["sequence"]) == ("layers.0.attn", found.shown["sequence"])


# -- the command ------------------------------------------------------------------------------


def command(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["verify", *args])
    return int(caught.value.code)


TINY = (
    "--engine",
    "transformers",
    str(TINY_MOE),
    "--prompts",
    "2",
    "--tokens",
    "3",
    "--length",
    "8",
)


def test_exit_statuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command(*TINY, "--case", "run-to-run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "passed" and told["lengths"] == [8, 8]
    assert [case["case"] for case in told["cases"]] == ["run-to-run"]
    assert told["attention"] == "sdpa"
    eager = ("--case", "run-to-run", "--set", "attn_implementation=eager", "--json")
    assert command(*TINY, *eager) == 0
    assert json.loads(capsys.readouterr().out)["attention"] == "eager"
    assert command(*TINY, "--case", "graphs") == 3
    assert "graphs" in capsys.readouterr().out
    assert command(*TINY, "--case", "nonsense") == 2
    assert command("--engine", "nonsense", "m") == 2
    assert command("--engine", "transformers", str(tmp_path / "nowhere")) == 2
    assert command(*TINY, "--dtype", "float33") == 2
    assert command(*TINY, "--tokens", "5000") == 2
    assert command(*TINY, "--set", "nonsense") == 2
    assert command(*TINY, "--junit", str(tmp_path / "no" / "f.xml")) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == 7


def result(case: str, verdict: Any, **how: bool) -> CaseResult:
    return CaseResult(case=case, verdict=verdict, reason="", **how)


def test_what_was_not_run_is_never_a_pass() -> None:
    def status(*cases: CaseResult) -> int:
        return Report(facts={}, cases=cases).exit_status

    passed, failed = result("run-to-run", "passed"), result("batch", "failed")
    absent = result("tp", "not-run", applies=False)
    wanted = result("tp", "not-run", applies=False, asked=True)
    assert status(passed, absent) == 0
    assert status(passed, wanted) == 3
    assert status(passed, result("chunked", "not-run")) == 3  # it broke, or could not be told
    assert status(passed, failed, wanted) == 1
    assert status(absent) == 3
    assert judge("slot", [Comparison(variant="v")], None).verdict == "not-run"
    assert judge("slot", [], None).verdict == "not-run"
    unknown = Comparison(variant="v", compared={"raw": 3}, problem="why")
    assert judge("slot", [unknown], None).reason == "why"


def test_junit_is_well_formed_whatever_a_reason_holds(tmp_path: Path) -> None:
    place = {"what": "raw", "sequence": "prompt-0", "position": 3, "step": 1, "layer": None,
             "recorded": {"hex": "0x1"}, "found": {"hex": "0x2"}, "ulp": 1}  # fmt: skip
    first = Comparison(variant="<v>\x00", differ={"raw": 1}, first=place, token=place)
    failed = CaseResult(case="batch", verdict="failed", reason='"&\x1b[1m', first=first)
    report = Report(
        facts={"engine": "transformers", "model": "<&>"},
        cases=[result("run-to-run", "passed"), failed, result("tp", "not-run")],
    )
    write_junit(report, tmp_path / "j.xml")
    (suite,) = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert [len(case) for case in suite.iter("testcase")] == [0, 1, 1]
    assert "prompt-0 position 3 step 1, 0x1 -> 0x2" in suite.find(".//failure").text


def test_the_report_gives_nats_a_next_command_and_lines_that_are_not_wrapped(capsys: Any) -> None:
    values = (np.float32(-8.5), np.float32(-8.25))
    place = {"what": "raw", "sequence": "prompt-0", "position": 3, "step": 1, "layer": None,
             "recorded": number(values[0]), "found": number(values[1]), "ulp": 262144}  # fmt: skip
    first = Comparison(variant="batch of 1", differ={"raw": 1}, first=place, token=place)
    long = "a reason that is as long as two lines of a terminal " * 3
    cases = [
        result("run-to-run", "passed"),
        CaseResult(case="batch", verdict="failed", reason="r", first=first),
        CaseResult(case="tp", verdict="not-run", reason=long),
    ]
    facts = {"engine": "transformers", "model": "m", "dtype": "bfloat16", "device": "cpu",
             "prompts": 2, "tokens": 3, "seed": 0}  # fmt: skip
    print_report(Report(facts=facts, cases=cases), command=["rolltape", "verify", "a model"])
    lines = capsys.readouterr().out.splitlines()
    assert "batch           FAILED   batch of 1: prompt-0 position 3 step 1" in lines
    assert f"{'':25}|delta| 0.25 nats, 0xc1080000 -> 0xc1040000 (262,144 ulp)" in lines
    assert f"tp              not-run  {long}" in lines
    assert lines[-1] == "next: rolltape verify 'a model' --dtype float64 --case batch"
    for fine in (cases[:1], [cases[0], cases[2]]):  # nothing failed: there is nothing to run
        print_report(Report(facts=facts, cases=fine), command=["rolltape", "verify", "m"])
        assert "next:" not in capsys.readouterr().out


def pytest_with(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    known = {e.value for e in entry_points(group="pytest11")}
    plugin = (
        [] if "rolltape.replay.pytest_plugin" in known else ["-p", "rolltape.replay.pytest_plugin"]
    )
    (cwd / "test_one.py").write_text("def test_one(): pass\n")
    # fmt: off
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *args],
        cwd=cwd, env=None, capture_output=True, text=True, timeout=300, check=False,
    )
    # fmt: on


def test_the_pytest_plugin(tmp_path: Path) -> None:
    idle = pytest_with(cwd=tmp_path)
    assert idle.returncode == 0 and "1 passed" in idle.stdout, idle.stdout
    given = [
        *("--rolltape-engine", "transformers", "--rolltape-model", str(TINY_MOE)),
        *("--rolltape-prompts", "2", "--rolltape-tokens", "3", "--rolltape-length", "8"),
    ]
    cases = ("--rolltape-case", "slot", "--rolltape-case", "graphs")
    done = pytest_with(*given, *cases, "--junitxml=j.xml", cwd=tmp_path)
    # what was asked for and cannot be run is no pass
    assert done.returncode == 1 and "1 failed, 3 passed" in done.stdout, done.stdout
    names = [case.get("name") for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase")]
    assert names == ["test_one", "rolltape-run-to-run", "rolltape-slot", "rolltape-graphs"]
    assert pytest_with(*given[:2], cwd=tmp_path).returncode == 4


def test_the_plugin_is_declared_and_cheap_to_import() -> None:
    assert 'rolltape = "rolltape.replay.pytest_plugin"' in (ROOT / "pyproject.toml").read_text()
    code = (
        "import sys, rolltape.replay.pytest_plugin\n"
        "assert not {'torch', 'numpy', 'pyarrow', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        verify("transformers", "m", prompts=1)
    with pytest.raises(UsageError, match="at least 2"):
        verify("transformers", "m", tokens=1)


# -- vLLM -----------------------------------------------------------------------------------

VLLM = os.environ.get("ROLLTAPE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))


@pytest.mark.vllm
@pytest.mark.skipif(not Path(VLLM).exists(), reason="no vLLM here: `make venv-vllm`")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks of vLLM need two cores")
def test_two_ranks_of_vllm_part_from_one_behind_the_first_sum() -> None:
    done = subprocess.run(
        [VLLM, str(Path(__file__).with_name("vllm_verify_job.py")), str(TINY_MOE), "float32", "tp"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cases = json.loads(done.stdout.splitlines()[-1])["tp"]["cases"]
    (case,) = (case for case in cases if case["case"] == "tp")
    assert case["verdict"] == "failed", case["reason"]
    one, two = (float(case["token"][side]["decimal"]) for side in ("recorded", "found"))
    assert one == pytest.approx(two, abs=1e-3)
    assert (case["site"]["site"], case["site"]["replicas"]) == ("layers.0.attn", None)


@pytest.mark.vllm
@pytest.mark.skipif(not Path(VLLM).exists(), reason="no vLLM here: `make venv-vllm`")
def test_vllm_as_it_is_and_with_a_fault() -> None:
    """One engine: nothing wrong first, then a layer that is off for few rows."""
    done = subprocess.run(
        [VLLM, str(Path(__file__).with_name("vllm_verify_job.py")), str(TINY_MOE), "float32"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    clean = {case["case"]: case for case in found["clean"]["cases"]}
    absent = {name for name, case in clean.items() if case["verdict"] == "not-run"}
    assert absent == {"graphs", "routes"}, clean
    assert {c["verdict"] for name, c in clean.items() if name not in absent} == {"passed"}, clean
    assert found["clean"]["self_test"] == {"control": True}
    lengths = found["clean"]["lengths"]
    for name in ("run-to-run", "batch", "slot", "prefill-decode", "chunked"):
        for comparison in clean[name]["comparisons"]:
            assert comparison["compared"]["raw"] == 6 * len(lengths)
            assert comparison["compared"]["routes.ids"] == 6 * sum(n + 5 for n in lengths)
    # a block has 128 tokens: one of the longest prompt came from the cache and was not computed
    (warm,) = clean["prefix-cache"]["comparisons"]
    assert max(lengths) == 160 and sum(n > 128 for n in lengths) == 1
    assert warm["compared"]["routes.ids"] <= 6 * sum(n + 5 for n in lengths)
    verdicts = {case["case"]: case["verdict"] for case in found["fault"]["cases"]}
    assert verdicts == {
        "run-to-run": "passed", "batch": "failed", "slot": "passed", "prefix-cache": "passed",
    }  # fmt: skip
    batch = next(case for case in found["fault"]["cases"] if case["case"] == "batch")
    assert batch["site"]["site"] == "layers.2.out" and batch["site"]["step"] == 1
    assert batch["repeatable"] is True
    assert batch["token"]["what"] == "raw" and batch["token"]["step"] == 1
