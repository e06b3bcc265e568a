"""The command line: one file per noun, everything heavy imported inside functions."""
