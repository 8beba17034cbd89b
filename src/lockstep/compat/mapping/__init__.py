"""How `pmap` works, from the bottom up.

- `options`: what `pmap` was told, read and checked once.
- `leaves`: the leaves of a call; which axis of each is mapped, and do they agree.
- `devices`: which devices the mapped axis lies on.
- `shards`: between a mapped axis and a shard of size 1 on it.
- `moves`: inputs that lie elsewhere are moved, counted, and told of once.
- `donation`: donated inputs that are passed twice are copied, and told of once.
- `nested`: a map inside a map.
- `unbound`: collectives over a name that no map binds.
- `unmapped`: results that were declared the same on all devices.
- `program`: one function, for one structure of arguments, on one mesh.
- `small_leaves`: small results handed over together, where processes share a mesh.
- `host_local`: the same where several processes each hold a part of the mesh.
- `programs`: all programs of a function, found by the signature of a call.
"""
