"""Every name of the pmap era that is gone, renamed or means something else today.

The one table behind `install` (which restores names), `check` (which reports
them) and `fix` (which rewrites the pure renames). Its facts were read off JAX
0.10 and 0.12 and Flax 0.12; `tests/compat/test_names.py` holds it to the
installed versions.
"""

from collections.abc import Iterable, Iterator

from lockstep.compat.naming import Kind, Name, gone, renamed

_ERA = "lockstep.compat.era."
_COMPAT = "lockstep.compat."


def _data_parallel() -> Iterator[Name]:
    yield from gone(
        Kind.REMOVED,
        {
            "jax.device_put_replicated": "lockstep.replicate(tree, mesh), or "
            "lockstep.compat.device_put_replicated to keep the device axis",
            "jax.device_put_sharded": "lockstep.shard_batch(batch, mesh), or "
            "lockstep.compat.device_put_sharded to keep the device axis",
            "jax.replicate": "lockstep.replicate(tree, mesh), or "
            "lockstep.compat.replicate to keep the device axis",
            "jax.unreplicate": "lockstep.to_host(tree), or "
            "lockstep.compat.unreplicate for a stacked tree",
        },
        _COMPAT,
    )
    yield from gone(
        Kind.DEAD,
        {
            "jax.soft_pmap": "jax.vmap inside lockstep.per_device",
            "jax.xmap": "jax.shard_map",
            "jax.experimental.maps.xmap": "jax.shard_map",
            "jax.experimental.maps.thread_resources": "jax.sharding.get_mesh()",
            "jax.interpreters.sharded_jit": "jax.jit with in_shardings",
        },
    )


def _parallel_arrays() -> Iterator[Name]:
    """What `pmap` returned, and how code asked where it lies."""
    yield from gone(
        Kind.REMOVED,
        {
            "jax.sharding.PmapSharding": "jax.sharding.NamedSharding(mesh, P('data'))",
            "jax.interpreters.pxla.ShardedDeviceArray": "jax.Array",
            "jax.ShardedDeviceArray": "jax.Array",
            "jax.Array.device_buffer": "x.addressable_shards[0].data",
            "jax.Array.device_buffers": "[s.data for s in x.addressable_shards]",
            "flax.training.common_utils.pmean": "jax.lax.pmean(tree, 'batch')",
        },
        _ERA,
    )
    yield Name(
        "jax.experimental.global_device_array",
        Kind.DEAD,
        "jax.Array and jax.make_array_from_callback",
    )


def _bridge() -> Iterator[Name]:
    yield from renamed(
        "device_count local_device_count devices local_devices process_count "
        "process_index host_count=process_count host_id=process_index",
        "jax.lib.xla_bridge",
        "jax",
    )
    yield from renamed("get_backend", "jax.lib.xla_bridge", "jax.extend.backend")
    yield Name(
        "jax.lib.xla_bridge",
        Kind.DEAD,
        "the functions of jax itself, or jax.extend.backend",
    )


def _trees() -> Iterator[Name]:
    yield from renamed(
        "tree_map=map tree_multimap=map tree_leaves=leaves tree_flatten=flatten "
        "tree_unflatten=unflatten tree_structure=structure tree_reduce=reduce "
        "tree_transpose=transpose tree_all=all",
        "jax",
        "jax.tree",
    )
    yield from renamed("tree_multimap=tree_map", "jax.tree_util")
    yield from renamed(
        "treedef_is_leaf treedef_children treedef_tuple", "jax", "jax.tree_util"
    )


def _types() -> Iterator[Name]:
    """Names that code of the era wrote in annotations and in isinstance."""
    for old, rename in {
        "jax.random.KeyArray": "jax.Array",
        "jax.random.PRNGKeyArray": "jax.Array",
        "jax.numpy.DeviceArray": "jax.Array",
        "jax.interpreters.xla.DeviceArray": "jax.Array",
        "jax.xla.DeviceArray": "jax.Array",
        "jax.xla.Device": "jax.Device",
        "jax.interpreters.xla.Device": "jax.Device",
        "jax.lib.xla_client.Device": "jax.Device",
        "jax.lib.xla_extension.Device": "jax.Device",
        "jax.lib.xla_extension.ArrayImpl": "jax.Array",
        "jax.lib.xla_extension.XlaRuntimeError": "jax.errors.JaxRuntimeError",
        "jax.core.ConcretizationTypeError": "jax.errors.ConcretizationTypeError",
        "jax.abstract_arrays.ShapedArray": "jax.core.ShapedArray",
    }.items():
        yield Name(old, Kind.RENAMED, rename, rename, rename)


