"""The device side of recording a serving engine: kernels, graph-safe buffers, copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from rolltape.recorder.serving.batch import Table  # noqa: E402
from rolltape.recorder.serving.device import Outlet, RouteBuffer  # noqa: E402
from rolltape.recorder.serving.distribution import (  # noqa: E402
    device_measure,
    measure,
    most_listed,
    pack,
    table_layout,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("vocab", [1000, 8192, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_pass_says_what_torch_says(vocab: int, dtype: Any) -> None:
    torch.manual_seed(vocab)
    raw = (torch.randn(37, vocab, device="cuda") * 4).to(dtype)
    temperature = torch.rand(37, device="cuda") + 0.5
    scaled = raw.float() / temperature[:, None]
    bound = scaled.topk(50).values[:, -1:]
    masked = scaled.masked_fill(scaled < bound, -torch.inf)
    masked[3] = scaled[3]  # a row that nothing was cut from
    token = masked.softmax(-1).multinomial(1).to(torch.int32)
    own = torch.randn(37, 2, device="cuda")[:, 0]
    kernel, outlet, shown = device_measure(token.device), Outlet(token.device), (24, 8)
    for scale in (temperature, None):
        cases = (None, raw, masked), ("raw", None, masked), ("processed", raw, None)
        for kind, logits, cut in cases:
            most = most_listed(50) if cut is not None else 0
            words, layout = table_layout(
                37, most=most, raw=logits is not None, masked=cut is not None, own=kind,
                scaled=logits is not None and scale is not None, routes=shown if kind else None,
            )  # fmt: skip
            out = torch.empty(words, dtype=torch.int32, device="cuda")
            routes = torch.randint(0, 128, (50, *shown), device="cuda").to(torch.int16)
            left = routes.clone()
            kernel(
                out=out, token=token, raw=logits, masked=cut, temperature=scale,
                own=own if kind else None, most=most, routes=left if kind else None,
            )  # fmt: skip
            host = outlet.copy(out)
            done, held = outlet.done()
            done.synchronize()
            assert held >= host.nbytes
            got = Table(data=host, layout=layout).arrays()
            want = measure(token=token, raw=logits, masked=cut, temperature=scale, top_k=50)
            if kind:
                want |= {kind: own, "routes": routes[:37]}
                assert (left[:37] == -1).all() and left[37:].equal(routes[37:])
                assert (got["routes"] == routes[:37].cpu().numpy()).all()
            assert got["token"].tolist() == token.tolist()
            for name in ("raw", "scaled", "processed"):
                assert (name in got) == (name in want)
                if name in want:
                    there = torch.from_numpy(got[name].copy())
                    torch.testing.assert_close(there, want[name].cpu(), atol=2e-5, rtol=0)
            if cut is None:
                assert "kept" not in got
                continue
            assert (got["kept_n"] == want["kept_n"].cpu().numpy()).all()
            for row, n in enumerate(got["kept_n"].tolist()):
                if n <= got["kept"].shape[1]:
                    assert (got["kept"][row, :n] == want["kept"][row, :n].cpu().numpy()).all()


def test_a_row_is_measured_the_same_whatever_the_others_are() -> None:
    raw = torch.randn(64, 151_936, device="cuda") * 4
    token = raw.argmax(-1)
    kernel = device_measure(raw.device)
    how = {"masked": None, "temperature": None, "own": None, "most": 0}

    def first_column(rows: slice) -> Any:
        out = torch.empty(6 * len(token[rows]), dtype=torch.int32, device="cuda")
        kernel(out=out, token=token[rows], raw=raw[rows], **how)
        return out.cpu()[: len(token[rows])]

    whole = first_column(slice(None))
    for row in (0, 5, 63):
        assert int(first_column(slice(row, row + 1))[0]) == int(whole[row])


def test_large_sets_travel_as_bitmaps() -> None:
    logits = torch.randn(5, 1003, device="cuda")
    logits[logits < 0] = -torch.inf
    token = logits.argmax(-1)
    got = measure(token=token, raw=None, masked=logits, temperature=None, top_k=0)
    assert "kept" not in got
    bits = np.unpackbits(got["bitmap"].cpu().numpy(), axis=1, bitorder="little", count=1003)
    assert (bits.astype(bool) == (logits > -torch.inf).cpu().numpy()).all()
    assert got["bitmap"].equal(pack(logits))


def test_a_graph_goes_on_writing_into_the_buffer() -> None:
    buffer = RouteBuffer(64, 2, 4, torch.device("cuda"))
    write = [buffer.hook(layer) for layer in (0, 1)]
    source = torch.zeros((2, 32, 4), dtype=torch.int32, device="cuda")

    def forward() -> None:
        for layer in (0, 1):
            write[layer](source[layer])

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    outlet = Outlet(torch.device("cuda"))
    sent = []
    for step in range(20):
        source.copy_(torch.randint(0, 128, source.shape, device="cuda"))
        graph.replay()
        want = source[:, :20].transpose(0, 1).to(torch.int16).clone()
        host = buffer.leave(20, outlet) if step % 2 else outlet.copy(buffer.take(20))
        sent.append((host, outlet.done()[0], want))
        assert step < 20
    for host, ready, want in sent:
        ready.synchronize()
        assert host.equal(want.cpu())
    assert (buffer.ids[:20] == -1).all()
