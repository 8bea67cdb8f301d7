import argparse
import re

import pytest

from benchmarks import loading


@pytest.mark.slow
def test_it_prints_two_times_and_their_ratio(capsys):
    sizes = {"rows": 2, "length": 32, "width": 128, "layers": 1, "vocab_size": 64}
    loading.main(argparse.Namespace(**sizes, dtype="float32", steps=2, turns=2))
    found = re.search(
        r"([\d.]+) ms a step .* ([\d.]+) ms .* ratio ([\d.]+)", capsys.readouterr().out
    )
    loader, device, ratio = map(float, found.groups())
    # Printed in hundredths of a millisecond, of which a step takes dozens
    assert loader / device == pytest.approx(ratio, rel=0.05)


def test_a_width_that_is_no_multiple_of_128_is_refused(capsys):
    for width in ("100", "0", "-128"):
        with pytest.raises(SystemExit, match="2"):
            loading.parse([f"--width={width}"])
        assert f"--width must be a multiple of 128, got {width}" in capsys.readouterr().err
    assert loading.parse(["--width", "256"]).width == 256


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--length=3", "--length must be at least 4, got 3"),
        ("--rows=0", "--rows must be at least 1, got 0"),
        ("--layers=0", "--layers must be at least 1, got 0"),
        ("--vocab-size=0", "--vocab-size must be at least 1, got 0"),
        ("--steps=0", "--steps must be at least 1, got 0"),
        ("--turns=-1", "--turns must be at least 1, got -1"),
        ("--dtype=float8", "invalid choice: 'float8'"),
    ],
)
def test_a_number_too_small_and_an_unknown_dtype_are_refused(capsys, option, said):
    with pytest.raises(SystemExit, match="2"):
        loading.parse([option])
    assert said in capsys.readouterr().err
