"""What can be told from a traced program before it runs."""
