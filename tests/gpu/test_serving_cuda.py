"""The device side of recording a serving engine: kernels, graph-safe buffers, copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from rolltape.recorder.serving.device import Outlet, RouteBuffer  # noqa: E402
from rolltape.recorder.serving.distribution import _plain, measure, pack  # noqa: E402

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
    got = measure(token=token, raw=raw, masked=masked, temperature=temperature, top_k=50)
    want = _plain(token.long(), raw, masked, temperature, got["kept"].shape[1])
    for name in ("raw", "scaled", "processed"):
        torch.testing.assert_close(got[name], want[name], atol=2e-5, rtol=0)
    assert got["kept_n"].equal(want["kept_n"])
    for row, n in enumerate(got["kept_n"].tolist()):
        if n <= got["kept"].shape[1]:
            assert got["kept"][row, :n].equal(want["kept"][row, :n])


def test_large_sets_travel_as_bitmaps() -> None:
    logits = torch.randn(5, 1003, device="cuda")
    logits[logits < 0] = -torch.inf
    token = logits.argmax(-1)
    got = measure(token=token, raw=None, masked=logits, temperature=None, top_k=0)
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
        sent.append((outlet.send({"routes": buffer.take(20)}), want))
        assert step < 20
    for (host, ready), want in sent:
        ready.synchronize()
        assert host["routes"].equal(want.cpu())
    assert (buffer.ids[:20] == -1).all()
