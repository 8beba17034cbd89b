"""The devices: what JAX sees, advice where it sees too little, and the mesh of them."""

from lockstep.devices.describe import describe_devices
from lockstep.devices.mesh import make_mesh
from lockstep.devices.report import DeviceReport
from lockstep.simulation import simulate_devices

__all__ = ["DeviceReport", "describe_devices", "make_mesh", "simulate_devices"]
