"""SwiGLU, GeGLU and squared ReLU: y = activation(gate) * up, number by number.

gate and up [*B, F], or both in one array [*B, 2F], the gate's half first. Two separate arrays are
one long row each, for their rows mean nothing here; of one array, a tile is a piece of both halves
of a row, or of some rows. One block owns one tile, from memory to registers and back; where tiles
do not fill the arrays, every blocks-th tile of a stream (`rows.stream`). Each number is read once
and written once.
The backward pass reads gate, up and dy and computes the activation anew, which costs no byte; one
kernel writes d_gate and d_up, into one array if they came in one.
Sources: Shazeer 2020, arXiv:2002.05202; So et al. 2021, arXiv:2109.08668 (squared ReLU).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import _compat, rows, tuned
from pallas_kernels import device as device_lib
from pallas_kernels.device import MAX_BOX, Device
from pallas_kernels.options import check_arrays, check_flags, check_options
from pallas_kernels.rows import Config

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
MOST = 2**31  # two arrays are taken as one row, and a column is an int32
FEW = 2**16  # numbers that one launch moves in no time, whatever its accesses


def swiglu(
    gate: Float[Array, "*B G"],
    up: Float[Array, "*B F"] | None = None,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B F"]:
    """gate / (1 + exp(-gate)) * up; without `up`, gate is [*B, 2F] and holds both, gate first.

    Dtypes: bfloat16, float16 or float32, both the same. The activation is computed in float32 and
    rounded to the dtype before the product, as models do; float32 is good to 2^-21 of the result,
    for exp and the reciprocal are those of the hardware. `config.repeat` is how many times 16 bytes
    a thread has of each array.
    Raises: ValueError if shapes or dtypes disagree. NotImplementedError without a Hopper GPU
    (unless `interpret`), or for rows that are no multiple of 16 bytes.
    """
    return _glu("swiglu", "silu", gate, up, config, interpret)


def geglu(
    gate: Float[Array, "*B G"],
    up: Float[Array, "*B F"] | None = None,
    *,
    approximate: bool = True,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B F"]:
    """gelu(gate) * up; all else as in `swiglu`.

    `approximate` (Gemma, and what jax.nn.gelu does) takes the formula with tanh, else that with
    erf.
    """
    check_flags("geglu", approximate=approximate)
    return _glu("geglu", "gelu_tanh" if approximate else "gelu", gate, up, config, interpret)


def relu2_glu(
    gate: Float[Array, "*B G"],
    up: Float[Array, "*B F"] | None = None,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*B F"]:
    """max(gate, 0)^2 * up; all else as in `swiglu`."""
    return _glu("relu2_glu", "relu2", gate, up, config, interpret)


def swiglu_reference(gate, up=None):
    """The mathematics in plain JAX."""
    gate, up = _halves(gate, up)
    return jax.nn.silu(gate.astype(jnp.float32)).astype(gate.dtype) * up


def geglu_reference(gate, up=None, *, approximate=True):
    """The mathematics in plain JAX."""
    gate, up = _halves(gate, up)
    return jax.nn.gelu(gate.astype(jnp.float32), approximate=approximate).astype(gate.dtype) * up


def relu2_glu_reference(gate, up=None):
    """The mathematics in plain JAX."""
    gate, up = _halves(gate, up)
    above = jnp.maximum(gate.astype(jnp.float32), 0)  # whose gradient at NaN, unlike relu's, is NaN
    return jnp.square(above).astype(gate.dtype) * up


def _halves(gate, up):
    return jnp.split(gate, 2, axis=-1) if up is None else (gate, up)


def why_not(gate, up=None, *, device: Device | None = None) -> str | None:
    """What keeps both kernels from this call; shapes suffice."""
    device = device or device_lib.current()
    if reason := device_lib.why_not_hopper(device):
        return reason
    if gate.dtype not in DTYPES:
        return f"takes bfloat16, float16 or float32, got {gate.dtype}"
    if gate.ndim < 1:
        return "takes rows, got a scalar"
    if gate.size == 0:
        return f"an array {list(gate.shape)} holds no numbers"
    if up is not None and gate.size >= MOST:
        return f"an array of {gate.size} numbers has no index of 32 bits"
    size = gate.dtype.itemsize * (gate.shape[-1] // 2 if up is None else gate.shape[-1])
    if reason := device_lib.why_not_copied("rows", size):
        return reason
    return None


def default_config(gate, up=None, *, backward: bool = False, device: Device | None = None):
    """No stream where tiles of two accesses a thread, or one, fill the arrays.

    Blocks that come and go keep more loads in flight than a stream of copies does; with two, a
    thread has four or six on the way, and is still one of a thousand on its multiprocessor. Few
    numbers go in small tiles, so that more multiprocessors have one, and no more than FEW by less
    than 16 bytes, where only that fills the arrays (H200, bfloat16, us: 1 x 4864 by a stream 1.6,
    1 x 14336 without one 1.4). A stream has tiles of about 8 KB an array, half of that in the
    backward pass, whose arrays and slopes are in registers at once, three in flight a block, and as
    many blocks as fit.
    """
    device = device or device_lib.current()
    count, width = _sizes(gate, up)
    size = gate.dtype.itemsize
    for repeat in (2, 1):
        tile = _tile(width, size, repeat, count)
        if tile.fills(count) and (repeat == 1 or tile.tiles(count) >= 4 * device.num_sms):
            return Config(repeat, 0, 1)
    repeat = 2 if backward else 4
    while repeat > 1 and _tile(width, size, repeat).tiles(count) < device.num_sms:
        repeat //= 2
    tile = _tile(width, size, repeat)
    blocks = _most_blocks(tile.numbers * size * (3 if backward else 2), 3)
    return Config(repeat, 3 if tile.tiles(count) > device.num_sms * blocks else 1, blocks)


def _most_blocks(stage_bytes: int, stages: int) -> int:
    """Blocks whose shared memory fits a multiprocessor, up to eight; barriers beside the tiles."""
    return min(8, device_lib.SHARED_BYTES // (stages * stage_bytes + 1024))


def bucket(gate, up=None) -> str:
    """The key of a tuned row: how many numbers, to a power of two, and in how many arrays."""
    count, width = _sizes(gate, up)
    exponent = (count * width - 1).bit_length()
    return f"{gate.dtype}-n2^{exponent}-{'one' if up is None else 'two'}"


def candidates(gate, up=None, *, device: Device | None = None) -> list[Config]:
    """Smaller and larger tiles: without a stream, and with two or three in flight a block."""
    device = device or device_lib.current()
    count, width = _sizes(gate, up)
    size = gate.dtype.itemsize
    found = []
    for repeat in (1, 2, 4):
        if _tile(width, size, repeat, count).fills(count):
            found.append(Config(repeat, 0, 1))
        tile = _tile(width, size, repeat)
        for stages in (2, 3) if tile.tiles(count) > 8 * device.num_sms else (1,):
            blocks = _most_blocks(2 * size * tile.numbers, stages)
            found.append(Config(repeat, stages, blocks))
    return [config for config in found if config != default_config(gate, up, device=device)]


def tuning_calls() -> list[tuned.Call]:
    """The MLPs of Qwen2.5-0.5B, Llama-3.1-8B and Phi-3-mini (one array), prefill and decode."""
    arrays = [(4864, 2), (14336, 2), (16384, 1)]
    return [
        tuned.Call((jax.ShapeDtypeStruct((count, width), jnp.bfloat16),) * number, swiglu)
        for width, number in arrays
        for count in (1, 64, 8192)
    ]


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a kernel is compiled for."""

    name: str
    activation: str
    config: Config
    backward_config: Config
    num_sms: int
    interpret: bool


