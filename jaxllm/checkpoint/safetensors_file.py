"""One safetensors file: its header parsed and checked, its tensors read and written in blocks.

The format: 8 bytes of length (little-endian), that many bytes of JSON (name -> dtype, shape,
data_offsets), the data. Tensors are read, never mapped: mapped pages count as memory of the
process, so that a mapped file is held beside the parameters made from it. Reading holds one block
beside the tensor, writing one part of a tensor.
Source: https://github.com/huggingface/safetensors, section "Format" (no code taken).
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BLOCK_BYTES = 16 << 20  # small against the 300 MB that loading may take beside the parameters
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_AXES = 8
ALIGNMENT_BYTES = 64  # JAX on the CPU takes an array over without a copy if it starts at a multiple

# What can be read and written.
FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
INTEGERS: dict[str, np.dtype] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in (FLOATS | INTEGERS).items()}
# Every dtype of the format, since a header is checked before anybody asks for a tensor.
BITS = {name: dtype.itemsize * 8 for name, dtype in FLOATS.items()} | {
    "C64": 64, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8,
    "BOOL": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `size_bytes` from `offset` of the file on; `dtype` as the file says."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor to write. `parts` makes its rows, one array after another, when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[np.ndarray]]

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; their data is not read.

    Raises: ValueError if the file is cut short, or its header is no JSON, names an unknown dtype,
    or gives sizes and offsets that disagree with each other or with the file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{file}: not a whole safetensors file: it has {size} bytes and its header would "
                f"take {length} (at most {MAX_HEADER_BYTES}); download or save it again"
            )
        text = stream.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the safetensors header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _entry(file, name, entry, start) for name, entry in header.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size_bytes)):
        if tensor.offset != end:
            what = "overlaps the one before" if tensor.offset < end else "leaves a hole before it"
            raise ValueError(
                f"{file}: the header places {tensor.name!r} at byte {tensor.offset - start} of the "
                f"data, which {what}; download or save it again"
            )
        end += tensor.size_bytes
    if end != size:
        raise ValueError(
            f"{file}: the header describes a file of {end} bytes, but it has {size}; download or "
            "save it again"
        )
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name!r} stands there twice")
        entries[name] = value
    return entries


def _entry(file: Path, name: str, entry: Any, start: int) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"{file}: the header must give {name!r} a dtype, a shape, data_offsets and no more"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(
            f"{file}: {name!r} has the unknown dtype {dtype!r}; known are {', '.join(BITS)}"
        )
    if not _are_sizes(shape) or len(shape) > MAX_AXES:
        raise ValueError(f"{file}: {name!r} has a shape that is not {MAX_AXES} sizes or fewer")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{file}: {name!r} has data_offsets that are not two positions")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if (end - begin) * 8 != bits:
        raise ValueError(
            f"{file}: {name!r} is {dtype} {shape}, which takes {(bits + 7) // 8} bytes, but its "
            f"data_offsets {offsets} hold {end - begin}; download or save it again"
        )
    return Tensor(file, name, dtype, tuple(shape), start + begin, end - begin)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(x) is int and 0 <= x < 2**63 for x in values)


class Memory:
    """Where arrays are read, one in the place of the other: new pages take as long as reading."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array aligned for JAX, in the place of the one before."""
        size = math.prod(shape) * dtype.itemsize
        if len(self._bytes) < size + ALIGNMENT_BYTES:
            self._bytes = np.empty(size + ALIGNMENT_BYTES, np.uint8)
        begin = -self._bytes.ctypes.data % ALIGNMENT_BYTES
        return self._bytes[begin : begin + size].view(dtype).reshape(shape)