def _meshes() -> Iterator[Name]:
    for module, names in {
        "jax.experimental": "PartitionSpec",
        "jax.experimental.maps": "Mesh mesh=Mesh",
        "jax.experimental.pjit": "PartitionSpec",
        "jax.experimental.sharding": "Mesh NamedSharding PartitionSpec Sharding "
        "MeshPspecSharding=NamedSharding SingleDeviceSharding",
        "jax.interpreters.pxla": "Mesh PartitionSpec",
        "jax.interpreters.sharded_jit": "PartitionSpec",
        "jax.sharding": "MeshPspecSharding=NamedSharding use_mesh=set_mesh "
        "XLACompatibleSharding=Sharding",
    }.items():
        yield from renamed(names, module, "jax.sharding")
    yield from renamed("with_sharding_constraint", "jax.experimental.pjit", "jax.lax")
    yield Name(
        "jax.sharding.PositionalSharding",
        Kind.DEAD,
        "jax.sharding.NamedSharding, with a named axis for each split axis",
    )
    yield Name("jax.sharding.GSPMDSharding", Kind.DEAD, "jax.sharding.NamedSharding")


def _config() -> Iterator[Name]:
    yield Name(
        "jax.config.config", Kind.RENAMED, "jax.config", "jax.config", "jax.config"
    )
    yield from gone(
        Kind.DEAD,
        {
            "jax.config.FLAGS": "jax.config.read('jax_...')",
            "jax.config.enable_omnistaging": "nothing: it is always on",
        },
        _ERA,
    )
    yield Name(
        "jax.spmd_mode",
        Kind.DEAD,
        "jax.jit: eager operations on arrays of several processes are refused "
        "where they would not be local",
    )


def _numpy() -> Iterator[Name]:
    yield from renamed(
        "row_stack=vstack round_=round product=prod alltrue=all sometrue=any "
        "cumproduct=cumprod trapz=trapezoid fix=trunc",
        "jax.numpy",
    )
    yield from renamed("tril triu", "jax.scipy.linalg", "jax.numpy")
    yield from renamed("normalize=standardize", "jax.nn")
    yield from gone(
        Kind.RENAMED,
        {
            "jax.numpy.msort": "jnp.sort(x, axis=0)",
            "jax.numpy.in1d": "jnp.isin(x.ravel(), y)",
            "jax.random.shuffle": "jax.random.permutation(key, x, axis, "
            "independent=True)",
            "jax.lax.tie_in": "its second argument alone",
            "jax.lax.pvary": "jax.lax.pcast(x, axis_name, to='varying')",
            "jax.ops.index": "the index itself, as in x.at[1, :].set(y)",
            "jax.ops.index_update": "x.at[index].set(y)",
            "jax.ops.index_add": "x.at[index].add(y)",
            "jax.ops.index_mul": "x.at[index].multiply(y)",
            "jax.ops.index_min": "x.at[index].min(y)",
            "jax.ops.index_max": "x.at[index].max(y)",
        },
        _ERA,
    )


def _modules() -> Iterator[Name]:
    yield from renamed("optimizers stax", "jax.experimental", "jax.example_libraries")
    yield from renamed("linear_util", "jax", "jax.extend")
    yield from renamed(
        "StepTraceContext=StepTraceAnnotation TraceContext=TraceAnnotation",
        "jax.profiler",
    )
    yield from renamed("enable_x64", "jax.experimental", "jax")
    yield from renamed(
        "initialize_cache=set_cache_dir",
        "jax.experimental.compilation_cache.compilation_cache",
    )
    yield from renamed("clear_backends", "jax", "jax.extend.backend")
    yield from renamed(
        "Primitive Jaxpr ClosedJaxpr JaxprEqn Literal Var jaxpr_as_fun",
        "jax.core",
        "jax.extend.core",
    )
    yield from renamed("get_aval=typeof", "jax.core", "jax")
    yield from renamed("partial", "jax", "functools")
    yield from renamed("vectorize", "jax.experimental.vectorize", "jax.numpy")
    yield from renamed(
        "jit grad value_and_grad vmap pmap device_put device_get", "jax.api", "jax"
    )
    yield from gone(
        Kind.RENAMED, {"jax.experimental.disable_x64": "jax.enable_x64(False)"}, _ERA
    )
    yield Name(
        "jax.experimental.optix", Kind.RENAMED, "optax, which it became", "", "optax"
    )
    no_setup = "nothing: JAX finds the TPUs of Colab by itself"
    yield from gone(Kind.DEAD, {"jax.tools.colab_tpu.setup_tpu": no_setup}, _ERA)
    yield Name("jax.tools.colab_tpu", Kind.DEAD, no_setup)


