"""From file to device and back: which rows are read for a parameter, and where they go."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from rich.filesize import decimal

from jaxllm import memory
from jaxllm.checkpoint.safetensors_file import BITS, Memory, Tensor, read
from jaxllm.meshes import mesh_problem

# Tensors on their way from the file at a time. To an H200 (16 GB in the host's page cache, memory
# used again): 4 bring 8.8 GB/s, 8 bring 15.1, 16 bring 18.7.
READERS = 8
PACKED_READERS = 4  # modules; the host has each of them twice while its codes are put in order
# At a time of a tensor, on the way to a device that is not the CPU. JAX copies it through pinned
# memory, as much as is under way at once, which the system gives at about 1 GB/s.
STAGED_BYTES = 2**27
Shape = tuple[int, ...]
X = TypeVar("X")
Y = TypeVar("Y")
Bounds = tuple[tuple[int, int], ...]  # begin and end, an axis each


def check_sharding(path: str, shape: Shape, sharding: Sharding | None) -> None:
    """Raises: ValueError if it is no sharding, or none that such an array of a model can have."""
    if sharding is None:
        return
    if not isinstance(sharding, Sharding):
        raise ValueError(
            f"load: the sharding of {path} must be a jax.sharding.Sharding, got "
            f"{type(sharding).__name__} {sharding!s:.60}"
        )
    if problem := mesh_problem(sharding):
        raise ValueError(f"{path} cannot be spread as {sharding}: {problem}")
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:
        why = "the sharding has more axes" if isinstance(error, IndexError) else error
        raise ValueError(f"{path} of shape {shape} cannot be spread as {sharding}: {why}") from None


def default_device() -> Any:
    """Where an array goes that nothing says more of, under `jax.set_mesh` too."""
    (device,) = jax.device_put(np.zeros(())).devices()
    return device


@dataclasses.dataclass(frozen=True)
class Placement:
    """A parameter: rows of a stored tensor from `first` on, to be put where `sharding` says.

    Without a sharding it goes to the default device, and stays free to follow other arrays.
    """

    path: str
    shape: Shape
    dtype: np.dtype
    tensor: Tensor
    first: int
    sharding: Sharding | None

    def __post_init__(self) -> None:
        check_sharding(self.path, self.shape, self.sharding)

    def shards(self) -> dict[Any, Bounds]:
        """What each device of this process gets."""
        if self.sharding is None:
            device = default_device()
            return {device: tuple((0, size) for size in self.shape)}
        return {
            device: tuple(s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True))
            for device, index in self.sharding.addressable_devices_indices_map(self.shape).items()
            if index is not None
        }

    def read_bytes(self) -> int:
        """Bytes that `load` reads from the file."""
        row_bits = math.prod(self.shape[1:]) * BITS[self.tensor.dtype]
        ranges = {bounds[0] for bounds in self.shards().values()}
        return sum(end - begin for begin, end in ranges) * row_bits // 8

    def load(self, on_bytes: Callable[[int], None], memory: Memory) -> jax.Array:
        """The parameter. In the host's memory it is what was read from the file; on its way to a
        GPU's its pieces are in `memory`, one after the other.
        """
        shards = self.shards()
        kind = None if self.sharding is None else self.sharding.memory_kind
        staged = kind in (None, "device") and _staged(shards)
        arrays: dict[Any, jax.Array] = {}
        for begin, end in sorted({bounds[0] for bounds in shards.values()}):
            for piece in self._pieces(begin, end) if staged else [(begin, end)]:
                rows = slice(*(self.first + row for row in piece))
                whole = read(self.tensor, self.dtype, rows, on_bytes, memory if staged else None)
                for device, (row_bounds, *others) in shards.items():
                    if row_bounds != (begin, end):
                        continue
                    where = self._where(device)
                    part = np.ascontiguousarray(whole[:, *(slice(*bounds) for bounds in others)])
                    part = jax.device_put(part, where)
                    if piece != (begin, end):
                        if piece[0] == begin:
                            shape = (end - begin, *part.shape[1:])
                            with jax.transfer_guard("allow"):  # of the zero
                                arrays[device] = jnp.zeros(shape, part.dtype, device=where)
                        at = jax.device_put(np.int32(piece[0] - begin), where)
                        part = _write_rows(arrays[device], part, at)
                    arrays[device] = part
                # Before the next rows are read: a copy under way holds the host's memory.
                jax.block_until_ready(list(arrays.values()))
        if self.sharding is None:
            return next(iter(arrays.values()))
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, [arrays[device] for device in shards]
        )

    def _where(self, device: Any) -> Sharding | None:
        if self.sharding is None:
            return None
        return SingleDeviceSharding(device, memory_kind=self.sharding.memory_kind)

    def _pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The rows that are read at a time."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        number = max(1, -(-(end - begin) * row_bytes // STAGED_BYTES))
        step = max(1, -(-(end - begin) // number))
        return [(i, min(i + step, end)) for i in range(begin, end, step)] or [(begin, end)]


def _staged(devices: Iterable[Any]) -> bool:
    """Whether what goes to these devices is copied from the memory that it was read into."""
    return any(device.platform != "cpu" for device in devices)


@functools.partial(jax.jit, donate_argnums=0)
def _write_rows(whole: jax.Array, rows: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, rows, first, 0)


class _Reader(threading.local):
    def __init__(self) -> None:
        self.memory = Memory()


def load_all(
    placements: Iterable[Placement], on_bytes: Callable[[int], None]
) -> Iterator[tuple[Placement, jax.Array]]:
    """Each with its parameter, in the order of the files, a few read at a time."""
    ordered = sorted(placements, key=lambda p: (p.tensor.file, p.tensor.offset, p.first))
    reader = _Reader()
    arrays = in_threads(READERS, lambda x: x.load(on_bytes, reader.memory), ordered)
    yield from zip(ordered, arrays, strict=True)


def in_threads(count: int, load: Callable[[X], Y], items: Iterable[X]) -> Iterator[Y]:
    """What `load` returns for each, in order, of so many at a time."""
    device = default_device()

    def load_here(item: X) -> Y:
        with jax.default_device(device):  # which another thread would not know of
            return load(item)

    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        yield from pool.map(load_here, items)
    finally:
        pool.shutdown(cancel_futures=True)


def check_devices(placements: Sequence[Placement]) -> None:
    """Raises: ValueError if parameters were to lie on devices that others are not to lie on."""
    put = [(x.path, x.sharding.device_set) for x in placements if x.sharding is not None]
    for path, devices in put[1:]:
        first, others = put[0]
        if devices != others:
            names = [", ".join(sorted(map(str, x))) for x in (devices, others)]
            raise ValueError(
                f"load: {path} is to lie on {names[0]}, but {first} on {names[1]}; the "
                "parameters of a model lie on the same devices"
            )


def check_memory(folder: Path, placements: Iterable[Placement], packed_bytes: int = 0) -> None:
    """Raises: ValueError if the parameters need more memory than a device, or the host, has.

    packed_bytes: what goes to the default device beside them.
    """
    device = default_device()
    default = "the CPU" if device.platform == "cpu" else device
    wanted: dict[Any, int] = {default: packed_bytes} if packed_bytes else {}
    device_of: dict[Any, Any] = {default: device}
    for placement in placements:
        shared = set()  # CPU devices are one memory, where equal shards are one array
        for device, bounds in placement.shards().items():
            if device.platform == "cpu" and bounds in shared:
                continue
            shared.add(bounds)
            place = "the CPU" if device.platform == "cpu" else device
            size = math.prod(end - begin for begin, end in bounds) * placement.dtype.itemsize
            wanted[place] = wanted.get(place, 0) + size
            device_of[place] = device
    for place, size in wanted.items():
        free = memory.free_bytes(device_of[place])
        if free is not None and size > free:
            raise ValueError(
                f"{folder}: the parameters take {decimal(size)} on {place}, where "
                f"{decimal(free)} are free; choose a smaller dtype, spread them over more "
                "devices with sharding=, or free memory"
            )


def to_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """The values of an array, on the CPU without a copy.

    Raises: NotImplementedError if other processes hold a part of it.
    """
    if isinstance(array, np.ndarray):
        return array
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise NotImplementedError("save: a parameter is spread over several processes; gather it")
    shards = {str(shard.index): shard for shard in array.addressable_shards}.values()
    # The copy on the device is for a jax.Array, which keeps the host's copy as long as it lives.
    values = (
        np.asarray(shard.data if shard.device.platform == "cpu" else shard.data.copy())
        for shard in shards
    )
    if len(shards) == 1:
        return next(values)
    whole = np.empty(array.shape, array.dtype)
    for shard, value in zip(shards, values, strict=True):
        whole[shard.index] = value
    return whole
