"""On which meshes of devices a model can lie."""

from __future__ import annotations

from jax.sharding import AxisType, NamedSharding, Sharding


def mesh_problem(sharding: Sharding) -> str | None:
    """Why no model can be spread so, if its axes are such that every op would have to say how its
    result is.
    """
    axes = sharding.mesh.axis_types if isinstance(sharding, NamedSharding) else ()
    if all(kind == AxisType.Auto for kind in axes):
        return None
    return (
        "the mesh must have axes of type Auto, as of "
        f"jax.make_mesh(..., axis_types=(AxisType.Auto,) * {len(axes)})"
    )
