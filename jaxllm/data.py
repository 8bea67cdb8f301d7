"""Examples -> batches: packing, and an order that can be taken up again.

A batch is a dictionary of int32 arrays [B, T], as `jaxllm.train` takes it: `tokens`, `targets`
(-100 is not counted), `positions`, which begin at 0 in each document, and `segment_ids`: 1, 2, ...
for the documents of a row, and 0 for what is left of it. `jaxllm.records`, whose names are here
too as are those of `jaxllm.record_files`, makes the examples.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from jaxllm.integers import integer
from jaxllm.record_files import Record, read_records
from jaxllm.records import (
    IGNORE,
    Encoded,
    Example,
    PreferenceExample,
    check_keys,
    check_vocabulary,
    encode,
    encode_preference,
    encode_preferences,
    encode_records,
)
from pallas_kernels.options import is_number

__all__ = [
    "IGNORE",
    "Encoded",
    "Example",
    "Loader",
    "PreferenceExample",
    "PreferenceLoader",
    "Record",
    "batches",
    "check_keys",
    "check_vocabulary",
    "digest",
    "encode",
    "encode_preference",
    "encode_preferences",
    "encode_records",
    "hold_out",
    "pack",
    "preference_batch",
    "read_records",
    "row_batch",
]

Batch = dict[str, np.ndarray]


def pack(examples: Sequence[Example], length: int) -> list[list[int]]:
    """Rows of `length` tokens, each the indices of the examples in it: best fit, longest first.

    Every example is in one row, whole, where it leaves the least room of all rows it fits into.
    Raises: ValueError if one is longer than a row.
    Source: Ding et al. 2024, arXiv:2404.10830.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # by the room that is left
    rooms: list[int] = []  # the keys of open_rows, ascending
    for i in _by_length(examples, length):
        size = len(examples[i])
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            row, room = len(rows), length
            rows.append([])
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        rows[row].append(i)
        room -= size
        if room:
            if room not in open_rows:
                bisect.insort(rooms, room)
                open_rows[room] = []
            open_rows[room].append(row)
    return rows


def _rows(examples: Sequence[Example], length: int, packed: bool) -> list[list[int]]:
    return pack(examples, length) if packed else [[i] for i in sorted(_by_length(examples, length))]


def _by_length(examples: Sequence[Example], length: int) -> list[int]:
    """The indices of the examples, the longest first."""
    integer("length", length, 1, who="data")
    _check_kind(examples, Example)
    sizes = [len(example) for example in examples]
    for i, size in enumerate(sizes):
        if not 1 <= size <= length:
            raise ValueError(
                f"data: example {i} has {size} tokens, but a row takes from 1 to {length}; "
                "encode_records cuts longer ones"
            )
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])


def _check_kind(examples: Sequence[Any], kind: type) -> None:
    for i, example in enumerate(examples):
        if not isinstance(example, kind):
            raise ValueError(f"data: example {i} is no {kind.__name__}, but {example!r:.60}")


def row_batch(examples: Sequence[Example], rows: Sequence[Sequence[int]], length: int) -> Batch:
    """The arrays [B, T] of rows as `pack` makes them; a row without examples is all padding.

    Raises: ValueError if the examples of a row are longer than it.
    """
    shape = (len(rows), length)
    batch = {key: np.zeros(shape, np.int32) for key in ("tokens", "positions", "segment_ids")}
    batch["targets"] = np.full(shape, IGNORE, np.int32)
    for r, row in enumerate(rows):
        if (size := sum(len(examples[i]) for i in row)) > length:
            raise ValueError(f"data: {size} tokens do not fit into a row of {length}")
        start = 0
        for segment, i in enumerate(row, 1):
            at = (r, slice(start, start + len(examples[i])))
            batch["tokens"][at] = examples[i].tokens
            batch["targets"][at] = examples[i].targets
            batch["positions"][at] = np.arange(len(examples[i]))
            batch["segment_ids"][at] = segment
            start += len(examples[i])
    return batch


