"""Where parameters go, and how much memory that takes."""

import collections
import gc
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from tiny_checkpoints import read_golden, write_checkpoint

from jaxllm import memory
from jaxllm.checkpoint import load, placement
from jaxllm.checkpoint.folder import WEIGHTS, list_tensors

REPO = Path(__file__).resolve().parents[3]


def test_progress_counts_every_byte_once(folder):
    calls = []
    load(folder, progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.size_bytes for tensor in list_tensors(folder).values())
    assert {call[1] for call in calls} == {total}
    assert [call[0] for call in calls] == sorted({call[0] for call in calls})
    assert calls[-1][0] == total


def test_a_model_that_does_not_fit_is_refused_before_anything_is_made(folder, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100_000)
    gc.collect()
    live = len(jax.live_arrays())
    calls = []
    with pytest.raises(ValueError, match=r"take 2\d\d.\d kB on the CPU, where 100.0 kB are free"):
        load(folder, progress=lambda done, total: calls.append(done))
    assert not calls
    assert len(jax.live_arrays()) == live
    monkeypatch.setattr(memory, "free_bytes", lambda device: 300_000)
    load(folder)
    with pytest.raises(ValueError, match=r"take 5\d\d.\d kB"):
        load(folder, dtype="float32")
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    load(folder)


def _values(model: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(p[...]) for path, p in flat}


