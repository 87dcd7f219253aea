"""What is saved, how it becomes bytes, and where it is stored."""