def preference_batch(
    pairs: Sequence[PreferenceExample | None],
    length: int,
    reference: np.ndarray | None = None,
) -> Batch:
    """The arrays [2P, T] of P pairs, one answer a row: rows 0 to P-1 hold the chosen ones, rows P
    to 2P-1 the rejected ones. In place of a pair, None is all padding, without a target.

    reference: float32 [P, 2], the log-probabilities of the chosen and rejected answers under the
    reference model; it becomes "reference" float32 [2P], in the order of the rows.
    Raises: ValueError if it has another shape.
    """
    answers = [pair.chosen for pair in pairs if pair] + [pair.rejected for pair in pairs if pair]
    count = iter(range(len(answers)))
    rows = [[next(count)] if pair else [] for _ in range(2) for pair in pairs]
    batch = row_batch(answers, rows, length)
    if reference is not None:
        reference = _checked_reference(reference, len(pairs))
        batch["reference"] = reference.T.reshape(-1)
    return batch


def _checked_reference(reference: Any, pairs: int) -> np.ndarray:
    """float32 [P, 2]. Raises: ValueError for another shape."""
    if np.shape(reference) != (pairs, 2):
        raise ValueError(f"data: reference must have shape {(pairs, 2)}, got {np.shape(reference)}")
    return np.asarray(reference, np.float32)


def batches(examples: Sequence[Example], *, rows: int, length: int) -> list[Batch]:
    """All examples once, in batches of `rows` rows; for `jaxllm.train.make_evaluate`."""
    with Loader(examples, rows=rows, length=length, seed=0, epochs=1) as loader:
        return list(loader)


def hold_out(items: Sequence[Any], *, fraction: float, seed: int = 0) -> tuple[list, list]:
    """Items to train on, and a fraction of them, one at least, to hold out; both in their order.

    Raises: ValueError if fraction is not between 0 and 1, or nothing is left to train on.
    """
    if not is_number(fraction) or not 0 < fraction < 1:
        raise ValueError(
            f"data: the fraction to hold out must be above 0 and below 1, got {fraction!r:.60}"
        )
    seed = integer("seed", seed, 0, who="data")
    count = max(1, round(fraction * len(items)))
    if count >= len(items):
        raise ValueError(
            f"data: too few records to hold out {fraction:g} of them and train on others: "
            f"{len(items)}; add some, or hold out those of another file"
        )
    held = set(_permutation(len(items), seed, 0)[:count].tolist())
    kept = [item for i, item in enumerate(items) if i not in held]
    return kept, [item for i, item in enumerate(items) if i in held]


