"""What is to be measured of the tokens that one step drew, and where it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rolltape.recorder.serving.batch import Table
from rolltape.recorder.serving.device import RouteBuffer
from rolltape.recorder.serving.distribution import measure, most_listed, pack, table_layout
from rolltape.recorder.serving.steady import write_table


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One token a row.

    Args:
        token: integers [rows] or [rows, 1].
        raw: [rows, V] logits as the model gave them.
        cut: [rows, V] logits after truncation; None if nothing was cut.
        scale: float32 [rows] what logits are divided by; None if all are 1.
        own: float32 [rows] logprobs that the engine computed itself, or None.
        kind: which column they are: `raw` or `processed`.
        top_k: most ids that truncation keeps in any row; 0 if that is not bounded.
    """

    token: torch.Tensor
    raw: torch.Tensor
    cut: torch.Tensor | None
    scale: torch.Tensor | None
    own: torch.Tensor | None
    kind: str | None
    top_k: int

    @property
    def listed(self) -> bool:
        """Whether its kept sets travel in its table: as lists, or there are none."""
        return self.cut is None or bool(self.most)

    @property
    def most(self) -> int:
        """Ids of the list of a kept set; 0 for none."""
        return 0 if self.cut is None else most_listed(self.top_k)

    @property
    def wanted(self) -> torch.Tensor | None:
        """The logits of the model, unless the engine says all that follows from them."""
        said = self.own is not None and self.kind == "raw" and self.scale is None
        return None if said else self.raw

    def shape(self, routes: tuple[int, int] | None = None) -> dict[str, Any]:
        """Arguments of `table_layout`; steps with the same ones have tables of one layout."""
        raw = self.wanted is not None
        return {
            "most": self.most, "raw": raw, "scaled": raw and self.scale is not None,
            "masked": self.cut is not None, "own": self.kind if self.own is not None else None,
            "routes": routes,
        }  # fmt: skip

    def write(
        self,
        kernel: Any,
        out: torch.Tensor,
        layout: Mapping[str, tuple[int, str, tuple[int, ...]]],
        buffer: RouteBuffer | None,
    ) -> None:
        """Measure into a table.

        Args:
            kernel: `distribution.device_measure` of the device; None for plain torch.
            out: int32 words of the table.
            layout: of the table.
            buffer: whose first rows are the routes of the tokens that were run, one a row; they
                are moved to the table. None if there are none, or not one a row.
        """
        if kernel is None:
            values = self.values()
            if buffer is not None:
                values["routes"] = buffer.take(len(self.token))
            write_table(out, layout, values)
            return
        kernel(
            out=out, token=self.token, raw=self.wanted, masked=self.cut, temperature=self.scale,
            own=self.own, most=self.most, routes=None if buffer is None else buffer.ids,
        )  # fmt: skip

    def table(self, kernel: Any) -> Table:
        """Measured into a table of its own."""
        words, layout = table_layout(len(self.token), **self.shape())
        out = torch.empty(words, dtype=torch.int32, device=self.raw.device)
        self.write(kernel, out, layout, None)
        return Table(data=out, layout=layout)

    def values(self) -> dict[str, torch.Tensor]:
        """Measured in plain torch, by name."""
        found = measure(
            token=self.token, raw=self.wanted, masked=self.cut, temperature=self.scale,
            top_k=self.top_k,
        )  # fmt: skip
        found["token"] = self.token
        if self.own is not None and self.kind is not None:
            found[self.kind] = self.own
        return found

    def bitmap(self) -> dict[str, torch.Tensor]:
        """Kept sets that no list holds."""
        return {} if self.listed or self.cut is None else {"bitmap": pack(self.cut)}
