"""The supervised loop: its module, its states and its table."""
