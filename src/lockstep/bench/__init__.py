"""Contenders on one piece of work, timed in turns: `lockstep bench`."""
