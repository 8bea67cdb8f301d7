"""`Packed`: a weight [out, in] whose numbers take 16 bits or fewer, as data."""

from __future__ import annotations

import dataclasses

import jax

SCHEMES = ("int8", "int4", "fp8", "nvfp4", "mxfp4", "mxfp8", "ternary")
PLAIN = "plain"  # of a `Packed` that holds the numbers themselves; nothing is packed by it
CODES = {
    **dict.fromkeys(("int4", "nvfp4", "mxfp4", "ternary"), "uint8"),
    **dict.fromkeys(("fp8", "mxfp8"), "float8_e4m3fn"),
    "int8": "int8",
}
SCALES = {
    **dict.fromkeys(("int8", "int4", "fp8"), ("bfloat16", "float16", "float32")),
    "nvfp4": ("float8_e4m3fn",),
    **dict.fromkeys(("mxfp4", "mxfp8"), ("uint8",)),
}
FIXED_GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
CODES_PER_BYTE = {"int4": 2, "nvfp4": 2, "mxfp4": 2, "ternary": 4}  # of others one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight [O, I] as codes and scales; a pytree whose leaves are the arrays.

    A number is value(code) * scale of its group * row_scale of its output; a part that is None
    counts as 1. Groups are `group_size` numbers side by side along I; G below is that size.

    codes: uint8, int8 or float8, rows of the weight one after the other:
        int8      int8 [O, I]            the code itself, -127 to 127
        int4      uint8 [O, I / 2]       c - 8, or c - zero where there are zero points
        fp8       float8_e4m3fn [O, I]
        nvfp4     uint8 [O, I / 2]       E2M1
        mxfp4     uint8 [O, I / 2]       E2M1
        mxfp8     float8_e4m3fn [O, I]
        ternary   uint8 [O, I / 4]       two bits, c - 1 with c of 0, 1, 2
        plain     bfloat16 or float16 [O, I]; a weight that is not packed (`Packed.of`)
        Codes of less than a byte lie lowest bits first: column 2i (4i) in the lowest bits.
    scale: [I / G, O], so that the scales of outputs that a tile computes lie side by side: the
        weight's dtype or float32 (int8, int4, fp8), float8_e4m3fn (nvfp4, G = 16), uint8 exponents
        with bias 127, that is E8M0 (mxfp4, mxfp8, G = 32). None where the rows' scale is all.
    zero: uint8 [I / G, O], int4's code for 0; None: 8.
    row_scale: float32 [O]: of int8 and fp8 without groups, nvfp4's tensor scale and ternary's gamma
        (a number for each output, so that weights of several scales can stand in one). Else None.
    """

    codes: jax.Array
    scale: jax.Array | None
    zero: jax.Array | None
    row_scale: jax.Array | None
    scheme: str = dataclasses.field(metadata={"static": True})
    group_size: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I) of the weight."""
        return self.codes.shape[0], self.codes.shape[1] * CODES_PER_BYTE.get(self.scheme, 1)

    def problem(self) -> str | None:
        """How its parts do not fit each other, if so; their shapes and dtypes suffice."""
        if self.scheme not in (*CODES, PLAIN):
            return f"no scheme is named {self.scheme!r}; there are {', '.join((*SCHEMES, PLAIN))}"
        codes = self.codes
        if not hasattr(codes, "ndim"):
            return f"the codes must be an array, got {codes!r:.60}"
        if codes.ndim != 2:
            return (
                f"the codes are {list(codes.shape)}, not those of one weight [O, I]; of stacked "
                "layers take one"
            )
        if self.scheme != PLAIN and codes.dtype.name != CODES[self.scheme]:
            return f"the codes of {self.scheme} are {CODES[self.scheme]}, got {codes.dtype}"
        o, i = self.shape
        if self.group_size is not None and (self.group_size < 1 or i % self.group_size):
            return f"groups of {self.group_size} do not divide the {i} inputs of a weight {[o, i]}"
        if self.group_size != FIXED_GROUPS.get(self.scheme, self.group_size):
            size = FIXED_GROUPS[self.scheme]
            return f"{self.scheme} has groups of {size}, got a group_size of {self.group_size}"
        groups = None if self.group_size is None else (i // self.group_size, o)
        zeros = ("uint8",) if self.scheme == "int4" else ()
        for name, part, shape, dtypes in (
            ("scale", self.scale, groups, SCALES.get(self.scheme, ())),
            ("zero", self.zero, groups, zeros),
            ("row_scale", self.row_scale, (o,), () if self.scheme == PLAIN else ("float32",)),
        ):
            if part is None:
                continue
            if not dtypes:
                kind = getattr(part, "dtype", type(part).__name__)
                return f"{self.scheme} has no {name}, got {kind} {list(getattr(part, 'shape', ()))}"
            if (found := getattr(part, "shape", ())) != shape:
                wanted = "None without a group_size" if shape is None else list(shape)
                return f"the {name} of a weight {[o, i]} is {wanted}, got {list(found)}"
            if part.dtype.name not in dtypes:
                return f"the {name} of {self.scheme} is {' or '.join(dtypes)}, got {part.dtype}"
        return None

    @classmethod
    def of(cls, weight: jax.Array) -> Packed:
        """The weight itself, as "plain"; its shape alone will do."""
        return cls(weight, None, None, None, PLAIN)