def check(name, gate, up) -> None:
    """Refuses what no implementation of a gate can take; `name` is who speaks."""
    check_arrays(name, gate=gate, up=up)
    for what, array in (("gate", gate), ("up", up)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: {what} is {array.dtype}; it must be floating point")
    if up is None:
        if gate.ndim < 1 or gate.shape[-1] % 2:
            raise ValueError(
                f"{name}: without up, gate holds two halves a row, but its shape is {gate.shape}"
            )
    elif gate.ndim < 1 or (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"{name}: gate is {gate.dtype}{list(gate.shape)} and up {up.dtype}{list(up.shape)}; "
            "they must be alike and have rows"
        )


def _glu(name, activation, gate, up, config, interpret):
    check(name, gate, up)
    check_options(name, config, Config, interpret=interpret)
    device = device_lib.INTERPRETED if interpret else device_lib.current()
    reason = why_not(gate, up, device=device)
    if reason is not None:
        raise NotImplementedError(f"{name}: cannot run this call: {reason}")
    measured = tuned.lookup("swiglu", bucket(gate, up), device, Config)
    if measured and not _fits(measured, gate, up):  # its key holds no exact size
        measured = None
    static = _Static(
        name,
        activation,
        config or measured or default_config(gate, up, device=device),
        default_config(gate, up, backward=True, device=device),
        device.num_sms,
        interpret,
    )
    count, width = _sizes(gate, up)
    halves = 2 if up is None else 1
    arrays = tuple(x.reshape(count, halves, width) for x in (gate, up) if x is not None)
    return _activate(static, arrays).reshape(*gate.shape[:-1], gate.shape[-1] // halves)


def _fits(config: Config, gate, up) -> bool:
    """Whether the call can be had with the config: without a stream, all tiles are whole."""
    count, width = _sizes(gate, up)
    if config.stages:
        return True
    return _tile(width, gate.dtype.itemsize, config.repeat, count).fills(count)


def _sizes(gate, up) -> tuple[int, int]:
    """Rows, and numbers in a row of gate; two separate arrays are one row each."""
    if up is not None:
        return 1, gate.size
    return gate.size // gate.shape[-1], gate.shape[-1] // 2


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Tiles over arrays [M, halves, F]: `on_chip` of whole narrow rows, or of a piece of some."""

    on_chip: rows.RowTile
    across: int  # tiles in a row

    @property
    def numbers(self) -> int:
        return self.on_chip.rows * self.on_chip.padded

    def tiles(self, count: int) -> int:
        """Of `count` rows."""
        return -(-count // self.on_chip.rows) * self.across

    def fills(self, count: int) -> bool:
        """Whether the tiles of `count` rows hold nothing else."""
        return self.tiles(count) * self.numbers == count * self.on_chip.width

    def place(self, half: int) -> Callable[[Any, jax.Array, int, int], Any]:
        """Where `chunks` of tile `index` of one half lie, from its chunk `first` on, in an array
        [M, halves, n, inner].
        """

        def place(ref, index, first, chunks):
            row, chunk = self.first(index)
            return ref.at[pl.ds(row, self.on_chip.rows), half, pl.ds(chunk + first, chunks)]

        return place

    def whole(self, ref: Any, half: int) -> _Whole:
        """Tile number `block` of one half of an array [M, halves, F]."""
        row, chunk = self.first(jax.lax.axis_index("block"))
        columns = pl.ds(chunk * self.on_chip.inner, self.on_chip.padded)
        return _Whole(ref.at[pl.ds(row, self.on_chip.rows), half, columns])

    def first(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = jax.lax.div(index, self.across) * self.on_chip.rows
        return row, jax.lax.rem(index, self.across) * self.on_chip.chunks


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A tile [rows, columns] in device memory, with the methods of `rows.Staged`."""

    ref: Any

    def load(self, part: rows.Part) -> jax.Array:
        if part.tile.interpret:
            return self.ref[...]
        return _compat.load(self.ref, part.tile.layout, optimized=False)

    def store(self, part: rows.Part, value: jax.Array) -> None:
        del part
        self.ref[...] = value


def _tile(
    width: int, itemsize: int, repeat: int, count: int | None = None, *, interpret: bool = False
) -> _Tile:
    """A thread has `repeat` times 16 bytes of a tile; of longer rows up to half less, if tiles of
    that size fill them better; of a row narrower than that, what there is. count: of rows that are
    not streamed: of those that only tiles of a warp fill, each warp has a piece of rows of its own;
    of FEW numbers that it does not fill either, a thread has fewer bytes, 4 at least.
    """
    vector = device_lib.ACCESS_BYTES // itemsize
    step = device_lib.THREADS * vector
    if width <= step:
        repeat = min(repeat, MAX_BOX // rows.row_tile(width, itemsize).rows)
        return _Tile(rows.row_tile(width, itemsize, repeat=repeat, interpret=interpret), 1)
    warp = device_lib.LANES * vector
    if count is not None and width % step and width % warp == 0 and count % device_lib.WARPS == 0:
        down, lanes = (device_lib.WARPS, 1), (1, device_lib.LANES)
        of_tile = device_lib.WARPS * repeat, warp, 1
        on_chip = rows.RowTile(width, *of_tile, vector, down, lanes, interpret=interpret)
        return _Tile(on_chip, width // warp)
    least = 4 // itemsize  # of a thread
    if count is not None and count * width <= FEW and width % (device_lib.THREADS * least) == 0:
        vector = math.gcd(width // device_lib.THREADS, vector)
        step = device_lib.THREADS * vector
    inner = math.gcd(width, MAX_BOX)
    most = min(repeat, MAX_BOX * inner // step)
    tiles = lambda times: -(-width // (times * step))  # noqa: E731
    times = min(range(most, most // 2, -1), key=lambda times: tiles(times) * times)
    warps, lanes = (1, device_lib.WARPS), (1, device_lib.LANES)
    chunks = times * step // inner
    on_chip = rows.RowTile(width, 1, inner, chunks, vector, warps, lanes, interpret=interpret)
    return _Tile(on_chip, tiles(times))


def _over_tiles(
    step: Callable[[rows.Part, Sequence[Any], Sequence[Any]], None],
    *,
    name: str,
    inputs: Sequence[tuple[jax.Array, int]],
    outputs: Sequence[jax.ShapeDtypeStruct],
    targets: Sequence[tuple[int, int]],
    config: Config,
    static: _Static,
) -> list[jax.Array]:
    """Runs step(part, ins, outs) on all tiles of the inputs, each (array [M, halves, F], half).

    The `targets` are (which output, half). On chip the first outs are the ins, so a step loads
    before it stores.
    """
    x = inputs[0][0]
    count, _, width = x.shape
    tile = _tile(
        width,
        x.dtype.itemsize,
        config.repeat,
        None if config.stages else count,
        interpret=static.interpret,
    )
    on_chip = tile.on_chip
    part = rows.Part(on_chip, 0, on_chip.rows, 0, on_chip.chunks)
    run = functools.partial(
        _compat.kernel,
        name=name,
        grid_names=("block",),
        interpret=static.interpret,
        approx_math=True,
    )
    if config.stages == 0:
        if not tile.fills(count):
            raise NotImplementedError(
                f"{name}: cannot run this call: {config} has no stream, which takes tiles of "
                f"{on_chip.rows} x {on_chip.padded} numbers that fill {count} x {width}"
            )

        def whole_tile(*refs):
            ins = [tile.whole(ref, half) for ref, (_, half) in zip(refs, inputs, strict=False)]
            outs = [tile.whole(refs[len(inputs) + which], half) for which, half in targets]
            step(part, ins, outs)

        kernel = run(whole_tile, out_type=outputs, grid=(tile.tiles(count),))
        return kernel(*(array for array, _ in inputs))

    tiles = tile.tiles(count)
    blocks = min(tiles, static.num_sms * config.blocks_per_sm)
    view = lambda x: (*x.shape[:-1], width // on_chip.inner, on_chip.inner)  # noqa: E731

    def streamed(*refs):
        sources, out_refs = refs[: len(inputs)], refs[len(inputs) :][: len(outputs)]
        *buffers, barrier = refs[len(inputs) + len(outputs) :]

        def tile_step(slots, carry):
            staged = [rows.Staged(slot) for slot in slots]
            step(part, staged, staged)
            return carry

        rows.stream(
            tile_step,
            tile=on_chip,
            tiles=tiles,
            blocks=blocks,
            stages=config.stages,
            sources=sources,
            targets=[out_refs[which] for which, _ in targets],
            buffers=buffers,
            barrier=barrier,
            places=[tile.place(half) for _, half in inputs],
            chunk_of=lambda index: tile.first(index)[1],
            row_of=lambda index: tile.first(index)[0],
        )

    buffers = [on_chip.buffer(x.dtype, config.stages) for _ in inputs]
    kernel = run(
        streamed,
        out_type=[jax.ShapeDtypeStruct(view(out), out.dtype) for out in outputs],
        grid=(blocks,),
        scratch_types=[
            *buffers,
            plgpu.Barrier(num_arrivals=rows.arrivals(*buffers), num_barriers=config.stages),
        ],
    )
    results = kernel(*(array.reshape(view(array)) for array, _ in inputs))
    return [result.reshape(out.shape) for result, out in zip(results, outputs, strict=True)]


def _silu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The activation and its slope."""
    s = _sigmoid(x)
    return x * s, s * (1.0 + x * (1.0 - s))


def _gelu_tanh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(1 + tanh(z / 2)) / 2 is sigmoid(z), which keeps its digits where z is negative."""
    a, b = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
    squared = jnp.minimum(x * x, 1e3)  # further out it is 0 or x, and inf * 0 would be NaN
    s = _sigmoid(x * (a + b * squared))
    return x * s, s + x * s * (1.0 - s) * (a + 3 * b * squared)


def _gelu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    below = 0.5 + 0.5 * jax.lax.erf(x * math.sqrt(0.5))
    return x * below, below + x * jnp.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))


def _sigmoid(x: jax.Array) -> jax.Array:
    root = jax.lax.rsqrt(1.0 + jnp.exp(-x))  # an exact division costs as much as all the rest
    return root * root


def _relu2(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    above = jnp.maximum(x, 0.0)
    return above * above, 2.0 * above


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh, "gelu": _gelu, "relu2": _relu2}


def _forward(static: _Static, arrays):
    gate, (count, _, width) = arrays[0], arrays[0].shape

    def step(part, ins, outs):
        x, up = (side.load(part) for side in ins)
        value, _ = ACTIVATIONS[static.activation](x.astype(jnp.float32))
        outs[0].store(part, value.astype(gate.dtype) * up)

    (y,) = _over_tiles(
        step,
        name=static.name,
        inputs=_gate_and_up(arrays),
        outputs=[jax.ShapeDtypeStruct((count, 1, width), gate.dtype)],
        targets=[(0, 0)],
        config=static.config,
        static=static,
    )
    return y


def _backward(static: _Static, arrays, dy):
    """d_gate = dy up activation'(gate) and d_up = dy activation(gate), rounded as in the product.

    They come as gate and up did.
    """

    def step(part, ins, outs):
        gate, up, d = (side.load(part).astype(jnp.float32) for side in ins)
        value, slope = ACTIVATIONS[static.activation](gate)
        outs[0].store(part, (d * up * slope).astype(dy.dtype))
        outs[1].store(part, (d * value.astype(dy.dtype).astype(jnp.float32)).astype(dy.dtype))

    inputs = _gate_and_up(arrays)
    return tuple(
        _over_tiles(
            step,
            name=f"{static.name}_backward",
            inputs=[*inputs, (dy, 0)],
            outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
            targets=[(0, 0), (0, 1)] if len(arrays) == 1 else [(0, 0), (1, 0)],
            config=static.backward_config,
            static=static,
        )
    )


def _gate_and_up(arrays):
    """Where each is: (array, half)."""
    return [(arrays[0], 0), (arrays[0], 1)] if len(arrays) == 1 else [(x, 0) for x in arrays]


def _activate_fwd(static, arrays):
    return _forward(static, arrays), arrays


def _activate_bwd(static, arrays, dy):
    return (_backward(static, arrays, dy),)


_activate = jax.custom_vjp(
    lambda static, arrays: _activate_fwd(static, arrays)[0], nondiff_argnums=(0,)
)
_activate.defvjp(_activate_fwd, _activate_bwd)
_activate = jax.jit(_activate, static_argnums=0)  # calls alike share one compiled kernel