@pytest.mark.parametrize("piece", [1, 1000, 2**27])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_goes_to_another_device_is_read_into_the_same_memory(
    folder, monkeypatch, piece, dtype
):
    """As to a GPU: in pieces of a row at least, each copied before the next takes its place."""
    plain, put = _values(load(folder, dtype)[0]), jax.device_put
    read, wait = placement.read, jax.block_until_ready
    events, memories = collections.defaultdict(list), set()

    def reads(tensor, dtype, rows, on_bytes, memory):
        events[threading.get_ident()].append("read")
        memories.add(memory)
        return read(tensor, dtype, rows, on_bytes, memory)

    def waits(arrays):
        events[threading.get_ident()].append("copied")
        return wait(arrays)

    monkeypatch.setattr(placement, "read", reads)
    monkeypatch.setattr(jax, "block_until_ready", waits)
    monkeypatch.setattr(jax, "device_put", lambda x, *where: put(np.array(x), *where))
    monkeypatch.setattr(placement, "_staged", lambda devices: True)
    monkeypatch.setattr(placement, "STAGED_BYTES", piece)
    monkeypatch.setattr(placement, "READERS", 2)

    one, numbers = jax.sharding.SingleDeviceSharding(jax.devices()[0]), []
    tensors = list_tensors(folder).values()
    total = sum(tensor.size_bytes for tensor in tensors)
    for sharding in (None, one):
        calls: list[tuple[int, int]] = []
        model, _ = load(
            folder, dtype, sharding=sharding, progress=lambda *x, to=calls: to.append(x)
        )
        assert calls[-1] == (total, total)
        numbers.append(len(calls))
        for path, value in _values(model).items():
            np.testing.assert_array_equal(value, plain[path], err_msg=path)
        for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
            assert leaf.committed == (sharding is not None)
    assert None not in memories
    assert len(memories) <= 2 * 2  # a reader's, of two calls
    for of_thread in events.values():
        assert of_thread == ["read", "copied"] * (len(of_thread) // 2)
    if piece > total:
        assert numbers == [len(tensors)] * 2
    else:
        assert min(numbers) > len(tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_goes_to_a_gpu_arrives_as_it_was_stored(tmp_path, memory_kind, dtype):
    """Twelve tensors for eight readers, three of them of several pieces (537, 201 and 134 MB)."""
    shapes = [(65537, 4096), (100003, 1001), (2**14 + 1, 4096), *[(1009, 896), (896,)] * 4, (1, 1)]
    generator = np.random.default_rng(0)
    stored = {
        f"x{i}": generator.integers(0, 2**15 - 2**8, shape, np.uint16).view(ml_dtypes.bfloat16)
        for i, shape in enumerate(shapes)
    }
    safetensors.numpy.save_file(stored, tmp_path / WEIGHTS)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory_kind)
    to = np.dtype(dtype)
    placements = [
        placement.Placement(name, tensor.shape, to, tensor, 0, where)
        for name, tensor in list_tensors(tmp_path).items()
    ]
    loaded = dict(placement.load_all(placements, lambda size: None))
    assert {x.path for x in loaded} == set(stored)
    for x, array in loaded.items():
        assert array.sharding == where
        np.testing.assert_array_equal(np.asarray(array), stored[x.path].astype(to), err_msg=x.path)


def test_loaded_parameters_can_be_donated(folder):
    """Their memory is NumPy's; XLA must not write into what another array still shows."""
    model, _ = load(folder, dtype="float32")
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    kept = [np.asarray(leaf).copy() for leaf in leaves]
    double = jax.jit(lambda xs: [x * 2 for x in xs], donate_argnums=0)
    for x, y in zip(kept, double(leaves), strict=True):
        np.testing.assert_array_equal(2 * x, np.asarray(y))
    assert all(leaf.is_deleted() for leaf in leaves)


SHARDED = """
import sys
import jax, numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxllm.checkpoint import load, placement, save
import jaxllm
from jaxllm import train
from jaxllm.run import Run
from jaxllm.trainer import _devices

def values(model):
    return [p[...] for _, p in nnx.to_flat_state(nnx.state(model, nnx.Param))]

assert len(jax.devices()) == 4
folder, copy = sys.argv[1:]
plain = [np.asarray(x) for x in values(load(folder)[0])]
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))

def by_shape(path, shape):
    if path.endswith("down_proj.weight"):
        return NamedSharding(mesh, P("a", "b"))
    if path.endswith("q_proj.weight"):
        return NamedSharding(mesh, P(("a", "b")))
    if path.endswith(("k_proj.weight", "gate_proj.weight")):
        return NamedSharding(mesh, P(None, "b"))
    return NamedSharding(mesh, P("a") if shape[0] % 2 == 0 and len(shape) == 2 else P())

one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
for sharding in (by_shape, NamedSharding(mesh, P()), one):
    calls = []
    model, _ = load(folder, sharding=sharding, progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1], calls[-1]
    for (path, p), x in zip(nnx.to_flat_state(nnx.state(model, nnx.Param)), plain, strict=True):
        path = ".".join(map(str, path))
        wanted = sharding(path, x.shape) if callable(sharding) else sharding
        assert p[...].sharding == wanted, path
        np.testing.assert_array_equal(np.asarray(p[...]), x, err_msg=path)
    save(model, None, copy)
    for x, y in zip(values(load(copy)[0]), plain, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)
# As to a GPU: in pieces, each copied before the next takes its place
put = jax.device_put
jax.device_put = lambda x, *where: put(np.array(x), *where)
placement._staged = lambda devices: True
for placement.STAGED_BYTES in (1, 1000, 2**27):
    for sharding in (by_shape, NamedSharding(mesh, P()), one):
        model, _ = load(folder, sharding=sharding)
        for x, y in zip(values(model), plain, strict=True):
            np.testing.assert_array_equal(np.asarray(x), y)
jax.device_put, placement._staged = put, lambda devices: False

for spec in (P("a", "b"), P(None, "a")):
    try:
        load(folder, sharding=NamedSharding(mesh, spec))
    except ValueError as error:
        assert "cannot be spread as" in str(error), error
    else:
        raise AssertionError("a vector over two axes")

def mixed(path, shape):
    return None if "embed" in path else by_shape(path, shape)

def run_of(sharding):
    model, _ = load(folder, dtype="bfloat16", sharding=sharding)
    settings = dict(max_new_tokens=4, settings={}, stop_ids=[], stop=(), top_logprobs=0)
    sizes = dict(steps_per_dispatch=64, prefill_chunk=512, kv_dtype=None)
    return Run(model, None, [[1, 2, 3]], **settings, **sizes)

packed, _ = load(folder, "float32")
jaxllm.quantize(packed, "int8")
save(packed, None, copy)


def of_the_mesh(path, shape):
    return NamedSharding(jax.sharding.get_mesh(), P())


with jax.set_mesh(mesh):
    of_mesh = load(copy, sharding=of_the_mesh)[0]
for x, y in zip(jax.tree.leaves(of_mesh), jax.tree.leaves(load(copy)[0]), strict=True):
    assert len(x.devices()) == 4
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

models = [load(folder, "float32", sharding=where)[0] for where in (None, mixed)]
tokens = [jaxllm.generate(model, None, [[1, 2, 3]], max_new_tokens=4).tokens for model in models]
assert tokens[0] == tokens[1], tokens
assert _devices(train.parameters(load(folder, sharding=mixed)[0])) == jax.devices()
# A CPU computes in float32, so that all weights are cast.
assert run_of(by_shape).size_bytes() < run_of(None).size_bytes()
"""


APART = """
import sys, jax
from jax.sharding import SingleDeviceSharding
from jaxllm.checkpoint import load

try:
    load(
        sys.argv[1],
        sharding=lambda path, shape: SingleDeviceSharding(jax.devices()[int(".1." in path)]),
    )
except ValueError as error:
    assert "parameters of a model lie on the same devices" in str(error), error
else:
    raise AssertionError("layers on two devices")
"""


AT_ANOTHER = """
import sys, jax
from flax import nnx
from jaxllm.checkpoint import load

with jax.default_device(jax.devices()[1]):
    model, _ = load(sys.argv[1])
arrays = jax.tree.leaves(nnx.state(model))
assert {device for x in arrays for device in x.devices()} == {jax.devices()[1]}
assert not any(x.committed for x in arrays)
"""


@pytest.mark.slow
def test_parameters_go_to_the_default_device_and_stay_free(tmp_path):
    folder = write_checkpoint(tmp_path, read_golden("llama"))
    run_python(AT_ANOTHER, folder, XLA_FLAGS="--xla_force_host_platform_device_count=2")


FROM_ANOTHER = """
import sys, jax
from flax import nnx
from jaxllm.checkpoint import load
from jaxllm.quantize import quantize

with jax.default_device(jax.devices()[1]):
    model, _ = load(sys.argv[1])
quantize(model, "int8", from_host=True)
arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
assert {device for x in arrays for device in x.devices()} == {jax.devices()[0]}
assert not any(x.committed for x in arrays)
"""


@pytest.mark.slow
def test_a_model_packed_from_the_host_comes_to_the_default_device(tmp_path):
    folder = write_checkpoint(tmp_path, read_golden("llama"))
    run_python(FROM_ANOTHER, folder, XLA_FLAGS="--xla_force_host_platform_device_count=2")


def test_what_progress_raises_ends_the_load(tmp_path):
    folder = write_checkpoint(tmp_path, read_golden("llama"))
    calls = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="^enough$"):
        load(folder, progress=progress)
    assert calls == sorted(calls)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "phi3"])
