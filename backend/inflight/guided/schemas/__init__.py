"""Translates JSON schemas of any dialect into schemas that llguidance follows exactly.

    writer.py     the translation: `followed_schema`
    objects.py    the translation of object keywords
    choices.py    the translation of oneOf, not and if
    overlap.py    whether two schemas have a common value
    documents.py  dialects, references and paths
    distinct.py   uniqueItems, which is watched while a text is generated
    patterns.py   regular expressions
    matching.py   whether texts match regular expressions
    formats.py    formats
    spaces.py     the white space between the tokens of JSON

A text that follows the translation is valid by the schema, in its dialect. The reverse does not always hold: where
not all valid texts can be generated, some are (unique items may have to come in the order of an enum). Unsupported
parts are refused by their path. Annotations and unknown formats are ignored. Plain functions; any thread.
"""

from inflight.guided.schemas.writer import followed_schema

__all__ = ["followed_schema"]