def read(
    tensor: Tensor,
    dtype: np.dtype,
    rows: slice = slice(None),
    on_bytes: Callable[[int], None] = lambda count: None,
    memory: Memory | None = None,
) -> np.ndarray:
    """Rows of a tensor of one axis or more, cast to a float dtype, aligned for JAX.

    Integers are read as they are stored: `dtype` must be theirs. Nothing else of the file is read.
    `on_bytes` is called with the bytes read since its last call. With a `memory` the result is
    there, until that is used again; else it has its own.
    Raises: ValueError if the file ends early or a value is too large for `dtype`;
    NotImplementedError if the tensor is not stored in one of `FLOATS`, nor as the integers asked.
    """
    source = FLOATS.get(tensor.dtype)
    if INTEGERS.get(tensor.dtype) == dtype:
        source = dtype
    if source is None:
        raise NotImplementedError(
            f"{tensor.file}: {tensor.name!r} is stored as {tensor.dtype}, which is not supported "
            f"yet; supported are {', '.join(FLOATS)}"
        )
    first, last, _ = rows.indices(tensor.shape[0])
    row_shape = tensor.shape[1:]
    row_bytes = math.prod(row_shape) * source.itemsize
    out = (memory or Memory()).array((last - first, *row_shape), dtype)
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.offset + first * row_bytes)
        if source == dtype:
            data = _bytes(out)
            for begin in range(0, len(data), BLOCK_BYTES):
                _fill(stream, data[begin : begin + BLOCK_BYTES], tensor, on_bytes)
            return out
        block_rows = max(1, BLOCK_BYTES // max(1, row_bytes))
        buffer = np.empty((min(block_rows, len(out)), *row_shape), source)
        for begin in range(0, len(out), block_rows):
            block = buffer[: len(out) - begin]
            _fill(stream, _bytes(block), tensor, on_bytes)
            _cast(block, out[begin : begin + block_rows], tensor)
    return out


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data  # memoryview knows no bfloat16


def _fill(
    stream: io.FileIO, target: memoryview, tensor: Tensor, on_bytes: Callable[[int], None]
) -> None:
    done = 0
    while done < len(target):
        count = stream.readinto(target[done:])
        if not count:
            raise ValueError(
                f"{tensor.file}: the file ends within {tensor.name!r}; download or save it again"
            )
        done += count
    on_bytes(done)


def _cast(source: np.ndarray, target: np.ndarray, tensor: Tensor) -> None:
    if source.dtype.itemsize == 1:
        # By table, which handles 1 GB/s; the cast of ml_dtypes 0.6 handles 0.2 GB/s of fp8.
        table = np.arange(256, dtype=np.uint8).view(source.dtype).astype(target.dtype)
        target[...] = table[source.view(np.uint8)]
        return
    with np.errstate(over="ignore"):
        np.copyto(target, source, casting="unsafe")
    # float32 and bfloat16 end at nearly the same number: only a much lower end is worth a look.
    lower = float(ml_dtypes.finfo(target.dtype).max) < 0.5 * float(
        ml_dtypes.finfo(source.dtype).max
    )
    if lower and np.isinf(target).sum() > np.isinf(source).sum():
        raise ValueError(
            f"{tensor.file}: {tensor.name!r} has values that {target.dtype.name} cannot hold; load "
            "the checkpoint as bfloat16 or float32"
        )


def write(file: Path, sources: Iterable[Source]) -> None:
    """Write tensors to a file, one part in memory at a time, and wait until the disk has it.

    Raises: ValueError if a tensor has a dtype other than those of `FLOATS` and `INTEGERS`.
    """
    # Wide dtypes first, as the safetensors library has it: each tensor is aligned to its items.
    sources = sorted(sources, key=lambda source: -source.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for source in sources:
        if source.dtype not in _NAMES:
            raise ValueError(
                f"{file}: {source.name!r} is {source.dtype.name}, which is not one of "
                + ", ".join(dtype.name for dtype in _NAMES)
            )
        begin, end = end, end + source.size_bytes
        header[source.name] = {
            "dtype": _NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for source in sources:
            before = stream.tell()
            for part in source.parts():
                stream.write(_bytes(np.ascontiguousarray(part, dtype=source.dtype)))
            assert stream.tell() - before == source.size_bytes, source.name
        stream.flush()
        os.fsync(stream.fileno())
