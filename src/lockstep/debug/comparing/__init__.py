"""`compare`: a step on N devices next to the same step on one, and why they differ."""
