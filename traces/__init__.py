"""Requests as data: schema, readers of public formats, generators, statistics."""
