"""Row errors on the device where the tensors are: what `site_errors` does, for a live diff."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rolltape.replay.site_errors import SpanError
from rolltape.store.columns import Masked

#: Values of one pass: what fits into a cache of a CPU, and on a device so many that wide logits do
#: not need several times their own memory.
_CPU_CHUNK, _CHUNK = 1 << 17, 1 << 24
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_COARSE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class TorchErrors:
    """Errors of n rows; tensors [n] on the device, the fields those of `SpanError`.

    `squares` is float64 [n, 3]: |b - a|^2, |a|^2 and |b|^2; `dot` is float64 [n].
    """

    max_abs: torch.Tensor
    column: torch.Tensor
    squares: torch.Tensor
    dot: torch.Tensor
    equal: torch.Tensor
    ulp: torch.Tensor
    non_finite: torch.Tensor

    def span(self, sequence: str, site: str, start: int, rows: slice) -> SpanError:
        """The errors of one sequence, on the host."""
        squares = _host(self.squares[rows])
        distance, norm_a, norm_b = np.sqrt(squares).T
        with np.errstate(invalid="ignore", over="ignore"):
            some, both = norm_a != 0, (norm_a != 0) & (norm_b != 0)
            rel = np.divide(distance, norm_a, out=np.zeros_like(distance), where=some)
            dot = _host(self.dot[rows])
            cosine = np.divide(dot, norm_a * norm_b, out=np.zeros_like(dot), where=both)
        return SpanError(
            sequence=sequence,
            site=site,
            start=start,
            max_abs=_host(self.max_abs[rows]),
            rel_l2=Masked(rel.astype(np.float32), some),
            cosine=Masked(np.clip(cosine, -1, 1).astype(np.float32), both),
            equal=_host(self.equal[rows]),
            column=_host(self.column[rows]).astype(np.int32),
            ulp=_host(self.ulp[rows]),
            non_finite=_host(self.non_finite[rows]).astype(np.int32),
        )


def row_errors_of(a: torch.Tensor, b: torch.Tensor) -> TorchErrors:
    """Errors of rows [n, width]; nothing of it waits for the device.

    Values are subtracted in float32 (float64 for float64) and summed up in float64. Bits are those
    of float32 where the dtypes differ, units in the last place those of the coarser dtype.
    """
    size = _CPU_CHUNK if a.device.type == "cpu" else _CHUNK
    step = max(1, size // max(1, a.shape[1]))
    parts = [
        _chunk(a[i : i + step].detach(), b[i : i + step].detach())
        for i in range(0, max(1, len(a)), step)
    ]
    if len(parts) == 1:
        return parts[0]
    names = TorchErrors.__dataclass_fields__
    return TorchErrors(**{name: torch.cat([getattr(p, name) for p in parts]) for name in names})


def _chunk(a: torch.Tensor, b: torch.Tensor) -> TorchErrors:
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    x, y = a.to(wide), b.to(wide)
    difference = y - x
    size = difference.abs()
    largest = size.amax(1)
    bits = (a, b) if a.dtype == b.dtype else (x, y)
    return TorchErrors(
        max_abs=largest.float(),
        column=_argmax(size),
        squares=torch.stack([_squared(v) for v in (difference, x, y)], 1),
        dot=_summed(x * y),
        equal=_equal(*bits),
        ulp=_ulp(a, b),
        non_finite=_non_finite(difference, largest),
    )


def _argmax(rows: torch.Tensor) -> torch.Tensor:
    if rows.device.type != "cpu":
        return rows.argmax(1)
    # torch's own takes several times as long: it does not use the vector unit
    return torch.from_numpy(rows.numpy().argmax(1))


def _non_finite(difference: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    if largest.device.type == "cpu" and bool(largest.isfinite().all()):
        return torch.zeros(len(largest), dtype=torch.int64)
    # of a finite number 0 times is 0, of all others NaN
    return torch.count_nonzero(difference.mul_(0), dim=1)


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    changed = _bits(a) ^ _bits(b)
    return (changed.amin(1) == 0) & (changed.amax(1) == 0)


def _squared(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square()


def _summed(rows: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = rows.sum(1, dtype=torch.float64)
    return total


def _bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(_BITS[rows.element_size()])


def _ulp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    grid = a.dtype if _COARSE.index(a.dtype) < _COARSE.index(b.dtype) else b.dtype
    grid = torch.float32 if grid == torch.float64 else grid
    first, second = (_ordered(rows.to(grid)) for rows in (a, b))
    # below 2^32: in int32 the distance wraps around, and is right as an unsigned number
    distance = torch.maximum(first, second).sub_(torch.minimum(first, second))
    flipped = (distance ^ _LOWEST).amax(1) ^ _LOWEST
    return flipped.to(torch.int64) & 0xFFFFFFFF


_LOWEST = torch.iinfo(torch.int32).min


def _ordered(rows: torch.Tensor) -> torch.Tensor:
    """int32 that count up with the values; 0.0 and -0.0 are both 0."""
    bits = _bits(rows)
    sign = bits >> (8 * bits.element_size() - 1)  # 0, or -1
    return ((bits ^ (sign & torch.iinfo(bits.dtype).max)) - sign).to(torch.int32)


def _host(values: torch.Tensor) -> np.ndarray:
    array: np.ndarray = values.cpu().numpy()
    return array
