"""Reading and writing one safetensors file, with the safetensors library as the other side."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxllm.checkpoint import safetensors_file
from jaxllm.checkpoint.safetensors_file import FLOATS, INTEGERS, Source, read, read_header, write

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Blocks that end inside every tensor of these tests."""
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 100)


def numbers(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def write_raw(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file whose header may lie; `header` is JSON's source or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    file.write_bytes(length.to_bytes(8, "little") + text + data)
    return file


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS.keys())
@pytest.mark.parametrize("shape", [(7,), (1, 1), (5, 13), (3, 2, 9), (60, 3)])
def test_reads_what_the_library_wrote(tmp_path, small_blocks, dtype, shape):
    written = numbers(shape, dtype)
    safetensors.numpy.save_file({"first": written[:1], "x": written}, tmp_path / "x.safetensors")
    tensor = read_header(tmp_path / "x.safetensors")["x"]
    assert tensor.shape == shape
    assert tensor.size_bytes == written.nbytes
    np.testing.assert_array_equal(read(tensor, dtype), written)
    for target in (F32, BF16, F16):
        result = read(tensor, target)
        assert result.dtype == target
        assert result.ctypes.data % 64 == 0
        np.testing.assert_array_equal(result, written.astype(target))
        rows = slice(1, max(1, shape[0] - 1))
        np.testing.assert_array_equal(read(tensor, target, rows), written[rows].astype(target))


def test_counts_the_bytes_that_it_reads(tmp_path, small_blocks):
    safetensors.numpy.save_file({"x": numbers((30, 10), F32)}, tmp_path / "x.safetensors")
    tensor = read_header(tmp_path / "x.safetensors")["x"]
    for dtype in (F32, BF16):
        counts = []
        read(tensor, dtype, slice(10, 30), counts.append)
        assert sum(counts) == 20 * 10 * 4
        assert len(counts) > 5


@pytest.mark.parametrize(("stored", "target"), [("F32", F16), ("BF16", F16), ("F64", F32)])
def test_refuses_values_that_the_dtype_cannot_hold(tmp_path, stored, target):
    file = tmp_path / "x.safetensors"
    large = 1e300 if stored == "F64" else 1e6
    x = np.array([[1.0, np.inf], [large, -1.0]]).astype(FLOATS[stored])
    safetensors.numpy.save_file({"x": x}, file)
    tensor = read_header(file)["x"]
    with pytest.raises(ValueError, match=r"'x' has values that \w+ cannot hold"):
        read(tensor, target)
    assert np.isinf(read(tensor, target, slice(0, 1))).sum() == 1  # infinity itself can be held


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool", "uint8", "complex64"])
def test_refuses_what_is_no_float(tmp_path, dtype):
    safetensors.numpy.save_file({"x": np.ones((2, 2), dtype)}, tmp_path / "x.safetensors")
    tensor = read_header(tmp_path / "x.safetensors")["x"]
    with pytest.raises(NotImplementedError, match=r"'x' is stored as .* not supported yet"):
        read(tensor, F32)


def test_the_library_reads_what_is_written(tmp_path):
    tensors = {
        "narrow": numbers((3, 5), BF16),
        "wide": numbers((7,), F32),
        "half": numbers((2, 2), F16),
        "fused": numbers((6, 4), F32),
    }
    file = tmp_path / "x.safetensors"
    write(
        file,
        [Source(name, x.dtype, x.shape, lambda x=x: [x[:2], x[2:]]) for name, x in tensors.items()],
    )
    again = safetensors.numpy.load_file(file)
    assert again.keys() == tensors.keys()
    for name, x in tensors.items():
        assert again[name].dtype == x.dtype
        np.testing.assert_array_equal(again[name], x)
    with safetensors.safe_open(file, "np") as reader:
        assert reader.metadata() == {"format": "pt"}
    for tensor in read_header(file).values():
        assert tensor.offset % FLOATS[tensor.dtype].itemsize == 0


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_read_and_written_as_they_are(tmp_path, name):
    dtype, file = INTEGERS[name], tmp_path / "x.safetensors"
    ends = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(ends.min, ends.max, (9, 4), dtype, endpoint=True)
    write(file, [Source("x", x.dtype, x.shape, lambda: [x[:4], x[4:]])])
    np.testing.assert_array_equal(safetensors.numpy.load_file(file)["x"], x)
    tensor = read_header(file)["x"]
    np.testing.assert_array_equal(read(tensor, dtype, slice(2, 7)), x[2:7])
    for other in {np.dtype(np.int8), np.dtype(np.int32)} - {dtype}:
        with pytest.raises(NotImplementedError, match=f"'x' is stored as {name}, which is not"):
            read(tensor, other)


def test_writes_no_dtype_that_it_cannot_read(tmp_path):
    x = np.ones(3, np.int16)
    with pytest.raises(ValueError, match="'x' is int16, which is not one of float64"):
        write(tmp_path / "x.safetensors", [Source("x", x.dtype, x.shape, lambda: [x])])


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
FIRST = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LIES = {
    "not json": (b"{", "header is not valid JSON"),
    "not text": (b"\xff\xfe\x00", "header is not valid JSON"),
    "too deep": (b'{"x":' + b"[" * 100_000, "header is not valid JSON"),
    "not an object": ([1, 2], "header is not a JSON object"),
    "twice": (b'{"x": 1, "x": 2}', "'x' stands there twice"),
    "no offsets": ({"x": {"dtype": "F32", "shape": [4]}}, "'x' a dtype, a shape, data_offsets"),
    "more keys": ({"x": {**GOOD, "file": "/etc/passwd"}}, "'x' a dtype, a shape, data_offsets"),
    "not an entry": ({"x": 3}, "'x' a dtype, a shape, data_offsets"),
    "unknown dtype": ({"x": {**GOOD, "dtype": "F31"}}, "unknown dtype 'F31'; known are F64"),
    "dtype is a list": ({"x": {**GOOD, "dtype": ["F32"]}}, "unknown dtype"),
    "negative shape": ({"x": {**GOOD, "shape": [-2, -2]}}, "a shape that is not"),
    "fractional shape": ({"x": {**GOOD, "shape": [4.0]}}, "a shape that is not"),
    "boolean shape": ({"x": {**GOOD, "shape": [True, 4]}}, "a shape that is not"),
    "shape is no list": ({"x": {**GOOD, "shape": 4}}, "a shape that is not"),
    "too many axes": ({"x": {**GOOD, "shape": [1] * 9}}, "a shape that is not"),
    "huge sizes": ({"x": {**GOOD, "shape": [10**30]}}, "a shape that is not"),
    "huge product": ({"x": {**GOOD, "shape": [2**62] * 8}}, r"its data_offsets \[0, 16\] hold 16"),
    "three offsets": ({"x": {**GOOD, "data_offsets": [0, 8, 16]}}, "not two positions"),
    "negative offset": ({"x": {**GOOD, "data_offsets": [-16, 0]}}, "not two positions"),
    "backwards": ({"x": {**GOOD, "data_offsets": [16, 0]}}, "hold -16"),
    "too small": ({"x": {**GOOD, "shape": [3, 2]}}, "takes 24 bytes, but its data_offsets"),
    "wrong dtype": ({"x": {**GOOD, "dtype": "BF16"}}, "takes 8 bytes, but its data_offsets"),
    "past the end": (
        {"x": {**GOOD, "shape": [4, 2], "data_offsets": [0, 32]}},
        r"describes a file of \d+ bytes, but it has",
    ),
    "before the end": ({"x": FIRST}, r"describes a file of \d+ bytes, but it has"),
    "overlap": (
        {"x": FIRST, "y": {**FIRST, "shape": [3], "data_offsets": [4, 16]}},
        "'y' at byte 4 of the data, which overlaps",
    ),
    "twice the same": ({"x": GOOD, "y": GOOD}, "'y' at byte 0 of the data, which overlaps"),
    "hole": (
        {"x": {**FIRST, "shape": [1], "data_offsets": [0, 4]}, "y": {**FIRST, "shape": [1],
         "data_offsets": [12, 16]}},
        "'y' at byte 12 of the data, which leaves a hole",
    ),
    "empty": ({}, r"describes a file of \d+ bytes, but it has"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_refuses_a_header_that_lies(tmp_path, lie):
    header, sentence = LIES[lie]
    file = write_raw(tmp_path / "lie.safetensors", header, bytes(16))
    with pytest.raises(ValueError, match=sentence) as caught:
        read_header(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    assert len(message.removeprefix(str(file))) < 450


def test_accepts_the_header_that_those_lies_are_made_from(tmp_path):
    assert read_header(write_raw(tmp_path / "x.safetensors", {"x": GOOD}, bytes(16))).keys() == {
        "x"
    }
    assert read_header(write_raw(tmp_path / "x.safetensors", {})) == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", bytes(7), (9).to_bytes(8, "little"), (2**64 - 1).to_bytes(8, "little") + b"{}"],
    ids=["empty", "a byte", "no length", "no header", "huge header"],
)
def test_refuses_a_file_too_short_for_its_header(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a whole safetensors file: it has"):
        read_header(tmp_path / "x.safetensors")


def test_refuses_a_header_beyond_the_limit(tmp_path, monkeypatch):
    file = write_raw(tmp_path / "x.safetensors", b"{}" + b" " * 14)
    assert read_header(file) == {}
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 10)
    with pytest.raises(ValueError, match=r"its header would take 16 \(at most 10\)"):
        read_header(file)


@pytest.mark.parametrize("kept", [0, 4, 8, 30, 60, -1])
def test_refuses_a_truncated_file(tmp_path, kept):
    file = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"x": numbers((4, 4), F32)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"not a whole safetensors file|describes a file of"):
        read_header(file)


def test_notices_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    file = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"x": numbers((4, 4), F32)}, file)
    tensor = read_header(file)["x"]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="the file ends within 'x'"):
        read(tensor, F32)
