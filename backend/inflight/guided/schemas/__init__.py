"""JSON schemas as people write them, in any dialect, as schemas that llguidance follows exactly.

    writer.py     what is written for llguidance: `followed_schema`
    objects.py    its part for keywords of objects
    choices.py    its part for oneOf, not, and if
    overlap.py    whether two schemas can hold at once
    documents.py  dialects, references, and where a part is
    distinct.py   arrays whose items differ, which are watched while a text comes
    patterns.py   regular expressions
    matching.py   whether texts match them
    formats.py    formats
    spaces.py     the white space between the tokens of JSON

A text that follows what is written is valid by the schema, in the dialect that it names. The reverse does not hold
everywhere: where not all valid texts can be had, some are (unique items may have to come in the order of an enum).
What cannot be followed is refused by its path. Annotations are left out, and so are formats that nobody knows.
Plain functions; any thread.
"""

from inflight.guided.schemas.writer import followed_schema

__all__ = ["followed_schema"]
