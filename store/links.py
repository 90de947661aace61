"""Addresses of the viewer's pages, from ids that never change: for notebooks, issues and logs."""

from __future__ import annotations

from urllib.parse import quote

from rolltape.store.errors import UsageError

#: Where `rolltape view --port 8000` listens.
BASE = "http://127.0.0.1:8000"
_PLAIN = "!*'():"  # what the page leaves as it is, besides letters, digits and _ . - ~


def viewer_url(
    run: str,
    *,
    seq: str | None = None,
    tok: int | None = None,
    layer: int | None = None,
    base: str = BASE,
) -> str:
    """The address of a run, a sequence, one of its tokens, or a token in a layer.

    Args:
        run: uuid of the tape.
        seq: id of the sequence.
        tok: position over prompt + response.
        layer: number of the layer; the page is then that of the layers.
        base: address of the viewer, with its prefix if it has one.

    Raises:
        UsageError: a token or layer without a sequence, or a negative one.
    """
    if seq is None and (tok is not None or layer is not None):
        raise UsageError("a token or layer needs a sequence", hint="url(seq=...)")
    for name, value in (("tok", tok), ("layer", layer)):
        if value is not None and value < 0:
            raise UsageError(f"{name}={value} is negative", hint="positions are 0-based")
    path = f"#/run/{quote(run, safe=_PLAIN)}"
    if seq is not None:
        path += f"/seq/{quote(seq, safe=_PLAIN)}" + ("/layers" if layer is not None else "")
    params = [f"{k}={v}" for k, v in (("tok", tok), ("layer", layer)) if v is not None]
    return f"{base.rstrip('/')}/{path}" + (f"?{'&'.join(params)}" if params else "")
