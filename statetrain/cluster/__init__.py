"""The processes of a run and the signals they get."""
