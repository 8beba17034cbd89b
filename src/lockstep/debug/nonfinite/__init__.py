"""NaN and infinity: seen by a guard, traced to rows and lines, kept on disk.

`guard` watches a step and repeats it when numbers went bad; `diagnosis` says which
outputs, devices and rows hold them, with a step on one device from `alone` and the
line from `origin`; `record` and `replay` bring a saved step back.
"""
