"""What a compiled step sends between the devices, and whether it averages."""
