"""Options of `jax.config` that are gone."""

FLAGS: dict[str, tuple[object, str]] = {
    "jax_array": (True, "every array is a jax.Array"),
    "jax_jit_pjit_api_merge": (True, "jit and pjit are one"),
    "jax_omnistaging": (True, "it is always on"),
    "jax_parallel_functions_output_gda": (False, "every array is a jax.Array"),
    "jax_pmap_shmap_merge": (True, "pmap is jit of shard_map; the old one is gone"),
    "jax_pmap_no_rank_reduction": (
        True,
        "a shard of a pmap result keeps its leading axis of 1; the mapped function "
        "still sees its arrays without the device axis",
    ),
    "jax_enable_memories": (True, "it is always on"),
    "jax_sharding_in_types": (True, "it is a property of each mesh axis"),
    "jax_spmd_mode": ("allow_all", "eager operations follow their operands"),
    "jax_coordination_service": (True, "jax.distributed.initialize always uses it"),
    "jax_experimental_name_stack": (True, "it is always on"),
}
"""Options of `jax.config` that are gone: the value that today always holds, and why."""
