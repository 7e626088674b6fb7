"""Translate JSON schemas of any dialect to schemas that llguidance enforces exactly.

    writer.py     the translation: `followed_schema`
    objects.py    the translation of object keywords
    choices.py    the translation of oneOf, not and if
    overlap.py    whether two schemas have a common value
    documents.py  dialects, references and paths
    distinct.py   uniqueItems, which is checked while a text is generated
    patterns.py   regular expressions
    matching.py   whether texts match regular expressions
    formats.py    formats
    spaces.py     the white space between the tokens of JSON

A text that the translation allows is valid by the schema, in its dialect. The reverse does not always hold:
sometimes only some of the valid texts are allowed (for instance, unique items must be in the order of an
enum). The error for an unsupported part has its path. Annotations and unknown formats are ignored. Any
thread.
"""

from inflight.guided.schemas.writer import followed_schema

__all__ = ["followed_schema"]
