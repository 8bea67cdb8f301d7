"""The ring of slots, in a kernel of two warpgroups that does nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernels import interpreted

from pallas_kernels import _compat
from pallas_kernels.ring import Ring

WIDTH = 128


def doubled(x: jax.Array, *, slots: int, claims: bool = True) -> jax.Array:
    """2 x of [M, 128]: a warpgroup brings rows, another one has each doubled and written."""
    count = len(x)

    def body(x_ref, out_ref, *, rows, result, full, empty):
        ring = Ring(full, empty, slots)

        def produce():
            def bring(n, _):
                slot = ring.claim(n) if claims else ring.slot(n)
                plgpu.copy_gmem_to_smem(x_ref.at[n], rows.at[slot], full.at[slot])
                return 0

            lax.fori_loop(0, count, bring, 0)
            if claims:
                ring.drain(jnp.int32(count))

        def consume():
            def double(n, _):
                row = rows.at[ring.wait(n)][...]
                plgpu.commit_smem()  # all threads have read it
                ring.give_back(n)
                result[...] = row * 2
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(result, out_ref.at[n])
                plgpu.wait_smem_to_gmem(0)
                return 0

            lax.fori_loop(0, count, double, 0)

        lax.cond(lax.axis_index("group") == 0, produce, consume)

    return _compat.kernel(
        body,
        name="doubled",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(1,),
        grid_names=("block",),
        num_threads=2,
        thread_name="group",
        scratch_types={
            "rows": plgpu.SMEM((slots, WIDTH), x.dtype),
            "result": plgpu.SMEM((WIDTH,), x.dtype),
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            "empty": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        },
        interpret=True,
    )(x)


@pytest.mark.parametrize(("count", "slots"), [(1, 2), (2, 2), (7, 3), (5, 1)])
def test_each_row_comes_once_and_in_turn(count, slots):
    x = np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH)
    y = interpreted(functools.partial(doubled, slots=slots), jnp.asarray(x))
    np.testing.assert_array_equal(y, 2 * x)


def test_who_does_not_claim_a_slot_is_seen():
    x = jnp.ones((5, WIDTH), jnp.float32)
    seen = AssertionError, jax.errors.JaxRuntimeError  # a race, or a barrier that was passed
    # Which one depends on whose thread is ahead; a barrier says how far it has come.
    with pytest.raises(seen, match="saw a race|[Bb]arrier (completed|is already at)"):
        interpreted(functools.partial(doubled, slots=2, claims=False), x)
