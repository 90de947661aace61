"""`--on package.module:factory`: a model of the user's own, also one that is sharded over ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import rolltape
from rolltape import store
from rolltape.replay import diff_tapes
from rolltape.replay.factory import load_factory
from rolltape.replay.models import dtype_of, model_of
from rolltape.replay.ranks import current
from rolltape.replay.score import replay, score_tape
from rolltape.replay.switches import Switches
from rolltape.store import UsageError
from rolltape.store.errors import RolltapeError
from rolltape.store.fsck import fsck
from tests.integration.conftest import ROOT, TINY_MOE

pytestmark = pytest.mark.engine


def load(dtype: torch.dtype = torch.float32) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=dtype).eval()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six sampled sequences of the bundled model in float32, with routes."""
    return record(tmp_path_factory.mktemp("factory") / "a", load())


def record(root: Path, model: Any) -> Path:
    prompts = torch.arange(5, 65).reshape(6, 10)
    torch.manual_seed(0)
    with rolltape.record(root):
        for half in prompts.split(3):
            model.generate(half, do_sample=True, max_new_tokens=12, pad_token_id=0)
    return root


def whole_digest(path: Path) -> set[int]:
    return {row["digest"] for row in store.open(path).rows("weights") if row["group"] == ""}


def test_the_fsdp_example_on_two_ranks_scores_as_the_model_in_one_process(
    tape: Path, tmp_path: Path
) -> None:
    options = ["--switch", "routing=ids", "--tokens-per-batch", "50", "--layers", "2"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "rolltape", "replay", str(tape)),
            *("-o", str(tmp_path / "sharded"), "--on", "fsdp_factory:factory", *options),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "examples", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sequences scored") == 1, done.stdout
    with one_thread():
        replay(tape, tmp_path / "one", switches=["routing=ids"], tokens_per_batch=50, layers=2)

    found = diff_tapes(store.open(tmp_path / "one"), store.open(tmp_path / "sharded"), layers=True)
    assert found["verdict"] == "identical"
    assert found["compared"]["sequences"] == 6
    assert found["compared"]["logprobs"] == 72
    assert found["compared"]["routes"] > 500 and found["compared"]["activations"] > 100
    # the shards of both ranks add up to what the engine ran
    assert whole_digest(tmp_path / "sharded") == whole_digest(tape)
    sharded = store.open(tmp_path / "sharded")
    assert not sharded.problems and fsck(tmp_path / "sharded").findings == ()
    assert sharded.header["provenance"]["on"] == "fsdp_factory:factory"
    assert [row["ranks"] for row in sharded.engines.values()] == [{"world": [0, 2]}]
    assert len(list(sharded.rows("steps"))) >= 3


# -- one process --------------------------------------------------------------------------

MODULE = """
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rolltape.replay.models import model_of

CONSTANT = 3


def good(tape, *, device, dtype):
    return AutoModelForCausalLM.from_pretrained(model_of(tape), dtype=dtype).to(device)


def path(tape, *, device, dtype):
    return model_of(tape)


def no_config(tape, *, device, dtype):
    return nn.Linear(2, 2)


def on_meta(tape, *, device, dtype):
    return good(tape, device="meta", dtype=dtype)


def other_arguments(tape):
    return None


def other_dtype(tape, *, device, dtype):
    return good(tape, device=device, dtype=torch.bfloat16)


def changed(model, change):
    own = model.forward
    model.forward = lambda **inputs: change(own(**inputs))
    return model


def tuples(tape, *, device, dtype):
    return changed(good(tape, device=device, dtype=dtype), lambda out: (out.logits,))


def narrow(tape, *, device, dtype):
    def half(out):
        out.logits = out.logits[..., :2048]
        return out

    return changed(good(tape, device=device, dtype=dtype), half)


def positional(tape, *, device, dtype):
    model = good(tape, device=device, dtype=dtype)
    model.forward = lambda ids: None
    return model
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with factories."""
    (tmp_path / "own_factories.py").write_text(MODULE)
    (tmp_path / "broken_factory.py").write_text("import not_there_either\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_factories", raising=False)
    return "own_factories"


def test_a_factory_in_one_process_scores_as_the_built_in_executor(
    tape: Path, tmp_path: Path, module: str
) -> None:
    summary = replay(tape, tmp_path / "b", on=f"{module}:good", switches=["dtype=bfloat16"])
    assert (summary["on"], summary["rank"], summary["ranks"]) == (f"{module}:good", 0, 1)
    replay(tape, tmp_path / "c", switches=["dtype=bfloat16"])
    found = diff_tapes(store.open(tmp_path / "b"), store.open(tmp_path / "c"))
    assert found["verdict"] == "identical" and found["compared"]["logprobs"] == 72


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere_at_all:factory", "no module nowhere_at_all (run it where"),
        ("nowhere.at.all:factory", "no module nowhere (run it where"),
        ("broken_factory:factory", "broken_factory needs not_there_either"),
        ("own_factories:", "not package.module:factory"),
        ("own_factories:missing", "has no missing (factory(tape, *, device, dtype)"),
        ("own_factories:CONSTANT", "CONSTANT is a int (factory("),
        ("own_factories:other_arguments", "unexpected keyword argument 'device' (factory("),
        ("own_factories:path", "it returned a str, not a torch module"),
        ("own_factories:no_config", "its Linear has no transformers config (return the model"),
        ("own_factories:on_meta", "is on the meta device (load the weights"),
        ("own_factories:tuples", "the model returned a tuple without .logits"),
        ("own_factories:narrow", "2048], expected ["),
        ("own_factories:positional", "the model does not take input_ids, use_cache, attention_"),
        ("own_factories:other_dtype", "dtype: "),
    ],
)
def test_what_is_not_a_factory_is_said_in_one_line_and_nothing_is_written(
    tape: Path, tmp_path: Path, module: str, name: str, says: str
) -> None:
    with pytest.raises(RolltapeError) as raised:
        replay(tape, tmp_path / "b", on=name)
    assert says in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "b").exists()


