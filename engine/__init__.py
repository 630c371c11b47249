"""The engine: `engine.core` decides, `engine.models` and `engine.exec` compute. Importing this loads nothing heavy."""
