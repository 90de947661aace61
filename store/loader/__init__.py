"""The trainer's dataloader over tapes.

    data = TapeDataset("runs/a", max_tokens=16_384, layout="packed", columns=("logprobs", "routes"),
                       shuffle=True, seed=1)
    for epoch in range(3):
        data.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=None, num_workers=4):
            ...

`Sequences` gives sequences by number, `TapeDataset` batches (`.batches`). What an epoch gives
and to whom is `.sampler`; a tape that is still being written is `.following`.
"""

from rolltape.store.follow import Follower
from rolltape.store.loader.batches import Batch, Sample, SupportRows, collate
from rolltape.store.loader.dataset import Sequences, TapeDataset
from rolltape.store.loader.logprobs import Renormalised, renormalised_logprobs
from rolltape.store.loader.sampler import merge_state_dicts
from rolltape.store.loader.trainers import slime_fields, trl_fields, verl_fields

__all__ = [
    "Batch",
    "Follower",
    "Renormalised",
    "Sample",
    "Sequences",
    "SupportRows",
    "TapeDataset",
    "collate",
    "merge_state_dicts",
    "renormalised_logprobs",
    "slime_fields",
    "trl_fields",
    "verl_fields",
]
