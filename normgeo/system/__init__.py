"""The machine: files that are there whole, memory, processes, progress, and time that can be trusted."""
