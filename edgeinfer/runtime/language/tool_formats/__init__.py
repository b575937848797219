"""How model families write tool calls: as values (`families`), in a stream (`stream`), required by a
grammar (`grammar`).
"""
