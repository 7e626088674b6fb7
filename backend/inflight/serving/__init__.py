"""Services for every front end, whatever its protocol: text in and out, replies, sessions, sizes.

A front end makes a `Prompt` of what a client sent and starts it with `InFlight`; `Sender` then answers its
`ClientStream`, with responses that a `ResponseMaker` of the protocol makes. One whose clients are coroutines
starts it with an `EngineSession` instead, and reads an `OutputStream`. docs/responses.md says which to take.
"""
