"""Code of the pmap era on today's JAX."""

from lockstep.compat.pmap import pmap

__all__ = ["pmap"]