def _dead() -> Iterator[Name]:
    """Parts of JAX that have no equal today."""
    yield from gone(
        Kind.DEAD,
        {
            "jax.api": "the functions of jax itself",
            "jax.util": "your own few lines: zip(strict=True), math.prod",
            "jax.experimental.host_callback": "jax.pure_callback, "
            "jax.experimental.io_callback or jax.debug.callback",
            "jax.experimental.maps": "jax.sharding and jax.shard_map",
            "jax.experimental.loops": "jax.lax.scan, while_loop or fori_loop",
            "jax.experimental.export": "jax.export",
            "jax.lib.xla_client": "jax and jax.extend",
            "jax.lib.xla_extension": "jax and jax.extend",
            "jax.abstract_arrays": "jax.core.ShapedArray",
            "jax.custom_transforms": "jax.custom_vjp or jax.custom_jvp",
            "jax.defvjp_all": "jax.custom_vjp",
            "jax.defvjp": "jax.custom_vjp",
            "jax.defjvp": "jax.custom_jvp",
            "jax.mask": "padding and a mask in the batch",
            "jax.shapecheck": "jax.eval_shape",
            "jax.xla_computation": "jax.jit(f).lower(...).compiler_ir()",
            "jax.curry": "functools.partial",
            "jax.dlpack.to_dlpack": "the array itself, which from_dlpack takes",
            "jax.core.raise_to_shaped": "jax.typeof(x)",
            "jax.core.axis_frame": "jax.lax.axis_size(axis_name), which is a number "
            "and no frame",
        },
    )


def _libraries() -> Iterator[Name]:
    """Flax and Optax: what is gone there is reported, never faked."""
    yield from gone(
        Kind.DEAD,
        {
            "flax.optim": "optax, with flax.training.train_state.TrainState",
            "flax.nn": "flax.linen: its modules are built and applied otherwise",
            "flax.deprecated": "flax.linen and optax",
        },
    )
    for old, rename in {
        "flax.optim.dynamic_scale": "flax.training.dynamic_scale",
        "flax.optim.DynamicScale": "flax.training.dynamic_scale.DynamicScale",
        "optax.additive_weight_decay": "optax.add_decayed_weights",
    }.items():
        yield Name(old, Kind.RENAMED, rename, rename, rename)


def _numbers() -> Iterator[Name]:
    """What arrays answer otherwise."""
    yield Name("jax.Array.to_py", Kind.DEAD, "numpy.asarray(x)")
    yield Name("jax.Array.device", Kind.CHANGED, "x.device, or x.devices()")
    for number in "float", "int", "complex":
        conversion = f"{_ERA}to_{number}"
        yield Name(f"jax.Array.__{number}__", Kind.CHANGED, "x.item()", "", conversion)


def _still_there() -> Iterator[Name]:
    """Names that raise nothing: `install` gives the first ones their old meaning."""
    yield Name(
        "jax.pmap",
        Kind.CHANGED,
        "lockstep.compat.pmap, then lockstep.per_device, then lockstep.parallelize",
        "",
        "lockstep.compat.pmap",
    )
    yield Name(
        "jax.numpy.clip",
        Kind.CHANGED,
        "jnp.clip(x, min=..., max=...): a, a_min and a_max are gone",
        "",
        _ERA + "clip",
    )
    for module, names in {
        "flax.jax_utils": "replicate unreplicate prefetch_to_device",
        "flax.training.common_utils": "get_metrics stack_forest",
    }.items():
        for name in names.split():
            compat = _COMPAT + name
            yield Name(f"{module}.{name}", Kind.CHANGED, compat, "", compat)


def _old() -> Iterator[Name]:
    """Names that still work, but not for ever."""
    for old, new in {
        "jax.host_id": "jax.process_index",
        "jax.host_count": "jax.process_count",
    }.items():
        yield Name(old, Kind.OLD, new, new)
    yield Name("jax.experimental.pjit.pjit", Kind.OLD, "jax.jit", "", _ERA + "pjit")
    yield from gone(
        Kind.OLD,
        {
            "jax.host_ids": "range(jax.process_count())",
            "jax.experimental.shard_map.shard_map": "jax.shard_map: its check_vma "
            "was check_rep, and gradients differ under it",
            "jax.interpreters.pxla.thread_resources": "jax.sharding.get_mesh()",
        },
    )


def _table(*groups: Iterable[Name]) -> dict[str, Name]:
    rows = [name for group in groups for name in group]
    table = {row.old: row for row in rows}
    assert len(table) == len(rows), "a name stands twice in the table"
    return table


NAMES: dict[str, Name] = _table(
    _data_parallel(),
    _parallel_arrays(),
    _bridge(),
    _trees(),
    _types(),
    _meshes(),
    _config(),
    _numpy(),
    _modules(),
    _dead(),
    _libraries(),
    _still_there(),
    _numbers(),
    _old(),
)
"""Every row, by its old dotted name."""


def look_up(dotted: str) -> Name | None:
    """The row for a dotted name, or for the longest module or class it lies in.

    Example:
        >>> look_up("jax.tree_map").today
        'jax.tree.map'
        >>> look_up("jax.experimental.optimizers.adam").today
        'jax.example_libraries.optimizers'
        >>> look_up("jax.tree.map") is None
        True
    """
    parts = dotted.split(".")
    for end in range(len(parts), 1, -1):
        row = NAMES.get(".".join(parts[:end]))
        if row is not None:
            return row
    return None