def test_errors_of_the_factory_itself_are_not_hidden(
    tape: Path, tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = load_factory(f"{module}:good")

    def fails(tape: Any, *, device: Any, dtype: Any) -> Any:
        raise ZeroDivisionError("of the trainer")

    monkeypatch.setattr(sys.modules[factory.__module__], "good", fails)
    with pytest.raises(ZeroDivisionError, match="of the trainer"):
        replay(tape, tmp_path / "b", on=f"{module}:good")


def test_ranks_that_do_not_know_of_each_other_do_not_write(
    tape: Path, tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 2.*init_process_group"):
        replay(tape, tmp_path / "b", on=f"{module}:good")


def test_a_factory_chooses_its_model_itself(tape: Path, tmp_path: Path, module: str) -> None:
    with pytest.raises(UsageError, match="the factory chooses the model"):
        replay(tape, tmp_path / "b", on=f"{module}:good", model=str(TINY_MOE))


def test_what_a_factory_needs_to_know_of_a_tape(tape: Path) -> None:
    assert model_of(store.open(tape)) == str(TINY_MOE)
    assert dtype_of(store.open(tape)) == torch.float32


# -- ranks that disagree ------------------------------------------------------------------


def _rank(rank: int, port: int, tape: Path, tape16: Path, out: Path, queue: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ranks, found = current(), {}

    def attempt(name: str, model: Any, **options: Any) -> None:
        try:
            found[name] = score_tape(tape, out / name, model, ranks=ranks, **options)["warnings"]
        except RolltapeError as error:
            found[name] = str(error)

    def shift(_module: Any, _args: Any, output: Any) -> None:
        output.logits.mul_(1 + rank * 2**-10)

    try:
        model = load()
        attempt("batches", model, tokens_per_batch=100 + rank)
        attempt("same", model)
        hook = model.register_forward_hook(shift)
        attempt("values", model)
        hook.remove()
        with torch.no_grad():
            model.model.norm.weight[0] += rank
        attempt("weights", model)
        model = load()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        for name in ("dtype", "lm_head", "router"):
            attempt(name, model, switches=Switches(**{name: "float32"}))
        attempt("attention", model, switches=Switches(attention="eager"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        masters = load()
        for layer in masters.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(masters, mp_policy=policy)
        found["mixed"] = score_tape(
            tape16, out / "mixed", masters, ranks=ranks, switches=Switches(routing="ids")
        )["warnings"]
        queue.put((rank, found))
        dist.barrier()
    except Exception as error:
        queue.put((rank, repr(error)))
        raise
    finally:
        dist.destroy_process_group()


def test_ranks_that_disagree_and_masters_in_float32(tape: Path, tmp_path: Path) -> None:
    tape16 = record(tmp_path / "a16", load(torch.bfloat16))
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(r, port, tape, tape16, tmp_path, queue))
        for r in range(2)
    ]
    for process in ranks:
        process.start()
    by_rank = dict(queue.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    first, second = by_rank[0], by_rank[1]
    for name, says in (
        ("batches", "tokens_per_batch is 100 on rank 0, but 101 on rank 1 (start every rank"),
        ("weights", "the weights of group norm are others on rank 1 than on rank 0"),
        ("dtype", "switch dtype=float32: the weights of FSDPQwen3MoeForCausalLM are sharded"),
        ("lm_head", "switch lm_head=float32: the weights of FSDP"),
        ("router", "switch router=float32: the weights of FSDP"),
    ):
        assert says in first[name] and first[name] == second[name]
        assert not (tmp_path / name).exists()
    assert first["same"] == second["same"] == []
    (warning,) = first["values"]
    assert "rank 1 computed other values than rank 0 for 6 of 6 sequences" in warning
    assert first["attention"] == second["attention"] == []
    assert store.open(tmp_path / "attention").problems == []

    # mixed precision computes what a model in bfloat16 computes, and its digest is that model's
    assert first["mixed"] == second["mixed"] == []
    with one_thread():
        replay(tape16, tmp_path / "plain", switches=["routing=ids"])
    mixed = store.open(tmp_path / "mixed")
    compared = diff_tapes(store.open(tmp_path / "plain"), mixed)
    assert compared["verdict"] == "identical" and compared["compared"]["logprobs"] == 72
    assert whole_digest(tmp_path / "mixed") == whole_digest(tape16) != whole_digest(tape)
    assert [row["dtype"] for row in mixed.engines.values()] == ["bfloat16"]