@functools.lru_cache(maxsize=2)  # every batch of an epoch asks for the same one
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """An order of n things. From raw bits, which NumPy promises to keep from version to version
    (NEP 19), as it does not its own permutation.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(np.asarray(bits), kind="stable")


class _Order:
    """A grain source: the i-th batch of an endless run, made from i alone."""

    def __init__(self, units: int, rows: int, process: int, processes: int, seed: int):
        self.units, self.rows, self.seed = units, rows, seed
        self.process, self.processes = process, processes
        self.per_epoch = -(-units // (rows * processes))

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> list[int]:
        """The units of this process in batch `index`, at most `rows`. The batches of an epoch
        differ by one unit at most over all processes, and no unit is left out.
        """
        epoch, at = divmod(int(index), self.per_epoch)
        begin, end = (self.units * i // self.per_epoch for i in (at, at + 1))
        mine = range(begin + self.process, end, self.processes)
        return _permutation(self.units, self.seed, epoch)[np.asarray(mine, np.int64)].tolist()


class _Batches(Iterator[Batch]):
    """The loaders' common part: grain underneath, and a state that can be taken up again.

    unit: what a batch has `rows` of, for errors.
    """

    def __init__(
        self,
        examples: Sequence[Any],
        units: int,
        *,
        unit: str,
        rows: int,
        length: int,
        seed: int,
        epochs: int | None,
        process_index: int,
        process_count: int,
        prefetch: int,
    ):
        import grain  # slow to import, and of the extra "train"

        if not 0 <= process_index < process_count:
            raise ValueError(
                f"data: process_index must be in [0, {process_count}), got {process_index}"
            )
        rows = integer(unit, rows, 1, who="data")
        length = integer("length", length, 1, who="data")
        seed = integer("seed", seed, 0, who="data")
        prefetch = integer("prefetch", prefetch, 1, who="data")
        epochs = None if epochs is None else integer("epochs", epochs, 1, who="data")
        if not units:
            raise ValueError("data: there are no examples to load")
        self._order = _Order(units, rows, process_index, process_count, seed)
        self.batches_per_epoch = self._order.per_epoch
        self.epochs = epochs
        self._rows, self._length = rows, length
        self._settings = {
            "examples": len(examples),
            "data": digest(examples),
            "rows": rows * process_count,
            "length": length,
            "seed": seed,
        }
        dataset = (
            grain.MapDataset.source(self._order)
            .map(self._make)
            .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch))
        )
        self._iterator = iter(dataset)

    def _make(self, units: list[int]) -> Batch:
        raise NotImplementedError

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self.epochs is not None and self.position >= self.epochs * self.batches_per_epoch:
            raise StopIteration
        return next(self._iterator)

    @property
    def position(self) -> int:
        """How many batches have been handed out, over all epochs."""
        return int(self._iterator.get_state()["next_index"])

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on with the next batch; plain JSON values."""
        return {"position": self.position, **self._settings}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where the loader was that gave this state; bit for bit the same batches follow.

        Raises: ValueError if its data, its rows over all processes, its length or seed differ, if
        one of the two packs and the other does not, or has a reference and the other has none.
        """
        for key, mine in self._settings.items():
            if state.get(key) != mine:
                had = "other data" if key == "data" else f"{key}={state.get(key)}, not {mine}"
                raise ValueError(f"data: the run to resume had {had}; it can only go on as it was")
        self._iterator.set_state({"next_index": int(state["position"])})

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def digest(examples: Iterable[Example | PreferenceExample]) -> str:
    """16 hexadecimal digits that change with any token or target, and with the examples' order.

    Of what is trained on, for a run must resume with it; and of what is measured, for a loss must
    not be compared with that of other records.
    """
    found = hashlib.sha256()
    for example in examples:
        sides = (example,) if isinstance(example, Example) else (example.chosen, example.rejected)
        for side in sides:
            found.update(len(side).to_bytes(8, "little"))
            found.update(side.tokens.tobytes())
            found.update(side.targets.tobytes())
    return found.hexdigest()[:16]


class Loader(_Batches):
    """Batches of `rows` rows of `length` tokens a process, epoch after epoch, in an order that the
    seed decides.

    Every example is in one batch of every epoch. Rows are packed once (`pack=False`: one example a
    row); an epoch draws their order anew and spreads them evenly over its batches, so that a batch
    may hold rows of padding. Endless if `epochs` is None. All processes together see what one
    process with all their rows would see. `prefetch` batches, one at least, are made ahead, in a
    thread.
    Raises: ValueError for examples longer than a row and numbers out of range.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        rows: int,
        length: int,
        seed: int,
        epochs: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        pack: bool = True,
        prefetch: int = 4,
    ):
        self._examples = examples
        self._packed = _rows(examples, length, pack)
        super().__init__(
            examples,
            len(self._packed),
            unit="rows",
            rows=rows,
            length=length,
            seed=seed,
            epochs=epochs,
            process_index=process_index,
            process_count=process_count,
            prefetch=prefetch,
        )
        self._settings["pack"] = pack

    def _make(self, units: list[int]) -> Batch:
        rows = [self._packed[unit] for unit in units]
        rows += [[]] * (self._rows - len(rows))
        return row_batch(self._examples, rows, self._length)


class PreferenceLoader(_Batches):
    """Batches of `pairs` preference pairs a process, as `preference_batch` lays them out.

    reference: float32 [N, 2] for all N examples, or None; a loader that is to go on takes the same.
    Order, epochs and the rest as in `Loader`.
    """

    def __init__(
        self,
        examples: Sequence[PreferenceExample],
        *,
        pairs: int,
        length: int,
        seed: int,
        epochs: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        reference: np.ndarray | None = None,
        prefetch: int = 4,
    ):
        self._reference = (
            None if reference is None else _checked_reference(reference, len(examples))
        )
        _check_kind(examples, PreferenceExample)
        _by_length([side for pair in examples for side in (pair.chosen, pair.rejected)], length)
        self._examples = examples
        super().__init__(
            examples,
            len(examples),
            unit="pairs",
            rows=pairs,
            length=length,
            seed=seed,
            epochs=epochs,
            process_index=process_index,
            process_count=process_count,
            prefetch=prefetch,
        )
        # Not its numbers, of which a model on another card may give others in the last bits
        self._settings["reference"] = self._reference is not None

    def _make(self, units: list[int]) -> Batch:
        empty = self._rows - len(units)
        pairs = [*(self._examples[unit] for unit in units), *[None] * empty]
        reference = None
        if self._reference is not None:
            reference = np.zeros((self._rows, 2), np.float32)
            reference[: len(units)] = self._reference[units]
        return preference_batch(pairs, self._length, reference)
