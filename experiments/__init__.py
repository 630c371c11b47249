"""The questions, one module each, and the command line."""