def test_parameters_go_where_the_sharding_says(tmp_path, case):
    folder = write_checkpoint(tmp_path / "source", read_golden(case))
    run_python(
        SHARDED, folder, tmp_path / "copy", XLA_FLAGS="--xla_force_host_platform_device_count=4"
    )


@pytest.mark.slow
def test_parameters_on_different_devices_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path, read_golden("llama"))
    run_python(APART, folder, XLA_FLAGS="--xla_force_host_platform_device_count=2")


def test_a_mesh_is_no_sharding(tmp_path):
    folder = write_checkpoint(tmp_path, read_golden("llama"))
    mesh = jax.make_mesh((1,), ("x",))
    with pytest.raises(ValueError, match=r"must be a jax.sharding.Sharding, got Mesh"):
        load(folder, sharding=mesh)


def run_python(code: str, *arguments, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPO,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


PEAK = """
import sys
from jaxllm.checkpoint import load, save

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

model, _ = load(sys.argv[1])
for copy in sys.argv[2:]:
    save(model, None, copy, max_shard_size=300_000_000)
print(peak())
embedding = model.embed_tokens.weight[...]
assert float(embedding[7, 5]) == 1.5 and float(embedding[-1, -1]) == -2.5, "not the file's values"
"""


def write_sparse(folder: Path, dtype: str, V: int, L: int) -> tuple[int, int]:
    """A made-up Llama of zeros, a file with holes: the bytes of its tensors, and of the largest."""
    D, F = 1536, 6144
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": V, "hidden_size": D, "intermediate_size": F}
    config |= {"num_hidden_layers": L, "num_attention_heads": 12, "num_key_value_heads": 12}
    config |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": [V, D],
        "lm_head.weight": [V, D],
        "model.norm.weight": [D],
    }
    for i in range(L):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{x}_proj.weight": [D, D] for x in "qkvo"}
        shapes |= {f"{at}mlp.{x}_proj.weight": [F, D] for x in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": [D, F]}
        shapes |= {f"{at}{x}_layernorm.weight": [D] for x in ("input", "post_attention")}
    item = 2 if dtype == "BF16" else 4
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + item * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
        for row, column, value in ((7, 5, 1.5), (V - 1, D - 1, -2.5)):
            stream.seek(8 + len(text) + item * (row * D + column))
            stream.write(np.array(value, ml_dtypes.bfloat16 if item == 2 else np.float32).tobytes())
    return end, item * V * D


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("dtype", "V", "L", "saves"), [("BF16", 106_000, 18, 0), ("F32", 42_000, 10, 1)]
)
def test_a_large_checkpoint_is_never_held_twice(tmp_path, dtype, V, L, saves):
    """2 GB of file, loaded (and saved) as bfloat16. If it were mapped, all of it would count."""
    size, largest = write_sparse(tmp_path / "large", dtype, V, L)
    assert size > 2 * 10**9
    if dtype == "F32":
        size, largest = size // 2, largest // 2
    copies = [tmp_path / "copy"] * saves
    peak = int(run_python(PEAK, tmp_path / "large", *copies))
    for copy in copies:
        shutil.rmtree(copy)
    limit = size + largest + 300 * 10**6
    assert peak < limit, f"{peak / 1e6:.0f} MB at the peak, {limit / 1e6:.0f} allowed"
    print(f"\npeak: {peak / 1e6:.0f} MB for {size / 1e6:.0f} MB of parameters")
