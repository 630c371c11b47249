"""The simulator: a clock around the decisions of `engine.core`."""
